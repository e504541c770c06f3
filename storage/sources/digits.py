"""Embedded handwritten digits: 1,797 grey pictures of 8 x 8, no download.

The test set of UCI's Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998; CC BY
4.0, see `digits.txt`), which scikit-learn ships too. `digits.npz` has its values as they are,
uint8 0 to 16, and is made from scikit-learn's copy by

    rows = np.loadtxt("sklearn/datasets/data/digits.csv.gz", delimiter=",", dtype=np.uint8)
    np.savez_compressed("digits.npz", pixels=rows[:, :64].reshape(-1, 8, 8), labels=rows[:, 64])

The first 1,437 are the `train` split, the last 360 `heldout`, 141 to 146 and 33 to 37 of each
digit. Nobody wrote down which of the 13 writers wrote which, so one of them may be in both. No two
pictures are equal.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from storage.errors import SourceError
from storage.sources.pictures import Pictures

DIGITS_NOTE = (
    "Handwritten digits of 8 x 8 (UCI, Optical Recognition of Handwritten Digits, CC BY 4.0)"
)
DIGITS_CLASSES = tuple("0123456789")
N_TRAIN = 1437
LARGEST = 16
"""Pixels count the black ones of 4 x 4, so that 16 is white here (255)."""

_FILE = Path(__file__).with_name("digits.npz")


def digits_pictures(_path: Path, split: str) -> Pictures:
    """Images (n, 3, 8, 8), grey repeated in three channels, and digits (n,). Raises SourceError if
    this installation lacks the file."""
    if not _FILE.is_file():
        raise SourceError(f"{_FILE} is missing; install palimpsest again or use another source")
    rows = slice(N_TRAIN) if split == "train" else slice(N_TRAIN, None)
    with np.load(_FILE, allow_pickle=False) as file:
        pixels, labels = file["pixels"][rows], file["labels"][rows]
    grey = (pixels.astype(np.uint16) * 255 + LARGEST // 2) // LARGEST
    rgb = np.repeat(grey.astype(np.uint8)[:, None], 3, axis=1)
    return "digits", rgb, labels.astype(np.int64), DIGITS_CLASSES
