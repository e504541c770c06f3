"""Claims of the InstaHide paper on recovering private images, checked.

    python -m benchmarks.papers.instahide [--only NAME ...] [--quick] [--json FILE] [--data SOURCE]

The parts are in PARTS; each can be run alone and then replaces only its own claims in FILE, which
is docs/results/claims/instahide.json. All use the attacks' default settings: on Gaussian images and
one thread; `similarity` and `photographs` on two threads and on the images of --data, of which they
need 5,100. Parts that draw a figure keep what it is drawn from in `instahide/`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.instahide.exact import blind, exact, gram, large, noise, publics
from benchmarks.instahide.oracles import agreement
from benchmarks.instahide.photographs import photographs, similarity
from benchmarks.instahide.samples import samples, signs
from benchmarks.papers import findings
from benchmarks.papers.findings import Part

PARTS: dict[str, Part] = {
    "exact": exact,
    "samples": samples,
    "gram": gram,
    "publics": publics,
    "large": large,
    "signs": signs,
    "noise": noise,
    "blind": blind,
    "agreement": agreement,
    "similarity": similarity,
    "photographs": photographs,
}


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    torch.set_num_threads(1)
    findings.main("papers.instahide", PARTS, __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    main()
