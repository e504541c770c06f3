"""The assembled attack: clusters, assignments and images, by descent, from good scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from benchmarks.instahide.oracles import oracle_similarity
from recon_core.attacks.instahide.carlini import (
    Carlini,
    private_weights,
    recover_as_carlini,
    unknown_part,
)
from recon_core.attacks.instahide.descent import Descent, descend, in_one_sign
from recon_core.attacks.instahide.groups import (
    Growth,
    grown_groups,
    jaccard_kmeans,
)
from recon_core.attacks.instahide.mixing import Encodings, InstaHide, Mixing, mixture
from recon_core.attacks.instahide.recover import Status
from tests.recon_core.drawing import generator

N = 24
FAST = Carlini(descent=Descent(n_steps=60, n_smooth=1, spread=0.1))


@pytest.mark.parametrize(
    "how", [FAST, replace(FAST, groups=Growth(), assignment="greedy")], ids=["ours", "theirs"]
)
def test_good_scores_give_assignments_labels_and_images(how: Carlini) -> None:
    drawn = generator(0)
    mean = torch.randn(N + 40, 1, 1, 1, generator=drawn)
    images = (0.2 * torch.randn(N + 40, 1, 8, 8, generator=drawn) + 0.4 * mean).flatten(1)
    private, public = images[:N].clamp(-1, 1), 0.3 * images[N:].clamp(-1, 1)
    classes = torch.arange(N) % 6
    hot = torch.nn.functional.one_hot(classes, 6).float()
    e = InstaHide(k_pub=2, n_epochs=40).encode(private, public, generator=drawn, labels=hot)
    scores = oracle_similarity(e.private, noise=0.3, generator=drawn)
    found = recover_as_carlini(
        e.y, (1, 8, 8), n_private=N, labels=e.labels, scores=scores, generator=drawn, how=how
    )
    given = torch.zeros(len(e.y), N).scatter_(1, torch.from_numpy(found.edges).clamp(min=0), 1.0)
    truth = torch.zeros(len(e.y), N).scatter_(1, e.private, 1.0)
    rows, columns = linear_sum_assignment(-np.asarray(given.T @ truth))
    back = torch.from_numpy(columns)[torch.from_numpy(found.edges)]
    right = (back.sort(1).values == e.private.sort(1).values).all(1)
    assert float(right.float().mean()) > 0.9
    assert found.labels is not None
    assert np.array_equal(found.labels, np.asarray(classes)[columns])
    assert set(found.status) == {Status.ESTIMATED}
    both = torch.corrcoef(torch.cat([found.images.float(), private[columns]]))
    assert float(both[:N, N:].diagonal().abs().median()) > 0.6
    assert np.array_equal(rows, np.arange(N))


def test_weights_are_the_labels_parts() -> None:
    labels = torch.tensor([[0.3, 0.2, 0.0], [0.0, 0.5, 0.0]])
    classes = torch.tensor([0, 1, 1])
    edges = torch.tensor([[0, 1], [1, 2]])
    expected = torch.tensor([[0.3, 0.2], [0.25, 0.25]])
    scheme = InstaHide()
    torch.testing.assert_close(private_weights(edges, labels, classes, scheme), expected)
    assert torch.equal(private_weights(edges, None, None, scheme), torch.full((2, 2), 1 / 6))
    model = Mixing.by_parts(2)
    given = private_weights(edges, labels, classes, model)
    torch.testing.assert_close(given, torch.full((2, 2), 0.5**0.5))


def test_what_is_not_known_is_as_large_as_the_scheme_makes_it() -> None:
    drawn = generator(0)
    none, public = torch.zeros(20, 500), 0.46 * torch.randn(200, 500, generator=drawn)
    for scheme in (InstaHide(k_pub=4), InstaHide(k_pub=1, largest=0.9), InstaHide(k_pub=0)):
        e = scheme.encode(none, public, generator=drawn)
        assert float(e.y.square().mean().sqrt()) == pytest.approx(unknown_part(scheme), rel=0.1)
    model = Mixing.as_a_whole(3)
    e = model.encode(none, public, 400, generator=drawn)
    assert float(e.y.square().mean().sqrt()) == pytest.approx(unknown_part(model), rel=0.05)


def test_what_is_missing_or_wrong_is_said() -> None:
    drawn = generator(0)
    y = torch.rand(30, 64, generator=drawn)
    with pytest.raises(ValueError, match="public images to train"):
        recover_as_carlini(y, (1, 8, 8), n_private=5, generator=drawn)
    with pytest.raises(ValueError, match="not finite"):
        recover_as_carlini(y / 0, (1, 8, 8), n_private=5, generator=drawn)


def oracle_scores(n: int, noise: float, seed: int = 0):
    """Scores of encodings of n images, and which image is in which."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.zeros(n, 1)
    e = InstaHide(k_pub=0, n_epochs=40).encode(images, images, generator=generator)
    own = torch.zeros(len(e.y), n).scatter_(1, e.private, 1.0)
    return oracle_similarity(e.private, noise=noise, generator=generator), own


