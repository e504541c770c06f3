"""The study of the span attack by images, what the attacker has, and training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.study_kind import UnitStudy
from storage.files import text_bytes, write_file
from tasks.campaign.state import CONTROL_FILE
from tasks.families.weights.study import span as spans
from tasks.page.formats import plural
from tasks.study.executor import Outcome
from tasks.study.products import npz_of

KINDS = {
    "cifar10": spans.Kind(data="folder:cifar10"),
    "grey": spans.Kind(data="folder:cifar10", channels=1),
    "digits": spans.Kind(data="mnist:mnist", size=28, channels=1, skip=8000),
    "photographs": spans.Kind(data="photos"),
    "photographs64": spans.Kind(data="photos", size=64, split="train"),
    "mine": spans.Kind(data="", split="train"),
}
BASES = (spans.Row(), spans.Row(optimiser="SGD, momentum", has="known start"))
"""An Adam checkpoint, and weights with their start: other rows are one setting away, as a rule."""


def cpu() -> spans.SpanStudy:
    """Layers of 1000 and 200: hours on two cores."""
    rows = dict.fromkeys([*BASES, *_rows()])
    return spans.SpanStudy(preset="cpu", kinds=dict(KINDS), rows=tuple(rows))


def _rows() -> Iterator[spans.Row]:
    for base in BASES:
        yield replace(base, n=400)
        for kind in KINDS:
            n_images = (50, 100) if kind == "photographs64" else (50, 100, 200)  # 219 there
            yield from (replace(base, images=kind, n=n) for n in n_images)
        yield replace(base, images="digits", n=300)
        yield replace(base, divided=False)
        yield from (replace(base, optimiser=optimiser) for optimiser in spans.OPTIMISERS)
    yield from (replace(base, has=has) for base in BASES for has in spans.GIVEN)
    for start in (1e-4, 1e-3):
        row = spans.Row(n=100, optimiser="SGD", start=start)
        yield from (replace(row, has=has) for has in ("known start", "weights alone"))


def tiny() -> spans.SpanStudy:
    """For tests: small photographs, every kind of attacker, seconds."""
    row = spans.Row(images="photographs", n=20, optimiser="SGD, momentum")
    kinds = {
        "photographs": spans.Kind(data="photos", size=16),
        "mine": replace(KINDS["mine"], size=16),
    }
    rows = (*(replace(row, has=has) for has in spans.GIVEN), replace(row, images="mine"))
    victim = spans.Victim(widths=(64, 16), epochs=10, batch_size=10)
    return spans.SpanStudy(preset="tiny", kinds=kinds, rows=rows, victim=victim, n_shown=2)


class AttackerStudy(UnitStudy[spans.SpanStudy, spans.SpanPlan]):
    """Images, attackers and trainings: `SpanStudy`."""

    settings = spans.SpanStudy
    parts, unit = "rows", "images"
    products = frozenset({"products", "span.md", CONTROL_FILE})
    flow = "study-span"

    def size(self, study: spans.SpanStudy) -> str:
        return plural(len(study.chosen), "row", "rows")

    def narrowed(self, study: spans.SpanStudy, changes: Mapping[str, Any]) -> spans.SpanStudy:
        """Keeps all rows: those that stand in the store are shown, too."""
        return replace(study, only=changes["only"])

    def plan(self, study: spans.SpanStudy, store: Path, device: str) -> spans.SpanPlan:
        return spans.SpanPlan(study, str(store), device)

    def facts(self, plan: spans.SpanPlan) -> list[tuple[str, Mapping[str, str]]]:
        return [(name, images.facts) for name, images in plan.images.items()]

    def describe(self, plan: spans.SpanPlan, ended: Outcome) -> tuple[list[Any], dict[str, Any]]:
        hashes = {name: images.content_hash for name, images in plan.images.items()}
        rows = [facts for _arrays, facts in plan.standing()]
        seconds = {n: round(sum(row["cells"][n] for row in rows)) for n in spans.SPAN_PAGE.stages}
        failed = [{"unit": unit, "why": why} for unit, why in sorted(ended.failed.items())]
        source = dict(self.facts(plan))
        body = {"rows": rows, "seconds": seconds, "source": source, "failed": failed}
        return [self.to_json(plan.study), hashes], body

    def keep_pictures(
        self, store: Path, plan: spans.SpanPlan, _ended: Outcome, record: Mapping[str, Any]
    ) -> None:
        """The table as Markdown, too."""
        pictures = {
            f"{facts['name']}/{side}": array
            for arrays, facts in plan.standing()
            for side, array in arrays.items()
        }
        write_file(store / self.pictures, npz_of(pictures))
        write_file(store / "span.md", text_bytes(spans.markdown(record)))

    def rows(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One row each: what came back, and of decoys."""
        names = ("identified", "identified decoys", "good", "good decoys", "seconds")
        found = [(row["name"], row["cells"]) for row in record["rows"]]
        return [{"row": name} | {n: cells.get(n, "") for n in names} for name, cells in found]


SPAN = AttackerStudy(
    name="span",
    title="The span attack by images, source and optimiser",
    question="From which files of which networks does the span attack give images back?",
    paper="ours",
    presets={"cpu": cpu, "tiny": tiny},
    costs=spans.costs_of,
    figures=lambda _plan, _record: [],
    claims=lambda _record: [],
    page=spans.SPAN_PAGE,
)
