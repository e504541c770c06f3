"""The attack without known public images: groups, assignments, descent, and all together."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from benchmarks.instahide.oracles import grown_clusters, oracle_similarity, pairs_right
from benchmarks.instahide.speed import edges_of
from recon_core.attacks.instahide.carlini import (
    assigned,
    descend,
    in_one_sign,
    independent_groups,
    private_weights,
    recover_as_carlini,
    unknown_part,
)
from recon_core.attacks.instahide.coherence import centred
from recon_core.attacks.instahide.mixing import Encodings, InstaHide, Mixing, mixture
from recon_core.attacks.instahide.recover import Status
from tests.recon_core.drawing import generator, refuses

N = 24


def test_good_scores_give_assignments_labels_and_images() -> None:
    drawn = generator(0)
    mean = torch.randn(N + 40, 1, 1, 1, generator=drawn)
    images = (0.2 * torch.randn(N + 40, 1, 8, 8, generator=drawn) + 0.4 * mean).flatten(1)
    private, public = images[:N].clamp(-1, 1), 0.3 * images[N:].clamp(-1, 1)
    classes = torch.arange(N) % 6
    hot = torch.nn.functional.one_hot(classes, 6).float()
    e = InstaHide(k_pub=2, n_epochs=40).encode(private, public, generator=drawn, labels=hot)
    scores = oracle_similarity(e.private, noise=0.3, generator=drawn)
    found = recover_as_carlini(
        e.y, (1, 8, 8), n_private=N, mixing=InstaHide(k_pub=2), labels=e.labels, scores=scores,
        generator=drawn,
    )  # fmt: skip
    assert pairs_right(found.edges, e.private, N) > 0.9
    given = torch.zeros(len(e.y), N).scatter_(1, torch.from_numpy(found.edges).clamp(min=0), 1.0)
    truth = torch.zeros(len(e.y), N).scatter_(1, e.private, 1.0)
    columns = linear_sum_assignment(-np.asarray(given.T @ truth))[1]
    assert found.labels is not None
    assert np.array_equal(found.labels, np.asarray(classes)[columns])
    assert set(found.status) == {Status.ESTIMATED}
    both = torch.corrcoef(torch.cat([found.images.float(), private[columns]]))
    assert float(both[:N, N:].diagonal().abs().median()) > 0.5
    with pytest.raises(ValueError, match="not finite"):
        recover_as_carlini(e.y / 0, (1, 8, 8), n_private=N, scores=scores, generator=drawn)


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


@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_the_published_clusters_are_of_one_image_each(noise: float) -> None:
    images, drawn = torch.zeros(20, 1), generator(0)
    e = InstaHide(k_pub=0, n_epochs=40).encode(images, images, generator=drawn)
    own = torch.zeros(len(e.y), 20).scatter_(1, e.private, 1.0)
    scores = oracle_similarity(e.private, noise=noise, generator=drawn)
    hits = grown_clusters(scores, 20, generator=generator(0)).T @ own
    assert hits.sum(1).min() >= 40
    assert len(hits.argmax(1).unique()) == 20
    assert float(hits.amax(1).min()) >= 36


def planted(n: int, m: int, noise: float, seed: int = 0):
    """Scores of encodings with random weights, and A."""
    rng = np.random.default_rng(seed)
    edges = edges_of(n, m, rng)
    a = np.zeros((m, n))
    np.put_along_axis(a, edges, rng.uniform(0.2, 1.0, (m, 2)), axis=1)
    z = rng.normal(size=(m, m))
    scores = a @ a.T + noise * (z + z.T) / 2**0.5
    return torch.from_numpy(scores), torch.from_numpy(a)


def purity(loads: torch.Tensor, a: torch.Tensor) -> tuple[float, int]:
    """The least share of a group's encodings that have its image, and how many images are found."""
    hits = (loads > 0).double().T @ (a > 0).double()
    share = hits.amax(1) / (loads > 0).sum(0).clamp(min=1)
    return float(share.min()), len(hits.argmax(1).unique())


@pytest.mark.parametrize(("m", "noise"), [(400, 0.1), (400, 0.3), (1200, 0.6)])
def test_every_image_has_a_group_of_its_own_encodings(m, noise):
    scores, a = planted(20, m, noise)
    drawn = generator(0)
    loads = independent_groups(centred(scores.float()), 20, generator=drawn)
    least, n_found = purity(loads, a)
    assert n_found == 20
    assert least > 0.9
    assert int((loads > 0).sum(0).min()) > m / 20 / 4


