"""Pairs of a run: which training image each saved candidate shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from recon_core.matching import CLIPPED, best_and_second, confident_candidates, fit_to_range
from recon_core.metrics import ssim_matrix
from recon_core.types import Pairs

ROWS = 1 << 15
"""Pictures compared at once: 400 MB of float32 at 32x32x3."""


def pairs_of(
    saved: Float[Tensor, "s m c h w"],
    targets: UInt8[Tensor, "n c h w"],
    mean: Float[Tensor, "c h w"],
    *,
    iterations: Sequence[int],
    keep: Literal["confident", "all"],
    threshold: float,
    gap: float,
    clipped: float = CLIPPED,
) -> Pairs:
    """Match the candidates of one run; pairs are ordered by candidate, then by iteration.

    A candidate that matches one image with confidence at some iteration is paired with it at all
    saved iterations (image restoration paper, section 2); with keep="all", each is paired with its
    nearest image. A candidate hardly nearer to its image than `mean` is not confident. `saved` are
    in the victim's input space, `clipped` as in `fit_to_range`. Scores are computed on the device
    of `saved`, the rest on the CPU.
    """
    n_saved, n_candidates = saved.shape[:2]
    truth = targets.to(saved.device).float() / 255
    pictures = (fit_to_range(x, mean, clipped=clipped) for x in saved.flatten(0, 1).split(ROWS))
    scores = torch.cat([ssim_matrix(some, truth).cpu() for some in pictures])
    scores = scores.unflatten(0, (n_saved, n_candidates))
    rows, best, second = (
        v.unflatten(0, (n_saved, -1)) for v in best_and_second(scores.flatten(0, 1))
    )
    by_mean = ssim_matrix(mean.to(truth)[None], truth).cpu()[0]
    confident, target = confident_candidates(
        rows, best, second, threshold=threshold, margin=gap, shown_by_mean=by_mean
    )
    if keep == "all":
        chosen = torch.ones_like(confident)
        target_rows, to_target, to_other = rows, best, second
    else:
        chosen = confident
        target_rows = target.expand(n_saved, n_candidates)
        index = target[None, :, None].expand(n_saved, n_candidates, 1)
        to_target = scores.gather(2, index).squeeze(2)
        to_other = scores.scatter(2, index, -1.0).amax(dim=2)  # -1 if there is none
    candidate = torch.arange(n_candidates).expand(n_saved, n_candidates)
    iteration = torch.tensor(iterations)[:, None].expand(n_saved, n_candidates)

    def kept(values: Tensor) -> Tensor:
        some = values.transpose(0, 1)[chosen.to(values.device)]
        return some.flatten(0, 1).cpu().contiguous()

    return Pairs(
        reconstruction=kept(saved),
        target_row=kept(target_rows),
        candidate=kept(candidate),
        iteration=kept(iteration),
        ssim_best=kept(to_target),
        ssim_second=kept(to_other),
        confident=kept(confident.expand(n_saved, n_candidates)),
    )


def own_pairs(
    x: Float[Tensor, "b c h w"],
    targets: UInt8[Tensor, "n c h w"],
    target_row: Int64[Tensor, " b"],
    *,
    iterations: Int64[Tensor, " b"],
    keep: Literal["confident", "all"],
    threshold: float,
    gap: float,
) -> Pairs:
    """Pair pictures, in order, each with the image whose gradient or features it was reconstructed
    from. It is confident by its SSIM to that image and to the others of the run (-1 without
    others)."""
    pictures = x.float()
    truth = targets.to(x.device).float() / 255
    scores = torch.cat([ssim_matrix(rows, truth).cpu() for rows in pictures.split(ROWS)])
    index = target_row[:, None]
    own = scores.gather(1, index).squeeze(1)
    others = scores.scatter(1, index, -1.0).amax(dim=1)
    confident = (own > threshold) & (own - others >= gap)
    chosen = confident if keep == "confident" else torch.ones_like(confident)
    return Pairs(
        reconstruction=pictures.cpu()[chosen].contiguous(),
        target_row=target_row[chosen],
        candidate=torch.arange(len(x))[chosen],
        iteration=iterations.cpu()[chosen],
        ssim_best=own[chosen],
        ssim_second=others[chosen],
        confident=confident[chosen],
    )


def no_pairs(shape: Sequence[int]) -> Pairs:
    """The pairs of a run without reconstructions, for images (c, h, w)."""
    whole, flags = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool)
    return Pairs(
        reconstruction=torch.empty(0, *shape),
        target_row=whole,
        candidate=whole,
        iteration=whole,
        ssim_best=torch.empty(0),
        ssim_second=torch.empty(0),
        confident=flags,
    )
