"""Batches with the same number of images of every class."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from recon_core.victims.class_batches import ClassBatches

K, N = 3, 36


def images(*lead: int) -> Tensor:
    return torch.rand(*lead, 1, 2, 3, generator=torch.Generator().manual_seed(7))


def classes() -> Tensor:
    """Of 0, 1, 2: 10, 12 and 14 of 36, mixed."""
    labels = torch.tensor([0] * 10 + [1] * 12 + [2] * 14)
    return labels[torch.randperm(N, generator=torch.Generator().manual_seed(8))]


def shuffle(stream: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * stream + epoch)


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
