"""Coherence of gradients: a sign that two encodings of natural images share an image.

The mixed image u under y = |u| crosses zero along lines, so that within a small window y's
gradients are u's up to one sign. Gradients of a window are whitened over all encodings. The squared
inner product of two has no sign, and its sum over windows says whether encodings share an image
(`coherence`). By it public images are found (`coherent_publics`), and what they leave of the
encodings tells more (`pursued`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from recon_core.types import Progress, no_progress

ImageShape = tuple[int, int, int]
"""Channels, height and width."""
SIDE = 4
"""Of a window, in pixels; windows do not overlap."""
FLOOR = 0.2
"""Added to the variances of a window's directions before whitening, in shares of their mean."""
AT_ONCE = 32
"""Encodings whose public images are searched together: their products fit into the cache."""
N_KEPT, MOST_LIKELY = 96, 32
"""Public images of an encoding that coherence leaves, and that a third of the steps leaves."""
N_STEPS = 200
"""Of expectation maximisation."""
NOISE = 0.5
"""nu, the variance of what is private, in whitened units."""
PENALTY = 0.01
"""On the sum of coefficients, in shares of each image's energy."""


def gradient_windows(images: Float[Tensor, "m d"], shape: ImageShape) -> Float[Tensor, "w m p"]:
    """Differences of each pixel to the right one and to the one below, a vector for every window.
    Raises ValueError if the images are not of that shape, or smaller than a window."""
    channels, height, width = shape
    if images.shape[1] != channels * height * width:
        raise ValueError(
            f"images have {images.shape[1]} pixels; shape={shape} has {channels * height * width}"
        )
    if min(height, width) < SIDE:
        raise ValueError(f"images of {height} x {width} are smaller than a window's {SIDE} pixels")
    pictures = images.reshape(-1, *shape)
    across = functional.pad(pictures.diff(dim=3), (0, 1))
    down = functional.pad(pictures.diff(dim=2), (0, 0, 0, 1))
    cut = torch.cat([across, down], 1).unfold(2, SIDE, SIDE).unfold(3, SIDE, SIDE)
    vectors = cut.permute(2, 3, 0, 1, 4, 5)
    return vectors.reshape(-1, len(images), 2 * channels * SIDE**2)


