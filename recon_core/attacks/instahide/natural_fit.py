"""Private images, their encodings and all coefficients, fitted to natural encodings in turns.

Fitted is y = |A x + c| for all pixels at once: alternating minimisation as in phase retrieval
(Netrapalli et al. 2013), with the assignment among the unknowns. Encodings count by the inverse of
their squared residual. Pixels of files are whole numbers; images near to them are rounded. Pairs
and public images are a few atoms with coefficients at or above 0: sparse regression of many
problems at once (`few_atoms`, `exchanged`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from recon_core.attacks.instahide.carlini import (
    PRESENT,
    SPARE,
    common_classes,
    independent_groups,
)
from recon_core.attacks.instahide.coherence import ImageShape, pursued, signs_of_pixels
from recon_core.attacks.instahide.mixing import Mixing, Scheme, mixture
from recon_core.attacks.instahide.signs import Equations, determined
from recon_core.strict import Count, Natural, Strict
from recon_core.types import Progress, no_progress

AT_ONCE = 500
"""Encodings whose pairs and weights are fitted together; bounds memory."""
EASY = 3
"""First rounds, without public images of small coefficients: private images are too rough."""
PATIENCE, PATIENCE_AT_LEVELS = 10, 2
"""Rounds without gain after which the fit stops; fewer where all images are at grey levels, and
only encodings are left."""
NEAR = 0.15
"""The mean distance to a grey level, in levels, from which on images are rounded."""
STRICTER = 50
"""Factor by which the tolerance is smaller for a proof, where images are rounded."""
FEWEST = 2
"""Encodings that two images can always meet; one more proves something."""
MOST = 0.98
"""Share of an encoding's pixels that must be met for it to be explained."""
N_CANDIDATES = 8
"""Private images that are tried as the first of a pair."""
N_KEPT, N_STEPS = 48, 80
"""Atoms that are kept for the proximal steps, and the number of these."""
ALONE = 1e-3
"""Share of the usual energy that an atom must have beside others to count for more."""


@dataclass(frozen=True, kw_only=True)
class Practical(Strict):
    """Settings of the attack on photographs. `n_rounds` of refinement at most. `n_levels`: grey
    levels that pixels have from `low` to `high`, 0 if they are any number. `n_again`: how often
    missing images are searched for again, at most."""

    kind: Literal["practical"] = "practical"
    n_rounds: Count = 100
    n_levels: int = 256
    low: float = -1.0
    high: float = 1.0
    n_again: Natural = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_levels == 1 or self.n_levels < 0 or self.low >= self.high:
            raise ValueError(
                f"n_levels={self.n_levels} must be 0 or at least 2, low={self.low} below "
                f"high={self.high}"
            )

    @property
    def spacing(self) -> float:
        """Distance of one grey level to the next; 0 without."""
        return (self.high - self.low) / (self.n_levels - 1) if self.n_levels else 0.0


@dataclass(frozen=True)
class PrivateWeights:
    """What is known of A before the fit. `allowed`: images that an encoding may have, by its label;
    `known`: the weight that each would have, None without labels. `free`: encodings whose private
    weights are fitted; `alike`: those whose label has one class. `classes` of images, None without
    labels."""

    allowed: Bool[Tensor, "m n"]
    known: Float[Tensor, "m n"] | None
    free: Bool[Tensor, " m"]
    alike: Bool[Tensor, " m"]
    classes: Int64[Tensor, " n"] | None = None

    @classmethod
    def of(
        cls,
        loads: Float[Tensor, "m n"],
        labels: Float[Tensor, "m n_classes"] | None,
        mixing: Scheme,
    ) -> PrivateWeights:
        """By the groups of encodings that have an image each, and mixed labels."""
        fixed = torch.full_like(loads, mixing.wa) if isinstance(mixing, Mixing) else None
        none = torch.zeros(len(loads), dtype=torch.bool, device=loads.device)
        if labels is None:
            free = none | (fixed is None)
            return cls(torch.ones_like(loads, dtype=torch.bool), fixed, free, none)
        has = labels > PRESENT
        classes = common_classes(loads, has)
        alike, allowed = has.sum(1) == 1, has[:, classes]
        if fixed is not None:
            return cls(allowed, fixed, none, alike, classes)
        known = labels[:, classes].to(loads) * allowed
        known = torch.where(alike[:, None], known / 2, known)
        return cls(allowed, known, alike, alike, classes)


