"""The search for a KKT point in span coordinates: its step, and what it brings back.

    python -m benchmarks.span.kkt --images folder:cifar10 [--quick] [--json FILE]

A step at 3072-1000-1000-1 with 300 images and 400 candidates, beside double backpropagation in
pixels (`kkt_reference`), the same asked for the two needed gradients alone, the same in the span,
and the engine in pixels. The victim's first layer is a mixture of the images over a start as small
as a victim's, so the directions are found as an attack finds them. Both sides give the same
gradients before they are timed. Then victims of `cifar-hundred` (held-out images, a seed each)
attacked from the same start in both coordinates, one thread: good are training images with an SSIM
above .4, decoys as many others; the interval of the paired difference is Student's at 95 %.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kkt.reference import ReferenceAttack, ReferenceNet, balanced_signs
from benchmarks.kkt.reference import objective as plain_objective
from benchmarks.kkt.speed import LEAN, PAPER, PUBLISHED, SHAPE, Case, Ours, Start, Theirs, started
from benchmarks.record import Measurement, compared, measured, said
from benchmarks.span.speed import CPU, GOOD, drawn
from flows.presets import preset
from recon_core.attacks.kkt.objective import Coordinates, KKTAttack, settings_of, starting_points
from recon_core.attacks.kkt.run import KKT
from recon_core.attacks.kkt.solver import reconstruct
from recon_core.attacks.kkt.span_coordinates import SpanCoordinates
from recon_core.matching import fit_to_range
from recon_core.metrics import ssim_matrix
from recon_core.summary import t_interval
from recon_core.types import RunSpec
from recon_core.victims.network import Parameters
from storage.sources.load import ImageSet, load_images

START_STD = 1e-4
FIRST_STD = 0.02
AGREEMENT = 1e-4
IN_SPAN = "double backpropagation with loss.backward() and torch.optim.Adadelta, in the span"
IN_PIXELS = "the engine in pixels"
SMALL = Case(width=40, n_runs=1, n_images=10, n_candidates=20, steps=2)


def measure(images: ImageSet, *, quick: bool, n_victims: int) -> Iterator[Measurement]:
    """Steps at the size of the image restoration paper, then what comes back of victims."""
    case = SMALL if quick else replace(PAPER, steps=3)
    n_threads = torch.get_num_threads()
    for threads in sorted({1, n_threads}):
        yield from steps(images, case, threads=threads, repeats=3 if quick else 9)
    torch.set_num_threads(1)
    yield from both_ways(
        images, n_victims, n_images=10 if quick else 100, n_iterations=20 if quick else 2000
    )
    torch.set_num_threads(n_threads)


def planted(images: ImageSet, case: Case) -> Start:
    """A victim whose first layer is a mixture of n images and its start, and a start of z V."""
    start = started(case)
    seen, _ = drawn(images, case.n_images, 0)
    centred = (seen - seen.mean(0)).flatten(1)
    generator = torch.Generator().manual_seed(0)
    mixture = torch.randn(case.width, case.n_images, generator=generator) @ centred
    noise = torch.randn(*mixture.shape, generator=generator) * START_STD
    first = mixture * (FIRST_STD / mixture.std()) + noise
    (victim,) = start.victims
    victim = Parameters((first[None], *victim.weights[1:]), victim.biases)
    span = SpanCoordinates.of(case.architecture, victim)
    return Start([victim], span.pixels(span.inside(start.x)), start.lam)


def steps(images: ImageSet, case: Case, *, threads: int, repeats: int) -> Iterator[Measurement]:
    """One iteration in the span beside every reference."""
    torch.set_num_threads(threads)
    start = planted(images, case)
    span = SpanCoordinates.of(case.architecture, start.victims[0])
    check_gradients(case, start, span)
    inside = replace(start, victims=[span.parameters], x=span.inside(start.x))
    k = span.vectors.shape[1]
    sides: dict[str, Callable[[], object]] = {
        PUBLISHED: Theirs(case, start, lean=False).steps,
        LEAN: Theirs(case, start, lean=True).steps,
        IN_SPAN: Theirs(case, inside, lean=False, architecture=span.architecture).steps,
        IN_PIXELS: Ours(case, start).steps,
    }
    for reference, theirs in sides.items():
        yield compared(
            "span_kkt",
            f"attack step in {k} directions, {case}, {case.n_images} images, "
            f"{case.n_candidates} candidates, float32, {threads} threads",
            ours=Ours(case, start, coordinates="span").steps,
            reference=reference,
            theirs=theirs,
            repeats=repeats,
            per_call=case.steps,
        )


def check_gradients(case: Case, start: Start, span: SpanCoordinates) -> None:
    """Raises ValueError if a step in the span has other gradients than autograd's in pixels."""
    (solver,) = Ours(case, start, coordinates="span").solvers
    _, by_z, by_lam = solver.objective(solver.x, solver.lam)
    net = ReferenceNet(SHAPE, (case.width, case.width))
    net.load(case.architecture.to_state_dict(start.victims[0]))
    leaves = start.x[0].clone().requires_grad_(), start.lam[0].clone().requires_grad_()
    signs = balanced_signs(case.n_candidates, torch.float32)
    loss = plain_objective(net, *leaves, signs, ReferenceAttack())
    by_x, of_lam = torch.autograd.grad(loss, leaves)
    for ours, theirs in ((by_z, span.inside(by_x[None])), (by_lam, of_lam[None])):
        difference = float((ours - theirs).norm() / theirs.norm())
        if not difference < AGREEMENT:
            raise ValueError(
                f"gradients differ by {difference:.2g} relative, more than {AGREEMENT}: not "
                "comparable"
            )


