"""Optimisers' states in files: found wherever they lie, fitted to the network's tensors, or said to
be of no use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from storage.optimiser_states import OptimiserState
from storage.weights import WeightsError, read_states, read_weights

Groups = Callable[[nn.Module], Any]


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def _trained(
    rule: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    groups: Groups = lambda net: list(net.parameters()),
    **settings: Any,
) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    net = _network()
    optimiser = rule(groups(net), **{"lr": 1e-3} | settings)
    for _ in range(3):
        optimiser.zero_grad()
        net(torch.randn(6, 12)).square().sum().backward()
        optimiser.step()
    return net, optimiser


def _of(net: nn.Module, optimiser: torch.optim.Optimizer, kind: str) -> dict[str, Tensor]:
    named = {name: optimiser.state[p][kind] for name, p in net.named_parameters()}
    assert len(named) == 6
    return named


def _check(found: OptimiserState, net: nn.Module, expected: dict[str, Tensor]) -> None:
    shapes = {name: tuple(t.shape) for name, t in net.state_dict().items()}
    numbers = found.numbers(shapes)
    assert set(numbers) == set(expected)
    for name, number in numbers.items():
        moment = found.moments[number]
        assert moment is not None
        np.testing.assert_array_equal(moment, expected[name].numpy())


def _sharded(net: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """Names in place of numbers, as FSDP saves them."""
    names = [f"module.{name}" for name, _ in net.named_parameters()]
    saved = optimiser.state_dict()
    state = {names[i]: kept for i, kept in saved["state"].items()}
    groups = [{**group, "params": [names[i] for i in group["params"]]}
              for group in saved["param_groups"]]  # fmt: skip
    return {"net": net.state_dict(), "opt": {"state": state, "param_groups": groups}}


WRAPPED: dict[str, tuple[Callable[[nn.Module, torch.optim.Optimizer], Any], str]] = {
    "a script's": (
        lambda net, opt: {"model": net.state_dict(), "optimizer": opt.state_dict()},
        "optimizer",
    ),
    "Lightning's": (
        lambda net, opt: {
            "state_dict": {f"model.{name}": t for name, t in net.state_dict().items()},
            "optimizer_states": [opt.state_dict()],
        },
        "optimizer_states.0",
    ),
    "FSDP's": (_sharded, "opt"),
    "nested": (
        lambda net, opt: {
            "model": net.state_dict(),
            "train": {"optims": {"a": opt.state_dict()}, "step": 3},
        },
        "train.optims.a",
    ),
}


@pytest.mark.parametrize("case", WRAPPED)
def test_a_state_beside_a_network_is_found(case: str, tmp_path: Path) -> None:
    wrap, inside = WRAPPED[case]
    net, optimiser = _trained()
    torch.save(wrap(net, optimiser), tmp_path / "last.pt")
    found = read_weights(tmp_path / "last.pt")
    assert set(found.tensors) == set(net.state_dict())
    (state,) = found.states
    assert (state.inside, state.kind) == (inside, "exp_avg")
    assert state.said == f"exp_avg in {tmp_path / 'last.pt'} ({inside})"
    _check(state, net, _of(net, optimiser, "exp_avg"))


def _by_decay(net: nn.Module) -> Any:
    """Biases and norms without weight decay, in a group of their own, which comes first."""
    named = list(net.named_parameters())
    return [
        {"params": [p for _n, p in named if p.dim() < 2], "weight_decay": 0.0},
        {"params": [p for _n, p in named if p.dim() > 1], "weight_decay": 0.1},
    ]


GROUPS: dict[str, Groups] = {
    "one": lambda net: list(net.parameters()),
    "named": lambda net: list(net.named_parameters()),
    "named, backwards": lambda net: list(net.named_parameters())[::-1],
    "two": _by_decay,
}


@pytest.mark.parametrize("case", GROUPS)
def test_groups_are_fitted_to_the_networks_tensors(case: str, tmp_path: Path) -> None:
    net, optimiser = _trained(torch.optim.SGD, GROUPS[case], momentum=0.9, weight_decay=0.1)
    torch.save(optimiser.state_dict(), tmp_path / "optimizer.bin")
    sha256, (state,) = read_states(tmp_path / "optimizer.bin")
    assert len(sha256) == 64
    assert (state.inside, state.kind) == ("", "momentum_buffer")
    shapes = {name: tuple(t.shape) for name, t in net.state_dict().items()}
    numbers = state.numbers(shapes)
    _check(state, net, _of(net, optimiser, "momentum_buffer"))
    decays = {name: state.decays[number] for name, number in numbers.items()}
    assert decays["0.weight"]
    assert decays["3.bias"] == (case != "two")


@pytest.mark.parametrize(("rule", "decays"), [(torch.optim.Adam, True), (torch.optim.AdamW, False)])
def test_decoupled_decay_is_no_part_of_gradients(
    rule: Callable[..., torch.optim.Optimizer], decays: bool, tmp_path: Path
) -> None:
    net, optimiser = _trained(rule, weight_decay=0.1)
    torch.save({"net": net.state_dict(), "o": optimiser.state_dict()}, tmp_path / "last.pt")
    assert set(read_weights(tmp_path / "last.pt").states[0].decays) == {decays}


@pytest.mark.parametrize(
    ("rule", "settings", "why"),
    [
        (torch.optim.SGD, {}, "keeps"),
        (torch.optim.RMSprop, {"momentum": 0.9}, "square_avg"),
        (torch.optim.Adadelta, {}, "keeps acc_delta, square_avg, no average of gradients"),
        (torch.optim.Adagrad, {}, "keeps sum, no average of gradients"),
    ],
)
def test_what_is_no_average_of_gradients_is_said_to_be_left_out(
    rule: Callable[..., torch.optim.Optimizer],
    settings: dict[str, Any],
    why: str,
    tmp_path: Path,
) -> None:
    net, optimiser = _trained(rule, **settings)
    path = tmp_path / "last.pt"
    torch.save({"net": net.state_dict(), "optimizer": optimiser.state_dict()}, path)
    found = read_weights(path)
    assert found.states == ()
    (said,) = [text for text in found.left_out if text.startswith("optimizer")]
    assert why in said
    with pytest.raises(WeightsError, match=r"--optimizer .* holds only optimizer \(keeps"):
        read_states(path)


def _saved(state: Any, name: str = "optimizer.pt") -> Callable[[Path], Path]:
    def save(folder: Path) -> Path:
        torch.save(state, folder / name)
        return folder / name

    return save


def _text(folder: Path) -> Path:
    (folder / "notes").write_text("lr 1e-3")
    return folder / "notes"


WIDE = {"exp_avg": torch.zeros(1).expand(10**5, 10**5)}
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "absent": (lambda folder: folder / "absent", "does not exist; give --optimizer"),
    "text": (_text, "no file that torch.save wrote"),
    "a network": (_saved(_network().state_dict()), "holds no optimiser's state"),
    "too large": (
        _saved({"state": {0: WIDE}, "param_groups": [{"params": [0]}]}),
        r"exp_avg 0 \(100000, 100000\) most",
    ),
    "no numbers": (
        _saved({"state": {0: {"exp_avg": torch.ones(3).int()}}, "param_groups": [{"params": [0]}]}),
        "are no dense numbers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_without_a_state_are_refused_in_a_line(case: str, tmp_path: Path) -> None:
    make, message = REFUSED[case]
    with pytest.raises(WeightsError, match=message) as caught:
        read_states(make(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_state_of_another_network_does_not_fit(tmp_path: Path) -> None:
    _net, optimiser = _trained()
    torch.save(optimiser.state_dict(), tmp_path / "optimizer.pt")
    _sha256, (state,) = read_states(tmp_path / "optimizer.pt")
    shapes = {"a.weight": (7, 12), "a.bias": (7,), "b.weight": (3, 7), "b.bias": (3,)}
    assert set(state.numbers(shapes)) == {"b.bias"}
    with pytest.raises(WeightsError, match=r"none of its parameters, 0 \(5, 12\), .*a\.weight \(7"):
        state.check_fits({"a.weight": (7, 12)}, shapes)
    state.check_fits({"b.bias": (3,)}, shapes)
