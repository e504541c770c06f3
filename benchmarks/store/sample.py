"""Parts as a campaign leaves them, and the batches that restorers are trained on.

Made up, but of the shape, sizes and compressibility of the real thing: `benchmarks.store.speed` and
`benchmarks.store.scale` time with them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recon_core.balance import Curation
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.layout import Encoding
from storage.pairs.parts import write_part
from storage.pairs.receipts import Provenance
from tasks.dataset.pair_stream import PairExamples

BATCH = 512
PAIRS_PER_IMAGE = 1400
"""60 million pairs of 43,000 images; decides how often the curation draws a pair: 1.1 times."""
PROVENANCE = Provenance(
    run_first=0,
    fingerprint="benchmark",
    plan_hash="benchmark",
    source_hash="benchmark",
    code_version="benchmark",
    torch_version="none",
    device="cpu",
    threads=1,
    seconds=1.0,
)

Array = npt.NDArray[Any]
Columns = dict[str, Array]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of what is written and read. One part of the paper's campaign has 62 or 63 runs."""

    n_parts: int = 3
    n_runs: int = 62
    n_images: int = 300
    n_pairs: int = 400
    repeats: int = 5
    n_single_rows: int = 300
    n_trainer_batches: int = 60
    trainer_images_per_s: float = 1000
    n_noise_images: int = 50_000

    @property
    def pairs_per_part(self) -> int:
        return self.n_runs * self.n_pairs


QUICK = Sizes(
    n_parts=2,
    n_runs=6,
    n_images=40,
    n_pairs=150,
    repeats=2,
    n_single_rows=20,
    n_trainer_batches=4,
    trainer_images_per_s=20_000,
    n_noise_images=500,
)


def pictures(n: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """(n, 3, 32, 32): smooth, with some texture, so that they compress about as photographs do."""
    coarse = torch.from_numpy(rng.random((n, 3, 6, 6), dtype=np.float32))
    smooth = torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bicubic").numpy()
    smooth += rng.standard_normal(smooth.shape, dtype=np.float32) * 0.03
    return (smooth * 255).clip(0, 255).astype(np.uint8)


def sample_columns(part: int, sizes: Sizes) -> Columns:
    """A part as an attack leaves it: noisy copies of its training images at arbitrary scales.

    Images occur `PAIRS_PER_IMAGE` times on average, some ten times as often as others.
    """
    rng = np.random.default_rng(part)
    n_targets, n_pairs = sizes.n_runs * sizes.n_images, sizes.pairs_per_part
    images = pictures(n_targets, rng)
    run_row = np.repeat(np.arange(sizes.n_runs, dtype=np.int32), sizes.n_images)
    pair_run = np.repeat(np.arange(sizes.n_runs, dtype=np.int32), sizes.n_pairs)
    target_row = pair_run * sizes.n_images + rng.integers(0, sizes.n_images, n_pairs)
    mean_image = images.reshape(sizes.n_runs, sizes.n_images, 3, 32, 32).mean(axis=1) / 255
    x = images[target_row] / np.float32(255) - mean_image.astype(np.float32)[pair_run]
    x += rng.standard_normal(x.shape, dtype=np.float32) * np.float32(0.1)
    x *= np.exp(rng.standard_normal((n_pairs, 1, 1, 1), dtype=np.float32))
    n_images = max(2, sizes.n_parts * n_pairs // PAIRS_PER_IMAGE)
    rates = np.random.default_rng(0).gamma(0.8, size=n_images)
    ssim = rng.random((2, n_pairs), dtype=np.float32)
    per_run = {
        name: rng.random(sizes.n_runs, dtype=np.float32)
        for name in (
            *("train_loss", "train_accuracy", "margin_min", "attack_loss", "kkt_residual"),
            *("residual_relu", "n_iterations", "lr", "lam_lr", "sigma", "lam_min", "alpha"),
        )
    }
    return {f"runs/{name}": values for name, values in per_run.items()} | {
        "runs/run": np.arange(part * sizes.n_runs, (part + 1) * sizes.n_runs),
        "runs/outcome": np.zeros(sizes.n_runs, np.uint8),
        "runs/mean_image": mean_image.astype(np.float32),
        "targets/image": images,
        "targets/image_id": rng.choice(n_images, n_targets, p=rates / rates.sum()),
        "targets/label": rng.integers(0, 2, n_targets),
        "targets/run_row": run_row,
        "targets/augment": rng.random((n_targets, 9), dtype=np.float32),
        "targets/margin": rng.random(n_targets, dtype=np.float32),
        "pairs/reconstruction": x,
        "pairs/target_row": target_row,
        "pairs/run_row": pair_run,
        "pairs/candidate": np.arange(n_pairs),
        "pairs/iteration": rng.choice([10_000, 20_000, 50_000], n_pairs),
        "pairs/ssim_best": ssim.max(axis=0),
        "pairs/ssim_second": ssim.min(axis=0),
        "pairs/confident": np.ones(n_pairs, np.bool_),
    }


def sample_store(root: Path, sizes: Sizes, *, encoding: Encoding = "float16") -> Dataset:
    """A store of `sizes.n_parts` parts."""
    create_or_open(root, {"benchmark": "store"}, encoding=encoding)
    for part in range(sizes.n_parts):
        write_part(root, part, sample_columns(part, sizes), provenance=PROVENANCE)
    return Dataset(root)


def training_examples(
    dataset: Dataset, sizes: Sizes, *, batch_size: int = BATCH, endless: bool = False
) -> PairExamples:
    """The batches that restorers are trained on, with the settings of the paper."""
    return PairExamples(
        dataset,
        batch_size=batch_size,
        seed=0,
        curation=Curation(),
        images_for_noise=noise_images(sizes.n_noise_images),
        endless=endless,
    )


@functools.cache
def noise_images(n: int) -> npt.NDArray[np.uint8]:
    """As many as a source has, of which noise examples are made."""
    return pictures(n, np.random.default_rng(0))
