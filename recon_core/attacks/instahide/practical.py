"""The practical attack: InstaHide on photographs, as it is used.

Public images, by the signs of windows (`coherent_publics`); scores of what they leave, whose
independent components are the private images' encodings; images, assignment, public images and
coefficients in turns (`natural_fit`). Images that are proved are then public, to find missing ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from recon_core.attacks.instahide.carlini import (
    SPARE,
    Descent,
    assigned,
    common_classes,
    descend,
    independent_groups,
)
from recon_core.attacks.instahide.coherence import (
    ImageShape,
    centred,
    coherence,
    gradient_windows,
    pursued,
    signs_of_pixels,
    whitening,
)
from recon_core.attacks.instahide.graph import gram
from recon_core.attacks.instahide.mixing import Mixing, Scheme
from recon_core.attacks.instahide.natural_fit import (
    FEWEST,
    MOST,
    Fitted,
    NaturalFit,
    PrivateWeights,
    Refinement,
)
from recon_core.attacks.instahide.recover import Recovered, Status
from recon_core.attacks.instahide.signs import Equations, determined
from recon_core.strict import Natural, Strict
from recon_core.threads import share_of
from recon_core.types import Progress, no_progress

UNKNOWN = 0.05
"""The mean certainty of windows' signs below which these are not used."""


@dataclass(frozen=True, kw_only=True)
class Practical(Strict):
    """Settings of the attack on photographs. `n_again`: how often missing images are searched for
    again, at most."""

    kind: Literal["practical"] = "practical"
    refinement: Refinement = field(default_factory=Refinement)
    n_again: Natural = 4


def recover_practically(
    y: Float[Tensor, "m d"],
    shape: ImageShape,
    *,
    mixing: Scheme,
    public: Float[Tensor, "q _"] | None,
    n_private: int,
    labels: Float[Tensor, "m n_classes"] | None = None,
    generator: torch.Generator,
    how: Practical | None = None,
    progress: Progress = no_progress,
) -> Recovered:
    """Private images of natural encodings, with the public images known, or none in them.

    `y`: encodings; signs are ignored. `shape`: (channels, height, width). `public`: images in the
    encodings' units. `labels`: mixed labels. Images are RECOVERED if encodings that are explained
    determine them, else ESTIMATED. Fitted weights leave two images that are only in encodings with
    each other open up to a mixture of both: then grey levels decide, and without these only
    encodings with known weights count. Raises ValueError for encodings that are not
    finite or not of that shape, fewer encodings than components, and fewer public images than are
    mixed.
    """
    how = how or Practical()
    y, pool = _checked(y, shape, mixing, public, n_private=n_private, labels=labels)
    pursuit = None
    if mixing.k_pub:
        search = share_of(progress, 0.0, 0.2)
        pursuit = pursued(y, shape, pool, largest=mixing.largest, progress=search)
    certain = pursuit is not None and float(pursuit.signs.abs().mean()) >= UNKNOWN
    if pursuit is not None and certain:
        scores = centred(pursuit.scores)
    else:
        cut = gradient_windows(y, shape)
        scores = coherence(cut @ whitening(cut))
    progress(0.25)
    loads = independent_groups(scores, n_private, generator=generator)
    progress(0.3)
    private = _private_weights(mixing, labels, loads)
    problem = NaturalFit(y, pool, shape, private=private, mixing=mixing, how=how.refinement)
    if pursuit is not None:
        signs = pursuit.signs if certain else torch.ones_like(pursuit.signs)
        start = problem.start(loads, signs_of_pixels(signs, shape), pursuit.coefficients @ pool)
    else:  # nothing says the sign of a pixel: every one by descent
        core = (loads > 0).to(scores)
        alike = scores @ core / (core.sum(0) - core).clamp(min=1)
        ends = assigned(alike, private.allowed).clamp(min=0)
        weights = torch.full(ends.shape, 0.5, device=loads.device)
        if private.known is not None:
            weights = private.known.gather(1, ends)
        smooth = Descent(n_smooth=1)
        images = descend(y, ends, weights, n_private, generator=generator, shape=shape, how=smooth)
        start = problem.without_public(images.nan_to_num(0.0), ends, weights)
    fitted = problem.refined(start, share_of(progress, 0.35, 0.7))
    sure = _sure(fitted, problem)
    for k in range(how.n_again):
        before = problem.private
        again = _started_again(
            fitted, problem, sure, mixing=mixing, labels=labels, generator=generator
        )
        if again is None:
            break
        share = share_of(progress, 0.7 + 0.3 * k / how.n_again, 0.7 + 0.3 * (k + 1) / how.n_again)
        again = problem.refined(again, share)
        now = _sure(again, problem)
        if int(now.sum()) >= int(sure.sum()):
            fitted, sure = again, now
        else:
            problem.private = before
    progress(1.0)
    private = problem.private
    ends, order = fitted.ends.sort(1)
    edges = np.asarray(ends.cpu())
    return Recovered(
        images=fitted.images.double(),
        status=tuple(Status.RECOVERED if s else Status.ESTIMATED for s in sure.tolist()),
        edges=edges,
        weights=np.asarray(fitted.weights.gather(1, order).double().cpu()),
        public=fitted.public,
        explained=np.asarray((fitted.exactly >= MOST).cpu()),
        scores=scores,
        common=torch.from_numpy(gram(edges).astype(np.int8)),
        labels=None if private.classes is None else np.asarray(private.classes.cpu()),
    )


