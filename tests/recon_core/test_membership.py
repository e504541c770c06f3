"""Likelihood ratios beside scipy's densities, and on confidences whose leak is planted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from recon_core.leakage import complementary_halves, confidence, likelihood_ratio
from recon_core.summary import detect
from recon_core.types import seeded_generator
from recon_core.victims.losses import Loss


def halves(n_victims: int, n: int, seed: int = 0) -> Tensor:
    labels = np.arange(n) % 2
    return complementary_halves(labels, n_victims, seeded_generator(seed, 0, "halves"))


def planted(member: Tensor, gain: float, *, difficulty: float = 0.0, seed: int = 0) -> Tensor:
    """Confidences with deviation 1 about an image's own level, `gain` higher for members."""
    generator = seeded_generator(seed, 0, "confidence")
    level = difficulty * torch.randn(member.shape[1], generator=generator)
    return (level + gain * member + torch.randn(member.shape, generator=generator)).double()


def auc(scores: Tensor, member: Tensor) -> float:
    found = detect(scores[member].numpy(), scores[~member].numpy())["auc"]
    assert found is not None
    return found


def found_at_1_percent(scores: Tensor, member: Tensor) -> float:
    found = detect(scores[member].numpy(), scores[~member].numpy())["found_at"]
    assert found is not None
    return found["0.01"]


@pytest.mark.parametrize("kind", ["bce", "ce"])
def test_confidence_is_the_logit_of_the_labels_probability(kind: str) -> None:
    generator = seeded_generator(0, 0, "outputs")
    n_outputs = 3 if kind == "ce" else 1
    phi = torch.randn(2, 5, n_outputs, generator=generator).double()
    y = torch.arange(10).view(2, 5) % 3 if kind == "ce" else torch.ones(2, 5).double()
    if kind == "bce":
        y[:, ::2] = -1
    own = Loss(kind=kind)  # type: ignore[arg-type]
    for run in range(2):
        for i in range(5):
            p = math.exp(
                -float(own.value(phi[run : run + 1, i : i + 1], y[run : run + 1, i : i + 1]))
            )
            found = float(confidence(phi, y, kind)[run, i])  # type: ignore[arg-type]
            assert found == pytest.approx(math.log(p / (1 - p)), rel=1e-9)
    sure = confidence(60 * y.unsqueeze(2), y, "bce") if kind == "bce" else None
    assert sure is None or sure.tolist() == [[60.0] * 5] * 2


@pytest.mark.parametrize("kind", ["mse", "power", "huber"])
def test_confidence_of_regression_is_minus_the_squared_error(kind: str) -> None:
    phi, y = torch.tensor([[[0.5], [-3.0]]]), torch.tensor([[1.0, -1.0]])
    assert confidence(phi, y, kind).tolist() == [[-0.25, -4.0]]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs -1 and"):
        confidence(phi, 2 * y, kind)  # type: ignore[arg-type]


def by_the_book(c: Tensor, member: Tensor) -> np.ndarray:
    """Victim by victim, image by image, with scipy's density."""
    n_victims, n = c.shape
    rows = range(n_victims)
    expected = np.full((n_victims, n), np.nan)
    for v in rows:
        partner = [u for u in rows if bool((member[u] == ~member[v]).all())]
        spread = []
        for inside in (True, False):
            squares, freedom = 0.0, 0
            for i in range(n):
                own = [float(c[u, i]) for u in rows if u != v and bool(member[u, i]) == inside]
                if len(own) > 1:
                    squares += float(np.var(own, ddof=1)) * (len(own) - 1)
                    freedom += len(own) - 1
            spread.append(math.sqrt(squares / freedom))
        for i in range(n):
            logs = []
            for inside, s in zip((True, False), spread, strict=True):
                shadows = [u for u in rows if u not in (v, *partner)]
                mean = np.mean([float(c[u, i]) for u in shadows if bool(member[u, i]) == inside])
                logs.append(stats.norm.logpdf(float(c[v, i]), mean, s))
            expected[v, i] = logs[0] - logs[1]
    return expected


@pytest.mark.parametrize("n_victims", [4, 6, 10])
def test_the_ratio_is_that_of_scipys_densities(n_victims: int) -> None:
    member = halves(n_victims, 12)
    c = planted(member, 1.0, difficulty=2.0)
    ratio = likelihood_ratio(c, member)
    assert ratio.dtype == torch.float64
    np.testing.assert_allclose(ratio.numpy(), by_the_book(c, member), rtol=1e-9, atol=1e-9)
    alike = likelihood_ratio(c.float(), member)
    torch.testing.assert_close(alike, ratio, rtol=1e-4, atol=1e-4)


def test_a_victim_without_a_complement_leaves_out_itself_alone() -> None:
    odd = torch.cat([halves(6, 12), halves(2, 12, 7)[:1]])
    c = planted(odd, 1.0)
    np.testing.assert_allclose(
        likelihood_ratio(c, odd).numpy(), by_the_book(c, odd), rtol=1e-9, atol=1e-9
    )


