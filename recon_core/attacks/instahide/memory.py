"""Memory that a run of the family `instahide` takes: an upper estimate of live float32 tensors.

With m encodings and q public images of d pixels, n private ones, and w windows of p whitened
differences each (w p is 2 d without overlap): 5 w p (m + q) and 4 m^2 for windows and scores, or 9
d m and 3 q^2 for the fit; beside them 3 d (m + q + n). Runs of a batch go one after another.
"""

from __future__ import annotations

import math

from recon_core.attacks.instahide.run import InstaHideRecovery

PER_WINDOW, PER_SCORE, PER_FITTED, PER_ATOM, PER_PIXEL = 5.0, 4.0, 9.0, 3.0, 3.0
FLOAT = 4


def bytes_per_run(experiment: InstaHideRecovery, n_images: int, shape: tuple[int, int, int]) -> int:
    """Bytes of device memory that a run takes at most; `shape` is (c, h, w)."""
    d, windows = math.prod(shape), experiment.attack.windows
    n_private = max(n_images - experiment.n_public, 2)
    m, q = experiment.n_made(n_private), experiment.n_public
    n_windows = math.prod(max(windows.n_along(side), 1) for side in shape[1:])
    differences = n_windows * 2 * shape[0] * windows.side**2
    first = PER_WINDOW * differences * (m + q) + PER_SCORE * m * m
    second = PER_FITTED * d * m + PER_ATOM * q * q + 2.0 * m * m
    return int(FLOAT * (max(first, second) + PER_PIXEL * d * (m + q + n_private)))
