"""Multiplicities: the paper's subsets in distribution, exactly where they can be enumerated."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, chi2_contingency

from recon_core.balance import (
    Curation,
    curated_repeats,
    gini,
    keep_probability,
    occurrences,
    repeats,
    summarise,
)


def test_keep_probability_is_the_paper_s():
    probability = keep_probability(np.array([0, 1, 11, 22, 1100]), 11)
    np.testing.assert_allclose(probability, [0, 1, 1, 0.5, 0.01])


def test_occurrences_is_a_table_by_image_id():
    z = occurrences(np.array([1, 4]), np.array([7, 9]))
    assert z.tolist() == [0, 7, 0, 0, 9]
    assert occurrences(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []


def test_pairs_that_are_not_wanted_do_not_occur_and_those_that_are_must_be_counted():
    columns = {
        "image_id": np.zeros(6, np.int64),
        "iteration": np.array([100, 100, 500, 500, 900, 900], np.int32),
        "confident": np.array([True, False] * 3),
    }
    curation = Curation(n_subsets=3, share=5, min_iteration=500)
    times = curated_repeats(columns, np.array([2]), curation=curation, part=0, epoch=0)
    assert times.tolist() == [0, 0, 3, 0, 3, 0]
    with pytest.raises(ValueError, match="image 0 has pairs in part 0 but z=0"):
        curated_repeats(columns, np.array([0]), curation=curation, part=0, epoch=0)


def test_pairs_that_are_not_wanted_do_not_change_the_others():
    rng = np.random.default_rng(0)
    image_ids, wanted = rng.integers(0, 40, 900), rng.random(900) < 0.7
    z = np.bincount(image_ids[wanted], minlength=40)
    columns = {
        "image_id": image_ids,
        "iteration": np.full(900, 500, np.int32),
        "confident": wanted,
    }
    times = curated_repeats(columns, z, curation=Curation(), part=3, epoch=2)
    alone = repeats(image_ids[wanted], z, curation=Curation(), part=3, epoch=2)
    np.testing.assert_array_equal(times[wanted], alone)
    assert not times[~wanted].any()


SMALL = (0, 1, 0, 2, 0, 1)
"""The images of six pairs: they occur 3, 2 and 1 times."""


def enumerated(keep: np.ndarray, n_subsets: int) -> np.ndarray:
    """P of every tuple of multiplicities when `n_subsets` subsets keep each pair with `keep`.

    Every sequence of subsets is one term; the answer has an axis of n_subsets + 1 per pair.
    """
    subsets = np.array(list(itertools.product([0, 1], repeat=len(keep))))
    probability = np.where(subsets == 1, keep, 1 - keep).prod(axis=1)
    shape = (n_subsets + 1,) * len(keep)
    cells = np.zeros(1, np.int64)
    terms = np.ones(1)
    codes = subsets @ ((n_subsets + 1) ** np.arange(len(keep))[::-1])
    for _ in range(n_subsets):
        cells = (cells[:, None] + codes).ravel()
        terms = (terms[:, None] * probability).ravel()
    assert len(terms) == 2 ** (len(keep) * n_subsets)
    return np.bincount(cells, terms, minlength=np.prod(shape)).reshape(shape)


@pytest.mark.parametrize("share", [1, 2])
def test_six_pairs_have_the_enumerated_distribution(share: int):
    image_ids = np.array(SMALL)
    z = np.bincount(image_ids)
    curation = Curation(n_subsets=3, share=share)
    n_parts, n_copies = 400, 150  # copies of the six pairs in one part: z says what a pair's p is
    drawn = np.concatenate(
        [
            repeats(np.tile(image_ids, n_copies), z, curation=curation, part=part, epoch=0)
            for part in range(n_parts)
        ]
    ).reshape(-1, len(image_ids))
    expected = enumerated(np.minimum(1, share / z[image_ids]), 3).ravel()
    seen = np.bincount(drawn @ (4 ** np.arange(6)[::-1]), minlength=len(expected))
    assert not seen[expected == 0].any()
    often = expected * len(drawn) >= 5
    counts = np.append(seen[often], seen[~often].sum())
    terms = np.append(expected[often], expected[~often].sum()) * len(drawn)
    assert often.sum() >= 50
    statistic = ((counts - terms)[terms > 0] ** 2 / terms[terms > 0]).sum()
    assert chi2.sf(statistic, (terms > 0).sum() - 1) > 1e-3


@pytest.mark.parametrize("z", [11, 12, 60, 9000])
def test_many_pairs_have_the_distribution_of_the_paper_s_subsets(z: int):
    n = 40_000
    rng = np.random.default_rng(z)
    literal = np.zeros(n, np.int64)
    for _ in range(140):  # a subset keeps each pair with probability 11/z; they are concatenated
        literal += rng.random(n) < 11 / z
    image_ids = np.zeros(n, np.int64)
    ours = repeats(image_ids, np.array([z]), curation=Curation(), part=0, epoch=0)
    histograms = np.stack([np.bincount(x, minlength=141) for x in (ours, literal)])
    total = histograms.sum(axis=0)
    edges = np.flatnonzero(total >= 10)
    cells = np.searchsorted(edges, np.arange(141), side="right").clip(1) - 1
    pooled = np.stack([np.bincount(cells, row, minlength=len(edges)) for row in histograms])
    if z == 11:
        assert pooled.tolist() == [[n], [n]]
        assert ours.min() == 140
    else:
        assert chi2_contingency(pooled).pvalue > 1e-3


N_DRAWN = 100_000


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """In standard deviations of the correlation of independent values."""
    return float(abs(np.corrcoef(a, b)[0, 1]) * np.sqrt(len(a)))


def draw(*, seed: int = 0, part: int = 0, epoch: int = 0) -> np.ndarray:
    """Of a part whose pairs are all of one image that occurs 1,400 times."""
    image_ids = np.zeros(N_DRAWN, np.int64)
    curation = Curation(seed=seed)
    return repeats(image_ids, np.array([1400]), curation=curation, part=part, epoch=epoch)


def test_pairs_of_one_image_are_independent():
    times = draw()
    for lag in (1, 2, 3, 64, 256, 400):
        assert correlation(times[:-lag], times[lag:]) < 5
    mean = 140 * 11 / 1400
    blocks = times.reshape(-1, 100).sum(axis=1)
    spread = (blocks - 100 * mean) ** 2 / (100 * mean * (1 - 11 / 1400))
    assert abs(spread.mean() - 1) < 5 * np.sqrt(2 / len(blocks))


def test_parts_epochs_and_seeds_are_independent():
    streams = [draw(seed=s, part=p, epoch=e) for s, e, p in itertools.product(range(3), repeat=3)]
    for a, b in itertools.combinations(streams, 2):
        assert correlation(a, b) < 5


@pytest.mark.parametrize("image_id", [-1, 3])
def test_images_outside_the_table_are_refused(image_id: int):
    with pytest.raises(ValueError, match="z has 3 entries"):
        repeats(np.array([image_id]), np.zeros(3, np.int64), curation=Curation(), part=0, epoch=0)


def test_summary_of_a_known_case():
    balance = summarise(np.array([0, 1, 10, 40]), Curation(n_subsets=10, share=5))
    assert (balance.n_images, balance.n_pairs) == (3, 51)
    assert balance.expected_examples == pytest.approx(10 * (1 + 5 + 5))
    assert balance.expected_noise_examples == pytest.approx(11)
    assert balance.expected_mixture_examples == 0
    assert balance.gini_before == pytest.approx(2 * 39 / (3 * 51))
    assert balance.gini_after == pytest.approx(2 * 40 / (3 * 110))
    empty = summarise(np.zeros(4, np.int64), Curation())
    assert (empty.n_images, empty.expected_examples, empty.gini_after) == (0, 0.0, 0.0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_gini_is_the_mean_absolute_difference(values: list[float]):
    v = np.array(values)
    pairwise = np.abs(v[:, None] - v[None, :]).sum()
    expected = pairwise / (2 * len(v) * v.sum()) if v.sum() else 0.0
    assert gini(v) == pytest.approx(expected, abs=1e-9)