def test_a_planted_gain_is_found_as_often_as_it_can_be() -> None:
    """With deviation 1, members `gain` higher have an area of Phi(gain / sqrt 2)."""
    member = halves(40, 400)
    for gain in (0.5, 1.0, 2.0):
        c = planted(member, gain, difficulty=3.0)
        found = auc(likelihood_ratio(c, member), member)
        best = stats.norm.cdf(gain / math.sqrt(2))
        assert best - 0.03 < found < best + 0.01  # 19 shadows a side do not know the mean exactly


@pytest.mark.parametrize("n_victims", [4, 6, 16])
def test_without_a_leak_members_look_like_decoys(n_victims: int) -> None:
    """With few shadows too, of which more have an image where the victim has not."""
    areas = []
    for seed in range(20):
        member = halves(n_victims, 200, seed)
        c = planted(member, 0.0, difficulty=1.0, seed=seed)
        areas.append(auc(likelihood_ratio(c, member), member))
    error = np.std(areas, ddof=1) / math.sqrt(len(areas))
    assert error < 0.01
    assert np.mean(areas) == pytest.approx(0.5, abs=4 * error)


def test_the_ratio_sees_more_than_the_loss_where_images_differ_in_difficulty() -> None:
    member = halves(16, 400)
    c = planted(member, 2.0, difficulty=3.0)
    ratio, loss = (found_at_1_percent(s, member) for s in (likelihood_ratio(c, member), c))
    assert loss < 0.08
    assert ratio > 4 * loss
    assert auc(likelihood_ratio(c, member), member) > auc(c, member) + 0.1


def test_a_diverged_victim_is_no_shadow_and_finds_nothing() -> None:
    member = halves(8, 12)
    c = planted(member, 1.0)
    for bad in (math.nan, math.inf, -math.inf):
        broken = c.clone()
        broken[2, 5] = bad
        scores = likelihood_ratio(broken, member)
        assert scores[2].tolist() == [-math.inf] * 12
        rest = [v for v in range(8) if v != 2]
        assert bool(scores[rest].isfinite().all())
        expected = by_the_book(c[rest], member[rest])
        # Its complement has none among the rest, and leaves out nobody but itself.
        np.testing.assert_allclose(scores[rest].numpy(), expected, rtol=1e-9, atol=1e-9)
    # With four victims, the shadows of a pair are both of the other.
    few = halves(4, 12)
    c = planted(few, 1.0)
    c[3, 0] = math.nan
    scores = likelihood_ratio(c, few)
    assert bool((scores[[0, 1, 3]] == -math.inf).all())
    assert bool(scores[2].isfinite().all())
    c[:] = math.nan
    assert bool((likelihood_ratio(c, few) == -math.inf).all())


def test_confidences_that_are_all_the_same_say_nothing() -> None:
    member = halves(6, 12)
    assert likelihood_ratio(torch.full((6, 12), 2.5), member).tolist() == [[0.0] * 12] * 6
    sure = likelihood_ratio(10.0 * member, member)
    assert bool((sure[member] > 1e6).all())
    assert bool((sure[~member] < -1e6).all())


def test_halves_are_complementary_and_balanced() -> None:
    labels = np.array([0, 3, 0, 3, 0, 3, 0, 3, 7, 7])
    member = complementary_halves(labels, 6, seeded_generator(0, 0, "halves"))
    assert (member.dtype, member.shape) == (torch.bool, (6, 10))
    assert torch.equal(member[::2], ~member[1::2])
    assert member.sum(0).tolist() == [3] * 10
    for label, n in ((0, 2), (3, 2), (7, 1)):
        assert member[:, torch.from_numpy(labels == label)].sum(1).tolist() == [n] * 6
    assert torch.equal(member, complementary_halves(labels, 6, seeded_generator(0, 0, "halves")))
    many = complementary_halves(labels, 4000, seeded_generator(1, 0, "halves"))[::2]
    assert bool(((many.double().mean(0) - 0.5).abs() < 5 * 0.5 / math.sqrt(2000)).all())
    together = (many[:, 0] & many[:, 2]).double().mean()  # two of four: 1/6
    assert float(together) == pytest.approx(1 / 6, abs=0.05)


def test_refuses_what_cannot_be_halved_or_has_no_shadows() -> None:
    labels, generator = np.array([0, 0, 5, 5, 5]), seeded_generator(0, 0, "halves")
    with pytest.raises(ValueError, match="label 5 has 3 images, which cannot be halved"):
        complementary_halves(labels, 4, generator)
    for n_victims in (0, 3):
        with pytest.raises(ValueError, match=f"n_victims={n_victims} must be even"):
            complementary_halves(labels[:4], n_victims, generator)
    pair = halves(2, 12)
    with pytest.raises(ValueError, match=r"of 2 victims.*at least 4 victims in complementary"):
        likelihood_ratio(planted(pair, 0.0), pair)
    everywhere = halves(6, 12)
    everywhere[:, 4] = True
    with pytest.raises(ValueError, match="image 4 is in none or in all of the others"):
        likelihood_ratio(planted(everywhere, 0.0), everywhere)
