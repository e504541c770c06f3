"""Split networks: plain torch's steps, batches of classes, independence, features in blocks."""

from __future__ import annotations

import dataclasses
import math
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recon_core.victims import split_training as module
from recon_core.victims.autoencoder import Shape, Weights
from recon_core.victims.separability import MixCon, UniCon
from recon_core.victims.split import (
    IMAGES_AT_ONCE,
    NETWORKS_ON_CPU,
    LeNet5,
    SplitMLP,
    SplitModel,
    SplitNetwork,
    check_fits,
    evaluate_split,
    features_of,
    initial_weights,
)
from recon_core.victims.split_training import (
    ClassBatches,
    Defence,
    SplitTraining,
    TrainedSplit,
    train_split,
)
from tests.recon_core.drawing import generator, refuses
from tests.recon_core.victims.test_separability import literal_mixcon, literal_unicon
from tests.recon_core.victims.torch_nets import leaves_of, torch_split

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (1, 2, 3)
K, N = 3, 36
MLP = SplitMLP(widths=(12, 8, 8), cut=2, init="torch")
MODEL = MLP.on(SHAPE, K)
DEFENCES: tuple[Defence, ...] = (
    None,
    MixCon(lam=1.0, beta=1e-2, eps=1e-2),
    MixCon(lam=0.1, beta=1e-3, eps=1e-2),
    UniCon(lam=0.5),
    MixCon(lam=2.0, beta=1e-2, eps=1e-2, normalise=False),
)
"""With the usual eps, two images that are close can throw a network out, which multiplies the
rounding in which two implementations differ."""
R = len(DEFENCES)
TRAINING = SplitTraining(epochs=3, lr=0.05, per_class=4)


def start(r: int = R, model: SplitModel = MODEL, dtype: torch.dtype = torch.float32) -> Weights:
    generators = [generator(i) for i in range(r)]
    return initial_weights(model, generators, dtype=dtype)


def images(*lead: int, shape: Shape = SHAPE, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(*lead, *shape, generator=generator(7)).to(dtype)


def classes(n: int = N) -> Tensor:
    """Of 0, 1, 2: 10, 12 and 14 of 36, mixed."""
    labels = torch.tensor([0] * 10 + [1] * 12 + [2] * 14)
    return labels[torch.randperm(n, generator=generator(8))]


def shuffle(stream: int, epoch: int) -> torch.Generator:
    return generator(1000 * stream + epoch)


def only(weights: Weights, rows: list[int]) -> Weights:
    return {name: tensor[rows] for name, tensor in weights.items()}


def same(a: TrainedSplit, b: TrainedSplit, *, tolerance: float = 0.0) -> None:
    """Everything, and at tolerance 0 bit for bit."""
    for field in dataclasses.fields(TrainedSplit):
        one, other = getattr(a, field.name), getattr(b, field.name)
        pairs = [(one[n], other[n]) for n in one] if isinstance(one, dict) else [(one, other)]
        for x, y in pairs:
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)


def rows_of(trained: TrainedSplit, rows: list[int]) -> TrainedSplit:
    taken = {f.name: getattr(trained, f.name) for f in dataclasses.fields(trained)}
    return TrainedSplit(
        **{
            name: only(value, rows) if isinstance(value, dict) else value[rows]
            for name, value in taken.items()
        }
    )


def train(model: SplitModel = MODEL, at_once: int = 4, **changed: object) -> TrainedSplit:
    """`at_once`: networks of a part that takes its steps beside the others."""
    arguments = {
        "weights": start(), "x": images(N), "labels": classes(), "defences": DEFENCES,
        "training": TRAINING, "shuffle": shuffle,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "NETWORKS_ON_CPU", at_once)
        return train_split(model, **(arguments | changed))


def penalty(defence: MixCon | UniCon, features: Tensor, k: int) -> Tensor:
    """Of features in the order of the classes, pair by pair."""
    z = features.view(-1, k, features.shape[1])
    if isinstance(defence, UniCon):
        return literal_unicon(z, normalise=defence.normalise)
    return literal_mixcon(z, defence.beta, normalise=defence.normalise, eps=defence.eps)


