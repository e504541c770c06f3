"""The benchmark of scoring: does it find what it should, and is the loop multiplied up?"""

from __future__ import annotations

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