def test_loads_follow_the_weights():
    scores, a = planted(10, 400, 0.05)
    drawn = generator(0)
    loads = independent_groups(centred(scores.float()), 10, generator=drawn)
    ids = ((loads > 0).double().T @ (a > 0).double()).argmax(1)
    for k, image in enumerate(ids.tolist()):
        rows = loads[:, k] > 0
        both = torch.stack([loads[rows, k].double(), a[rows, image]])
        assert float(torch.corrcoef(both)[0, 1]) > 0.8


def total(affinity: torch.Tensor, edges: torch.Tensor) -> float:
    return float(affinity.gather(1, edges).sum())


def best_by_trying(affinity: torch.Tensor, capacity: int) -> float:
    """The largest total over all assignments of two images to each encoding."""
    m, n = affinity.shape
    pairs = np.array(list(itertools.combinations(range(n), 2)))
    chosen = np.indices((len(pairs),) * m).reshape(m, -1)
    counts = (pairs[chosen][..., None] == np.arange(n)).sum((0, 2))
    worth = affinity.double().numpy()[:, pairs].sum(2)
    totals = np.take_along_axis(worth, chosen, axis=1).sum(0)
    return float(totals[(counts <= capacity).all(1)].max())


@pytest.fixture
def no_slack(monkeypatch):
    monkeypatch.setattr("recon_core.attacks.instahide.carlini.SLACK", 0.0)


@pytest.mark.usefixtures("no_slack")
def test_the_flow_is_the_best_of_all_assignments():
    """Of 1,296 in each of 60 cases."""
    drawn = generator(0)
    for case in range(60):
        affinity = torch.randn(4, 4, generator=drawn)
        affinity[:, 0] += 2 * (case % 3)  # wanted by all; only its share may have it
        edges = assigned(affinity)
        assert bool((edges[:, 0] < edges[:, 1]).all())
        assert edges.flatten().bincount(minlength=4).tolist() == [2] * 4
        assert total(affinity, edges) == pytest.approx(best_by_trying(affinity, 2), abs=1e-5)


def test_images_that_labels_forbid_come_last(monkeypatch):
    monkeypatch.setattr("recon_core.attacks.instahide.carlini.SLACK", 2.0)
    drawn = generator(1)
    affinity = torch.randn(20, 5, generator=drawn)
    allowed = torch.rand(20, 5, generator=drawn) < 0.7
    allowed[:, :2] = True
    affinity[~allowed] += 5
    edges = assigned(affinity, allowed)
    assert bool(allowed.gather(1, edges).all())


@pytest.mark.usefixtures("no_slack")
def test_encodings_without_room_have_no_images_and_one_image_is_refused(monkeypatch):
    monkeypatch.setattr("recon_core.attacks.instahide.carlini.N_ARCS", 2)
    edges = assigned(torch.tensor([[3.0, 2.0, 0.0]] * 9))
    full = (edges >= 0).all(1)
    assert int(full.sum()) == 6  # both of the images that they may be given to have room for six
    assert bool((edges[~full] == -1).all())
    with pytest.raises(ValueError, match="5 encodings are too few"):
        independent_groups(torch.eye(5), 5, generator=torch.Generator())
    refuses("1 images", assigned, torch.zeros(4, 1))


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
    without, informed = (likeness(descended(e, spread=s), private) for s in (0.0, spread))
    assert 0.5 < without < informed


def test_unknown_encodings_and_images_without_any_are_nan() -> None:
    _private, _public, e = case(k_pub=0)
    edges = e.private.clone()
    edges[(edges == 3).any(1)] = -1
    found = descended(replace(e, private=edges), n_steps=3)
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
        found = descended(e, 8, shape=(1, 8, 8), n_steps=40, total_variation=weight)
        rough.append(float(found.reshape(8, 8, 8).diff(dim=-1).abs().mean()))
    assert rough[1] < 0.7 * rough[0]


def test_edges_that_do_not_fit_are_errors() -> None:
    refuses("n - 1 = 4", descended, case()[2], 5)
