"""A victim's scores from the attacks on it: best matches of all runs, votes, criteria; and the
parts of the record on what an attacker could tell without the training images: `runs` with their
criteria, their `ranking`, `hallucination` by the disagreement of a restorer's samples, and
`nothing`, the pictures that are like no image. Runs come one after the other and only scores are
kept of them, so that hundreds fit in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recon_core.matching import (
    fit_to_range,
    nearest_distances,
    sum_of_votes,
)
from recon_core.metrics import ncc_matrix
from recon_core.ranking import agreement, consistency
from recon_core.summary import (
    best_in_top_quarter,
    rank_correlation,
    score_matches,
)
from recon_core.types import seeded_generator
from storage.pairs.dataset import Dataset
from tasks.attack_file.comparison import six_digits
from tasks.evaluation.record import NEAREST, ORIGIN, SIDES, Arrays, rounded
from tasks.evaluation.scores import (
    N_UNLIKE,
    UNLIKE,
    Advance,
    Bench,
    Candidates,
    arrays_of,
    nowhere,
    read_candidates,
)
from tasks.evaluation.settings import CONTROL
from tasks.evaluation.victims import CRITERIA, SETTINGS, EvaluatedRun, Victim

Values = npt.NDArray[np.float64]

MAX_OF_RUN = 200
MAX_RANKED = 6000
"""Candidates of a run, and of a victim, of which agreement and consistency are computed."""

UNLIKE_COLUMNS = ("victim", "run", "candidate", "iteration", "ssim", "closest")

N_BINS = 5
MIN_VICTIMS = 5
"""From so many on, resamples draw victims; resamples of fewer have hardly any variety."""
GOOD_IF_HIGH = {
    **dict.fromkeys(CRITERIA, False),
    "agreement": True,
    "consistency": True,
    "n_iterations": True,
}
"""The criteria of a run: whether a high one is good."""

NO_MATCH: dict[str, float] = {
    **dict.fromkeys(("ssim", "haarpsi", "ssim3", "lead"), 0.0),
    **dict.fromkeys(("rmse", "disagreement"), math.nan),
    **dict.fromkeys(ORIGIN, -1),
}
"""What an image scores when nothing came back."""


@dataclass
class VictimScores:
    """Everything that the record needs of a victim: arrays per method (targets, then decoys), how
    each run did by itself, and which of its pictures are like nothing. `best`: by method, the best
    match of each row over all runs so far, and over each half of them; of equal ones the first
    run's."""

    victim: Victim
    half_of: Mapping[int, int]
    threshold: float
    best: dict[str, tuple[Arrays, Arrays, Arrays]] = field(default_factory=dict)
    of_runs: dict[int, dict[str, float | int]] = field(default_factory=dict)
    unlike: list[tuple[int, Arrays]] = field(default_factory=list)
    vote: Arrays = field(default_factory=dict)
    control: Arrays = field(default_factory=dict)
    criteria: Arrays = field(default_factory=dict)
    oracle: Arrays = field(default_factory=dict)
    n_directions: int = 0

    def take(self, run: EvaluatedRun, results: Mapping[str, Arrays]) -> None:
        """The results of one run by one step."""
        for name, found in results.items():
            if name == UNLIKE:
                self.unlike.append((run.number, found))
                continue
            if name == "plain":
                ssim = found["ssim"][: len(self.victim)]
                n_good = int((ssim > self.threshold).sum())
                mean = float(ssim.mean()) if len(ssim) else 0.0
                self.of_runs[run.number] = {"n_good": n_good, "mean_ssim": mean}
            whole, *halves = self.best.setdefault(name, ({}, {}, {}))
            self._take(whole, run.number, {n: found[n] for n in NO_MATCH if n in found})
            part = {column: found[column] for column in ("ssim", "haarpsi", "candidate")}
            for k, half in enumerate(halves):
                if self.half_of.get(run.number, k) == k:  # one without pictures is in both
                    self._take(half, run.number, part)

    def _take(self, best: Arrays, run: int, found: Arrays) -> None:
        """Puts better matches of a run in the place of what there is; all runs have the same
        columns."""
        n_rows = 2 * len(self.victim)
        given = found | {"run": np.full(n_rows, run)}
        for name in given if not best else ():
            dtype = np.int64 if name in ORIGIN else np.float64
            best[name] = np.full(n_rows, NO_MATCH[name], dtype)
        better = (given["candidate"] >= 0) & ((best["run"] < 0) | (given["ssim"] > best["ssim"]))
        for name, values in given.items():
            best[name][better] = values[better]

    def methods(self) -> dict[str, Arrays]:
        """By method, the best of all runs, and as `half<k>_<column>` of each half of them."""
        return {
            name: whole
            | {
                f"half{k}_{column}": half[column]
                for k, half in enumerate(halves)
                for column in ("ssim", "haarpsi")
                if column in half
            }
            for name, (whole, *halves) in self.best.items()
        }


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
    nearest = torch.full((len(wanted),), torch.inf, device=wanted.device)
    ratios = {"vote": bench.config.vote_ratio, "nearest": 1.0}
    totals = {name: torch.zeros_like(wanted, dtype=torch.float64) for name in ratios}
    n_voters = {name: torch.zeros_like(nearest, dtype=torch.int64) for name in ratios}
    mean = wanted.new_zeros(wanted.shape[1:])

    def read(run: EvaluatedRun) -> tuple[Candidates, Tensor]:
        """The run's candidates, and their distances to rows in the victim's input space."""
        found = read_candidates(bench.dataset, run, bench.config.restore_iterations, bench.device)
        return found, ncc_matrix(found.x, wanted - found.mean, half_size=True)

    for k, run in enumerate(runs):
        found, distances = read(run)
        nearest = torch.minimum(nearest, nearest_distances(found.x, distances))
        advance((k + 1) / (2 * len(runs)))
    for k, run in enumerate(runs):
        found, distances = read(run)
        mean = found.mean
        for name, ratio in ratios.items():
            part, n_part = sum_of_votes(found.x, distances, nearest, ratio=ratio)
            totals[name] += part
            n_voters[name] += n_part
        advance(0.5 + (k + 1) / (2 * len(runs)))
    arrays: dict[str, Arrays] = {}
    for name in ratios:
        voted = n_voters[name] > 0
        x = totals[name] / n_voters[name][:, None, None, None]
        pictures = fit_to_range(x.where(voted[:, None, None, None], 0.0).float(), mean)
        row = torch.arange(len(wanted), device=wanted.device).where(voted, -1)
        arrays[name] = arrays_of(score_matches(pictures, wanted, row), pictures, wanted)
    alone = {f"nearest_{name}": arrays["nearest"][name] for name in NEAREST}
    return {"vote": arrays["vote"] | alone | nowhere(len(wanted))}


