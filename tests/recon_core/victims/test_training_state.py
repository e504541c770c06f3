"""A training that is interrupted ends bit for bit as one that is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import safetensors.torch
import torch
from torch import Tensor

from recon_core.victims.training import Training, train
from recon_core.victims.training_state import TrainingState
from tests.recon_core.victims.small_victims import (
    ADAM,
    GD,
    architecture,
    assert_same,
    data,
    order,
    victims,
    wild,
)

CPU = torch.device("cpu")

RESUMED = {
    "adadelta": Training(epochs=20, stop_every=10),
    "momentum, in the span": Training(epochs=20, optimiser=GD, span=True, weight_decay=0.01),
    "minibatches, adam": Training(epochs=20, optimiser=ADAM, batch_size=3, stop_every=10),
    "minibatches, in the span": Training(
        epochs=20, optimiser=GD, batch_size=3, span=True, weight_decay=0.01, stop_every=10
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ends", [False, True], ids=["all go on", "one diverges, one finishes"])
@pytest.mark.parametrize("case", RESUMED)
def test_resumes_bit_for_bit(case: str, ends: bool, dtype: torch.dtype) -> None:
    arch = architecture(bias="all")
    parameters, (x, y) = victims(arch, dtype), data(dtype=dtype)
    training = RESUMED[case]
    if ends:
        losses = train(arch, parameters, x, y, training=training, generators=order()).loss
        training = replace(training, stop_loss=float(losses[::2].mean()), stop_every=5)
        parameters = wild(parameters)
    states: list[TrainingState] = []
    whole = train(
        arch, parameters, x, y, training=training, generators=order(), on_state=states.append,
        state_every=4,
    )  # fmt: skip
    if ends:
        assert len(set(whole.epochs_done.tolist())) > 1
    assert [state.epoch for state in states] == [4, 8, 12, 16, 20]
    for state in states:
        stored = safetensors.torch.load(safetensors.torch.save(state.tensors()))
        again = TrainingState.from_tensors(stored, CPU)
        resumed = train(arch, parameters, x, y, training=training, state=again)
        assert_same(whole, resumed)


def test_a_finished_training_can_be_prolonged() -> None:
    arch = architecture()
    parameters, (x, y) = victims(arch), data()
    states: list[TrainingState] = []
    train(
        arch, parameters, x, y, training=Training(epochs=20), on_state=states.append, state_every=20
    )
    longer = train(arch, parameters, x, y, training=Training(epochs=50), state=states[-1])
    assert_same(longer, train(arch, parameters, x, y, training=Training(epochs=50)))


def test_states_are_copies() -> None:
    arch = architecture()
    x, y = data()
    states: list[TrainingState] = []
    kept: list[dict[str, Tensor]] = []

    def keep(state: TrainingState) -> None:
        states.append(state)
        kept.append(state.tensors())

    training = Training(epochs=40, optimiser=GD, batch_size=3)
    train(
        arch, victims(arch), x, y, training=training, generators=order(), on_state=keep,
        state_every=10,
    )  # fmt: skip
    for state, tensors in zip(states, kept, strict=True):
        for name, tensor in state.tensors().items():
            torch.testing.assert_close(tensor, tensors[name], rtol=0, atol=0, equal_nan=True)


def test_refuses_a_state_of_another_training() -> None:
    arch = architecture()
    parameters, (x, y) = victims(arch), data()
    states: list[TrainingState] = []
    short = Training(epochs=2)
    train(arch, parameters, x, y, training=short, on_state=states.append, state_every=1)
    wider = architecture(widths=(7, 6))
    with pytest.raises(ValueError, match=r"\(3, 5, 7\).*this training .*\(3, 6, 7\)"):
        train(wider, victims(wider), x, y, training=short, state=states[0])
    with pytest.raises(ValueError, match=r"images \(3, 8\).*for \(3, 6\)"):
        train(arch, parameters, x[:, :6], y[:, :6], training=short, state=states[0])
    other = replace(short, optimiser=GD)
    with pytest.raises(ValueError, match="gd needs"):
        train(arch, parameters, x, y, training=other, state=states[0])
    other = replace(short, batch_size=3)
    with pytest.raises(ValueError, match="without minibatches, this one has minibatches"):
        train(arch, parameters, x, y, training=other, state=states[0], generators=order())
    named = states[0].tensors()
    del named["margins"]
    with pytest.raises(ValueError, match="not the state of a training: margins missing"):
        TrainingState.from_tensors(named, CPU)
