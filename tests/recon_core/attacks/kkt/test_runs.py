"""Runs of the kkt family side by side and in sweeps, with several attacks, stops, precisions."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from recon_core import precision
from recon_core.attacks import family_run
from recon_core.attacks.kkt import attacks as kkt_attacks
from recon_core.attacks.kkt import run as kkt
from recon_core.attacks.kkt import run as kkt_run
from recon_core.attacks.kkt.objective import KKTAttack, Search, settings_of
from recon_core.optimisers import Optimiser
from recon_core.types import Outcome, RunResult, RunSpec
from recon_core.victims.losses import Loss
from recon_core.victims.network import Conv, Network
from recon_core.victims.training import Training
from tests.recon_core.drawing import refuses
from tests.recon_core.small_runs import (
    CPU,
    FROZEN,
    QUICK,
    QUICK_ALL,
    SIDE,
    TILES,
    Kept,
    N,
    assert_all_equal,
    assert_equal_results,
    images,
    run,
    specs,
    with_attack,
)

KINDS = {
    "binary": (QUICK_ALL, 2),
    "several attacks": (replace(QUICK_ALL, n_attacks=2), 2),
    "multiclass": (
        replace(
            QUICK_ALL,
            n_classes=4,
            training=Training(epochs=20, loss=Loss(kind="ce")),
            attack=KKTAttack(condition="multiclass", n_candidates=9, save_at=(5, 15)),
        ),
        4,
    ),
    "regression": (
        replace(
            QUICK_ALL,
            training=Training(epochs=15, loss=Loss(kind="huber"), batch_size=3),
            attack=KKTAttack(condition="regression", n_candidates=7, save_at=(5, 15)),
        ),
        2,
    ),
    "convolution": (
        replace(
            QUICK_ALL, victim=Network(widths=(8,), conv=Conv(kernel=7, channels=3), bias="all")
        ),
        2,
    ),
}


@functools.cache
def of_kind(kind: str) -> tuple[RunResult, ...]:
    """Three runs, one after another."""
    experiment, n_classes = KINDS[kind]
    assert torch.get_num_threads() == 1
    return tuple(run(experiment, specs(n_classes=n_classes)))


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_run_is_the_same_bits_in_any_batch_and_stacked_to_rounding(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, one_by_one = KINDS[kind][0], of_kind(kind)
    assert {len(result.pairs) > 0 for result in one_by_one} == {True}
    for others in ((2, 0), (1,)):
        some = [one_by_one[i] for i in others]
        assert_all_equal(some, run(experiment, [result.spec for result in some]))
    monkeypatch.setattr(family_run, "stack_size", lambda _device, n_runs: n_runs)
    stacked = run(experiment, [result.spec for result in one_by_one])
    assert_all_equal(one_by_one, stacked, tolerance=1e-3)


@pytest.mark.parametrize("kind", list(KINDS))
def test_runs_side_by_side_are_the_same_bits_as_one_after_another(kind: str) -> None:
    experiment, one_after_another = KINDS[kind][0], of_kind(kind)
    chosen = [result.spec for result in one_after_another]
    torch.set_num_threads(2)
    for some in (chosen, chosen[:0:-1]):
        fractions: list[float] = []
        side_by_side = experiment.run_batch(
            some, images(some), device=CPU, progress=fractions.append
        )
        assert torch.get_num_threads() == 2
        for result in side_by_side:
            assert_equal_results(result, one_after_another[result.spec.run])
        assert fractions[-1] == 1.0
        assert all(a <= b for a, b in itertools.pairwise(fractions))


def test_an_error_of_a_run_side_by_side_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(kkt_run, "train", broken)
    torch.set_num_threads(2)
    with pytest.raises(KeyError, match="broken"):
        run(QUICK)
    assert torch.get_num_threads() == 2


SEVERAL = replace(with_attack(QUICK_ALL, n_candidates=6), n_attacks=3)


def test_candidates_are_numbered_attack_after_attack() -> None:
    for result in run(with_attack(SEVERAL, optimiser=FROZEN, save_at=(1, 2), sigma=0.01)):
        pairs = result.pairs
        assert pairs.candidate.tolist() == [c for c in range(3 * 6) for _ in range(2)]
        assert pairs.iteration.tolist() == [1, 2] * 18
        for k in range(3):
            noise = torch.randn(6, 3 * SIDE * SIDE, generator=result.spec.generator(f"attack {k}"))
            mine = (pairs.candidate // 6 == k) & (pairs.iteration == 2)
            saved = pairs.reconstruction[mine].flatten(1)
            torch.testing.assert_close(saved, 0.01 * noise, rtol=0, atol=1e-6)


def test_several_attacks_are_split_to_bound_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = replace(SEVERAL, dtype="float64")
    whole = run(wide, specs(2))
    for rows in (1, 13):
        monkeypatch.setattr("recon_core.attacks.kkt.run.ROWS_AT_ONCE", rows)
        for one, other in zip(whole, run(wide, specs(2)), strict=True):
            assert_equal_results(one, other, tolerance=1e-5)


def test_attacks_that_diverge_are_left_out() -> None:
    search = Search(lr=(1e-9, 1e9), sigma=None, lam_min=None, alpha=(10.0, 500.0))
    wild = replace(
        with_attack(SEVERAL, optimiser=Optimiser(rule="gd"), search=search, save_at=(5, 60)),
        n_attacks=8,
    )
    n_left_out = 0
    for result in run(wild, specs(2)):
        draws = [result.spec.generator(f"attack {k}") for k in range(8)]
        lr = settings_of(wild.attack, draws).lr
        candidates = result.pairs.candidate.unique()
        attacks = (candidates // 6).unique()
        assert candidates.tolist() == [6 * k + i for k in attacks.tolist() for i in range(6)]
        assert bool(torch.isin((lr < 1e-3).nonzero(), attacks).all())
        assert not bool(torch.isin((lr > 1e3).nonzero(), attacks).any())
        assert bool(result.pairs.reconstruction.isfinite().all())
        assert result.outcome is not Outcome.NONFINITE
        assert 0 < result.stats["kkt_residual"] < 1.1
        assert result.stats["attack_loss"] > 0
        n_left_out += 8 - len(attacks)
    assert n_left_out > 0


def test_the_statistics_are_those_of_the_best_attack() -> None:
    frozen = replace(
        with_attack(QUICK_ALL, optimiser=FROZEN, save_at=(1,), sigma=0.3, lam_scale="none"),
        training=Training(epochs=1),
    )
    by_number = [
        [r.stats["kkt_residual"] for r in run(replace(frozen, n_attacks=n))] for n in (2, 4, 6)
    ]
    n_improved = 0
    for residuals in zip(*by_number, strict=True):
        assert list(residuals) == sorted(residuals, reverse=True)
        n_improved += len(set(residuals)) > 1
    assert n_improved > 0, "the best is not to be the first"


def ncc_score(candidates: Tensor, targets: Tensor) -> float:
    """The authors' score, from its definition: squared distances of normalised images, 10 best."""

    def normalised(pictures: Tensor) -> Tensor:
        mean, std = pictures.mean((2, 3), keepdim=True), pictures.std((2, 3), keepdim=True)
        return ((pictures - mean) / std).flatten(1)

    distances = torch.cdist(normalised(targets.double()), normalised(candidates.double())) ** 2
    return float(distances.amin(1).sort().values[:10].mean())


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("n_attacks", [1, 4], ids=["stacked runs", "attacks of one run"])
def test_hopeless_attacks_stop_by_the_authors_rule(
    n_attacks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if n_attacks == 1:
        monkeypatch.setattr(family_run, "stack_size", lambda _device, n_runs: n_runs)
    search = Search(lr=(1e-3, 3.0), sigma=None, lam_min=None, alpha=None)
    free = replace(
        with_attack(QUICK_ALL, search=search, save_at=(30, 40), stop_after=30),
        n_attacks=n_attacks,
    )
    chosen = specs(1) if n_attacks > 1 else specs()
    calm = run(free, chosen)
    scores = {}
    for result in calm:
        at_stop = result.pairs.iteration == 30
        found, number = result.pairs.reconstruction[at_stop], result.pairs.candidate[at_stop]
        truth = result.targets.float() / 255 - result.mean_image
        for k in range(n_attacks):
            scores[result.spec.run, k] = ncc_score(found[number // (2 * N) == k], truth)
    middle = sorted(scores.values())[len(scores) // 2]
    for limit in (0.997 * middle, 1.003 * middle):
        strict = run(with_attack(free, ncc_stop_above=limit), chosen)
        for result, before in zip(strict, calm, strict=True):
            going = [k for k in range(n_attacks) if scores[result.spec.run, k] <= limit]
            expected = torch.tensor([2 * N * k + i for k in going for i in range(2 * N)]).long()
            assert torch.equal(result.pairs.candidate.unique(), expected)
            assert (result.outcome is Outcome.STOPPED) == (not going)
            kept = torch.isin(before.pairs.candidate, expected)
            ours, theirs = result.pairs.reconstruction, before.pairs.reconstruction[kept]
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("often")
def test_the_authors_rule_survives_candidates_that_are_not_numbers() -> None:
    wild = with_attack(
        QUICK_ALL,
        optimiser=Optimiser(rule="gd", lr=1e30),
        ncc_stop_above=1e9,
        stop_after=1,
        save_at=(5, 20),
    )
    assert {result.outcome for result in run(wild)} == {Outcome.NONFINITE}


@pytest.mark.parametrize(("name", "n_threads"), [("ieee", 1), ("tf32", 1), ("ieee", 2)])
def test_precision_is_set_for_the_products_and_then_as_before(
    name: Any, n_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.count()
    monkeypatch.setattr(precision, "_probe", lambda device: torch.tensor(next(numbers)))
    seen: list[tuple[str, ...]] = []
    for module, function in (
        (kkt_run, "train"),
        (kkt_attacks, "reconstruct"),
        (kkt_run, "pairs_of"),
    ):
        original = getattr(module, function)

        def spying(*positional: Any, original: Any = original, **named: Any) -> Any:
            seen.append(precision._read())
            result = original(*positional, **named)
            seen.append(precision._read())
            return result

        monkeypatch.setattr(module, function, spying)
    outside = precision._read()
    strange = ("ieee", "bf16") if len(outside) == 2 else ("medium",)
    within = ("ieee", name) if len(outside) == 2 else (precision.LEGACY[name],)
    exact = ("ieee", "ieee") if len(outside) == 2 else ("highest",)
    torch.set_num_threads(n_threads)
    try:
        precision._write(strange)
        run(replace(QUICK, precision=name), specs(2))
        assert precision._read() == strange
    finally:
        precision._write(outside)
    assert len(seen) == 3 * 2 * 2
    assert set(seen) == {within, exact}
    if n_threads == 1:
        assert seen == ([within] * 4 + [exact] * 2) * 2


N_ATTACKS = 9
SEARCH = Search(lr=(0.01, 1.0))
SWEEP = with_attack(QUICK_ALL, optimiser=Optimiser(rule="gd", momentum=0.9), search=SEARCH)


def attacks(n: int = N_ATTACKS, *, victim: int = 0, first: int = 0) -> list[RunSpec]:
    like = specs(victim + 1)[victim]
    return [replace(like, run=first + k, victim=victim) for k in range(n)]


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
    assert_all_equal(swept(SWEEP, both), [*swept(SWEEP, both[:2]), *swept(SWEEP, both[2:])])


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


def test_a_sweep_is_of_single_attacks() -> None:
    refuses("n_attacks=2; in a sweep every run is", swept, replace(SWEEP, n_attacks=2), attacks(2))


@pytest.mark.gpu
def test_on_a_gpu_the_victim_and_the_settings_are_the_same() -> None:
    some = attacks(4)
    images = torch.stack([TILES[list(spec.image_ids)] for spec in some])
    there = SWEEP.run_batch(some, images, device=torch.device("cuda"))
    for one, other in zip(there, swept(SWEEP, some), strict=True):
        torch.testing.assert_close(one.margins, other.margins, rtol=1e-2, atol=1e-3)
        assert one.stats["lr"] == other.stats["lr"]
