"""The practical attack: InstaHide on photographs, as it is used.

Public images, by the signs of windows (`coherent_publics`); scores of what they leave, whose
independent components are the private images' encodings; images, assignment, public images and
coefficients in turns (`natural_fit`). Images that are proved are then public, to find missing ones.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.instahide.carlini import (
    descend,
    edges_of_groups,
    independent_groups,
    private_weights,
)
from recon_core.attacks.instahide.coherence import (
    ImageShape,
    centred,
    coherence,
    pursued,
    signs_of_pixels,
    whitened_windows,
)
from recon_core.attacks.instahide.graph import gram
from recon_core.attacks.instahide.mixing import Scheme
from recon_core.attacks.instahide.natural_fit import MOST, NaturalFit, Practical, PrivateWeights
from recon_core.attacks.instahide.recover import Recovered, Status, check_encodings
from recon_core.threads import share_of
from recon_core.types import Progress, no_progress

UNKNOWN = 0.05
"""The mean certainty of windows' signs below which these are not used."""


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
    if y.shape[1] != math.prod(shape):
        raise ValueError(f"encodings have {y.shape[1]} pixels, shape={shape} {math.prod(shape)}")
    pool = check_encodings(y, mixing, public, n_private=n_private, fewest=3).float()
    if labels is not None and len(labels) != len(y):
        raise ValueError(f"{len(labels)} labels for {len(y)} encodings; give one row for each")
    y, pursuit, certain = y.abs().float(), None, False
    if mixing.k_pub:
        search = share_of(progress, 0.0, 0.2)
        pursuit = pursued(y, shape, pool, largest=mixing.largest, progress=search)
        certain = float(pursuit.signs.abs().mean()) >= UNKNOWN
    if pursuit is not None and certain:
        scores = centred(pursuit.scores)
    else:
        scores = coherence(whitened_windows(shape, y)[0])
    progress(0.25)
    loads = independent_groups(scores, n_private, generator=generator)
    progress(0.3)
    problem = NaturalFit(y, pool, shape, mixing=mixing, labels=labels, how=how)
    problem.private = PrivateWeights.of(loads, labels, mixing)
    if pursuit is not None:
        signs = pursuit.signs if certain else torch.ones_like(pursuit.signs)
        start = problem.start(loads, signs_of_pixels(signs, shape), pursuit.coefficients @ pool)
    else:  # nothing says the sign of a pixel: every one by descent
        pairs, classes = edges_of_groups(scores, (loads > 0).to(scores), labels)
        pairs = pairs.clamp(min=0)
        weights = private_weights(pairs, labels, classes, mixing)
        images = descend(y, pairs, weights, n_private, generator=generator, shape=shape)
        start = problem.without_public(images.nan_to_num(0.0), pairs, weights)
    fitted = problem.refined(start, share_of(progress, 0.35, 0.7))
    sure = problem.sure(fitted)
    for k in range(how.n_again):
        before = problem.private
        again = problem.started_again(fitted, sure, generator)
        if again is None:
            break
        share = share_of(progress, 0.7 + 0.3 * k / how.n_again, 0.7 + 0.3 * (k + 1) / how.n_again)
        again = problem.refined(again, share)
        now = problem.sure(again)
        if int(now.sum()) >= int(sure.sum()):
            fitted, sure = again, now
        else:
            problem.private = before
    progress(1.0)
    own = problem.private.classes
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
        labels=None if own is None else np.asarray(own.cpu()),
    )