def batches_of(epoch: int, labels: Tensor, per_class: int) -> list[Tensor]:
    """Rows of the images of an epoch's batches, drawn class by class."""
    generator, members = shuffle(0, epoch), [(labels == c).nonzero()[:, 0] for c in range(K)]
    orders = [m[torch.randperm(len(m), generator=generator)] for m in members]
    smallest = min(map(len, members))
    return [
        torch.stack([order[i : min(i + per_class, smallest)] for order in orders], 1).flatten()
        for i in range(0, smallest, per_class)
    ]


def plainly_trained(
    settings: SplitNetwork,
    leaves: dict[str, Tensor],
    x: Tensor,
    labels: Tensor,
    defence: Defence,
    training: SplitTraining,
) -> list[float]:
    """torch.optim.SGD moves one network; the cross-entropy of each epoch."""
    how = {"momentum": training.momentum, "weight_decay": training.weight_decay}
    optimiser = torch.optim.SGD(list(leaves.values()), lr=training.lr, **how)
    losses = []
    for epoch in range(training.epochs):
        total, n = 0.0, 0
        for batch in batches_of(epoch, labels, training.per_class):
            features, logits = torch_split(settings, leaves, x[batch])
            loss = F.cross_entropy(logits, labels[batch])
            total, n = total + loss.item() * len(batch), n + len(batch)
            if defence is not None:
                loss = loss + defence.lam * penalty(defence, features, K)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        losses.append(total / n)
    return losses


@pytest.mark.parametrize(
    ("settings", "momentum", "weight_decay"),
    [(MLP, 0.0, 0.0), (MLP, 0.9, 1e-2), (LeNet5(), 0.0, 0.0)],
)
def test_steps_are_those_of_torchs_sgd(
    settings: SplitNetwork, momentum: float, weight_decay: float
) -> None:
    training = dataclasses.replace(TRAINING, momentum=momentum, weight_decay=weight_decay)
    shape = SHAPE if settings is MLP else (1, 16, 16)
    model, labels = settings.on(shape, K), classes()
    x, weights = images(N, shape=shape, dtype=torch.float64), start(R, model, torch.float64)
    found = train(model, weights=weights, x=x, training=training)
    for r, defence in enumerate(DEFENCES):
        leaves = leaves_of(weights, r)
        losses = plainly_trained(settings, leaves, x, labels, defence, training)
        for name, leaf in leaves.items():
            ours = found.weights[name][r]
            torch.testing.assert_close(ours, leaf.detach(), rtol=1e-7, atol=1e-9)
            assert not torch.allclose(ours, weights[name][r], atol=1e-5)
        torch.testing.assert_close(found.losses[r], torch.tensor(losses, dtype=torch.float64))
        with torch.no_grad():
            features, logits = torch_split(settings, leaves, x)
        assert float(found.loss[r]) == pytest.approx(float(F.cross_entropy(logits, labels)))
        right = (logits.argmax(1) == labels).double().mean()
        assert float(found.accuracy[r]) == pytest.approx(float(right))
        torch.testing.assert_close(features_of(model, found.weights, x)[r], features)
    assert found.epochs_done.tolist() == [3] * R
    assert not found.diverged.any()


def test_penalties_are_those_of_the_batches() -> None:
    whole = SplitTraining(epochs=1, lr=1e-12, per_class=10)
    x, labels = images(N, dtype=torch.float64), classes()
    weights = start(dtype=torch.float64)
    found = train(weights=weights, x=x, training=whole)
    (batch,) = batches_of(0, labels, 10)
    features = features_of(MODEL, weights, x[batch])
    for r, defence in enumerate(DEFENCES):
        expected = math.nan if defence is None else penalty(defence, features[r], K).item()
        assert float(found.penalties[r, 0]) == pytest.approx(expected, rel=1e-8, nan_ok=True)


@pytest.mark.parametrize("own", ["nothing", "images", "labels", "order", "all"])
@pytest.mark.parametrize("at_once", [2, R])
def test_a_stack_trains_as_each_does_alone(own: str, at_once: int) -> None:
    x, labels, streams = images(N, dtype=torch.float64), classes(), [0] * R
    if own in {"images", "all"}:
        x = images(R, N, dtype=torch.float64)
    if own in {"labels", "all"}:
        labels = torch.stack([classes().roll(r) for r in range(R)])
    if own in {"order", "all"}:
        streams = [3, 1, 3, 2, 0]
    weights = start(dtype=torch.float64)
    given = {"weights": weights, "x": x, "labels": labels, "streams": streams}
    together = train(at_once=at_once, **given)
    for r in range(R):
        alone = train(
            weights=only(weights, [r]),
            x=x[r : r + 1] if x.dim() == 5 else x,
            labels=labels[r] if labels.dim() == 2 else labels,
            defences=DEFENCES[r : r + 1],
            streams=streams[r : r + 1],
        )
        same(rows_of(together, [r]), alone, tolerance=1e-9)


