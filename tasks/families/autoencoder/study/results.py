"""The record of a recovery study by victim, loss and method, image by image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recon_core.recovery_scores import psnr
from recon_core.summary import bootstrap_interval
from tasks.families.autoencoder.study.figure_specs import (
    at_lowest,
    cells_of,
    copies,
    lowest,
    moderate,
)
from tasks.study.statements import Difference, NotTestableError

Floats = npt.NDArray[np.float64]
Record = Mapping[str, Any]
Score = Callable[[Floats], Floats]


class RecoveryResults:
    """A study's record; every look-up raises NotTestableError where there is nothing."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.accurate: Score = self.below(float(record["thresholds"]["accurate"]))
        self.approximate: Score = self.below(float(record["thresholds"]["approximate"]))

    @staticmethod
    def below(threshold: float) -> Score:
        """1 where an error is below the threshold, else 0."""
        return lambda mse: (mse < threshold).astype(np.float64)

    @staticmethod
    def decibels(mse: Floats) -> Floats:
        return np.asarray(psnr(torch.from_numpy(mse)).numpy())

    @property
    def perfect(self) -> list[Record]:
        """Victims that overfit their images, beyond the moderate regime."""
        few = [victim["name"] for victim in moderate(self.record)]
        victims = [v for v in self.record["victims"] if v["name"] not in few and not copies(v)]
        return self._asked(victims, "victim of the perfect fitting regime was evaluated")

    def moderate(self, kind: str = "") -> list[Record]:
        """Victims of the moderate regime that overfit: "fc", "unet", or both."""
        of_kind = [v for v in moderate(self.record) if kind in ("", v["architecture"]["kind"])]
        found = [victim for victim in of_kind if not copies(victim)]
        return self._asked(found, f"{kind} victim of the moderate regime was evaluated".strip())

    @property
    def copying(self) -> list[Record]:
        """Victims that reached a low loss by copying their input."""
        found = [victim for victim in self.record["victims"] if copies(victim)]
        return self._asked(found, "victim copies its input")

    @property
    def evaluated(self) -> list[Record]:
        return self._asked(self.record["victims"], "victim reached a loss")

    def _asked(self, victims: Sequence[Record], what: str) -> list[Record]:
        found = [victim for victim in victims if victim["levels"]]
        if not found:
            raise NotTestableError(f"no {what}")
        return found

    def cells(
        self, victim: Record, method: str, *, level: float | None = None, **where: Any
    ) -> list[Record]:
        """Cells of a method in the order of masks, by default at the lowest loss reached."""
        at = {"sigma": 0.0, "split": "train", **where, "method": method}
        if level is None:
            found = at_lowest(self.record, victim, **at)
        else:
            found = cells_of(self.record, victim=victim["name"], level=level, **at)
        if not found:
            raise NotTestableError(f"no {method!r} on {victim['title']} {_words(where)}".rstrip())
        return found

    def lowest(self, victim: Record) -> float:
        """The lowest loss that was reached."""
        found = lowest(victim)
        if found is None:
            raise NotTestableError(f"{victim['title']} reached no loss")
        return float(found["level"])

    def by_image(self, cells: Sequence[Record], score: Score) -> Floats:
        """The mean score of every image over its cells, which are its masks."""
        n = min(len(cell["mse"]) for cell in cells)
        scores = [score(np.array(cell["mse"][:n], np.float64)) for cell in cells]
        return np.asarray(np.mean(scores, axis=0))

    def share(self, cells: Sequence[Record], score: Score) -> float:
        return float(self.by_image(cells, score).mean())

    def mean(self, cells: Sequence[Record], score: Score) -> Difference:
        """The share of `cells`, with its interval over images."""
        values = self.by_image(cells, score)
        return Difference(float(values.mean()), *bootstrap_interval(values))

    def difference(
        self, cells: Sequence[Record], than: Sequence[Record], score: Score
    ) -> Difference:
        """The mean over images of how much higher their scores are; over the masks of both."""
        masks = {cell["mask"] for cell in cells} & {cell["mask"] for cell in than}
        if not masks:
            raise NotTestableError("the methods have no mask in common")
        one, other = (
            self.by_image([cell for cell in side if cell["mask"] in masks], score)
            for side in (cells, than)
        )
        n = min(len(one), len(other))
        gained = one[:n] - other[:n]
        return Difference(float(gained.mean()), *bootstrap_interval(gained))


def _words(where: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in where.items())
