"""The comparison of engine and reference: it holds where they agree, and only there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.kkt import agreement as kkt_agreement
from benchmarks.kkt.agreement import Case, Duel, Victims, apart, exceeded, main, trajectory
from benchmarks.record import measured
from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.victims.network import Conv, Network

STEPS = (1, 2, 20)


@pytest.fixture(scope="module")
def victims() -> Victims:
    return Victims("photos", 2)


def small(network: Network, **attack: object) -> Case:
    settings = {"n_candidates": 8, "save_at": STEPS} | attack
    return Case(network=network, attack=KKTAttack(**settings), epochs=10)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "case",
    [
        small(Network(widths=(9, 7))),
        small(Network(widths=(9,), conv=Conv(kernel=5, channels=2), bias="first"), alpha=5.0),
        small(Network(widths=(9,), bias="all"), condition="multiclass", lam_scale="none"),
        small(Network(widths=(9,), activation="leaky_relu"), condition="regression"),
        small(Network(widths=(9,), activation="gelu"), optimiser=kkt_agreement.GD, lam_lr=1e-3),
    ],
    ids=str,
)
def test_the_engine_walks_as_the_reference_does(victims: Victims, case: Case) -> None:
    found, of_gradients = trajectory(
        Duel(victims, victims.specs[1], case, torch.float64), str(case)
    )
    assert exceeded(found) is None
    assert found.value < 1e-11
    assert of_gradients < 1e-11


def test_another_attack_is_noticed(victims: Victims, monkeypatch: pytest.MonkeyPatch) -> None:
    duel = Duel(victims, victims.specs[0], small(Network(widths=(9, 7))), torch.float64)
    other = replace(duel.attack, alpha=duel.attack.alpha * (1 + 1e-5))
    theirs = duel.reference().run(STEPS)
    duel.attack = other
    duel.settings = replace(duel.settings, alpha=duel.settings.alpha * (1 + 1e-5))
    assert apart(duel.ours(), theirs).max() > 1e-6
    duel.ours = lambda: theirs * (1 + 2e-6)  # type: ignore[method-assign]
    monkeypatch.setattr(duel, "attack", replace(other, alpha=20.0))
    found, of_gradients = trajectory(duel, "a case")
    assert found.value == pytest.approx(2e-6, rel=1e-3)
    assert of_gradients > 1e-10
    assert "is above 1e-06" in str(exceeded(found))


def test_a_trajectory_counts_up_to_where_the_reference_parts_from_itself(
    victims: Victims, monkeypatch: pytest.MonkeyPatch
) -> None:
    duel = Duel(victims, victims.specs[0], small(Network(widths=(9, 7))), torch.float64)
    theirs = duel.reference().run(STEPS)
    unstable = torch.tensor([0.0, 0.0, 0.5], dtype=torch.float64)[:, None, None]
    found = iter([theirs * (1 + unstable), theirs * (1 + 2 * unstable)])
    monkeypatch.setattr(kkt_agreement, "followed", lambda _duel: (theirs, 0.0))
    monkeypatch.setattr(duel, "ours", lambda: next(found))
    monkeypatch.setattr("benchmarks.kkt.reference.Reconstruction.run", lambda *_: next(found))
    measured, _ = trajectory(duel, "a case")
    assert measured.value == pytest.approx(torch.finfo(torch.float64).eps, rel=1e-3)
    assert "up to step 2; then" in measured.case
    assert "by 5e-01 at the end; the engine from it by 1e+00" in measured.case


def test_the_command_fails_where_a_limit_is_exceeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = measured(
        "kkt agreement", "good", 1e-9, unit="x", reference="limit", reference_value=1e-6
    )
    bad = replace(good, case="bad", value=1e-3, ratio=1e-3)
    monkeypatch.setattr(kkt_agreement, "measure", lambda *_given: [good, bad])
    assert main(["--quick", "--json", str(tmp_path / "kkt_agreement.json")]) == 1
