"""InstaHide's attacks on a GPU: are they right, and how fast beside this machine's CPU?

    python -m benchmarks.instahide.gpu [--quick] [--json docs/results/benchmarks/instahide_gpu.json]

First, float64 on the GPU has to give what float64 on the CPU gives: of the exact attack the same
statuses, pairs and pixels, of photographs the same scores; or nothing is timed. Then seconds of
both, in the same run: the exact attack at 1,000 and 5,000 encodings, 1,000 images in 10,000
encodings on the GPU alone, scores of 5,000 encodings of photographs, and the whole practical attack
on them, whose images have to come back as well as on the CPU. With --quick it works on a CPU too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.instahide.photographs import Case, Outcome, Sizes, sizes_of
from benchmarks.instahide.speed import Gaussian
from benchmarks.papers.findings import PHOTOS, Run
from benchmarks.record import Measurement, compared, main, measured, seconds_of
from recon_core.attacks.instahide.mixing import Mixing
from recon_core.attacks.instahide.pair_statistics import likeness
from recon_core.attacks.instahide.practical import recover_practically
from recon_core.attacks.instahide.recover import Recovered, recover

CPU = torch.device("cpu")
_line = partial(measured, "instahide_gpu")
GPU = torch.device("cuda")
PARITY = 1e-9
"""Of pixels in standard deviations, and of scores relative to the largest."""


def measure(quick: bool) -> Iterator[Measurement]:
    """Parity, then seconds beside the CPU's."""
    device = device_of(quick=quick)
    yield from parity(device)
    yield from exact(device, quick=quick)
    yield from of_photographs(device, quick=quick)


def device_of(*, quick: bool) -> torch.device:
    """The GPU; SystemExit without one, unless that is meant."""
    if torch.cuda.is_available():
        return GPU
    if quick:
        return CPU
    raise SystemExit("benchmarks.instahide.gpu needs a CUDA device; --quick tries it on a CPU")


def parity(device: torch.device) -> Iterator[Measurement]:
    """SystemExit if the device gives something else."""
    for k_pub in (0, 2):
        case = Gaussian.drawn(Mixing.by_parts(k_pub), n=10, p=40, m=90, d=1500)
        ours, theirs = recovered(case, device), recovered(case, CPU)
        if ours.status != theirs.status or (ours.edges != theirs.edges).any():
            raise SystemExit(f"{k_pub} public images: other pairs or statuses than on the CPU")
        off = (ours.images.cpu() - theirs.images).abs().nan_to_num(0.0)
        yield _checked(f"exact attack, {k_pub} public images each: pixels", float(off.max()))
    seen = Case.drawn(PHOTOS, sizes_of(Run(quick=True)), 0).seen()
    for name in ("squares", "coherence", "pursuit"):
        assert seen.public is not None
        whole = replace(seen, y=seen.y.double(), public=seen.public.double())
        there = replace(whole, y=whole.y.to(device), public=seen.public.double().to(device))
        true = likeness(name, whole)
        off = (likeness(name, there).cpu() - true).abs().max() / true.abs().max()
        yield _checked(f"{name} of photographs", float(off))


def exact(device: torch.device, *, quick: bool) -> Iterator[Measurement]:
    """Normal pixels; every image has to come back."""
    n, p, d = (10, 40, 1500) if quick else (100, 1000, 3072)
    for m in (90,) if quick else (1000, 5000):
        case = Gaussian.drawn(Mixing.by_parts(2), n=n, p=p, m=m, d=d)
        for where in (device, CPU):
            found = recovered(case, where)
            if case.n_exact(replace(found, images=found.images.cpu())) < n:
                raise SystemExit(f"m={m}: not all images came back on {where}; nothing is timed")
        text = f"exact recovery of {n} images from {m} encodings, 2 of {p} public images, d={d}"
        yield _against(text, partial(recovered, case), device, 1 if quick else 3)
    if not quick:
        case = Gaussian.drawn(Mixing.by_parts(2), n=1000, p=1000, m=10_000)
        seconds = seconds_of(lambda: recovered(case, device))
        yield _line("exact recovery of 1,000 images from 10,000 encodings", seconds, "s")


def of_photographs(device: torch.device, *, quick: bool) -> Iterator[Measurement]:
    """Scores, and the whole practical attack."""
    sizes = sizes_of(Run(quick=True)) if quick else replace(Sizes(), p=200, n_others=0)
    case = Case.drawn(PHOTOS, sizes, 0)
    text = f"{len(case.encodings.y)} encodings of photographs, {case.shape[1]} pixels a side"

    def pursuit(where: torch.device) -> object:
        seen = case.seen()
        assert seen.public is not None
        return likeness("pursuit", replace(seen, y=seen.y.to(where), public=seen.public.to(where)))

    yield _against(f"scores by pursuit, {text}", pursuit, device, 1 if quick else 3)
    found: dict[str, Outcome] = {}

    def practical(where: torch.device) -> None:
        e = case.encodings
        there = recover_practically(
            e.y.to(where),
            case.shape,
            mixing=case.scheme,
            public=case.public.to(where),
            n_private=sizes.n,
            labels=None if e.labels is None else e.labels.to(where),
            generator=torch.Generator().manual_seed(0),
            how=sizes.practical,
        )
        found[where.type] = Outcome.of(replace(there, images=there.images.cpu()), case, 0.0)

    line = _against(f"practical attack, {text}", practical, device, 1)
    words = "; ".join(
        f"{where}: {o.exact} of {sizes.n} images exact, {o.false} falsely called so"
        for where, o in found.items()
    )
    yield replace(line, case=f"{line.case}; {words}")


def recovered(case: Gaussian, device: torch.device) -> Recovered:
    """By the exact attack, from encodings that are on the device."""
    return recover(
        case.encodings.y.to(device),
        case.mixing,
        public=case.public.to(device),
        n_private=len(case.private),
        generator=torch.Generator().manual_seed(0),
    )


def _checked(what: str, off: float) -> Measurement:
    if not off < PARITY:
        raise SystemExit(f"{what} differ from the CPU's by {off:.2g}, more than {PARITY:g}")
    return _line(f"{what}, in float64 against the CPU", off, "largest difference")


def _against(
    case: str, run: Callable[[torch.device], object], device: torch.device, repeats: int
) -> Measurement:
    """Seconds on the device beside the CPU's, in turns."""
    return compared(
        "instahide_gpu",
        case,
        ours=lambda: run(device),
        reference=f"the CPU of the same machine, {torch.get_num_threads()} threads",
        theirs=lambda: run(CPU),
        repeats=repeats,
    )


if __name__ == "__main__":
    main(measure)
