"""Numbers of a table from pictures: best matches per image, good counts, intervals.

Each image is scored by its best match among all pictures that a method gives, found by SSIM (image
restoration paper, section 5.1.1), so a high score is evidence only beside the scores that images
get which the victim never saw.

Rank correlations tell how well a number predicts the truth that is known without it: of a run (its
residual, how far others agree with it) or of a picture (how far samples of a restorer disagree).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from recon_core.matching import GAP, best_per_target
from recon_core.metrics import haarpsi_pairs, ssim_matrix, ssim_pairs

N_BOOTSTRAP = 2000
TAILS = ((1 - 0.95) / 2, (1 + 0.95) / 2)
RATES = (0.0, 0.01, 0.05)
NOTICEABLE = 0.01


@dataclass(frozen=True, kw_only=True)
class BestMatches:
    """The best picture of each image: its row (-1: there is none) and its scores. `ssim3` is SSIM
    by the convention of the KKT paper (`gaussian3`), `rmse` the root of the mean square difference.
    An image without any picture scores 0: nothing came back; its `rmse` is NaN."""

    row: Int[Tensor, " t"]
    ssim: Float[Tensor, " t"]
    haarpsi: Float[Tensor, " t"]
    ssim3: Float[Tensor, " t"]
    rmse: Float[Tensor, " t"]


class Summary(TypedDict):
    """One side (targets or decoys) of one method. Without images, fractions and means are None;
    `n_identified` (`recon_core.matching.identified`) is None where leads were not given."""

    n: int
    n_good: int
    good_fraction: float | None
    good_interval: tuple[float, float] | None
    mean_ssim: float | None
    mean_ssim_interval: tuple[float, float] | None
    mean_haarpsi: float | None
    mean_haarpsi_interval: tuple[float, float] | None
    best_ssim: float | None
    n_good_ssim3: int
    mean_ssim3: float | None
    n_identified: int | None


class Comparison(TypedDict):
    """Numbers of images that score better or worse after than before, by more than `NOTICEABLE`;
    and the mean of the differences, image by image, with its interval."""

    n_better: int
    n_worse: int
    mean_difference: float | None
    mean_difference_interval: tuple[float, float] | None


class Detection(TypedDict):
    """Power of a score to tell targets from decoys (its receiver operating characteristic).

    `auc`: the chance that a random target scores above a random decoy, ties counting half.
    `found_at`: by the false positive rate that is allowed, the share of targets above the lowest
    threshold that keeps to it. None without targets or decoys.
    """

    auc: float | None
    found_at: dict[str, float] | None


class Roc(TypedDict):
    """The curve of true over false positives: for each threshold the share of decoys and of targets
    that score at least that much, from (0, 0) to (1, 1)."""

    false_positives: list[float]
    found: list[float]


def best_matches(
    pictures: Float[Tensor, "p c h w"],
    images: Float[Tensor, "t c h w"],
    *,
    scores: Float[Tensor, "p t"] | None = None,
) -> BestMatches:
    """Each image's best picture by SSIM; pictures and images in [0, 1] on one device. `scores` are
    the SSIMs, if they are known."""
    row, ssim = best_per_target(ssim_matrix(pictures, images) if scores is None else scores)
    return score_matches(pictures, images, row, ssim)


def score_matches(
    pictures: Float[Tensor, "p c h w"],
    images: Float[Tensor, "t c h w"],
    row: Int[Tensor, " t"],
    ssim: Float[Tensor, " t"] | None = None,
) -> BestMatches:
    """The scores of each image with the picture in its `row` (-1: none); `ssim` if it is known."""
    found = row >= 0
    matched, wanted = pictures[row[found]], images[found]

    def everywhere(values: Tensor, missing: float = 0.0) -> Tensor:
        filled = torch.full_like(row, missing, dtype=torch.float32)
        filled[found] = values.float()
        return filled

    return BestMatches(
        row=row,
        ssim=everywhere(ssim_pairs(matched, wanted) if ssim is None else ssim[found]),
        haarpsi=everywhere(haarpsi_pairs(matched, wanted)),
        ssim3=everywhere(ssim_pairs(matched, wanted, convention="gaussian3")),
        rmse=everywhere((matched - wanted).double().square().mean(dim=(1, 2, 3)).sqrt(), torch.nan),
    )


def summarise(
    ssim: npt.NDArray[np.float64],
    haarpsi: npt.NDArray[np.float64],
    ssim3: npt.NDArray[np.float64],
    *,
    good_threshold: float,
    lead: npt.NDArray[np.float64] | None = None,
) -> Summary:
    """Counts and means of the scores of each image; good means strictly above the threshold.
    `lead`: how far its best picture's SSIM with it is above that with any other image."""
    n = len(ssim)
    n_good = int((ssim > good_threshold).sum())
    return Summary(
        n=n,
        n_good=n_good,
        good_fraction=n_good / n if n else None,
        good_interval=proportion_interval(n_good, n) if n else None,
        mean_ssim=float(ssim.mean()) if n else None,
        mean_ssim_interval=bootstrap_interval(ssim) if n else None,
        mean_haarpsi=float(haarpsi.mean()) if n else None,
        mean_haarpsi_interval=bootstrap_interval(haarpsi) if n else None,
        best_ssim=float(ssim.max()) if n else None,
        n_good_ssim3=int((ssim3 > good_threshold).sum()),
        mean_ssim3=float(ssim3.mean()) if n else None,
        n_identified=None if lead is None else int((lead >= GAP).sum()),
    )


