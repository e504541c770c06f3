"""Occurrences of each pair in the training examples (image restoration paper, section 3).

The paper draws 140 random subsets of its pairs, each keeping a pair with probability 11/z when its
image occurs z times among the pairs, and concatenates them. The same multiset follows in one pass:
a pair occurs Binomial(140, min(1, 11/z)) times (exact to 3e-13 in total variation). In the paper z
is at least 11.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from jaxtyping import Bool, Float, Int, Int64

from recon_core.strict import Count, Natural, NonNegative, Strict, Within


@dataclass(frozen=True, kw_only=True)
class Curation(Strict):
    """Selection of the pairs that restorers learn from, and their frequency.

    Attributes:
        n_subsets: subsets that are drawn and concatenated (the paper: 140).
        share: pairs each image contributes to a subset on average, if it has as many (paper: 11).
        noise_fraction: examples of pure noise added, as a fraction of the others (paper: 0.1).
        mixture_fraction: synthetic mixtures of images added, as a fraction of the pairs (ours; the
            paper: 0). With few runs they show the images that never came back; see
            `recon_core.restore.examples`.
        mixture_strength: the median norm of the other images' weights in such a mixture.
        min_iteration: pairs saved before this iteration of the attack are left out (paper: none).
        seed: of the draw.
    """

    n_subsets: Count = 140
    share: Count = 11
    noise_fraction: Annotated[float, Within("[0, 1)")] = 0.1
    mixture_fraction: NonNegative = 0.0
    mixture_strength: Annotated[float, Within("(0, inf)", fix="2 is usual")] = 2.0
    min_iteration: Natural = 0
    seed: Natural = 0


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Effect of a curation on a dataset, before (pairs) and after (expected examples). Gini
    coefficients are over the images with at least one pair: 0 when all occur equally often."""

    n_images: int
    n_pairs: int
    expected_examples: float
    expected_noise_examples: float
    expected_mixture_examples: float
    gini_before: float
    gini_after: float


def occurrences(
    image_ids: Int[np.ndarray, " k"], counts: Int[np.ndarray, " k"]
) -> Int64[np.ndarray, " n_images"]:
    """z as a table indexed by image id, 0 for ids that are not listed."""
    z = np.zeros(int(image_ids.max(initial=-1)) + 1, np.int64)
    z[image_ids] = counts
    return z


def keep_probability(z: Int[np.ndarray, " n"], share: int) -> Float[np.ndarray, " n"]:
    """min(1, share / z): the probability that a subset keeps a pair whose image occurs z times; 0
    for z = 0."""
    safe = np.maximum(z, 1).astype(np.float64)
    return np.where(z > 0, np.minimum(1.0, share / safe), 0.0)


def repeats(
    image_ids: Int[np.ndarray, " p"],
    z: Int64[np.ndarray, " n_images"],
    *,
    curation: Curation,
    part: int,
    epoch: int,
) -> Int64[np.ndarray, " p"]:
    """Occurrences of each of the p pairs of a part: Binomial(n_subsets, min(1, share/z)).

    `image_ids` are the pairs' images and `z` the table of `occurrences`. The draw depends on
    (curation.seed, epoch, part) alone. Raises ValueError for an image that is not in the table, or
    has no pairs there.
    """
    if image_ids.size and (image_ids.min() < 0 or image_ids.max() >= len(z)):
        raise ValueError(
            f"image ids go from {image_ids.min()} to {image_ids.max()} but z has {len(z)} entries; "
            "count the images of the same dataset"
        )
    occurring = z[image_ids]
    if image_ids.size and occurring.min() < 1:
        first = occurring.argmin()
        raise ValueError(
            f"image {image_ids[first]} has pairs in part {part} but z={occurring[first]}; count "
            "the pairs of the same dataset, from the same iteration on"
        )
    rng = np.random.default_rng((curation.seed, epoch, part))
    probability = keep_probability(occurring, curation.share)
    return rng.binomial(curation.n_subsets, probability).astype(np.int64, copy=False)


def curated_repeats(
    columns: Mapping[str, Any],
    z: Int64[np.ndarray, " n_images"],
    *,
    curation: Curation,
    part: int,
    epoch: int,
) -> Int64[np.ndarray, " p"]:
    """`repeats` of the confident pairs from `curation.min_iteration` on, 0 for all others.
    `columns` has arrays (p,) under image_id, iteration and confident; `z` counts the same pairs."""
    confident: Bool[np.ndarray, " p"] = columns["confident"]
    wanted = np.flatnonzero(confident & (columns["iteration"] >= curation.min_iteration))
    times = np.zeros(len(confident), np.int64)
    times[wanted] = repeats(
        columns["image_id"][wanted], z, curation=curation, part=part, epoch=epoch
    )
    return times


def summarise(z: Int64[np.ndarray, " n_images"], curation: Curation) -> Balance:
    """Effect of `curation` on images that occur `z` times; images with z = 0 are left out."""
    seen = z[z > 0]
    examples = curation.n_subsets * seen * keep_probability(seen, curation.share)
    return Balance(
        n_images=len(seen),
        n_pairs=int(seen.sum()),
        expected_examples=float(examples.sum()),
        expected_noise_examples=float(examples.sum()) * curation.noise_fraction,
        expected_mixture_examples=float(examples.sum()) * curation.mixture_fraction,
        gini_before=gini(seen.astype(np.float64)),
        gini_after=gini(examples),
    )


def gini(values: Float[np.ndarray, " n"]) -> float:
    """Gini coefficient sum_i (2i - n - 1) v_i / (n sum v), v ascending, i from 1; 0 for none or all
    zero."""
    total = float(values.sum())
    if total == 0:
        return 0.0
    n = len(values)
    weights = 2 * np.arange(1, n + 1) - n - 1
    return float((weights * np.sort(values)).sum() / (n * total))
