"""What lies beside a network's weights: optimisers' states, other checkpoints, gradients; joined,
in the order of the images, and refused in a line where they do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from recon_core.attacks.span.inputs import InputOrder
from recon_core.attacks.span.search import SpanAttack
from recon_core.attacks.span.subspace import Subspace
from storage.weights import WeightsError
from tasks.families.weights import preflight as preflight_module
from tasks.families.weights.attack import WeightsJob
from tasks.families.weights.inputs import Victim, read_victim
from tasks.families.weights.preflight import (
    best_source,
    prepare_weights,
    source_finding,
    source_record,
)

D, WIDTH = 48, 20


def _network(seed: int = 0, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(D, width), nn.ReLU(), nn.Linear(width, 3))


def _saved(path: Path, n_images: int = 6, rule: Any = torch.optim.Adam, **settings: Any) -> Any:
    """A checkpoint at `path`; the optimiser."""
    net = _network()
    optimiser = rule(net.parameters(), **{"lr": 1e-2} | settings)
    x = torch.rand(n_images, D, generator=torch.Generator().manual_seed(n_images))
    for _ in range(30):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), torch.arange(n_images) % 3).backward()
        optimiser.step()
    torch.save({"model": net.state_dict(), "optimizer": optimiser.state_dict()}, path)
    return optimiser


def _read(path: Path, **given: Any) -> Victim:
    return read_victim(path, shape=(3, 4, 4), **given)


def _moment(optimiser: torch.optim.Optimizer, number: int) -> Tensor:
    found = optimiser.state_dict()["state"][number]["exp_avg"]
    assert isinstance(found, Tensor)
    return found


def test_the_state_is_negated_in_the_order_of_images_biases_behind(tmp_path: Path) -> None:
    optimiser = _saved(tmp_path / "last.pt")
    victim = _read(tmp_path / "last.pt", order=InputOrder("hwc", "rgb"))
    (given,) = victim.states
    weight, bias = (_moment(optimiser, n) for n in (0, 1))
    images = weight.unflatten(1, (4, 4, 3)).permute(0, 3, 1, 2).flatten(1)
    assert torch.equal(given.rows.rows, -torch.cat([images, bias[:, None]], 1))
    assert (given.rows.source, given.rows.start, given.is_own) == ("state", None, True)
    assert best_source(victim, SpanAttack()) == "state"


def test_weight_decay_of_the_weights_alone_is_taken_off_of_these(tmp_path: Path) -> None:
    def groups(net: nn.Module) -> list[dict[str, Any]]:
        biases = [p for p in net.parameters() if p.dim() == 1]
        return [{"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1},
                {"params": biases, "weight_decay": 0.0}]  # fmt: skip

    def rule(_parameters: Any, **settings: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups(nets[-1]), momentum=0.9, **settings)

    nets = [_network()]
    optimiser = rule(None, lr=1e-2)
    nets[0](torch.rand(4, D)).square().sum().backward()
    optimiser.step()
    saved = {"net": nets[0].state_dict(), "optimizer": optimiser.state_dict()}
    torch.save(saved, tmp_path / "last.pt")
    (given,) = _read(tmp_path / "last.pt").states
    assert given.rows.start is not None
    assert bool(given.rows.start[:, :D].any())
    assert not given.rows.start[:, D:].any()


def test_several_states_and_checkpoints_are_joined(tmp_path: Path) -> None:
    for name, n_images in (("a", 6), ("b", 7), ("c", 8)):
        optimiser = _saved(tmp_path / f"{name}.pt", n_images)
        torch.save(optimiser.state_dict(), tmp_path / f"{name}.bin")
    whole = torch.load(tmp_path / "a.pt", weights_only=True)
    safetensors.torch.save_file(whole["model"], tmp_path / "a.safetensors")
    victim = _read(
        tmp_path / "a.safetensors",
        optimizers=[tmp_path / "a.bin"],
        checkpoints=[tmp_path / "b.pt", tmp_path / "c.pt"],
    )
    assert [given.is_own for given in victim.states] == [False] * 3
    assert [given.said.rpartition("/")[2] for given in victim.states] == [
        "a.bin", "b.pt (optimizer)", "c.pt (optimizer)",
    ]  # fmt: skip
    rows = victim.sources["state"]
    assert (rows.n_joined, rows.rows.shape) == (3, (3 * WIDTH, D + 1))
    record = source_record(victim, SpanAttack(source="state"))
    assert record["directions"]["state"] == {"n": 6 + 7 + 8, "ends_sharply": True}
    assert record["publish_weights_alone"] is False
    text = source_finding(victim, record).text
    assert "21 directions that end sharply" in text
    assert "publish" not in text


def test_gradients_come_first(tmp_path: Path) -> None:
    _saved(tmp_path / "last.pt")
    for seed, name in enumerate("ab"):
        net = _network()
        net(
            torch.rand(5, D, generator=torch.Generator().manual_seed(seed))
        ).square().sum().backward()
        gradients = {name: p.grad for name, p in net.named_parameters()}
        torch.save(gradients, tmp_path / f"{name}.pt")
    victim = _read(tmp_path / "last.pt", gradients=[tmp_path / f"{name}.pt" for name in "aab"])
    assert best_source(victim, SpanAttack()) == "gradients"
    assert victim.sources["gradients"].n_joined == 2
    record = source_record(victim, SpanAttack(source="gradients"))
    assert record["directions"]["gradients"] == {"n": 10, "ends_sharply": True}
    torch.save({name: torch.zeros_like(g) for name, g in gradients.items()}, tmp_path / "0.pt")
    with pytest.raises(ValueError, match=r"0.pt: those of the first layer are zero"):
        _read(tmp_path / "last.pt", gradients=[tmp_path / "0.pt"])


@pytest.mark.parametrize(
    ("state", "weights", "chosen"),
    [
        ((8, True), (8, True), "state"),
        ((6, True), (8, True), "weights"),
        ((6, True), (19, True), "state"),  # where neurons that hardly moved begin
        ((6, True), (12, False), "state"),
        ((6, False), (8, True), "weights"),
        ((6, False), (8, False), "state"),
        (None, (8, False), "weights"),
    ],
)
def test_the_source_that_shows_most_images_is_taken(
    state: tuple[int, bool] | None,
    weights: tuple[int, bool],
    chosen: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def span(n: int, is_sharp: bool) -> Subspace:
        return Subspace(
            torch.eye(D)[:n], torch.eye(D), torch.ones(n).double(), n, 0.0, 0.0, (), is_sharp
        )

    _saved(tmp_path / "last.pt")
    found = {} if state is None else {"state": span(*state)}
    found |= {"weights": span(*weights)}
    monkeypatch.setattr(preflight_module, "spans_of", lambda *_given: found)
    assert best_source(_read(tmp_path / "last.pt"), SpanAttack()) == chosen


def test_a_state_that_does_not_fit_is_said_and_not_used(tmp_path: Path) -> None:
    other = torch.optim.Adam(_network(width=9).parameters())
    other.zero_grad()
    for group in other.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    other.step()
    saved = {"model": _network().state_dict(), "optimizer": other.state_dict()}
    torch.save(saved, tmp_path / "last.pt")
    victim = _read(tmp_path / "last.pt")
    assert victim.states == ()
    assert "does not fit the network: none of its parameters, 0 (9, 48)" in victim.unused_state
    assert victim.unused_state in source_finding(victim, source_record(victim, SpanAttack())).text
    attack = SpanAttack(source="state")
    job = WeightsJob(weights=tmp_path / "last.pt", out=tmp_path, shape=(3, 4, 4), attack=attack)
    with pytest.raises(ValueError, match=r"--source state: .* comes without: exp_avg in .* fit"):
        prepare_weights(job)
    torch.save(other.state_dict(), tmp_path / "optimizer.pt")
    with pytest.raises(WeightsError, match=r"exp_avg in .*optimizer.pt does not fit the network"):
        _read(tmp_path / "last.pt", optimizers=[tmp_path / "optimizer.pt"])
    torch.save(_network().state_dict(), tmp_path / "net.pt")
    with pytest.raises(WeightsError, match=r"--checkpoint .*net.pt holds no optimiser's state"):
        _read(tmp_path / "net.pt", checkpoints=[tmp_path / "net.pt"])
    torch.save(_network(width=9).state_dict(), tmp_path / "nine.pt")
    with pytest.raises(WeightsError, match=r"--checkpoint .* of this training"):
        _read(tmp_path / "net.pt", checkpoints=[tmp_path / "nine.pt"])