def bootstrap_interval(
    values: npt.NDArray[np.float64],
    *,
    groups: npt.NDArray[np.integer[Any]] | None = None,
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean (Efron 1979). It resamples values, or whole
    `groups` (one number per value): resampling images speaks of these victims, resampling runs of
    the next one. Raises ValueError for no values."""
    if len(values) == 0:
        raise ValueError("values is empty; an interval needs at least one")
    rng = np.random.default_rng(0)
    if groups is None:
        n, rows = len(values), max(1, 2**15 // len(values))  # at once: as many as a cache holds
        sizes = [min(rows, N_BOOTSTRAP - k) for k in range(0, N_BOOTSTRAP, rows)]
        means = np.concatenate([rng.choice(values, (size, n)).mean(axis=1) for size in sizes])
    else:
        _names, group_of = np.unique(groups, return_inverse=True)
        sums, counts = np.bincount(group_of, values), np.bincount(group_of)
        drawn = rng.integers(len(sums), size=(N_BOOTSTRAP, len(sums)))
        means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.quantile(means, TAILS)
    return float(low), float(high)


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's interval of the mean of at least two values that are drawn independently (Student
    1908)."""
    from scipy import stats  # half a second, which a comparison does without

    if len(values) < 2:
        raise ValueError(f"values has {len(values)}; an interval needs at least two")
    mean, half = np.mean(values), stats.t.ppf(TAILS[1], len(values) - 1) * stats.sem(values)
    return float(mean - half), float(mean + half)


def proportion_interval(n_hits: int, n: int) -> tuple[float, float]:
    """The exact interval of a probability from `n_hits` of `n` (Clopper and Pearson 1934). Raises
    ValueError if n < 1."""
    from scipy import stats  # half a second, which a comparison does without

    if not 0 <= n_hits <= n or n < 1:
        raise ValueError(f"n_hits={n_hits} of n={n}; expected at least one trial and no more hits")
    low = stats.beta.ppf(TAILS[0], n_hits, n - n_hits + 1) if n_hits else 0.0
    high = stats.beta.ppf(TAILS[1], n_hits + 1, n - n_hits) if n_hits < n else 1.0
    return float(low), float(high)


def compare(before: npt.NDArray[np.float64], after: npt.NDArray[np.float64]) -> Comparison:
    """Gains of a restorer, image by image (image restoration paper, figure 3)."""
    difference = after - before
    return Comparison(
        n_better=int((difference > NOTICEABLE).sum()),
        n_worse=int((difference < -NOTICEABLE).sum()),
        mean_difference=float(difference.mean()) if len(difference) else None,
        mean_difference_interval=bootstrap_interval(difference) if len(difference) else None,
    )


def detect(scores: npt.NDArray[np.float64], decoy_scores: npt.NDArray[np.float64]) -> Detection:
    """Detection of targets among decoys, by their scores."""
    if not len(scores) or not len(decoy_scores):
        return Detection(auc=None, found_at=None)
    below = np.searchsorted(np.sort(decoy_scores), scores, side="left")
    not_above = np.searchsorted(np.sort(decoy_scores), scores, side="right")
    auc = float((below + not_above).mean() / (2 * len(decoy_scores)))
    found = {
        f"{rate:g}": float((scores > threshold_for(decoy_scores, rate)).mean()) for rate in RATES
    }
    return Detection(auc=auc, found_at=found)


def roc(
    scores: npt.NDArray[np.float64], decoy_scores: npt.NDArray[np.float64], *, n_points: int = 200
) -> Roc:
    """The receiver operating characteristic of targets against decoys, at most `n_points` of it.
    Its corners are kept where there are few enough; else every so many of them, both ends
    included."""
    if not len(scores) or not len(decoy_scores):
        return Roc(false_positives=[], found=[])
    thresholds = np.unique(np.concatenate([scores, decoy_scores]))[::-1]
    curve = np.stack(
        [
            1 - np.searchsorted(np.sort(values), thresholds, side="left") / len(values)
            for values in (decoy_scores, scores)
        ]
    )
    curve = np.concatenate([np.zeros((2, 1)), curve], axis=1)
    step = np.diff(curve, axis=1) > 0
    bends = (step[:, 1:] != step[:, :-1]).any(axis=0) | step[:, 1:].all(axis=0)
    curve = curve[:, np.concatenate([[True], bends, [True]])]
    n = curve.shape[1]
    chosen = np.unique(np.linspace(0, n - 1, min(n, n_points)).round().astype(np.int64))
    return Roc(false_positives=curve[0, chosen].tolist(), found=curve[1, chosen].tolist())


def threshold_for(decoy_scores: npt.NDArray[np.float64], rate: float) -> float:
    """The lowest threshold that at most the share `rate`, in [0, 1), of the decoys exceeds
    (strictly)."""
    if not len(decoy_scores) or not 0 <= rate < 1:
        raise ValueError(f"rate={rate} of {len(decoy_scores)} decoys; expected a rate below 1")
    n_allowed = int(np.floor(rate * len(decoy_scores) + 1e-9))
    return float(np.sort(decoy_scores)[::-1][n_allowed])


MIN_VALUES = 3
"""Of fewer values every order is likely; no correlation is given."""

Values = npt.NDArray[np.float64]
Groups = npt.NDArray[np.integer[Any]]


class RankCorrelation(TypedDict):
    """Spearman's coefficient over `n` values, in [-1, 1]; None if either side is constant or there
    are fewer than `MIN_VALUES`. `interval`: 95 %, None where resamples have no coefficient."""

    n: int
    spearman: float | None
    interval: tuple[float, float] | None


def rank_correlation(
    x: Values,
    y: Values,
    *,
    within: Groups | None = None,
    units: Groups | None = None,
) -> RankCorrelation:
    """Spearman's rank correlation of `x` and `y`; equal values share their mean rank.

    With `within`, values are ranked in their group alone, and ranks enter as (rank - mean rank) /
    size of the group. The interval is a percentile bootstrap (Efron 1979) that draws values, or
    whole `units` of values that belong together. Raises ValueError if a value is not finite or the
    lengths differ.
    """
    groups = np.zeros(len(x), np.int64)
    if within is not None:
        groups = np.unique(within, return_inverse=True)[1].astype(np.int64)
    if not len(x) == len(y) == len(groups) or not (np.isfinite(x) & np.isfinite(y)).all():
        raise ValueError(
            f"x has {len(x)} and y {len(y)} values; expected as many, all of them finite"
        )
    if len(x) < MIN_VALUES:
        return RankCorrelation(n=len(x), spearman=None, interval=None)
    sides = [_Ranks(x, groups), _Ranks(y, groups)]
    unit_of = np.arange(len(x)) if units is None else np.unique(units, return_inverse=True)[1]
    n_units = int(unit_of.max()) + 1
    rng = np.random.default_rng(0)
    draws = rng.integers(n_units, size=(N_BOOTSTRAP if n_units > 1 else 0, n_units))
    rows = max(1, 2**15 // len(x))  # at once: as many as a cache holds
    (whole,) = _correlations(sides, np.ones((1, len(x))))
    usable: list[float] = []
    for block in np.split(draws, range(rows, len(draws), rows)):
        copies = _summed(np.ones(block.shape), block, n_units).take(unit_of, axis=1)
        usable += [value for value in _correlations(sides, copies) if value is not None]
    interval = None
    if whole is not None and usable:
        low, high = np.quantile(usable, TAILS)
        interval = (float(low), float(high))
    return RankCorrelation(n=len(x), spearman=whole, interval=interval)


def best_in_top_quarter(criterion: Values, truth: Values) -> bool:
    """True if the value with the highest `truth` (at least one) is among the quarter (rounded up)
    with the highest `criterion`. Equal criteria count as ranking before it."""
    if not len(truth):
        raise ValueError("truth is empty; expected at least one value")
    best = int(np.argmax(truth))
    n_before = int((criterion >= criterion[best]).sum()) - 1
    return n_before < -(-len(truth) // 4)


def images_found(
    scores: npt.NDArray[np.floating[Any]],
    *,
    good: float = 0.4,
    false_shares: Sequence[float] = (0.0, 0.01, 0.05),
) -> tuple[int, ...]:
    """Different training images in the longest heads of a ranking that hold few false pictures.

    `scores` (pictures, training images), the best ranked picture first. A picture without a score
    above `good` is false; a head is the longest of which at most a share of `false_shares` is
    false. An image is found if it has the best score of a picture in the head that is not false.
    """
    if not scores.size:
        return tuple(0 for _share in false_shares)
    best, image = scores.max(1), scores.argmax(1)
    false = np.cumsum(best <= good)
    length = np.arange(1, len(best) + 1)
    heads = [np.flatnonzero(false <= share * length) for share in false_shares]
    ends = [int(head[-1]) + 1 if len(head) else 0 for head in heads]
    return tuple(len(np.unique(image[:end][best[:end] > good])) for end in ends)


class _Ranks:
    def __init__(self, values: Values, groups: npt.NDArray[np.int64]) -> None:
        from scipy import stats  # half a second, which a comparison does without

        level = stats.rankdata(values, method="dense").astype(np.int64)
        keys, self.key = np.unique(groups * (level.max() + 1) + level, return_inverse=True)
        self.group_of_key = keys // (level.max() + 1)

    def centred(self, copies: Values) -> Values:
        """(draws, values) ranks less their group's mean, over its size, given copies of each."""
        counts = _summed(copies, self.key, len(self.group_of_key))
        in_group = _summed(counts, self.group_of_key, int(self.group_of_key.max()) + 1)
        before = (np.cumsum(in_group, axis=1) - in_group).take(self.group_of_key, axis=1)
        middle = np.cumsum(counts, axis=1) - counts + counts / 2 - before
        size = np.maximum(in_group.take(self.group_of_key, axis=1), 1)
        centred: Values = ((middle - size / 2) / size).take(self.key, axis=1)
        return centred


def _summed(values: Values, number: npt.NDArray[np.int64], n: int) -> Values:
    """(rows, n) sums of each row's values by their numbers below n."""
    places = number + n * np.arange(len(values))[:, None]
    summed = np.bincount(places.ravel(), values.ravel(), n * len(values))
    return summed.astype(np.float64).reshape(-1, n)


def _correlations(sides: list[_Ranks], copies: Values) -> list[float | None]:
    """The coefficient of each row of copies (draws, values); None where a side is constant."""
    a, b = (side.centred(copies) for side in sides)
    spread = (copies * a * a).sum(axis=1) * (copies * b * b).sum(axis=1)
    found = (copies * a * b).sum(axis=1) / np.sqrt(np.maximum(spread, 1e-300))
    there = spread > 1e-20 * copies.shape[1]
    return [float(r) if ok else None for r, ok in zip(found.clip(-1, 1), there, strict=True)]
