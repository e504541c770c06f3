"""The search for sources: which one, in which view of the directions, and from which start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.features import check_features, features_of, n_filters, whitening
from recon_core.attacks.span.guided import separated
from recon_core.attacks.span.separation import Descent, Report, independent, rotation_start
from recon_core.attacks.span.separator import SHIPPED, Separator, Shape, shipped_separator
from recon_core.attacks.span.settings import SpanAttack
from recon_core.attacks.span.subspace import Subspace

FEWEST, MOST = 32, 400
"""Directions from which on a network separates better than filters do, and up to which it is taken
by "auto" where noise is in them: more are mostly noise."""


def separator_for(
    attack: SpanAttack, shape: Shape, given: Separator | None = None
) -> Separator | None:
    """The separator that is given, else the shipped one that is named or that fits the shape.

    None where no shipped one fits. Raises ValueError for a separator of another shape, an unknown
    name, and none where `attack.sources` is "network".
    """
    if given is None:
        is_named = attack.separator != "auto"
        found = map(shipped_separator, (attack.separator,) if is_named else SHIPPED)
        given = next((one for one in found if is_named or one.card.shape == shape), None)
    if given is None and attack.sources != "network":
        return None
    if given is None or given.card.shape != shape:
        wanted, known = ("x".join(map(str, s)) for s in (shape, given.card.shape if given else ()))
        raise ValueError(
            f"the separator knows images of {known or 'other shapes'}, and not of {wanted}; learn "
            "one with `palimpsest train separator`, or use attack.sources='independent'"
        )
    return given


def sources_for(
    attack: SpanAttack, span: Subspace, shape: Shape, given: Separator | None = None
) -> SpanAttack:
    """The attack on one victim's span, with "auto" decided. A span that ends sharply hides no
    direction, and neither does one without a start whose number of images is known: no more sources
    than directions. A separator that is asked for is taken whatever its card says."""
    is_counted = attack.source != "weights" and attack.n_images is not None
    is_known, sources = span.ends_sharply or is_counted, attack.sources
    if sources == "auto":
        separator, k = separator_for(attack, shape, given=given), len(span.vectors)
        asked = given is not None or attack.separator != "auto"
        fits = separator is not None and k >= FEWEST and separator.card.beats_filters(k)
        sources = "network" if asked or (fits and (is_known or k <= MOST)) else "independent"
    return replace(attack, sources=sources, overcomplete=1.0 if is_known else attack.overcomplete)


def checked(
    attack: SpanAttack, n_directions: int, shape: Shape, given: Separator | None = None
) -> Separator | None:
    """The separator by which pictures are told apart, None for filters (`attack.sources`, "auto"
    decided). Raises ValueError for pictures that neither fits."""
    if attack.sources == "network":
        return separator_for(attack, shape, given=given)
    check_features(n_directions, shape)
    return None


def searched(
    attack: SpanAttack,
    pictures: Float[Tensor, "r k c h w"],
    separator: Separator | None,
    generators: Sequence[torch.Generator],
    report: Report = lambda _n: None,
    *,
    ones: Float[Tensor, "r k"] | None = None,
) -> Descent:
    """Every victim's pictures taken apart from a random start, with a separator or else by filters;
    W is of the pictures themselves, `ones` as in `guided.separated`."""
    (k, c), flat = pictures.shape[1:3], pictures.flatten(2)
    if separator is not None:
        whiten = torch.stack([whitening(separator.metric.whitened(some)) for some in flat])
        if ones is not None:
            ones = (whiten @ ones[:, :, None])[..., 0]
        found = separated(separator, whiten @ flat, generators, attack.n_network, report, ones=ones)
    else:
        features = torch.stack([features_of(some) for some in pictures])
        whiten = torch.stack([whitening(some) for some in features])
        starts = [rotation_start(k, g, n_sources=attack.n_sources(k)) for g in generators]
        z, start = whiten @ features, torch.stack(starts).to(features)
        found = independent(
            z, start, n_filters=n_filters(c), n_iterations=attack.n_independent, report=report
        )
    return replace(found, w=found.w @ whiten)
