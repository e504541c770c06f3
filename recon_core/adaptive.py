"""The value of another run of each image: what the sampler `adaptive` learns from earlier rounds.

An image that came back in k of n runs, with z confident pairs, is worth

    w = (k + prior_back) / (n + prior_runs) * 2^(-z / enough):

its expected chance under a Beta(prior_back, prior_runs - prior_back) prior, times what another pair
of it is worth (image restoration paper, end of section 2). Each run draws its images without
replacement with probabilities in proportion to w, so every image is always possible. Thompson
sampling gave the same coverage in simulated worlds, and less balance among covered images.

Only sums, products, quotients and powers of two occur, which are the same on every machine; between
the halvings the worth goes down in a straight line.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

_FAINTEST = 500
"""Halvings, beyond those of the image with the fewest pairs, after which no more are counted."""


@dataclass(frozen=True, eq=False)
class History:
    """Record of each image of the source in the rounds that are known, (n,) each. `n_runs`: runs
    that trained on it; `n_back`: those in which a confident pair of it came back; `n_pairs`:
    confident pairs. Raises ValueError if they cannot be counts of the same runs."""

    n_runs: Int64[np.ndarray, " n"]
    n_back: Int64[np.ndarray, " n"]
    n_pairs: Int64[np.ndarray, " n"]

    def __post_init__(self) -> None:
        wrong = np.flatnonzero((self.n_back < 0) | (self.n_back > self.n_runs) | (self.n_pairs < 0))
        if len(wrong):
            i = int(wrong[0])
            raise ValueError(
                f"image {i} came back in {self.n_back[i]} of {self.n_runs[i]} runs, with "
                f"{self.n_pairs[i]} pairs; expected 0 <= n_back <= n_runs and no negative count"
            )

    @classmethod
    def empty(cls, n_images: int) -> History:
        return cls(*(np.zeros(n_images, np.int64) for _ in range(3)))

    def of(self, image_ids: Int64[np.ndarray, " k"]) -> History:
        return History(self.n_runs[image_ids], self.n_back[image_ids], self.n_pairs[image_ids])


def worth(
    history: History, *, prior_back: float, prior_runs: float, enough: int
) -> Float64[np.ndarray, " n"]:
    """w of each image, times a power of two that keeps it above 0 however many pairs there are. At
    least one image."""
    chance = (history.n_back + prior_back) / (history.n_runs + prior_runs)
    halvings, rest = np.divmod(history.n_pairs, enough)
    halvings = np.minimum(halvings - halvings.min(), _FAINTEST)
    left = np.ldexp(1 - rest / (2 * enough), -halvings)
    return np.asarray(chance * left)


def draw(
    weights: Float64[np.ndarray, " k"], size: int, rng: np.random.Generator
) -> Int64[np.ndarray, " size"]:
    """`size` different positions, one after another in proportion to the weights of those left.
    `weights` are above 0 and at least `size`. Drawing with replacement and skipping repeats is the
    same."""
    taken = np.zeros(0, np.int64)
    remaining = weights
    while len(taken) < size:
        cumulative = np.cumsum(remaining)
        at = np.searchsorted(cumulative, rng.random(2 * size) * cumulative[-1], side="right")
        found, first = np.unique(at[at < len(weights)], return_index=True)
        taken = np.concatenate([taken, found[np.argsort(first)]])[:size]
        if len(taken) < size:
            remaining = weights.copy()
            remaining[taken] = 0
    return taken
