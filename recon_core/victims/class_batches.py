"""Batches with as many images of every class, for R networks (MixCon paper, footnote 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int64
from torch import Tensor

Shuffle = Callable[[int, int], torch.Generator]
"""`shuffle(stream, epoch)`: the CPU generator that an epoch's orders are drawn from, class after
class. It must give the same numbers whenever it is asked for the same."""


@dataclass(frozen=True, kw_only=True)
class ClassBatches:
    """Class-balanced batches (r, p * k, c, h, w), where row i * k + c is image i of class c; r = 1
    if all networks see the same images in the same order.

    An epoch shuffles every class on its own and takes as many images of each as the smallest class
    has, `per_class` at a time; the last batch may be smaller. `x` and `labels` are of all networks,
    or have a leading dimension of networks; `streams` says whose order each network's images have.
    """

    x: Float[Tensor, "n c h w"] | Float[Tensor, "r n c h w"]
    labels: Int64[Tensor, " n"] | Int64[Tensor, "r n"]
    n_classes: int
    per_class: int
    shuffle: Shuffle
    streams: Sequence[int]

    def __post_init__(self) -> None:
        for row, members in enumerate(self.members):
            sizes = [len(images) for images in members]
            c, size = min(enumerate(sizes), key=lambda pair: pair[1])
            if size < self.per_class:
                raise ValueError(
                    f"class {c} has {size} images, a batch {self.per_class} of each of the "
                    f"{self.n_classes} classes; give more images of it, or a smaller per_class"
                )
            if size != self.smallest:
                raise ValueError(
                    f"the smallest class of network {row} has {size} images, that of network 0 "
                    f"{self.smallest}; train them one after the other"
                )

    @cached_property
    def members(self) -> list[list[Tensor]]:
        labels = self.labels.cpu() if self.labels.dim() == 2 else self.labels.cpu().unsqueeze(0)
        return [[(row == c).nonzero()[:, 0] for c in range(self.n_classes)] for row in labels]

    @property
    def smallest(self) -> int:
        """Images of the smallest class."""
        return min(len(images) for images in self.members[0])

    @property
    def n_networks(self) -> int:
        return len(self.streams)

    @property
    def n_batches(self) -> int:
        return -(-self.smallest // self.per_class)

    @property
    def last(self) -> int:
        """Images of each class in the last batch of an epoch."""
        return self.smallest - self.per_class * (self.n_batches - 1)

    def of_epoch(self, epoch: int) -> Iterator[Tensor]:
        keys = list(zip(self.streams, range(self.n_networks), strict=True))
        if len(self.members) == 1:
            keys = [(stream, 0) for stream in self.streams]
        orders = {key: self._order(epoch, *key) for key in dict.fromkeys(keys)}
        if len(orders) == 1:
            keys = keys[:1]
        order = torch.stack([orders[key] for key in keys]).to(self.x.device)
        networks = torch.arange(self.n_networks, device=self.x.device).unsqueeze(1)
        for part in order.split(self.per_class, dim=1):
            images = part.flatten(1)
            rows = images if self.x.dim() == 4 else (networks, images)
            yield self.x[rows]

    def _order(self, epoch: int, stream: int, row: int) -> Int64[Tensor, "n k"]:
        generator = self.shuffle(stream, epoch)
        drawn = [
            images[torch.randperm(len(images), generator=generator)] for images in self.members[row]
        ]
        return torch.stack([images[: self.smallest] for images in drawn], dim=1)
