"""The vote of all candidates at once, of the pieces that `matching` gives."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from recon_core.matching import nearest_distances, sum_of_votes


class Voted(NamedTuple):
    """Mean `x` of its `n_voters` candidates per image."""

    x: Tensor
    n_voters: Tensor


def vote(x: Tensor, distances: Tensor, *, ratio: float) -> Voted:
    """Each training image's mean of all candidates at most `ratio` times as far as its nearest."""
    nearest = nearest_distances(x, distances)
    total, n_voters = sum_of_votes(x, distances, nearest, ratio=ratio)
    return Voted((total / n_voters[:, None, None, None]).to(x.dtype), n_voters)
