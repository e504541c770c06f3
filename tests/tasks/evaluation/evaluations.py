"""A small store whose attack planted perfect pictures, and restorers with a known effect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.parts import write_part
from storage.sources.load import ImageSet
from tasks.evaluation.evaluate import Evaluation, evaluate
from tasks.evaluation.victims import SETTINGS
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
    images: ImageSet,
    part: int,
    *,
    planted: int = N_IMAGES,
    outcomes: tuple[int, ...] = (0, 0),
    attacks: int = 1,
    planted_in: int | None = None,
    n_images: int = N_IMAGES,
) -> dict[str, np.ndarray[Any, Any]]:
    """A run per outcome, `attacks` of them on one victim of `n_images` images.

    `planted` of its images come back exactly at the last iteration: from every attack, or from
    attack number `planted_in` of the victim alone, which then also has the lowest residual. A run
    with outcome 2 or more (diverged, stopped) has no pairs. All other pictures are noise.
    """
    rng = np.random.default_rng(part)
    n_runs = len(outcomes)
    numbers = np.arange(part * n_runs, (part + 1) * n_runs, dtype=np.int64)
    ids = (numbers[:, None] // attacks * n_images + np.arange(n_images)).ravel()
    targets = images.images[ids]
    mean = targets.reshape(n_runs, n_images, 3, SIZE, SIZE).mean(axis=1) / 255
    rows = [
        (row, candidate, iteration)
        for row in range(n_runs)
        if outcomes[row] < 2
        for candidate in range(2 * n_images)
        for iteration in ITERATIONS
    ]
    finds = numbers % attacks == planted_in if planted_in is not None else np.ones(n_runs, bool)
    x = rng.standard_normal((len(rows), 3, SIZE, SIZE)).astype(np.float32)
    for k, (row, candidate, iteration) in enumerate(rows):
        if finds[row] and candidate < min(planted, n_images) and iteration == ITERATIONS[-1]:
            x[k] = 1e-3 * (targets[row * n_images + candidate] / 255 - mean[row])
    index = np.array(rows, np.int64).reshape(-1, 3)
    scalars = ("train_loss", "train_accuracy", "margin_min", "attack_loss")
    residual = np.where(finds, 0.1, 0.5) + 0.01 * numbers if attacks > 1 else np.zeros(n_runs)
    nothing = np.zeros(len(rows), np.float32)
    return {
        **_sweep_columns(numbers, len(ids)),
        "runs/run": numbers,
        "runs/outcome": np.array(outcomes, np.uint8),
        "runs/mean_image": mean.astype(np.float32),
        **{f"runs/{name}": np.zeros(n_runs, np.float32) for name in scalars},
        "runs/kkt_residual": residual.astype(np.float32),
        "targets/image": targets,
        "targets/image_id": ids,
        "targets/label": images.labels[ids],
        "targets/run_row": np.repeat(np.arange(n_runs), n_images),
        "targets/augment": np.zeros((n_runs * n_images, 9), np.float32),
        "pairs/reconstruction": x,
        "pairs/target_row": index[:, 0] * n_images + index[:, 1] % n_images,
        "pairs/run_row": index[:, 0],
        "pairs/candidate": index[:, 1],
        "pairs/iteration": index[:, 2],
        "pairs/ssim_best": nothing,
        "pairs/ssim_second": nothing,
        "pairs/confident": np.zeros(len(rows), np.bool_),
    }


def _sweep_columns(numbers: np.ndarray[Any, Any], n_targets: int) -> dict[str, Any]:
    """Columns of sweeps: the settings of run k are those of k."""
    settings = {f"runs/{name}": 0.1 + 0.01 * numbers for name in SETTINGS}
    columns = {
        **settings,
        "runs/n_iterations": np.full(len(numbers), ITERATIONS[-1]),
        "runs/residual_relu": 0.2 + 0.01 * numbers,
        "targets/margin": np.arange(n_targets) / 8,
    }
    return {name: v.astype(np.float32) for name, v in columns.items()}


def planted_store(root: Path, images: ImageSet, *, n_parts: int = 2, **how: Any) -> Dataset:
    """`n_parts` parts, of two runs each if nothing else is said, generated from `images`."""
    create_or_open(root, {"campaign": MANIFEST})
    return _written(root, images, n_parts, how)


def planted_sweep(
    root: Path, images: ImageSet, *, n_victims: int = 2, attacks: int = 3, **how: Any
) -> Dataset:
    """A store of sweeps: a part per victim, which `attacks` runs attack; what the second of them
    planted came back, nothing of the others, unless `planted_in` says otherwise."""
    sampling = {"attacks_per_victim": attacks}
    campaign = {"experiment": MANIFEST["experiment"], "sampling": sampling, "root_seed": 0}
    create_or_open(root, {"campaign": campaign})
    how = {"outcomes": (0,) * attacks, "attacks": attacks, "planted_in": 1} | how
    return _written(root, images, n_victims, how)


def _written(root: Path, images: ImageSet, n_parts: int, how: dict[str, Any]) -> Dataset:
    n_runs = len(how.get("outcomes", (0, 0)))
    for part in range(n_parts):
        write_part(
            root,
            part,
            planted_columns(images, part, **how),
            provenance=provenance(run_first=n_runs * part, source_hash=images.content_hash),
        )
    return Dataset(root)


def scored(
    out: Path,
    store: Dataset,
    images: ImageSet,
    config: Evaluation,
    *,
    blenders: Mapping[str, Blender] | None = None,
    **how: Any,
) -> dict[str, Any]:
    """The record of an evaluation with these stand-ins, whose files lie beside `out`."""
    made = blenders or {}
    return evaluate(
        config,
        dataset=store,
        heldout=images,
        restorers={name: weights(out.parent, name) for name in made},
        out=out,
        device="cpu",
        load=lambda path, _device: (made[path.stem], nn.Identity()),
        **how,
    )


def evaluated_sweep(
    folder: Path, *, config: Evaluation | None = None, **how: Any
) -> dict[str, Any]:
    """The record in `folder`/out of a planted sweep, with a restorer of one answer (bf_dncnn) and
    one of several (edm)."""
    images = image_set()
    config = config or Evaluation(n_samples=3, grid_rows=5, appendix_rows=6, baselines=("tv",))
    blenders = {"bf_dncnn": Blender(1), "edm": Blender()}
    store = planted_sweep(folder / "store", images, **how)
    return scored(folder / "out", store, images, config, blenders=blenders)


class Blender:
    """A stand-in restorer: moves pictures towards grey, with noise from each picture's own seed."""

    def __init__(self, n_given: int | None = None) -> None:
        self.n_given = n_given
        self.n_calls = 0

    def restore(
        self, net: nn.Module, condition: Tensor, *, n_samples: int, seeds: Tensor, progress: Any
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
