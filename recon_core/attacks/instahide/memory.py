"""Memory that a run of the family `instahide` takes, to tell how many a GPU holds at once.

An upper estimate from counting live float32 tensors, the larger of two. With m encodings and q
public images of d pixels, n private ones, and w windows of p whitened differences each (w p is 2 d
without overlap): windows take 5 w p (m + q), scores 4 m^2; the fit 9 d m, and 3 q^2. Beside them
3 d (m + q + n) are kept. Runs of a batch go one after another, so that a batch takes what a run
does. Library workspaces are not in it.
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
