"""The search for sources: which one, in which view of the directions, and from which start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.features import features_of, n_filters, whitened
from recon_core.attacks.span.guided import apart
from recon_core.attacks.span.separation import Descent, Report, independent, rotation_start
from recon_core.attacks.span.separator import SHIPPED, Separator, shipped_separator
from recon_core.attacks.span.settings import SpanAttack
from recon_core.attacks.span.subspace import Subspace

FEWEST = 32
"""Directions from which on a network separates better than sparse derivatives do."""


@dataclass(frozen=True)
class Views:
    """R victims' directions as they are searched, `z`, and what whitens their features.

    `z` are the outputs of filters; with a separator they are the pictures themselves, white in its
    metric.
    """

    z: Float[Tensor, "r k t"]
    whiten: Float[Tensor, "r k k"]
    separator: Separator | None = None
    n_filters: int = 1


def separator_for(
    attack: SpanAttack,
    shape: tuple[int, int, int],
    device: torch.device | str = "cpu",
    given: Separator | None = None,
) -> Separator | None:
    """The separator that is given, else the shipped one that is named or that fits the shape.

    None where no shipped one fits. Raises ValueError for a separator of another shape, an unknown
    name, and none where `attack.sources` is "network".
    """
    learn = "learn a separator of such images with `palimpsest train separator`"
    if given is None:
        is_named = attack.separator != "auto"
        names = (attack.separator,) if is_named else SHIPPED
        found = [shipped_separator(name, torch.device(device)) for name in names]
        given = next((one for one in found if is_named or one.card.shape == shape), None)
    if given is None and attack.sources == "network":
        raise ValueError(
            f"attack.sources='network' knows no images of {_times(shape)}; {learn}, or use "
            "attack.sources='independent'"
        )
    if given is not None and given.card.shape != shape:
        raise ValueError(
            f"the separator knows images of {_times(given.card.shape)}, and not of {_times(shape)};"
            f" {learn}"
        )
    return given


def sources_for(
    attack: SpanAttack, span: Subspace, shape: tuple[int, int, int], given: Separator | None = None
) -> SpanAttack:
    """The attack on one victim's span, with "auto" decided. A span that ends sharply hides no
    direction, and neither does one without a start whose number of images is known, so that there
    are no more sources than directions. A separator that is asked for is taken whatever its card
    says."""
    is_counted = attack.source != "weights" and attack.n_images is not None
    is_known = span.ends_sharply or is_counted
    sources = attack.sources
    if sources == "auto":
        separator, k = separator_for(attack, shape, given=given), len(span.vectors)
        asked = given is not None or attack.separator != "auto"
        fits = separator is not None and k >= FEWEST and separator.card.beats_filters(k)
        sources = "network" if is_known and (asked or fits) else "independent"
    is_frame = sources == "independent" and not is_known
    return replace(attack, sources=sources, overcomplete=attack.overcomplete if is_frame else 1.0)


def views_of(
    attack: SpanAttack, pictures: Float[Tensor, "r k c h w"], separator: Separator | None = None
) -> Views:
    """Features of every victim's directions, as `attack.sources` ("auto" decided) takes them; of
    "network" in the metric of the separator given, by default a shipped one.

    Raises ValueError for pictures that the filters or the separator do not fit.
    """
    c, h, w = pictures.shape[2:]
    if attack.sources == "network":
        separator = separator_for(attack, (c, h, w), pictures.device, separator)
        assert separator is not None
        flat = pictures.flatten(2)
        whiten = torch.stack([whitened(separator.whitened(some))[1] for some in flat])
        return Views(whiten @ flat, whiten, separator)
    features = [whitened(features_of(some)) for some in pictures]
    z, whiten = (torch.stack(some) for some in zip(*features, strict=True))
    return Views(z, whiten, n_filters=n_filters(c))


def searched(
    attack: SpanAttack, views: Views, generators: Sequence[torch.Generator], report: Report
) -> Descent:
    """Every victim's separation from a random start."""
    if views.separator is not None:
        return apart(
            views.separator, views.z, generators, n_iterations=attack.n_network, report=report
        )
    k = views.z.shape[1]
    starts = [rotation_start(k, g, n_sources=attack.n_sources(k)) for g in generators]
    return independent(
        views.z,
        torch.stack(starts).to(views.z),
        n_filters=views.n_filters,
        n_iterations=attack.n_independent,
        report=report,
    )


def _times(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
