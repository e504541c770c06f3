"""A victim's scores from the attacks on it: best matches of all runs, votes, criteria. Runs come
one after the other and only scores are kept of them, so that hundreds fit in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recon_core.matching import (
    fit_to_range,
    mean_of_votes,
    nearest_candidates,
    sum_of_votes,
)
from recon_core.metrics import ncc_matrix
from recon_core.ranking import agreement, consistency
from recon_core.summary import score_matches
from recon_core.types import seeded_generator
from storage.pairs.dataset import Dataset
from tasks.evaluation.record import NEAREST, ORIGIN, Arrays
from tasks.evaluation.scores import UNLIKE, Advance, Bench, Candidates, arrays_of, read_candidates
from tasks.evaluation.settings import CONTROL
from tasks.evaluation.victims import EvaluatedRun, Victim

MAX_OF_RUN = 200
MAX_RANKED = 6000
"""Candidates of a run, and of a victim, of which agreement and consistency are computed."""

NO_MATCH: dict[str, float] = {
    "ssim": 0.0,
    "haarpsi": 0.0,
    "ssim3": 0.0,
    "rmse": math.nan,
    "lead": 0.0,
    "disagreement": math.nan,
    "run": -1,
    "candidate": -1,
    "iteration": -1,
}
"""What an image scores when nothing came back."""


@dataclass
class BestOfRuns:
    """The best match of each row over the runs so far; of equal ones the first run's."""

    n_rows: int
    columns: Arrays = field(default_factory=dict)

    def take(self, run: int, found: Mapping[str, npt.NDArray[Any]]) -> None:
        """`found` has the columns of `NO_MATCH` that are of interest; all runs the same ones."""
        given = {name: found[name] for name in NO_MATCH if name in found}
        given["run"] = np.full(self.n_rows, run)
        for name in given:
            if name not in self.columns:
                dtype = np.int64 if name in ORIGIN else np.float64
                self.columns[name] = np.full(self.n_rows, NO_MATCH[name], dtype)
        better = (given["candidate"] >= 0) & (
            (self.columns["run"] < 0) | (given["ssim"] > self.columns["ssim"])
        )
        for name, values in given.items():
            self.columns[name][better] = values[better]


class MethodOfVictim:
    """Scores of one method on one victim: the best of all its runs, and of two halves of them."""

    def __init__(self, n_rows: int, half_of: Mapping[int, int]) -> None:
        self.half_of = half_of
        self.best = BestOfRuns(n_rows)
        self.halves = (BestOfRuns(n_rows), BestOfRuns(n_rows))

    def take(self, run: int, found: Arrays) -> None:
        self.best.take(run, found)
        half = {name: found[name] for name in ("ssim", "haarpsi", "candidate")}
        if run in self.half_of:
            self.halves[self.half_of[run]].take(run, half)
        else:  # a run without pictures makes the columns of both
            for side in self.halves:
                side.take(run, half)

    def arrays(self) -> Arrays:
        """All of it by `<what>_<column>`, and the best without a prefix."""
        return {
            **self.best.columns,
            **{
                f"half{k}_{name}": self.halves[k].columns[name]
                for k in range(2)
                for name in ("ssim", "haarpsi")
                if name in self.halves[k].columns
            },
        }


@dataclass
class VictimScores:
    """Everything that the record needs of a victim: arrays per method (targets, then decoys), how
    each run did by itself, and which of its pictures are like nothing."""

    victim: Victim
    half_of: Mapping[int, int]
    threshold: float
    tallies: dict[str, MethodOfVictim] = field(default_factory=dict)
    of_runs: dict[int, dict[str, float | int]] = field(default_factory=dict)
    unlike: list[tuple[int, Arrays]] = field(default_factory=list)
    vote: Arrays = field(default_factory=dict)
    control: Arrays = field(default_factory=dict)
    criteria: Arrays = field(default_factory=dict)
    oracle: Arrays = field(default_factory=dict)
    n_directions: int = 0

    def take(self, run: EvaluatedRun, results: Mapping[str, Arrays]) -> None:
        """The results of one run by one step."""
        n_rows = 2 * len(self.victim)
        for name, found in results.items():
            if name == UNLIKE:
                self.unlike.append((run.number, found))
                continue
            if name == "plain":
                ssim = found["ssim"][: len(self.victim)]
                n_good = int((ssim > self.threshold).sum())
                mean = float(ssim.mean()) if len(ssim) else 0.0
                self.of_runs[run.number] = {"n_good": n_good, "mean_ssim": mean}
            if name not in self.tallies:
                self.tallies[name] = MethodOfVictim(n_rows, self.half_of)
            self.tallies[name].take(run.number, found)

    def methods(self) -> dict[str, Arrays]:
        return {name: tally.arrays() for name, tally in self.tallies.items()}


