"""What paper 004 says of recovering InstaHide's private images, checked on Gaussian images.

    python -m benchmarks.claims_004 [--only NAME ...] [--quick] [--json FILE]

The parts are in PARTS; each can be run alone and then replaces only its own claims in FILE, which
is docs/results/claims-004.json. All use the attack's default settings, on one thread. `samples` and
`signs` draw their figure beside the claims and keep its numbers in `instahide/`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks import findings
from benchmarks.findings import Part
from benchmarks.instahide_agreement import agreement
from benchmarks.instahide_blind import blind
from benchmarks.instahide_exact import exact, large, noise, publics
from benchmarks.instahide_samples import samples
from benchmarks.instahide_signs import signs

PARTS: dict[str, Part] = {
    "exact": exact,
    "samples": samples,
    "publics": publics,
    "large": large,
    "signs": signs,
    "noise": noise,
    "blind": blind,
    "agreement": agreement,
}


def main(argv: Sequence[str] | None = None) -> None:
    """The command line, on one thread."""
    torch.set_num_threads(1)
    findings.main("claims_004", PARTS, __doc__.splitlines()[0], argv)


if __name__ == "__main__":
    main()
