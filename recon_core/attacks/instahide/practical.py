"""The practical attack: InstaHide on photographs, as it is used.

Public images, by the signs of windows (`coherent_publics`); scores of what they leave, whose
independent components are the private images' encodings; images, assignment, public images and
coefficients in turns (`natural_fit`). Images that are proved are then public, to find missing ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from recon_core.attacks.instahide.coherence import ImageShape, PublicSearch, Windows, centred
from recon_core.attacks.instahide.descent import Descent, descend
from recon_core.attacks.instahide.determined import Equations, determined
from recon_core.attacks.instahide.groups import (
    Components,
    assigned,
    common_classes,
    independent_groups,
)
from recon_core.attacks.instahide.line_graph import gram
from recon_core.attacks.instahide.mixing import InstaHide, Mixing, Scheme
from recon_core.attacks.instahide.natural_fit import (
    FEWEST,
    MOST,
    Fitted,
    NaturalFit,
    PrivateWeights,
    Refinement,
)
from recon_core.attacks.instahide.pair_statistics import Seen, likeness, pursued
from recon_core.attacks.instahide.recover import Recovered, Status
from recon_core.strict import Natural, Strict
from recon_core.threads import share_of
from recon_core.types import Progress, no_progress


@dataclass(frozen=True, kw_only=True)
class Practical(Strict):
    """Settings of the attack on photographs. `descent`: where encodings have no public images.
    `n_again`: how often missing images are looked for again, at most."""

    kind: Literal["practical"] = "practical"
    windows: Windows = field(default_factory=Windows)
    publics: PublicSearch = field(default_factory=PublicSearch)
    components: Components = field(default_factory=Components)
    descent: Descent = field(default_factory=lambda: Descent(n_smooth=1))
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
    determine them, else ESTIMATED. Weights that are fitted leave two images that are only in
    encodings with each other open up to a mixture of both; then grey levels decide, and where there
    are none only encodings with known weights count. Raises ValueError for encodings that are not
    finite or not of that shape, fewer encodings than components, and fewer public images than are
    mixed.
    """
    how = how or Practical()
    y, pool = _checked(y, shape, mixing, public, n_private=n_private, labels=labels)
    largest = mixing.largest if isinstance(mixing, InstaHide) else max(mixing.wa, mixing.wb)
    seen = Seen(y, shape, public=pool, largest=largest, windows=how.windows, search=how.publics)
    said = pursued(seen, pool, share_of(progress, 0.0, 0.2)) if mixing.k_pub else None
    if said is not None and float(said.signs.abs().mean()) >= UNKNOWN:
        scores, signs = centred(said.scores), said.signs
    else:
        scores, signs = likeness("coherence", seen), None
    progress(0.25)
    loads = independent_groups(scores, n_private, generator=generator, how=how.components)
    progress(0.3)
    private = _private_weights(mixing, labels, loads)
    problem = NaturalFit(seen, private, mixing, how.refinement)
    if said is not None:
        of_pixels = _of_pixels(torch.ones_like(said.signs) if signs is None else signs, seen)
        start = problem.start(loads, of_pixels, said.coefficients @ pool)
    else:
        start = _descended(problem, scores, loads, generator, how.descent)
    fitted = problem.refined(start, share_of(progress, 0.35, 0.7))
    again = _Again(seen, mixing, labels, how, generator)
    fitted = again.found(fitted, problem, share_of(progress, 0.7, 1.0))
    return _recovered(fitted, problem, scores)


def _of_pixels(signs: Float[Tensor, "w m"], seen: Seen) -> Float[Tensor, "m d"]:
    """Every pixel's sign: its window's."""
    places = seen.windows.of_pixels(seen.shape).flatten().repeat(seen.shape[0]).to(signs.device)
    return signs.T[:, places]