@pytest.mark.parametrize(("noise", "n_seeds"), [(0.1, 0), (0.5, 0), (0.5, 200)])
def test_every_image_has_a_group_of_its_own_encodings(noise, n_seeds):
    scores, own = oracle_scores(20, noise)
    generator = torch.Generator().manual_seed(0)
    groups = grown_groups(scores, 20, generator=generator, how=Growth(n_seeds=n_seeds))
    assert groups.sum(0).tolist() == [40] * 20
    hits = groups.float().T @ own
    assert len(hits.argmax(1).unique()) == 20
    assert float(hits.amax(1).min()) >= 36


def test_a_centre_that_no_cluster_is_nearest_to_is_given_another():
    sets = torch.zeros(30, 12, dtype=torch.bool)
    for k in range(30):
        sets[k, 4 * (k % 3) : 4 * (k % 3) + 4] = True
    for seed in range(10):
        drawn_by = generator(seed)
        found = jaccard_kmeans(sets, 3, generator=drawn_by, how=Growth())
        assert len(found.float().argmax(1).unique()) == 3


def test_too_few_encodings_are_said():
    with pytest.raises(ValueError, match="5 clusters of 5 encodings for 6 images"):
        grown_groups(torch.eye(5), 6, generator=torch.Generator())
    with pytest.raises(ValueError, match="3 clusters of 9 encodings for 6 images"):
        grown_groups(torch.eye(9), 6, generator=torch.Generator(), how=Growth(n_seeds=3))


def case(n: int = 12, d: int = 60, k_pub: int = 2) -> tuple[torch.Tensor, torch.Tensor, Encodings]:
    drawn = generator(0)
    private = torch.randn(n, d, generator=drawn).mul(0.4).clamp(-1, 1)
    public = torch.randn(50, d, generator=drawn).mul(0.4).clamp(-1, 1)
    return private, public, InstaHide(k_pub=k_pub).encode(private, public, generator=drawn)


def descended(e: Encodings, n: int = 12, **settings: Any) -> Tensor:
    drawn = generator(2)
    return descend(e.y, e.private, e.private_weights, n, **({"generator": drawn} | settings))


def likeness(images: Tensor, private: Tensor) -> float:
    """Correlation of all pixels, each with its best sign."""
    sign = (images * private).sum(0).sign()
    return float(torch.corrcoef(torch.stack([(images * sign).flatten(), private.flatten()]))[0, 1])


def test_without_public_images_a_spectral_start_finds_every_pixel_up_to_its_sign() -> None:
    private, _public, e = case(k_pub=0)
    images = descended(e)
    sign = (images * private).sum(0).sign()
    assert ((images * sign - private).abs().amax(0) < 1e-2).float().mean() > 0.8


def test_unknown_public_images_leave_an_approximation_that_knowing_their_spread_improves() -> None:
    private, public, e = case()
    spread = float(mixture(public, e.public, e.public_weights).std())
    without, informed = (
        likeness(descended(e, how=Descent(spread=s)), private) for s in (0.0, spread)
    )
    assert 0.5 < without < informed


def test_more_starts_never_leave_more() -> None:
    _private, _public, e = case(k_pub=0)
    left = []
    for k in (1, 4):
        found = descended(e, how=Descent(n_starts=k, n_steps=60))
        off = mixture(found, e.private, e.private_weights).abs() - e.y
        left.append(float(off.square().sum()))
    assert left[1] <= left[0] + 1e-6


def test_unknown_encodings_and_images_without_any_are_nan() -> None:
    _private, _public, e = case(k_pub=0)
    edges = e.private.clone()
    edges[(edges == 3).any(1)] = -1
    found = descended(replace(e, private=edges), how=Descent(n_steps=3))
    assert bool(found[3].isnan().all())
    assert not bool(found[4:].isnan().any())


def test_signs_of_pixels_are_one_where_neighbours_agree() -> None:
    drawn = generator(0)
    smooth = torch.randn(30, 3, 1, 1, generator=drawn) + torch.linspace(0, 1, 8)
    images = (smooth + 0.1 * torch.randn(30, 3, 8, 8, generator=drawn)).flatten(1)
    smooth_only = (torch.randn(30, 1, generator=drawn) + 0.2 * images).clone()
    hidden = smooth_only * (torch.randint(0, 2, (192,), generator=drawn) * 2 - 1)
    found = in_one_sign(hidden, (3, 8, 8))
    sign = (found * smooth_only).sum().sign()
    torch.testing.assert_close(found * sign, smooth_only)


def test_total_variation_makes_images_smoother() -> None:
    drawn = generator(0)
    private, public = torch.rand(8, 64, generator=drawn), torch.rand(30, 64, generator=drawn)
    e = InstaHide(k_pub=2, n_epochs=10).encode(private, public, generator=drawn)
    rough = []
    for weight in (0.0, 3.0):
        how = Descent(n_steps=40, n_smooth=1, total_variation=weight)
        found = descended(e, 8, shape=(1, 8, 8), how=how)
        rough.append(float(found.reshape(8, 8, 8).diff(dim=-1).abs().mean()))
    assert rough[1] < 0.7 * rough[0]


def test_edges_and_shapes_that_do_not_fit_are_errors() -> None:
    _private, _public, e = case()
    with pytest.raises(ValueError, match="n - 1 = 4"):
        descended(e, 5)
    with pytest.raises(ValueError, match="60 pixels"):
        descended(e, how=Descent(n_smooth=1))
