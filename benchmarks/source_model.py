"""Learns the model of images that the span attack comes with, and writes it into the package.

    python -m benchmarks.source_model --images folder:cifar10 [--out FILE]

From the first 1,000 images of every class of the train split, which the victims of the measured
results never saw; minutes on one core. Kept in half precision.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recon_core.attacks.span import source_model
from recon_core.attacks.span.source_model import Learning, SourceModel, learn_source_model
from storage.sources.load import ImageSet, load_images

PER_CLASS = 1000
SEED = 0


def first_of_each_class(images: ImageSet, per_class: int) -> torch.Tensor:
    """(n, c, h, w) in [0, 1]."""
    rows = [np.flatnonzero(images.labels == k)[:per_class] for k in np.unique(images.labels)]
    return torch.from_numpy(images.images[np.sort(np.concatenate(rows))]).float() / 255


def write(model: SourceModel, path: Path) -> None:
    """As an .npz of half precision numbers, compressed."""
    arrays: dict[str, Any] = {n: value.half().numpy() for n, value in model.tensors().items()}
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays, stride=np.array(model.stride))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", required=True, help="folder:PATH, cifar10:PATH, ...")
    beside = Path(source_model.__file__).with_suffix(".npz")
    parser.add_argument("--out", type=Path, default=beside)
    parser.add_argument("--steps", type=int, default=Learning().n_steps)
    options = parser.parse_args()
    images = first_of_each_class(load_images(options.images, split="train"), PER_CLASS)
    generator = torch.Generator().manual_seed(SEED)
    learning = Learning(n_steps=options.steps)
    write(learn_source_model(images, generator=generator, learning=learning), options.out)


if __name__ == "__main__":
    main()