def test_parts_go_side_by_side_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """All have come forward before any has moved, and none is disturbed by the others' steps."""
    training = dataclasses.replace(TRAINING, momentum=0.9)
    alone = train(at_once=2, training=training)
    meeting = threading.Barrier(3)
    right = module.cross_entropies

    def met(logits: Tensor, truth: Tensor) -> Tensor:
        meeting.wait(timeout=60)
        return right(logits, truth)

    monkeypatch.setattr(module, "cross_entropies", met)
    torch.set_num_threads(3)  # `one_thread` puts it back
    same(alone, train(at_once=2, training=training))


@pytest.mark.parametrize("at_once", [1, 4])
def test_lambda_0_is_no_defence_bit_for_bit(at_once: int) -> None:
    """In a stack of nothing else, and beside networks that are defended."""
    weights = only(start(), [0, 0, 0, 0])

    def trained(*defences: Defence) -> TrainedSplit:
        return train(weights=weights, defences=defences, at_once=at_once)

    vanilla = trained(None, None, None, None)
    no_number = MixCon(lam=0.0, beta=1e50, eps=1e-30)
    none = (MixCon(lam=0.0, beta=1e-2), UniCon(lam=0.0), no_number)
    same(vanilla, trained(None, *none))
    mixed = trained(MixCon(lam=5.0, beta=1e-2), *none)
    same(rows_of(vanilla, [1, 2, 3]), rows_of(mixed, [1, 2, 3]))
    assert not torch.allclose(*(t.weights["fc1.weight"][0] for t in (vanilla, mixed)))


@pytest.mark.parametrize("at_once", [2, R])
def test_who_diverges_is_marked_and_disturbs_nobody(at_once: int) -> None:
    """One has an image without numbers, another a lambda that throws it out."""
    wild: list[Defence] = list(DEFENCES)
    wild[4] = MixCon(lam=1e30, beta=1e-2, normalise=False)
    clean, broken = images(R, N), images(R, N)
    broken[1, 0] = torch.nan
    given = {
        "labels": torch.arange(N) % K,
        "training": dataclasses.replace(TRAINING, epochs=6),
        "at_once": at_once,
    }
    good, bad = train(x=clean, **given), train(x=broken, defences=wild, **given)
    assert bad.diverged.tolist() == [False, True, False, False, True]
    assert bad.epochs_done.tolist() == [6, 0, 6, 6, 0]
    same(rows_of(good, [0, 2, 3]), rows_of(bad, [0, 2, 3]))
    for name, tensor in start().items():
        assert torch.equal(bad.weights[name][[1, 4]], tensor[[1, 4]])
    assert math.isnan(float(bad.loss[1])), "an image of it has no numbers"
    assert math.isfinite(float(bad.loss[4]))


