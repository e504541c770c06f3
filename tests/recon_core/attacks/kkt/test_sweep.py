"""Sweeps: several runs attack one victim, which is trained once."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from recon_core.attacks.kkt import run as kkt
from recon_core.attacks.kkt import run as kkt_run
from recon_core.attacks.kkt.objective import Search, settings_of
from recon_core.optimisers import Optimiser
from recon_core.types import RunResult, RunSpec
from tests.recon_core.small_runs import (
    CPU,
    QUICK_ALL,
    TILES,
    Kept,
    assert_equal_results,
    run,
    specs,
    with_attack,
)

pytestmark = pytest.mark.usefixtures("one_thread")

N_ATTACKS = 9
SEARCH = Search(lr=(0.01, 1.0))
SWEEP = with_attack(QUICK_ALL, optimiser=Optimiser(rule="gd", momentum=0.9), search=SEARCH)


def attacks(n: int = N_ATTACKS, *, victim: int = 0, first: int = 0) -> list[RunSpec]:
    like = specs(victim + 1)[victim]
    return [dataclasses.replace(like, run=first + k, victim=victim) for k in range(n)]


def swept(experiment: kkt.KKT, some: list[RunSpec], victims: Kept | None = None) -> list[RunResult]:
    images = torch.stack([TILES[list(spec.image_ids)] for spec in some])
    return experiment.run_batch(some, images, device=CPU, victims=victims)


def test_the_attacks_share_victim_and_images_and_nothing_else() -> None:
    results = swept(SWEEP, attacks())
    first = results[0]
    for result in results[1:]:
        assert torch.equal(result.targets, first.targets)
        assert torch.equal(result.margins, first.margins)
        assert torch.equal(result.mean_image, first.mean_image)
        for name in ("train_loss", "train_accuracy", "margin_min"):
            assert result.stats[name] == first.stats[name]
    for name in ("lr", "sigma", "lam_min", "alpha", "kkt_residual", "residual_relu"):
        assert len({result.stats[name] for result in results}) == N_ATTACKS, name
    drawn = settings_of(SWEEP.attack, [spec.generator("attack") for spec in attacks()])
    assert [r.stats["lr"] for r in results] == drawn.lr.tolist()
    assert {r.stats["n_iterations"] for r in results} == {15.0}


def test_an_attack_of_a_sweep_is_the_same_alone_and_as_a_run_of_its_own() -> None:
    some = attacks()
    together = swept(SWEEP, some)
    for k in (0, 4):
        (alone,) = swept(SWEEP, [some[k]])
        assert_equal_results(alone, together[k])
    (own,) = run(SWEEP, specs(1))
    assert_equal_results(own, together[0])


def test_sweeps_of_several_victims_go_in_one_batch() -> None:
    both = [*attacks(2), *attacks(3, victim=1, first=2)]
    for one, other in zip(
        swept(SWEEP, both), [*swept(SWEEP, both[:2]), *swept(SWEEP, both[2:])], strict=True
    ):
        assert_equal_results(one, other)


def test_a_kept_victim_is_not_trained_again(monkeypatch: pytest.MonkeyPatch) -> None:
    victims = Kept()
    trained = swept(SWEEP, attacks(2), victims)
    assert list(victims) == [0]
    kept = {name: tensor.clone() for name, tensor in victims[0].items()}

    def refuses(*_arguments: object, **_options: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(kkt_run, "train", refuses)
    again = swept(SWEEP, attacks(2), victims)
    for one, other in zip(trained, again, strict=True):
        assert_equal_results(one, other)
        assert torch.equal(one.margins, other.margins)
    for name, tensor in victims[0].items():
        assert torch.equal(tensor, kept[name]), "nothing may change what is kept"
    with pytest.raises(AssertionError, match="trained again"):
        swept(SWEEP, attacks(2, victim=1), victims)


def test_margins_are_those_of_the_weights() -> None:
    victims = Kept()
    (result,) = swept(SWEEP, attacks(1), victims)
    w = [victims[0][f"parameters.{i}"][0].double() for i in range(3)]
    x = (result.targets / 255 - result.mean_image).double().flatten(1)
    phi = ((x @ w[0].T).relu() @ w[1].T).relu() @ w[2].T
    y = torch.tensor(result.spec.labels).double() * 2 - 1
    torch.testing.assert_close(result.margins.double(), y * phi[:, 0], rtol=1e-4, atol=1e-6)
    assert result.stats["margin_min"] == pytest.approx(float(result.margins.min()))


def test_a_sweep_is_of_single_attacks() -> None:
    with pytest.raises(ValueError, match="n_attacks=2; in a sweep every run is one"):
        swept(dataclasses.replace(SWEEP, n_attacks=2), attacks(2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_victim_and_the_settings_are_the_same() -> None:
    some = attacks(4)
    images = torch.stack([TILES[list(spec.image_ids)] for spec in some])
    there = SWEEP.run_batch(some, images, device=torch.device("cuda"))
    for one, other in zip(there, swept(SWEEP, some), strict=True):
        torch.testing.assert_close(one.margins, other.margins, rtol=1e-2, atol=1e-3)
        assert one.stats["lr"] == other.stats["lr"]
