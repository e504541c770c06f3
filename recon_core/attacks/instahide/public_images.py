"""Public images of every encoding: step 2 of the InstaHide paper (section 3.2).

For standard normal images E[(y^2 / var - 1) (p p^T - I)] = 2 w w^T / var over pixels, where p are
the public images' values at a pixel and w their weights: a spike of k_pub entries, which `by_sdp`
finds as the paper does. `find_publics` screens by the diagonal, adds images greedily, and exchanges
them by the block and, at last, by the likelihood of y itself.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from recon_core.attacks.instahide.mixing import Mixing, Scheme, mixture
from recon_core.types import Progress, no_progress

AT_ONCE_ON_CPU, AT_ONCE_ON_GPU = 8, 256
"""Encodings whose blocks are computed together: on a CPU few, whose images its cache holds."""
DOUBT = 6.0
"""A choice is certain if the best exchange would lose this many of its standard deviations."""
N_KEPT = 64
"""Images that the diagonal leaves for the block."""


def find_publics(
    y: Float[Tensor, "m d"],
    public: Float[Tensor, "p d"],
    mixing: Mixing,
    n_tried: int = 8,
) -> Int64[Tensor, "m k"]:
    """The k_pub public images of every encoding, in ascending order. Pixels are in units of a
    standard normal. `n_tried`: how many of the best are tried by likelihood in place of a chosen
    one. Raises ValueError if there are fewer than k_pub."""
    k = mixing.k_pub
    if len(public) < k:
        raise ValueError(f"{len(public)} public images are too few: every encoding has {k} of them")
    if k == 0:
        return torch.zeros((len(y), 0), dtype=torch.int64, device=y.device)
    by_diagonal = (y.square() / mixing.variance - 1) @ (public.square() - 1).T
    kept = by_diagonal.topk(min(max(N_KEPT, k), len(public)), dim=1).indices
    found = []
    at_once = AT_ONCE_ON_CPU if y.device.type == "cpu" else AT_ONCE_ON_GPU
    doubted = torch.zeros(len(y), dtype=torch.bool, device=y.device)
    for rows in torch.arange(len(y), device=y.device).split(at_once):
        some = kept[rows]
        block = spike(y[rows], public[some], mixing)
        gain, greedy = block.diagonal(dim1=1, dim2=2).clone(), []
        for _ in range(k):  # one after another the image that adds most to the sum of the block
            best = gain.argmax(1, keepdim=True)
            greedy.append(best)
            gain += 2 * block.gather(1, best[:, :, None].expand(-1, 1, block.shape[2]))[:, 0]
            gain.scatter_(1, best, -torch.inf)
        chosen, loss = _exchanged(block, torch.cat(greedy, 1))
        found.append(some.gather(1, chosen))
        doubted[rows] = loss < DOUBT * ((8 + 16 * (k - 1)) / y.shape[1]) ** 0.5
    ids = torch.cat(found)
    for rows in doubted.nonzero()[:, 0].split(at_once) if n_tried else ():
        tried = kept[rows, : n_tried + k]
        ids[rows] = _by_likelihood(y[rows], public, ids[rows], tried, mixing)
    return ids.sort(1).values


def spike(
    y: Float[Tensor, "b d"], public: Float[Tensor, "b s d"], mixing: Mixing
) -> Float[Tensor, "b s s"]:
    """M of section 3.2: the mean of (y^2 / var - 1) (p p^T - I) over pixels."""
    z = y.square() / mixing.variance - 1
    found = (public * z[:, None]) @ public.mT / y.shape[1]
    found.diagonal(dim1=1, dim2=2).sub_(z.mean(1, keepdim=True))
    return found


def _exchanged(
    block: Float[Tensor, "b s s"], chosen: Int64[Tensor, "b k"]
) -> tuple[Int64[Tensor, "b k"], Float[Tensor, " b"]]:
    """Exchanges while the sum of the block grows, and what the best further one would lose."""
    b, k = chosen.shape
    own = block.diagonal(dim1=1, dim2=2)
    for _ in range(10):
        rows = block.gather(1, chosen[:, :, None].expand(b, k, block.shape[2]))
        others = rows.sum(1)  # (b, s): to all that are chosen
        left = own.gather(1, chosen) + 2 * (others - own).gather(1, chosen)
        gain = own[:, None] + 2 * (others[:, None] - rows) - left[:, :, None]
        gain.scatter_(2, chosen[:, None].expand(b, k, k), -torch.inf)
        best, where = gain.flatten(1).max(1)
        better = (best > 0).nonzero()[:, 0]
        if not len(better):
            break
        out, into = where // block.shape[2], where % block.shape[2]
        chosen[better, out[better]] = into[better]
    return chosen, -best


def _by_likelihood(
    y: Float[Tensor, "b d"],
    public: Float[Tensor, "p d"],
    ids: Int64[Tensor, "b k"],
    candidates: Int64[Tensor, "b t"],
    mixing: Mixing,
) -> Int64[Tensor, "b k"]:
    """Exchange images while the likelihood of |s + c| = y grows, for normal s."""
    k, variance = ids.shape[1], mixing.private_variance
    weights = y.new_full(ids.shape, mixing.wb)
    c = mixture(public, ids, weights)
    score = folded_likelihood(y, c, variance)
    for _ in range(2 * k):
        best, change = score, torch.full((len(ids), 2), -1, device=y.device)
        for out in range(k):
            without = c - mixing.wb * public[ids[:, out]]
            for t in range(candidates.shape[1]):
                into = candidates[:, t]
                tried = folded_likelihood(y, without + mixing.wb * public[into], variance)
                tried = tried.where(~(ids == into[:, None]).any(1), -torch.inf)
                better = tried > best
                best = best.where(~better, tried)
                move = torch.tensor([out, t], device=y.device)
                change = torch.where(better[:, None], move, change)
        rows = (change[:, 0] >= 0).nonzero()[:, 0]
        if not len(rows):
            break
        ids[rows, change[rows, 0]] = candidates[rows, change[rows, 1]]
        c, score = mixture(public, ids, weights), best
    return ids


def folded_likelihood(
    y: Float[Tensor, "*b d"], c: Float[Tensor, "*b d"], variance: float
) -> Float[Tensor, "*b"]:
    """log p(y | c) summed over pixels, of y = |s + c| with s ~ N(0, variance), less a constant."""
    product = (y * c).abs() / variance
    cosh = product + torch.log1p(torch.exp(-2 * product))
    return (cosh - c.square() / (2 * variance)).sum(-1)


MAX_PUBLIC = 40
"""Public images up to which the program is solved in a second or so for each encoding; of 60 some
take minutes."""


def check_pool(n_public: int, mixing: Scheme) -> None:
    """ValueError for more public images than the program takes, or fewer than encodings have."""
    if n_public > MAX_PUBLIC:
        raise ValueError(
            f"{n_public:,} public images are too many for the semidefinite program, which has "
            f"{n_public**2:,} unknowns for each encoding; give at most {MAX_PUBLIC}, or use the "
            "method exact, which takes thousands"
        )
    if n_public < mixing.k_pub:
        raise ValueError(
            f"{n_public} public images are too few: every encoding has {mixing.k_pub} of them"
        )


def by_sdp(
    y: Float[Tensor, "m d"],
    public: Float[Tensor, "p d"],
    mixing: Mixing,
    *,
    progress: Progress = no_progress,
) -> Int64[Tensor, "m k"]:
    """The k_pub public images of every encoding, in ascending order, by the paper's program.

    With M the `spike` of an encoding: max <M, Z> over Z psd with tr Z = 1 and sum |Z| <= k_pub; the
    largest k_pub entries of Z's leading eigenvector are its public images. Z has p^2 entries for p
    public images, so this takes them by the dozen. Raises ValueError as `check_pool`, or if the
    solver gives nothing for an encoding.
    """
    check_pool(len(public), mixing)
    p, k = len(public), mixing.k_pub
    found = np.zeros((len(y), k), np.int64)
    if not k:
        return torch.from_numpy(found).to(y.device)
    cvxpy: Any = importlib.import_module("cvxpy")  # its names are made at run time
    m, z = cvxpy.Parameter((p, p), symmetric=True), cvxpy.Variable((p, p), PSD=True)
    within = [cvxpy.trace(z) == 1, cvxpy.sum(cvxpy.abs(z)) <= k]
    problem = cvxpy.Problem(cvxpy.Maximize(cvxpy.sum(cvxpy.multiply(m, z))), within)
    for row in range(len(y)):
        block = spike(y[row : row + 1].double(), public[None].double(), mixing)[0].cpu().numpy()
        m.value = (block + block.T) / 2
        problem.solve(solver=cvxpy.SCS, warm_start=False)
        if problem.status not in (cvxpy.OPTIMAL, cvxpy.OPTIMAL_INACCURATE):
            raise ValueError(
                f"the semidefinite program of encoding {row} has no solution to this accuracy; use "
                "the method exact"
            )
        leading = np.linalg.eigh(np.asarray(z.value))[1][:, -1]
        found[row] = np.sort(np.argsort(-np.abs(leading), kind="stable")[:k])
        progress((row + 1) / len(y))
    return torch.from_numpy(found).to(y.device)
