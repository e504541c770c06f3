"""A small store whose attack planted perfect pictures, and restorers with a known effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from storage.dataset import Dataset, create_or_open
from storage.parts import write_part
from storage.sources import ImageSet
from tests.storage.stores import MANIFEST, provenance

SIZE = 16
N_IMAGES = 4
ITERATIONS = (100, 500)


def image_set(n: int = 40, *, seed: int = 0) -> ImageSet:
    """Smooth random pictures, each touching black and white, so that fitting is exact."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, 3, 5, 5, generator=generator)
    images = nn.functional.interpolate(coarse, (SIZE, SIZE), mode="bilinear", align_corners=True)
    low, high = images.amin(dim=(1, 2, 3), keepdim=True), images.amax(dim=(1, 2, 3), keepdim=True)
    pixels = ((images - low) / (high - low) * 255).round().to(torch.uint8).numpy()
    return ImageSet(
        name="smooth",
        split="heldout",
        images=pixels,
        labels=np.arange(n, dtype=np.int64) % 2,
        class_names=("even", "odd"),
        notes=("Made up for the tests.",),
    )


def planted_columns(
    images: ImageSet, part: int, *, planted: int = N_IMAGES, outcomes: tuple[int, ...] = (0, 0)
) -> dict[str, np.ndarray[Any, Any]]:
    """Two runs of N_IMAGES images; `planted` of them come back exactly at the last iteration.

    A run with outcome 2 (diverged) has no pairs. All other pictures are noise.
    """
    rng = np.random.default_rng(part)
    n_runs = len(outcomes)
    first = part * n_runs * N_IMAGES
    ids = np.arange(first, first + n_runs * N_IMAGES)
    targets = images.images[ids]
    run_of_target = np.repeat(np.arange(n_runs), N_IMAGES)
    mean = targets.reshape(n_runs, N_IMAGES, 3, SIZE, SIZE).mean(axis=1) / 255
    rows = [
        (row, candidate, iteration)
        for row in range(n_runs)
        if outcomes[row] != 2
        for candidate in range(2 * N_IMAGES)
        for iteration in ITERATIONS
    ]
    x = rng.standard_normal((len(rows), 3, SIZE, SIZE)).astype(np.float32)
    for k, (row, candidate, iteration) in enumerate(rows):
        if candidate < planted and iteration == ITERATIONS[-1]:
            x[k] = 1e-3 * (targets[row * N_IMAGES + candidate] / 255 - mean[row])
    index = np.array(rows, np.int64).reshape(-1, 3)
    scalars = ("train_loss", "train_accuracy", "margin_min", "attack_loss", "kkt_residual")
    nothing = np.zeros(len(rows), np.float32)
    return {
        "runs/run": np.arange(part * n_runs, (part + 1) * n_runs, dtype=np.int64),
        "runs/outcome": np.array(outcomes, np.uint8),
        "runs/mean_image": mean.astype(np.float32),
        **{f"runs/{name}": np.zeros(n_runs, np.float32) for name in scalars},
        "targets/image": targets,
        "targets/image_id": ids,
        "targets/label": images.labels[ids],
        "targets/run_row": run_of_target,
        "targets/augment": np.zeros((n_runs * N_IMAGES, 9), np.float32),
        "pairs/reconstruction": x,
        "pairs/target_row": index[:, 0] * N_IMAGES + index[:, 1] % N_IMAGES,
        "pairs/run_row": index[:, 0],
        "pairs/candidate": index[:, 1],
        "pairs/iteration": index[:, 2],
        "pairs/ssim_best": nothing,
        "pairs/ssim_second": nothing,
        "pairs/confident": np.zeros(len(rows), np.bool_),
    }


def planted_store(root: Path, images: ImageSet, *, n_parts: int = 2, **how: Any) -> Dataset:
    """`n_parts` parts of two runs each, generated from `images`."""
    create_or_open(root, MANIFEST)
    for part in range(n_parts):
        write_part(
            root,
            part,
            planted_columns(images, part, **how),
            provenance=provenance(run_first=2 * part, source_hash=images.content_hash),
        )
    return Dataset(root)


class Blender:
    """A stand-in restorer: moves pictures towards grey, with noise from each picture's own seed."""

    def __init__(self, n_given: int | None = None) -> None:
        self.n_given = n_given
        self.n_calls = 0

    def restore(
        self,
        net: nn.Module,
        condition: Tensor,
        *,
        n_samples: int,
        seeds: Tensor,
        progress: Any,
    ) -> Tensor:
        self.n_calls += 1
        n = self.n_given or n_samples
        samples = torch.empty(n, *condition.shape)
        for i, seed in enumerate(seeds.tolist()):
            generator = torch.Generator().manual_seed(seed)
            noise = torch.randn(n, *condition.shape[1:], generator=generator)
            samples[:, i] = (0.8 * condition[i] + 0.1 + 0.1 * noise).clamp(0, 1)
        progress(1.0)
        return samples


def weights(folder: Path, name: str) -> Path:
    """A file for a stand-in restorer to be recognised by."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.safetensors"
    path.write_bytes(name.encode())
    return path
