"""Split networks: batches of classes, features and accuracy in blocks, what beta is for."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recon_core.victims.autoencoder import Weights
from recon_core.victims.separability import MixCon
from recon_core.victims.split import (
    IMAGES_AT_ONCE,
    NETWORKS_ON_CPU,
    SplitMLP,
    check_fits,
    evaluate_split,
    features_of,
    initial_weights,
)
from recon_core.victims.split_training import ClassBatches, SplitTraining, train_split
from tests.recon_core.drawing import generator
from tests.recon_core.victims.torch_split import torch_split

pytestmark = pytest.mark.usefixtures("one_thread")


SHAPE = (1, 2, 3)
R, K, N = NETWORKS_ON_CPU + 2, 3, 36
MLP = SplitMLP(widths=(12, 8, 8), cut=2, init="torch")
MODEL = MLP.on(SHAPE, K)


def start() -> Weights:
    generators = [generator(i) for i in range(R)]
    return initial_weights(MODEL, generators, dtype=torch.float32)


def images(*lead: int) -> Tensor:
    return torch.rand(*lead, *SHAPE, generator=generator(7))


def test_evaluates_and_asks_in_blocks() -> None:
    n = IMAGES_AT_ONCE + 3
    x, labels = images(R, n), torch.arange(n) % K
    found, features = evaluate_split(MODEL, start(), x, labels), features_of(MODEL, start(), x)
    assert features.shape == (R, n, MODEL.n_features)
    for r in range(R):
        h, g, _leaves = torch_split(MLP, SHAPE, K, start(), r)
        with torch.no_grad():
            z = h(x[r])
            logits = g(z)
        torch.testing.assert_close(features[r], z)
        assert float(found.loss[r]) == pytest.approx(float(F.cross_entropy(logits, labels)))
        assert float(found.accuracy[r]) == int((logits.argmax(1) == labels).sum()) / n
    shared = features_of(MODEL, start(), x[0])
    torch.testing.assert_close(shared[0], features[0])
    assert not features.requires_grad


def test_other_shapes_are_refused() -> None:
    other = SplitMLP(widths=(12, 8, 9), cut=2).on(SHAPE, K)
    with pytest.raises(ValueError, match=r"weights of .* for a network of"):
        check_fits(other, start(), images(N))
    uneven = start() | {name: tensor[:2] for name, tensor in start().items()}
    uneven |= {name: start()[name] for name in list(uneven)[:1]}
    with pytest.raises(ValueError, match=rf"weights of \[2, {R}\] networks"):
        check_fits(MODEL, uneven, images(N))
    with pytest.raises(
        ValueError, match=rf"labels of \(35,\) for 36 images of each of {R} networks"
    ):
        check_fits(MODEL, start(), images(N), torch.arange(N - 1) % K)
    with pytest.raises(ValueError, match=r"images \(1, 2, 3\) for a network of"):
        check_fits(MODEL, start(), images(N)[0])


def shuffle(stream: int, epoch: int) -> torch.Generator:
    return generator(1000 * stream + epoch)


def test_without_beta_features_collapse_and_with_it_they_stay_apart() -> None:
    """MixCon paper, section 4.2, figure 2 and table 1, on its synthetic data; with torch's own
    start, a rate of .02 and a larger eps, since at the paper's start and rate of .1 all ReLUs of
    the two features
    soon give 0, of a network without defence too."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(1000) % 2
    x = (torch.randn(1000, 10, generator=generator) - labels.unsqueeze(1)).view(1000, 1, 1, 10)
    model = SplitMLP(init="torch").on((1, 1, 10), 2)
    pairs = ((0.1, 0.01), (1.0, 0.01), (1.0, 0.0))
    mixcons = [MixCon(lam=lam, beta=beta, eps=1e-2, normalise=False) for lam, beta in pairs]
    weights = initial_weights(model, [generator], dtype=torch.float32)
    weights = {name: tensor[[0] * 4] for name, tensor in weights.items()}
    found = train_split(
        model, weights, x[:800], labels[:800], defences=[None, *mixcons],
        training=SplitTraining(lr=0.02), shuffle=shuffle,
    )  # fmt: skip
    features = features_of(model, found.weights, x[:800])
    vanilla, mild, strong, collapsed = [float(torch.pdist(z).square().mean()) for z in features]
    assert vanilla > 2
    assert 0.1 < mild < 1
    assert 0.03 < strong < 1
    assert collapsed < 1e-2
    accuracy = evaluate_split(model, found.weights, x[800:], labels[800:]).accuracy.tolist()
    assert min(accuracy[:2]) > 0.85
    assert accuracy[3] < 0.65


def classes() -> Tensor:
    """Of 0, 1, 2: 10, 12 and 14 of 36, mixed."""
    labels = torch.tensor([0] * 10 + [1] * 12 + [2] * 14)
    return labels[torch.randperm(N, generator=generator(8))]


def test_batches_have_as_many_of_each_class() -> None:
    x = torch.arange(N, dtype=torch.float32).view(N, 1, 1, 1)
    labels = classes()
    batches = ClassBatches(
        x=x, labels=labels, n_classes=K, per_class=4, shuffle=shuffle, streams=(5, 5)
    )
    seen: set[int] = set()
    for epoch in range(6):
        found = [batch.flatten().long() for batch in batches.of_epoch(epoch)]
        assert [len(batch) for batch in found] == [12, 12, 6]
        assert len(found) == batches.n_batches
        for batch in found:
            assert torch.equal(labels[batch], torch.arange(K).repeat(len(batch) // K))
        used = torch.cat(found).tolist()
        assert len(set(used)) == len(used) == 30
        assert {i for i in used if labels[i] == 0} == set((labels == 0).nonzero()[:, 0].tolist())
        seen |= set(used)
    assert seen == set(range(N)), "what one epoch leaves out is used in others"


def test_epochs_and_classes_have_orders_of_their_own() -> None:
    x = torch.arange(30, dtype=torch.float32).view(30, 1, 1, 1)
    batches = ClassBatches(
        x=x, labels=torch.arange(30) // 10, n_classes=3, per_class=10, shuffle=shuffle,
        streams=(0, 1, 0),
    )  # fmt: skip
    (one,), (other,) = (list(batches.of_epoch(epoch)) for epoch in range(2))
    assert one.shape == (3, 30, 1, 1, 1)
    assert torch.equal(one[0], one[2])
    drawn = [(one, 0, 0), (one, 0, 1), (one, 1, 0), (other, 0, 0)]
    orders = [(batch[r].view(10, 3)[:, c] % 10).tolist() for batch, r, c in drawn]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(10)) for order in orders)


def test_networks_of_one_stream_get_one_batch() -> None:
    shared = ClassBatches(
        x=images(N), labels=classes(), n_classes=K, per_class=4, shuffle=shuffle, streams=(2, 2)
    )
    assert {len(batch) for batch in shared.of_epoch(0)} == {1}
    own = dataclasses.replace(shared, x=images(2, N))
    assert {len(batch) for batch in own.of_epoch(0)} == {2}
