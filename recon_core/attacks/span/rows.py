"""Rows that span training images: weights, optimisers' states, gradients.

Gradients of a dense first layer are sums of delta_i x_i^T over images, and so are their sums:

- Weights W = c W_0 + M X, with a start W_0 that is taken off if it is known. Of two checkpoints the
  earlier one is the start of the later one.
- Adam's first moment (1 - b) sum_t b^(T-t) g_t, and a momentum buffer sum_t mu^(T-t) g_t: raw
  gradients of the last steps, without a start or Adam's rate of every weight. Weight decay that is
  part of the gradient adds c W, taken off as a start is, but for what Adam moved in these steps.
  Decoupled decay (AdamW) adds nothing.
- Gradients of batches, as clients of federated learning send them.

Rows with biases end in these. Gradients are negated, so that they point where weights go.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.subspace import Subspace, subspace_of
from recon_core.victims.network import Parameters

Source = Literal["weights", "state", "gradients"]
MOST_CACHED = 8
_CACHED: dict[tuple[Any, ...], Subspace] = {}


@dataclass(frozen=True)
class SpanRows:
    """Rows in the span of one network's training images, and what hides them.

    `rows` (m, e), e = d or d + 1; `start` (m, e): what a share is fitted of and taken off, None if
    unknown or absent. Each of `n_joined` equally many rows has a share of its own.
    """

    rows: Float[Tensor, "m e"]
    start: Float[Tensor, "m e"] | None = None
    source: Source = "weights"
    n_joined: int = 1

    def subspace(
        self,
        shape: tuple[int, int, int] | None = None,
        *,
        n_directions: int | None = None,
        surplus: float = 0.0,
    ) -> Subspace:
        """Their span (`subspace_of`). It takes seconds, so the last few are cached."""
        given = [t for t in (self.rows, self.start) if t is not None]
        digest = hashlib.sha256(b"".join(t.cpu().numpy().tobytes() for t in given)).digest()
        options = (self.n_joined, self.source, shape, n_directions, surplus)
        key = (digest, len(given), self.rows.dtype, self.rows.device, *options)
        if key not in _CACHED:
            _CACHED[key] = subspace_of(
                self.rows, self.start, n_joined=self.n_joined, shape=shape,
                has_start=self.source == "weights", n_directions=n_directions, surplus=surplus,
            )  # fmt: skip
            for old in list(_CACHED)[:-MOST_CACHED]:
                _CACHED.pop(old, None)
        return _CACHED[key]

    def less(self, shares: Sequence[float]) -> Float[Tensor, "m e"]:
        """The rows less these shares of their start."""
        if self.start is None:
            return self.rows
        each = self.rows.new_tensor(shares).repeat_interleave(len(self.rows) // self.n_joined)
        return self.rows - each[:, None] * self.start

    def to(self, like: torch.device | str) -> SpanRows:
        start = None if self.start is None else self.start.to(like)
        return replace(self, rows=self.rows.to(like), start=start)


def first_rows(parameters: Parameters) -> Float[Tensor, "h e"]:
    """The first layer of one network (R = 1), biases behind the weights."""
    weight, bias = parameters.weights[0][0], parameters.biases[0]
    return weight if bias is None else torch.cat([weight, bias[0][:, None]], 1)


def weight_rows(parameters: Parameters, start: Parameters | None = None) -> SpanRows:
    """The weights of one network, less its start where that is known."""
    return SpanRows(first_rows(parameters), None if start is None else first_rows(start))


def gradient_rows(
    gradient: Parameters, source: Source, decayed: Parameters | None = None
) -> SpanRows:
    """Gradients, or averages of them, of the first layer; `decayed`: the weights at the time, zero
    where weight decay added nothing to the gradients. They are scaled to the gradients' size."""
    rows = -first_rows(gradient)
    if decayed is None:
        return SpanRows(rows, None, source)
    weights = first_rows(decayed)
    return SpanRows(rows, weights * _size(rows) / _size(weights), source)


def state_rows(averages: Sequence[Tensor], weights: Parameters, *, weight_decay: float) -> SpanRows:
    """What an optimiser remembers of one network's first layer (`Trained.averages`), in whose
    gradients `weight_decay` times the weights are."""
    bias = averages[1] if len(averages) > 1 else None
    gradient = Parameters((averages[0],), (bias,))
    return gradient_rows(gradient, "state", weights if weight_decay else None)


def joined(parts: Sequence[SpanRows]) -> SpanRows:
    """Rows of one source under each other, so that images of any part are in their span.

    Parts are brought to one size, by powers of two, which round nothing; the same part twice counts
    once. Raises ValueError for parts of several sources or shapes, of which some have a start and
    others none, or none at all.
    """
    kinds = {(p.rows.shape, p.source, p.start is None, p.n_joined) for p in parts}
    if len(kinds) != 1:
        raise ValueError(f"rows of {len(kinds)} kinds cannot be joined; give rows of one source")
    parts = [
        p for i, p in enumerate(parts) if not any(torch.equal(p.rows, q.rows) for q in parts[:i])
    ]
    starts = [p.start / _size(p.rows) for p in parts if p.start is not None]
    return replace(
        parts[0],
        rows=torch.cat([p.rows / _size(p.rows) for p in parts]),
        start=torch.cat(starts) if starts else None,
        n_joined=sum(p.n_joined for p in parts),
    )


def _size(rows: Tensor) -> float:
    """The power of two below the norm; 1 of zeros and of what is not finite."""
    norm = float(rows.double().norm())
    return 2.0 ** math.floor(math.log2(norm)) if 0 < norm < math.inf else 1.0
