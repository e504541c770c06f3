"""Files of weights: both formats, nothing executed, layers in order, every refusal with its fix;
and files that people have beside plain networks: read, or named with the next step."""

from __future__ import annotations

import itertools
import os
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from storage.layers import find_layers, natural_key
from storage.weights import WeightFile, WeightsError, read_weights

State = dict[str, Tensor]


def mlp(*sizes: int, bias: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def saved(tmp_path: Path, state: Any, kind: str = "torch") -> Path:
    path = tmp_path / f"victim-{kind}"  # the name tells nothing
    if kind == "torch":
        torch.save(state, path)
    else:
        path.write_bytes(safetensors.torch.save(state))
    return path


def file_of(tensors: dict[str, tuple[int, ...]], kind: str = "torch") -> WeightFile:
    arrays = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    return WeightFile(Path("victim"), kind, arrays, "")


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_both_formats_give_the_same_tensors(tmp_path: Path, kind: str) -> None:
    state = mlp(12, 5, 1, bias=True).state_dict()
    found = read_weights(saved(tmp_path, state, kind))
    assert found.kind == kind
    assert set(found.tensors) == set(state)
    for name, tensor in state.items():
        assert found.tensors[name].dtype == np.float32
        np.testing.assert_array_equal(found.tensors[name], tensor.numpy())
    layers = find_layers(found)
    assert (layers.architecture, layers.bias, layers.unknown) == ("mlp:12-5-1", "all", ())
    assert list(layers.in_order(found.tensors)) == ["0.weight", "0.bias", "2.weight", "2.bias"]


NET = mlp(12, 5, 1).state_dict()
OTHER = mlp(12, 6, 1).state_dict()
ADAM = {"state": {0: {"exp_avg": torch.ones(5, 12), "step": torch.ones(())}}, "param_groups": [{}]}
NESTED: dict[str, dict[str, Any]] = {
    "the usual key": {"epoch": 3, "model": NET, "optimizer": ADAM},
    "another": {"net": NET, "acc": 91.5},
    "of Lightning": {"state_dict": NET, "optimizer_states": [ADAM], "callbacks": {}},
    "an average alone": {"ema": {"shadow": NET, "decay": 0.999}},
    "the weights before their average": {"ema": OTHER, "model": NET},
    "any only dict of tensors": {"mine": NET, "scores": {"loss": torch.ones(())}},
    "beside a tensor": {"epoch": torch.ones(()), "a": {"b": NET}},
}


@pytest.mark.parametrize("name", NESTED)
def test_a_state_dict_inside_a_training_script_s_dict(tmp_path: Path, name: str) -> None:
    found = read_weights(saved(tmp_path, NESTED[name]))
    assert list(found.tensors) == list(NET)
    np.testing.assert_array_equal(found.tensors["0.weight"], NET["0.weight"].numpy())


def test_several_dicts_of_tensors_are_listed_with_what_takes_one(tmp_path: Path) -> None:
    path = saved(tmp_path, {"generator": {"main": NET}, "discriminator": OTHER, "epoch": 3})
    said = r"2 dicts of tensors: .*generator\.main \(2 tensors\).*torch\.load\('victim-torch'\)\["
    with pytest.raises(WeightsError, match=said):
        read_weights(path)
    round_about: dict[str, Any] = {"a": {"b": 1}}
    round_about["a"]["again"] = round_about
    with pytest.raises(WeightsError, match=r"holds a \(dict\), and no dict of tensors under state"):
        read_weights(saved(tmp_path, round_about))


LARGE: dict[str, tuple[State, str]] = {
    "repeated": (
        {"0.weight": torch.zeros(1).expand(10**5, 10**5), "1.weight": torch.ones(1, 10)},
        r"would take 40,000,000,040, 0\.weight .*clone",
    ),
    "of no device": (
        {"a": torch.empty(10**5, 10**5, device="meta")}, r"would take .*, a \(100000, 100000\) most"
    ),
    "empty": ({"a": torch.ones(10**12, 0), "b": torch.ones(2, 2)}, r"a in .* has no numbers"),
}  # fmt: skip


@pytest.mark.parametrize("case", LARGE)
def test_more_numbers_than_the_file_has_are_not_made(case: str, tmp_path: Path) -> None:
    """Each would take tens of gigabytes if it were believed."""
    with pytest.raises(WeightsError, match=LARGE[case][1]):
        read_weights(saved(tmp_path, LARGE[case][0]))


def test_a_file_is_believed_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "deflated"
    whole = saved(tmp_path, {"a": torch.zeros(500, 500)})
    with (
        zipfile.ZipFile(whole) as archive,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for name in archive.namelist():
            bomb.writestr(name, archive.read(name))
    with pytest.raises(WeightsError, match=r"an archive of .* bytes that unpacks to"):
        read_weights(path)
    path.write_bytes((10**12).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1],')
    with pytest.raises(WeightsError, match="announces a header of 1,000,000,000,000 bytes"):
        read_weights(path)
    with path.open("wb") as file:
        file.truncate(2**43)  # takes no room
    with pytest.raises(WeightsError, match="more than the memory of this machine"):
        read_weights(path)
    tied = torch.ones(50, 50, dtype=torch.float16)  # shared, which is no bomb
    assert len(read_weights(saved(tmp_path, {f"{i}.weight": tied for i in range(8)})).tensors) == 8


def test_the_old_format_and_wrappers_prefixes_are_read(tmp_path: Path) -> None:
    state = {f"module._orig_mod.{k}": v for k, v in mlp(12, 5, 1).state_dict().items()}
    path = tmp_path / "old.pth"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    assert set(read_weights(path).tensors) == {"0.weight", "2.weight"}
    half = {"model.a": state["module._orig_mod.0.weight"], "b": torch.ones(1, 5)}
    assert set(read_weights(saved(tmp_path, half)).tensors) == {"model.a", "b"}


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_precisions_are_kept_or_widened(tmp_path: Path, dtype: torch.dtype, kind: str) -> None:
    state = {"a": torch.randn(4, 6).to(dtype), "b": torch.randn(1, 4).to(dtype)}
    found = read_weights(saved(tmp_path, state, kind)).tensors
    assert found["a"].dtype == (np.float64 if dtype == torch.float64 else np.float32)
    np.testing.assert_array_equal(found["a"], state["a"].double().numpy())


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.path, "executed"))


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_bomb_is_refused_and_does_not_go_off(tmp_path: Path, protocol: int) -> None:
    state = {"0.weight": torch.ones(2, 2), "bomb": Bomb(tmp_path / "crater")}
    path = tmp_path / "bomb.pt"
    torch.save(state, path)
    with pytest.raises(WeightsError, match=r"pickled objects.*not read.*state_dict"):
        read_weights(path)
    path.write_bytes(pickle.dumps(state, protocol=protocol))
    with pytest.raises(WeightsError):
        read_weights(path)
    assert not (tmp_path / "crater").exists()


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="does not exist"):
        read_weights(tmp_path / "absent.pt")
    with pytest.raises(WeightsError, match="is a folder"):
        read_weights(tmp_path)
    os.mkfifo(tmp_path / "pipe")  # without a writer: to open it would hang
    with pytest.raises(WeightsError, match=r"pipe cannot be read: it is a pipe.*--weights a file"):
        read_weights(tmp_path / "pipe")
    path = tmp_path / "weights"
    for content in (b"", b"hello"):
        path.write_bytes(content)
        with pytest.raises(WeightsError, match="neither a safetensors file"):
            read_weights(path)
    for content in (b"PK\x03\x04 no archive", b"\x80\x02 no pickle"):
        path.write_bytes(content)
        with pytest.raises(WeightsError, match=r"torch\.save"):
            read_weights(path)
    whole = safetensors.torch.save({"a": torch.ones(8)})
    path.write_bytes(whole[:-4])
    with pytest.raises(WeightsError, match="damaged safetensors"):
        read_weights(path)
    torch.save(mlp(4, 3, 1).state_dict(), path)
    with zipfile.ZipFile(path, "a") as archive:  # what distinguishes an archive of a program
        folder = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{folder}/constants.pkl", pickle.dumps(()))
    with pytest.raises(WeightsError, match="TorchScript program"):
        read_weights(path)


