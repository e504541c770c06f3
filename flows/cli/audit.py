"""`palimpsest audit`: what a network leaks of its training images, and which defence is worth its
price. Exit code 3 where a limit of `--fail-above` is exceeded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from flows.cli.attack_file import NetworkFacts
from flows.cli.options import Computed, Data, FreshStore, SeparatorFile, SkipFiles, command, out
from flows.cli.study import run_kind, show_costs

audit_app = typer.Typer()
ABOVE_LIMIT = 3


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
    if fresh and size is None:
        size = "cpu"
    made = AUDIT.resolve(size, chosen, store, only=only)
    if dry_run:
        show_costs(AUDIT, made, store, computed)
        return
    record, failure = run_kind(
        AUDIT, made, store, size, chosen, only=only, computed=computed, fresh=fresh, option="--out"
    )
    out.print(record["verdict"]["sentence"], markup=False, highlight=False)
    for name in (f"{AUDIT.page.name}.html", AUDIT.record, JUNIT, CARD):
        path = escape(str((store / name).absolute()))
        out.print(f"Page: [bold]{path}[/]" if name.endswith(".html") else path, soft_wrap=True)
    if isinstance(failure, UnitsFailedError):
        raise failure
    for check in record["checks"]:
        out.print(
            f"[bold]{check['outcome']}[/]: {escape(check['condition'])} is "
            f"{check['value']:.3f} by {check['attack']}",
            soft_wrap=True,
        )
    if any(check["outcome"] == "fails" for check in record["checks"]):
        raise typer.Exit(ABOVE_LIMIT)
