"""Statistics of whether two encodings of photographs share a private image, by what they know:
nothing (`squares`, as the InstaHide paper), neighbours (`gradients`, `laplacian`), second moments
of a window (`whitened`), its common sign (`coherence`), public images (`pursuit`), training
(`learned`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from recon_core.attacks.instahide.coherence import (
    ImageShape,
    PublicSearch,
    Windows,
    centred,
    coherence,
    coherent_publics,
    gradient_windows,
    signed_coherence,
    whitening,
    window_signs,
)
from recon_core.attacks.instahide.similarity_network import Similarity
from recon_core.types import Progress, no_progress

Scores = Float[Tensor, "m m"]


@dataclass(frozen=True)
class Seen:
    """Encodings, their signs dropped, and what else is known. `public`: all images that may have
    been mixed in. `largest`: the largest coefficient. `network`: trained on other photographs."""

    y: Float[Tensor, "m d"]
    shape: ImageShape
    public: Float[Tensor, "q d"] | None = None
    largest: float = 0.65
    network: Similarity | None = None
    windows: Windows = field(default_factory=Windows)
    search: PublicSearch = field(default_factory=PublicSearch)


@dataclass(frozen=True)
class Statistic:
    """`needs`: what of `Seen` must be there beside encodings."""

    score: Callable[[Seen], Scores]
    needs: Literal["nothing", "public images", "a trained network"] = "nothing"


def likeness(name: str, seen: Seen) -> Scores:
    """Scores by the statistic of that name: centred, larger where more is common. Raises ValueError
    for a name that is not in STATISTICS, and if what it needs is not there."""
    if name not in STATISTICS:
        raise ValueError(f"unknown statistic {name!r}; use one of {', '.join(STATISTICS)}")
    statistic = STATISTICS[name]
    there = {"nothing": seen, "public images": seen.public, "a trained network": seen.network}
    if there[statistic.needs] is None:
        raise ValueError(f"{name} needs {statistic.needs}, which are not given")
    return statistic.score(seen)


def _squares(seen: Seen) -> Scores:
    return _correlated(seen.y)


def _gradients(seen: Seen) -> Scores:
    pictures = seen.y.reshape(-1, *seen.shape)
    return _correlated(torch.cat([pictures.diff(dim=k).flatten(1) for k in (2, 3)], 1))


def _laplacian(seen: Seen) -> Scores:
    kernel = seen.y.new_tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]])
    pictures = seen.y.reshape(-1, 1, *seen.shape[1:])
    return _correlated(functional.conv2d(pictures, kernel[None, None]).reshape(len(seen.y), -1))


def _whitened(seen: Seen) -> Scores:
    cut = gradient_windows(seen.y, seen.shape, seen.windows)
    return _correlated((cut @ whitening(cut, seen.windows)).transpose(0, 1).flatten(1))


def _coherence(seen: Seen) -> Scores:
    cut = gradient_windows(seen.y, seen.shape, seen.windows)
    return coherence(cut @ whitening(cut, seen.windows))


def _pursuit(seen: Seen) -> Scores:
    assert seen.public is not None
    return centred(pursued(seen, seen.public).scores)


def _learned(seen: Seen) -> Scores:
    assert seen.network is not None
    return centred(seen.network.scores(seen.y))


STATISTICS: dict[str, Statistic] = {
    "squares": Statistic(_squares),
    "gradients": Statistic(_gradients),
    "laplacian": Statistic(_laplacian),
    "whitened": Statistic(_whitened),
    "coherence": Statistic(_coherence),
    "pursuit": Statistic(_pursuit, "public images"),
    "learned": Statistic(_learned, "a trained network"),
}


@dataclass(frozen=True)
class Pursued:
    """Evidence of public images: their `coefficients` in every encoding, the expected `signs` of
    windows, from -1 to 1, and the scores of what is left when they are taken away, not centred."""

    coefficients: Float[Tensor, "m q"]
    signs: Float[Tensor, "w m"]
    scores: Scores


def pursued(seen: Seen, public: Float[Tensor, "q d"], progress: Progress = no_progress) -> Pursued:
    """Public images found by matching their whitened gradients, and taken away."""
    cut = gradient_windows(seen.y, seen.shape, seen.windows)
    whiten = whitening(cut, seen.windows)
    white = cut @ whiten
    theirs = gradient_windows(public, seen.shape, seen.windows) @ whiten
    coefficients = coherent_publics(
        white, theirs, largest=seen.largest, how=seen.search, progress=progress
    )
    return left_by(coefficients, white, theirs, seen.search.noise)


def left_by(
    coefficients: Float[Tensor, "m q"],
    white: Float[Tensor, "w m p"],
    theirs: Float[Tensor, "w q p"],
    noise: float,
) -> Pursued:
    known = torch.einsum("mq,wqp->wmp", coefficients, theirs)
    signs = window_signs(white, known, noise)
    left = signed_coherence(signs[..., None] * white - known, signs.abs())
    return Pursued(coefficients, signs, left)


def _correlated(values: Float[Tensor, "m p"]) -> Scores:
    """Of squares, each in its own standard deviations over all encodings."""
    squares = values.square()
    off = squares - squares.mean(0)
    spread = off.square().mean(0).sqrt()
    off /= spread.clamp(min=1e-3 * float(spread.mean()) + 1e-30)
    product: Tensor = off @ off.T
    return centred(product / values.shape[1])
