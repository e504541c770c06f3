"""Random numbers of a seed, and calls that are refused, for the tests of the core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def generators(n: int, first: int = 0) -> tuple[torch.Generator, ...]:
    return tuple(generator(first + k) for k in range(n))


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def refuses(message: str, function: Callable[..., object], *given: Any, **settings: Any) -> None:
    """The call raises a ValueError whose message matches."""
    with pytest.raises(ValueError, match=message):
        function(*given, **settings)
