"""The span attack: what comes back, in which time, and its optimiser beside python-picard.

    python -m benchmarks.span.speed --images folder:cifar10 [--quick] [--json FILE]

Images are drawn from the held-out split; the shipped separators are learned on other images.
"Good" is an SSIM above .4, decoys are as many images that were in no span. A true span is what a
training would leave at best: the images less their mean, known up to float32. Victims are those of
`cifar-hundred` and `restoration-cpu` (200,000 epochs), attacked with an unknown start and a known
one, and of `span-pairs`, whose start hides directions. python-picard (BSD) is no dependency; its
lines are left out, and said to be, without it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.record import Measurement, compared, measured, publish
from flows.presets import preset
from recon_core.attacks.kkt.run import KKT, KnownVictim
from recon_core.attacks.span.attack import SpanAttack, separate
from recon_core.attacks.span.rows import weight_rows
from recon_core.attacks.span.search import searched, separator_for
from recon_core.attacks.span.separation import independent, rotation_start
from recon_core.matching import fit_to_range
from recon_core.metrics import ssim_matrix
from recon_core.sampling import binary_labels
from recon_core.summary import N_BOOTSTRAP, images_found
from recon_core.types import RunSpec, seeded_generator
from storage.sources.load import ImageSet, load_images

_line = partial(measured, "span")
GOOD = 0.4
FALSE_SHARES = (0.01, 0.05, 0.2)
"""Of the pictures in the head of an order, in which images are counted as found."""
LOW, HIGH = "low end of 95 % over victims", "high end of 95 % over victims"
ROTATIONS = 5
"""Random starts of the attack whose sources together are as many as those of the larger frame."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Found:
    """Yield of an attack, of the images and of as many decoys, and the seconds it took; `fitting`
    with nothing clipped, `found` in the order of the sources at `FALSE_SHARES`."""

    n: int
    good: int
    ssim: float
    decoys: int
    seconds: float
    good_fitting: int
    ssim_fitting: float
    n_sources: int
    found: tuple[int, ...]


def measure(images: ImageSet, *, quick: bool, seed: int) -> Iterator[Measurement]:
    """Planted sources beside python-picard, victims that make pairs, true spans, frames, victims
    with their start unknown and known."""
    yield from planted(n=20 if quick else 100, t=2000 if quick else 10_000)
    yield from pairs(images, n=10 if quick else 100, n_victims=1 if quick else 8, seed=seed)
    for n in (10,) if quick else (100, 200, 300, 500):
        yield from _lines(f"true span of {n} images", true_span(images, n, seed=seed, quick=quick))
    yield from frames(images, n=10 if quick else 100, n_victims=1 if quick else 12, seed=seed)
    for name in ("restoration-cpu",) if quick else ("cifar-hundred", "restoration-cpu"):
        yield from victims(images, name, n=10 if quick else 100, seed=seed, quick=quick)


