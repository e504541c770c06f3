"""The autoencoder's and InstaHide's attacks on a GPU: the same results there as on the CPU.

    python -m benchmarks.gpu.agreement [--quick] [--json docs/results/benchmarks/gpu_agreement.json]

Results in float64 and float32 on the device beside float64 on the CPU; it ends with an error where
they differ by more than rounding. With --quick it also runs where the device is the CPU. The KKT
attack's agreement is measured by `benchmarks.kkt.gpu` before it is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.instahide.photographs import Case, sizes_of
from benchmarks.instahide.speed import Gaussian
from benchmarks.papers.findings import Run
from benchmarks.record import Measurement, main, measured, relative
from recon_core.attacks.instahide.coherence import (
    centred,
    coherence,
    pursued,
    whitened_windows,
)
from recon_core.attacks.instahide.mixing import Mixing
from recon_core.attacks.plug_and_play import Degraded, KnownMask
from recon_core.degradation import MASKS, degrade, mask_pattern
from recon_core.precision import float32_arithmetic
from recon_core.types import seeded_generator
from recon_core.victims.autoencoder import Autoencoder, FullyConnected, UNet, initial_weights
from recon_core.victims.autoencoder_training import AutoencoderTraining, train_autoencoders

CPU = torch.device("cpu")
SEED = 42
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Of relative differences; InstaHide's pixels are in standard deviations."""


@dataclass(frozen=True)
class Victim:
    """A small network of the autoencoder paper, and the gamma of the attack on it."""

    name: str
    network: Autoencoder
    gamma: float


VICTIMS = (
    Victim("tiny FC", FullyConnected(depth=3, width=16), 0.5),
    Victim("tiny U-Net", UNet(channels=(4, 8), skips=False), 1.0),
)


def autoencoders(device: torch.device) -> Iterator[Measurement]:
    """Forward pass, training and recovery of both networks."""
    for victim in VICTIMS:
        exact = computed(victim, CPU, torch.float64)
        for dtype, limit in LIMITS.items():
            found = computed(victim, device, dtype)
            for what, ours, theirs in zip(
                ("forward", "training", "recovery"), found, exact, strict=True
            ):
                kind = str(dtype).removeprefix("torch.")
                case = f"{victim.name}: {what} in {kind} against float64 on the CPU"
                yield checked("autoencoder_gpu", case, relative(ours, theirs), limit)


def computed(victim: Victim, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """f(x), f(x) after 20 epochs, and what comes back from that f when the masks are known."""
    model = victim.network.on((3, 8, 8))
    x = torch.rand(4, 3, 8, 8, generator=seeded_generator(SEED, 0, "images")).to(device, dtype)
    drawn = initial_weights(model, [seeded_generator(SEED, 0, "victim")], dtype=dtype)
    start = {name: tensor.to(device) for name, tensor in drawn.items()}

    @torch.no_grad()
    def f(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return model.forward(weights, x.unsqueeze(0))[0]

    short = AutoencoderTraining(epochs=20, levels=(1e-30,))
    (trained,) = train_autoencoders(model, start, x.unsqueeze(0), training=short)
    patterns = torch.stack(
        [
            mask_pattern(name, 8, 8, generator=seeded_generator(SEED, k, "mask"))
            for k, name in enumerate(MASKS)
        ]
    ).to(device)
    mask = patterns.repeat_interleave(len(x), 0)
    y = degrade(x.repeat(len(MASKS), 1, 1, 1), mask)
    degraded = Degraded(y=y, mask=mask.unsqueeze(1).expand_as(y))
    last = partial(f, trained.last.weights)
    return f(start, x), last(x), KnownMask(gamma=victim.gamma).recover(last, degraded).x


def instahide(device: torch.device) -> Iterator[Measurement]:
    """The exact attack, and the statistics of photographs."""
    check = partial(
        checked, "instahide_gpu", limit=LIMITS[torch.float64], unit="largest difference"
    )
    for k_pub in (0, 2):
        case = Gaussian.drawn(Mixing.by_parts(k_pub), n=10, p=40, m=90, d=1500)
        ours, theirs = case.recovered(device), case.recovered(CPU)
        if ours.status != theirs.status or (ours.edges != theirs.edges).any():
            raise SystemExit(f"{k_pub} public images: other pairs or statuses than on the CPU")
        off = (ours.images.cpu() - theirs.images).abs().nan_to_num(0.0)
        what = f"exact attack, {k_pub} public images each: pixels, in float64 against the CPU"
        yield check(what, float(off.max()))
    photos = Case.drawn("photos", sizes_of(Run(quick=True)), 0)
    scores = []
    for where in (device, CPU):
        y, public = photos.encodings.y.double().to(where), photos.public.double().to(where)
        pursuit = pursued(y, photos.shape, public, largest=photos.scheme.largest)
        white = whitened_windows(photos.shape, y)[0]
        scores.append((coherence(white).cpu(), centred(pursuit.scores).cpu()))
    for name, mine, true in zip(("coherence", "pursuit"), *scores, strict=True):
        off = (mine - true).abs().max() / true.abs().max()
        yield check(f"{name} of photographs, in float64 against the CPU", float(off))


def checked(
    benchmark: str, case: str, off: float, limit: float, unit: str = "relative difference"
) -> Measurement:
    """A difference; SystemExit if it is above the limit."""
    if not off < limit:
        raise SystemExit(f"{case}: differ from the CPU's by {off:.2g}, more than {limit:g}")
    return measured(benchmark, case, off, unit)


def measure(quick: bool) -> Iterator[Measurement]:
    """The largest differences from the CPU's results."""
    if not (quick or torch.cuda.is_available()):
        raise SystemExit("benchmarks.gpu.agreement needs a CUDA device; --quick tries it on a CPU")
    device = torch.device("cuda") if torch.cuda.is_available() else CPU
    with float32_arithmetic("float32", device):
        yield from autoencoders(device)
    yield from instahide(device)


if __name__ == "__main__":
    main(measure)