def test_who_diverges_keeps_what_was_finite_last() -> None:
    """A NaN among the larger class is left out of some epochs, by the shuffle."""
    x, labels = images(N), classes()
    batches = numbered(labels, (0,))
    used = [set(torch.cat(list(batches.of_epoch(e)), 1).flatten().tolist()) for e in range(8)]
    i, epoch = next(
        (i, e) for e in range(2, 8) for i in used[e] if not any(i in before for before in used[:e])
    )
    x[int(i)] = torch.nan
    given = {"weights": start(1), "x": x, "defences": [None]}
    bad = train(training=dataclasses.replace(TRAINING, epochs=8), **given)
    assert bad.diverged.tolist() == [True]
    assert bad.epochs_done.tolist() == [epoch]
    assert bad.losses.shape == (1, epoch + 1), "when all have diverged, nothing goes on"
    good = train(training=dataclasses.replace(TRAINING, epochs=epoch), **given)
    assert all(torch.equal(bad.weights[n], good.weights[n]) for n in good.weights)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": classes() % 2}, r"class 2 has 0 images, a batch 4 of each of the 3 classes"),
        (
            {"training": SplitTraining(per_class=11)},
            r"class 0 has 10 images, a batch 11 .*smaller per_class",
        ),
        ({"labels": classes() + 1}, r"label 3 is not one of the network's 3 classes, 0 to 2"),
        ({"labels": classes() - 1}, r"label -1 is not one of"),
        ({"defences": ()}, r"0 defences for 5 networks; give one each, None for none"),
        ({"defences": [None] * 4}, r"4 defences for 5 networks"),
        ({"streams": [0]}, r"1 streams for 5 networks; give one each, or None"),
        ({"x": images(N).mT.contiguous()}, r"images \(36, 1, 3, 2\) for a network of \(1, 2, 3\)"),
        ({"x": images(4, N)}, r"images of 4 networks for 5; give \(n, c, h, w\) to share them"),
        (
            {"training": SplitTraining(per_class=9)},
            r"UniCon compares images of a class, but with per_class=9 and 10 images .*choose",
        ),
        ({"weights": only(start(), [])}, r"weights of \[0\] networks; all need"),
        (
            {"labels": torch.stack([classes()] * 4 + [torch.arange(N) % K])},
            r"network 4 has 12 images, that of network 0 10; train them one after the other",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(changed: dict[str, object], message: str) -> None:
    refuses(message, train, **changed)


STACK = NETWORKS_ON_CPU + 2


def test_evaluates_and_asks_in_blocks() -> None:
    n = IMAGES_AT_ONCE + 3
    x, labels = images(STACK, n), torch.arange(n) % K
    found = evaluate_split(MODEL, start(STACK), x, labels)
    features = features_of(MODEL, start(STACK), x)
    assert features.shape == (STACK, n, MODEL.n_features)
    for r in range(STACK):
        with torch.no_grad():
            z, logits = torch_split(MLP, leaves_of(start(STACK), r), x[r])
        torch.testing.assert_close(features[r], z)
        assert float(found.loss[r]) == pytest.approx(float(F.cross_entropy(logits, labels)))
        assert float(found.accuracy[r]) == int((logits.argmax(1) == labels).sum()) / n
    shared = features_of(MODEL, start(STACK), x[0])
    torch.testing.assert_close(shared[0], features[0])
    assert not features.requires_grad


def test_other_shapes_are_refused() -> None:
    other = SplitMLP(widths=(12, 8, 9), cut=2).on(SHAPE, K)
    refuses(r"weights of .* for a network of", check_fits, other, start(STACK), images(N))
    uneven = start(STACK) | {name: tensor[:2] for name, tensor in start(STACK).items()}
    uneven |= {name: start(STACK)[name] for name in list(uneven)[:1]}
    refuses(rf"weights of \[2, {STACK}\] networks", check_fits, MODEL, uneven, images(N))
    message = rf"labels of \(35,\) for 36 images of each of {STACK} networks"
    refuses(message, check_fits, MODEL, start(STACK), images(N), torch.arange(N - 1) % K)
    refuses(r"images \(1, 2, 3\) for a network of", check_fits, MODEL, start(STACK), images(N)[0])


def numbered(labels: Tensor, streams: tuple[int, ...], per_class: int = 4) -> ClassBatches:
    """Of images that show their own number."""
    x = torch.arange(len(labels), dtype=torch.float32).view(-1, 1, 1, 1)
    return ClassBatches(
        x=x, labels=labels, n_classes=K, per_class=per_class, shuffle=shuffle, streams=streams
    )


def test_batches_have_as_many_of_each_class() -> None:
    labels = classes()
    batches, seen = numbered(labels, (5, 5)), set[int]()
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


def test_epochs_classes_and_streams_have_orders_of_their_own() -> None:
    batches = numbered(torch.arange(30) // 10, (0, 1, 0), per_class=10)
    (one,), (other,) = (list(batches.of_epoch(epoch)) for epoch in range(2))
    assert one.shape == (3, 30, 1, 1, 1)
    assert torch.equal(one[0], one[2])
    drawn = [(one, 0, 0), (one, 0, 1), (one, 1, 0), (other, 0, 0)]
    orders = [(batch[r].view(10, 3)[:, c] % 10).tolist() for batch, r, c in drawn]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(10)) for order in orders)
    shared = numbered(classes(), (2, 2))
    own = dataclasses.replace(shared, x=shared.x.expand(2, -1, -1, -1, -1))
    for some, n in ((shared, 1), (own, 2)):  # networks of one stream share a batch
        assert {len(batch) for batch in some.of_epoch(0)} == {n}
