"""A tiny network that gives its images back, on disk as a user would have it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor

from recon_core.optimisers import Optimiser
from recon_core.victims.network import Architecture, Network, Parameters
from recon_core.victims.training import Training, train
from tasks.families.weights.attack import WeightsJob, run_attacks
from tasks.families.weights.preflight import PreparedWeights, prepare_weights
from tasks.families.weights.results import Results, gather

SIDE = 12
N_IMAGES = 6


@dataclass(frozen=True)
class VictimFiles:
    """Paths of weights in both formats and of pictures, and what is in them; the start is in
    `initial.safetensors` beside them."""

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


def rectangles(n: int, seed: int, side: int = SIDE) -> Tensor:
    """Pictures (n, 3, side, side) of rectangles upon each other: edges, and flat between them."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(n, 3, 1, 1, generator=generator).repeat(1, 1, side, side)
    for image in images:
        for _ in range(12):
            top, left, height, width = (torch.rand(4, generator=generator) * side).int().tolist()
            colour = torch.rand(3, 1, 1, generator=generator)
            image[:, top : top + height // 2 + 2, left : left + width // 2 + 2] = colour
    return (images * 255).round() / 255


def write_pictures(folder: Path, images: Tensor, classes: tuple[str, ...] = ("a", "b")) -> None:
    """PNG files in class folders, alternating, so that reading them sorts by class."""
    for i, image in enumerate(images):
        path = folder / classes[i % len(classes)]
        path.mkdir(parents=True, exist_ok=True)
        pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(np.ascontiguousarray(pixels)).save(path / f"{i}.png")


def attacked(job: WeightsJob) -> tuple[PreparedWeights, Results]:
    """What an attack starts from, and what it leaves."""
    prepared = prepare_weights(job)
    runs = run_attacks(job, prepared.victim, device="cpu", on_progress=lambda _done, _total: None)
    return prepared, gather(job, runs, prepared)


def make_victim(folder: Path) -> VictimFiles:
    """Train 432-32-32-1 on six pictures for a third of a second and save everything."""
    return _trained(
        folder, pictures(N_IMAGES, 0), pictures(N_IMAGES, 1), (32, 32), Training(epochs=400)
    )


def make_spanned(folder: Path) -> VictimFiles:
    """Train 432-40-40-1 on eight pictures with edges, by gradient descent, and save everything."""
    training = Training(epochs=600, optimiser=Optimiser(rule="gd", lr=0.05))
    return _trained(folder, rectangles(8, 0), rectangles(8, 1), (40, 40), training)


def _trained(
    folder: Path, images: Tensor, decoys: Tensor, widths: tuple[int, ...], training: Training
) -> VictimFiles:
    mean = images.mean(0)
    architecture = Network(widths=widths).on((3, SIDE, SIDE))
    start = architecture.initial([torch.Generator().manual_seed(0)], dtype=torch.float32)
    labels = torch.tensor([[-1.0, 1.0] * (len(images) // 2)])
    inputs = (images - mean).flatten(1)[None]
    trained = train(architecture, start, inputs, labels, training=training)
    state = architecture.to_state_dict(trained.parameters)
    torch.save({"epoch": training.epochs, "state_dict": state}, folder / "victim.pt")
    safetensors.torch.save_file(state, folder / "victim.safetensors")
    safetensors.torch.save_file(architecture.to_state_dict(start), folder / "initial.safetensors")
    write_pictures(folder / "images", images)
    write_pictures(folder / "decoys", decoys)
    return VictimFiles(
        torch_file=folder / "victim.pt",
        safetensors_file=folder / "victim.safetensors",
        images=folder / "images",
        decoys=folder / "decoys",
        architecture=architecture,
        parameters=trained.parameters,
        mean=mean,
    )
