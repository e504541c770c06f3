"""Restorers for the tests: trained ones that were never trained, and one that changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from recon_core.restore import EDM, BFDnCNN, RegressionUNet, Restorer
from storage.checkpoints import save_checkpoint
from tasks.restoring.restore import OpenRestorer
from tasks.training.train import SCHEMA, VERSION

SIZE = 8
TINY_EDM = EDM(size="tiny", resolution=SIZE, n_steps=3)
TINY_BF_DNCNN = BFDnCNN(depth=3, n_channels=4, patch=2)
TINY_UNET = RegressionUNet(size="tiny", resolution=SIZE)


def trained(folder: Path, restorer: Restorer = TINY_EDM, *, seed: int = 0) -> Path:
    """A folder as `tasks.training.train` leaves it, with random weights in every layer."""
    net = restorer.build(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():  # a fresh EDM's last layer is 0: it ignores its input
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    arrays = {name: value.detach().numpy() for name, value in net.state_dict().items()}
    card = {"schema": SCHEMA, "version": VERSION, "restorer": asdict(restorer)}
    folder.mkdir(parents=True)
    save_checkpoint(folder, "model", arrays, card)
    return folder


class Identity:
    """Gives every picture back; counts what it is given."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def restore(self, net: nn.Module, condition: Tensor, **_how: Any) -> Tensor:
        self.given.append(len(condition))
        return condition.clone().unsqueeze(0)


def identity() -> OpenRestorer:
    return OpenRestorer(Identity(), nn.Identity(), "cpu", "identity", "0" * 64)


def pixels(n: int, *, size: int = SIZE, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random pictures (n, 3, size, size), every channel and corner different."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 3, size, size), dtype=np.uint8)


def floats(n: int, **which: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return pixels(n, **which).astype(np.float32) / 255


def picture_folder(folder: Path, pictures: np.ndarray[Any, Any]) -> Path:
    """PNG files p00.png, p01.png, ... of pictures (n, 3, h, w)."""
    folder.mkdir(parents=True, exist_ok=True)
    for k, picture in enumerate(pictures):
        rows = np.ascontiguousarray(picture.transpose(1, 2, 0))
        Image.fromarray(rows).save(folder / f"p{k:02d}.png")
    return folder


def read(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """(3, h, w) of a colour PNG, (h, w) of a grey one."""
    with Image.open(path) as image:
        rows = np.asarray(image)
    return rows.transpose(2, 0, 1) if rows.ndim == 3 else rows


def contents(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Every file below `folder`, by its path."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path.read_bytes()


def network_of(pictures: np.ndarray[Any, Any], weights: Path, *, start: Path | None = None) -> Path:
    """A file of a network whose first layer moved by random multiples of pictures (n, c, h, w)
    less their mean; in `start` what it was before."""
    images = torch.from_numpy(pictures.astype(np.float32) / 255).flatten(1)
    generator = torch.Generator().manual_seed(3)
    shapes = {"0.weight": (40, images.shape[1]), "1.weight": (1, 40)}
    begun = {name: torch.randn(s, generator=generator) * 1e-4 for name, s in shapes.items()}
    mixing = torch.randn(40, len(images), generator=generator)
    moved = begun["0.weight"] + mixing @ (images - images.mean(0))
    save_file({**begun, "0.weight": moved}, weights)
    if start is not None:
        save_file(begun, start)
    return weights
