"""Rows that span training images: sums of gradients of a dense first layer, sum_i delta_i x_i^T.

- Weights W = c W_0 + M X; an earlier checkpoint is the start W_0 of a later one.
- Adam's first moment and momentum buffers, sum_t b^(T-t) g_t: gradients of the last steps, without
  a start or Adam's rate of every weight. Weight decay that is part of the gradient adds c W, taken
  off as a start is, up to what W moved in these steps; decoupled decay (AdamW) adds nothing.
- Gradients of batches, as clients of federated learning send them.

Biases are the last column. Gradients are negated, so that rows point where weights go.
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
    """Rows in the span of one network's training images.

    `rows` (m, e), e = d or d + 1; `start` (m, e) is what hides them, None if unknown or absent.
    Each of `n_joined` equal parts is less a share of its own.
    """

    rows: Float[Tensor, "m e"]
    start: Float[Tensor, "m e"] | None = None
    source: Source = "weights"
    n_joined: int = 1

    def subspace(self, n_directions: int | None = None, surplus: float = 0.0) -> Subspace:
        """The span of the rows (`subspace_of`). It takes seconds, so the last few are cached."""
        options: dict[str, Any] = {"n_directions": n_directions, "surplus": surplus}
        options |= {"n_joined": self.n_joined, "has_start": self.source == "weights"}
        given = [t for t in (self.rows, self.start) if t is not None]
        digest = hashlib.sha256(b"".join(t.cpu().numpy().tobytes() for t in given)).digest()
        key = (digest, len(given), self.rows.dtype, self.rows.device, *options.values())
        if (span := _CACHED.get(key)) is None:
            span = _CACHED[key] = subspace_of(self.rows, self.start, **options)
            for old in list(_CACHED)[:-MOST_CACHED]:
                _CACHED.pop(old, None)
        return span

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
    """Gradients, or averages of them, of the first layer. `decayed`: the weights at the time, zero
    where weight decay added nothing, which are scaled to the gradients' size."""
    rows = -first_rows(gradient)
    if decayed is None:
        return SpanRows(rows, None, source)
    weights = first_rows(decayed)
    return SpanRows(rows, weights * _size(rows) / _size(weights), source)


def state_rows(averages: Sequence[Tensor], weights: Parameters, *, weight_decay: float) -> SpanRows:
    """An optimiser's averages of one network's first layer (`Trained.averages`), in whose gradients
    `weight_decay` times the weights are."""
    gradient = Parameters((averages[0],), (averages[1] if len(averages) > 1 else None,))
    return gradient_rows(gradient, "state", weights if weight_decay else None)


def joined(parts: Sequence[SpanRows]) -> SpanRows:
    """Stack rows of one source, so that images of any part are in their span.

    Parts are scaled to one size by powers of two, which round nothing; a repeated part counts once.
    Raises ValueError without parts, or if their sources or shapes differ or only some have a start.
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
