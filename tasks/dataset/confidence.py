"""Check of what confident pairs show: a sample of pictures, scored again.

`storage.pairs.verify` compares files with their receipts. It cannot see that a store was written
with a wrong rule: pictures that are the mean image of their run, with confidence, have whole files.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from recon_core.matching import CLIPPED, ROUNDING, fit_to_range
from recon_core.metrics import ssim_pairs
from storage.pairs.dataset import Dataset

N_PARTS = 8
N_PAIRS = 128
"""Parts of a store, and confident pairs of each, that are looked at, evenly spread."""
TOLERANCE = 0.02
"""In SSIM; reconstructions are stored in half precision."""
FIX = "generate the store again with this release"

WINDOW = 11
"""Pixels of SSIM's window."""

_PAIRS = ("run_row", "target_row", "candidate", "reconstruction", "ssim_best", "confident")


def confidence_problems(dataset: Dataset) -> Iterator[str]:
    """What is wrong with confident pairs of up to `N_PARTS` parts, a sentence each.

    A stored score must be that of the picture, and a confident candidate must at some iteration be
    nearer to its image than the mean image of its run alone (not where the mean is 0 everywhere:
    there the reconstruction is a picture by itself).
    """
    receipts = [receipt for receipt in dataset.receipts if receipt.n_pairs]
    if receipts and min(receipts[0].picture[1:]) < WINDOW:
        return  # too small for the window of SSIM
    chosen = np.linspace(0, len(receipts) - 1, min(N_PARTS, len(receipts))).astype(int)
    for receipt in (receipts[k] for k in chosen):
        n_off, n_mean, n_candidates = _of_part(dataset, receipt.part)
        if n_off:
            yield (
                f"part {receipt.part}: {n_off} confident pairs of the sample have another SSIM "
                f"than is stored, by more than {TOLERANCE}; {FIX}"
            )
        if n_mean:
            yield (
                f"part {receipt.part}: {n_mean} of {n_candidates} confident candidates of the "
                f"sample are no nearer to their image than the mean image alone; {FIX}"
            )


def _of_part(dataset: Dataset, part: int) -> tuple[int, int, int]:
    """(pairs with another score, candidates that the mean equals, candidates) of a part's sample,
    of which each candidate has all its iterations."""
    pairs = dataset.read(part, [f"pairs/{name}" for name in _PAIRS])
    rows = np.flatnonzero(pairs["pairs/confident"])
    if not len(rows):
        return 0, 0, 0
    key = pairs["pairs/run_row"][rows].astype(np.int64) << 32 | pairs["pairs/candidate"][rows]
    names = np.unique(key)
    n_saved = -(-len(rows) // len(names))
    wanted = names[:: max(1, len(names) * n_saved // N_PAIRS)]
    rows, key = rows[np.isin(key, wanted)], key[np.isin(key, wanted)]
    run, target = (pairs[f"pairs/{name}"][rows] for name in ("run_row", "target_row"))
    mean = torch.from_numpy(dataset.read(part, ["runs/mean_image"])["runs/mean_image"][run])
    images = dataset.read(part, ["targets/image"])["targets/image"][target]
    image = torch.from_numpy(images).float() / 255
    x = torch.from_numpy(pairs["pairs/reconstruction"][rows]).float()
    settings = dataset.manifest.get("campaign", {}).get("experiment", {})
    picture = fit_to_range(x, mean, clipped=float(settings.get("clipped", CLIPPED)))
    score = ssim_pairs(picture, image).double().numpy()
    lead = score - ssim_pairs(mean, image).double().numpy()
    lead[~mean.flatten(1).any(dim=1).numpy()] = np.inf
    best = np.full(len(wanted), -np.inf)
    np.maximum.at(best, np.searchsorted(wanted, key), lead)
    off = np.abs(score - pairs["pairs/ssim_best"][rows]) > TOLERANCE
    return int(off.sum()), int((best < ROUNDING).sum()), len(wanted)
