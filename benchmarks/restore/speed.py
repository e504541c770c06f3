"""Training and sampling of both restorers on the CPU, beside the same networks written plainly.

    python -m benchmarks.restore.speed [--quick] [--json FILE]

The reference (`restore.reference`) is what one would write from the papers: channels first, eager,
float32, Adam as a loop over the parameters. It gets our weights, has to give our losses, gradients
and restorations, and is timed in turns with ours, in one process and with the same threads. A ratio
of 1 or more means that we are not slower. Memory is the peak of a process of its own; waiting for
data is that of a trainer reading the balanced stream. Batches are small, since the paper's (512 and
128) take minutes a step on a CPU.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.record import (
    Measurement,
    added_memory,
    check_agreement,
    compared,
    in_new_processes,
    main,
    measured,
)
from benchmarks.restore.reference import (
    ReferenceFit,
    reference_loss,
    reference_net,
    reference_restore,
)
from benchmarks.store import sample as store_sample
from recon_core.restore import PAPER_TRAININGS, BFDnCNN, Examples, Fit, PaperRestorer
from recon_core.restore.edm import EDM
from recon_core.types import N_AUGMENT
from storage.pairs.dataset import Dataset

_line = partial(measured, "restore")


PLAIN = "the same network, channels first, eager, plain Adam"
EDM_STEPS, TIMED_STEPS = 18, 3
NEARLY_ZERO = 1e-3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A restorer, images in a training step, and images that are sampled at once."""

    restorer: PaperRestorer
    batch: int
    n_sampled: int

    def __str__(self) -> str:
        r = self.restorer
        if isinstance(r, EDM):
            return f"EDM {r.size}, {r.resolution}x{r.resolution}"
        return f"BF-DnCNN {r.depth} layers of {r.n_channels}, 32x32"

    @property
    def side(self) -> int:
        return self.restorer.resolution if isinstance(self.restorer, EDM) else 32

    def few_steps(self, n_steps: int) -> PaperRestorer:
        """An EDM of fewer sampler steps; a BF-DnCNN as it is."""
        r = self.restorer
        return replace(r, n_steps=n_steps) if isinstance(r, EDM) else r


CASES = (
    Case(restorer=EDM(), batch=4, n_sampled=4),
    Case(restorer=BFDnCNN(), batch=16, n_sampled=32),
)
QUICK = (
    Case(restorer=EDM(size="tiny"), batch=4, n_sampled=4),
    Case(restorer=BFDnCNN(depth=5, n_channels=32), batch=4, n_sampled=4),
)


def example_batch(n: int, side: int, seed: int = 0) -> Examples:
    """n examples of smooth nothing in particular."""
    draw = torch.Generator().manual_seed(seed)
    target = torch.rand(n, 3, side, side, generator=draw) * 2 - 1
    noise = torch.randn(target.shape, generator=draw)
    labels = torch.randn(n, N_AUGMENT, generator=draw)
    return Examples(condition=(target + 0.3 * noise).clamp(-1, 1), target=target, augment=labels)