SHAPES = [(8, 30), *[(8, 8)] * 10, (1, 8)]
NUMBERED = {f"{i}.weight": shape for i, shape in enumerate(SHAPES)}
ORDERED: dict[str, tuple[dict[str, tuple[int, ...]], str, list[str]]] = {
    # as safetensors has them: 0, 1, 10, 11, 2, ...
    "names that sort out of order": (dict(sorted(NUMBERED.items())), "safetensors", [*NUMBERED]),
    "names in reverse": (
        {"a_out": (1, 8), "b": (8, 8), "c_in": (8, 30)},
        "safetensors",
        ["c_in", "b", "a_out"],
    ),
    "a torch file's own order": (
        {"z": (8, 30), "b": (8, 8), "a": (8, 8), "y": (1, 8)},
        "torch",
        ["z", "b", "a", "y"],
    ),
}


@pytest.mark.parametrize("case", ORDERED)
def test_layers_are_in_order(case: str) -> None:
    shapes, kind, names = ORDERED[case]
    layers = find_layers(file_of(shapes, kind))
    assert [layer.weight for layer in layers.layers] == names
    assert (layers.note == "") == (case != "names in reverse")
    assert sorted(["10.weight", "2.bias", "2.weight"], key=natural_key)[-1] == "10.weight"


