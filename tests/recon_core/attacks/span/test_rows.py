"""Rows of every source: trained by torch's own optimisers, they span the images and no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from recon_core.attacks.span.attack import separate
from recon_core.attacks.span.rows import SpanRows, gradient_rows, joined, state_rows, weight_rows
from recon_core.attacks.span.search import SpanAttack
from recon_core.attacks.span.subspace import Subspace
from recon_core.optimisers import Optimiser
from recon_core.victims.network import Network, Parameters
from recon_core.victims.training import Trained, Training, first_gradient, train
from tests.recon_core.drawing import generator, refuses
from tests.recon_core.tiles import photograph_tiles

SHAPE, WIDTH, N = (3, 16, 16), 60, 30


def _images(n: int = N) -> Tensor:
    tiles = photograph_tiles(16, shrink=2).flatten(1) / 255 - 0.5
    return tiles[tiles.std(1) > 0.05][:n]  # none is flat


class Midway:
    """A network in the middle of its training."""

    def __init__(
        self, make: type[torch.optim.Optimizer], x: Tensor, *, bias: bool, **settings: float
    ) -> None:
        torch.manual_seed(0)
        self.x, self.layer = x, nn.Linear(x.shape[1], WIDTH, bias=bias)
        self.net = nn.Sequential(self.layer, nn.ReLU(), nn.Linear(WIDTH, 4, bias=bias))
        self.optimiser = make(self.net.parameters(), **settings)  # type: ignore[arg-type]

    @property
    def weights(self) -> Parameters:
        return self._first(lambda p: p.detach())

    def train(self, images: range, epochs: int = 40) -> None:
        for epoch in range(epochs):
            order = torch.randperm(len(images), generator=generator(epoch)) + images.start
            for batch in order.split(8):
                self.backward(batch)
                self.optimiser.step()

    def backward(self, batch: Tensor) -> Parameters:
        """Gradients of a batch in the first layer."""
        self.optimiser.zero_grad()
        nn.functional.cross_entropy(self.net(self.x[batch]), batch % 4).backward()
        return self._first(lambda p: torch.as_tensor(p.grad))

    def state(self, *, decays: bool = False) -> SpanRows:
        """What the optimiser remembers of the first layer."""
        state = self.optimiser.state
        kind = "exp_avg" if "exp_avg" in state[self.layer.weight] else "momentum_buffer"
        gradient = self._first(lambda p: state[p][kind])
        return gradient_rows(gradient, "state", self.weights if decays else None)

    def _first(self, of: Callable[[nn.Parameter], Tensor]) -> Parameters:
        bias = None if self.layer.bias is None else of(self.layer.bias)[None].clone()
        return Parameters((of(self.layer.weight)[None].clone(),), (bias,))


def _outside(span: Subspace, x: Tensor) -> float:
    """The largest share of an image that is outside a span."""
    wide = torch.cat([x, torch.ones(len(x), 1)], 1) if span.vectors.shape[1] > x.shape[1] else x
    basis = torch.linalg.qr(span.vectors.double().mT).Q
    rest = wide.double() - (wide.double() @ basis) @ basis.mT
    return float((rest.square().sum(1) / wide.double().square().sum(1)).max())


RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "adam": (torch.optim.Adam, {"lr": 1e-3}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.01}),
    "momentum": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}),
    "decay": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "weight_decay": 5e-4}),
}


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_an_optimisers_state_spans_the_images_without_a_start(
    rule: str, bias: bool, centred: bool
) -> None:
    make, settings = RULES[rule]
    images = _images() - (_images().mean(0) if centred else 0)
    victim = Midway(make, images, bias=bias, **settings)
    victim.train(range(N))
    decays = rule == "decay"
    found = victim.state(decays=decays).subspace()
    assert found.ends_sharply
    assert found.n_signal == N - (centred and not bias)
    assert _outside(found, images) < 1e-3
    plain = victim.state().subspace()
    assert plain.ends_sharply != decays  # the weights hide the images unless they are taken off


def test_the_earlier_of_two_checkpoints_is_a_start() -> None:
    decayed = {"momentum": 0.9, "weight_decay": 5e-4}
    victim = Midway(torch.optim.SGD, _images(), bias=True, lr=0.05, **decayed)
    victim.train(range(N), epochs=5)
    earlier = victim.weights
    victim.train(range(N), epochs=20)
    found = weight_rows(victim.weights, earlier).subspace()
    assert (found.n_signal, found.ends_sharply) == (N, True)
    assert found.start_shares[0] == pytest.approx((1 - 10 * 0.05 * 5e-4) ** 80, rel=1e-2)
    assert _outside(found, victim.x) < 1e-6


def test_joined_states_span_the_images_of_each() -> None:
    """As many images as neurons: neither state alone has an end, both together do."""
    x = _images(WIDTH + 12)
    victim = Midway(torch.optim.SGD, x, bias=True, lr=0.02, momentum=0.9, weight_decay=5e-4)
    parts = []
    for images in (range(40), range(32, len(x))):
        victim.train(images)
        parts.append(victim.state(decays=True))
    both = joined(parts)
    assert (both.rows.shape[0], both.n_joined) == (2 * WIDTH, 2)
    found = both.subspace()
    assert (found.n_signal, found.ends_sharply) == (len(x), True)
    assert _outside(found, x) < 1e-3
    assert _outside(parts[0].subspace(), x[:40]) < 1e-3
    assert _outside(parts[0].subspace(), x) > 0.1


def test_gradients_of_batches_are_joined() -> None:
    victim = Midway(torch.optim.SGD, _images(), bias=False, lr=0.1)
    batches = [torch.arange(N)[i::2] for i in (0, 1)]
    each = [gradient_rows(victim.backward(batch), "gradients") for batch in batches]
    assert [rows.subspace().n_signal for rows in each] == [N // 2] * 2
    found = joined(each).subspace()
    assert (found.n_signal, found.ends_sharply) == (N, True)
    assert _outside(found, victim.x) < 1e-6


@pytest.mark.parametrize("source", ["state", "gradients"])
def test_signs_and_labels_are_those_of_the_images_without_biases(source: str) -> None:
    """Gradients point away from where weights go; were they not negated, signs would be wrong."""
    x = _images(12) - _images(12).mean(0)
    victim = Midway(torch.optim.Adam, x, bias=False, lr=1e-3)
    victim.train(range(12), epochs=4)
    rows = victim.state()
    if source == "gradients":
        halves = [victim.backward(torch.arange(12)[i::2]) for i in (0, 1)]
        rows = joined([gradient_rows(half, "gradients") for half in halves])
    whole = Parameters(
        (victim.weights.weights[0], victim.net[2].weight.detach()[None]), (None, None)
    )
    architecture = Network(widths=(WIDTH,)).on(SHAPE, 4)
    attack = SpanAttack(source=rows.source)
    (found,) = separate(attack, architecture, whole, [generator(0)], rows=[rows])
    n = len(found.sources.x)
    like = torch.corrcoef(torch.cat([found.sources.x, x]))[:n, n:]
    best, row = like.abs().max(0)
    good = best > 0.9
    assert int(good.sum()) >= 8
    assert float((like.gather(0, row[None])[0][good] > 0).float().mean()) > 0.8
    right = found.sources.label[row] == torch.arange(12) % 4
    assert float(right[good].float().mean()) > 0.8


@pytest.mark.parametrize("bias", ["none", "all"])
@pytest.mark.parametrize(
    ("rule", "decay", "span"),
    [("adam", 0.0, False), ("gd", 0.0, True), ("gd", 5e-4, True), ("gd", 5e-4, False)],
)
def test_training_keeps_what_its_optimiser_remembers(
    rule: str, decay: float, span: bool, bias: str
) -> None:
    """In the span of the images or not, and of victims that end before others."""
    architecture = Network(widths=(WIDTH,), bias=bias).on(SHAPE)  # type: ignore[arg-type]
    x = torch.stack([_images(), _images().flip(1)]).double()
    y = torch.tensor([1.0, -1.0]).double().repeat(N // 2).expand(2, -1)
    start = architecture.initial([generator(0), generator(1)], dtype=torch.float64)
    momentum = 0.9 if rule == "gd" else 0.0
    optimiser = Optimiser(rule=rule, lr=1e-3, momentum=momentum)  # type: ignore[arg-type]
    training = Training(epochs=1, optimiser=optimiser, weight_decay=decay, span=span)
    one = train(architecture, start, x, y, training=training)
    gradient = first_gradient(architecture, start, x, y, training.loss)
    factor = 0.1 if rule == "adam" else 1.0
    for kept, g, begun in zip(one.averages, gradient.tensors(), start.tensors(), strict=False):
        torch.testing.assert_close(kept, factor * (g + decay * begun), rtol=1e-9, atol=1e-15)
    assert len(one.averages) == len(gradient.tensors())
    longer = replace(training, epochs=60, batch_size=8, stop_every=5, stop_loss=0.6)
    drawn = [generator(0), generator(1)]
    trained = train(architecture, start, x, y, training=longer, generators=drawn)
    again = Trained.from_tensors(trained.tensors(), start, torch.device("cpu"))
    for r, own in enumerate(x):
        averages = [t[r : r + 1] for t in again.averages]
        weights = again.parameters.rows(slice(r, r + 1))
        found = state_rows(averages, weights, weight_decay=decay).subspace()
        assert (found.n_signal, found.ends_sharply) == (N, True)
        assert _outside(found, own.float()) < 1e-6


def test_rows_that_do_not_belong_together_are_refused() -> None:
    rows = SpanRows(torch.ones(4, 6))
    refuses("rows of 2 kinds cannot be joined", joined, [rows, replace(rows, source="state")])
    refuses("rows of 0 kinds", joined, [])
    refuses(r"start='known' with source='state'", SpanAttack, source="state", start="known")
