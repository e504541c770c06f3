"""Small cases of InstaHide: encodings of normal images, and how recovered ones compare."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from recon_core.attacks.instahide.graph import incidence_of
from recon_core.attacks.instahide.mixing import Encodings, Mixing
from storage.sources.embedded import photograph_tiles


@dataclass(frozen=True)
class Case:
    """Private and public images, and encodings of them."""

    private: Float64[Tensor, "n d"]
    public: Float64[Tensor, "p d"]
    mixing: Mixing
    encodings: Encodings

    @property
    def edges(self) -> Int64[np.ndarray, "m 2"]:
        return np.asarray(self.encodings.private.sort(1).values)

    @property
    def public_part(self) -> Float64[Tensor, "m d"]:
        e = self.encodings
        return (self.public[e.public] * e.public_weights[..., None]).sum(1)


def gaussian_case(mixing: Mixing, *, n: int, p: int, d: int, m: int, seed: int = 0) -> Case:
    drawn = torch.Generator().manual_seed(seed)
    private = torch.randn(n, d, generator=drawn, dtype=torch.float64)
    public = torch.randn(p, d, generator=drawn, dtype=torch.float64)
    return Case(private, public, mixing, mixing.encode(private, public, m, generator=drawn))


def photographs(n: int, side: int, drawn: torch.Generator) -> Float[Tensor, "n d"]:
    """Tiles of photographs in [-1, 1]."""
    tiles = torch.from_numpy(photograph_tiles("train", side)[1]).float() * (2 / 255) - 1
    return tiles[torch.randperm(len(tiles), generator=drawn)[:n]].flatten(1)


def random_edges(rng: np.random.Generator, n: int, m: int) -> Int64[np.ndarray, "m 2"]:
    """m edges between n vertices, parallel ones among them."""
    pairs = np.array([rng.choice(n, 2, replace=False) for _ in range(m)])
    return np.sort(pairs, axis=1)


def renumbered(
    edges: Int64[np.ndarray, "m 2"], truth: Int64[np.ndarray, "m 2"], n: int
) -> Int64[np.ndarray, "m 2"]:
    """Edges with the numbers of the true images that have most of the same encodings."""
    alike = incidence_of(edges, n).T @ incidence_of(truth, n)
    return np.sort(linear_sum_assignment(-alike)[1][edges], axis=1)


def worst_errors(found: Float64[Tensor, "k d"], truth: Float64[Tensor, "n d"], *, signed: bool):
    """Of every recovered image the largest error of a pixel, to the true image that it is.

    Without signs each pixel may have one common sign for all images.
    """
    alike = found @ truth.T if signed else found.abs() @ truth.abs().T
    rows, ids = linear_sum_assignment(-alike.numpy())
    assert rows.tolist() == list(range(len(found)))
    other = truth[ids]
    if not signed:
        other = other * torch.where((found * other).sum(0) < 0, -1.0, 1.0)
    return (found - other).abs().amax(1)
