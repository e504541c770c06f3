"""The claims of the KKT paper: each rule finds what was planted, and does not find its opposite."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from flows.families.weights.study import GRID_NAMES
from flows.study import study
from tasks.families.weights.study.claims import STATEMENTS, check_claims
from tasks.families.weights.study.figure_specs import FIGURES, describe_figures
from tasks.families.weights.study.results import (
    PAPER_ATTACKS,
    PAPER_ITERATIONS,
    Results,
    difference,
)
from tasks.families.weights.study.settings import Study
from tasks.study.statements import NotTestableError

Share = Callable[[dict[str, Any], int], float]
"""Of a cell and a victim: the share of its images that come back good."""


def record_of(
    made: Study,
    share: Share,
    *,
    decoys: float = 0.0,
    slope: float = -1.0,
    n_effective: Callable[[dict[str, Any]], int | None] = lambda cell: 3,
    accuracy: Callable[[dict[str, Any]], float] = lambda cell: 1.0,
    tested: Callable[[dict[str, Any]], float | None] = lambda cell: 0.7,
    vote: Callable[[int], float] = lambda number: 0.1 + 0.01 * (number % 3),
    seconds: Callable[[dict[str, Any]], float] = lambda cell: 10.0,
) -> dict[str, Any]:
    """A study's record as if `share` of the images of each victim had come back.

    The better half of the images lies nearer to the boundary, or further with a positive `slope`.
    """
    names = ("cell", "victim", "margin", "loss", "ssim", "decoy_ssim")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    cells = []
    for number, cell in enumerate(made.cells):
        body: dict[str, Any] = {
            "number": number, "name": cell.name, "panel": cell.panel, "at": dict(cell.at),
            "n_images": cell.images_per_run,
            "victims": [number * made.n_victims + s for s in range(made.n_victims)],
            "targets": {"mean_ssim": 0.5, "n_good": 5},
            "decoys": {"n_good_ssim3": 0},
            "vote": _vote(0.5 + vote(number), 6) | {"nearest": _vote(0.5, 5)},
            "n_attacks": made.n_attacks,
        }  # fmt: skip
        body["seconds"] = seconds(body)
        n = cell.images_per_run
        for seed, victim in enumerate(body["victims"]):
            n_good = round(n * share(body, seed))
            rank = np.arange(n)
            ssim = np.where(rank < n_good, 0.9, 0.3) - 0.1 * rank / n
            columns["cell"] += [number] * n
            columns["victim"] += [victim] * n
            columns["ssim"] += ssim.tolist()
            columns["margin"] += (10 + slope * ssim).tolist()
            columns["loss"] += (10 - slope * ssim).tolist()
            hits = rank < round(n * decoys)
            columns["decoy_ssim"] += np.where(hits, 0.5, 0.1).tolist()
            columns["decoy_ssim3"] = columns["decoy_ssim"]
            columns["ssim3"] = columns["ssim"]
        k = made.n_victims
        body["victim"] = {
            "n_effective": [n_effective(body)] * k,
            "train_accuracy": [accuracy(body)] * k,
            "test_accuracy": [tested(body)] * k,
        }
        cells.append(body)
    return {
        "name": made.name, "good_threshold": 0.4, "cells": cells, "images": columns,
        "n_attacks": made.n_attacks,
        "axes": {name: asdict(axis) for name, axis in made.axes.items()},
        "settings": {"cells": [asdict(cell) for cell in made.cells]},
    }  # fmt: skip


def _vote(mean: float, n_good: int) -> dict[str, float]:
    return {
        "mean_ssim": mean,
        "mean_ssim3": mean,
        "n_good": n_good,
        "n_good_ssim3": n_good,
    }


def with_the_papers_attacks(record: dict[str, Any]) -> dict[str, Any]:
    """The same numbers, as if so many attacks had brought no more."""
    record["n_attacks"] = PAPER_ATTACKS
    for cell in record["settings"]["cells"]:
        cell["experiment"]["attack"]["save_at"] = (PAPER_ITERATIONS,)
    return record


READ = {"holds": True, "does not hold": False, "undecided": None}
"""Outcomes by the verdict of a rule; the fourth, not testable, stays as it is."""


def verdicts(record: dict[str, Any]) -> list[bool | str | None]:
    claims = check_claims(record)
    assert json.loads(json.dumps(claims, allow_nan=False)) == claims
    for claim in claims:
        assert set(claim) == {"claim", "where", "theirs", "ours", "rule", "outcome"}
        assert all(claim[name] for name in ("claim", "where", "theirs", "ours", "rule"))
    return [READ.get(claim["outcome"], claim["outcome"]) for claim in claims]


def test_every_study_has_figures_and_claims() -> None:
    assert set(STATEMENTS) == set(FIGURES) == set(GRID_NAMES)
    for name in GRID_NAMES:
        for preset in ("paper", "cpu"):
            made = study(name, preset)
            panels = {cell.panel for cell in made.cells}
            figures = describe_figures(made)
            assert figures
            assert len({figure["name"] for figure in figures}) == len(figures)
            for figure in figures:
                assert figure.get("panel", next(iter(panels))) in panels
                assert all(0 <= k < len(made.cells) for k in figure.get("cells", ()))
                assert all(figure.get(axis, "margin") in (*made.axes, "margin", "loss")
                           for axis in ("x", "y"))  # fmt: skip
                if figure["kind"] in ("heatmap", "lines"):
                    values = made.axes[figure["x"]].values
                    for cell in made.cells:
                        if cell.panel == figure["panel"]:
                            assert cell.at[figure["x"]] in values


@pytest.mark.parametrize("preset", ["paper", "cpu"])
def test_multiclass(preset: str) -> None:
    made = study("multiclass", preset, {"n_victims": 3})

    def more(cell: dict[str, Any], _seed: int) -> float:
        return 0.05 + 0.09 * float(cell["at"]["n_classes"])

    def fewer(cell: dict[str, Any], _seed: int) -> float:
        # fewer in all, although ten classes have five times the images of two
        return 0.9 if cell["at"]["n_classes"] == 2 else 0.05

    margins = record_of(made, more, n_effective=lambda cell: int(cell["at"]["n_classes"]))
    found = verdicts(margins)
    # of two images, one of each class, a quarter is no number of images
    assert found[2:] == [True] * 5
    assert verdicts(record_of(made, fewer, slope=1.0))[1:6] == [False] * 5


def test_more_classes_at_equal_images_per_class() -> None:
    made = study("multiclass", "cpu", {"n_victims": 3})
    all_back = verdicts(record_of(made, lambda cell, seed: 1.0))
    assert all_back[0] is True  # more in number, since there are more of them
    assert all_back[1] is False  # but no larger share
    assert verdicts(record_of(made, lambda cell, seed: 0.0))[:4] == [False] * 4


def test_one_victim_that_says_the_opposite_leaves_it_open() -> None:
    made = study("multiclass", "cpu", {"n_victims": 3})

    def mixed(cell: dict[str, Any], seed: int) -> float:
        return 0.5 if (cell["at"]["n_classes"] == 2) != (seed == 1) else 1.0

    assert verdicts(record_of(made, mixed))[2] is None


def test_losses() -> None:
    made = study("losses", "cpu")

    def share(cell: dict[str, Any], _seed: int) -> float:
        return 0.3 + 5.0 / cell["n_images"]

    assert verdicts(record_of(made, share)) == [True] * 4
    undone = record_of(made, share, decoys=1.0)
    assert verdicts(undone)[0] is None, "4 attacks of 1,000 iterations refute nothing"
    assert verdicts(with_the_papers_attacks(undone))[0] is False

    def opposite(cell: dict[str, Any], _seed: int) -> float:
        return 0.0 if cell["n_images"] == 10 else 0.1

    against = record_of(made, opposite, slope=1.0)
    assert verdicts(against) == [None, None, False, False]
    assert verdicts(with_the_papers_attacks(against)) == [False] * 4
    alike = record_of(made, lambda cell, seed: 0.1, slope=1.0)
    assert verdicts(with_the_papers_attacks(alike)) == [None, False, False, None]


def test_a_large_portion_is_one_of_the_largest_number_of_images() -> None:
    made = study("losses", "cpu")

    def at_60(share: float) -> Share:
        return lambda cell, seed: share if cell["n_images"] == 60 else 0.9

    records = [record_of(made, at_60(share)) for share in (0.5, 0.1, 0.27)]
    found = [verdicts(with_the_papers_attacks(record))[1] for record in records]
    assert found == [True, False, None]


@pytest.mark.parametrize("name", ["multiclass", "cnn"])
def test_the_vote_is_compared_with_the_nearest_alone(name: str) -> None:
    made = study(name, "cpu")

    def last(vote: Callable[[int], float]) -> bool | str | None:
        return verdicts(record_of(made, lambda cell, seed: 0.5, vote=vote))[-1]

    found = [last(lambda k: 0.01 + 0.001 * (k % 2)), last(lambda k: -0.01 - 0.001 * (k % 2)),
             last(lambda k: 0.01 * (-1) ** k)]  # fmt: skip
    assert found == [True, False, None]
    record = record_of(made, lambda cell, seed: 0.5)
    for cell in record["cells"]:
        del cell["vote"]["nearest"]
    claim = check_claims(record)[-1]
    assert claim["outcome"] == "not testable", "the best match by SSIM is not the nearest"
    assert claim["ours"].startswith("the nearest alone was not scored; less the best match by SSIM")
    for cell in record["cells"]:
        cell["vote"] = None
    assert verdicts(record)[-1] == "not testable"


def test_minibatches_are_those_of_the_settings() -> None:
    def found(share: float, decoys: float, **training: Any) -> bool | str | None:
        made = study("large", "cpu")
        record = record_of(made, lambda cell, seed: share, decoys=decoys)
        with_the_papers_attacks(record)
        for cell in record["settings"]["cells"]:
            cell["experiment"]["training"] |= training
        return verdicts(record)[1]

    assert [found(0.2, 0.0), found(0.1, 0.2), found(0.2, 0.19)] == [True, False, None]
    assert found(0.2, 0.0, batch_size=None) == found(0.2, 0.0, batch_size=200) == "not testable"


def test_weight_decay() -> None:
    made = study("weight-decay", "cpu")

    def helps(cell: dict[str, Any], _seed: int) -> float:
        if cell["at"]["weight_decay"] == 0:
            return 0.5 if cell["at"]["start"] == "small" else 0.0
        return 0.9 if cell["at"]["weight_decay"] == 1e-2 else 0.3

    def margin(cell: dict[str, Any]) -> int:
        return 9 if cell["at"]["weight_decay"] else 2

    record = record_of(made, helps, n_effective=margin)
    assert verdicts(record) == [True, True, True, True, True, "not testable"]

    def unfitted(cell: dict[str, Any]) -> float:
        return 0.8 if cell["at"]["weight_decay"] == 1e-2 else 1.0

    assert verdicts(record_of(made, helps, accuracy=unfitted))[-1] is True

    def useless(cell: dict[str, Any], _seed: int) -> float:
        return 0.5 if cell["at"]["weight_decay"] == 0 else 0.3

    changing = record_of(made, useless, tested=lambda cell: 0.5 + 3 * cell["at"]["weight_decay"])
    assert verdicts(changing)[:5] == [False, None, None, False, False]
    assert verdicts(with_the_papers_attacks(changing))[:5] == [False] * 5
    assert verdicts(record_of(made, helps, n_effective=lambda cell: None))[3] == "not testable"
    assert verdicts(record_of(made, helps, tested=lambda cell: None))[4] == "not testable"


def test_the_best_weight_decay_is_chosen_on_the_other_victims() -> None:
    """Each victim is good at a value of its own alone, so the best elsewhere is never its best."""
    made = study("weight-decay", "cpu")
    values = sorted({cell.at["weight_decay"] for cell in made.cells if cell.at["weight_decay"]})

    def own(cell: dict[str, Any], seed: int) -> float:
        return 1.0 if cell["at"]["weight_decay"] == values[seed] else 0.0

    assert verdicts(with_the_papers_attacks(record_of(made, own)))[1] is False
    one = study("weight-decay", "cpu", {"n_victims": 1})
    assert verdicts(record_of(one, lambda cell, seed: 0.5))[1] == "not testable"


def test_cnn() -> None:
    made = study("cnn", "cpu")

    def share(cell: dict[str, Any], _seed: int) -> float:
        if cell["panel"] == "no decay":
            return 0.0
        if cell["panel"] == "decay":
            return 0.6
        middle = cell["at"]["kernel"] in (8, 16)
        return (0.0 if middle else 0.4) + 0.05 * cell["at"]["channels"]

    assert verdicts(record_of(made, share)) == [True] * 6

    def opposite(cell: dict[str, Any], _seed: int) -> float:
        if cell["panel"] != "grid":
            return 0.9 if cell["panel"] == "no decay" else 0.4
        if cell["at"]["channels"] == 2:
            return 0.9
        return 0.7 if cell["at"]["kernel"] in (8, 16) else 0.0

    assert verdicts(record_of(made, opposite, slope=1.0))[:5] == [True] + [False] * 4
    alike = verdicts(record_of(made, lambda cell, seed: 0.3, slope=1.0))
    assert alike[:5] == [True, None, None, None, False]


def test_width() -> None:
    made = study("width", "cpu")

    def share(cell: dict[str, Any], _seed: int) -> float:
        wide = cell["at"]["width"] == 200
        return (1.0 if cell["n_images"] == 10 else 0.5) if wide else 0.0

    assert verdicts(record_of(made, share)) == [True] * 3
    assert verdicts(record_of(made, lambda cell, seed: 0.5)) == [None, None, None]

    def opposite(cell: dict[str, Any], _seed: int) -> float:
        return 0.9 if cell["at"]["width"] == 5 else 0.0

    assert verdicts(with_the_papers_attacks(record_of(made, opposite))) == [False] * 3


def test_large() -> None:
    made = study("large", "cpu")
    few = record_of(made, lambda cell, seed: 0.1, n_effective=lambda cell: 100)
    assert verdicts(few) == [True] * 3
    none = record_of(made, lambda cell, seed: 0.0, n_effective=lambda cell: 0)
    assert verdicts(none) == [None, None, False]
    assert verdicts(with_the_papers_attacks(none)) == [False] * 3


def test_a_study_that_lacks_cells_is_not_testable() -> None:
    for name in GRID_NAMES:
        record = record_of(study(name, "cpu"), lambda cell, seed: 0.5)
        record["cells"] = []
        assert set(verdicts(record)) == {"not testable"}


def test_one_value_of_an_axis_is_not_testable() -> None:
    for name, only in (("width", "width 200, 10 images"), ("losses", "30 images"),
                       ("multiclass", "2 classes"), ("cnn", "4 channels")):  # fmt: skip
        some = study(name, "cpu", only=only)
        claims = check_claims(record_of(some, lambda cell, seed: 0.5))
        told = [c["ours"] for c in claims if c["ours"].startswith("one ")]
        assert told, name
        assert all(c["outcome"] == "not testable" for c in claims if c["ours"] in told)


def test_a_study_without_claims_has_none() -> None:
    assert check_claims({"name": "of my own"} | record_of(study("large", "cpu"), lambda c, s: 1.0)
                        | {"name": "of my own"}) == []  # fmt: skip


def test_a_difference_is_of_sums_per_victim_with_an_interval() -> None:
    rng = np.random.default_rng(3)
    one: Sequence[Any] = [rng.random(50) < 0.6 for _ in range(4)]
    other: Sequence[Any] = [rng.random(50) < 0.3 for _ in range(4)]
    a, b = ([v.astype(np.float64) for v in side] for side in (one, other))
    found = difference(a, b)
    assert found.value == pytest.approx(
        np.mean([x.sum() - y.sum() for x, y in zip(a, b, strict=True)])
    )
    assert found.each == tuple(x.sum() - y.sum() for x, y in zip(a, b, strict=True))
    spread = np.sqrt(sum(50 * v.var() for v in (*a, *b))) / 4
    assert found.high - found.low == pytest.approx(2 * 1.96 * spread, rel=0.1)
    assert difference(a, b, mean=True).value == pytest.approx(found.value / 50)
    with pytest.raises(NotTestableError, match="other numbers of victims"):
        difference(a, b[:2])


def test_a_correlation_whose_interval_holds_0_is_not_decided() -> None:
    """Half of the victims say one thing, half the other."""
    made = study("losses", "cpu")
    near = record_of(made, lambda cell, seed: 0.5)
    far = record_of(made, lambda cell, seed: 0.5, slope=1.0)
    odd = np.array(near["images"]["victim"]) % 2 == 1
    mixed = near | {"images": dict(near["images"])}
    for name in ("margin", "loss"):
        mixed["images"][name] = np.where(odd, near["images"][name], far["images"][name]).tolist()
    assert [verdicts(r)[2] for r in (near, far, mixed)] == [True, False, None]


def test_rank_correlations_leave_out_what_has_none() -> None:
    made = study("losses", "cpu")
    record = record_of(made, lambda cell, seed: 0.5)
    results = Results(record)
    found = results.rank_correlation(results.cells("grid"), "margin", "ssim")
    assert found.value == pytest.approx(-1)
    record["images"]["margin"] = [1.0] * len(record["images"]["margin"])
    flat = Results(record)
    with pytest.raises(NotTestableError, match="margin and ssim vary"):
        flat.rank_correlation(flat.cells("grid"), "margin", "ssim")


def test_good_is_by_the_authors_window_and_ours_stands_beside_it() -> None:
    made = study("weight-decay", "cpu")
    record = record_of(made, lambda cell, seed: 0.0)
    record["images"]["ssim"] = list(record["images"]["ssim"])
    of_ten = [
        k for k, cell in enumerate(record["cells"]) if cell["name"] == "10 classes, standard start"
    ]
    rows = [row for row, cell in enumerate(record["images"]["cell"]) if cell == of_ten[0]]
    for row in rows[:30]:
        record["images"]["ssim"][row] = 0.9
    claim = check_claims(record)[0]
    assert claim["outcome"] == "holds"
    assert "window of 3: 2 classes, standard start: 0 of 90 good" in claim["ours"]
    assert claim["ours"].endswith("10 classes, standard start: 30 of 150 good (does not hold)")


def test_decoys_of_which_only_the_number_was_kept() -> None:
    made = study("large", "cpu")
    record = record_of(made, lambda cell, seed: 0.5)
    del record["images"]["decoy_ssim3"]
    assert verdicts(record)[0] is True
    record["cells"][0]["decoys"]["n_good_ssim3"] = 3
    claim = check_claims(record)[0]
    assert claim["outcome"] == "not testable"
    assert "3 decoys are good by a window of 3, but whose was not kept" in claim["ours"]
