"""The benchmark of scoring: does it find what it should, and is the loop multiplied up?"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
import torch

from benchmarks.evaluation import speed as evaluate
from benchmarks.evaluation.speed import (
    Size,
    check_agreement,
    exhaustive,
    looped,
    made_up,
    sampled_pairs,
)
from benchmarks.record import Measurement
from tests.benchmarks.pages import build_page
from tests.benchmarks.test_record import MEASUREMENT

TINY = Size(n_candidates=12, n_iterations=2, n_methods=2, n_images=5, n_sampled=20, repeats=1)


def test_the_best_match_is_that_of_the_loop() -> None:
    given = made_up(TINY)
    for method, found in enumerate(exhaustive(given)):
        every = [(method, p, i) for i in range(5) for p in range(24)]
        scores = torch.tensor(looped(given, every)).reshape(5, 24)
        assert found.row.tolist() == scores.argmax(dim=1).tolist()
        assert torch.allclose(found.ssim, scores.amax(dim=1), atol=1e-5)


def test_nothing_is_timed_where_scores_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    given, pairs = made_up(TINY), sampled_pairs(TINY)
    check_agreement(given, pairs)
    wrong = [score + 0.01 for score in looped(given, pairs)]
    monkeypatch.setattr(evaluate, "looped", lambda *_given: wrong)
    with pytest.raises(ValueError, match=r"scikit-image's differ by 0\.01, more than 1e-05"):
        check_agreement(given, pairs)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[Measurement]:
    """Of a run in which one of our scores takes 2 us, and one of the loop 1 ms."""

    def compared(
        benchmark: str, case: str, *, ours: Callable[[], object], theirs: Callable[[], object],
        reference: str, repeats: int, per_call: int, reference_per_call: int,
    ) -> Measurement:  # fmt: skip
        assert len(theirs()) == reference_per_call  # type: ignore[arg-type]
        assert len(ours()) == TINY.n_methods  # type: ignore[arg-type]
        timed = {"value": 2e-6, "reference": reference, "reference_value": 1e-3, "ratio": 500.0}
        return replace(MEASUREMENT, benchmark=benchmark, case=case, repeats=repeats, **timed)

    monkeypatch.setattr(evaluate, "compared", compared)
    monkeypatch.setattr(evaluate, "QUICK", TINY)
    return list(evaluate.measure(quick=True))


def test_seconds_are_those_of_all_scores(lines: list[Measurement]) -> None:
    (every_pair,) = lines
    assert (every_pair.value, every_pair.reference_value) == pytest.approx((480e-6, 0.24))
    assert every_pair.reference is not None
    assert "240 pairs" in every_pair.reference
    assert "measured on 20 random pairs and multiplied up" in every_pair.reference
    page = build_page(
        {"benchmarks/evaluate.json": "\n".join(json.dumps(asdict(line)) for line in lines)}
    )
    assert "12 candidates x 2 iterations x 2 methods with 5 images" in page


@pytest.mark.slow
def test_the_benchmark_runs() -> None:
    measured = list(evaluate.measure(quick=True))
    assert [line.ratio is not None and line.ratio > 0 for line in measured] == [True]