def test_without_names_the_chain_of_shapes_decides() -> None:
    shapes = {"body.weight": (6, 8), "head.weight": (1, 6), "stem.weight": (8, 30)}
    layers = find_layers(file_of(shapes, "safetensors"))
    assert layers.architecture == "mlp:30-8-6-1"
    assert "found from their shapes" in layers.note
    assert "exchanged" not in layers.note
    shapes |= {"body.weight": (8, 8), "bulk.weight": (8, 8), "head.weight": (1, 8)}
    layers = find_layers(file_of(shapes, "safetensors"))
    assert layers.architecture == "mlp:30-8-8-8-1"
    assert "stem.weight, body.weight, bulk.weight, head.weight was taken" in layers.note


@pytest.mark.parametrize(
    ("weight", "bias"),
    [("fc{}.weight", "fc{}.bias"), ("W{}", "b{}"), ("fc{}_weight", "fc{}_bias"), ("m{}", "c{}")],
)
def test_biases_are_found_by_name_or_by_shape(weight: str, bias: str) -> None:
    shapes = {weight.format(1): (8, 30), weight.format(2): (1, 8)}
    assert find_layers(file_of(shapes)).bias == "none"
    first = shapes | {bias.format(1): (8,)}
    if bias[0] != "c":  # a single vector with a strange name is left as unknown
        assert find_layers(file_of(first)).bias == "first"
    layers = find_layers(file_of(first | {bias.format(2): (1,)}))
    assert (layers.bias, layers.unknown) == ("all", ())
    assert [layer.bias for layer in layers.layers] == [bias.format(1), bias.format(2)]
    with pytest.raises(WeightsError, match="no layer, in the first, or in all"):
        find_layers(file_of({"0.weight": (8, 30), "2.weight": (1, 8), "2.bias": (1,)}))


def test_normalisations_and_other_strangers_are_named() -> None:
    net = nn.Sequential(
        nn.Linear(30, 8), nn.BatchNorm1d(8), nn.ReLU(),
        nn.Linear(8, 6), nn.LayerNorm(6), nn.PReLU(), nn.Linear(6, 1),
    )  # fmt: skip
    shapes = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    layers = find_layers(file_of(shapes | {"temperature": (), "pos.grid": (3, 1, 1)}))
    assert layers.architecture == "mlp:30-8-6-1"
    kinds = {unknown.name: unknown.kind for unknown in layers.unknown}
    assert kinds == {
        "1": "normalisation", "4": "normalisation", "5": "activation", "temperature ()": "other",
        "pos.grid (3, 1, 1)": "other",
    }  # fmt: skip


