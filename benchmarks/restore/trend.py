"""Growth of a restorer's gain with steps, pairs, mixtures and size: many short trainings of a job.

    python -m benchmarks.restore.trend WORKSPACE [--only NAME] [--steps N | --quick] [--json FILE]

WORKSPACE is the folder of a job whose pairs are generated. Every case trains a restorer of its
recipe with one thing changed, always against the same held-out parts, and is scored by the
dissimilarity 1 - SSIM of their restored pairs with the originals, beside that of the same pairs
unrestored. Finished and interrupted trainings in WORKSPACE/trend are taken up, so this may be
stopped at any time; `--only` gives the cases of one restorer to one process.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.record import Measurement, measured, publish
from flows.settings import from_json
from recon_core.restore import EDM, BFDnCNN, RegressionUNet, Restorer
from storage.pairs.dataset import Dataset
from tasks.devices import resolve_device
from tasks.training.train import train_restorer
from tasks.training.validation import held_out_parts
from tasks.workspace import Workspace

N_SAMPLES, N_SAMPLER_STEPS = 16, 9
"""Of a diffusion restorer, in the validations."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training: of a `share` of the parts, `n_steps` steps, with or without mixtures."""

    name: str
    n_steps: int
    share: float = 1.0
    mixtures: bool
    smaller: bool = False


def cases(names: Sequence[str], *, mixtures: bool, n_steps: int) -> Iterator[Case]:
    """Per restorer: a quarter of the steps and all, a smaller network, and pairs of a tenth and
    three tenths of the parts, and of all, alone; what is not varied is all pairs, with the recipe's
    mixtures."""
    for name in names:
        yield Case(name=name, mixtures=mixtures, n_steps=n_steps // 4)
        yield Case(name=name, mixtures=mixtures, n_steps=n_steps)
        yield Case(name=name, mixtures=mixtures, n_steps=n_steps, smaller=True)
        for share in (0.1, 0.3, 1.0) if mixtures else (0.1, 0.3):
            yield Case(name=name, mixtures=False, n_steps=n_steps, share=share)


def measure(workspace: Path, *, only: str | None, n_steps: int) -> Iterator[Measurement]:
    """Trains the cases that are not there yet, and gives each one's score.

    Raises:
        ValueError: there is no job in `workspace`, or `only` is none of its restorers.
    """
    recipe_path = Workspace.found(workspace).recipe
    if not recipe_path.is_file():
        raise ValueError(f"{workspace} has no recipe.json; generate a job's pairs there first")
    recipe = from_json(json.loads(recipe_path.read_text()))
    names = [name for name in recipe.restorers if only in (None, name)]
    if not names:
        raise ValueError(f"--only {only}: the job has the restorers {list(recipe.restorers)}")
    dataset = Dataset(Workspace.found(workspace).pairs("train"))
    images = recipe.images("train").images
    device = resolve_device("auto")
    mixtures = recipe.curation.mixture_fraction > 0
    for case in cases(names, mixtures=mixtures, n_steps=n_steps):
        plan, mixed = recipe.restorers[case.name], recipe.curation
        restorer: Restorer = plan.restorer
        if case.smaller and isinstance(restorer, EDM | RegressionUNet):
            restorer = replace(restorer, size="tiny")
        elif case.smaller and isinstance(restorer, BFDnCNN):
            restorer = replace(restorer, n_channels=max(1, restorer.n_channels // 2))
        # the held-out parts of the whole store, and the first of the others, at least one
        held_out = held_out_parts(dataset, plan.validation.n_parts)
        others = [r.part for r in dataset.receipts if r.part not in held_out and r.n_pairs]
        others = others[: max(1, round(case.share * len(others)))]
        parts = "all" if case.share == 1 else f"{case.share:g}"
        kinds = ("-mixtures" if case.mixtures else "") + ("-smaller" if case.smaller else "")
        card = train_restorer(
            restorer,
            replace(plan.training, n_steps=case.n_steps),
            dataset=dataset.subset([*held_out, *others]),
            curation=mixed if case.mixtures else replace(mixed, mixture_fraction=0.0),
            images_for_noise=images,
            out=workspace / "trend" / f"{case.name}-{case.n_steps}-of-{parts}{kinds}",
            device=device,
            validation=replace(
                plan.validation,
                every=case.n_steps,
                n_samples=N_SAMPLES,
                n_sampler_steps=N_SAMPLER_STEPS,
            ),
        )
        facts, mixed_in = card["validation"], card["curation"]["mixture_fraction"]
        described = [
            case.name,
            f"{card['n_parameters']:,} parameters",
            f"{case.n_steps:,} steps",
            f"{card['dataset']['n_pairs_used']:,} pairs",
            f"{mixed_in:g} mixtures to a pair" if mixed_in else "no mixtures",
            *([f"mean of {N_SAMPLES} samples"] if card["restorer"]["kind"] == "edm" else []),
        ]
        yield measured(
            "restoration trend",
            ", ".join(described),
            1 - facts["ssim_curve"][-1][1],
            "of 1 - SSIM on held-out pairs",
            reference="the same pairs unrestored",
            reference_value=1 - facts["ssim_inputs"],
        )


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workspace", type=Path, help="folder of a job with pairs")
    parser.add_argument("--only", help="one of the recipe's restorers")
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--steps", type=int, default=800, help="of each but the shortest training")
    steps.add_argument("--quick", action="store_const", const=8, dest="steps", help="8 steps")
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    options = parser.parse_args(argv)
    if options.steps < 4:
        parser.error(f"--steps {options.steps}: the shortest training is a quarter; give 4 or more")
    found = measure(options.workspace, only=options.only, n_steps=options.steps)
    publish(found, options.json)


if __name__ == "__main__":
    main()
