"""Pictures from raw reconstructions, and the matching of candidates to training images.

Scores are (candidates p, training images t) matrices, higher is better; votes take distances. A NaN
or infinite one never wins; ties go to the lowest index.
"""

from __future__ import annotations

import math
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from recon_core.metrics import ROWS

WORST_SCORE = -1.0

CLIPPED = 0.01
"""Share of a picture's values that may leave [0, 1]."""
LEAST_ROOM = 0.2
"""A value whose mean is nearer than this to the end that x drives it to sets no limit to r."""
GAP = 0.05
"""Lead in SSIM of the nearest image over the second (image restoration paper, section 2)."""
ROUNDING = 1e-5
"""Differences in SSIM below this are rounding."""

EXACT_DISTANCE = 1e-12
"""Distances below this are roundings of 0: float32 copies of one image are this near."""


@overload
def fit_to_range(x: Tensor, mean: Tensor, *, clipped: float = ...) -> Tensor: ...


@overload
def fit_to_range(
    x: npt.NDArray[Any], mean: npt.NDArray[Any], *, clipped: float = ...
) -> npt.NDArray[Any]: ...


def fit_to_range(
    x: Float[Tensor, "p c h w"] | Float[np.ndarray, "p c h w"],
    mean: Float[Tensor, "*p c h w"] | Float[np.ndarray, "*p c h w"],
    *,
    clipped: float = CLIPPED,
) -> Float[Tensor, "p c h w"] | Float[np.ndarray, "p c h w"]:
    """Pictures r x + mean in [0, 1], with the largest r that fits, per image (image restoration
    paper, section 5.1).

    We depart from the paper in two ways. The share `clipped`, in [0, 1), of the values (rounded
    down) may leave [0, 1] and is clipped; with 0, as in the paper, a single pixel can decide. And
    only values with room set a limit: a value whose mean is nearer than `LEAST_ROOM` to the end
    that x drives it to is clipped as well (where no value has that much room, one with less than
    half of the most). On a black ground the mean is 0 or nearly 0, so that any noise below 0 would
    give r = 0, and every picture would be the mean image.

    `x` is in the victim's input space at an arbitrary scale, `mean` in [0, 1]. A zero x, or one
    without any room, gives the mean itself, which shows nothing (`pairs_of` never calls it
    confident); a non-finite x gives a picture of NaN. Where the mean is 0 everywhere, x is a
    picture already and is only clamped. Numpy arrays give an array.
    """
    if isinstance(x, np.ndarray):
        given = [torch.from_numpy(np.require(a, requirements=("C", "W"))) for a in (x, mean)]
        return np.asarray(fit_to_range(*given, clipped=clipped).numpy())
    check_clipped(clipped)
    mean = torch.as_tensor(mean).to(x.dtype).expand_as(x)
    finite = x.isfinite().flatten(1).all(dim=1)[:, None, None, None]
    peak = x.abs().amax(dim=(1, 2, 3), keepdim=True)
    unit = x / peak.where(peak > 0, 1.0)
    room = torch.where(unit > 0, 1.0 - mean, mean).clamp_min(0.0)
    room = room.where(unit != 0, 0.0)
    most = room.amax(dim=(1, 2, 3), keepdim=True)
    least = torch.where(most >= LEAST_ROOM, LEAST_ROOM, most / 2)
    limited = (room >= least) & (room > 0)
    limits = torch.where(limited, room / unit.abs(), torch.inf).flatten(1)
    lowest = limits.topk(int(clipped * limits.shape[1]) + 1, dim=1, largest=False).values
    r = lowest[:, -1].where(lowest[:, -1].isfinite(), lowest[:, 0])
    r = r.where(r.isfinite(), 0.0)[:, None, None, None]
    is_picture = ~mean.flatten(1).any(dim=1)[:, None, None, None]
    picture = torch.where(is_picture, x, unit * r + mean)
    return torch.where(finite, picture.clamp(0.0, 1.0), torch.nan)


def check_clipped(clipped: float) -> None:
    if not 0 <= clipped < 1:
        raise ValueError(f"clipped={clipped} is a share of a picture's values: from 0, below 1")


