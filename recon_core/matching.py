"""From raw reconstructions to pictures, and from scores to who matches whom.

The rules are those of paper 001, sections 2 and 5.1: a candidate belongs to a training image if
at any saved iteration its best SSIM over the run's training images is above .4 and leads the
second best by at least .05. Scores are (candidates p, training images t) matrices, higher is
better. A NaN score never wins; ties go to the lowest index.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

WORST_SCORE = -1.0
"""The score of "nothing": the lower end of SSIM's range."""


def fit_to_range(
    x: Float[Tensor, "p c h w"], mean: Float[Tensor, "c h w"] | Float[Tensor, "p c h w"]
) -> Float[Tensor, "p c h w"]:
    """Pictures r x + mean in [0, 1], with the largest r that fits, per image (001, section 5.1).

    `x` is in the victim's input space at an arbitrary scale, `mean` in [0, 1]. A zero x gives the
    mean itself; a non-finite x gives a picture of NaN.
    """
    mean = mean.to(x.dtype).expand_as(x)
    finite = x.isfinite().flatten(1).all(dim=1)[:, None, None, None]
    peak = x.abs().amax(dim=(1, 2, 3), keepdim=True)
    unit = x / peak.where(peak > 0, 1.0)
    room = torch.where(unit > 0, 1.0 - mean, mean).clamp_min(0.0)
    r = torch.where(unit != 0, room / unit.abs(), torch.inf).amin(dim=(1, 2, 3), keepdim=True)
    r = r.where(r.isfinite(), 0.0)
    return torch.where(finite, (unit * r + mean).clamp(0.0, 1.0), torch.nan)


def min_max(
    x: Float[Tensor, "p c h w"], mean: Float[Tensor, "c h w"] | Float[Tensor, "p c h w"]
) -> Float[Tensor, "p c h w"]:
    """Pictures (v - min v) / (max v - min v) of v = x + mean, per image (Haim et al.'s code).

    A constant v gives a black picture; a non-finite x gives a picture of NaN.
    """
    value = x + mean.to(x.dtype)
    finite = x.isfinite().flatten(1).all(dim=1)[:, None, None, None]
    low = value.amin(dim=(1, 2, 3), keepdim=True)
    span = value.amax(dim=(1, 2, 3), keepdim=True) - low
    scaled = ((value - low) / span.where(span > 0, 1.0)).clamp(0.0, 1.0)
    return torch.where(finite, scaled, torch.nan)


def best_and_second(
    scores: Float[Tensor, "p t"],
) -> tuple[Int[Tensor, " p"], Float[Tensor, " p"], Float[Tensor, " p"]]:
    """(best_row, best, second): each candidate's nearest training image, its score, the next score.

    With one training image, or one finite score, `second` is -1; with none, `best` is -1 too and
    `best_row` is 0. Raises ValueError if there is no training image at all.
    """
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
    margin: float = 0.05,
) -> tuple[Bool[Tensor, " m"], Int[Tensor, " m"]]:
    """(confident, target row) of m candidates, over s saved iterations (001, section 2).

    A candidate is confident if at any saved iteration best > `threshold` and
    best - second >= `margin`. Its target is that of the confident iteration with the highest
    best; an unconfident candidate's is that of its highest best.
    """
    if best.shape[0] == 0:
        raise ValueError("no saved iteration to judge; save at least the last one")
    sure = (best > threshold) & (best - second >= margin)
    confident = sure.any(dim=0)
    ranked = best.where(sure | ~confident, -torch.inf)
    iteration = ranked.argmax(dim=0)
    return confident, best_row.gather(0, iteration[None]).squeeze(0)


def best_per_target(
    scores: Float[Tensor, "p t"],
) -> tuple[Int[Tensor, " t"], Float[Tensor, " t"]]:
    """(candidate, score) of each training image's best candidate.

    An image that no candidate has a finite score for has candidate -1 and score -1: test for it
    before indexing.
    """
    n_candidates, n_targets = scores.shape
    if n_candidates == 0:
        nothing = torch.full((n_targets,), -1, dtype=torch.int64, device=scores.device)
        return nothing, scores.new_full((n_targets,), WORST_SCORE)
    usable = scores.where(scores.isfinite(), -torch.inf)
    candidate = usable.argmax(dim=0)
    score = usable.gather(0, candidate[None]).squeeze(0)
    found = score.isfinite()
    return candidate.where(found, -1), score.where(found, WORST_SCORE)
