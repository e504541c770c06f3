"""What is made of a file: the function that torch's own network computes, whatever its form."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path

import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor, nn

from recon_core.victims.autoencoder import UNet, initial_weights
from storage.errors import SourceError
from storage.weights import WeightFile, WeightsError
from tasks.attack_file.networks import own_description
from tasks.attack_file.pictures import read_source, shape_of, size_of
from tasks.families.autoencoder.inputs import (
    AutoencoderJob,
    AutoencoderVictim,
    prepare_autoencoder,
    read_material,
    read_victim,
    shape_hint,
)
from tasks.families.autoencoder.networks import (
    Architecture,
    parse_architecture,
)
from tasks.study.products import write_weights
from tests.tasks.families.weights.attack_victims import write_pictures

SHAPE = (3, 4, 4)


def draw(n: int = 5, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> Tensor:
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed))


def dense(*middle: nn.Module, d: int = 48) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(d, 10), *middle, nn.Linear(10, d))


def job(weights: Path, **more: object) -> AutoencoderJob:
    return AutoencoderJob(weights=weights, out=weights.parent / "out", data="photos", **more)  # type: ignore[arg-type]


def victim_of(
    weights: Path, hint: tuple[int, int, int] | None = None, **more: object
) -> AutoencoderVictim:
    return read_victim(job(weights, **more), lambda: hint)


@pytest.mark.parametrize(
    ("activation", "module"),
    [
        ("relu", nn.ReLU()), ("leaky_relu", nn.LeakyReLU(0.2)), ("softplus", nn.Softplus()),
        ("gelu", nn.GELU()), ("elu", nn.ELU()), ("silu", nn.SiLU()), ("tanh", nn.Tanh()),
        ("sigmoid", nn.Sigmoid()), (None, nn.PReLU(init=0.3)), ("prelu", nn.PReLU(10, 0.4)),
    ],
    ids=str,
)  # fmt: skip
def test_dense_networks_are_torchs(tmp_path: Path, activation: str, module: nn.Module) -> None:
    net = nn.Sequential(*dense(module), nn.Sigmoid())
    torch.save(net.state_dict(), tmp_path / "net.pt")
    said = Architecture(activation=activation, leak=0.2, last="sigmoid")  # type: ignore[arg-type]
    victim = victim_of(tmp_path / "net.pt", network=said)
    x = draw()
    with torch.no_grad():
        expected = net(x.flatten(1)).view_as(x)
    assert torch.equal(victim.function("cpu")(x), expected)
    assert victim.shape == SHAPE
    assert victim.facts["architecture"] == "fc:48-10-48"


@pytest.mark.parametrize("activation", ["leaky_relu", "prelu"])
@pytest.mark.parametrize("skips", [True, False])
def test_u_nets_by_name_and_by_order(tmp_path: Path, skips: bool, activation: str) -> None:
    network = UNet(channels=(4, 5, 6), convolutions=1, skips=skips, activation=activation)  # type: ignore[arg-type]
    model = network.on((3, 8, 8))
    weights = initial_weights(model, [torch.Generator().manual_seed(0)], dtype=torch.float32)
    state = {name: tensor[0].clone() for name, tensor in weights.items()}
    x = draw(shape=(3, 8, 8))
    expected = model.forward(weights, x[None])[0]
    safetensors.torch.save_file(state, tmp_path / "ours.safetensors")
    ours = victim_of(tmp_path / "ours.safetensors", hint=(3, 8, 8))
    assert torch.equal(ours.function("cpu")(x), expected)
    assert ("with skips" in ours.facts["architecture"]) == skips
    renamed = {f"layer{i}.tensor": t.reshape(t.shape or (1,)) for i, t in enumerate(state.values())}
    torch.save(renamed, tmp_path / "theirs.pt")
    said = Architecture(arch="unet:4-5-6", convolutions=1, skips=skips)
    theirs = victim_of(tmp_path / "theirs.pt", hint=(3, 8, 8), network=said)
    assert torch.equal(theirs.function("cpu")(x), expected)
    wrong = Architecture(arch="unet:4-5-6", convolutions=1, skips=not skips)
    with pytest.raises(WeightsError, match=r"number \d+ layer\d+\.tensor is"):
        victim_of(tmp_path / "theirs.pt", hint=(3, 8, 8), network=wrong)
    with pytest.raises(ValueError, match="give --shape"):
        victim_of(tmp_path / "ours.safetensors")
    with pytest.raises(WeightsError, match="multiples of 4"):
        victim_of(tmp_path / "ours.safetensors", shape=(3, 6, 6))


def test_our_own_files_tell_everything(tmp_path: Path) -> None:
    network = UNet(channels=(4, 5), convolutions=1, activation="softplus")
    model = network.on((1, 8, 8))
    weights = initial_weights(model, [torch.Generator().manual_seed(0)], dtype=torch.float32)
    path = tmp_path / "own.safetensors"
    write_weights(path, weights, {"network": asdict(network), "shape": [1, 8, 8]})
    victim = victim_of(path)
    x = draw(shape=(1, 8, 8))
    assert torch.equal(victim.function("cpu")(x), model.forward(weights, x[None])[0])
    assert (victim.shape, victim.facts["activation"]) == ((1, 8, 8), "softplus")
    other = victim_of(path, network=Architecture(activation="relu"))
    assert other.facts["activation"] == "relu"
    torch.save({f"t{i}": t[0] for i, t in enumerate(weights.values())}, tmp_path / "grey.pt")
    said = Architecture(arch="unet:4-5", convolutions=1, activation="softplus")
    grey = victim_of(tmp_path / "grey.pt", hint=(3, 8, 8), network=said)  # a bias of one number
    assert torch.equal(grey.function("cpu")(x), model.forward(weights, x[None])[0])


def test_inputs_that_were_normalised_and_gradients_where_they_are_asked_for(tmp_path: Path) -> None:
    net = dense(nn.ReLU())
    torch.save(net.state_dict(), tmp_path / "net.pt")
    numbers = {"mean": (0.5, 0.4, 0.3), "std": (0.25, 0.5, 0.125)}
    f = victim_of(tmp_path / "net.pt", network=Architecture(activation="relu"), **numbers).function
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in numbers.values())
    x = draw()
    with torch.no_grad():
        expected = net(((x - mean) / std).flatten(1)).view_as(x) * std + mean
    assert torch.allclose(f("cpu")(x), expected)
    assert not f("cpu")(x).requires_grad
    x.requires_grad_()
    f("cpu")(x).sum().backward()
    assert x.grad is not None
    assert bool((x.grad != 0).any())


class OneRow(nn.Module):
    """A program that was made for one image at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x.reshape(1, 48).reshape(1, 3, 4, 4)


