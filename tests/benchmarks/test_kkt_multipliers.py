"""Equation 8 with all its multipliers: what it sums up, and how it compares with equation 12."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.kkt.multipliers import Size, attacked, drawn, judged, victim
from benchmarks.kkt.reference import ReferenceAttack, ReferenceNet, objective
from benchmarks.papers.findings import Finding
from tasks.families.weights.study.results import difference

TWELVE = ReferenceAttack(condition="multiclass", lam_min=0.0)
EIGHT = replace(TWELVE, condition="every class")


def test_one_multiplier_for_the_nearest_class_is_equation_12() -> None:
    torch.manual_seed(0)
    net = ReferenceNet((1, 2, 3), (5,), 4, bias="first").double()
    x, lam = torch.randn(6, 6).double(), torch.rand(6).double()
    y = torch.tensor([0, 1, 2, 3, 0, 1])
    rival = net(x).scatter(1, y[:, None], -torch.inf).argmax(1)
    every = torch.zeros(6, 4).double().scatter(1, rival[:, None], lam[:, None])
    expected = objective(net, x, lam, y, TWELVE)
    torch.testing.assert_close(objective(net, x, every, y, EIGHT), expected)
    own = every.scatter(1, y[:, None], 7.0)
    torch.testing.assert_close(objective(net, x, own, y, EIGHT), expected)
    assert objective(net, x, every + 0.1, y, EIGHT) != expected


@pytest.mark.parametrize(
    ("twelve", "eight", "holds"),
    [(0.8, 0.0, True), (0.0, 0.0, None), (0.8, 0.6, False), (0.1, 0.05, None)],
)
def test_each_outcome_of_the_rule(twelve: float, eight: float, holds: bool | None) -> None:
    def judgement(victims: int) -> Finding:
        def shares(share: float) -> list[np.ndarray]:
            return [(np.arange(50) < 50 * share).astype(np.float64)] * victims

        good = {"12": shares(twelve), "8": shares(eight), "decoys": shares(0.0)}
        d = difference(good["12"], good["8"])
        return judged(good, d, Size(victims=victims), 0, data="photos")

    assert judgement(5).holds is holds
    two = judgement(2)
    assert two.holds is (None if holds is False else holds), "two victims refute nothing"
    assert ("; undecided at our size: 2 victims" in two.ours) == (holds is False)


def test_both_equations_attack_one_victim_from_the_same_start() -> None:
    size = Size(per_class=1, width=4, epochs=2, iterations=1)
    own, others = drawn(list(range(10)) * 3, 1, seed=1)
    assert [row % 10 for row in own] == [row % 10 for row in others] == list(range(10))
    assert not set(own) & set(others)
    images = torch.rand(10, 3, 8, 8)
    net = victim(images - images.mean(0), size, 0)
    found = [attacked(net, images.mean(0), equation, size, 0) for equation in ("12", "8", "12")]
    assert found[0].shape == (20, 3, 8, 8)
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
