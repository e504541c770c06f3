"""The assembled attack: right assignments from good scores, and images from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from benchmarks.instahide.oracles import oracle_similarity
from recon_core.attacks.instahide.carlini import (
    Carlini,
    private_weights,
    recover_as_carlini,
    unknown_part,
)
from recon_core.attacks.instahide.descent import Descent
from recon_core.attacks.instahide.groups import Growth
from recon_core.attacks.instahide.mixing import InstaHide, Mixing
from recon_core.attacks.instahide.recover import Status

N = 24
FAST = Carlini(descent=Descent(n_steps=60, n_smooth=1, spread=0.1))


@pytest.mark.parametrize(
    "how", [FAST, replace(FAST, groups=Growth(), assignment="greedy")], ids=["ours", "theirs"]
)
def test_good_scores_give_assignments_labels_and_images(how: Carlini) -> None:
    drawn = torch.Generator().manual_seed(0)
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
    drawn = torch.Generator().manual_seed(0)
    none, public = torch.zeros(20, 500), 0.46 * torch.randn(200, 500, generator=drawn)
    for scheme in (InstaHide(k_pub=4), InstaHide(k_pub=1, largest=0.9), InstaHide(k_pub=0)):
        e = scheme.encode(none, public, generator=drawn)
        assert float(e.y.square().mean().sqrt()) == pytest.approx(unknown_part(scheme), rel=0.1)
    model = Mixing.as_a_whole(3)
    e = model.encode(none, public, 400, generator=drawn)
    assert float(e.y.square().mean().sqrt()) == pytest.approx(unknown_part(model), rel=0.05)


def test_what_is_missing_or_wrong_is_said() -> None:
    drawn = torch.Generator().manual_seed(0)
    y = torch.rand(30, 64, generator=drawn)
    with pytest.raises(ValueError, match="public images to train"):
        recover_as_carlini(y, (1, 8, 8), n_private=5, generator=drawn)
    with pytest.raises(ValueError, match="not finite"):
        recover_as_carlini(y / 0, (1, 8, 8), n_private=5, generator=drawn)
    with pytest.raises(ValueError, match="n_arcs=1"):
        replace(FAST, n_arcs=1)
    with pytest.raises(ValueError, match="slack=-1"):
        replace(FAST, slack=-1.0)
