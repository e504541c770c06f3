"""Small classifiers on disk, in every form that a user may have, and pictures for them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from recon_core.victims.split import SplitMLP, SplitNetwork, initial_weights
from tasks.study.products import write_weights
from tests.tasks.families.weights.attack_victims import pictures, write_pictures

SIDE = 16
CLASSES = ("a", "b")
N_IMAGES = 6


class Client(nn.Module):
    """Features of an invertible first layer: what a client must not send."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.LeakyReLU(0.2))
        self.second = nn.Sequential(nn.Conv2d(12, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(8))
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(16, len(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.flatten(self.second(self.first(x))))
        return y


@dataclass(frozen=True)
class ClassifierFiles:
    """Paths; `net` is what is in `exported`, and its first module what is in `torchscript`."""

    net: Client
    exported: Path
    fixed: Path
    torchscript: Path
    pictures: Path
    public: Path


def make_classifier(folder: Path) -> ClassifierFiles:
    """Writes programs of one untrained network, six pictures and six others."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Client().eval()
    x = torch.zeros(4, 3, SIDE, SIDE)
    files = ClassifierFiles(
        net, folder / "net.pt2", folder / "fixed.pt2", folder / "client.pt",
        folder / "images", folder / "public",
    )  # fmt: skip
    with warnings.catch_warnings():  # torch's own, of formats
        warnings.simplefilter("ignore")
        rows = ({0: torch.export.Dim("rows")},)
        torch.export.save(torch.export.export(net, (x,), dynamic_shapes=rows), files.exported)
        torch.export.save(torch.export.export(net, (x,)), files.fixed)
        torch.jit.save(torch.jit.trace(net.first, x), files.torchscript)
    write_pictures(files.pictures, pictures(N_IMAGES, 1, SIDE), CLASSES)
    write_pictures(files.public, pictures(N_IMAGES, 2, SIDE), CLASSES)
    return files


def save_split(
    path: Path, network: SplitNetwork, shape: tuple[int, int, int], n_classes: int, *, about: bool
) -> dict[str, Tensor]:
    """Weights of an untrained network of this project, with its description or without."""
    generator = torch.Generator().manual_seed(0)
    weights = initial_weights(network.on(shape, n_classes), [generator], dtype=torch.float32)
    if about:
        settings = {"kind": network.kind, "cut": network.cut}
        if isinstance(network, SplitMLP):
            settings |= {"widths": list(network.widths)}
        write_weights(path, weights, {"network": settings, "shape": list(shape)})
    else:
        save_file({name: tensor[0].contiguous() for name, tensor in weights.items()}, path)
    return weights