def control_of(bench: Bench, victim: Victim) -> dict[str, Arrays]:
    """Scores of the mean of the victim's images, the same picture for every row."""
    wanted = bench.wanted(victim)
    mean = wanted[: len(victim)].mean(0, keepdim=True)
    row = torch.zeros(len(wanted), dtype=torch.int64, device=wanted.device)
    arrays = arrays_of(score_matches(mean, wanted, row), mean, wanted)
    return {CONTROL: arrays | nowhere(len(wanted))}


def criteria_of_runs(bench: Bench, victim: Victim) -> dict[str, Arrays]:
    """`agreement` and `consistency` of each run; NaN where there is nothing to compare.

    Of at most `MAX_OF_RUN` candidates of a run and `MAX_RANKED` of the victim, evenly spread.
    """
    n_with_pictures = sum(run.n_pairs > 0 for run in victim.runs)
    limit = min(MAX_OF_RUN, max(1, MAX_RANKED // max(1, n_with_pictures)))
    values = {name: np.full(len(victim.runs), np.nan) for name in ("agreement", "consistency")}
    last: dict[int, Tensor] = {}
    for k, run in enumerate(victim.runs):
        if not run.n_pairs:
            continue
        saved = _saved(bench.dataset, run, limit)
        last[k] = saved[-1]
        if len(saved) > 1:
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
    scores: Sequence[VictimScores],
) -> list[tuple[Victim, int, dict[str, float | int]]]:
    """(victim, run, which) of the N_UNLIKE pictures that are least like any target, spread over
    victims: the worst of each victim come before the second worst of any."""
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
            for place, (ssim, run, k, found) in enumerate(mine[:N_UNLIKE])
        ]
    ranked.sort(key=lambda entry: (entry[0], entry[1], entry[2].number))
    return [(victim, run, which) for _place, _ssim, victim, run, which in ranked[:N_UNLIKE]]


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


def describe_unlike(nothing: Arrays, scores: Sequence[VictimScores]) -> dict[str, Any]:
    """Pictures that resemble nothing, in the order of the arrays that show them."""
    others = [name for name in nothing if name not in ("plain", "closest")]
    shown = [name for name in others if not name.startswith("disagreement_")]
    rows = []
    for victim, run, which in chosen_unlike(scores):
        closest = int(victim.image_ids[int(which["closest"])])
        rows.append({"victim": victim.number, "run": run, **which, "closest": closest})
    columns = {name: [row[name] for row in rows] for name in UNLIKE_COLUMNS}
    return {"methods": ["plain", *shown], "n": len(nothing["plain"]), **columns}