@dataclass(frozen=True)
class Fitted:
    """Images, and what every encoding is made of. `residual`: root mean square over pixels of ||A x
    + c| - y|; `met`: the share of pixels at which that is below the tolerance; `exactly`: the share
    for the stricter tolerance of a proof."""

    images: Float[Tensor, "n d"]
    ends: Int64[Tensor, "m 2"]
    weights: Float[Tensor, "m 2"]
    public: Int64[Tensor, "m k"]
    public_weights: Float[Tensor, "m k"]
    residual: Float[Tensor, " m"]
    met: Float[Tensor, " m"]
    exactly: Float[Tensor, " m"]


class NaturalFit:
    """The problem: encodings `y`, public images `pool`, and what is known of the weights."""

    private: PrivateWeights

    def __init__(
        self,
        y: Float[Tensor, "m d"],
        pool: Float[Tensor, "q d"],
        shape: ImageShape,
        *,
        mixing: Scheme,
        labels: Float[Tensor, "m n_classes"] | None,
        how: Practical,
    ) -> None:
        self.y, self.pool, self.shape, self.largest = y, pool, shape, mixing.largest
        self.mixing, self.labels, self.how, self.k_pub = mixing, labels, how, mixing.k_pub
        self.public_weight = mixing.wb if isinstance(mixing, Mixing) else None
        # whitening: the inverse root of the mean spectrum, without the mean
        pictures = (pool if len(pool) else y).reshape(-1, *shape)
        away = pictures - pictures.mean((0, 2, 3), keepdim=True)
        power = torch.fft.rfft2(away).abs().square().mean((0, 1))
        self.filter = (power + 0.05 * power.mean()).rsqrt()
        self.filter[0, 0] = 0.0
        self.atoms = self.whitened(self.pool) if len(self.pool) else self.pool
        self.atoms_gram = self.atoms @ self.atoms.T
        self.tolerance = how.spacing / 20 or 1e-3 * float(self.y.square().mean().sqrt())

    def start(
        self,
        loads: Float[Tensor, "m n"],
        signs: Float[Tensor, "m d"],
        public_part: Float[Tensor, "m d"],
    ) -> Fitted:
        """Start from groups of encodings, the sign of every pixel and the public images' sum.
        `signs` are expected ones, in [-1, 1]: where they are not known, nothing is fitted."""
        known = self.private.known
        weights = loads / 4 if known is None else known * (loads > 0)
        images = ridge(weights, signs * self.y - public_part, 0.3)
        rows = torch.arange(len(self.y), device=self.y.device)
        ends, own = self._pairs(rows, signs * self.y - public_part, images)
        first = self.without_public(images, ends, own)
        mixed = public_part + mixture(images, ends, own)
        a = self._matrix(ends, own)
        images = ridge(a, mixed.sign() * self.y - public_part, 0.1)
        first = replace(first, images=images, met=torch.zeros_like(first.met))
        signs = (public_part + mixture(images, ends, own)).sign()
        return self._public_again(first, signs, easy=True)

    def started_again(
        self, f: Fitted, sure: Bool[Tensor, " n"], generator: torch.Generator
    ) -> Fitted | None:
        """Search for the images that were not proved, in the encodings that are not explained, with
        the proved images as public ones. None if nothing is missing, or encodings are too few."""
        rows, missing = (f.met < MOST).nonzero()[:, 0], (~sure).nonzero()[:, 0]
        n, y = len(missing), self.y[rows]
        if not n or n == len(sure) or len(rows) <= n + round(SPARE * n):
            return None
        pool = torch.cat([self.pool, f.images[sure]])
        pursuit = pursued(y, self.shape, pool, largest=self.largest)
        loads = independent_groups(pursuit.scores, n, generator=generator)
        whole = torch.zeros_like(self.private.allowed, dtype=loads.dtype)
        whole.scatter_(1, f.ends, 1.0)[:, missing] = 0.0
        whole[rows] = 0.0
        whole[rows[:, None], missing] = loads
        self.private = PrivateWeights.of(whole, self.labels, self.mixing)
        known, signs = self.private.known, signs_of_pixels(pursuit.signs, self.shape)
        public_part = pursuit.coefficients[:, : len(self.pool)] @ self.pool
        own = loads / 4 if known is None else known[rows][:, missing] * (loads > 0)
        images, ends, weights = f.images.clone(), f.ends.clone(), f.weights.clone()
        images[missing] = ridge(own, signs * y - pursuit.coefficients @ pool, 0.3)
        ends[rows], weights[rows] = self._pairs(rows, signs * y - public_part, images)
        signs_of_all = torch.zeros_like(self.y)
        signs_of_all[rows] = (public_part + mixture(images, ends[rows], weights[rows])).sign()
        f = replace(f, images=images, ends=ends, weights=weights)
        return self._measured(self._public_again(f, signs_of_all, easy=True))

    def without_public(
        self,
        images: Float[Tensor, "n d"],
        ends: Int64[Tensor, "m 2"],
        weights: Float[Tensor, "m 2"],
    ) -> Fitted:
        """Start from images, with public images of weight 0."""
        none = self.y.new_zeros(len(self.y))
        shares = self.y.new_zeros(len(self.y), self.k_pub)
        return self._measured(
            Fitted(images, ends, weights, shares.long(), shares, none, none, none)
        )

    def refined(self, fitted: Fitted, progress: Progress = no_progress) -> Fitted:
        """Round after round, until every encoding is explained, or nothing changes."""
        best = torch.inf
        waited = 0
        for k in range(self.how.n_rounds):
            fitted = self._public_again(fitted, self._mixed(fitted).sign(), easy=k < EASY)
            rows = (fitted.met < MOST).nonzero()[:, 0]
            rest = self._mixed(fitted).sign() * self.y - self._public_part(fitted)
            ends, weights = fitted.ends.clone(), fitted.weights.clone()
            ends[rows], weights[rows] = self._pairs(rows, rest[rows], fitted.images)
            fitted = replace(fitted, ends=ends, weights=weights)
            for _ in range(2):
                fitted = self._images_again(self._fitted_weights(fitted))
            fitted = self._rounded(fitted) if self.how.spacing else self._measured(fitted)
            progress((k + 1) / self.how.n_rounds)
            left = float((fitted.met < MOST).double().mean())
            off = left + float(fitted.residual.mean())
            waited = 0 if off < best * (1 - 1e-3) else waited + 1
            best = min(best, off)
            done = self.how.spacing > 0 and bool(self.at_levels(fitted.images).all())
            if left == 0 or waited > (PATIENCE_AT_LEVELS if done else PATIENCE):
                break
        return fitted

    def whitened(self, images: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """Without the spectrum that photographs share."""
        spectrum = torch.fft.rfft2(images.reshape(-1, *self.shape)) * self.filter
        pictures: Tensor = torch.fft.irfft2(spectrum, s=self.shape[1:])
        return pictures.flatten(1)

    def _images_again(self, f: Fitted) -> Fitted:
        """Least squares, in which encodings count by the inverse of their squared residual."""
        least = max(float(f.residual.quantile(0.02)), self.tolerance / 4)
        trust = 1 / (f.residual.square() + least**2)
        trust = trust / trust.amax()
        a, public_part, images = self._matrix(f.ends, f.weights), self._public_part(f), f.images
        for _ in range(2):
            signs = (a @ images + public_part).sign()
            images = ridge(a, signs * self.y - public_part, 1e-9, trust)
        if self.private.known is not None:
            return replace(f, images=images)
        # without known weights, an image and its weights have a common scale that the equations do
        # not fix; that all weights of an encoding sum to 1 does
        rest = (1 - f.public_weights.sum(1, keepdim=True)).clamp(min=0)
        scale = ridge(a, rest, 1e-6, trust)[:, 0].clamp(0.2, 5.0)
        return replace(f, images=images / scale[:, None], weights=f.weights * scale[f.ends])

    def _public_again(self, f: Fitted, signs: Float[Tensor, "m d"], *, easy: bool) -> Fitted:
        """Other public images for the encodings that are not explained."""
        if not self.k_pub:
            return f
        rows = (f.met < MOST).nonzero()[:, 0]
        ids, weights = f.public.clone(), f.public_weights.clone()
        for some in rows.split(AT_ONCE):
            private = mixture(f.images, f.ends[some], f.weights[some])
            rest = self.whitened(signs[some] * self.y[some] - private)
            products, gram, largest = rest @ self.atoms.T, self.atoms_gram, self.largest
            penalty = 0.01 if easy else 0.002
            found = few_atoms(products, gram, self.k_pub, penalty=penalty, largest=largest)
            if not easy:
                found = exchanged(products, gram, found[0], largest=largest)
            ids[some], weights[some] = found
        if self.public_weight is not None:
            weights = torch.full_like(weights, self.public_weight)
        return replace(f, public=ids, public_weights=weights)

    def _pairs(
        self, rows: Int64[Tensor, " b"], rest: Float[Tensor, "b d"], images: Float[Tensor, "n d"]
    ) -> tuple[Int64[Tensor, "b 2"], Float[Tensor, "b 2"]]:
        """The two images and their weights nearest to `rest`, what public images leave.

        Where weights are known, the pair that takes most from the residual, of the likeliest first
        images and the best second one; if labels allow no pair, the two that are likeliest alone.
        """
        theirs = self.whitened(images)
        gram = theirs @ theirs.T
        products = torch.cat([self.whitened(r) @ theirs.T for r in rest.split(AT_ONCE)])
        if self.private.known is None:
            return few_atoms(products, gram, 2, penalty=0.001, largest=self.largest)
        known = self.private.known[rows]
        gain = 2 * known * products - known.square() * gram.diagonal()
        ends = gain.topk(2, dim=1).indices
        gain = gain.masked_fill(~self.private.allowed[rows], -torch.inf)
        firsts = gain.topk(min(N_CANDIDATES, len(gram)), dim=1).indices
        best = gain.new_full((len(gain),), -torch.inf)
        for first in firsts.T:
            own = known.gather(1, first[:, None])
            both = gain - 2 * own * known * gram[first] + gain.gather(1, first[:, None])
            both.scatter_(1, first[:, None], -torch.inf)
            classes = self.private.classes
            if classes is not None:
                twice = (classes == classes[first][:, None]) & ~self.private.alike[rows][:, None]
                both = both.masked_fill(twice, -torch.inf)
            value, second = both.max(1)
            better = value > best
            best = value.where(better, best)
            ends[better] = torch.stack([first, second], 1)[better]
        return ends, known.gather(1, ends)

    def _fitted_weights(self, f: Fitted) -> Fitted:
        if self.public_weight is not None and not bool(self.private.free.any()):
            return self._measured(f)
        weights, shares = f.weights.clone(), f.public_weights.clone()
        signs = self._mixed(f).sign()
        for some in torch.arange(len(self.y), device=self.y.device).split(AT_ONCE):
            basis = torch.cat([f.images[f.ends[some]], self.pool[f.public[some]]], 1)
            block = (basis @ basis.mT).double()
            right = (basis @ (signs[some] * self.y[some])[..., None])[..., 0].double()
            both = solved(block, right).clamp(0, self.largest).to(weights)
            fixed = (right - (block[:, :, :2] @ weights[some].double()[..., None])[..., 0])[:, 2:]
            public = solved(block[:, 2:, 2:], fixed).clamp(0, self.largest).to(weights)
            free = self.private.free[some][:, None]
            weights[some] = both[:, :2].where(free, weights[some])
            if self.public_weight is None:
                shares[some] = both[:, 2:].where(free, public)
        return self._measured(replace(f, weights=weights, public_weights=shares))

    def sure(self, f: Fitted) -> Bool[Tensor, " n"]:
        """Images that explained encodings determine, at grey levels where there are any."""
        n = len(f.images)
        proves, sure = f.exactly >= MOST, np.zeros(n, bool)
        if not self.how.spacing:
            proves = proves & ~self.private.free
        edges = np.asarray(f.ends[proves].cpu())
        if len(edges):
            equations = Equations(edges, np.asarray(f.weights[proves].double().cpu()), n)
            sure = determined(equations, with_public=self.k_pub > 0).images
        sure = sure & (np.bincount(edges.ravel(), minlength=n) > FEWEST)
        found = torch.from_numpy(sure).to(proves.device)
        return found & self.at_levels(f.images) if self.how.spacing else found

    def at_levels(self, images: Float[Tensor, "n d"]) -> Bool[Tensor, " n"]:
        """Images of which every pixel is a grey level, to rounding errors."""
        return ((images - self._nearest(images)).abs() <= self.tolerance / STRICTER).all(1)

    def _nearest(self, images: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        spacing = self.how.spacing
        levels = ((images - self.how.low) / spacing).round().clamp_(0, self.how.n_levels - 1)
        return levels * spacing + self.how.low

    def _rounded(self, f: Fitted) -> Fitted:
        """Images to grey levels, if that proves them: encodings are met exactly with them.

        An image that is off by whole levels everywhere is as near to levels as the right one.
        """
        spacing = self.how.spacing
        near = self._nearest(f.images)
        close = (f.images - near).abs().mean(1) < NEAR * spacing  # by chance a quarter
        tried = replace(f, images=near.where(close[:, None], f.images))
        tried = self._measured(self._fitted_weights(tried))
        proofs = tried.ends[tried.exactly >= MOST].flatten()
        proven = torch.bincount(proofs, minlength=len(close)) > FEWEST
        kept = near.where((close & proven)[:, None], f.images)
        return self._measured(self._fitted_weights(replace(f, images=kept)))

    def _mixed(self, f: Fitted) -> Float[Tensor, "m d"]:
        return self._matrix(f.ends, f.weights) @ f.images + self._public_part(f)

    def _public_part(self, f: Fitted) -> Float[Tensor, "m d"]:
        return mixture(self.pool, f.public, f.public_weights)

    def _measured(self, f: Fitted) -> Fitted:
        off = (self._mixed(f).abs() - self.y).abs()
        met = (off <= self.tolerance).to(off).mean(1)
        least = self.tolerance / (STRICTER if self.how.spacing else 1)
        exactly = (off <= least).to(off).mean(1)
        return replace(f, residual=off.square().mean(1).sqrt(), met=met, exactly=exactly)

    def _matrix(
        self, ends: Int64[Tensor, "m 2"], weights: Float[Tensor, "m 2"]
    ) -> Float[Tensor, "m n"]:
        n = self.private.allowed.shape[1]
        return weights.new_zeros(len(ends), n).scatter_(1, ends, weights)


def few_atoms(
    products: Float[Tensor, "b p"],
    gram: Float[Tensor, "p p"],
    k: int,
    *,
    penalty: float = 0.01,
    largest: float = 1.0,
) -> tuple[Int64[Tensor, "b k"], Float[Tensor, "b k"]]:
    """Ids and coefficients in [0, largest] of the k atoms whose sum is nearest to each target.

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
    ids = kept.gather(1, best)
    chosen = gram[ids[:, :, None], ids[:, None]]
    return ids, solved(chosen, own.gather(1, best)).clamp_(0, largest)


def exchanged(
    products: Float[Tensor, "b p"],
    gram: Float[Tensor, "p p"],
    ids: Int64[Tensor, "b k"],
    *,
    largest: float = 1.0,
) -> tuple[Int64[Tensor, "b k"], Float[Tensor, "b k"]]:
    """Ids and coefficients after exchanges: each atom in turn gives way to the one that, beside the
    others, leaves least. That finds atoms of small coefficients, which no penalty keeps."""
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
    return ids.gather(1, order), weights.gather(1, order)


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
