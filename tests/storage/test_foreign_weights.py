"""Files that people have beside plain networks: read, or named with the next step."""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from storage.layers import find_layers
from storage.weights import WeightsError, read_weights

State = dict[str, Tensor]


def mlp(*sizes: int, bias: bool = True) -> State:
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out, bias=bias), nn.ReLU()]
    return dict(nn.Sequential(*layers).state_dict())


NET = mlp(48, 8, 4)


def under(prefix: str, state: State = NET) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def adapters(names: str, *modules: str) -> State:
    down, up = names.split()
    return {
        f"{m}.{k}": t
        for m in modules
        for k, t in ((down, torch.ones(2, 8)), (up, torch.ones(8, 2)))
    }


WHOLE, COUNT = torch.tensor(7), torch.tensor(True)
READ: dict[str, tuple[dict[str, Any], str]] = {
    "SWA": ({"n_averaged": WHOLE} | under("module."), "n_averaged (a counter)"),
    "EMA": ({"initted": COUNT, "step": WHOLE} | under("ema_model."), "initted (a counter)"),
    "EMA beside": (
        {"step": WHOLE} | under("online_model.") | under("ema_model.", mlp(48, 8, 4)),
        "4 tensors such as ema_model.0.weight (an average over steps)",
    ),
    "EMA of Lightning": (
        under("model.")
        | {"model_ema.decay": torch.ones(()), "model_ema.0weight": torch.ones(8, 48)},
        "model_ema.decay (a counter)",
    ),
    "plain numbers": (NET | {"epoch": 3, "acc": 0.5}, "epoch (a int)"),
    "indices and masks": (
        NET | {"position_ids": torch.arange(3)[None], "mask": torch.ones(2, 2) > 0},
        "position_ids (indices)",
    ),
    "Opacus, compiled": (under("_orig_mod._module."), ""),
}


@pytest.mark.parametrize("case", READ)
def test_what_is_no_weight_is_left_out_and_said(case: str, tmp_path: Path) -> None:
    state, said = READ[case]
    torch.save(state, tmp_path / "net.pt")
    file = read_weights(tmp_path / "net.pt")
    assert find_layers(file).architecture == "mlp:48-8-4"
    torch.testing.assert_close(torch.from_numpy(file.tensors["0.weight"]), NET["0.weight"])
    assert said in "; ".join(file.left_out)


