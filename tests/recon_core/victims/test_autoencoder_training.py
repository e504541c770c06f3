"""Training autoencoders to levels of the loss: what is kept, who leaves, and that it resumes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from recon_core.victims.autoencoder import (
    Autoencoder,
    FullyConnected,
    UNet,
    Weights,
    initial_weights,
)
from recon_core.victims.autoencoder_training import (
    AutoencoderTraining,
    Checkpoint,
    Overfitted,
    train_autoencoders,
)
from tests.recon_core.drawing import generator, refuses
from tests.recon_core.victims.torch_nets import leaves_of, torch_autoencoder

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (1, 4, 4)
R, N = 3, 6
FC = FullyConnected(depth=3, width=24, activation="prelu")
UNET = UNet(channels=(4, 6), convolutions=1)
LEVELS = (1e-2, 1e-3, 1e-4)
LONG = AutoencoderTraining(epochs=300, lr=1e-2, lr_end=1e-3, levels=LEVELS, check_every=10)
SHORT = dataclasses.replace(LONG, epochs=30, levels=(1e-9,))


def start(settings: Autoencoder = FC, dtype: torch.dtype = torch.float32) -> Weights:
    generators = [generator(i) for i in range(R)]
    return initial_weights(settings.on(SHAPE), generators, dtype=dtype)


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    """The second run has a single image many times, and is done early."""
    x = torch.rand(R, N, *SHAPE, generator=generator(3)).to(dtype)
    x[1] = x[1, :1]
    return x


def only(weights: Weights, rows: list[int]) -> Weights:
    return {name: tensor[rows] for name, tensor in weights.items()}


def shuffle(run: int, epoch: int) -> Tensor:
    return torch.randperm(N, generator=generator(100 * run + epoch))


def same(a: Checkpoint, b: Checkpoint, *, tolerance: float = 0.0) -> None:
    assert a.epoch == b.epoch
    if math.isfinite(a.loss):
        assert a.loss == pytest.approx(b.loss, rel=100 * tolerance, abs=0)
    assert set(a.weights) == set(b.weights)
    for name, tensor in a.weights.items():
        torch.testing.assert_close(
            tensor, b.weights[name], rtol=tolerance, atol=tolerance, equal_nan=True
        )


def all_same(a: list[Overfitted], b: list[Overfitted], *, tolerance: float = 0.0) -> None:
    for one, other in zip(a, b, strict=True):
        assert one.diverged == other.diverged
        assert set(one.levels) == set(other.levels)
        same(one.last, other.last, tolerance=tolerance)
        for level, checkpoint in one.levels.items():
            same(checkpoint, other.levels[level], tolerance=tolerance)


def train(
    x: Tensor | None = None, training: AutoencoderTraining = LONG, **how: Any
) -> list[Overfitted]:
    """All networks on the usual images, or those of `weights`."""
    weights = how.pop("weights", None) or start()
    return train_autoencoders(
        FC.on(SHAPE), weights, images() if x is None else x, training=training, **how
    )


@pytest.fixture(scope="module")
def trained() -> list[Overfitted]:
    return train()


def test_levels_hold_weights_of_the_loss_that_they_say(trained: list[Overfitted]) -> None:
    x = images(torch.float64)
    for run, result in enumerate(trained):
        assert set(result.levels) == set(LEVELS)
        for level, checkpoint in result.levels.items():
            double = {name: t[0].double() for name, t in checkpoint.weights.items()}
            loss = float((torch_autoencoder(FC, double, x[run]) - x[run]).square().mean())
            assert checkpoint.loss == pytest.approx(loss, rel=1e-3)
            assert checkpoint.loss <= level
        assert result.last.loss == result.levels[LEVELS[-1]].loss
        assert not result.diverged


def test_levels_are_the_first_check_below() -> None:
    states: list[dict[str, Tensor]] = []
    every = LONG.check_every
    found = train(on_state=states.append, state_every=every)
    for run, result in enumerate(found):
        epochs = [result.levels[level].epoch for level in LEVELS]
        assert epochs == sorted(epochs)
        for level, epoch in zip(LEVELS, epochs, strict=True):
            assert epoch % every == 0
            before = states[epoch // every - 2]
            assert int(before["epoch"]) == epoch - every
            row = before["running"].tolist().index(run)
            weights = {n: before[f"weights/{n}"][row : row + 1] for n in start()}
            x = images()[run : run + 1]
            loss = (FC.on(SHAPE).forward(weights, x) - x).double().square().mean()
            assert float(loss) > level


def test_who_has_reached_the_last_level_leaves_the_others_as_they_are(
    trained: list[Overfitted],
) -> None:
    ends = [result.last.epoch for result in trained]
    assert ends[1] < min(ends[0], ends[2]) < LONG.epochs
    others = [0, 2]
    alone = train(images()[others], weights=only(start(), others))
    all_same([trained[0], trained[2]], alone, tolerance=1e-5)


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("settings", [FC, UNET], ids=["fc", "unet"])
def test_training_is_that_of_torchs_adam(settings: Autoencoder, batch_size: int | None) -> None:
    training = AutoencoderTraining(
        epochs=20, lr=2e-3, lr_end=1e-4, hold=0.3, batch_size=batch_size, levels=(1e-12,)
    )
    weights, x = start(settings, torch.float64), images(torch.float64)
    results = train_autoencoders(settings.on(SHAPE), weights, x, training=training, shuffle=shuffle)
    for r in range(R):
        leaves = leaves_of(weights, r)
        adam = torch.optim.Adam(list(leaves.values()), betas=(0.9, 0.99))
        for epoch in range(20):
            rate = 2e-3 if epoch <= 6 else 2e-3 * 0.05 ** ((epoch - 6) / 14)
            adam.param_groups[0]["lr"] = rate
            rows = torch.arange(N) if batch_size is None else shuffle(r, epoch)
            for part in rows.split(batch_size or N):
                adam.zero_grad()
                own = x[r, part]
                (torch_autoencoder(settings, leaves, own) - own).square().mean().backward()
                adam.step()
        for name, leaf in leaves.items():
            ours = results[r].last.weights[name][0]
            torch.testing.assert_close(ours, leaf.detach().view_as(ours), rtol=1e-8, atol=1e-10)
            assert not torch.allclose(ours, weights[name][r], atol=1e-4)


@pytest.mark.parametrize("batch_size", [None, 4])
def test_resumes_bit_for_bit(batch_size: int | None) -> None:
    training = dataclasses.replace(LONG, epochs=100, batch_size=batch_size)
    states: list[dict[str, Tensor]] = []
    x = images()
    x[2, 0, 0, 0, 0] = torch.nan
    whole = train(x, training, shuffle=shuffle, on_state=states.append, state_every=15)
    epochs = [int(state["epoch"]) for state in states]
    assert epochs == list(range(15, 15 * len(epochs) + 1, 15))
    assert len(states[-1]["running"]) < len(states[0]["running"]) < R, "one ends on the way"
    assert whole[2].diverged
    for state in states:
        stored = safetensors.torch.load(safetensors.torch.save(state))
        all_same(whole, train(x, training, shuffle=shuffle, state=stored))


def test_a_state_of_another_training_is_refused() -> None:
    states: list[dict[str, Tensor]] = []
    train(training=SHORT, on_state=states.append, state_every=30)
    (state,) = states
    wider, message = dataclasses.replace(FC, width=25), "not the state of this training: "
    given = (wider.on(SHAPE), start(wider), images())
    message += r"\['weights/0.weight'"
    refuses(message, train_autoencoders, *given, training=SHORT, state=state)
    for name in ("running", "averages/1/0.bias"):
        part = {n: t for n, t in state.items() if n != name}
        refuses(rf"\['{name}'\] missing", train, training=SHORT, state=part)
    one = {"weights": only(start(), [0]), "training": SHORT}
    refuses("some of its runs", train, images()[:1], state=state, **one)


def test_images_without_numbers_diverge_and_leave_the_others_alone() -> None:
    x = images()
    clean = train(x)
    x[0, 2, 0, 1, 1] = torch.nan
    found = train(x)
    assert found[0].diverged
    assert not found[0].levels
    assert math.isnan(found[0].last.loss)
    all_same(found[1:], clean[1:], tolerance=1e-5)


def test_a_rate_that_is_far_too_high_is_a_result_and_no_error() -> None:
    wild = dataclasses.replace(SHORT, lr=1e20, lr_end=1e19)
    weights, x = start(), images()
    found = train(x, wild, weights=weights)
    assert all(result.diverged and not result.levels for result in found)
    assert all(torch.equal(weights[name], tensor) for name, tensor in start().items())
    assert torch.equal(x, images())


def test_the_last_epoch_is_checked_even_between_checks() -> None:
    seen: list[float] = []
    fifty = dataclasses.replace(SHORT, epochs=50)
    ended = train(training=fifty, progress=seen.append)
    assert seen == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    level = ended[0].last.loss * 1.0001
    training = dataclasses.replace(LONG, epochs=50, levels=(level,), check_every=49)
    found = train(images()[:1], training, weights=only(start(), [0]))
    assert [c.epoch for c in found[0].levels.values()] == [50]
    assert found[0].last.epoch == 50


def test_the_rate_is_held_and_falls() -> None:
    training = AutoencoderTraining(epochs=100, lr=1e-2, lr_end=1e-4, hold=0.5)
    assert training.rate(0) == training.rate(50) == 1e-2
    assert training.rate(75) == pytest.approx(1e-3)
    assert training.rate(100) == pytest.approx(1e-4)
    constant = dataclasses.replace(training, hold=1.0)
    assert constant.rate(0) == constant.rate(100) == 1e-2


def test_what_does_not_fit_is_refused() -> None:
    message = r"images of \(1, 4, 4\) for a network of \(3, 4, 4\)"
    other = FC.on((3, 4, 4))
    refuses(message, train_autoencoders, other, start(), images(), training=SHORT)
    refuses("batch_size=2 needs", train, training=dataclasses.replace(SHORT, batch_size=2))
    refuses(r"\[2\] networks for the images of 3", train, weights=only(start(), [0, 1]))