def signs_of_pixels(signs: Float[Tensor, "w m"], shape: ImageShape) -> Float[Tensor, "m d"]:
    """The sign of every pixel: that of the nearest window."""
    channels, *sides = shape
    rows, columns = (
        (torch.arange(n, device=signs.device) // SIDE).clamp(max=n // SIDE - 1) for n in sides
    )
    places = rows[:, None] * (sides[1] // SIDE) + columns
    return signs.T[:, places.flatten().repeat(channels)]


def whitened_windows(
    shape: ImageShape, y: Float[Tensor, "m d"], *others: Float[Tensor, "q d"]
) -> list[Float[Tensor, "w _ p"]]:
    """Windows' gradients of encodings y and of other images, whitened as y's are over all y."""
    cut = gradient_windows(y, shape)
    values, vectors = torch.linalg.eigh(cut.mT @ cut / cut.shape[1])
    floor = FLOOR * values.mean(1, keepdim=True).clamp(min=torch.finfo(cut.dtype).tiny)
    whiten = (vectors * (values.clamp(min=0) + floor).rsqrt()[:, None]) @ vectors.mT
    return [cut @ whiten, *(gradient_windows(images, shape) @ whiten for images in others)]


def unit(vectors: Float[Tensor, "w m p"]) -> Float[Tensor, "w m p"]:
    """Vectors of length 1; zeros stay zeros."""
    lengths: Tensor = vectors.norm(dim=2, keepdim=True)
    return vectors / lengths.clamp(min=1e-3 * float(lengths.mean()) + 1e-30)


def coherence(white: Float[Tensor, "w m p"]) -> Float[Tensor, "m m"]:
    """Scores of encodings from their whitened windows: squared inner products of unit vectors,
    summed over windows and centred."""
    directions = unit(white)
    total = white.new_zeros(white.shape[1], white.shape[1])
    for window in directions:
        total += (window @ window.T).square_()
    return centred(total)


def centred(scores: Float[Tensor, "m m"]) -> Float[Tensor, "m m"]:
    """Scores without the diagonal and without the means of rows and columns."""
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


def coherent_publics(
    white: Float[Tensor, "w m p"],
    public: Float[Tensor, "w q p"],
    *,
    largest: float,
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
    gram = torch.einsum("wip,wjp->ij", public, public)
    coherent = public_coherence(white, public).topk(min(N_KEPT, public.shape[1]), dim=1).indices
    found = []
    for rows in torch.arange(white.shape[1], device=white.device).split(AT_ONCE):
        products = torch.einsum("wbp,wqp->bwq", white[:, rows], public)
        likely = coherent[rows]
        weights = products.new_zeros(likely.shape)
        weights[:, :1], weights[:, 1:2] = 0.2, 0.1  # at 0 no sign is known
        for n_steps in (N_STEPS // 3, N_STEPS - N_STEPS // 3):
            own = products.gather(2, likely[:, None].expand(-1, products.shape[1], -1))
            block = gram[likely[:, :, None], likely[:, None]]
            energy = block.diagonal(dim1=1, dim2=2)
            vector: Tensor = energy.sqrt()
            for _ in range(10):  # power iteration: the largest eigenvalue of each Gram matrix
                vector = (block @ vector[..., None])[..., 0]
                length: Tensor = vector.norm(dim=1, keepdim=True)
                vector = vector / length
            step, toll = 1 / (1.1 * length), PENALTY * energy
            for _ in range(n_steps):
                signs = torch.tanh((own @ weights[..., None])[..., 0] / NOISE)
                slope = (signs[:, None] @ own)[:, 0] - (block @ weights[..., None])[..., 0] - toll
                weights = (weights + step * slope).clamp_(0, largest)
            whole = torch.zeros_like(products[:, 0]).scatter_(1, likely, weights)
            best = weights.topk(min(MOST_LIKELY, weights.shape[1]), dim=1).indices
            likely, weights = likely.gather(1, best), weights.gather(1, best)
        found.append(whole)
        progress((int(rows[-1]) + 1) / white.shape[1])
    return torch.cat(found)


@dataclass(frozen=True)
class Pursued:
    """Evidence of public images: their `coefficients` in every encoding, the expected `signs` of
    windows, from -1 to 1, and the `scores` of what is left without them, not centred."""

    coefficients: Float[Tensor, "m q"]
    signs: Float[Tensor, "w m"]
    scores: Float[Tensor, "m m"]


def pursued(
    y: Float[Tensor, "m d"],
    shape: ImageShape,
    public: Float[Tensor, "q d"],
    *,
    largest: float,
    progress: Progress = no_progress,
) -> Pursued:
    """Public images by their whitened gradients, and the scores of what they leave. `public`: all
    images that may be in the encodings y; `largest`: the largest coefficient."""
    white, theirs = whitened_windows(shape, y, public)
    coefficients = coherent_publics(white, theirs, largest=largest, progress=progress)
    return without_publics(coefficients, white, theirs)


def without_publics(
    coefficients: Float[Tensor, "m q"],
    white: Float[Tensor, "w m p"],
    theirs: Float[Tensor, "w q p"],
) -> Pursued:
    """Signs of windows by the public images with these coefficients, and scores of what is left:
    inner products without squares, by how certain signs are; about 0 where nothing is common."""
    known = torch.einsum("mq,wqp->wmp", coefficients, theirs)
    signs = torch.tanh((white * known).sum(2) / NOISE)
    directions = unit(signs[..., None] * white - known) * signs.square()[:, :, None]
    scores = white.new_zeros(white.shape[1], white.shape[1])
    for window in directions:
        scores.addmm_(window, window.T)
    return Pursued(coefficients, signs, scores.fill_diagonal_(0.0))