TURNED = {n: t.T.contiguous() if t.ndim == 2 else t for n, t in mlp(48, 8, 48).items()}
ADAM = {"state": {0: {"exp_avg": torch.ones(2, 2)}}, "param_groups": [{}]}
NAMED: dict[str, tuple[Any, str]] = {
    "peft": (adapters("lora_A.weight lora_B.weight", "base.fc1", "base.fc2"), "LoRA .*merge_and"),
    "kohya": (adapters("lora_down.weight lora_up.weight", "lora_unet_0"), "LoRA adapters .*merge"),
    "peft, whole": ({"fc1.base_layer.weight": torch.ones(8, 48)} | NET, "LoRA adapters .*merge"),
    "optimiser": (ADAM, "state of an optimiser"),
    "moments": ({"0.exp_avg": torch.ones(8, 48)}, "an optimiser's state"),
    "torch_ema": ({"decay": 0.9, "shadow_params": [*NET.values()]}, "shadow_params.*copy_to"),
    "list": ([*NET.values()], "list of 4 tensors without names"),
    "int8": ({n: t.to(torch.int8) for n, t in NET.items()}, "is quantised"),
    "GPTQ": ({"0.qweight": torch.ones(4, 4, dtype=torch.int32)}, "is quantised"),
    "recurrent": (dict(nn.LSTM(8, 8).state_dict()), "recurrent"),
    "transformer": (dict(nn.TransformerEncoderLayer(8, 2).state_dict()), "attention"),
    "embedding": ({"emb.weight": torch.ones(99, 48)} | NET, "emb.weight is of an embedding"),
    "diffusion": (under("time_mlp.", mlp(1, 8, 8)) | under("net.", mlp(56, 9, 48)), "diffusion"),
    "generator": (mlp(8, 9, 48), "takes 8 numbers and gives 48: a generator"),
    "generator without biases": (mlp(8, 9, 48, bias=False), "a generator"),
    "Keras by its biases": (TURNED, r"stored as \(in, out\)"),
    "JAX by its names": ({"a.kernel": torch.ones(9, 8), "b.kernel": torch.ones(8, 9)}, "in, out"),
    "tied": ({"w": torch.ones(8, 48), "b": torch.ones(8), "c": torch.ones(48)}, "an autoencoder"),
    "Conv1d": ({"c.weight": torch.ones(3, 1, 5)} | NET, "c.weight"),
    "encoder": (
        {f"encoder.{i}.weight": torch.ones(2, 2, 3, 3) for i in range(2)},
        "palimpsest attack autoencoder",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_what_is_no_plain_network_is_named_with_the_next_step(case: str, tmp_path: Path) -> None:
    state, said = NAMED[case]
    torch.save(state, tmp_path / "net.pt")
    with pytest.raises(WeightsError, match=said) as refused:
        find_layers(read_weights(tmp_path / "net.pt"))
    assert "Keras" not in str(refused.value) or "in, out" in said


def npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, w=np.ones((2, 2)))


def keras(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.weights.h5", b"")


FORMATS: dict[str, tuple[str, bytes | Callable[[Path], None], str]] = {
    "HDF5": ("net.h5", b"\x89HDF\r\n\x1a\n" + bytes(64), "HDF5 file, as Keras writes"),
    "npz": ("net.npz", npz, "numpy arrays"),
    "Keras": ("net.keras", keras, "Keras archive"),
    "GGUF": ("net.gguf", b"GGUF" + bytes(64), "language model"),
    "Git LFS": ("net.pt", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "HTML": ("net.pt", b"<!DOCTYPE html>", "download the file itself"),
    "index": ("model.safetensors.index.json", b'{"weight_map": {}}', "index of shards.*save_file"),
    "shard": ("model-00001-of-00002.safetensors", b"", "shard 1 of 2.*save_file"),
}


@pytest.mark.parametrize("case", FORMATS)
def test_other_formats_are_named_with_the_next_step(case: str, tmp_path: Path) -> None:
    name, content, said = FORMATS[case]
    path = tmp_path / name
    if callable(content):
        content(path)
    else:
        path.write_bytes(content)
    with pytest.raises(WeightsError, match=said):
        read_weights(path)


def test_advice_is_about_the_option_that_named_the_file(tmp_path: Path) -> None:
    torch.save(tuple(NET.values()), tmp_path / "g.pt")
    with pytest.raises(WeightsError, match=r"tuple of 4 tensors.*p\.grad for n, p") as refused:
        read_weights(tmp_path / "g.pt", "--gradients")
    assert "net.state_dict()" not in str(refused.value)
    with pytest.raises(WeightsError, match="give --initial a file"):
        read_weights(tmp_path / "absent", "--initial")


def test_a_safetensors_header_of_any_length_is_no_pickle(tmp_path: Path) -> None:
    """The first byte of a header of 128, 384, ... bytes is that of a pickle."""
    path = tmp_path / "net.safetensors"
    for n in range(200):
        save_file(NET, path, metadata={"n": "x" * n})
        assert read_weights(path).kind == "safetensors"


@pytest.mark.parametrize("shape", [(3,), (3, 1, 1), (1, 3, 1, 1), (1,), (1, 1, 1, 1), (1, 48)])
def test_constants_that_normalise_inputs_are_no_layers(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    constants = {"norm.mean": torch.full(shape, 0.5), "norm.std": torch.full(shape, 0.2)}
    torch.save(constants | NET, tmp_path / "net.pt")
    layers = find_layers(read_weights(tmp_path / "net.pt"))
    assert (layers.architecture, layers.unknown) == ("mlp:48-8-4", ())
    torch.save({"shift": torch.full((1, 3, 1, 1), 0.5)} | NET, tmp_path / "net.pt")
    (unknown,) = find_layers(read_weights(tmp_path / "net.pt")).unknown
    assert "shift (1, 3, 1, 1)" in unknown.name
