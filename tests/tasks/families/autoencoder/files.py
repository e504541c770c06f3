"""A tiny autoencoder that remembers its images, on disk in every form that a user may have."""

from __future__ import annotations

import warnings
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from recon_core.victims.autoencoder import FullyConnected, initial_weights
from recon_core.victims.autoencoder_training import AutoencoderTraining, train_autoencoders
from storage.sources.load import load_images
from tests.tasks.families.weights.attack_victims import write_pictures

SIDE = 8
SHAPE = (3, SIDE, SIDE)
D = 3 * SIDE * SIDE
N_IMAGES = 6
WIDTH = 64


class AutoencoderFiles:
    """Where the files of a network are that came to this loss."""

    def __init__(self, folder: Path, loss: float) -> None:
        self.loss = loss
        self.state_dict = folder / "net.pt"
        self.safetensors_file = folder / "net.safetensors"
        self.ours = folder / "ours.safetensors"  # with the names of `FullyConnectedModel`
        self.torchscript = folder / "traced.pt"
        self.exported = folder / "net.pt2"  # for images, any number of rows
        self.exported_fixed = folder / "fixed.pt2"  # for vectors, four rows at once
        self.pictures, self.others = folder / "images", folder / "others"


class OnImages(nn.Module):
    """A dense network as users write it: it flattens by itself."""

    def __init__(self, dense: nn.Sequential) -> None:
        super().__init__()
        self.dense = dense

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x.flatten(1)).view_as(x)


def sequential(tensors: dict[str, Tensor], leak: float = 0.01) -> nn.Sequential:
    """The same network in torch's own layers."""
    layers: list[nn.Module] = []
    depth = sum(name.endswith("weight") for name in tensors)
    for i in range(depth):
        weight = tensors[f"{i}.weight"]
        layer = nn.Linear(weight.shape[1], weight.shape[0])
        layer.load_state_dict({"weight": weight, "bias": tensors[f"{i}.bias"]})
        layers += [layer, *([nn.LeakyReLU(leak)] if i < depth - 1 else [])]
    return nn.Sequential(*layers).eval()


def photographs(split: str, n: int) -> Tensor:
    """Tiles that are far apart in the source."""
    found = load_images("photos", split="train" if split == "train" else "heldout", size=SIDE)
    rows = torch.linspace(0, len(found) - 1, n).long().numpy()
    return torch.from_numpy(found.images[rows]).float() / 255


def trained(images: Tensor, epochs: int = 1500) -> tuple[dict[str, Tensor], float]:
    """Tensors by our names and the loss at which they are."""
    model = FullyConnected(depth=4, width=WIDTH).on(SHAPE)
    start = initial_weights(model, [torch.Generator().manual_seed(1)], dtype=torch.float32)
    training = AutoencoderTraining(epochs=epochs, lr=2e-3, lr_end=2e-5, levels=(1e-30,))
    [found] = train_autoencoders(model, start, images[None], training=training)
    return {name: t[0].clone() for name, t in found.last.weights.items()}, found.last.loss


def make_autoencoder(folder: Path) -> AutoencoderFiles:
    """Train for seconds and save everything."""
    images = photographs("train", N_IMAGES)
    tensors, loss = trained(images)
    net = sequential(tensors)
    files = AutoencoderFiles(folder, loss)
    torch.save(net.state_dict(), files.state_dict)
    safetensors.torch.save_file(dict(net.state_dict()), files.safetensors_file)
    safetensors.torch.save_file(tensors, files.ours)
    write_pictures(files.pictures, images, ("",))
    write_pictures(files.others, photographs("heldout", N_IMAGES), ("",))
    save_programs(OnImages(net), net, files)
    return files


def save_programs(images: nn.Module, flat: nn.Module, files: AutoencoderFiles) -> None:
    """As TorchScript and as programs of torch.export."""
    x = torch.zeros(4, *SHAPE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and still what people have
        torch.jit.save(torch.jit.trace(images, x), str(files.torchscript))
        rows = torch.export.Dim("rows")
        any_rows = torch.export.export(images, (x,), dynamic_shapes=({0: rows},))
        torch.export.save(any_rows, files.exported)
        torch.export.save(torch.export.export(flat, (x.flatten(1),)), files.exported_fixed)
