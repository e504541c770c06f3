"""Number of runs of a part: given, or as many as a GPU holds at once, chosen once for a store."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import torch

from recon_core.experiments import bytes_per_run
from recon_core.sampling import Sampling
from storage.object_store import Location
from storage.pairs.dataset import Dataset, is_store
from tasks.campaign.plan import Campaign
from tasks.cluster.workers import Workers, device_of

SHARE = 0.8
"""Of the free memory; the rest is for the libraries' workspaces and for fragments."""
MOST = 100
"""Runs that are enough to fill a GPU; a larger part only has more to lose, and a round more runs
that do not know of each other."""


def batched(
    campaign: Campaign,
    batch: str,
    *,
    shape: tuple[int, ...],
    workers: Workers,
    store: Location,
) -> Sampling:
    """The sampling with `batch` runs a part: a number, or `auto`; `shape` (c, h, w) of an image.

    `auto` is what the store at `store` has, if there is one. Else, on a GPU of this machine, the
    largest number up to `MOST` that fits and that every phase is a multiple of; on a CPU, where
    runs go one by one, that of the campaign. ValueError, with the fix, for what cannot be.
    """
    sampling = campaign.sampling
    if batch != "auto":
        if not batch.isdecimal() or int(batch) < 1:
            raise ValueError(f"batch={batch!r} must be a number of runs, at least 1, or auto")
        return replace(sampling, runs_per_part=int(batch))
    if is_store(store):
        stored = Dataset(store).manifest.get("campaign", {}).get("sampling", {})
        return replace(sampling, runs_per_part=stored.get("runs_per_part", sampling.runs_per_part))
    if device_of(workers) != "cuda":
        return sampling
    if workers.kind not in ("local", "cuda"):
        raise ValueError(
            f"batch='auto' cannot see the GPUs of {workers.kind}; give a number, for example "
            f"{sampling.runs_per_part}"
        )
    c, h, w = shape
    each = bytes_per_run(campaign.experiment, sampling.images_per_run, (c, h, w))
    free = min(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))
    fits = int(SHARE * free / each)
    if fits < 1:
        raise ValueError(
            f"a run needs about {each / 2**30:.1f} GiB and {SHARE:.0%} of the free "
            f"{free / 2**30:.1f} GiB is less; free the GPU, or use fewer images_per_run, "
            "candidates or saved iterations"
        )
    common = gcd(*(phase.n_runs for phase in sampling.phases))
    most = max(n for n in range(1, min(fits, MOST) + 1) if common % n == 0)
    return replace(sampling, runs_per_part=most)
