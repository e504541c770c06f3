"""Small real pictures for the tests of the core: tiles of a photograph, handwritten digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from skimage import data
from torch import Tensor

DIGITS = Path(__file__).parents[2] / "storage" / "sources" / "digits.npz"


def photograph_tiles(size: int, *, shrink: int) -> Tensor:
    """All disjoint `size` x `size` tiles, uint8 (n, 3, size, size), after shrinking by areas."""
    picture = torch.from_numpy(np.ascontiguousarray(data.astronaut())).permute(2, 0, 1)
    small = torch.nn.functional.avg_pool2d(picture[None].float(), shrink)[0].round()
    tiles = small.unfold(1, size, size).unfold(2, size, size).permute(1, 2, 0, 3, 4).flatten(0, 1)
    order = torch.randperm(len(tiles), generator=torch.Generator().manual_seed(0))
    return tiles.to(torch.uint8)[order].contiguous()


def digits(n: int) -> Tensor:
    """The first embedded handwritten digits, grey in [0, 1] on a black ground, (n, 1, 16, 16)."""
    with np.load(DIGITS, allow_pickle=False) as file:
        pixels = torch.from_numpy(file["pixels"][:n]).float() / 16
    return pixels[:, None].repeat_interleave(2, 2).repeat_interleave(2, 3)