def test_what_fits_as_a_bias_is_named_with_the_renaming_that_makes_it_one() -> None:
    shapes = {"fc1.weight": (8, 30), "fc1.shift": (8,), "fc2.weight": (1, 8), "odd": (5,)}
    bias, odd = find_layers(file_of(shapes)).unknown
    said = "fc1.shift (8,) (if it is the bias of fc1.weight, rename it to fc1.bias)"
    assert (bias.name, odd.name) == (said, "odd (5,)")
    renamed = {name.replace("shift", "bias"): shape for name, shape in shapes.items()}
    assert [unknown.name for unknown in find_layers(file_of(renamed)).unknown] == ["odd (5,)"]


def test_batch_norm_s_counter_is_no_bad_integer_and_weight_norm_is_recognised(
    tmp_path: Path,
) -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    found = read_weights(saved(tmp_path, net.state_dict()))
    assert [unknown.kind for unknown in find_layers(found).unknown] == ["normalisation"]
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), nn.Linear(4, 1))
    shapes = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    with pytest.raises(WeightsError, match="weight norm"):
        find_layers(file_of(shapes))


def test_a_convolution_tells_the_images_shape() -> None:
    shapes = {"conv.weight": (4, 3, 3, 3), "fc.weight": (7, 4 * 30 * 30), "out.weight": (1, 7)}
    layers = find_layers(file_of(shapes))
    assert (layers.architecture, layers.shape) == ("conv:3x4:3072-7-1", (3, 32, 32))
    assert "if they are of 30x30 it has padding" in layers.note
    assert find_layers(file_of(shapes), (3, 32, 32)) == replace(layers, note="")
    oblong = find_layers(file_of(shapes | {"fc.weight": (7, 4 * 6 * 10)}), (3, 8, 12))
    assert oblong.architecture == "conv:3x4:288-7-1"
    with pytest.raises(WeightsError, match="on images of 3x28x28"):
        find_layers(file_of(shapes), (3, 28, 28))
    with pytest.raises(WeightsError, match="has padding, by the 900 places"):
        find_layers(file_of(shapes), (3, 30, 30))
    with pytest.raises(WeightsError, match="without padding"):
        find_layers(file_of(shapes | {"fc.weight": (7, 4 * 15 * 16)}))
    with pytest.raises(WeightsError, match="square kernel"):
        find_layers(file_of(shapes | {"conv.weight": (4, 3, 3, 5)}))
    with pytest.raises(WeightsError, match="2 convolutions"):
        find_layers(file_of({"c0.weight": (3, 3, 1, 1)} | shapes))


def test_a_shape_that_does_not_fit_is_refused() -> None:
    shapes = {"0.weight": (8, 48), "2.weight": (1, 8)}
    assert find_layers(file_of(shapes), (3, 4, 4)).shape == (3, 4, 4)
    with pytest.raises(WeightsError, match="takes 48 numbers, but images of 3x5x5 have 75"):
        find_layers(file_of(shapes), (3, 5, 5))


# Files that people have beside plain networks


def state(*sizes: int, bias: bool = True) -> State:
    return dict(mlp(*sizes, bias=bias).state_dict())


WIDE = state(48, 8, 4)


def under(prefix: str, tensors: State = WIDE) -> State:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def ones(**shapes: tuple[int, ...]) -> State:
    return {name: torch.ones(shape) for name, shape in shapes.items()}


def with_extra(value: Tensor) -> State:
    return {"0.weight": torch.ones(5, 12), "extra": value}


def adapters(names: str, *modules: str) -> State:
    down, up = names.split()
    return {f"{m}.{k}": torch.ones(2, 8) for m in modules for k in (down, up)}