@dataclass(frozen=True)
class _Again:
    """Looks for the images that were not proved, with those that were as public images."""

    seen: Seen
    mixing: Scheme
    labels: Float[Tensor, "m n_classes"] | None
    how: Practical
    generator: torch.Generator

    def found(self, f: Fitted, problem: NaturalFit, progress: Progress) -> Fitted:
        sure = _sure(f, problem)
        for k in range(self.how.n_again):
            before = problem.private
            started = self._started(f, problem, sure)
            if started is None:
                break
            share = share_of(progress, k / self.how.n_again, (k + 1) / self.how.n_again)
            other = problem.refined(started, share)
            now = _sure(other, problem)
            if int(now.sum()) >= int(sure.sum()):
                f, sure = other, now
            else:
                problem.private = before
        progress(1.0)
        return f

    def _started(self, f: Fitted, problem: NaturalFit, sure: Bool[Tensor, " n"]) -> Fitted | None:
        """From encodings that are not explained; None if there is nothing to look for, or not
        enough of them."""
        rows = (f.met < MOST).nonzero()[:, 0]
        missing = (~sure).nonzero()[:, 0]
        n = len(missing)
        if not n or n == len(sure) or len(rows) <= n + round(self.how.components.spare * n):
            return None
        pool = torch.cat([problem.pool, f.images[sure]])
        said = pursued(replace(self.seen, y=self.seen.y[rows]), pool)
        loads = independent_groups(
            said.scores, n, generator=self.generator, how=self.how.components
        )
        whole = torch.zeros_like(problem.private.allowed, dtype=loads.dtype)
        whole.scatter_(1, f.ends, 1.0)[:, missing] = 0.0
        whole[rows] = 0.0
        whole[rows[:, None], missing] = loads
        problem.private = _private_weights(self.mixing, self.labels, whole)
        return problem.started_again(
            f,
            rows,
            missing,
            loads=loads,
            signs=_of_pixels(said.signs, self.seen),
            known=said.coefficients @ pool,
            public_part=said.coefficients[:, : len(problem.pool)] @ problem.pool,
        )


def _descended(
    problem: NaturalFit,
    scores: Float[Tensor, "m m"],
    loads: Float[Tensor, "m n"],
    generator: torch.Generator,
    how: Descent,
) -> Fitted:
    """A start without public images: every pixel by descent, for nothing says its sign."""
    private = problem.private
    core = (loads > 0).to(scores)
    alike = scores @ core / (core.sum(0) - core).clamp(min=1)
    ends = assigned(alike, private.allowed).clamp(min=0)
    if private.known is None:
        weights = torch.full(ends.shape, 0.5, device=loads.device)
    else:
        weights = private.known.gather(1, ends)
    n, shape = loads.shape[1], problem.shape
    found = descend(problem.y, ends, weights, n, generator=generator, shape=shape, how=how)
    return problem.start_from(found.nan_to_num(0.0), ends, weights)


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
    """Images that explained encodings determine; at grey levels, where there are any."""
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


def _recovered(f: Fitted, problem: NaturalFit, scores: Float[Tensor, "m m"]) -> Recovered:
    private = problem.private
    ends, order = f.ends.sort(1)
    edges, sure = np.asarray(ends.cpu()), _sure(f, problem)
    return Recovered(
        images=f.images.double(),
        status=tuple(Status.RECOVERED if s else Status.ESTIMATED for s in sure.tolist()),
        edges=edges,
        weights=np.asarray(f.weights.gather(1, order).double().cpu()),
        public=f.public,
        explained=np.asarray((f.exactly >= MOST).cpu()),
        scores=scores,
        common=torch.from_numpy(gram(edges).astype(np.int8)),
        labels=None if private.classes is None else np.asarray(private.classes.cpu()),
    )


UNKNOWN = 0.05
"""The mean certainty of windows' signs below which these are not used."""


def _checked(
    y: Float[Tensor, "m d"],
    shape: ImageShape,
    mixing: Scheme,
    public: Float[Tensor, "q _"] | None,
    *,
    n_private: int,
    labels: Float[Tensor, "m n_classes"] | None,
) -> tuple[Float[Tensor, "m d"], Float[Tensor, "q d"]]:
    m, d = y.shape
    if not bool(y.isfinite().all()):
        row = int((~y.isfinite()).any(1).nonzero()[0])
        raise ValueError(f"encoding {row} has pixels that are not finite")
    if d != shape[0] * shape[1] * shape[2]:
        raise ValueError(f"encodings have {d} pixels, shape={shape} {np.prod(shape)}")
    if public is None or not mixing.k_pub:  # in no encoding: nothing that is public is needed
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
