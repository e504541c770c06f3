"""A study's record by cell and victim, and differences between cells with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from recon_core.summary import N_BOOTSTRAP, bootstrap_interval
from tasks.study.statements import Difference, NotTestableError

MIN_IMAGES = 8
"""Fewer images of a victim have no rank correlation."""

Floats = npt.NDArray[np.float64]
Record = Mapping[str, Any]


Window = Literal[11, 3]
"""Of SSIM, in pixels: ours, and the KKT paper's authors'."""
PAPER_ATTACKS, PAPER_ITERATIONS = 100, 50_000
"""On each network of the KKT paper."""


class Results:
    """A study's record by cell and victim; `ssim` and what is good are by SSIM of that `window`."""

    def __init__(self, record: Record, *, window: Window = 11) -> None:
        self.record = record
        self.threshold = float(record["good_threshold"])
        columns = record["images"]
        self.cell = np.array(columns["cell"], np.int64)
        self.victim = np.array(columns["victim"], np.int64)
        self.score = "ssim" if window == 11 else "ssim3"
        names = {"ssim": self.score, "decoy_ssim": f"decoy_{self.score}"}
        self.values: dict[str, Floats] = {
            name: np.array([np.nan if v is None else v for v in columns[key]], np.float64)
            for name in ("margin", "loss", "ssim", "decoy_ssim")
            if (key := names.get(name, name)) in columns
        }

    def cells(self, panel: str | None = None, **at: Any) -> list[dict[str, Any]]:
        """Cells of a panel at some values of the axes, in order.

        Raises NotTestableError if there is none.
        """
        found = [
            dict(cell)
            for cell in self.record["cells"]
            if (panel is None or cell["panel"] == panel)
            and all(cell["at"].get(name) == value for name, value in at.items())
        ]
        if not found:
            raise NotTestableError(f"no cell with {panel or ''} {at or ''}".strip())
        return found

    def of(self, cell: Mapping[str, Any], name: str) -> list[Floats]:
        """A column of the images, victim by victim."""
        if name not in self.values:
            return self._no_decoy_good(cell)
        return [self.values[name][self.victim == victim] for victim in cell["victims"]]

    def _no_decoy_good(self, cell: Mapping[str, Any]) -> list[Floats]:
        """Decoys of a record that has their scores by another window alone: 0 where none is good.

        Raises NotTestableError where one is.
        """
        if n_good := cell["decoys"]["n_good_ssim3"]:
            raise NotTestableError(
                f"{cell['name']}: {n_good} decoys are good by a window of 3, but whose was not kept"
            )
        return [np.zeros(cell["n_images"]) for _victim in cell["victims"]]

    def short_of(self) -> str | None:
        """The attacks on a network, if they are fewer or shorter than the KKT paper's."""
        n = int(self.record["n_attacks"])
        ends = {
            int(max(cell["experiment"]["attack"]["save_at"]))
            for cell in self.record["settings"]["cells"]
        }
        if n >= PAPER_ATTACKS and min(ends, default=0) >= PAPER_ITERATIONS:
            return None
        return (
            f"{n} attacks of {' or '.join(f'{end:,}' for end in sorted(ends))} iterations on a "
            f"network (theirs {PAPER_ATTACKS} of {PAPER_ITERATIONS:,})"
        )

    def good(self, cell: Mapping[str, Any], name: str = "ssim") -> list[Floats]:
        """1 where the SSIM is above the threshold, else 0, victim by victim."""
        return [(v > self.threshold).astype(np.float64) for v in self.of(cell, name)]

    def more_good(
        self, cell: Mapping[str, Any], than: Mapping[str, Any], *, share: bool = False
    ) -> Difference:
        """Good images (or their share) of a cell minus those of another."""
        return difference(self.good(cell), self.good(than), mean=share)

    def beyond_decoys(self, cell: Mapping[str, Any]) -> Difference:
        """Share of good images minus that of good decoys."""
        return difference(self.good(cell), self.good(cell, "decoy_ssim"), mean=True)

    def share(self, cell: Mapping[str, Any]) -> float:
        return float(np.concatenate(self.good(cell)).mean())

    def count(self, cell: Mapping[str, Any]) -> float:
        """Good images per victim."""
        return float(sum(g.sum() for g in self.good(cell)) / len(cell["victims"]))

    def rank_correlation(
        self, cells: Sequence[Mapping[str, Any]], one: str, other: str
    ) -> Difference:
        """Spearman's correlation within victims, averaged over those of all cells."""
        rhos = []
        for cell in cells:
            for a, b in zip(self.of(cell, one), self.of(cell, other), strict=True):
                usable = np.isfinite(a) & np.isfinite(b)
                if usable.sum() >= MIN_IMAGES and np.ptp(a[usable]) and np.ptp(b[usable]):
                    rhos.append(float(stats.spearmanr(a[usable], b[usable]).statistic))
        if len(rhos) < 2:
            raise NotTestableError(
                f"too few victims of {MIN_IMAGES} images or more whose {one} and {other} vary"
            )
        low, high = bootstrap_interval(np.array(rhos))
        return Difference(float(np.mean(rhos)), low, high, tuple(rhos), "victim")


def difference(one: Sequence[Floats], other: Sequence[Floats], *, mean: bool = False) -> Difference:
    """Difference of the sums (or means) over images, averaged over victims; resampled."""
    if len(one) != len(other):
        raise NotTestableError("the cells have other numbers of victims")

    def total(values: Floats) -> float:
        return float(values.mean() if mean else values.sum())

    by_victim = [total(a) - total(b) for a, b in zip(one, other, strict=True)]
    rng = np.random.default_rng(0)

    def drawn(groups: Sequence[Floats]) -> Floats:
        sums = np.zeros(N_BOOTSTRAP)
        for values in groups:
            picked = rng.choice(values, (N_BOOTSTRAP, len(values)))
            sums += picked.mean(1) if mean else picked.sum(1)
        return sums / len(groups)

    low, high = np.quantile(drawn(one) - drawn(other), [0.025, 0.975])
    value = float(np.mean(by_victim))
    return Difference(value, float(low), float(high), tuple(by_victim), "victim")