class Flat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 2
        return 0.25 * x


def save_script(module: nn.Module, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(module), str(path))
    return path


def test_programs_say_or_show_what_they_take(tmp_path: Path) -> None:
    x = draw()
    one = victim_of(save_script(OneRow(), tmp_path / "one.pt"), shape=SHAPE, trust=True)
    assert torch.allclose(one.function("cpu")(x), 0.5 * x)
    assert one.facts["rows at once"] == "1"
    flat = victim_of(save_script(Flat(), tmp_path / "flat.pt"), hint=SHAPE, trust=True)
    assert torch.equal(flat.function("cpu")(x), 0.25 * x)
    assert flat.facts["input"] == "vectors"
    with pytest.raises(ValueError, match="give --shape"):
        victim_of(tmp_path / "flat.pt", trust=True)
    with pytest.raises(WeightsError, match="Nothing of it was run"):
        victim_of(tmp_path / "flat.pt", shape=SHAPE)
    program = torch.export.export(nn.Hardtanh(0, 1), (x,))
    torch.export.save(program, tmp_path / "five.pt2")
    five = victim_of(tmp_path / "five.pt2", trust=True)
    assert five.shape == SHAPE
    many = draw(13)
    assert torch.equal(five.function("cpu")(many), many)
    with pytest.raises(WeightsError, match="takes inputs of 3x4x4"):
        victim_of(tmp_path / "five.pt2", shape=(3, 8, 8), trust=True)


def test_another_activation_is_named_if_it_fits(tmp_path: Path) -> None:
    images = draw(4)
    write_pictures(tmp_path / "images", images, ("",))
    first, last = nn.Linear(48, 48).double(), nn.Linear(48, 48).double()
    middle = torch.tensor(-1.0, dtype=torch.float64)  # around which softplus is nearly linear
    slope = 1e-3 * middle.sigmoid()
    for layer, scale, shift in (
        (first, torch.tensor(1e-3), middle),
        (last, 1 / slope, -nn.functional.softplus(middle) / slope),
    ):
        layer.weight.data = scale * torch.eye(48, dtype=torch.float64)
        layer.bias.data.fill_(float(shift))
    torch.save(nn.Sequential(first, nn.Softplus(), last).state_dict(), tmp_path / "s.pt")
    data = f"folder:{tmp_path / 'images'}"
    prepared = prepare_autoencoder(
        AutoencoderJob(weights=tmp_path / "s.pt", out=tmp_path, data=data)
    )
    said = " ".join(finding.text for finding in prepared.preflight.findings)
    assert prepared.preflight.stopped
    assert "With --activation softplus the error is" in said


