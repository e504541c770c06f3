"""Few atoms with coefficients at or above 0: sparse regression, many problems at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

N_KEPT, N_STEPS = 48, 80


@dataclass(frozen=True)
class Few:
    """`ids` of k atoms for every target, the largest coefficient first, and the `weights`."""

    ids: Int64[Tensor, "b k"]
    weights: Float[Tensor, "b k"]


def few_atoms(
    products: Float[Tensor, "b p"],
    gram: Float[Tensor, "p p"],
    k: int,
    *,
    penalty: float = 0.01,
    largest: float = 1.0,
) -> Few:
    """The k atoms of which a sum with coefficients in [0, largest] is nearest to each target.

    `products` of targets and atoms, `gram` of atoms. The N_KEPT most alike are ordered by
    proximal gradient descent with a penalty on the sum of coefficients, in shares of each atom's
    energy; the k largest are fitted by least squares.
    """
    energy = gram.diagonal().clamp(min=torch.finfo(gram.dtype).tiny)
    kept = (products / energy.sqrt()).topk(min(N_KEPT, len(gram)), dim=1).indices
    own = products.gather(1, kept)
    block = gram[kept[:, :, None], kept[:, None]]
    step = 1 / block.abs().sum(2).amax(1, keepdim=True)
    toll = penalty * energy[kept]
    weights = torch.zeros_like(own)
    ahead, t = weights, 1.0
    for _ in range(N_STEPS):
        slope = own - (block @ ahead[..., None])[..., 0] - toll
        again = (ahead + step * slope).clamp_(0, largest)
        t, before = (1 + (1 + 4 * t * t) ** 0.5) / 2, t
        ahead = again + (before - 1) / t * (again - weights)
        weights = again
    best = weights.topk(k, dim=1).indices
    fitted = least_squares(block, own, best).clamp_(0, largest)
    return Few(kept.gather(1, best), fitted)


def exchanged(
    products: Float[Tensor, "b p"],
    gram: Float[Tensor, "p p"],
    ids: Int64[Tensor, "b k"],
    *,
    largest: float = 1.0,
) -> Few:
    """The same after exchanges: each atom in turn gives way to the one that, beside the others,
    leaves least. Atoms of small coefficients, which no penalty keeps, are found so."""
    ids, energy = ids.clone(), gram.diagonal()
    for place in list(range(ids.shape[1])) * 2:
        others = torch.cat([ids[:, :place], ids[:, place + 1 :]], 1)
        cross = gram[others]
        block = _regular(cross.gather(2, others[:, None].expand(-1, others.shape[1], -1)))
        right = torch.cat([products.gather(1, others)[..., None], cross], 2)
        fitted = torch.linalg.solve(block, right)
        left = products - (fitted[:, :, :1] * cross).sum(1)
        alone = energy - (fitted[:, :, 1:] * cross).sum(1)
        gain = left.clamp(min=0).square() / alone.clamp(min=ALONE * float(energy.mean()))
        ids[:, place] = gain.scatter_(1, others, -1.0).argmax(1)
    chosen = gram[ids[:, :, None], ids[:, None]]
    weights = solved(chosen, products.gather(1, ids)).clamp_(0, largest)
    order = weights.argsort(1, descending=True)
    return Few(ids.gather(1, order), weights.gather(1, order))


ALONE = 1e-3
"""Share of the usual energy that an atom must have beside others to count for more."""


def least_squares(
    gram: Float[Tensor, "b s s"], products: Float[Tensor, "b s"], chosen: Int64[Tensor, "b k"]
) -> Float[Tensor, "b k"]:
    """Coefficients of the chosen atoms; where two are the same, small ones."""
    k = chosen.shape[1]
    rows = gram.gather(1, chosen[:, :, None].expand(-1, -1, gram.shape[2]))
    block = rows.gather(2, chosen[:, None].expand(-1, k, -1))
    return solved(block, products.gather(1, chosen))


def solved(block: Float[Tensor, "b k k"], right: Float[Tensor, "b k"]) -> Float[Tensor, "b k"]:
    """Solutions of symmetric systems, with a millionth of their scale on the diagonal."""
    found: Tensor = torch.linalg.solve(_regular(block), right[..., None])
    return found[..., 0]


def _regular(block: Float[Tensor, "b k k"]) -> Float[Tensor, "b k k"]:
    scale = block.diagonal(dim1=1, dim2=2).mean(1).clamp(min=torch.finfo(block.dtype).tiny)
    small = torch.eye(block.shape[1], dtype=block.dtype, device=block.device) * 1e-6
    return block + scale[:, None, None] * small


def ridge(
    a: Float[Tensor, "m n"],
    right: Float[Tensor, "m d"],
    damping: float,
    trust: Float[Tensor, " m"] | None = None,
) -> Float[Tensor, "n d"]:
    """Least squares, in float64, with `trust` in each row."""
    weighted = (a if trust is None else a * trust[:, None]).T
    normal: Float64[Tensor, "n n"] = (weighted @ a).double()
    normal.diagonal().add_(damping)
    found: Tensor = torch.linalg.solve(normal, (weighted @ right).double())
    return found.to(a)