def scaled_to_range(x: Float[Tensor, "p c h w"]) -> Float[Tensor, "p c h w"]:
    """Pictures r x of images from which nothing was subtracted, so that 0 is black, clipped to
    [0, 1]: r is such that the share `CLIPPED` of the values is above 1. Black where no more than
    that is positive, NaN for a non-finite x."""
    finite = x.isfinite().flatten(1).all(dim=1)[:, None, None, None]
    n_above = int(CLIPPED * math.prod(x.shape[1:])) + 1
    top = x.flatten(1).topk(n_above, dim=1).values[:, -1, None, None, None]
    scaled = torch.where(top > 0, x / top.where(top > 0, 1.0), 0.0)
    return torch.where(finite, scaled.clamp(0.0, 1.0), torch.nan)


def best_and_second(
    scores: Float[Tensor, "p t"],
) -> tuple[Int[Tensor, " p"], Float[Tensor, " p"], Float[Tensor, " p"]]:
    """(best_row, best, second): each candidate's nearest training image, its score, the next score.
    With one training image, or one finite score, `second` is -1; with none, `best` is -1 too and
    `best_row` is 0. Raises ValueError without training images."""
    if scores.shape[1] == 0:
        raise ValueError("scores has no column; a run needs at least one training image to match")
    usable = scores.where(scores.isfinite(), -torch.inf)
    best_row = usable.argmax(dim=1)
    best = usable.gather(1, best_row[:, None]).squeeze(1)
    second = usable.scatter(1, best_row[:, None], -torch.inf).amax(dim=1)
    return best_row, best.clamp_min(WORST_SCORE), second.clamp_min(WORST_SCORE)


def confident_candidates(
    best_row: Int[Tensor, "s m"],
    best: Float[Tensor, "s m"],
    second: Float[Tensor, "s m"],
    *,
    threshold: float = 0.4,
    margin: float = GAP,
    shown_by_mean: Float[Tensor, " t"] | None = None,
) -> tuple[Bool[Tensor, " m"], Int[Tensor, " m"]]:
    """(confident, target row) of m candidates over s saved iterations (image restoration paper,
    section 2).

    A candidate is confident if at any saved iteration best > `threshold` and best - second >=
    `margin`, and, which the paper does not ask, best - m >= `margin`, where m is the score of the
    mean image alone with the same training image (`shown_by_mean`): raw candidates are shown around
    the mean, and one that adds nothing to it must not pass for a reconstruction. The target of a
    confident candidate is that of the confident iteration with the highest best; an unconfident
    candidate's is that of its highest best.
    """
    if best.shape[0] == 0:
        raise ValueError("no saved iteration to judge; save at least the last one")
    sure = (best > threshold) & (best - second >= margin)
    if shown_by_mean is not None:
        sure &= best - shown_by_mean[best_row] >= max(margin, ROUNDING)
    confident = sure.any(dim=0)
    ranked = best.where((sure | ~confident) & best.isfinite(), -torch.inf)
    iteration = ranked.argmax(dim=0)
    return confident, best_row.gather(0, iteration[None]).squeeze(0)


def best_per_target(
    scores: Float[Tensor, "p t"],
) -> tuple[Int[Tensor, " t"], Float[Tensor, " t"]]:
    """(candidate, score) of each training image's best candidate; -1 and -1 without a finite
    score."""
    n_candidates, n_targets = scores.shape
    if n_candidates == 0:
        nothing = torch.full((n_targets,), -1, dtype=torch.int64, device=scores.device)
        return nothing, scores.new_full((n_targets,), WORST_SCORE)
    usable = scores.where(scores.isfinite(), -torch.inf)
    candidate = usable.argmax(dim=0)
    score = usable.gather(0, candidate[None]).squeeze(0)
    found = score.isfinite()
    return candidate.where(found, -1), score.where(found, WORST_SCORE)


