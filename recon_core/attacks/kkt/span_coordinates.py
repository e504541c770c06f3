"""Span coordinates of a search: x = z V, with V (k, d) the directions of the first layer.

With orthonormal rows of V the residual of a dense first layer splits into

    || W - sum_i c_i d_i x_i^T ||^2 = || W V^T - sum_i c_i d_i z_i^T ||^2 + || W - W V^T V ||^2,

whose last term is a constant: with W V^T in place of W a search over z is one over x in the span,
exactly. With biases in the first layer V are the directions of its weights alone. The box penalty
is one of pixels; it is computed for the attacks that left the box at the last look.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from recon_core.attacks.span.settings import SpanAttack
from recon_core.attacks.span.subspace import NoSpanError, subspace_of
from recon_core.victims.network import Architecture, Conv, Parameters


def check_dense_first(conv: Conv | None) -> None:
    if conv is not None:
        raise ValueError(
            f"attack.coordinates='span' on a victim whose first layer is a convolution of "
            f"{conv.kernel}x{conv.kernel}: its weights span patches, not images; use "
            "attack.coordinates=pixels"
        )


def directions_of(architecture: Architecture, parameters: Parameters) -> Float[Tensor, "r k d"]:
    """Orthonormal directions of the first layers of R networks, as many as the span attack takes of
    them; rows of zeros fill up those of a network that has fewer than another. Raises NoSpanError
    for a first layer that is not finite, or in which nothing stands out of the noise."""
    check_dense_first(architecture.network.conv)
    surplus = SpanAttack().surplus
    try:
        found = [subspace_of(w, surplus=surplus).vectors for w in parameters.weights[0]]
    except NoSpanError as error:
        why, *_its_fix = str(error).partition("; give")
        raise NoSpanError(f"{why}; use attack.coordinates=pixels") from error
    return stacked(found)


def stacked(directions: list[Float[Tensor, "_ d"]]) -> Float[Tensor, "r k d"]:
    """Several networks' directions as one tensor, filled up with zeros."""
    k = max(map(len, directions))
    return torch.stack([torch.nn.functional.pad(v, (0, 0, 0, k - len(v))) for v in directions])


@dataclass(frozen=True)
class SpanCoordinates:
    """The networks as they are for z, and how z and x become one another.

    `vectors` are of R victims, or of one that all attacks share. `parameters` have W V^T as first
    layer, on the "pictures" (1, 1, k) of `architecture`. `rest`: || W - W V^T V ||^2.
    """

    vectors: Float[Tensor, "r k d"]
    architecture: Architecture
    parameters: Parameters
    rest: Float64[Tensor, " r"]

    @classmethod
    def of(
        cls,
        architecture: Architecture,
        parameters: Parameters,
        vectors: Float[Tensor, "r k d"] | None = None,
    ) -> SpanCoordinates:
        """Those of R networks, in `vectors` or in directions of their own (`directions_of`)."""
        first = parameters.weights[0]
        if vectors is None:
            vectors = directions_of(architecture, parameters)
        inside = first.double() @ vectors.double().mT
        rest = (first.double() - inside @ vectors.double()).square().flatten(1).sum(1)
        return cls(
            vectors,
            replace(architecture, shape=(1, 1, vectors.shape[1])),
            Parameters((inside.to(first.dtype), *parameters.weights[1:]), parameters.biases),
            rest,
        )

    def rows(self, attacks: Tensor) -> SpanCoordinates:
        if len(self.vectors) == 1:
            return self
        parameters = self.parameters.rows(attacks)
        return SpanCoordinates(
            self.vectors[attacks], self.architecture, parameters, self.rest[attacks]
        )

    def inside(self, x: Float[Tensor, "q m d"]) -> Float[Tensor, "q m k"]:
        return times(x, self.vectors.mT)

    def pixels(self, z: Float[Tensor, "q m k"]) -> Float[Tensor, "q m d"]:
        return times(z, self.vectors)


def orthonormal(directions: Float[Tensor, "k d"]) -> Float[Tensor, "k d"]:
    """Orthonormal rows with the same span; those of a span attack have a number for the bias."""
    basis: Tensor = torch.linalg.qr(directions.double().mT)[0].mT
    return basis.to(directions.dtype)


def times(
    rows: Float[Tensor, "q m a"], matrix: Float[Tensor, "r a b"], out: Tensor | None = None
) -> Float[Tensor, "q m b"]:
    """rows @ matrix, of every attack's own or of one matrix for all."""
    if len(matrix) == len(rows):
        return torch.bmm(rows, matrix, out=out)
    flat = None if out is None else out.view(-1, out.shape[2])
    return torch.mm(rows.flatten(0, 1), matrix[0], out=flat).view(*rows.shape[:2], -1)


class Box:
    """The penalty of pixels outside [-1, 1], for candidates in span coordinates.

    `outside` (Q,): the attacks that had left the box at the last `look`. Only they have the
    penalty, until the next one, and where there is none of them it costs nothing.
    """

    def __init__(self, vectors: Float[Tensor, "r k d"], n_attacks: int, n_candidates: int) -> None:
        self.vectors = vectors
        self.size = (n_attacks, n_candidates, vectors.shape[2])
        self.outside: Bool[Tensor, " q"] = vectors.new_zeros(n_attacks, dtype=torch.bool)
        self.any = False

    def look(self, x: Float[Tensor, "q m d"]) -> bool:
        """Note which attacks have left the box; whether that changes how a step is computed."""
        self.outside.copy_((x.abs() > 1.0).flatten(1).any(1))
        before, self.any = self.any, bool(self.outside.any())
        if self.any and not before:
            k = self.vectors.shape[1]
            self.pixels = self.vectors.new_empty(self.size)
            self.excess = self.vectors.new_empty(*self.size[:2], k)
        return self.any != before

    def __call__(
        self, z: Float[Tensor, "q m k"], *, with_value: bool
    ) -> tuple[Float[Tensor, "q m k"] | None, Float[Tensor, " q"] | None]:
        """(half the gradient in z, the penalty); None and 0 where no attack has left the box."""
        if not self.any:
            return None, z.new_zeros(len(z)) if with_value else None
        times(z, self.vectors, out=self.pixels)
        torch.ops.aten.softshrink.out(self.pixels, 1.0, out=self.pixels)
        self.pixels.mul_(self.outside[:, None, None])
        times(self.pixels, self.vectors.mT, out=self.excess)
        return self.excess, self.pixels.square().sum((-1, -2)) if with_value else None