WHOLE, COUNT = torch.tensor(7), torch.tensor(True)
READ: dict[str, tuple[dict[str, Any], str]] = {
    "SWA": ({"n_averaged": WHOLE} | under("module."), "n_averaged (a counter)"),
    "EMA": ({"initted": COUNT, "step": WHOLE} | under("ema_model."), "initted (a counter)"),
    "EMA beside": (
        {"step": WHOLE} | under("online_model.") | under("ema_model.", state(48, 8, 4)),
        "4 tensors such as ema_model.0.weight (an average over steps)",
    ),
    "EMA of Lightning": (
        under("model.")
        | {"model_ema.decay": torch.ones(()), "model_ema.0weight": torch.ones(8, 48)},
        "model_ema.decay (a counter)",
    ),
    "plain numbers": (WIDE | {"epoch": 3, "acc": 0.5}, "epoch (a int)"),
    "indices and masks": (
        WIDE | {"position_ids": torch.arange(3)[None], "mask": torch.ones(2, 2) > 0},
        "position_ids (indices)",
    ),
    "Opacus, compiled": (under("_orig_mod._module."), ""),
}


@pytest.mark.parametrize("case", READ)
def test_what_is_no_weight_is_left_out_and_said(case: str, tmp_path: Path) -> None:
    saved_state, said = READ[case]
    torch.save(saved_state, tmp_path / "net.pt")
    file = read_weights(tmp_path / "net.pt")
    assert find_layers(file).architecture == "mlp:48-8-4"
    torch.testing.assert_close(torch.from_numpy(file.tensors["0.weight"]), WIDE["0.weight"])
    assert said in "; ".join(file.left_out)


