"""Kinds of study: the grid, scores, claims and page that tell one from another; and those that are
units, each with a product of its own, made on workers."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

from flows.naming import unknown_name
from flows.settings import adapter, changes, replace_setting, set_words, validated, values_of
from storage.documents import read_document, understood
from storage.files import write_json
from storage.object_store import open_place
from tasks.campaign.state import log_notice, resume_if_stopped
from tasks.cluster.workers import Workers, dask_client
from tasks.orchestration import task
from tasks.page.study_page import StudyPage
from tasks.progress import stage_progress
from tasks.study.executor import Outcome, Unit, run_units
from tasks.study.products import SETTINGS, Cost, Folder

S = TypeVar("S")
P = TypeVar("P")
Claims = Callable[[Mapping[str, Any]], list[dict[str, Any]]]
FIX = "restore it, or use another --store"


@dataclass(frozen=True, kw_only=True)
class StudyKind(ABC, Generic[S, P]):
    """A study with settings S, and a plan P of what is to be run for it.

    `paper`: where that asks the question. `presets`: the study by size. `costs`: estimates by part
    on a device, measured on this machine in some seconds. `figures` of the page are of a plan and a
    record, `claims` are decided on one. `parts`: the setting with the parts of which some can be
    chosen by name; `each`: what a setting of every part begins with; `unit` heads their costs.
    `products` are in the store beside the record, its pictures and the `page`. `flow` is Prefect's
    name.
    """

    name: str
    title: str
    question: str
    paper: str
    presets: Mapping[str, Callable[[], S]]
    costs: Callable[[P, str], list[Cost]]
    figures: Callable[[P, Mapping[str, Any]], Sequence[Any]]
    claims: Claims
    page: StudyPage
    settings: ClassVar[Any]
    parts: ClassVar[str]
    each: ClassVar[str] = ""
    unit: ClassVar[str]
    products: ClassVar[frozenset[str]]
    flow: ClassVar[str]
    whole_units: ClassVar[bool] = False
    """Costs are upper bounds, each of a unit that one worker does alone."""

    @property
    def words(self) -> tuple[str, ...]:
        """The command, `study width` or `audit`."""
        return ("audit",) if self.name == "audit" else ("study", self.name)

    @property
    def record(self) -> str:
        return f"{self.page.name}.json"

    @property
    def pictures(self) -> str:
        return f"{self.page.name}-pictures.npz"

    @property
    def entries(self) -> frozenset[str]:
        """Names of all that a study makes in its store."""
        stem = self.page.name
        made = {self.record, self.pictures, f"{stem}.html", f"{stem}-data", SETTINGS}
        return self.products | made

    @abstractmethod
    def size(self, study: S) -> str:
        """`5 autoencoders, 6 masks`."""

    @abstractmethod
    def plan(self, study: S, store: Path, device: str) -> P:
        """The images, and what is to be run on them; raises what either refuses."""

    @abstractmethod
    def facts(self, plan: P) -> Iterable[tuple[str, Mapping[str, str]]]:
        """Split and facts of every set of images that was read."""

    def notes(self, plan: P) -> list[str]:
        """Lines for the screen before the work begins."""
        del plan
        return []

    def planned(self, plan: P) -> str:
        """What the costs cover, such as `60 units`."""
        return self.size(plan.study)  # type: ignore[attr-defined]

    @abstractmethod
    def make(self, plan: P, store: Path, workers: Workers) -> Any:
        """Train, attack and score what is missing. `failed` of the outcome has, by name, why units
        failed."""

    @abstractmethod
    def describe(self, plan: P, ended: Any) -> tuple[list[Any], dict[str, Any]]:
        """Identity, of which the fingerprint is made, and the record's own entries."""

    @abstractmethod
    def keep_pictures(self, store: Path, plan: P, ended: Any, record: Mapping[str, Any]) -> None:
        """Writes what the page shows beside the record."""

    def exceeded(self, record: Mapping[str, Any]) -> list[str]:
        """Limits that were set and that the numbers exceed, in words."""
        del record
        return []

    @abstractmethod
    def rows(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The result as a table for a screen."""

    def named(self, preset: str, settings: Mapping[str, Any] | None = None, *, only: str = "") -> S:
        """Return the study of a preset with single settings replaced. `only` keeps the parts whose
        name contains it; numbers of parts in settings then count those.

        Raises ValueError naming what is wrong and the fix.
        """
        if preset not in self.presets:
            raise ValueError(unknown_name("preset", preset, self.presets))
        study = self.presets[preset]()
        if only:
            parts = getattr(study, self.parts)
            some = tuple(part for part in parts if only in part.name)
            if not some:
                names = (part.name for part in parts)
                raise ValueError(unknown_name(self.parts.removesuffix("s"), only, names))
            study = self.narrowed(study, {self.parts: some, "only": only})
        return self.changed(study, settings or {})

    def narrowed(self, study: S, changes: Mapping[str, Any]) -> S:
        """The study of some of its parts."""
        return replace(study, **changes)  # type: ignore[type-var]

    def changed(self, study: S, settings: Mapping[str, Any]) -> S:
        """A study with single settings replaced, as `named` does."""
        tree = self.to_json(study)
        self.replace(tree, settings)
        return cast(S, validated(self.settings, tree))

    def replace(self, tree: dict[str, Any], settings: Mapping[str, Any]) -> None:
        """Sets single settings of a study that is a JSON object: `EACH.setting` in every part that
        has it, or `NAME.setting` in the part of that name."""
        parts = tree[self.parts] if self.each else []
        by_name = {part["name"]: [part] for part in parts}
        for name, value in settings.items():
            first, _, own = name.partition(".")
            chosen = by_name.get(first, []) if own else []
            if own and first == self.each:
                chosen = [part for part in parts if own in dict(values_of(part))] or parts
            for part in chosen:
                replace_setting(part, own, value)
            if not chosen:
                replace_setting(tree, name, value)

    def resolve(
        self,
        preset: str | None,
        settings: Mapping[str, Any] | None,
        store: Path,
        *,
        only: str = "",
    ) -> S:
        """The study that `store` holds, unless a size or some parts are asked for; else the preset,
        at a CPU's size by default. Raises ValueError as `named` does, and for a store of another
        study."""
        path = store / SETTINGS
        if preset is not None or only or not path.exists():
            return self.named(preset or "cpu", settings, only=only)
        tree = read_document(path, FIX)
        if tree.get("name") != self.name:
            raise ValueError(
                f"{store} holds study {tree.get('name')!r}, not {self.name!r}; use another --store"
            )
        with understood(path, FIX):
            kept = cast(S, validated(self.settings, tree))
        return self.changed(kept, settings or {})

    def to_json(self, study: S) -> dict[str, Any]:
        """The study as a JSON object."""
        return dict(adapter(self.settings).dump_python(study, mode="json"))

    def command(self, study: Any) -> str:
        """The command that makes this study from nothing."""
        base = self.to_json(self.named(study.preset, only=study.only))
        found = self.differences(base, self.to_json(study))
        words = ["palimpsest", *self.words, "--preset", study.preset]
        if data := found.pop("data", None):
            words += ["--data", data]
        if study.only:
            words += ["--only", study.only]
        return shlex.join([*words, *set_words(found)])

    def differences(self, base: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
        """Settings that are not those of the preset, and `data` for its option."""
        return changes(base, tree) | {"data": tree["data"]}


class UnitPlan(Protocol):
    """Units, and those that follow from one that is done."""

    study: Any
    root: str
    device: str

    @property
    def folder(self) -> Folder: ...

    @property
    def n_units(self) -> int: ...

    def first_units(self) -> list[Unit]: ...

    def more_units(self, unit: Unit, given: Mapping[str, Any]) -> Iterable[Unit]: ...


U = TypeVar("U", bound=UnitPlan)


class UnitStudy(StudyKind[S, U], Generic[S, U]):
    """A study whose plan is units, made in rounds."""

    def rounds(self, plan: U) -> Iterator[list[Unit]]:
        """Units, of which a later round may depend on the products of those before."""
        yield plan.first_units()

    def planned(self, plan: U) -> str:
        return f"{plan.n_units:,} units"

    def make(self, plan: U, store: Path, workers: Workers) -> Outcome:
        store.mkdir(parents=True, exist_ok=True)
        write_json(store / SETTINGS, self.to_json(plan.study))
        if notice := resume_if_stopped(open_place(str(store))):
            log_notice(notice)
        title = " ".join(self.words).capitalize()
        return make_products(plan, self.rounds, title, workers)


@task(name="make products")
def make_products(
    plan: UnitPlan,
    rounds: Callable[[Any], Iterable[list[Unit]]],
    title: str,
    workers: Workers,
) -> Outcome:
    """Every unit's product, on Dask workers that live as long as this task."""
    if n_products := len(list(plan.folder.place.glob("*.json"))):
        log_notice(
            f"{title}: goes on, {n_products:,} products are kept, of some {plan.n_units:,} units"
        )
    with (
        stage_progress(title, "unit") as advance,
        dask_client(workers, threads=plan.study.threads) as client,
    ):
        return run_units(
            rounds(plan),
            client,
            place=open_place(plan.root),
            device=plan.device,
            threads=plan.study.threads,
            then=plan.more_units,
            on_progress=advance,
            n_units=plan.n_units,
        )