@dataclass(frozen=True)
class Back:
    """Yield of one attack: good images, their mean SSIM, good decoys, seconds."""

    good: int
    ssim: float
    decoys: int
    seconds: float


def both_ways(
    images: ImageSet, n_victims: int, *, n_images: int, n_iterations: int
) -> Iterator[Measurement]:
    """Victims of `cifar-hundred`, each attacked in pixels and in the span."""
    pairs = []
    for seed in range(n_victims):
        pairs.append(victim_both_ways(images, seed, n_images, n_iterations))
        pixels, span = pairs[-1]
        case = f"victim {seed} of cifar-hundred, {n_images} images, {n_iterations:,} iterations"
        yield _beside(f"{case}: good images", pixels.good, span.good, f"good of {n_images}")
    case = f"{n_victims} victims of cifar-hundred, {n_images} images, {n_iterations:,} iterations"
    for name, unit in (
        ("good", f"good of {n_images}"),
        ("ssim", "mean SSIM"),
        ("decoys", f"good decoys of {n_images}"),
        ("seconds", "s"),
    ):
        values = [(float(getattr(a, name)), float(getattr(b, name))) for a, b in pairs]
        mean, low, high = paired([b - a for a, b in values])
        text = f"{case}: {unit}, span less pixels {mean:+.3g} [{low:+.3g}, {high:+.3g}]"
        yield _beside(
            text, statistics.mean(a for a, _ in values), statistics.mean(b for _, b in values), unit
        )


def victim_both_ways(
    images: ImageSet, seed: int, n_images: int, n_iterations: int
) -> tuple[Back, Back]:
    """(in pixels, in the span), of one victim and one starting point."""
    experiment = preset("cifar-hundred").campaign("heldout").experiment
    assert isinstance(experiment, KKT)
    assert isinstance(experiment.attack, KKTAttack)
    seen, decoys = drawn(images, n_images, seed)
    rows = (seen * 255).round().to(torch.uint8)
    labels = tuple([0] * (n_images // 2) + [1] * (n_images // 2))
    spec = RunSpec(run=seed, root_seed=seed, image_ids=tuple(range(n_images)), labels=labels)
    victim = experiment.train_victim(spec, rows, device=CPU)
    attack = replace(experiment.attack, n_candidates=2 * n_images, save_at=(n_iterations,))

    def attacked(coordinates: Coordinates) -> Back:
        generators = [spec.generator("attack")]
        settings = settings_of(attack, generators)
        x, lam = starting_points(attack, settings, victim.architecture.d, generators)
        began = time.perf_counter()
        ended = reconstruct(
            victim.architecture,
            victim.trained.parameters,
            x,
            lam,
            attack=replace(attack, coordinates=coordinates),
            settings=settings,
        )
        seconds = time.perf_counter() - began
        return _back(ended.x[0, -1], victim.mean, seen, decoys, seconds)

    return attacked("pixels"), attacked("span")


def paired(differences: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high): Student's interval at 95 % of a mean difference."""
    return statistics.mean(differences), *t_interval(differences)


def _back(x: Tensor, mean: Tensor, seen: Tensor, decoys: Tensor, seconds: float) -> Back:
    pictures = fit_to_range(x.unflatten(1, seen.shape[1:]), mean)
    best, lucky = (ssim_matrix(pictures, some).amax(0) for some in (seen, decoys))
    good, n_lucky = int((best > GOOD).sum()), int((lucky > GOOD).sum())
    return Back(good, float(best.mean()), n_lucky, seconds)


def _beside(case: str, pixels: float, span: float, unit: str) -> Measurement:
    """A number in the span beside that in pixels; alone where one of them is 0."""
    both = pixels > 0 and span > 0
    return measured(
        "span_kkt",
        case,
        span,
        unit,
        reference=IN_PIXELS,
        reference_value=pixels if both else None,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", default="photos", help="folder:PATH, ...; default: photographs")
    parser.add_argument("--quick", action="store_true", help="small cases")
    parser.add_argument("--victims", type=int, default=12, help="of cifar-hundred, at least 2")
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    options = parser.parse_args(argv)
    images = load_images(options.images, split="heldout")
    lines = measure(images, quick=options.quick, n_victims=options.victims)
    for _ in said(lines, options.json):
        pass


if __name__ == "__main__":
    main()
