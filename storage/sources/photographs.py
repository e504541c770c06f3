"""The embedded default: small tiles of the photographs that scikit-image ships, no download.

Each of eight photographs, the classes, is cut by an unused vertical band into a left region
(`train`) and a right one (`heldout`). Within a region tiles of several scales (1.5 to 8 source
pixels per tile pixel, averaged over areas) are cut on a grid. Nearly constant tiles (sky, table,
the black around the retina) are dropped: any reconstruction of them would look good.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from storage.errors import SourceError

PHOTOGRAPHS: dict[str, tuple[str, tuple[float, ...]]] = {
    "astronaut": ("astronaut.png", (1.5, 2, 3, 4)),
    "cat": ("chelsea.png", (1.5, 2, 3)),
    "coffee": ("coffee.png", (1.5, 2, 3, 4)),
    "galaxies": ("hubble_deep_field.jpg", (2, 3, 4)),
    "motorcycle": ("motorcycle_left.png", (1.5, 2, 3, 4)),
    "retina": ("retina.jpg", (3, 4, 6, 8)),
    "rocket": ("rocket.jpg", (1.5, 2, 3, 4)),
    "tissue": ("ihc.png", (1.5, 2, 3, 4)),
}
"""Class name -> file in skimage/data, source pixels per tile pixel at each scale."""

TRAIN_FRACTION = 0.6
GAP_FRACTION = 0.04
MIN_CONTRAST = 10.0


def photograph_tiles(
    split: Literal["train", "heldout"], size: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], tuple[str, ...], tuple[str, ...]]:
    """Tiles uint8 (n, 3, size, size), labels int64 (n,), class names, and notes. Raises SourceError
    if this scikit-image does not ship one of the photographs."""
    tiles: list[npt.NDArray[np.uint8]] = []
    labels: list[int] = []
    for label, (file_name, scales) in enumerate(PHOTOGRAPHS.values()):
        with Image.open(_shipped(file_name)) as image:
            photograph = image.convert("RGB")
        left, right = region(photograph.width, split)
        for scale in scales:
            found = _tiles(photograph, left, right, round(scale * size), size)
            tiles.extend(found)
            labels.extend([label] * len(found))
    if not tiles:
        raise SourceError(f"the photographs are too small for tiles of {size} pixels; use folder:")
    notes = (
        "Tiles of eight photographs that scikit-image ships; the class is the photograph.",
        f"Train tiles are from the left {TRAIN_FRACTION:.0%} of each photograph, held-out tiles "
        f"from the right {1 - TRAIN_FRACTION - GAP_FRACTION:.0%}; the band between is unused, so "
        "the splits share no pixel at any scale.",
        "Tiles of different scales overlap within a split; nearly constant tiles are left out.",
    )
    return np.stack(tiles), np.array(labels, np.int64), tuple(PHOTOGRAPHS), notes


def region(width: int, split: Literal["train", "heldout"]) -> tuple[int, int]:
    """First and last+1 column of a photograph that belong to `split`."""
    train_end = int(width * TRAIN_FRACTION)
    if split == "train":
        return 0, train_end
    return train_end + int(width * GAP_FRACTION), width


def _tiles(
    photograph: Image.Image, left: int, right: int, side: int, size: int
) -> list[npt.NDArray[np.uint8]]:
    """Tiles (3, size, size) of `side` source pixels in columns [left, right), dull ones dropped."""
    tiles = []
    for top in range(0, photograph.height - side + 1, side):
        for start in range(left, right - side + 1, side):
            crop = photograph.crop((start, top, start + side, top + side))
            tile = np.asarray(crop.resize((size, size), Image.Resampling.BOX))
            if tile.mean(axis=2).std() >= MIN_CONTRAST:
                tiles.append(tile.transpose(2, 0, 1))
    return tiles


def _shipped(file_name: str) -> Path:
    spec = find_spec("skimage")
    if spec is None or spec.origin is None:
        raise SourceError("scikit-image is not installed; install it or use folder:PATH")
    path = Path(spec.origin).parent / "data" / file_name
    if not path.is_file():
        raise SourceError(
            f"this scikit-image does not ship {file_name}; install scikit-image 0.26 or use "
            "folder:PATH"
        )
    return path
