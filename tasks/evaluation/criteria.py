"""The parts of the record on what an attacker could tell without the training images: `runs` with
their criteria, their `ranking`, `hallucination` by the disagreement of a restorer's samples, and
`nothing`, the pictures that are like no image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from recon_core.criteria import (
    best_in_top_quarter,
    bin_of,
    equal_count_edges,
    rank_correlation,
)
from tasks.attack_file.record import six_digits
from tasks.evaluation.record import Arrays, rounded
from tasks.evaluation.scores import N_UNLIKE
from tasks.evaluation.sweep import VictimScores, chosen_unlike
from tasks.evaluation.victims import CRITERIA, SETTINGS

Values = npt.NDArray[np.float64]

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


def describe_unlike(nothing: Arrays, scores: Sequence[VictimScores]) -> dict[str, Any]:
    """Pictures that resemble nothing, in the order of the arrays that show them."""
    others = [name for name in nothing if name not in ("plain", "closest")]
    shown = [name for name in others if not name.startswith("disagreement_")]
    rows = []
    for victim, run, which in chosen_unlike(scores, N_UNLIKE):
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
            n_iterations = facts.pop("n_iterations")
            own = of_victim.of_runs[run.number]
            runs.append(
                {
                    "run": run.number,
                    "victim": of_victim.victim.number,
                    "outcome": run.outcome,
                    "n_pictures": run.n_pairs,
                    "n_iterations": None if n_iterations is None else int(n_iterations),
                    **{name: facts[name] for name in CRITERIA},
                    **{
                        name: rounded(float(of_victim.criteria[name][k]))
                        for name in ("consistency", "agreement")
                    },
                    **{name: facts[name] for name in SETTINGS},
                    **rounded(own),
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
    return {
        name: rounded(_hallucination(method, np.array(victims)))
        for name, method in methods.items()
        if "disagreement" in method["targets"]
    }


def _hallucination(method: Mapping[str, Any], victims: npt.NDArray[np.int64]) -> dict[str, Any]:
    known = _with_picture(method["targets"])
    disagreement, rmse, ssim = _columns(method["targets"])
    several = len(np.unique(victims[known])) >= MIN_VICTIMS
    ranks = rank_correlation(disagreement, rmse, units=victims[known] if several else None)
    body = {"n": ranks["n"], "spearman": ranks["spearman"], "interval": ranks["interval"]}
    if not len(disagreement):
        return body | {"bins": []}
    edges = equal_count_edges(disagreement, N_BINS)
    beside = _columns(method["decoys"])
    bins = [
        {
            "disagreement": [float(edges[k]), float(edges[k + 1])],
            **_of_bin(disagreement, rmse, ssim, edges, k),
            "decoys": _of_bin(*beside, edges, k),
        }
        for k in range(N_BINS)
    ]
    return body | {"bins": bins}


def _with_picture(side: Mapping[str, Any]) -> npt.NDArray[np.bool_]:
    return np.array([value is not None for value in side["disagreement"]], np.bool_)


def _columns(side: Mapping[str, Any]) -> tuple[Values, Values, Values]:
    """(disagreement, rmse, ssim) of the rows with a picture."""
    known = _with_picture(side)
    columns = (np.array(side[name], object)[known] for name in ("disagreement", "rmse", "ssim"))
    disagreement, rmse, ssim = (column.astype(np.float64) for column in columns)
    return disagreement, rmse, ssim


def _of_bin(
    disagreement: Values, rmse: Values, ssim: Values, edges: Values, k: int
) -> dict[str, Any]:
    mine = bin_of(disagreement, edges) == k
    means = {"mean_rmse": rmse, "mean_ssim": ssim}
    return {"n": int(mine.sum())} | {
        name: float(values[mine].mean()) if mine.any() else None for name, values in means.items()
    }
