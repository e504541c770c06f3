"""Correlations of images, from the vectors whose inner products they are."""

from __future__ import annotations

from torch import Tensor

from recon_core.metrics import unit_vectors


def correlation_matrix(
    a: Tensor, b: Tensor, *, half_size: bool = False, per_channel: bool = True
) -> Tensor:
    """Of every image of `a` with every image of `b`, in [-1, 1]."""
    left, right = (unit_vectors(x, half_size=half_size, per_channel=per_channel) for x in (a, b))
    return (left @ right.T).clamp(-1, 1).float()
