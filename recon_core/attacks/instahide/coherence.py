"""Coherence of gradients: a sign that two encodings of natural images share an image.

The mixed image u under y = |u| crosses zero along lines, so that within a small window y's
gradients are u's up to one sign. Gradients of a window are whitened over all encodings; the squared
inner product of two has no sign, and its sum over windows is the statistic (`coherence`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

from recon_core.strict import Count, NonNegative, Positive, Strict, Within
from recon_core.types import Progress, no_progress

ImageShape = tuple[int, int, int]
"""Channels, height and width."""


@dataclass(frozen=True, kw_only=True)
class Windows(Strict):
    """`side` of a window, `stride` from one to the next, in pixels. `floor`: what is added to the
    variance of every direction of a window before whitening, in shares of their mean."""

    side: int = 4
    stride: int = 4
    floor: Positive = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.side < 2 or not 1 <= self.stride <= self.side:
            raise ValueError(
                f"side={self.side} must be 2 or more and stride={self.stride} from 1 to it, or "
                "pixels are left out"
            )

    def of_pixels(self, shape: ImageShape) -> Int64[Tensor, "h w"]:
        """The window whose middle is nearest to each pixel, counted row by row."""
        rows, columns = (self._nearest(side) for side in shape[1:])
        return rows[:, None] * self.n_along(shape[2]) + columns

    def n_along(self, length: int) -> int:
        return (length - self.side) // self.stride + 1

    def _nearest(self, length: int) -> Int64[Tensor, " k"]:
        middles = torch.arange(self.n_along(length)) * self.stride + (self.side - 1) / 2
        return (torch.arange(length)[:, None] - middles).abs().argmin(1)


def gradient_windows(
    images: Float[Tensor, "m d"], shape: ImageShape, windows: Windows
) -> Float[Tensor, "w m p"]:
    """Differences to the right and to the one below, of every window as a vector. Raises ValueError
    if the images are not of that shape, or smaller than a window."""
    channels, height, width = shape
    if images.shape[1] != channels * height * width:
        raise ValueError(
            f"images have {images.shape[1]} pixels; shape={shape} has {channels * height * width}"
        )
    if min(height, width) < windows.side:
        raise ValueError(f"images of {height} x {width} are smaller than side={windows.side}")
    pictures = images.reshape(-1, *shape)
    across = functional.pad(pictures.diff(dim=3), (0, 1))
    down = functional.pad(pictures.diff(dim=2), (0, 0, 0, 1))
    side, stride = windows.side, windows.stride
    cut = torch.cat([across, down], 1).unfold(2, side, stride).unfold(3, side, stride)
    vectors = cut.permute(2, 3, 0, 1, 4, 5)
    return vectors.reshape(-1, len(images), 2 * channels * side * side)


def whitening(cut: Float[Tensor, "w m p"], windows: Windows) -> Float[Tensor, "w p p"]:
    covariance = cut.mT @ cut / cut.shape[1]
    values, vectors = torch.linalg.eigh(covariance)
    floor = windows.floor * values.mean(1, keepdim=True).clamp(min=torch.finfo(cut.dtype).tiny)
    found: Tensor = (vectors * (values.clamp(min=0) + floor).rsqrt()[:, None]) @ vectors.mT
    return found


def unit(vectors: Float[Tensor, "w m p"]) -> Float[Tensor, "w m p"]:
    """Vectors of length 1; zeros stay zeros."""
    lengths: Tensor = vectors.norm(dim=2, keepdim=True)
    return vectors / lengths.clamp(min=1e-3 * float(lengths.mean()) + 1e-30)


def coherence(white: Float[Tensor, "w m p"]) -> Float[Tensor, "m m"]:
    """The sum over windows of squared inner products of unit vectors, rows and columns centred, of
    whitened windows of encodings whose signs are not known."""
    directions = unit(white)
    total = white.new_zeros(white.shape[1], white.shape[1])
    for window in directions:
        total += (window @ window.T).square_()
    return centred(total)


def signed_coherence(
    private: Float[Tensor, "w m p"], certainty: Float[Tensor, "w m"]
) -> Float[Tensor, "m m"]:
    """The same without squares, where signs are known with a `certainty` in [0, 1]: windows of what
    public images leave. About 0 where nothing is common; not centred."""
    directions = unit(private) * certainty.square()[:, :, None]
    total = private.new_zeros(private.shape[1], private.shape[1])
    for window in directions:
        total.addmm_(window, window.T)
    return total.fill_diagonal_(0.0)


def centred(scores: Float[Tensor, "m m"]) -> Float[Tensor, "m m"]:
    """Without the diagonal, and what a row and a column have in all their entries."""
    scores = scores.fill_diagonal_(0.0)
    mean = scores.mean(0)
    return scores - mean - mean[:, None] + mean.mean()


def public_coherence(
    white: Float[Tensor, "w b p"], public: Float[Tensor, "w q p"]
) -> Float[Tensor, "b q"]:
    """Evidence for each public image in an encoding: squared inner products, in standard deviations
    of the public image's over the encodings."""
    found = white.new_zeros(white.shape[1], public.shape[1])
    for window, theirs in zip(unit(white), unit(public), strict=True):
        found += (window @ theirs.T).square_()
    return (found - found.mean(0)) / found.std(0).clamp(min=1e-30)


AT_ONCE = 32
"""Encodings whose publics are looked for together: so many have their products in cache."""


@dataclass(frozen=True, kw_only=True)
class PublicSearch(Strict):
    """`n_kept`: public images that coherence leaves for each encoding. `n_steps` of expectation
    maximisation; `noise`: nu, in whitened units; `penalty`: on the sum of coefficients, in shares
    of each image's energy."""

    n_kept: Annotated[int, Within("[2, inf)")] = 96
    n_steps: Count = 200
    noise: Positive = 0.5
    penalty: NonNegative = 0.01


def coherent_publics(
    white: Float[Tensor, "w m p"],
    public: Float[Tensor, "w q p"],
    *,
    largest: float,
    how: PublicSearch | None = None,
    progress: Progress = no_progress,
) -> Float[Tensor, "m q"]:
    """Coefficients of the public images in every encoding, most of them 0, from windows of
    encodings (`white`) and of public images that are whitened alike.

    In a window, an encoding's whitened gradients are f = s (c + r), where c is the public images',
    r the private images' and s the window's sign. For white r of variance nu the likelihood of c,
    with both signs equally likely, is cosh(f c / nu) exp(-|c|^2 / 2 nu): expectation maximisation,
    in which the expected sign is tanh(f c / nu) and the maximisation least squares. Coefficients
    are at or above 0 and few, which proximal steps keep.
    """
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
