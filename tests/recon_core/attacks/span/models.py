"""A model of images that is small enough for float64 and second derivatives."""

from __future__ import annotations

from functools import partial

import torch

from recon_core.attacks.span.features import SourceModel
from tests.recon_core.drawing import generator


def small_model(share: float = 1.0) -> SourceModel:
    """A model of images 2x10x15, whose last row its filters do not reach, with this share of
    entries in its pools."""
    drawn = partial(torch.rand, generator=generator(9), dtype=torch.float64)
    pools = drawn(5, 10)
    return SourceModel(
        filters=drawn(10, 2, 3, 3) - 0.5,
        stride=2,
        pools=torch.where(pools <= pools.quantile(share), pools, 0.0),
        alpha=0.3 + pools[:, 0],
        kappa=torch.tensor(0.4, dtype=torch.float64),
        spectrum=torch.ones(2, 10, 15, dtype=torch.float64),
    )
