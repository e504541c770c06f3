"""References for the InstaHide attack: every possibility tried, published steps, and the truth.

With a similarity that knows the truth each step after it can be studied alone, at any noise.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64, Integer
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from recon_core.attacks.instahide.coherence import centred
from recon_core.attacks.instahide.graph import Edges, canonical, incidence_of
from recon_core.attacks.instahide.signs import Equations

ROWS = 500
CANDIDATES, K_MEANS = 16, 50
"""First centres that are tried for each cluster, and rounds of k-means, at most."""


def assign_by_trying(shared: Integer[np.ndarray, "m m"], n: int) -> list[Edges]:
    """All assignments of at most n images, by trying every one (InstaHide paper, Algorithm 2).

    Departs from the paper in that parallel edges are tried too, and in labelled edges: its brute
    force compares line graphs as if their vertices had an order.
    """
    found: list[list[tuple[int, int]]] = [[]]
    for k in range(len(shared)):
        longer = []
        for edges in found:
            for edge in itertools.combinations(range(n), 2):
                common = [len({*edge} & {*other}) for other in edges]
                if common == shared[k, :k].tolist():
                    longer.append([*edges, edge])
        found = longer
    distinct = {canonical(np.array(e, np.int64).reshape(-1, 2)).tobytes() for e in found}
    return [np.frombuffer(b, np.int64).reshape(-1, 2) for b in sorted(distinct)]


def all_solutions(
    y: Float64[np.ndarray, " m"],
    c: Float64[np.ndarray, " m"],
    equations: Equations,
    *,
    tolerance: float = 1e-8,
) -> list[Float64[np.ndarray, " n"]]:
    """Every z with |W z + c| = y at one pixel, by trying all signs (Algorithm 3).

    The paper keeps a z whose signs are right; that is not enough, since least squares may leave a
    residual with the right signs. Of a z that is not unique the shortest is given.
    """
    w = equations.matrix
    inverse = np.linalg.pinv(w)
    found: list[Float64[np.ndarray, " n"]] = []
    for signs in itertools.product((1.0, -1.0), repeat=len(y)):
        z = inverse @ (np.array(signs) * y - c)
        met = np.abs(np.abs(w @ z + c) - y).max() < tolerance
        if met and not any(np.abs(z - other).max() < tolerance for other in found):
            found.append(z)
    return found


def gram_extract(y: Float[Tensor, "m d"], n_images: int, eta: float) -> Float[Tensor, "m m"]:
    """k W W^T of the paper's step 1, for images of one weight 1/sqrt(k), k = `n_images`.

    Algorithm 1 of Chen et al. (2021), which the paper calls: rho^2 of each two encodings from the
    mean of their squares' product, its root rounded to a multiple of 1/k; below `eta` it is 0.
    """
    squares = y.square() - 1
    rho = (squares @ squares.T / (2 * y.shape[1])).clamp(min=0).sqrt()
    rho = rho.where(rho > eta, 0.0)
    return (rho * n_images).round().fill_diagonal_(float(n_images))


def squares(y: Float[Tensor, "m d"]) -> Float[Tensor, "m m"]:
    """Correlations of squared pixels, each in its own deviations over all encodings: the paper's
    statistic, which knows nothing of photographs."""
    off = y.square() - y.square().mean(0)
    spread = off.square().mean(0).sqrt()
    off /= spread.clamp(min=1e-3 * float(spread.mean()) + 1e-30)
    return centred(off @ off.T / y.shape[1])


def grown_clusters(
    scores: Float[Tensor, "m m"], n: int, *, generator: torch.Generator
) -> Float[Tensor, "m n"]:
    """Encodings of each of n images, as Carlini et al. (2020) group them: 1 for those of an image.

    A cluster of m / n encodings grows around each: the one with the largest total of scores to the
    members joins. k-means with the Jaccard distance makes n of them. Departures: a centre is a set
    of as many encodings as clusters have, and first centres are drawn far apart (greedy k-means++).
    """
    m = len(scores)
    size, rows = max(round(m / n), 2), torch.arange(m)
    seeds, members = torch.randperm(m, generator=generator), torch.zeros(m, m)
    others = scores.clone().fill_diagonal_(0.0)
    members[rows, seeds] = 1.0
    total = others[seeds].masked_fill_(members > 0, -torch.inf)
    for _ in range(size - 1):
        joins = total.argmax(1)
        members[rows, joins] = 1.0
        total += others[joins]
        total[rows, joins] = -torch.inf
    far, chosen = torch.ones(m), []
    for _ in range(n):
        odds = far.square().double().clamp(min=1e-12)
        drawn = torch.multinomial(odds, CANDIDATES, replacement=True, generator=generator)
        left = torch.minimum(far[:, None], 1 - _jaccard(members, members[drawn]))
        best = int(left.square().sum(0).argmin())
        far = left[:, best]
        chosen.append(int(drawn[best]))
    centres, nearest = members[chosen], None
    for _ in range(K_MEANS):
        alike, again = _jaccard(members, centres).max(1)
        if nearest is not None and torch.equal(again, nearest):
            break
        nearest = again
        counts = torch.zeros_like(centres).index_add_(0, nearest, members)
        lost = counts.sum(1) == 0  # no cluster is nearest: take those that are near to nothing
        counts[lost] = members[alike.topk(int(lost.sum()), largest=False).indices]
        centres = torch.zeros_like(counts).scatter_(1, counts.topk(size, dim=1).indices, 1.0)
    return centres.T


def _jaccard(one: Float[Tensor, "s m"], other: Float[Tensor, "n m"]) -> Float[Tensor, "s n"]:
    common = one @ other.T
    return common / (one.sum(1)[:, None] + other.sum(1) - common).clamp(min=1)


def pairs_right(edges: Int64[np.ndarray, "m 2"], private: Int64[Tensor, "m 2"], n: int) -> float:
    """The share of encodings with both images right, found images renamed for most to be."""
    known, true = (edges >= 0).all(1), np.sort(private.numpy(), axis=1)
    if not known.any():
        return 0.0
    alike = incidence_of(edges[known], n).T @ incidence_of(true[known], n)
    named = np.sort(linear_sum_assignment(-alike)[1][edges[known]], axis=1)
    return float((named == true[known]).all(1).sum() / len(edges))


def oracle_similarity(
    private: Int64[Tensor, "m 2"], *, noise: float, generator: torch.Generator
) -> Float32[Tensor, "m m"]:
    """Counts of common private images, with normal noise of that standard deviation; symmetric.

    The AUC is that of a shift of 1 / noise: .76 for 1, .92 for .5. Raises ValueError for a noise
    below 0.
    """
    if noise < 0:
        raise ValueError(f"noise={noise} must be 0 or more")
    found = torch.zeros(len(private), len(private), device=private.device)
    for row in range(0, len(private), ROWS):
        own, rest = private[row : row + ROWS], private[row:]
        same = (own[:, None, :, None] == rest[None, :, None, :]).sum((2, 3)).float()
        same += noise * torch.randn(same.shape, generator=generator).to(same)
        found[row : row + ROWS, row:] = same
    return found.triu_(1) + found.triu(1).T


def auc(scores: Float[Tensor, "m m"], private: Int64[Tensor, "m 2"]) -> float:
    """AUC of scores: two encodings with a common private image above two without; ties count half.

    Raises ValueError if all pairs have one, or none has.
    """
    above = torch.triu(torch.ones_like(scores, dtype=torch.bool), 1)
    share = torch.zeros_like(above)
    for row in range(0, len(private), ROWS):
        own = private[row : row + ROWS, None, :, None] == private[None, :, None, :]
        share[row : row + ROWS] = own.any(3).any(2)
    with_one, without = scores[share & above], scores[~share & above].sort().values
    if not len(with_one) or not len(without):
        raise ValueError(
            f"of {int(above.sum())} pairs {len(with_one)} have a common image: an AUC compares "
            "pairs that have one with pairs that have none"
        )
    below = torch.searchsorted(without, with_one.contiguous())
    equal = torch.searchsorted(without, with_one.contiguous(), right=True) - below
    return float((below.double() + equal.double() / 2).mean() / len(without))
