"""The vote of all candidates at once, of the pieces that `matching` gives."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from recon_core.matching import mean_of_votes, nearest_candidates, sum_of_votes


@dataclass(frozen=True, kw_only=True)
class Voted:
    """Mean `x` of its `n_voters` candidates per image, and the row of the `nearest` of them."""

    x: Float[Tensor, "t c h w"]
    n_voters: Int[Tensor, " t"]
    nearest: Int[Tensor, " t"]


def vote(
    x: Float[Tensor, "p c h w"],
    distances: Float[Tensor, "p t"],
    *,
    ratio: float,
) -> Voted:
    """Each training image's mean of all candidates at most `ratio` times as far as its nearest."""
    distance, nearest = nearest_candidates(x, distances)
    total, n_voters = sum_of_votes(x, distances, distance, ratio=ratio)
    return Voted(x=mean_of_votes(total, n_voters).to(x.dtype), n_voters=n_voters, nearest=nearest)