def describe_runs(scores: Sequence[VictimScores]) -> dict[str, list[Any]]:
    """Parallel lists over all runs; null where the store does not know or nothing compares."""
    runs: list[dict[str, Any]] = []
    for of_victim in scores:
        for k, run in enumerate(of_victim.victim.runs):
            facts = six_digits(run.facts)  # settings like sigma may be far below one
            n_iterations = facts["n_iterations"]
            ranked = {n: float(of_victim.criteria[n][k]) for n in ("consistency", "agreement")}
            runs.append(
                {
                    "run": run.number,
                    "victim": of_victim.victim.number,
                    "outcome": run.outcome,
                    "n_pictures": run.n_pairs,
                    "n_iterations": None if n_iterations is None else int(n_iterations),
                    **{name: facts[name] for name in CRITERIA},
                    **rounded(ranked),
                    **{name: facts[name] for name in SETTINGS},
                    **rounded(of_victim.of_runs[run.number]),
                }
            )
    return {name: [run[name] for run in runs] for name in runs[0]}


def describe_ranking(runs: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Per criterion, Spearman's correlation with the true mean SSIM over the runs with pictures,
    ranked within their victim; +1: the criterion orders them perfectly."""
    ranking: dict[str, Any] = {}
    truth = np.array(runs["mean_ssim"], np.float64)
    victim = np.array(runs["victim"])
    usable = np.array(runs["n_pictures"]) > 0
    for name, good_if_high in GOOD_IF_HIGH.items():
        values = np.array([np.nan if v is None else v for v in runs[name]], np.float64)
        known = usable & np.isfinite(values)
        values = (values if good_if_high else -values)[known]
        ranks = rank_correlation(values, truth[known], within=victim[known])
        found = [
            best_in_top_quarter(values[mine], truth[known][mine])
            for mine in (victim[known] == number for number in np.unique(victim[known]))
        ]
        ranking[name] = {
            "n_runs": ranks["n"],
            "spearman": ranks["spearman"],
            "interval": ranks["interval"],
            "best_of_top_quarter": bool(found) and all(found),
            "n_victims": len(found),
            "n_best_in_top_quarter": sum(found),
        }
    result: dict[str, Any] = rounded(ranking)
    return result


def describe_hallucination(
    methods: Mapping[str, Mapping[str, Any]], victims: Sequence[int]
) -> dict[str, Any]:
    """Per mean of samples: Spearman's correlation of disagreement and error over the targets with
    a picture, and the error in five bins of as many targets; `victims` has one number per row."""
    found, owner = {}, np.array(victims)
    for name, method in methods.items():
        if "disagreement" not in method["targets"]:
            continue
        known = {
            s: np.array([v is not None for v in method[s]["disagreement"]], np.bool_) for s in SIDES
        }
        columns: dict[str, list[Values]] = {
            side: [
                np.array(method[side][name], object)[known[side]].astype(np.float64)
                for name in ("disagreement", "rmse", "ssim")
            ]
            for side in SIDES
        }

        def of_bin(
            side: str, edges: Values, k: int, columns: Mapping[str, list[Values]] = columns
        ) -> dict[str, Any]:
            spread, *others = columns[side]
            # an edge belongs to the bin above it, and the outer bins are open
            mine = np.searchsorted(edges[1:-1], spread, side="right") == k
            means = [float(values[mine].mean()) if mine.any() else None for values in others]
            return {"n": int(mine.sum()), "mean_rmse": means[0], "mean_ssim": means[1]}

        spread, rmse, _ssim = columns["targets"]
        units = owner[known["targets"]]
        several = len(np.unique(units)) >= MIN_VICTIMS
        ranks = rank_correlation(spread, rmse, units=units if several else None)
        edges: Values = np.empty(0)
        if len(spread):  # between two of them are as many values
            edges = np.quantile(spread, np.linspace(0, 1, N_BINS + 1))
        bins = [
            {"disagreement": [float(low), float(high)], **of_bin("targets", edges, k)}
            | {"decoys": of_bin("decoys", edges, k)}
            for k, (low, high) in enumerate(pairwise(edges))
        ]
        body = {name: ranks[name] for name in ("n", "spearman", "interval")}
        found[name] = rounded(body | {"bins": bins})
    return found
