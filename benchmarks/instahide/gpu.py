"""InstaHide's attacks on a GPU: the same results there as on the CPU, in float64.

python -m benchmarks.instahide.gpu [--quick] [--json docs/results/benchmarks/instahide_gpu.json]
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.instahide.photographs import Case, sizes_of
from benchmarks.instahide.speed import Gaussian
from benchmarks.papers.findings import Run
from benchmarks.record import Measurement, main, measured
from recon_core.attacks.instahide.coherence import (
    centred,
    coherence,
    gradient_windows,
    pursued,
    whitening,
)
from recon_core.attacks.instahide.mixing import Mixing

CPU = torch.device("cpu")
PARITY = 1e-9
"""Of pixels in standard deviations, and of scores relative to the largest."""


def measure(quick: bool) -> Iterator[Measurement]:
    """The largest differences from the CPU's results."""
    yield from parity(device_of(quick=quick))


def device_of(*, quick: bool) -> torch.device:
    """The GPU; SystemExit without one, unless `quick`."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if quick:
        return CPU
    raise SystemExit("benchmarks.instahide.gpu needs a CUDA device; --quick tries it on a CPU")


def parity(device: torch.device) -> Iterator[Measurement]:
    """SystemExit if the device gives something else."""
    for k_pub in (0, 2):
        case = Gaussian.drawn(Mixing.by_parts(k_pub), n=10, p=40, m=90, d=1500)
        ours, theirs = case.recovered(device), case.recovered(CPU)
        if ours.status != theirs.status or (ours.edges != theirs.edges).any():
            raise SystemExit(f"{k_pub} public images: other pairs or statuses than on the CPU")
        off = (ours.images.cpu() - theirs.images).abs().nan_to_num(0.0)
        yield _checked(f"exact attack, {k_pub} public images each: pixels", float(off.max()))
    photos = Case.drawn("photos", sizes_of(Run(quick=True)), 0)
    scores = []
    for where in (device, CPU):
        y, public = photos.encodings.y.double().to(where), photos.public.double().to(where)
        cut = gradient_windows(y, photos.shape)
        pursuit = pursued(y, photos.shape, public, largest=photos.scheme.largest)
        scores.append((coherence(cut @ whitening(cut)).cpu(), centred(pursuit.scores).cpu()))
    for name, mine, true in zip(("coherence", "pursuit"), *scores, strict=True):
        apart = (mine - true).abs().max() / true.abs().max()
        yield _checked(f"{name} of photographs", float(apart))


def _checked(what: str, off: float) -> Measurement:
    if not off < PARITY:
        raise SystemExit(f"{what} differ from the CPU's by {off:.2g}, more than {PARITY:g}")
    text = f"{what}, in float64 against the CPU"
    return measured("instahide_gpu", text, off, "largest difference")


if __name__ == "__main__":
    main(measure)
