"""Encodings that share a private image, as Carlini et al. (2020) find them: clusters grown.

Around each encoding a cluster grows: the encoding with the largest total of scores to those that
are in it joins. k-means with the Jaccard distance makes n of them. Departures: a centre is a set of
as many encodings as clusters have, so that it stays one of what distances are between, and first
centres are drawn far apart (greedy k-means++).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from recon_core.strict import Strict


@dataclass(frozen=True, kw_only=True)
class Growth(Strict):
    """`n_seeds`: encodings that clusters grow from, drawn; 0: all. `share`: of an image's encodings
    that a cluster takes in. `n_rounds`: of k-means, at most."""

    kind: Literal["growth"] = "growth"
    n_seeds: int = 0
    share: float = 0.5
    n_rounds: int = 50

    def __post_init__(self) -> None:
        self._at_least(0, "n_seeds")
        self._at_least(1, "n_rounds")
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share} must be above 0 and at most 1")


def grown_groups(
    scores: Float[Tensor, "m m"],
    n: int,
    *,
    generator: torch.Generator,
    how: Growth | None = None,
) -> Bool[Tensor, "m n"]:
    """Encodings of each of n images, as far as clusters know them. `scores`: larger where more is
    common. Raises ValueError for fewer encodings, or fewer seeds, than images."""
    how = how or Growth()
    m = len(scores)
    n_seeds = how.n_seeds or m
    if not n <= n_seeds <= m:
        raise ValueError(
            f"{n_seeds} clusters of {m} encodings for {n} images: there must be as many clusters "
            "as images, and no more than encodings"
        )
    seeds = torch.randperm(m, generator=generator)[:n_seeds].to(scores.device)
    size = max(round(how.share * 2 * m / n), 2)
    return jaccard_kmeans(grown(scores, seeds, size), n, generator=generator, how=how).T


def grown(
    scores: Float[Tensor, "m m"], seeds: Int64[Tensor, " s"], size: int
) -> Bool[Tensor, "s m"]:
    """Clusters of `size` encodings, one from each seed."""
    scores = scores.clone().fill_diagonal_(0.0)
    rows = torch.arange(len(seeds), device=scores.device)
    clusters = torch.zeros((len(seeds), len(scores)), dtype=torch.bool, device=scores.device)
    clusters[rows, seeds] = True
    total = scores[seeds].masked_fill_(clusters, -torch.inf)
    for _ in range(min(size, len(scores)) - 1):
        joins = total.argmax(1)
        clusters[rows, joins] = True
        total += scores[joins]
        total[rows, joins] = -torch.inf
    return clusters


def jaccard_kmeans(
    clusters: Bool[Tensor, "s m"], n: int, *, generator: torch.Generator, how: Growth
) -> Bool[Tensor, "n m"]:
    members = clusters.float()
    size = max(round(float(members.sum(1).mean())), 1)
    centres = _far_apart(members, n, generator)
    nearest = None
    for _ in range(how.n_rounds):
        alike = jaccard(members, centres)
        best, again = alike.max(1)
        if nearest is not None and torch.equal(again, nearest):
            break
        nearest = again
        counts = torch.zeros_like(centres).index_add_(0, nearest, members)
        lost = counts.sum(1) == 0
        if bool(lost.any()):  # no cluster is nearest: the ones that nothing is near to
            counts[lost] = members[best.topk(int(lost.sum()), largest=False).indices]
        centres = torch.zeros_like(counts).scatter_(1, counts.topk(size, dim=1).indices, 1.0)
    return centres > 0


def jaccard(one: Float[Tensor, "s m"], other: Float[Tensor, "n m"]) -> Float[Tensor, "s n"]:
    """Intersection of two sets over their union; 1 less this is the distance."""
    common = one @ other.T
    either: Tensor = one.sum(1)[:, None] + other.sum(1) - common
    return common / either.clamp(min=1)


def _far_apart(
    members: Float[Tensor, "s m"], n: int, generator: torch.Generator
) -> Float[Tensor, "n m"]:
    """Clusters drawn by the square of their distance to those before, of CANDIDATES the one that
    leaves all others nearest."""
    far = members.new_ones(len(members))
    chosen: list[int] = []
    for _ in range(n):
        odds = far.square().double().cpu().clamp(min=1e-12)
        drawn = torch.multinomial(odds, CANDIDATES, replacement=True, generator=generator)
        left = torch.minimum(far[:, None], 1 - jaccard(members, members[drawn]))
        best = int(left.square().sum(0).argmin())
        far = left[:, best]
        chosen.append(int(drawn[best]))
    return members[chosen]


CANDIDATES = 16
