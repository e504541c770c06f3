"""InstaHide's encodings: private and public images mixed, and every sign hidden.

`Mixing` is the model of the InstaHide paper (section 2): y = |X w|, pixels in units of a standard
normal. `InstaHide` is what the scheme's authors do (Huang et al. 2020): every epoch mixes each
private image with the one that a permutation gives it and with k_pub public ones, with random
coefficients that sum to 1. Signs carry nothing: encodings are kept as absolute values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int8, Int64
from torch import Tensor
from torch.nn import functional

from recon_core.strict import Count, Natural, NonNegative, Positive, Strict


@dataclass(frozen=True)
class Encodings:
    """m encodings, and what they are made of. `y`: absolute values of the mixed pixels. `private`,
    `public`: which images, with their weights. `labels`: mixed one-hot labels; None without."""

    y: Float[Tensor, "m d"]
    private: Int64[Tensor, "m 2"]
    private_weights: Float[Tensor, "m 2"]
    public: Int64[Tensor, "m k"]
    public_weights: Float[Tensor, "m k"]
    labels: Float[Tensor, "m n_classes"] | None = None

    def flipped(self, generator: torch.Generator) -> Float[Tensor, "m d"]:
        """As they are published: every pixel with a random sign."""
        return self.y * random_signs(self.y.shape, generator).to(self.y)


@dataclass(frozen=True, kw_only=True)
class Mixing(Strict):
    """The paper's model: weight `wa` on each of two private images, `wb` on each of `k_pub` public.
    `noise`: standard deviation of Gaussian noise that is added before signs are lost."""

    kind: Literal["theory"] = "theory"
    k_pub: Natural = 2
    wa: Positive = 2**-0.5
    wb: Positive = 2**-0.5
    noise: NonNegative = 0.0

    @classmethod
    def by_parts(cls, k_pub: int, noise: float = 0.0) -> Mixing:
        """Weights of definition 2.5: private and public images have variance 1 each."""
        return cls(k_pub=k_pub, wa=2**-0.5, wb=max(k_pub, 1) ** -0.5, noise=noise)

    @classmethod
    def as_a_whole(cls, k_pub: int, noise: float = 0.0) -> Mixing:
        """Equal weights of a unit vector, which the paper's GramExtract takes for granted."""
        return cls(k_pub=k_pub, wa=(2 + k_pub) ** -0.5, wb=(2 + k_pub) ** -0.5, noise=noise)

    @property
    def largest(self) -> float:
        """The largest coefficient of an image."""
        return max(self.wa, self.wb)

    @property
    def private_variance(self) -> float:
        """tau^2 = 2 wa^2 and the noise: of a pixel given its public images."""
        return 2 * self.wa**2 + self.noise**2

    @property
    def variance(self) -> float:
        """Variance of a pixel before its sign is lost, for standard normal images."""
        return self.private_variance + self.k_pub * self.wb**2

    def encode(
        self,
        private: Float[Tensor, "n d"],
        public: Float[Tensor, "p d"],
        m: int,
        *,
        generator: torch.Generator,
        labels: Float[Tensor, "n n_classes"] | None = None,
    ) -> Encodings:
        """m encodings of images drawn without repetition within each, independent of each other.
        Raises ValueError if there are fewer than two private or k_pub public images."""
        pairs = _drawn(m, len(private), 2, "private", generator)
        others = _drawn(m, len(public), self.k_pub, "public", generator)
        weights = private.new_full((m, 2), self.wa)
        shares = private.new_full((m, self.k_pub), self.wb)
        mixed = mixture(private, pairs, weights) + mixture(public, others, shares)
        if self.noise:
            mixed += self.noise * torch.randn(mixed.shape, generator=generator).to(mixed)
        own = None if labels is None else mixture(labels, pairs, weights / (2 * self.wa))
        return Encodings(mixed.abs(), pairs, weights, others, shares, own)


@dataclass(frozen=True, kw_only=True)
class InstaHide(Strict):
    """The scheme as it is used: `n_epochs` encodings of each private image. Coefficients are
    uniform on those that sum to 1 with none above `largest` (c_1 of Huang et al.)."""

    kind: Literal["instahide"] = "instahide"
    k_pub: Natural = 4
    largest: float = 0.65
    n_epochs: Count = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 / (2 + self.k_pub) < self.largest <= 1:
            raise ValueError(
                f"largest={self.largest} must be above 1/{2 + self.k_pub}, the mean of "
                f"{2 + self.k_pub} coefficients that sum to 1, and at most 1"
            )

    def encode(
        self,
        private: Float[Tensor, "n d"],
        public: Float[Tensor, "p d"],
        *,
        generator: torch.Generator,
        labels: Float[Tensor, "n n_classes"] | None = None,
    ) -> Encodings:
        """n_epochs * n encodings, epoch after epoch. Huang et al. allow that an image meets itself;
        here a permutation without fixed points is drawn."""
        n = len(private)
        if n < 2:
            raise ValueError(f"{n} private images are too few: every encoding has 2 of them")
        here, partners = torch.arange(n), list[Tensor]()
        while len(partners) < self.n_epochs:
            drawn = torch.randperm(n, generator=generator)
            if not bool((drawn == here).any()):
                partners.append(drawn)
        pairs = torch.stack([here.repeat(self.n_epochs), torch.cat(partners)], 1)
        others = _drawn(len(pairs), len(public), self.k_pub, "public", generator)
        lam = torch.full((len(pairs), 2 + self.k_pub), 2.0)
        while len(above := (lam.amax(1) > self.largest).nonzero()[:, 0]):
            spans = -torch.rand((len(above), 2 + self.k_pub), generator=generator).log()
            lam[above] = spans / spans.sum(1, keepdim=True)
        lam = lam.to(private)
        mixed = mixture(private, pairs, lam[:, :2]) + mixture(public, others, lam[:, 2:])
        own = None if labels is None else mixture(labels, pairs, lam[:, :2])
        return Encodings(mixed.abs(), pairs, lam[:, :2], others, lam[:, 2:], own)


Scheme = InstaHide | Mixing
"""Every union of the two must have this order: `Annotated` caches unions regardless of order, and
the first member is the one that is meant where no `kind` is given."""


def mixture(
    images: Float[Tensor, "n d"], ids: Int64[Tensor, "m k"], weights: Float[Tensor, "m k"]
) -> Float[Tensor, "m d"]:
    if not ids.numel():
        return images.new_zeros(len(ids), images.shape[1])
    return functional.embedding_bag(ids, images, per_sample_weights=weights.to(images), mode="sum")


def random_signs(shape: torch.Size, generator: torch.Generator) -> Int8[Tensor, "m d"]:
    return torch.randint(0, 2, shape, generator=generator, dtype=torch.int8) * 2 - 1


def _drawn(m: int, n: int, k: int, what: str, generator: torch.Generator) -> Int64[Tensor, "m k"]:
    """k different ones of n, m times."""
    if n < k:
        raise ValueError(f"{n} {what} images are too few: every encoding has {k} of them")
    ids = torch.randint(0, max(n, 1), (m, k), generator=generator)
    while True:
        ordered = ids.sort(1).values
        again = (ordered[:, 1:] == ordered[:, :-1]).any(1).nonzero()[:, 0]
        if not len(again):
            return ids
        ids[again] = torch.randint(0, n, (len(again), k), generator=generator)
