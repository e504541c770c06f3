"""Networks in files: the first layer before training, autoencoders that are no classifiers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from storage.weights import WeightsError
from tasks.families.weights.inputs import Victim, read_victim

State = dict[str, Tensor]


def mlp(*sizes: int, seed: int = 0) -> State:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return dict(nn.Sequential(*layers).state_dict())


def victim(path: Path, state: State, **facts: Any) -> Victim:
    torch.save(state, path)
    given = {"arch": None, "shape": None, "activation": "relu", "leak": 0.0, "dtype": "float32"}
    return read_victim(path, **given | facts)  # type: ignore[arg-type]


PREFIXES = ("", "_module.", "module.", "_orig_mod.", "model.", "net.", "wrapped.")


@pytest.mark.parametrize("ours", PREFIXES)
@pytest.mark.parametrize("theirs", PREFIXES)
def test_a_square_first_layer_has_its_start_under_any_prefix(
    ours: str, theirs: str, tmp_path: Path
) -> None:
    trained, start = (mlp(64, 64, 64, 10, seed=seed) for seed in (0, 1))
    initial = {"n_averaged": torch.tensor(3)} | {theirs + name: t for name, t in start.items()}
    torch.save(initial, tmp_path / "initial.pt")
    prefixed = {ours + name: tensor for name, tensor in trained.items()}
    found = victim(tmp_path / "net.pt", prefixed, initial=tmp_path / "initial.pt")
    assert found.start is not None
    assert torch.equal(found.parameters.weights[0][0], trained["0.weight"])
    for tensor, name in zip(found.start.parameters.tensors(), ("weight", "bias"), strict=True):
        assert torch.equal(tensor[0], start[f"0.{name}"])


def test_an_autoencoder_is_no_classifier_of_as_many_classes(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"an autoencoder; .*palimpsest attack autoencoder"):
        victim(tmp_path / "net.pt", mlp(192, 16, 192))
    with pytest.raises(WeightsError, match=r"takes 208 numbers and gives 192: .* denoiser"):
        victim(tmp_path / "net.pt", mlp(208, 16, 192))
    said = victim(tmp_path / "net.pt", mlp(192, 16, 192), arch="mlp:192-16-192")
    assert said.architecture.n_outputs == 192
    assert victim(tmp_path / "net.pt", mlp(64, 16, 40)).architecture.n_outputs == 40