def split_in_halves(victim: Victim, *, seed: int) -> dict[int, int]:
    """Half 0 or 1 of each of the victim's runs with pictures, drawn from (`seed`, victim)."""
    runs = [run.number for run in victim.runs if run.n_pairs]
    generator = seeded_generator(seed, victim.number, "halves")
    order = torch.randperm(len(runs), generator=generator).tolist()
    return {runs[k]: int(place >= -(-len(runs) // 2)) for place, k in enumerate(order)}


def vote_of_runs(bench: Bench, victim: Victim, advance: Advance) -> dict[str, Arrays]:
    """Scores and pictures of `vote`: each row's mean of nearly nearest candidates of all runs (KKT
    paper, appendix A.1), with the scores of the nearest alone as `nearest_ssim` and
    `nearest_ssim3`. Runs are read twice, for the nearest distance of each row and for the
    candidates that are near enough, so that one of them is in memory at a time."""
    wanted = bench.wanted(victim)
    runs = [run for run in victim.runs if run.n_pairs]
    which = bench.config.restore_iterations
    nearest = torch.full((len(wanted),), torch.inf, device=wanted.device)
    ratios = {"vote": bench.config.vote_ratio, "nearest": 1.0}
    totals = {name: torch.zeros(wanted.shape, dtype=torch.float64, device=wanted.device)
              for name in ratios}  # fmt: skip
    n_voters = {name: torch.zeros(len(wanted), dtype=torch.int64, device=wanted.device)
                for name in ratios}  # fmt: skip
    mean = wanted.new_zeros(wanted.shape[1:])
    for k, run in enumerate(runs):
        found = read_candidates(bench.dataset, run, which, bench.device)
        distance, _row = nearest_candidates(found.x, _distances(found, wanted))
        nearest = torch.minimum(nearest, distance)
        advance((k + 1) / (2 * len(runs)))
    for k, run in enumerate(runs):
        found = read_candidates(bench.dataset, run, which, bench.device)
        mean = found.mean
        distances = _distances(found, wanted)
        for name, ratio in ratios.items():
            part, n_part = sum_of_votes(found.x, distances, nearest, ratio=ratio)
            totals[name] += part
            n_voters[name] += n_part
        advance(0.5 + (k + 1) / (2 * len(runs)))
    arrays: dict[str, Arrays] = {}
    for name in ratios:
        voted = n_voters[name] > 0
        x = mean_of_votes(totals[name], n_voters[name])
        pictures = fit_to_range(x.where(voted[:, None, None, None], 0.0).float(), mean)
        row = torch.arange(len(wanted), device=wanted.device).where(voted, -1)
        matches = score_matches(pictures, wanted, row)
        arrays[name] = arrays_of(matches, pictures, wanted)
    alone = {f"nearest_{name}": arrays["nearest"][name] for name in NEAREST}
    nowhere = {name: np.full(len(wanted), -1) for name in ORIGIN}
    return {"vote": arrays["vote"] | alone | nowhere}


def control_of(bench: Bench, victim: Victim) -> dict[str, Arrays]:
    """Scores of the mean of the victim's images, the same picture for every row."""
    wanted = bench.wanted(victim)
    mean = wanted[: len(victim)].mean(0, keepdim=True)
    row = torch.zeros(len(wanted), dtype=torch.int64, device=wanted.device)
    arrays = arrays_of(score_matches(mean, wanted, row), mean, wanted)
    return {CONTROL: arrays | {name: np.full(len(wanted), -1) for name in ORIGIN}}


def criteria_of_runs(bench: Bench, victim: Victim) -> dict[str, Arrays]:
    """`agreement` and `consistency` of each run; NaN where there is nothing to compare.

    Of at most `MAX_OF_RUN` candidates of a run and `MAX_RANKED` of the victim, evenly spread.
    """
    n_with_pictures = sum(run.n_pairs > 0 for run in victim.runs)
    limit = min(MAX_OF_RUN, max(1, MAX_RANKED // max(1, n_with_pictures)))
    values = {name: np.full(len(victim.runs), np.nan) for name in ("agreement", "consistency")}
    last: dict[int, Tensor] = {}
    for k, run in enumerate(victim.runs):
        saved = _saved(bench.dataset, run, limit) if run.n_pairs else torch.zeros(0, 0)
        if saved.numel():
            last[k] = saved[-1]
        if saved.numel() and len(saved) > 1:
            values["consistency"][k] = consistency(saved).mean().item()
    if len(last) > 1:
        x = torch.cat(list(last.values())).to(bench.device)
        owner = torch.tensor(list(last)).repeat_interleave(
            torch.tensor([len(candidates) for candidates in last.values()])
        )
        agreed = agreement(x, owner.to(x.device)).double().cpu()
        for k in last:
            values["agreement"][k] = agreed[owner == k].mean().item()
    return {"runs": values}


def chosen_unlike(
    scores: Sequence[VictimScores], n: int
) -> list[tuple[Victim, int, dict[str, float | int]]]:
    """(victim, run, which) of the `n` pictures that are least like any target, spread over victims:
    the worst of each victim come before the second worst of any."""
    ranked = []
    for of_victim in scores:
        mine = [
            (float(found["ssim"][k]), run, k, found)
            for run, found in of_victim.unlike
            for k in range(len(found["ssim"]))
        ]
        mine.sort(key=lambda entry: entry[:3])
        ranked += [
            (place, ssim, of_victim.victim, run, {name: found[name][k].item() for name in found})
            for place, (ssim, run, k, found) in enumerate(mine[:n])
        ]
    ranked.sort(key=lambda entry: (entry[0], entry[1], entry[2].number))
    return [(victim, run, which) for _place, _ssim, victim, run, which in ranked[:n]]


def _distances(found: Candidates, wanted: Tensor) -> Tensor:
    """To rows in the victim's input space, where their mean image is taken off."""
    return ncc_matrix(found.x, wanted - found.mean, half_size=True)


def _saved(dataset: Dataset, run: EvaluatedRun, limit: int) -> Tensor:
    """Raw candidates (s, p, c, h, w), each as often as it was saved: at most `limit` by a fixed
    stride, of those that were saved most often."""
    found = read_candidates(dataset, run, "all", "cpu")
    names, counts = np.unique(found.candidate, return_counts=True)
    n_saved = int(counts.max())
    whole = names[counts == n_saved]
    chosen = whole[:: max(1, -(-len(whole) // limit))]
    order = np.lexsort((found.iteration, found.candidate))
    rows = order[np.isin(found.candidate[order], chosen)].reshape(len(chosen), n_saved)
    return found.x[torch.from_numpy(np.ascontiguousarray(rows.T))]
