"""Photographs for InstaHide's encodings."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from storage.sources.embedded import photograph_tiles


def photographs(n: int, side: int, drawn: torch.Generator) -> Float[Tensor, "n d"]:
    """Tiles of photographs in [-1, 1]."""
    tiles = torch.from_numpy(photograph_tiles("train", side)[1]).float() * (2 / 255) - 1
    return tiles[torch.randperm(len(tiles), generator=drawn)[:n]].flatten(1)
