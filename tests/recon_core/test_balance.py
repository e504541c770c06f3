from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_subsets", 0),
        ("share", 0),
        ("noise_fraction", 1.0),
        ("noise_fraction", -0.1),
        ("min_iteration", -1),
        ("seed", -1),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value: float):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        Curation(**{field: value})  # type: ignore[arg-type]


def test_occurrences_is_a_table_by_image_id():
    z = occurrences(np.array([1, 4]), np.array([7, 9]))
    assert z.tolist() == [0, 7, 0, 0, 9]
    assert occurrences(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []


def test_repeats_depend_on_seed_epoch_and_part_only():
    image_ids, z = np.arange(500) % 5, np.full(5, 100)

    def draw(seed: int = 0, epoch: int = 0, part: int = 0) -> list[int]:
        curation = Curation(seed=seed)
        return repeats(image_ids, z, curation=curation, part=part, epoch=epoch).tolist()

    assert draw() == draw()
    assert len({tuple(d) for d in (draw(), draw(seed=1), draw(epoch=1), draw(part=1))}) == 4


@settings(max_examples=25, deadline=None)
@given(
    n_subsets=st.integers(1, 200),
    share=st.integers(1, 30),
    z=st.integers(1, 300),
    seed=st.integers(0, 9),
)
def test_repeats_have_the_binomial_s_mean_and_variance(
    n_subsets: int, share: int, z: int, seed: int
):
    n = 20_000
    curation = Curation(n_subsets=n_subsets, share=share, seed=seed)
    image_ids, table = np.ones(n, np.int64), np.array([0, z])
    times = repeats(image_ids, table, curation=curation, part=0, epoch=0)
    p = min(1.0, share / z)
    variance = n_subsets * p * (1 - p)
    assert times.dtype == np.int64
    assert times.min() >= 0
    assert times.max() <= n_subsets
    assert abs(times.mean() - n_subsets * p) <= 6 * np.sqrt(variance / n)
    fourth = variance * (1 + (3 * n_subsets - 6) * p * (1 - p))  # central moment of the binomial
    spread = np.sqrt(max(fourth - variance**2, 0) / n)
    assert abs(times.var() - variance) <= 6 * spread + 36 * variance / n


def test_pairs_that_are_not_wanted_do_not_occur():
    columns = {
        "image_id": np.zeros(6, np.int64),
        "iteration": np.array([100, 100, 500, 500, 900, 900], np.int32),
        "confident": np.array([True, False] * 3),
    }
    curation = Curation(n_subsets=3, share=5, min_iteration=500)
    times = curated_repeats(columns, np.array([2]), curation=curation, part=0, epoch=0)
    assert times.tolist() == [0, 0, 3, 0, 3, 0]


@pytest.mark.parametrize("image_id", [-1, 3])
def test_images_outside_the_table_are_refused(image_id: int):
    with pytest.raises(ValueError, match="z has 3 entries"):
        repeats(np.array([image_id]), np.zeros(3, np.int64), curation=Curation(), part=0, epoch=0)


def test_summary_of_a_known_case():
    balance = summarise(np.array([0, 1, 10, 40]), Curation(n_subsets=10, share=5))
    assert (balance.n_images, balance.n_pairs) == (3, 51)
    assert balance.expected_examples == pytest.approx(10 * (1 + 5 + 5))
    assert balance.expected_noise_examples == pytest.approx(11)
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