def _started_again(
    f: Fitted,
    problem: NaturalFit,
    sure: Bool[Tensor, " n"],
    *,
    mixing: Scheme,
    labels: Float[Tensor, "m n_classes"] | None,
    generator: torch.Generator,
) -> Fitted | None:
    """Search for the images that were not proved, in the encodings that are not explained, with the
    proved images as public ones. None if nothing is missing, or if encodings are too few."""
    rows = (f.met < MOST).nonzero()[:, 0]
    missing = (~sure).nonzero()[:, 0]
    n = len(missing)
    if not n or n == len(sure) or len(rows) <= n + round(SPARE * n):
        return None
    pool = torch.cat([problem.pool, f.images[sure]])
    pursuit = pursued(problem.y[rows], problem.shape, pool, largest=problem.largest)
    loads = independent_groups(pursuit.scores, n, generator=generator)
    whole = torch.zeros_like(problem.private.allowed, dtype=loads.dtype)
    whole.scatter_(1, f.ends, 1.0)[:, missing] = 0.0
    whole[rows] = 0.0
    whole[rows[:, None], missing] = loads
    problem.private = _private_weights(mixing, labels, whole)
    return problem.started_again(
        f,
        rows,
        missing,
        loads=loads,
        signs=signs_of_pixels(pursuit.signs, problem.shape),
        known=pursuit.coefficients @ pool,
        public_part=pursuit.coefficients[:, : len(problem.pool)] @ problem.pool,
    )


def _private_weights(
    mixing: Scheme,
    labels: Float[Tensor, "m n_classes"] | None,
    loads: Float[Tensor, "m n"],
) -> PrivateWeights:
    m, n = loads.shape
    fixed = loads.new_full((m, n), mixing.wa) if isinstance(mixing, Mixing) else None
    if labels is None:
        everywhere = torch.ones((m, n), dtype=torch.bool, device=loads.device)
        free = torch.full_like(everywhere[:, 0], fixed is None)
        return PrivateWeights(everywhere, fixed, free)
    has = labels > 1e-6
    classes = common_classes(loads, has)
    alike = has.sum(1) == 1
    allowed = has[:, classes]
    if fixed is not None:
        return PrivateWeights(allowed, fixed, torch.zeros_like(alike), alike, classes)
    known = labels[:, classes].to(loads) * allowed
    known = torch.where(alike[:, None], known / 2, known)
    return PrivateWeights(allowed, known, alike, alike, classes)


def _sure(f: Fitted, problem: NaturalFit) -> Bool[Tensor, " n"]:
    """Images that explained encodings determine, at grey levels where there are any."""
    n = len(f.images)
    proves, possible = f.exactly >= MOST, torch.ones(n, dtype=torch.bool, device=f.images.device)
    if problem.how.spacing:
        possible = problem.at_levels(f.images)
    else:
        proves = proves & ~problem.private.free
    edges, weights = np.asarray(f.ends[proves].cpu()), np.asarray(f.weights[proves].double().cpu())
    sure = np.zeros(n, bool)
    if len(edges):
        sure = determined(Equations(edges, weights, n), with_public=problem.k_pub > 0).images
    seen = np.bincount(edges.ravel(), minlength=n)
    return possible & torch.from_numpy(sure & (seen > FEWEST)).to(possible.device)


def _checked(
    y: Float[Tensor, "m d"],
    shape: ImageShape,
    mixing: Scheme,
    public: Float[Tensor, "q _"] | None,
    *,
    n_private: int,
    labels: Float[Tensor, "m n_classes"] | None,
) -> tuple[Float[Tensor, "m d"], Float[Tensor, "q d"]]:
    """Absolute values of encodings, and the public images: none if none are in encodings."""
    m, d = y.shape
    if not bool(y.isfinite().all()):
        row = int((~y.isfinite()).any(1).nonzero()[0])
        raise ValueError(f"encoding {row} has pixels that are not finite")
    if d != shape[0] * shape[1] * shape[2]:
        raise ValueError(f"encodings have {d} pixels, shape={shape} {np.prod(shape)}")
    if public is None or not mixing.k_pub:
        public = y.new_zeros(0, d)
    if public.shape[1] != d:
        raise ValueError(f"public images have {public.shape[1]} pixels, encodings {d}")
    if len(public) < mixing.k_pub:
        raise ValueError(
            f"{len(public)} public images are too few: encodings have k_pub={mixing.k_pub} of them"
        )
    if not 3 <= n_private <= m:
        raise ValueError(
            f"{m} encodings of n_private={n_private} images: there must be 3 images or more (of 2 "
            "every encoding has both), and no fewer encodings than images"
        )
    if labels is not None and len(labels) != m:
        raise ValueError(f"{len(labels)} labels for {m} encodings; give one row for each")
    return y.abs().float(), public.to(y.device).float()