TURNED = {n: t.T.contiguous() if t.ndim == 2 else t for n, t in state(48, 8, 48).items()}
ADAM_STATE = {"state": {0: {"exp_avg": torch.ones(2, 2)}}, "param_groups": [{}]}
NAMED: dict[str, tuple[Any, str]] = {
    "nothing": ({}, "no tensors"),
    "numbers": ({"a": torch.ones(2), "epoch": 3}, r"holds epoch \(int\)"),
    "a whole model": (mlp(4, 3, 1), r"Sequential.*torch\.save\(net\.state_dict\(\)"),
    "one int8": (with_extra(torch.ones(3, 3, dtype=torch.int8)), "extra .* is quantised"),
    "complex": (with_extra(torch.ones(3, dtype=torch.complex64)), "extra .* is complex64"),
    "sparse": (with_extra(torch.eye(3).to_sparse()), "extra .* is sparse"),
    "diverged": (with_extra(torch.tensor([1.0, torch.nan, torch.inf])), "2 of 3 entries"),
    "one layer": (ones(w=(1, 30)), "single dense layer"),
    "no matrix": (ones(emb=(3, 4, 5)), "no dense layer"),
    "no chain": (ones(a=(8, 30), b=(1, 9)), "make no chain"),
    "W1": (ones(W1=(30, 8), W2=(8, 1)), r"stored as \(in, out\).*W1 is \(30, 8\).*transpose"),
    "in": ({"in": torch.ones(30, 8), "out": torch.ones(8, 1)}, r"stored as \(in, out\).*in is"),
    "three": (ones(b=(30, 8), a=(8, 6), c=(6, 1)), r"stored as \(in, out\).*b is \(30, 8\)"),
    "peft": (adapters("lora_A.weight lora_B.weight", "base.fc1", "base.fc2"), "LoRA .*merge_and"),
    "kohya": (adapters("lora_down.weight lora_up.weight", "lora_unet_0"), "LoRA adapters .*merge"),
    "peft, whole": ({"fc1.base_layer.weight": torch.ones(8, 48)} | WIDE, "LoRA adapters .*merge"),
    "optimiser": (ADAM_STATE, "state of an optimiser"),
    "moments": ({"0.exp_avg": torch.ones(8, 48)}, "an optimiser's state"),
    "torch_ema": ({"decay": 0.9, "shadow_params": [*WIDE.values()]}, "shadow_params.*copy_to"),
    "list": ([*WIDE.values()], "list of 4 tensors without names"),
    "int8": ({n: t.to(torch.int8) for n, t in WIDE.items()}, "is quantised"),
    "GPTQ": ({"0.qweight": torch.ones(4, 4, dtype=torch.int32)}, "is quantised"),
    "recurrent": (dict(nn.LSTM(8, 8).state_dict()), "recurrent"),
    "transformer": (dict(nn.TransformerEncoderLayer(8, 2).state_dict()), "attention"),
    "embedding": ({"emb.weight": torch.ones(99, 48)} | WIDE, "emb.weight is of an embedding"),
    "diffusion": (under("time_mlp.", state(1, 8, 8)) | under("net.", WIDE), "diffusion"),
    "generator": (state(8, 9, 48), "takes 8 numbers and gives 48: a generator"),
    "generator without biases": (state(8, 9, 48, bias=False), "a generator"),
    "Keras by its biases": (TURNED, r"stored as \(in, out\)"),
    "JAX by its names": ({"a.kernel": torch.ones(9, 8), "b.kernel": torch.ones(8, 9)}, "in, out"),
    "tied": ({"w": torch.ones(8, 48), "b": torch.ones(8), "c": torch.ones(48)}, "an autoencoder"),
    "Conv1d": ({"c.weight": torch.ones(3, 1, 5)} | WIDE, "c.weight"),
    "encoder": (
        {f"encoder.{i}.weight": torch.ones(2, 2, 3, 3) for i in range(2)},
        "palimpsest attack autoencoder",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_what_is_no_plain_network_is_named_with_the_next_step(case: str, tmp_path: Path) -> None:
    saved_state, said = NAMED[case]
    torch.save(saved_state, tmp_path / "net.pt")
    with pytest.raises(WeightsError, match=said) as refused:
        find_layers(read_weights(tmp_path / "net.pt"))
    assert "Keras" not in str(refused.value) or "in, out" in said


FORMATS: dict[str, tuple[str, bytes | str, str]] = {
    "HDF5": ("net.h5", b"\x89HDF\r\n\x1a\n" + bytes(64), "HDF5 file, as Keras writes"),
    "npz": ("net.npz", "w.npy", "numpy arrays"),
    "Keras": ("net.keras", "model.weights.h5", "Keras archive"),
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
    if isinstance(content, str):  # an archive with such a member
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(content, b"")
    else:
        path.write_bytes(content)
    with pytest.raises(WeightsError, match=said):
        read_weights(path)


def test_advice_is_about_the_option_that_named_the_file(tmp_path: Path) -> None:
    torch.save(tuple(WIDE.values()), tmp_path / "g.pt")
    with pytest.raises(WeightsError, match=r"tuple of 4 tensors.*p\.grad for n, p") as refused:
        read_weights(tmp_path / "g.pt", "--gradients")
    assert "net.state_dict()" not in str(refused.value)
    with pytest.raises(WeightsError, match="give --initial a file"):
        read_weights(tmp_path / "absent", "--initial")


def test_a_safetensors_header_of_any_length_is_no_pickle(tmp_path: Path) -> None:
    """The first byte of a header of 128, 384, ... bytes is that of a pickle."""
    path = tmp_path / "net.safetensors"
    for n in range(200):
        safetensors.torch.save_file(WIDE, path, metadata={"n": "x" * n})
        assert read_weights(path).kind == "safetensors"


@pytest.mark.parametrize("shape", [(3,), (3, 1, 1), (1, 3, 1, 1), (1,), (1, 1, 1, 1), (1, 48)])
def test_constants_that_normalise_inputs_are_no_layers(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    constants = {"norm.mean": torch.full(shape, 0.5), "norm.std": torch.full(shape, 0.2)}
    torch.save(constants | WIDE, tmp_path / "net.pt")
    layers = find_layers(read_weights(tmp_path / "net.pt"))
    assert (layers.architecture, layers.unknown) == ("mlp:48-8-4", ())
    torch.save({"shift": torch.full((1, 3, 1, 1), 0.5)} | WIDE, tmp_path / "net.pt")
    (unknown,) = find_layers(read_weights(tmp_path / "net.pt")).unknown
    assert "shift (1, 3, 1, 1)" in unknown.name
