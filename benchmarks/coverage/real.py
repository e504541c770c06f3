"""Coverage of images by real campaigns, and its evenness: the samplers at equal numbers of runs.

    python -m benchmarks.coverage.real --data folder:cifar10 [--folder DIR] [--json FILE]

Every run trains a victim and attacks it. The source is 300 images of CIFAR-10, 30 of each class; a
victim of width 64 learns 40 of them, and some four come back. After 400 runs each image has been
trained on 53 times on average (900 times in the image restoration paper).
`benchmarks.coverage.simulated` simulates the paper's own size. Campaigns lie in --folder and are
continued there, so the command can be interrupted.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.coverage.simulated import Curve, draw_curves
from benchmarks.record import Claim, Measurement, decided_claims, measured, publish
from flows.presets import kkt
from recon_core.sampling import Phase, Sampling
from storage.sources.load import ImageSet, load_images
from tasks.campaign.generate import run_campaign
from tasks.campaign.plan import Campaign, Plan, open_store
from tasks.campaign.status import coverage_curve
from tasks.cluster.workers import Workers, dask_client
from tasks.study.statements import Statement, Verdict, every

PLOT = Path(__file__).parents[2] / "docs/results/pictures/coverage-cifar.png"
UNIFORM = "uniform"

Curves = Mapping[str, Sequence[Curve]]
"""Of each sampler the curves of campaigns with different seeds."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A world of real victims: how many images there are, and what the campaigns are."""

    per_class: int = 30
    images_per_run: int = 40
    n_runs: int = 400
    runs_per_part: int = 10
    parts_per_round: int = 4
    pool_size: int = 100
    seeds: tuple[int, ...] = (0, 1)

    def phases(self) -> dict[str, tuple[Phase, ...]]:
        """By the sampler's name; the last is the paper's: two thirds uniform, then least seen."""
        n = self.n_runs
        later = n // 3 // self.runs_per_part * self.runs_per_part
        least_seen = Phase(sampler="least_seen", pool_size=self.pool_size, n_runs=later)
        return {
            UNIFORM: (Phase(n_runs=n),),
            "adaptive": (Phase(sampler="adaptive", n_runs=n),),
            "uniform, then least seen": (Phase(n_runs=n - later), least_seen),
        }

    def campaign(self, phases: tuple[Phase, ...], seed: int) -> Campaign:
        experiment = kkt(64, self.images_per_run, epochs=400, save_at=(50, 100, 200))
        sampling = Sampling(
            images_per_run=self.images_per_run,
            phases=phases,
            runs_per_part=self.runs_per_part,
            parts_per_round=self.parts_per_round,
        )
        return Campaign(experiment=experiment, sampling=sampling, root_seed=seed)


QUICK = Size(per_class=4, images_per_run=8, n_runs=16, runs_per_part=2, pool_size=4, seeds=(0,))


def first_of_each_class(images: ImageSet, per_class: int) -> ImageSet:
    """`per_class` images of each class, the first in their order; ValueError if one has fewer."""
    ids = []
    for label, name in enumerate(images.class_names):
        found = np.flatnonzero(images.labels == label)
        if len(found) < per_class:
            raise ValueError(f"{images.name} has {len(found)} of {name}; give {per_class} or more")
        ids.append(found[:per_class])
    rows = np.sort(np.concatenate(ids))
    return replace(images, images=images.images[rows], labels=images.labels[rows])


def run(folder: Path, size: Size, images: ImageSet, n_workers: int) -> Curves:
    """The curves of all campaigns, those that are missing in `folder` run first."""
    curves: dict[str, list[Curve]] = {name: [] for name in size.phases()}
    with dask_client(Workers(n_workers=n_workers, device="cpu"), threads=1) as client:
        for seed in size.seeds:  # every sampler once, then again with another seed
            for name, phases in size.phases().items():
                plan = Plan(size.campaign(phases, seed), images)
                place = folder / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
                dataset = open_store(place, plan.campaign, images)
                dataset = run_campaign(
                    plan, dataset, client, device="cpu", on_progress=lambda *_progress: None
                )
                found = coverage_curve(dataset.receipts, n_points=len(dataset.receipts))
                points = zip(found.n_covered, found.gini, found.pairs_per_run, strict=True)
                curves[name].append(dict(zip(found.n_runs, points, strict=True)))
    return curves


