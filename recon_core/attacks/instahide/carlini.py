"""The attack of Carlini et al. (2020, arXiv 2011.05315): private images, public ones unknown.

Departures: groups are independent components unless `groups` says otherwise, an encoding is only
given to images of its classes, and the descent's likelihood and smoothing are ours;
`Descent(spread=0, n_smooth=0, total_variation=0)` is the paper's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from recon_core.attacks.instahide.coherence import centred
from recon_core.attacks.instahide.descent import Descent, descend
from recon_core.attacks.instahide.groups import (
    Components,
    Growth,
    assigned,
    common_classes,
    grown_groups,
    independent_groups,
)
from recon_core.attacks.instahide.mixing import InstaHide, Mixing, Scheme
from recon_core.attacks.instahide.recover import Recovered, Status
from recon_core.attacks.instahide.similarity_network import Similarity, SimilarityNetwork
from recon_core.strict import NonNegative, Strict, Within
from recon_core.tagged import Tagged
from recon_core.types import Progress, no_progress


def noisy(mixing: Scheme) -> Descent:
    """For photographs in [-1, 1] with others, not known, in every encoding."""
    return Descent(n_steps=60, total_variation=0.3, n_smooth=1, spread=unknown_part(mixing))


def unknown_part(mixing: Scheme) -> float:
    """The standard deviation of what public photographs in [-1, 1] add to an encoding's pixel."""
    k = 2 + mixing.k_pub
    square = mixing.wb**2 if isinstance(mixing, Mixing) else 2 / (k * (k + 1))
    return PIXEL_SD * math.sqrt(mixing.k_pub * square)


PIXEL_SD = 0.46
"""Of CIFAR-10's pixels; coefficients that are uniform on a simplex have a mean square of
2 / (k (k + 1))."""


@dataclass(frozen=True, kw_only=True)
class Carlini(Strict):
    """Settings. `n_arcs`: images that an encoding may be given to, its best. `slack`: by how much
    an image may have more encodings than its share, in shares of it. `descent`: None is for
    photographs, as noisy as the scheme makes them."""

    kind: Literal["carlini"] = "carlini"
    similarity: SimilarityNetwork = field(default_factory=SimilarityNetwork)
    groups: Annotated[Components | Growth, Tagged("kind")] = field(default_factory=Components)
    assignment: Literal["flow", "greedy"] = "flow"
    n_arcs: Annotated[int, Within("[2, inf)")] = 20
    slack: NonNegative = 0.05
    descent: Descent | None = None


def recover_as_carlini(
    y: Float[Tensor, "m d"],
    shape: tuple[int, int, int],
    *,
    n_private: int,
    mixing: Scheme | None = None,
    labels: Float[Tensor, "m n_classes"] | None = None,
    public: Float[Tensor, "p _"] | None = None,
    scores: Float[Tensor, "m m"] | Similarity | None = None,
    generator: torch.Generator,
    how: Carlini | None = None,
    progress: Progress = no_progress,
) -> Recovered:
    """Private images, every one ESTIMATED, or UNSOLVED if no encoding was given to it.

    `y`: encodings in units of images in [-1, 1]; signs are ignored. `mixing`: their scheme, which
    says weights and how much public images add; without, InstaHide's. `scores`: of all pairs,
    larger where an image is common, or the network that gives them; without, one is trained on
    `public`. From scores alone the sign of all images together is not known. Raises ValueError
    without scores and public images, and for encodings that are not finite.
    """
    how, mixing = how or Carlini(), mixing or InstaHide()
    if not bool(y.isfinite().all()):
        raise ValueError("encodings have pixels that are not finite")
    if scores is None:
        if public is None:
            raise ValueError("give scores, a trained Similarity, or public images to train one on")
        pool = public.float().reshape(-1, *shape)
        scores = how.similarity.train(pool, progress=lambda part: progress(0.5 * part))
    typical = None
    if isinstance(scores, Similarity):
        typical = scores.typical.flatten()
        scores = scores.scores(y, progress=lambda part: progress(0.5 + 0.05 * part))
    progress(0.55)
    alike = centred(scores.float().clone())
    has = None if labels is None else labels > PRESENT
    if has is not None:
        alike = centred(alike * (has.float() @ has.float().T > 0))
    if isinstance(how.groups, Growth):
        core = grown_groups(alike, n_private, generator=generator, how=how.groups).to(alike)
    else:
        loads = independent_groups(alike, n_private, generator=generator, how=how.groups)
        core = (loads > 0).to(alike)
    classes = None if has is None else common_classes(core, has)
    affinity = alike @ core / (core.sum(0) - core).clamp(min=1)
    allowed = None if has is None or classes is None else has[:, classes]
    edges = assigned(affinity, allowed, method=how.assignment, n_arcs=how.n_arcs, slack=how.slack)
    weights = private_weights(edges, labels, classes, mixing)
    progress(0.65)
    found = descend(
        y,
        edges,
        weights,
        n_private,
        generator=generator,
        shape=shape,
        how=how.descent or noisy(mixing),
        progress=lambda part: progress(0.65 + 0.35 * part),
    )
    given = ~found.isnan().any(1)
    images = found.double()
    if typical is not None and float((images.nanmean(0) * typical.to(images)).sum()) < 0:
        images = -images
    return Recovered(
        images=images,
        status=tuple(Status.ESTIMATED if ok else Status.UNSOLVED for ok in given.tolist()),
        edges=np.asarray(edges.cpu()),
        weights=np.asarray(weights.double().cpu()),
        public=None,
        explained=np.zeros(len(y), bool),
        scores=scores,
        common=((core @ core.T).clamp(max=2)).to(torch.int8),
        labels=None if classes is None else np.asarray(classes.cpu()),
    )


PRESENT = 1e-6
"""Share of a mixed label from which on a class is in it."""


def private_weights(
    edges: Int64[Tensor, "m 2"],
    labels: Float[Tensor, "m n_classes"] | None,
    classes: Int64[Tensor, " n"] | None,
    mixing: Scheme,
) -> Float32[Tensor, "m 2"]:
    """Weights of the two images of each encoding: its label's parts at their classes, half each
    where both are of one; without labels the mean of all weights. In the model of the InstaHide
    paper all are known."""
    if isinstance(mixing, Mixing):
        return torch.full(edges.shape, mixing.wa, device=edges.device)
    if labels is None or classes is None:
        return torch.full(edges.shape, 1 / (2 + mixing.k_pub), device=edges.device)
    kind = classes[edges.clamp(min=0)]
    share = labels.float().gather(1, kind)
    same = kind[:, :1] == kind[:, 1:]
    return torch.where(same, share / 2, share)