class Student:
    """Our density, log(1 + y^2), as python-picard takes one."""

    def log_lik(self, y: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """-log of the density, up to a constant."""
        return np.log1p(y**2)

    def score_and_der(
        self, y: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Its first two derivatives."""
        return 2 * y / (1 + y**2), 2 * (1 - y**2) / (1 + y**2) ** 2


def planted(*, n: int, t: int) -> Iterator[Measurement]:
    """Laplacian sources, mixed and whitened: the smallest correlation of a source with what is
    found, and the time beside python-picard, which starts at the same rotation."""
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(n, t, generator=generator, dtype=torch.float64) - 0.5
    sources = -u.sign() * (1 - 2 * u.abs()).clamp_min(1e-12).log()
    mixed = torch.randn(n, n, generator=generator, dtype=torch.float64) @ sources
    values, vectors = torch.linalg.eigh(mixed @ mixed.mT / t)
    z = (vectors / values.sqrt()).mT @ mixed
    start = rotation_start(n, generator)
    search = partial(independent, n_filters=1, n_iterations=300)

    def ours() -> Tensor:
        found: Tensor = search(z[None], start[None]).w[0] @ z
        return found

    case = f"{n} planted Laplacian sources, {t:,} samples, float64"
    yield _line(case, _smallest_correlation(ours(), sources), "smallest correlation")
    try:
        from picard import picard
    except ImportError:
        print("python-picard is not installed: pip install python-picard for its lines")
        return

    def theirs() -> Tensor:
        _k, _w, found = picard(
            z.numpy(), ortho=True, whiten=False, centering=False, extended=False,
            w_init=start.numpy(), max_iter=300, tol=1e-4, fun=Student(),
        )  # fmt: skip
        return torch.from_numpy(found)

    yield _line(
        f"{case}, python-picard", _smallest_correlation(theirs(), sources), "smallest correlation"
    )
    yield compared("span", case, ours=ours, reference="python-picard", theirs=theirs, repeats=3)


def pairs(images: ImageSet, *, n: int, n_victims: int, seed: int) -> Iterator[Measurement]:
    """Victims of `span-pairs`, trained and attacked: pairs and seconds."""
    experiment = preset("span-pairs").experiment
    assert isinstance(experiment, KKT)
    specs = [_spec(n, seed, run) for run in range(n_victims)]
    seen = torch.stack([drawn(images, n, seed + k)[0] for k in range(n_victims)])
    began = time.perf_counter()
    results = experiment.run_batch(specs, (seen * 255).round().to(torch.uint8), device=CPU)
    case = f"{n_victims} victims of span-pairs, {n} images"
    yield _line(case, sum(len(result.pairs.ssim_best) for result in results), "pairs")
    yield _line(case, time.perf_counter() - began, "s")


def true_span(images: ImageSet, n: int, *, seed: int, quick: bool) -> Found:
    """The attack on the span of n images, turned at random."""
    seen, decoys = drawn(images, n, seed)
    mean = seen.mean(0)
    centred = (seen - mean).flatten(1).double()
    vectors = torch.linalg.svd(centred, full_matrices=False)[2][: len(seen) - 1].float()
    attack = SpanAttack(sources="network", n_network=60 if quick else 300)
    began = time.perf_counter()
    generator, pictures = seeded_generator(seed, 0, "attack"), vectors.unflatten(1, seen.shape[1:])
    separator = separator_for(attack, (3, 32, 32))
    x = searched(attack, pictures[None], separator, [generator]).w[0] @ vectors
    seconds = time.perf_counter() - began
    return _found(x, mean, seen, decoys, seconds)


def frames(images: ImageSet, *, n: int, n_victims: int, seed: int) -> Iterator[Measurement]:
    """Whole victims of `span-pairs`, whose start is unknown and hides directions: a rotation of
    those that stand out, several rotations together, and frames of more sources."""
    experiment = preset("span-pairs").campaign("heldout").experiment
    assert isinstance(experiment, KKT)
    rotation = "a rotation"
    attacks = {
        rotation: (SpanAttack(overcomplete=1.0), 1),
        f"{ROTATIONS} rotations": (SpanAttack(overcomplete=1.0), ROTATIONS),
        "a frame of 2 sources for each direction": (SpanAttack(), 1),
        "a frame of 4, and .4 more directions": (SpanAttack(overcomplete=4.0, surplus=0.4), 1),
    }
    by_attack: dict[str, list[Found]] = {name: [] for name in attacks}
    for k in range(n_victims):
        victim, _spec, seen, decoys = _trained(experiment, images, n, seed + k)
        for name, (attack, n_starts) in attacks.items():
            generators = [seeded_generator(seed + k, start, "attack") for start in range(n_starts)]
            began, weights = time.perf_counter(), victim.trained.parameters
            x = [separate(attack, victim.architecture, weights, [g])[0] for g in generators]
            seconds = time.perf_counter() - began
            together = torch.cat([found.sources.x for found in x])
            by_attack[name].append(_found(together, victim.mean, seen, decoys, seconds))
    line = partial(_line, repeats=n_victims)
    good = {name: np.array([one.good for one in some]) for name, some in by_attack.items()}
    for name, some in by_attack.items():
        case = f"{n_victims} victims of span-pairs, {n} images, {name}"
        yield line(case, float(good[name].mean()), f"good of {n}")
        yield line(case, float(np.mean([one.ssim for one in some])), "mean SSIM")
        yield line(case, float(np.mean([one.decoys for one in some])), f"good decoys of {n}")
        yield line(case, float(np.mean([one.n_sources for one in some])), "sources")
        yield line(case, float(np.median([one.seconds for one in some])), "s")
        if attacks[name][1] == 1:  # several starts have no order together
            means = np.mean([one.found for one in some], axis=0)
            for share, mean in zip(FALSE_SHARES, means, strict=True):
                yield line(case, float(mean), f"found without the originals at {share:.0%} false")
        if name != rotation:
            yield from ratio_of_sums(
                line, case, f"good over {rotation}", good[name], good[rotation]
            )


def ratio_of_sums(
    line: partial[Measurement],
    case: str,
    unit: str,
    over: npt.NDArray[Any],
    under: npt.NDArray[Any],
) -> Iterator[Measurement]:
    """Sums of all victims together, one over the other, and a bootstrap interval over victims."""
    sums = np.stack([over, under]).astype(float)
    rows = np.random.default_rng(0).integers(len(over), size=(N_BOOTSTRAP, len(over)))
    drawn_sums = sums[:, rows].sum(2)
    ratios = drawn_sums[0] / drawn_sums[1]
    yield line(case, float(sums[0].sum() / sums[1].sum()), unit)
    for end, tail in ((LOW, 0.025), (HIGH, 0.975)):
        yield line(case, float(np.quantile(ratios, tail)), f"{unit}, {end}")


def _spec(n: int, seed: int, run: int = 0) -> RunSpec:
    """A run on n images, the first half of one label."""
    labels = tuple([0] * (n // 2) + [1] * (n // 2))
    return RunSpec(run=run, root_seed=seed, image_ids=tuple(range(n)), labels=labels)


def _trained(
    experiment: KKT, images: ImageSet, n: int, seed: int
) -> tuple[KnownVictim, RunSpec, Tensor, Tensor]:
    """(a victim, its run, its images, decoys)."""
    seen, decoys = drawn(images, n, seed)
    rows = (seen * 255).round().to(torch.uint8)
    spec = _spec(n, seed)
    return experiment.train_victim(spec, rows, device=CPU), spec, seen, decoys


def victims(
    images: ImageSet, name: str, *, n: int, seed: int, quick: bool
) -> Iterator[Measurement]:
    """The attack on a victim of a preset, its start unknown and known."""
    experiment = preset(name).campaign("heldout").experiment
    assert isinstance(experiment, KKT)
    epochs = 2000 if quick else min(experiment.training.epochs, 200_000)
    experiment = replace(experiment, training=replace(experiment.training, epochs=epochs))
    victim, spec, seen, decoys = _trained(experiment, images, n, seed)
    weights = victim.trained.parameters
    start = victim.architecture.initial([spec.victim_generator("victim")], dtype=torch.float32)
    for known in (False, True):
        attack = SpanAttack(start="known" if known else "unknown")
        began = time.perf_counter()
        (found,) = separate(
            attack,
            victim.architecture,
            weights,
            [spec.generator("attack")],
            rows=[weight_rows(weights, start if known else None)],
        )
        seconds = time.perf_counter() - began
        case = f"victim of {name}, {n} images, start {attack.start}"
        yield from _lines(case, _found(found.sources.x, victim.mean, seen, decoys, seconds))


def drawn(images: ImageSet, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """(n images, half of each binary label, in [0, 1]; n others)."""
    labels, _task = binary_labels(images.labels, images.class_names)
    generator = seeded_generator(seed, n, "images")
    order = torch.randperm(len(labels), generator=generator).numpy()
    halves = [order[labels[order] == k] for k in (0, 1)]
    chosen = np.concatenate([half[: n // 2] for half in halves])
    others = np.concatenate([half[n // 2 : n] for half in halves])
    if len(others) < n:
        raise SystemExit(f"--images has too few images: {2 * n} are needed, half of each label")
    seen, decoys = (
        torch.from_numpy(images.images[rows]).float() / 255 for rows in (chosen, others)
    )
    return seen, decoys


def _found(x: Tensor, mean: Tensor, seen: Tensor, decoys: Tensor, seconds: float) -> Found:
    both = torch.cat([x, -x]).unflatten(1, seen.shape[1:])
    pictures = fit_to_range(both, mean)
    scores = ssim_matrix(pictures, seen)
    best, lucky = scores.amax(0), ssim_matrix(pictures, decoys).amax(0)
    either = torch.maximum(*scores.tensor_split(2))
    n_good, n_lucky = int((best > GOOD).sum()), int((lucky > GOOD).sum())
    whole = ssim_matrix(fit_to_range(both, mean, clipped=0.0), seen).amax(0)
    fitting = (int((whole > GOOD).sum()), float(whole.mean()))
    found = images_found(either.numpy(), good=GOOD, false_shares=FALSE_SHARES)
    return Found(len(seen), n_good, float(best.mean()), n_lucky, seconds, *fitting, len(x), found)


def _lines(case: str, found: Found) -> Iterator[Measurement]:
    yield _line(case, found.good, f"good of {found.n}")
    yield _line(case, found.ssim, "mean SSIM")
    yield _line(case, found.decoys, f"good decoys of {found.n}")
    yield _line(f"{case}, nothing clipped", found.good_fitting, f"good of {found.n}")
    yield _line(f"{case}, nothing clipped", found.ssim_fitting, "mean SSIM")
    yield _line(case, found.seconds, "s")


def _smallest_correlation(found: Tensor, sources: Tensor) -> float:
    k = len(sources)
    table = torch.corrcoef(torch.cat([found, sources]))[:k, k:].abs()
    return float(table.amax(0).min())


def main(
    measure: Callable[..., Iterator[Measurement]], title: str, argv: Sequence[str] | None = None
) -> None:
    """The command line of benchmarks on held-out images."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--images", default="photos", help="folder:PATH, ...; default: photographs")
    parser.add_argument("--quick", action="store_true", help="small cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    options = parser.parse_args(argv)
    images = load_images(options.images, split="heldout")
    publish(measure(images, quick=options.quick, seed=options.seed), options.json)


if __name__ == "__main__":
    main(measure, __doc__)
