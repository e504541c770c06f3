"""Random numbers of a seed, for the tests of the core."""

from __future__ import annotations

import torch
from torch import Tensor


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def generators(n: int, first: int = 0) -> tuple[torch.Generator, ...]:
    return tuple(generator(first + k) for k in range(n))


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)
