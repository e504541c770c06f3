"""`palimpsest study`: studies of the papers, from a grid to a page; and `palimpsest audit`: what a
network leaks of its training images, and which defence is worth its price. An audit's exit code is
3 where a limit of `--fail-above` is exceeded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from flows.cli import options as cli
from flows.cli.attack_file import NetworkFacts

if TYPE_CHECKING:
    from flows.study_kind import StudyKind

study_app = typer.Typer()
ABOVE_LIMIT = 3


@cli.command(study_app, "study")
def study(
    name: Annotated[str, typer.Argument(help="Which; `list` shows all of them.")],
    *,
    preset: Annotated[
        Literal["paper", "cpu", "tiny"] | None,
        "The size; default: that of the store, else cpu. tiny: autoencoder, inversion "
        "and span only, a trial.",
    ] = None,
    data: cli.Data = None,
    store: Annotated[
        Path | None, "--store", "--out", "Default: palimpsest-runs/study-NAME."
    ] = None,
    skip_corrupt: cli.SkipFiles = False,
    settings: Annotated[
        list[str] | None,
        "--set",
        "name=value; experiment.* is set in every cell, victim.* in every autoencoder, "
        "source.* in every source of `inversion`. Repeatable.",
    ] = None,
    only: Annotated[str, "Just the parts (cells, rows, sources, ...) whose name has this."] = "",
    computed: cli.Computed,
    dry_run: Annotated[bool, "Only say what it would take."] = False,
    fresh: cli.FreshStore = False,
) -> None:
    """Attack every victim of a grid, score what comes back, and check the paper's claims.

    `autoencoder` is the study of the autoencoder paper, `inversion` of the MixCon paper, `span` and
    `span-networks` are ours, the others are of the KKT paper.

    A study that was interrupted goes on where it was; settings are then those of its store.

    Examples: `palimpsest study list` · `palimpsest study multiclass --dry-run` · `palimpsest study
    width --data folder:cifar10` · `palimpsest study autoencoder --only fc10` · `palimpsest study
    inversion --only digits` · `palimpsest study losses --set n_victims=5 --set
    experiment.training.epochs=60000` · `palimpsest study span --only digits --set
    kinds.digits.data=mnist:PATH`
    """
    from flows.settings import parse_assignments
    from flows.study import STUDIES, claim_rows, kind_of

    if name == "list":
        for kind in STUDIES.values():
            sizes = (f"{preset}: {kind.size(make())}" for preset, make in kind.presets.items())
            cli.out.print(f"[bold]{kind.name}[/]  {kind.question}")
            cli.out.print(f"    {kind.paper}; {'; '.join(sizes)}", style="dim")
        return
    store = store or Path(f"palimpsest-runs/study-{name}")
    chosen: dict[str, Any] = {} if data is None else {"data": data}
    if skip_corrupt:
        chosen["skip_corrupt"] = True
    chosen |= parse_assignments(settings or [])
    kind = kind_of(name)
    ended = _run(
        kind, store, preset, chosen, only=only, computed=computed, dry_run=dry_run, fresh=fresh
    )
    if ended is None:
        return
    record, failure = ended
    for row in claim_rows(record):
        cli.out.print(f"[bold]{row['here']}[/]: {escape(row['claim'])}", soft_wrap=True)
        cli.out.print(f"    {escape(row['ours'])}", style="dim", soft_wrap=True)
    page = store / f"{kind.page.name}.html"
    cli.out.print(f"Page: [bold]{escape(str(page.absolute()))}[/]", soft_wrap=True)
    if failure is not None:
        raise failure


def _run(
    kind: StudyKind[Any, Any], store: Path, preset: str | None, chosen: dict[str, Any], *,
    only: str, computed: cli.Computed, dry_run: bool, fresh: bool,
) -> tuple[dict[str, Any], Exception | None] | None:  # fmt: skip
    """The record of a study that has ended, and the failure or limit to report in the end; None
    after a dry run, which only shows the costs."""
    from flows.study import LimitExceededError, UnitsFailedError, run_study
    from tasks.cluster.workers import check_workers, device_of

    if fresh and preset is None:  # the settings of the store go with it
        preset = "cpu"
    study, workers = kind.resolve(preset, chosen, store, only=only), computed.workers
    if dry_run:
        show_costs(kind, study, store, computed)
        return None
    failure: Exception | None = None
    if fresh:
        check_workers(workers)
    plan = kind.plan(study, store, device_of(workers))
    if fresh:
        option = "--out" if kind.name == "audit" else "--store"
        cli.start_over(store, kind.entries, option=option)
    cli.out.print(
        f"[bold]palimpsest {' '.join(kind.words)}[/]  {study.preset}, {kind.size(study)}, "
        f"{f'on {escape(study.data)}, ' if study.data else ''}store {escape(str(store))}"
    )
    for split, facts in kind.facts(plan):
        cli.show_images(split, facts)
    for note in kind.notes(plan):
        cli.out.print(note, style="dim", markup=False, soft_wrap=True)
    try:
        flow = run_study.renamed(name=kind.flow)
        flow(kind.name, store, preset, chosen, only=only, workers=workers)
    except (UnitsFailedError, LimitExceededError) as error:
        failure = error
    record = json.loads((store / kind.record).read_bytes())
    _show_table(kind.rows(record))
    return record, failure


def show_costs(kind: StudyKind[Any, Any], study: Any, store: Path, computed: cli.Computed) -> None:
    """Every part with its estimates, and the sums."""
    from tasks.campaign.state import age_text
    from tasks.devices import resolve_device, usable_cores

    where = resolve_device(computed.device)
    plan = kind.plan(study, store, where)
    for split, facts in kind.facts(plan):
        cli.show_images(split, facts)
    costs = kind.costs(plan, where)
    rows: list[dict[str, Any]] = []
    for cost in costs:
        seconds = {name: age_text(s) for name, s in cost.seconds_of.items()}
        memory = {} if cost.memory_bytes is None else {"memory": cli.size_text(cost.memory_bytes)}
        disk = {"disk": cli.size_text(cost.disk_bytes)}
        rows.append({kind.unit: cost.name, **cost.counts, **seconds, **memory, **disk})
    _show_table(rows, numbers=True)
    work, disk_bytes = (sum(getattr(c, of) for c in costs) for of in ("seconds", "disk_bytes"))
    n = computed.n_workers or (1 if where != "cpu" else usable_cores())
    longest = max(cost.seconds for cost in costs) if kind.whole_units else 0.0
    memory_bytes = max(cost.memory_bytes or 0 for cost in costs)
    memory_text = f"{cli.size_text(memory_bytes)} of memory per worker at most, "
    cli.out.print(
        f"{kind.planned(plan)}: {'at most ' if kind.whole_units else ''}about "
        f"{age_text(work)} of work on {where}, "
        f"{age_text(max(longest, work / n))} on {n} workers; "
        f"{memory_text if memory_bytes else ''}{cli.size_text(disk_bytes)} of disk. "
        "Speed was measured on this machine just now."
    )


def _show_table(rows: list[dict[str, Any]], *, numbers: bool = False) -> None:
    """A table with a column per name; of `numbers` all but the first are on the right."""
    texts = [{name: escape(str(value)) for name, value in row.items()} for row in rows]
    left = list(rows[0])[: 1 if numbers else None] if rows else ()
    table = Table(box=None, pad_edge=False)
    cli.show_rows(texts, table, left=left, overflow="fold")


@dataclass(frozen=True, kw_only=True)
class GivenNetwork(NetworkFacts):
    """A network that is there already, and facts that its file lacks."""

    weights: Annotated[Path | None, "Audit this network; --data: its training images."] = None
    decoys: Annotated[str | None, "folder:PATH of images that it never saw."] = None
    initial: Annotated[Path | None, "The weights that training started from, if known."] = None
    gradients: Annotated[
        list[Path] | None, "Gradients of a batch in these weights; --data: that batch; repeatable."
    ] = None

    def settings(self, data: str | None) -> dict[str, Any]:
        """Settings of the audit; ValueError for options that do not go together."""
        from flows.audit import given_settings

        plain = GivenNetwork()
        facts = {n: v for n, v in self.converted().items() if getattr(self, n) != getattr(plain, n)}
        given = {"weights": None, "decoys": None} | facts
        return given_settings(data, **given)


@cli.command(study_app, "audit")
def audit(
    *,
    data: cli.Data = None,
    recipe: Annotated[
        Path | None, "YAML or JSON of what is trained and how; default: the preset's."
    ] = None,
    preset: Annotated[
        Literal["quick", "cpu", "wide", "split", "autoencoder"] | None,
        "The size; default: that of the store, else cpu. quick: some minutes; wide: width 1,000; "
        "split: features that clients send; autoencoder: networks that give back their input.",
    ] = None,
    quick: Annotated[bool, "--quick", "The same as --preset quick."] = False,
    given: GivenNetwork,
    store: Annotated[Path, "--out", "--store", "Folder of the results."] = Path(
        "palimpsest-runs/audit"
    ),
    fail_above: Annotated[
        list[str] | None,
        "Exit code 3 above a limit, e.g. good>0.05@fpr=0.01; repeatable.",
    ] = None,
    separator: cli.SeparatorFile = None,
    only: Annotated[str, "Just the defences whose name contains this."] = "",
    skip_corrupt: cli.SkipFiles = False,
    settings: Annotated[
        list[str] | None, "--set", "name=value, e.g. recipe.training.epochs=1000; repeatable."
    ] = None,
    computed: cli.Computed,
    dry_run: Annotated[bool, "Only say what it would take."] = False,
    fresh: cli.FreshStore = False,
) -> None:
    """Train networks under a grid of defences, attack them, and say what leaks and what that costs.

    Leaves a page, audit.json, JUnit and a section for a model card. An audit that was interrupted
    goes on where it was; settings are then those of its store.

    Examples: `palimpsest audit --data folder:my-images --quick` · `palimpsest audit --data
    folder:my-images --recipe mlp.yaml --out audit --fail-above "good>0.05@fpr=0.01"` · `palimpsest
    audit --weights model.safetensors --data folder:training-images --decoys folder:others` ·
    `palimpsest audit --data cifar10:cifar-10-batches-py --dry-run`
    """
    from flows.audit import AUDIT, CARD, JUNIT, recipe_settings
    from flows.settings import parse_assignments
    from flows.study import UnitsFailedError
    from recon_core.attacks.span.separator import SHIPPED

    chosen: dict[str, Any] = {} if data is None else {"data": data}
    for name, value in {"skip_corrupt": skip_corrupt, "fail_above": fail_above}.items():
        if value:
            chosen[name] = value
    chosen |= {} if recipe is None else recipe_settings(recipe)
    chosen |= given.settings(data)
    chosen |= parse_assignments(settings or [])
    if separator is not None:
        own = separator if separator in SHIPPED else str(Path(separator).absolute())
        chosen["span.separator"] = own
    size: str | None = "quick" if quick else preset
    if given.weights is not None:
        if size is not None or recipe is not None:
            raise ValueError(
                "--weights is a network that is trained already; leave out --recipe, --preset and "
                "--quick, or --weights"
            )
        size = "given"
    if quick and preset not in (None, "quick"):
        raise ValueError(f"--quick is --preset quick, but --preset is {preset}; give one of them")
    ended = _run(
        AUDIT, store, size, chosen, only=only, computed=computed, dry_run=dry_run, fresh=fresh
    )
    if ended is None:
        return
    record, failure = ended
    cli.out.print(record["verdict"]["sentence"], markup=False, highlight=False)
    for name in (f"{AUDIT.page.name}.html", AUDIT.record, JUNIT, CARD):
        path = escape(str((store / name).absolute()))
        cli.out.print(f"Page: [bold]{path}[/]" if name.endswith(".html") else path, soft_wrap=True)
    if isinstance(failure, UnitsFailedError):
        raise failure
    for check in record["checks"]:
        cli.out.print(
            f"[bold]{check['outcome']}[/]: {escape(check['condition'])} is "
            f"{check['value']:.3f} by {check['attack']}",
            soft_wrap=True,
        )
    if any(check["outcome"] == "fails" for check in record["checks"]):
        raise typer.Exit(ABOVE_LIMIT)