def measurements(curves: Curves, size: Size, n_images: int) -> Iterator[Measurement]:
    """Medians over the seeds, at half and at all of the runs, beside uniform's at as many."""

    def line(
        case: str, unit: str, values: Sequence[float], uniform: Sequence[float]
    ) -> Measurement:
        return measured(
            "coverage_real",
            f"{case} ({', '.join(f'{value:.3g}' for value in values)})",
            float(statistics.median(values)),
            unit,
            len(values),
            reference=UNIFORM,
            reference_value=float(statistics.median(uniform)) if uniform else None,
        )

    goal = statistics.median(curve[size.n_runs][0] for curve in curves[UNIFORM])
    for name, of_seeds in curves.items():
        for n_runs in (size.n_runs // 2, size.n_runs):
            case = f"{name} after {n_runs} runs on {n_images} images"
            columns = ("images covered", "images"), ("Gini of their pairs", "")
            for k, (what, unit) in enumerate(columns):
                beside = [] if name == UNIFORM else [c[n_runs][k] for c in curves[UNIFORM]]
                yield line(f"{case}: {what}", unit, [c[n_runs][k] for c in of_seeds], beside)
        reached = [
            min((n for n, (covered, *_) in curve.items() if covered >= goal), default=None)
            for curve in of_seeds
        ]
        if name != UNIFORM and None not in reached:
            yield line(
                f"{name}: runs to what uniform covers in {size.n_runs} ({goal:g} images)",
                "runs",
                [n for n in reached if n],
                [size.n_runs],
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line per measurement, and writes them to --json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", default="photos", help="folder:PATH, ...; default: photographs")
    parser.add_argument("--folder", type=Path, help="where the campaigns lie; default: temporary")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="tiny campaigns")
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    parser.add_argument("--plot", type=Path, help=f"default without --quick: {PLOT.name}")
    options = parser.parse_args(argv)
    size = QUICK if options.quick else Size()
    images = first_of_each_class(load_images(options.data, split="train"), size.per_class)
    temporary = partial(tempfile.TemporaryDirectory, prefix="palimpsest-coverage-")
    with nullcontext(options.folder) if options.folder else temporary() as folder:
        curves = run(Path(folder), size, images, options.workers)
    publish(measurements(curves, size, len(images.labels)), options.json)
    plot = options.plot or (None if options.quick else PLOT)
    if plot is not None:
        title = f"{len(images.labels)} images of {images.name}"
        draw_curves([(title, len(images.labels), curves)], plot)


UNEQUAL = 0.5
"""A Gini coefficient at which two images differ by as many pairs, on average, as an image has."""
THEIRS = "uniform, then least seen"
COMMAND = "python -m benchmarks.coverage.real --data folder:cifar10"


@dataclass(frozen=True)
class Campaigns:
    """End of campaigns of one sampler, a number for every seed."""

    n_runs: int
    n_images: int
    covered: tuple[float, ...]
    gini: tuple[float, ...]


def last_of(measurements: Iterable[Measurement], sampler: str) -> Campaigns:
    """The campaigns of `sampler` after all their runs. Raises ValueError if there are none."""
    pattern = re.compile(rf"{sampler} after (\d+) runs on (\d+) images: (.+) \((.+)\)")
    found: dict[tuple[int, int], dict[str, tuple[float, ...]]] = {}
    for one in measurements:
        if match := pattern.fullmatch(one.case):
            at = found.setdefault((int(match[1]), int(match[2])), {})
            at[match[3]] = tuple(float(number) for number in match[4].split(", "))
    if not found:
        raise ValueError(f"no campaign of the sampler {sampler!r} was measured; run {COMMAND}")
    n_runs, n_images = max(found)
    numbers = found[n_runs, n_images]
    return Campaigns(n_runs, n_images, numbers["images covered"], numbers["Gini of their pairs"])


def some_come_back_more(found: tuple[Campaigns, Campaigns]) -> Verdict:
    uniform, _theirs = found
    missing = ", ".join(f"{uniform.n_images - n:g}" for n in uniform.covered)
    ours = (
        f"after {uniform.n_runs} runs that draw uniformly from {uniform.n_images} images: Gini "
        f"coefficients {_listed(uniform.gini)}; never came back {missing}"
    )
    return ours, _for_all_seeds([gini > UNEQUAL for gini in uniform.gini])


def least_seen_covers_more(found: tuple[Campaigns, Campaigns]) -> Verdict:
    uniform, theirs = found
    ours = (
        f"after {uniform.n_runs} runs {_listed(uniform.covered)} of {uniform.n_images} images, "
        f"{_listed(theirs.covered)} if the last third draws from the least seen; then Gini "
        f"coefficients {_listed(theirs.gini)}"
    )
    more = [one > other for one in theirs.covered for other in uniform.covered]
    remains = [gini > UNEQUAL for gini in theirs.gini]
    return ours, every([_for_all_seeds(more), _for_all_seeds(remains)])


def _listed(numbers: Sequence[float]) -> str:
    return " and ".join(f"{number:g}" for number in numbers)


def _for_all_seeds(verdicts: Sequence[bool]) -> bool | None:
    """None if the seeds differ."""
    return verdicts[0] if len(set(verdicts)) == 1 else None


STATEMENTS: tuple[Statement[tuple[Campaigns, Campaigns]], ...] = (
    Statement(
        claim="Some images are much more likely to come back than others",
        where="section 2",
        theirs="big imbalances; many of 50,000 images never came back in 100,000 uniform runs",
        rule="the Gini coefficient of the pairs of the images that came back is above "
        f"{UNEQUAL:g}, at which two images differ by as many pairs, on average, as an image has, "
        "with every seed",
        check=some_come_back_more,
    ),
    Statement(
        claim="Sampling from the least-seen images covers more of them, and imbalances remain",
        where="section 2",
        theirs="42,707 of 50,000 images after 50,000 more runs; uniform runs alone were not "
        "compared",
        rule="images covered in as many runs: more than by uniform sampling with every pair of "
        f"seeds, and Gini coefficients still above {UNEQUAL:g}",
        check=least_seen_covers_more,
    ),
)


def coverage_claims(measurements: Sequence[Measurement], *, name: str) -> list[Claim]:
    """The claims on these campaigns; `name` stands before our numbers."""
    both = last_of(measurements, UNIFORM), last_of(measurements, THEIRS)
    return decided_claims(
        STATEMENTS,
        both,
        name=f"{name}: ",
        command=COMMAND,
        seconds=None,
        machine=measurements[0].hardware,
    )


if __name__ == "__main__":
    main()
