"""Encodings: what they are made of, and how many private images two of them share."""

from __future__ import annotations

import pytest
import torch

from recon_core.attacks.instahide.mixing import InstaHide, Mixing, mixture
from tests.recon_core.attacks.instahide.cases import gaussian_case
from tests.recon_core.drawing import generator


@pytest.mark.parametrize("k_pub", [0, 2, 4])
@pytest.mark.parametrize("make", [Mixing.by_parts, Mixing.as_a_whole])
def test_encodings_are_what_they_say(make, k_pub):
    case = gaussian_case(make(k_pub), n=9, p=12, d=7, m=40)
    e = case.encodings
    mixed = mixture(case.private, e.private, e.private_weights) + case.public_part
    torch.testing.assert_close(e.y, mixed.abs())
    for ids, k in ((e.private, 2), (e.public, k_pub)):
        assert all(len(set(row)) == k for row in ids.tolist())


def test_normalisations_of_the_paper():
    assert Mixing.by_parts(4).variance == pytest.approx(2)  # definition 2.5, not a unit vector
    assert Mixing.as_a_whole(4).variance == pytest.approx(1)
    assert Mixing.by_parts(0).variance == Mixing.as_a_whole(0).variance == pytest.approx(1)
    for mixing in (Mixing.by_parts(2, noise=0.3), Mixing(k_pub=1, wa=0.3, wb=0.9)):
        case = gaussian_case(mixing, n=5, p=5, d=100_000, m=6)
        assert float(case.encodings.y.square().mean()) == pytest.approx(mixing.variance, rel=0.02)


def test_signs_are_fair_and_hide_nothing():
    e = gaussian_case(Mixing.by_parts(2), n=5, p=5, d=4000, m=3).encodings
    flipped = e.flipped(generator(1))
    assert torch.equal(flipped.abs(), e.y)
    assert abs(float((flipped < 0).double().mean()) - 0.5) < 0.03


@pytest.mark.parametrize("k_pub", [0, 4])
def test_instahide_mixes_every_image_every_epoch(k_pub):
    scheme = InstaHide(k_pub=k_pub, n_epochs=30)
    private, public = torch.rand(10, 6), torch.rand(20, 6)
    labels = torch.eye(10)
    e = scheme.encode(private, public, generator=generator(3), labels=labels)
    weights = torch.cat([e.private_weights, e.public_weights], 1)
    assert e.y.shape == (300, 6)
    torch.testing.assert_close(weights.sum(1), torch.ones(300))
    assert 0 < float(weights.min()) < float(weights.max()) <= 0.65
    for epoch in e.private.split(10):
        assert epoch[:, 0].tolist() == list(range(10))
        assert sorted(epoch[:, 1].tolist()) == list(range(10))
        assert (epoch[:, 0] != epoch[:, 1]).all()
    torch.testing.assert_close(e.labels, mixture(labels, e.private, e.private_weights))
    mixed = mixture(private, e.private, e.private_weights)
    mixed += mixture(public, e.public, e.public_weights)
    torch.testing.assert_close(e.y, mixed.abs())


def test_coefficients_are_uniform_below_the_cap():
    scheme = InstaHide(k_pub=1, largest=1.0, n_epochs=2000)
    images = torch.zeros(20, 1)
    lam = scheme.encode(images, images, generator=generator(0)).private_weights
    # uniform on the simplex: each coordinate is Beta(1, 2)
    assert float(lam[:, 0].mean()) == pytest.approx(1 / 3, abs=0.01)
    assert float(lam[:, 0].var()) == pytest.approx(1 / 18, abs=0.002)


@pytest.mark.parametrize(
    ("k_pub", "n", "message"),
    [(3, 5, "2 public images are too"), (0, 1, "1 private images are too")],
)
def test_too_few_images_are_refused(k_pub, n, message):
    with pytest.raises(ValueError, match=message):
        gaussian_case(Mixing.by_parts(k_pub), n=n, p=2, d=4, m=2)
