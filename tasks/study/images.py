"""Images of a study's victims: a balanced order of a source, and images told apart by content."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]


def balanced_order(labels: npt.NDArray[np.int64], *, root_seed: int) -> Ids:
    """All rows in a seeded order, the k-th of each class before any class's (k + 1)-th."""
    rng = np.random.default_rng(np.random.SeedSequence((root_seed, 3)))
    members = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    rng.shuffle(members)
    longest = max(len(rows) for rows in members)
    by_turn = [rows[k] for k in range(longest) for rows in members if k < len(rows)]
    return np.array(by_turn, np.int64)


def content_of(image: Pixels) -> bytes:
    """sha256 of an image, which its copies share."""
    return hashlib.sha256(image.tobytes()).digest()