def runner_up(
    scores: Float[Tensor, "p t"], row: Int[Tensor, " t"], member: Bool[Tensor, " t"]
) -> Float[Tensor, " t"]:
    """Highest score of each image's picture, in `row` of `scores` (-1: none), with any other image.

    A training image (`member`) is compared with all other images, a decoy with the other decoys
    alone: a picture that shows a training image is nearer to it than to any decoy, so that decoys
    would have no chance beside them. -1 where there is no picture or no other image.
    """
    n = len(row)
    if scores.shape[0] == 0 or n == 0:
        return scores.new_full((n,), WORST_SCORE)
    own = scores[row.clamp_min(0)].nan_to_num(nan=WORST_SCORE, neginf=WORST_SCORE)
    rivals = (member[:, None] | ~member[None, :]) & ~torch.eye(
        n, dtype=torch.bool, device=row.device
    )
    highest = own.where(rivals, WORST_SCORE).amax(dim=1)
    return highest.where(row >= 0, WORST_SCORE)


def identified(
    scores: Float[Tensor, "p t"], row: Int[Tensor, " t"], member: Bool[Tensor, " t"]
) -> Bool[Tensor, " t"]:
    """Images whose best picture, in `row` of `scores` (-1: none), is nearer to them than to any
    other image by at least `GAP` (the rule of the image restoration paper, section 2, without its
    threshold). `member` and the rivals of an image are those of `runner_up`.

    Where images resemble each other, a picture may be like many of them; this counts those that a
    picture tells apart. Of an image that was given twice no copy is identified.
    """
    if scores.shape[0] == 0:
        return torch.zeros_like(member)
    best = scores[row.clamp_min(0), torch.arange(len(row), device=row.device)]
    return (row >= 0) & (best - runner_up(scores, row, member) >= GAP)


def nearest_distances(
    x: Float[Tensor, "p c h w"], distances: Float[Tensor, "p t"]
) -> Float[Tensor, " t"]:
    """Distance of each training image's nearest candidate; infinity without one.

    Of candidates in pieces the smallest goes into `sum_of_votes` of every piece. `distances` are
    `metrics.ncc_matrix`'s. (For CIFAR-10 the authors' code lets a candidate vote only for the image
    it is nearest to.) Raises ValueError for distances below 0.
    """
    usable = _voting_distances(x, distances)
    if len(usable) == 0:
        return distances.new_full((distances.shape[1],), torch.inf)
    return usable.amin(dim=0)


def sum_of_votes(
    x: Float[Tensor, "p c h w"],
    distances: Float[Tensor, "p t"],
    nearest_distance: Float[Tensor, " t"],
    *,
    ratio: float,
) -> tuple[Float64[Tensor, "t c h w"], Int[Tensor, " t"]]:
    """(sum, number) of the candidates at most `ratio` times as far as the nearest of all pieces.

    KKT paper, appendix A.1, with B = `ratio`: 1.1 for MLPs, 1.5 for convolutional victims. `x` are
    raw candidates. Copies whose distances differ in rounding (`EXACT_DISTANCE`) vote together. The
    authors' code wants `<` where the paper, and this, has `<=`. Raises ValueError for a ratio below
    1, or for distances below 0.
    """
    if not (math.isfinite(ratio) and ratio >= 1):
        raise ValueError(
            f"ratio={ratio} must be 1 (the nearest alone) or more; the KKT paper takes 1.1 and 1.5"
        )
    usable = _voting_distances(x, distances)
    votes = (usable <= ratio * nearest_distance.clamp_min(EXACT_DISTANCE)) & usable.isfinite()
    size = math.prod(x.shape[1:])
    total = torch.zeros(distances.shape[1], size, dtype=torch.float64, device=x.device)
    for rows, voices in zip(x.split(ROWS), votes.split(ROWS), strict=True):
        finite = rows.where(rows.isfinite(), 0.0)  # no vote times NaN would be NaN
        total += voices.T.double() @ finite.flatten(1).double()
    return total.unflatten(1, x.shape[1:]), votes.sum(dim=0)


def _voting_distances(
    x: Float[Tensor, "p c h w"], distances: Float[Tensor, "p t"]
) -> Float[Tensor, "p t"]:
    whole = x.isfinite().flatten(1).all(dim=1)
    usable = distances.where(distances.isfinite() & whole[:, None], torch.inf)
    if usable.numel() and usable.min() < -EXACT_DISTANCE:
        raise ValueError(
            f"distances has {usable.min():.3g} but a distance is 0 or more; "
            "scores (higher is better) do not vote: use metrics.ncc_matrix"
        )
    return usable
