"""`palimpsest audit`: what a network leaks of its training images, and which defence is worth its
price. Exit code 3 where a limit of `--fail-above` is exceeded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from flows.cli.attack_file import (
    Activated,
    Arch,
    ChannelOrder,
    Leak,
    Mean,
    PixelOrder,
    Shape,
    Std,
    numbers,
    parse_shape,
)
from flows.cli.options import (
    Computed,
    Data,
    FreshStore,
    SeparatorFile,
    SkipFiles,
    command,
    out,
    start_over,
)
from flows.cli.study import show_costs, show_rows

audit_app = typer.Typer()
ABOVE_LIMIT = 3


@dataclass(frozen=True, kw_only=True)
class GivenNetwork:
    """A network that is there already, and facts that its file lacks."""

    weights: Annotated[Path | None, "Audit this network; --data: its training images."] = None
    decoys: Annotated[str | None, "folder:PATH of images that it never saw."] = None
    initial: Annotated[Path | None, "The weights that training started from, if known."] = None
    gradients: Annotated[
        list[Path] | None, "Gradients of a batch in these weights; --data: that batch; repeatable."
    ] = None
    arch: Arch = None
    shape: Shape = None
    activation: Activated = "relu"
    leak: Leak = 0.01
    pixel_order: PixelOrder = None
    channel_order: ChannelOrder = None
    mean: Mean = None
    std: Std = None

    def settings(self, data: str | None) -> dict[str, Any]:
        """Settings of the audit; ValueError for options that do not go together."""
        from flows.audit import given_settings

        facts = {name: value for name, value in vars(self).items()
                 if value != getattr(GivenNetwork(), name)}  # fmt: skip
        given = {"weights": None, "decoys": None} | facts
        if self.shape is not None:
            given["shape"] = parse_shape(self.shape)
        if self.std is not None:
            given["std"] = numbers(self.std, "--std")
        return given_settings(data, **given)


@command(audit_app, "audit")
def audit(
    *,
    data: Data = None,
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
    separator: SeparatorFile = None,
    only: Annotated[str, "Just the defences whose name contains this."] = "",
    skip_corrupt: SkipFiles = False,
    settings: Annotated[
        list[str] | None, "--set", "name=value, e.g. recipe.training.epochs=1000; repeatable."
    ] = None,
    computed: Computed,
    dry_run: Annotated[bool, "Only say what it would take."] = False,
    fresh: FreshStore = False,
) -> None:
    """Train networks under a grid of defences, attack them, and say what leaks and what that costs.

    Leaves a page, audit.json, JUnit and a section for a model card. An audit that was interrupted
    goes on where it was; settings are then those of its store.

    Examples: `palimpsest audit --data folder:my-images --quick` · `palimpsest audit --data
    folder:my-images --recipe mlp.yaml --out audit --fail-above "good>0.05@fpr=0.01"` · `palimpsest
    audit --weights model.safetensors --data folder:training-images --decoys folder:others` ·
    `palimpsest audit --data cifar10:cifar-10-batches-py --dry-run`
    """
    from flows.audit import AUDIT, recipe_settings
    from flows.settings import parse_assignments
    from recon_core.attacks.span.separator import SHIPPED

    chosen: dict[str, Any] = {} if data is None else {"data": data}
    if skip_corrupt:
        chosen["skip_corrupt"] = True
    if fail_above:
        chosen["fail_above"] = fail_above
    if recipe is not None:
        chosen |= recipe_settings(recipe)
    chosen |= given.settings(data)
    chosen |= parse_assignments(settings or [])
    if separator is not None:
        own = separator if separator in SHIPPED else str(Path(separator).absolute())
        chosen["span.separator"] = own
    size: str | None = "quick" if quick else preset
    if given.weights is not None:
        size = _size_of_given(size, recipe)
    if quick and preset not in (None, "quick"):
        raise ValueError(f"--quick is --preset quick, but --preset is {preset}; give one of them")
    if fresh and size is None:
        size = "cpu"
    made = AUDIT.resolve(size, chosen, store, only=only)
    if dry_run:
        show_costs(AUDIT, made, store, computed)
        return
    record = _run(made, store, size, chosen, only=only, computed=computed, fresh=fresh)
    failed = [check for check in record["checks"] if check["outcome"] == "fails"]
    for check in record["checks"]:
        out.print(
            f"[bold]{check['outcome']}[/]: {escape(check['condition'])} is "
            f"{check['value']:.3f} by {check['attack']}",
            soft_wrap=True,
        )
    if failed:
        raise typer.Exit(ABOVE_LIMIT)


def _size_of_given(size: str | None, recipe: Path | None) -> str:
    """The one size for a network that is given; ValueError beside what is for others."""
    if size is not None or recipe is not None:
        raise ValueError(
            "--weights is a network that is trained already; leave out --recipe, --preset and "
            "--quick, or --weights"
        )
    return "given"


def _run(
    made: Any,
    store: Path,
    size: str | None,
    chosen: dict[str, Any],
    *,
    only: str,
    computed: Computed,
    fresh: bool,
) -> dict[str, Any]:
    """The record of the audit, when it has ended; raises what its units failed of."""
    from flows.audit import AUDIT, CARD, JUNIT
    from flows.cli.console import show_images
    from flows.study import LimitExceededError, UnitsFailedError, run_study
    from tasks.cluster.workers import check_workers, device_of

    workers = computed.workers
    if fresh:
        check_workers(workers)
    plan = AUDIT.plan(made, store, device_of(workers))
    if fresh:
        start_over(store, AUDIT.entries, option="--out")
    n = plan.study.recipe.n_images
    out.print(
        f"[bold]palimpsest audit[/]  {made.preset}, {AUDIT.size(made)}, {n} images in each, on "
        f"{escape(made.data)}, store {escape(str(store))}"
    )
    for split, facts in AUDIT.facts(plan):
        show_images(out, split, facts)
    for number, why in plan.refused.items():
        name = plan.study.cells[number].name
        out.print(f"Left out: {name}: {why}", style="dim", markup=False, soft_wrap=True)
    failure: UnitsFailedError | None = None
    try:
        run_study.renamed(AUDIT.flow)("audit", store, size, chosen, only=only, workers=workers)
    except UnitsFailedError as error:
        failure = error
    except LimitExceededError:
        pass  # the record's checks say so, and the exit code
    record: dict[str, Any] = json.loads((store / AUDIT.record).read_bytes())
    show_rows(AUDIT.rows(record))
    out.print(record["verdict"]["sentence"], markup=False, highlight=False)
    for name in (f"{AUDIT.page.name}.html", AUDIT.record, JUNIT, CARD):
        path = escape(str((store / name).absolute()))
        out.print(f"Page: [bold]{path}[/]" if name.endswith(".html") else path, soft_wrap=True)
    if failure is not None:
        raise failure
    return record
