"""A tiny network that gives its images back, on disk as a user would have it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor

from recon_core.victims.network import Architecture, Network, Parameters
from recon_core.victims.training import Training, train

SIDE = 12
N_IMAGES = 6


@dataclass(frozen=True)
class VictimFiles:
    """Paths of weights in both formats and of pictures, and what is in them."""

    torch_file: Path
    safetensors_file: Path
    images: Path
    decoys: Path
    architecture: Architecture
    parameters: Parameters
    mean: Tensor


def pictures(n: int, seed: int, side: int = SIDE) -> Tensor:
    """Smooth random pictures (n, 3, side, side), exactly as 8 bits hold them."""
    coarse = torch.rand(n, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
    fine = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bicubic")
    return (fine.clamp(0, 1) * 255).round() / 255


def write_pictures(folder: Path, images: Tensor, classes: tuple[str, ...] = ("a", "b")) -> None:
    """PNG files in class folders, alternating, so that reading them sorts by class."""
    for i, image in enumerate(images):
        path = folder / classes[i % len(classes)]
        path.mkdir(parents=True, exist_ok=True)
        pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(np.ascontiguousarray(pixels)).save(path / f"{i}.png")


def make_victim(folder: Path) -> VictimFiles:
    """Train 432-32-32-1 on six pictures for a third of a second and save everything."""
    images = pictures(N_IMAGES, 0)
    mean = images.mean(0)
    architecture = Network(widths=(32, 32)).on((3, SIDE, SIDE))
    start = architecture.initial([torch.Generator().manual_seed(0)], dtype=torch.float32)
    labels = torch.tensor([[-1.0, 1.0] * (N_IMAGES // 2)])
    inputs = (images - mean).flatten(1)[None]
    trained = train(architecture, start, inputs, labels, training=Training(epochs=400))
    state = architecture.to_state_dict(trained.parameters)
    torch.save({"epoch": 400, "state_dict": state}, folder / "victim.pt")
    safetensors.torch.save_file(state, folder / "victim.safetensors")
    write_pictures(folder / "images", images)
    write_pictures(folder / "decoys", pictures(N_IMAGES, 1))
    return VictimFiles(
        torch_file=folder / "victim.pt",
        safetensors_file=folder / "victim.safetensors",
        images=folder / "images",
        decoys=folder / "decoys",
        architecture=architecture,
        parameters=trained.parameters,
        mean=mean,
    )
