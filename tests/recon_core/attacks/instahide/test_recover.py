"""All private images from encodings: exact, or named as not determined."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from recon_core.attacks.instahide.graph import (
    NotALineGraphError,
    canonical,
    gram,
    overlaps,
)
from recon_core.attacks.instahide.mixing import Mixing
from recon_core.attacks.instahide.public_images import find_publics
from recon_core.attacks.instahide.recover import Status, recover
from tests.recon_core.attacks.instahide.cases import gaussian_case, renumbered, worst_errors
from tests.recon_core.drawing import generator


def recovered(case, **settings):
    drawn = generator(0)
    own = {"public": case.public, "n_private": len(case.private)} | settings
    return recover(case.encodings.y, case.mixing, generator=drawn, **own)


@pytest.mark.parametrize("make", [Mixing.by_parts, Mixing.as_a_whole])
@pytest.mark.parametrize("k_pub", [0, 2, 4])
def test_recovers_every_image_exactly(make, k_pub):
    case = gaussian_case(make(k_pub), n=30, p=200, d=3072, m=200, seed=k_pub)
    found = recovered(case)
    assert found.exact
    assert found.n_graphs == 1
    assert found.n_recovered == 30
    assert found.explained.all()
    assert torch.equal(found.public, case.encodings.public.sort(1).values)
    np.testing.assert_array_equal(canonical(found.edges), canonical(case.edges))
    assert float(worst_errors(found.images, case.private, signed=k_pub > 0).max()) < 1e-9


def test_noise_of_a_hundredth_costs_no_pixel_ten_deviations():
    case = gaussian_case(Mixing.by_parts(2, noise=0.01), n=40, p=100, d=3072, m=400)
    found = recovered(case)
    assert found.n_recovered == 40
    assert float(worst_errors(found.images, case.private, signed=True).max()) < 0.1


def test_images_that_are_not_determined_are_named_and_not_guessed():
    case = gaussian_case(Mixing.by_parts(2), n=20, p=60, d=3072, m=34, seed=3)
    found = recovered(case)
    known = torch.tensor([status is Status.RECOVERED for status in found.status])
    assert 0 < int(known.sum()) < 20
    assert found.images[~known].isnan().all()
    assert not found.images[known].isnan().any()
    assert float(worst_errors(found.images[known], case.private, signed=True).max()) < 1e-9
    assert {Status.AMBIGUOUS, Status.FREE} <= set(found.status)
    in_no_encoding = recovered(
        gaussian_case(Mixing.by_parts(0), n=6, p=0, d=3072, m=40), n_private=9
    )
    assert in_no_encoding.status.count(Status.FREE) == 3
    assert in_no_encoding.images.shape == (9, 3072)


def test_wrong_public_images_are_found_and_mended(monkeypatch):
    case = gaussian_case(Mixing.by_parts(2), n=30, p=300, d=3072, m=220, seed=3)

    def mistaken(*given):
        ids = find_publics(*given)
        ids[[3, 50, 51], 0] = (ids[[3, 50, 51], 0] + 17) % 300
        return ids

    monkeypatch.setattr("recon_core.attacks.instahide.recover.find_publics", mistaken)
    found = recovered(case)
    assert found.explained.all()
    assert torch.equal(found.public, case.encodings.public.sort(1).values)
    assert float(worst_errors(found.images, case.private, signed=True).max()) < 1e-9


def test_an_encoding_that_is_something_else_is_left_out_or_spoils_all_without_repairs():
    case = gaussian_case(Mixing.by_parts(2), n=30, p=300, d=3072, m=220, seed=4)
    drawn = generator(11)
    other = torch.randn(3072, dtype=torch.float64, generator=drawn)
    case.encodings.y[11] = other.abs() * 2**0.5
    found = recovered(case)
    assert np.flatnonzero(~found.explained).tolist() == [11]
    assert float(worst_errors(found.images, case.private, signed=True).max()) < 1e-9
    others = np.arange(220) != 11
    np.testing.assert_array_equal(
        renumbered(found.edges[others], case.edges[others], 30), case.edges[others]
    )
    unrepaired = recovered(case, n_repairs=0)
    assert unrepaired.status == (Status.UNSOLVED,) * 30
    assert unrepaired.images.isnan().all()


@pytest.mark.parametrize("changed", [1, 2])
def test_an_overlap_that_is_nearly_something_else_costs_nothing(monkeypatch, changed):
    case = gaussian_case(Mixing.by_parts(2), n=20, p=60, d=3072, m=60, seed=3)
    expected = recovered(case)

    def mistaken(*given):
        scores = overlaps(*given)
        shares = gram(case.edges)
        rows, columns = np.nonzero(np.triu(shares == 1, 1))
        for k, score in zip((5, 40)[:changed], (0.492, 0.43), strict=False):
            scores[rows[k], columns[k]] = scores[columns[k], rows[k]] = score
        return scores

    monkeypatch.setattr("recon_core.attacks.instahide.recover.overlaps", mistaken)
    found = recovered(case)
    assert found.exact
    np.testing.assert_array_equal(found.edges, expected.edges)
    assert found.status == expected.status
    assert Status.RECOVERED in found.status


def test_single_precision_is_enough():
    case = gaussian_case(Mixing.by_parts(2), n=20, p=60, d=3072, m=120)
    e = replace(case.encodings, y=case.encodings.y.float())
    found = recovered(replace(case, encodings=e, public=case.public.float()))
    assert found.n_recovered == 20
    assert float(worst_errors(found.images, case.private, signed=True).max()) < 1e-4
    stored = replace(case, encodings=replace(e, y=e.y.double()), public=case.public.float())
    assert torch.equal(recovered(stored).images, found.images)


@pytest.mark.parametrize("k_pub", [0, 2])
def test_two_graphs_are_left_open(k_pub):
    """Of the six pairs of four images, whose overlaps those of other pairs have, too."""
    case = gaussian_case(Mixing.by_parts(k_pub), n=4, p=9, d=3072, m=6, seed=8)
    pairs = torch.combinations(torch.arange(4))
    mixed = 2**-0.5 * case.private[pairs].sum(1) + case.public_part
    drawn = generator(0)
    found = recover(mixed.abs(), case.mixing, public=case.public, n_private=4, generator=drawn)
    assert found.n_graphs == 2
    assert found.status == (Status.SEVERAL_GRAPHS,) * 4
    assert found.images.isnan().all()


@pytest.mark.parametrize(
    ("pixel", "change", "message"),
    [
        (0.0, {"n_private": 300}, "200 encodings of n_private=300"),
        (0.0, {"n_private": 1}, "n_private=1"),
        (0.0, {"public": None}, "k_pub=2, but no public images"),
        (0.0, {"public": torch.zeros(9, 5)}, "public images have 5 pixels, encodings 64"),
        (torch.nan, {}, "encoding 3 has pixels that are not finite"),
    ],
)
def test_bad_input_is_refused(pixel, change, message):
    case = gaussian_case(Mixing.by_parts(2), n=10, p=20, d=64, m=200)
    case.encodings.y[3, 5] = pixel
    with pytest.raises(ValueError, match=message):
        recovered(case, **change)


def test_too_few_pixels_are_a_clear_outcome():
    case = gaussian_case(Mixing.by_parts(2), n=20, p=40, d=30, m=100)
    with pytest.raises(NotALineGraphError, match=r"Gram matrix has errors|same two images"):
        recovered(case, n_private=None)