def test_grey_pictures_and_divided_folders(tmp_path: Path) -> None:
    grey = draw(4, (1, 4, 4)).mul(255).round() / 255
    for name in ("train", "test"):
        write_pictures(tmp_path / name, grey.expand(-1, 3, -1, -1) if name == "train" else draw(3))
    torch.save(dense(nn.ReLU(), d=16).state_dict(), tmp_path / "net.pt")
    asked = AutoencoderJob(
        weights=tmp_path / "net.pt", out=tmp_path, data=f"folder:{tmp_path}", limit=3
    )
    victim = read_victim(asked, lambda: shape_hint(asked))
    assert victim.shape == (1, 4, 4)
    material = read_material(asked, victim.shape)
    assert material.train is not None
    assert material.control is not None
    assert (len(material.train), len(material.control)) == (3, 3)
    assert all(any(torch.equal(image, g) for g in grey) for image in material.train.images)
    assert [(case.mask_name, case.side) for case in material.cases] == [
        ("random", "train"), ("random", "control"), ("half", "train"), ("half", "control"),
    ]  # fmt: skip
    for case in material.cases:
        assert case.mask is not None
        assert case.original is not None
        assert torch.equal(case.y, case.original * case.mask)
    again = read_source(asked.data or "", "train", (1, 4, 4), 3, 0)
    assert torch.equal(again.images, material.train.images)
    with pytest.raises(SourceError, match="is not a folder"):
        read_source("folder:absent", "all", (1, 4, 4), 3, 0)


def test_architectures_and_shapes_are_read() -> None:
    assert parse_architecture("fc:48-10-48") == ("fc", (48, 10, 48))
    assert parse_architecture("unet:16-32") == ("unet", (16, 32))
    for text in ("fc:48-48", "fc:48-10-47", "unet:", "mlp:3-3-3", "fc:a-b-a", ""):
        with pytest.raises(ValueError, match="expected fc:3072"):
            parse_architecture(text)
    shapes = {3072: (3, 32, 32), 784: (1, 28, 28), 300: (3, 10, 10), 50: None}
    assert {d: shape_of(d) for d in shapes} == shapes
    sizes = {"cifar10:x": (32, 32), "mnist:x": (28, 28), "tiny-imagenet:x": (64, 64)}
    sizes |= {"digits": (8, 8), "photos": None}  # tiles of any side
    assert {data: size_of(data) for data in sizes} == sizes


def test_pictures_that_cannot_be_read_are_left_out_when_asked(tmp_path: Path) -> None:
    """The first one, too, which says what size they have; names are printable."""
    for number, name in enumerate(["b\x1b", "c\udcff", "d"]):
        Image.new("RGB", (4, 4), (number, 9, 9)).save(tmp_path / f"{name}.png")
    (tmp_path / "a.png").write_bytes(b"no picture")
    source = f"folder:{tmp_path}"
    assert size_of(source) == (4, 4)
    with pytest.raises(SourceError, match=r"a\.png cannot be read as a picture"):
        read_source(source, "all", (3, 4, 4), 9, 0)
    named = read_source(source, "all", (3, 4, 4), 9, 0, skip_corrupt=True)
    assert named.names == (r"b\x1b.png", r"c\xff.png", "d.png")
    assert named.images[:, 0, 0, 0].tolist() == pytest.approx([0, 1 / 255, 2 / 255])
    assert named.facts["left out"] == "1 that cannot be read: a.png (not a known picture format)"


@pytest.mark.parametrize("announced", [2**63, 2**40])
def test_a_header_is_believed_as_far_as_the_file_goes(announced: int, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(announced.to_bytes(8, "little") + b"[" * 100_000)
    assert own_description(WeightFile(path, "safetensors", {}, "")) is None


def test_a_folder_without_splits_is_divided_as_squares_alone(tmp_path: Path) -> None:
    Image.new("RGB", (6, 4)).save(tmp_path / "a.png")
    assert read_source(f"folder:{tmp_path}", "all", (3, 4, 6)).images.shape == (1, 3, 4, 6)
    with pytest.raises(ValueError, match="not as 4x6: give --split all"):
        read_source(f"folder:{tmp_path}", "train", (3, 4, 6))