def lively(restorer: PaperRestorer) -> nn.Module:
    """Our network, without the nearly zero weights of a fresh one, behind which branches hide."""
    net = restorer.build(seed=0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith("gamma"):
                parameter.uniform_(0.5, 1.5, generator=draw)
            elif parameter.ndim > 1 and parameter.abs().max() < NEARLY_ZERO:
                nn.init.xavier_uniform_(parameter, generator=draw)
    return net


def check_sides(case: Case) -> None:
    """ValueError if losses, gradients or restorations of the two sides differ; networks evaluate
    here, where no dropout differs."""
    restorer = case.restorer
    ours = lively(restorer).eval()
    theirs = reference_net(restorer, ours.state_dict()).eval()
    batch = example_batch(2, case.side)
    loss = restorer.loss(ours, batch, generator=torch.Generator().manual_seed(5))
    reference = reference_loss(restorer, theirs, batch, 5)
    for value in (loss, reference):
        value.backward()
    check_agreement(loss, reference, "losses")
    check_agreement(gradient(ours), gradient(theirs), "gradients")
    few = case.few_steps(TIMED_STEPS)
    sampled = [restored(few, net, 2, case.side) for net in (ours, theirs)]
    check_agreement(sampled[0], sampled[1], "restorations")


def gradient(net: nn.Module) -> Tensor:
    """All gradients in the order of their names."""
    found = sorted(net.named_parameters())
    return torch.cat([p.grad.flatten() for _name, p in found if p.grad is not None])


def restored(restorer: PaperRestorer, net: nn.Module, n: int, side: int) -> Tensor:
    """n restorations by our `restore`, or by the reference's if the network is the reference's."""
    pictures = (example_batch(n, side).condition + 1) / 2
    if not type(net).__name__.startswith("Reference"):
        return restorer.restore(net, pictures, n_samples=1, seeds=torch.arange(n))[0]
    draws = [torch.Generator().manual_seed(image) for image in range(n)]
    noise = [torch.randn(3, side, side, generator=draw) for draw in draws]
    return reference_restore(restorer, net, pictures, torch.stack(noise))


def fits(case: Case) -> tuple[Fit, ReferenceFit]:
    """Both sides before their first step, with the same weights."""
    training = PAPER_TRAININGS[case.restorer.kind]
    ours = Fit(case.restorer, training, device="cpu")
    nets = [reference_net(case.restorer, ours.net.state_dict()) for _ in range(2)]
    return ours, ReferenceFit(case.restorer, training, nets[0], nets[1].requires_grad_(False))


def training(case: Case, repeats: int) -> Iterator[Measurement]:
    """Seconds per image of a training step."""
    ours, theirs = fits(case)
    batch = example_batch(case.batch, case.side)
    timing = compared(
        "restore",
        f"training, per image, {case}, batches of {case.batch}, {torch.get_num_threads()} threads",
        ours=lambda: ours.update(batch),
        reference=PLAIN,
        theirs=lambda: theirs.update(batch, theirs.step),
        repeats=repeats,
        per_call=case.batch,
    )
    yield timing
    yield _line("the same, images a second", 1 / timing.value, "img/s", repeats)


def sampling(case: Case, repeats: int) -> Iterator[Measurement]:
    """Seconds per restored image."""
    net = lively(case.restorer).eval()
    theirs = reference_net(case.restorer, net.state_dict()).eval()
    restorer = case.few_steps(TIMED_STEPS)
    n, share, how = case.n_sampled, 1.0, ""
    if isinstance(restorer, EDM):
        n_full, n_timed = 2 * EDM_STEPS - 1, 2 * restorer.n_steps - 1
        share = n_full / n_timed
        how = f", {n_full} evaluations of the network, {n_timed} of which are timed"
    timing = compared(
        "restore",
        f"sampling, per image, {case}, {n} at once{how}, {torch.get_num_threads()} threads",
        ours=lambda: restored(restorer, net, n, case.side),
        reference=PLAIN.removesuffix(", plain Adam"),
        theirs=lambda: restored(restorer, theirs, n, case.side),
        repeats=repeats,
        per_call=n,
    )
    assert timing.reference_value is not None
    value, reference_value = (
        float(f"{seconds * share:.4g}") for seconds in (timing.value, timing.reference_value)
    )
    yield replace(timing, value=value, reference_value=reference_value)
    yield _line("the same, images a second", 1 / value, "img/s", repeats)


def peak_memory(case: Case) -> Iterator[Measurement]:
    """Memory that two training steps, and sampling, add to a process that has loaded torch."""
    n_threads = torch.get_num_threads()
    for what, n in (("training", case.batch), ("sampling", case.n_sampled)):
        ours, theirs = (
            in_new_processes(_added_memory, (side, what, case, n_threads), repeats=3)
            for side in ("ours", "theirs")
        )
        yield _line(
            f"peak memory of {what}, {case}, {n} images at once, {n_threads} threads",
            ours,
            "MiB",
            3,
            reference=PLAIN,
            reference_value=theirs,
        )


def _added_memory(side: str, what: str, case: Case, n_threads: int) -> float:
    torch.set_num_threads(n_threads)
    smallest: PaperRestorer = BFDnCNN(depth=3, n_channels=8)
    if isinstance(case.restorer, EDM):
        smallest = EDM(size="tiny")
    small = Case(restorer=smallest, batch=2, n_sampled=2)
    return added_memory(partial(_work, side, what, small), partial(_work, side, what, case))


def _work(side: str, what: str, case: Case) -> None:
    """Two training steps, or sampling, from nothing."""
    if what == "sampling":
        net = lively(case.restorer)
        if side == "theirs":
            net = reference_net(case.restorer, net.state_dict())
        restored(case.few_steps(2), net, case.n_sampled, case.side)
        return
    batch, rule = example_batch(case.batch, case.side), PAPER_TRAININGS[case.restorer.kind]
    if side == "ours":
        fit = Fit(case.restorer, rule, device="cpu")
        for _ in range(2):
            fit.update(batch)
        return
    weights = case.restorer.build(seed=0).state_dict()
    nets = [reference_net(case.restorer, weights) for _ in range(2)]
    del weights
    plain = ReferenceFit(case.restorer, rule, nets[0], nets[1])
    for step in range(2):
        plain.update(batch, step)


def waiting(
    case: Case, sizes: store_sample.Sizes, dataset: Dataset, n_waits: int
) -> Iterator[Measurement]:
    """Wait of a training step for its batch of the balanced stream, after the first."""
    feed = store_sample.training_examples(dataset, sizes, batch_size=case.batch, endless=True)
    fit = Fit(case.restorer, PAPER_TRAININGS[case.restorer.kind], device="cpu")
    batches = iter(feed)
    fit.update(Examples(**next(batches)))
    waits, started = [], time.perf_counter()
    for _ in range(n_waits):
        asked = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - asked)
        fit.update(Examples(**batch))
    whole = time.perf_counter() - started
    del batches  # its threads end
    what = f"waiting for data, {case}, {n_waits} steps of {case.batch} images"
    yield _line(f"{what}, per step", statistics.mean(waits), "s", n_waits)
    yield _line(
        f"{what}, of the training's time",
        100 * sum(waits) / whole,
        "%",
        n_waits,
        reference="image restoration paper, of its own training",
        reference_value=20.0,
    )


def measure(quick: bool) -> Iterator[Measurement]:
    """Images a second and memory of both restorers, beside the same networks written plainly."""
    cases, repeats, n_waits = (QUICK, 3, 3) if quick else (CASES, 5, 10)
    for case in cases:
        check_sides(case)
    for case in cases:
        yield from training(case, repeats)
        yield from sampling(case, repeats)
        yield from peak_memory(case)
    sizes = store_sample.QUICK if quick else store_sample.Sizes()
    with tempfile.TemporaryDirectory(prefix="palimpsest-restore-") as folder:
        dataset = store_sample.sample_store(Path(folder), sizes)
        for case in cases:
            if case.side == 32:
                yield from waiting(case, sizes, dataset, n_waits)


if __name__ == "__main__":
    main(measure)
