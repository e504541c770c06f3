"""Encodings that share a private image, none being known: independent components.

A score of common images is a noisy A A^T, where A (m, n) holds the private weights, two in a row.
Its n leading eigenvectors span A's columns, and which rotation of them A is, is told by its zeros:
of all rotations it has the most lopsided columns. That is independent component analysis (Hyvarinen
1999: fixed point, symmetric). Its contrast is the third moment, which is above 0 for a column that
is mostly 0; the fourth is that of normal numbers if a fifth of a column is not 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Float64
from scipy.linalg import eigh
from scipy.sparse.linalg import eigsh
from torch import Tensor

from recon_core.strict import Strict


@dataclass(frozen=True, kw_only=True)
class Components(Strict):
    """`spare`: components beyond the private images', in shares of their number, for what else the
    scores hold; the most peaked are kept. `core`: the load from which on an encoding is taken to
    have an image, in shares of that of its best. `n_rounds`: at most."""

    kind: Literal["independent"] = "independent"
    spare: float = 0.1
    core: float = 0.5
    n_rounds: int = 300

    def __post_init__(self) -> None:
        self._at_least(0, "spare")
        self._at_least(1, "n_rounds")
        if not 0 < self.core < 1:
            raise ValueError(f"core={self.core} must be between 0 and 1")


BEST = 0.9
"""Of the loads above 0 of the encodings that an image has, the quantile that is called its best."""


def independent_groups(
    scores: Float[Tensor, "m m"],
    n: int,
    *,
    generator: torch.Generator,
    how: Components | None = None,
) -> Float[Tensor, "m n"]:
    """Loads of m encodings on n images: above 0 where one is taken to have it, 1 at its best.
    `scores`: centred, larger where more is common. Raises ValueError for too few encodings."""
    how = how or Components()
    m = len(scores)
    wanted = n + round(how.spare * n)
    if wanted >= m:
        raise ValueError(f"{m} encodings are too few for the components of {n} images")
    matrix = np.asarray(scores.double().cpu())
    white = _leading(matrix, wanted, generator) * m**0.5
    found = _peaked(white, _rotation(white, generator, how))
    peaks = (found**3).mean(0)
    loads = found[:, np.sort(np.argsort(-peaks, kind="stable")[:n])]
    n_own = max(2 * m // n, 2)
    best = np.sort(loads, axis=0)[-max(round((1 - BEST) * n_own), 1)]
    loads = loads / np.maximum(best, 1e-9)
    return torch.from_numpy(np.where(loads > how.core, loads, 0.0)).to(scores)


def _leading(
    matrix: Float64[np.ndarray, "m m"], k: int, generator: torch.Generator
) -> Float64[np.ndarray, "m k"]:
    """Eigenvectors of the k largest eigenvalues."""
    m = len(matrix)
    if m < DENSE:
        dense: Float64[np.ndarray, "m k"] = eigh(matrix, subset_by_index=(m - k, m - 1))[1]
        return dense
    start = np.asarray(torch.rand(m, generator=generator, dtype=torch.float64))
    again = np.random.default_rng(0)  # for restarts within a space that is used up
    found: Float64[np.ndarray, "m k"] = eigsh(matrix, k=k, which="LA", v0=start, rng=again)[1]
    return found


DENSE = 1500
"""Encodings from which on eigenvectors are found by iteration."""


def _peaked(
    white: Float64[np.ndarray, "m k"], rotation: Float64[np.ndarray, "k k"]
) -> Float64[np.ndarray, "m k"]:
    """Components with their long tails above 0."""
    found = white @ rotation
    turned: Float64[np.ndarray, "m k"] = found * np.sign((found**3).sum(0))
    return turned


def _rotation(
    white: Float64[np.ndarray, "m k"], generator: torch.Generator, how: Components
) -> Float64[np.ndarray, "k k"]:
    m, k = white.shape
    drawn = np.asarray(torch.randn(k, k, generator=generator, dtype=torch.float64))
    rotation = np.linalg.qr(drawn)[0]
    for _ in range(how.n_rounds):
        u, _, vt = np.linalg.svd(white.T @ (white @ rotation) ** 2 / m)
        again = u @ vt
        still = np.abs((again * rotation).sum(0)).min()
        rotation = again
        if still > 1 - STILL:
            break
    return np.asarray(rotation)


STILL = 1e-6
