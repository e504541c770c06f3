"""A similarity that knows the truth, and how good any similarity is.

With the oracle each step after the similarity can be looked at alone, at any noise.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor


def shared_images(private: Int64[Tensor, "m 2"]) -> Int64[Tensor, "m m"]:
    """How many private images each two encodings have in common."""
    same = private[:, None, :, None] == private[None, :, None, :]
    return same.sum((2, 3))


def oracle_similarity(
    private: Int64[Tensor, "m 2"], *, noise: float, generator: torch.Generator
) -> Float32[Tensor, "m m"]:
    """Numbers of common private images, with normal noise of that standard deviation; symmetric.

    The AUC is that of a shift of 1 / noise: .76 for 1, .92 for .5. Raises ValueError for a noise
    below 0.
    """
    if noise < 0:
        raise ValueError(f"noise={noise} must be 0 or more")
    found = torch.zeros(len(private), len(private), device=private.device)
    for row in range(0, len(private), ROWS):
        own, rest = private[row : row + ROWS], private[row:]
        same = (own[:, None, :, None] == rest[None, :, None, :]).sum((2, 3)).float()
        same += noise * torch.randn(same.shape, generator=generator).to(same)
        found[row : row + ROWS, row:] = same
    return found.triu_(1) + found.triu(1).T


ROWS = 500


def auc(scores: Float[Tensor, "m m"], private: Int64[Tensor, "m 2"]) -> float:
    """How often two encodings with a common private image score above two without; ties count half.

    Raises ValueError if all pairs have one, or none has.
    """
    above = torch.triu(torch.ones_like(scores, dtype=torch.bool), 1)
    share = torch.zeros_like(above)
    for row in range(0, len(private), ROWS):
        own = private[row : row + ROWS, None, :, None] == private[None, :, None, :]
        share[row : row + ROWS] = own.any(3).any(2)
    with_one, without = scores[share & above], scores[~share & above].sort().values
    if not len(with_one) or not len(without):
        raise ValueError(
            f"of {int(above.sum())} pairs {len(with_one)} have a common image: an AUC compares "
            "pairs that have one with pairs that have none"
        )
    below = torch.searchsorted(without, with_one.contiguous())
    equal = torch.searchsorted(without, with_one.contiguous(), right=True) - below
    return float((below.double() + equal.double() / 2).mean() / len(without))
