"""Public images of natural encodings, and the sign of each window.

In a window, an encoding's whitened gradients are f = s (c + r), where c is the public images', r
the private images' and s the window's sign. For white r of variance nu the likelihood of c, with
both signs equally likely, is cosh(f c / nu) exp(-|c|^2 / 2 nu): expectation maximisation, in which
the expected sign is tanh(f c / nu) and the maximisation least squares. Coefficients are at or above
0 and few, which proximal steps keep.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from recon_core.attacks.instahide.coherence import public_coherence
from recon_core.strict import Strict
from recon_core.types import Progress, no_progress

AT_ONCE = 32
"""Encodings whose publics are looked for together: so many have their products in cache."""


@dataclass(frozen=True, kw_only=True)
class PublicSearch(Strict):
    """`n_kept`: public images that coherence leaves for each encoding. `n_steps` of expectation
    maximisation; `noise`: nu, in whitened units; `penalty`: on the sum of coefficients, in shares
    of each image's energy."""

    n_kept: int = 96
    n_steps: int = 200
    noise: float = 0.5
    penalty: float = 0.01

    def __post_init__(self) -> None:
        self._at_least(2, "n_kept")
        self._at_least(1, "n_steps")
        self._at_least(0, "penalty")
        self._positive("noise")


def coherent_publics(
    white: Float[Tensor, "w m p"],
    public: Float[Tensor, "w q p"],
    *,
    largest: float,
    how: PublicSearch | None = None,
    progress: Progress = no_progress,
) -> Float[Tensor, "m q"]:
    """Coefficients of the public images in every encoding, most of them 0, from windows of
    encodings (`white`) and of public images that are whitened alike."""
    how = how or PublicSearch()
    gram = torch.einsum("wip,wjp->ij", public, public)
    n_kept = min(how.n_kept, public.shape[1])
    likely = public_coherence(white, public).topk(n_kept, dim=1).indices
    found = []
    for rows in torch.arange(white.shape[1], device=white.device).split(AT_ONCE):
        found.append(_some(white[:, rows], public, gram, likely[rows], largest=largest, how=how))
        progress((int(rows[-1]) + 1) / white.shape[1])
    return torch.cat(found)


def window_signs(
    white: Float[Tensor, "w m p"], known: Float[Tensor, "w m p"], noise: float
) -> Float[Tensor, "w m"]:
    return torch.tanh((white * known).sum(2) / noise)


def _some(
    white: Float[Tensor, "w b p"],
    public: Float[Tensor, "w q p"],
    gram: Float[Tensor, "q q"],
    likely: Int64[Tensor, "b k"],
    *,
    largest: float,
    how: PublicSearch,
) -> Float[Tensor, "b q"]:
    products = torch.einsum("wbp,wqp->bwq", white, public)
    own = products.gather(2, likely[:, None].expand(-1, products.shape[1], -1))
    block = gram[likely[:, :, None], likely[:, None]]
    weights = torch.zeros_like(own[:, 0])
    weights[:, :1], weights[:, 1:2] = 0.2, 0.1  # at 0 no sign is known
    n_first = how.n_steps // 3
    weights = _maximised(own, block, weights, n_steps=n_first, largest=largest, how=how)
    best = weights.topk(min(MOST_LIKELY, weights.shape[1]), dim=1).indices
    likely = likely.gather(1, best)
    block = gram[likely[:, :, None], likely[:, None]]
    own = own.gather(2, best[:, None].expand(-1, own.shape[1], -1))
    weights = weights.gather(1, best)
    n_last = how.n_steps - n_first
    weights = _maximised(own, block, weights, n_steps=n_last, largest=largest, how=how)
    return torch.zeros_like(products[:, 0]).scatter_(1, likely, weights)


def _maximised(
    products: Float[Tensor, "b w k"],
    block: Float[Tensor, "b k k"],
    weights: Float[Tensor, "b k"],
    *,
    n_steps: int,
    largest: float,
    how: PublicSearch,
) -> Float[Tensor, "b k"]:
    """Proximal steps with the signs that are expected at each."""
    step = 1 / _largest_value(block)[:, None]
    toll = how.penalty * block.diagonal(dim1=1, dim2=2)
    for _ in range(n_steps):
        signs = torch.tanh((products @ weights[..., None])[..., 0] / how.noise)
        slope = (signs[:, None] @ products)[:, 0] - (block @ weights[..., None])[..., 0] - toll
        weights = (weights + step * slope).clamp_(0, largest)
    return weights


def _largest_value(block: Float[Tensor, "b k k"]) -> Float[Tensor, " b"]:
    """Slightly more than the largest eigenvalue of each Gram matrix, by power iteration."""
    vector: Tensor = block.diagonal(dim1=1, dim2=2).sqrt()
    for _ in range(10):
        vector = (block @ vector[..., None])[..., 0]
        length: Tensor = vector.norm(dim=1, keepdim=True)
        vector = vector / length
    return 1.1 * length[:, 0]


MOST_LIKELY = 32
"""Public images of an encoding that are left after a third of the steps."""
