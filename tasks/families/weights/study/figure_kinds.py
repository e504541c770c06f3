"""The kinds of figures that a study's page can show: what to draw, in the words of the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

Number = Literal[
    "n_good", "good_fraction", "mean_ssim", "test_accuracy", "n_effective", "attack_seconds"
]


@dataclass(frozen=True, kw_only=True)
class Heatmap:
    """A value of every cell of a panel, and of the cells `also`, over two axes."""

    kind: ClassVar[str] = "heatmap"
    name: str
    title: str
    where: str
    panel: str
    x: str
    y: str
    value: Number
    also: tuple[int, ...] = ()
    caption: str
    cannot: str


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A value of every cell of a panel, and of the cells `also`, over one axis, a line per value of
    another; `baselines`, numbers of cells, are drawn as levels."""

    kind: ClassVar[str] = "lines"
    name: str
    title: str
    where: str
    panel: str
    x: str
    series: str | None
    value: Number
    baselines: tuple[int, ...] = ()
    also: tuple[int, ...] = ()
    caption: str
    cannot: str


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """SSIM of every image against its distance from the boundary or its loss, cell by cell."""

    kind: ClassVar[str] = "scatter"
    name: str
    title: str
    where: str
    x: Literal["margin", "loss"]
    cells: tuple[int, ...]
    caption: str
    cannot: str


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels of a cell's first victim."""

    kind: ClassVar[str] = "kernels"
    name: str
    title: str
    where: str
    cells: tuple[int, ...]
    caption: str
    cannot: str


Figure = Heatmap | Lines | Scatter | Kernels
