"""The record of a study of split classifiers by cell and seed, and differences with intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from recon_core.summary import t_interval
from tasks.study.statements import Difference, NotTestableError

Record = Mapping[str, Any]
Value = Callable[[Record], float]
MIN_ROW = 3
"""Fewer settings of a row of the grid have no trend: two of them order themselves by chance."""
N_SHUFFLES = 10_000


def difference(pairs: Iterable[tuple[float, float]]) -> Difference:
    """The first of each pair minus the second. Raises NotTestableError for fewer than two pairs."""
    by_seed = tuple(a - b for a, b in pairs)
    if len(by_seed) < 2:
        raise NotTestableError(f"{len(by_seed)} seeds have no interval; two at least are needed")
    return Difference(float(np.mean(by_seed)), *t_interval(by_seed), by_seed)


class InversionResults:
    """A record's cells by source, cut, defence and role."""

    def __init__(self, record: Record) -> None:
        self.record = record

    @property
    def sources(self) -> list[Record]:
        if not self.record["sources"]:
            raise NotTestableError("the study has no images")
        return list(self.record["sources"])

    def cells(self, source: Record, **where: Any) -> list[Record]:
        """Cells of a source whose entries are as given and that have a victim."""
        return [
            cell
            for cell in self.record["cells"]
            if cell["source"] == source["name"]
            and cell["seeds"]
            and all(cell[key] == value for key, value in where.items())
        ]

    def role(self, source: Record, role: str) -> Record:
        """The cell with a role; NotTestableError if there is none."""
        for cell in self.cells(source):
            if role in cell["roles"]:
                return cell
        raise NotTestableError(f"{source['title']} has no cell that is the {role!r}")

    def sweet(self, source: Record, attack: str) -> Record:
        """The sweet spot; NotTestableError where it is the network without defence itself."""
        cell = self.role(source, f"sweet spot {attack}")
        if cell["defence"]["kind"] == "none":
            raise NotTestableError(
                f"{source['title']}: no defence of the grid leaks less within the accuracy that "
                "may be lost"
            )
        return cell

    @property
    def confirming(self) -> set[int]:
        """Seeds by which no sweet spot was chosen; all, if there are no others."""
        every = set(range(self.record["n_seeds"]))
        return every - set(range(self.record["n_grid_seeds"])) or every

    def compare(
        self, one: Record, other: Record, value: Value, *, seeds: Iterable[int] | None = None
    ) -> Difference:
        """Difference of `value` between two cells, by the seeds of both."""
        wanted = None if seeds is None else set(seeds)
        found = []
        theirs = {seed["seed"]: seed for seed in other["seeds"]}
        for seed in one["seeds"]:
            number = seed["seed"]
            if number in theirs and (wanted is None or number in wanted):
                found.append((value(seed), value(theirs[number])))
        return difference(found)

    def within(self, cell: Record, one: Value, other: Value) -> Difference:
        """Difference of two values in the same cell, by seed."""
        return difference(
            (one(seed), other(seed)) for seed in cell["seeds"] if _has(seed, one, other)
        )

    def grid(self, source: Record) -> list[Record]:
        """The cells of MixCon's grid; NotTestableError for fewer than four."""
        cells = [
            cell for cell in self.cells(source, in_grid=True) if cell["defence"]["kind"] == "mixcon"
        ]
        if len(cells) < 4:
            raise NotTestableError(f"the grid of {source['title']} has {len(cells)} cells")
        return cells


def accuracy(seed: Record) -> float:
    return float(seed["accuracy"])


def distance(seed: Record) -> float:
    return float(seed["distance"])


def score(attack: str, name: str = "ssim", *, best: bool = False) -> Value:
    """The mean score of a seed's images under an attack, or that of its best recovered image, the
    worst case of the paper's tables; NotTestableError where the attack was not run."""

    def value(seed: Record) -> float:
        if attack not in seed["attacks"]:
            raise NotTestableError(f"attack {attack!r} was not run everywhere")
        scores = seed["attacks"][attack][name]
        return float(np.max(scores) if best else np.mean(scores))

    return value


def trend_within(
    rows: Iterable[Sequence[tuple[float, float]]],
) -> tuple[float, float, list[float]]:
    """The mean of the rows' rank correlations, the share of shuffles within rows whose mean is as
    far on the same side of 0, and each row's.

    Rows of fewer than MIN_ROW pairs, or whose values do not vary, say nothing of a trend and are
    left out. Raises NotTestableError if none is left.
    """
    usable = [np.array(row) for row in rows if len(row) >= MIN_ROW]
    ranked = [stats.rankdata(row, axis=0) for row in usable if np.ptp(row, axis=0).all()]
    if not ranked:
        raise NotTestableError(f"no {MIN_ROW} settings differ in one of lambda and beta alone")
    scaled = [(rank - rank.mean(0)) / (rank.std(0) * np.sqrt(len(rank))) for rank in ranked]
    each = [float(x @ y) for x, y in (one.T for one in scaled)]
    rho = float(np.mean(each))
    rng = np.random.default_rng(0)
    shuffled = np.zeros(N_SHUFFLES)
    for x, y in (one.T for one in scaled):
        shuffled += rng.permuted(np.tile(x, (N_SHUFFLES, 1)), axis=1) @ y / len(scaled)
    share = float(np.mean(shuffled * np.sign(rho) >= abs(rho) - 1e-9))
    return rho, share, each


def _has(seed: Record, *values: Value) -> bool:
    try:
        for value in values:
            value(seed)
    except NotTestableError:
        return False
    return True
