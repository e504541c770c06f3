"""Embedded images, which need no download: tiles of photographs, and handwritten digits.

Photographs: each of eight that scikit-image ships, the classes, is cut by an unused vertical band
into a left region (`train`) and a right one (`heldout`). Within a region tiles of several scales
(1.5 to 8 source pixels per tile pixel, averaged over areas) are cut on a grid. Nearly constant
tiles (sky, table, the black around the retina) are dropped: any reconstruction of them would look
good.

Digits: the test set of UCI's Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998;
CC BY 4.0, see `digits.txt`), 1,797 grey pictures of 8 x 8, which scikit-learn ships too.
`digits.npz` has its values as they are, uint8 0 to 16, and is made from scikit-learn's copy by

    rows = np.loadtxt("sklearn/datasets/data/digits.csv.gz", delimiter=",", dtype=np.uint8)
    np.savez_compressed("digits.npz", pixels=rows[:, :64].reshape(-1, 8, 8), labels=rows[:, 64])

The first 1,437 are the `train` split, the last 360 `heldout`, 141 to 146 and 33 to 37 of each
digit. Nobody wrote down which of the 13 writers wrote which, so one of them may be in both. No two
pictures are equal.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

from storage.errors import SourceError
from storage.sources.pictures import Pictures

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


PHOTOGRAPHS_NOTES = (
    "Tiles of eight photographs that scikit-image ships; the class is the photograph.",
    f"Train tiles are from the left {TRAIN_FRACTION:.0%} of each photograph, held-out tiles "
    f"from the right {1 - TRAIN_FRACTION - GAP_FRACTION:.0%}; the band between is unused, so "
    "the splits share no pixel at any scale.",
    "Tiles of different scales overlap within a split; nearly constant tiles are left out.",
)

DIGITS_NOTE = (
    "Handwritten digits of 8 x 8 (UCI, Optical Recognition of Handwritten Digits, CC BY 4.0)"
)
N_TRAIN = 1437
LARGEST = 16
"""Pixels count the black ones of 4 x 4, so that 16 is white here (255)."""

_DIGITS = Path(__file__).with_name("digits.npz")


def photograph_tiles(split: str, size: int) -> Pictures:
    """Tiles (n, 3, size, size) and the photograph that each is of. Raises SourceError if this
    scikit-image does not ship one of the photographs."""
    spec = find_spec("skimage")
    if spec is None or spec.origin is None:
        raise SourceError("scikit-image is not installed; install it or use folder:PATH")
    tiles, labels = [], []
    for label, (name, scales) in enumerate(PHOTOGRAPHS.values()):
        path = Path(spec.origin).parent / "data" / name
        if not path.is_file():
            raise SourceError(
                f"this scikit-image does not ship {name}; install scikit-image 0.26 or use "
                "folder:PATH"
            )
        with Image.open(path) as image:
            photograph = image.convert("RGB")
        left, right = region(photograph.width, split)
        for scale in scales:
            side = round(scale * size)
            for top in range(0, photograph.height - side + 1, side):
                for start in range(left, right - side + 1, side):
                    crop = photograph.crop((start, top, start + side, top + side))
                    tile = np.asarray(crop.resize((size, size), Image.Resampling.BOX))
                    if tile.mean(axis=2).std() >= MIN_CONTRAST:
                        tiles.append(tile.transpose(2, 0, 1))
                        labels.append(label)
    if not tiles:
        raise SourceError(f"the photographs are too small for tiles of {size} pixels; use folder:")
    return "photos", np.stack(tiles), np.array(labels, np.int64), tuple(PHOTOGRAPHS)


def region(width: int, split: str) -> tuple[int, int]:
    """First and last+1 column of a photograph that belong to `split`."""
    train_end = int(width * TRAIN_FRACTION)
    if split == "train":
        return 0, train_end
    return train_end + int(width * GAP_FRACTION), width


def digits_pictures(_path: Path, split: str) -> Pictures:
    """Images (n, 3, 8, 8), grey repeated in three channels, and digits (n,). Raises SourceError if
    this installation lacks the file."""
    if not _DIGITS.is_file():
        raise SourceError(f"{_DIGITS} is missing; install palimpsest again or use another source")
    rows = slice(N_TRAIN) if split == "train" else slice(N_TRAIN, None)
    with np.load(_DIGITS, allow_pickle=False) as file:
        pixels, labels = file["pixels"][rows], file["labels"][rows]
    grey = (pixels.astype(np.uint16) * 255 + LARGEST // 2) // LARGEST
    rgb = np.repeat(grey.astype(np.uint8)[:, None], 3, axis=1)
    return "digits", rgb, labels.astype(np.int64), tuple("0123456789")
