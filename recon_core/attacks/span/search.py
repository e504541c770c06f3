"""The search for sources: how directions are seen, and what is minimised from which start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.features import dct_filters, outputs_of, whitened
from recon_core.attacks.span.lbfgs import Descent, Report, after, minimise
from recon_core.attacks.span.separation import (
    Likelihood,
    grouped_fixed_point,
    orthogonal,
    rotate,
    rotation_start,
)
from recon_core.attacks.span.separator import SHIPPED, Separator, apart, shipped_separator
from recon_core.attacks.span.settings import SpanAttack
from recon_core.attacks.span.subspace import Subspace

FEWEST = 32
"""Directions from which on a network separates better than sparse derivatives do."""
WIDE, WIDER = 0.4, 2.5
"""Share of a frame's steps with a wider score, and how much wider it is."""


@dataclass(frozen=True)
class Views:
    """R victims' directions as they are searched, `z`, and what whitens their features.

    `z` are the outputs of filters, `n_filters` at each place; with a separator they are the
    pictures themselves, white in its metric.
    """

    z: Float[Tensor, "r k t"]
    whiten: Float[Tensor, "r k k"]
    n_filters: int = 1
    separator: Separator | None = None


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
    if given is None:
        names = SHIPPED if attack.separator == "auto" else (attack.separator,)
        found = [shipped_separator(name, torch.device(device)) for name in names]
        given = next((one for one in found if one.card.shape == shape), None)
        if attack.separator != "auto":
            (given,) = found
    if given is None and attack.sources == "network":
        raise ValueError(
            f"attack.sources='network' knows no images of {_times(shape)}; learn a separator of "
            "such images with `palimpsest train separator`, or use attack.sources='independent'"
        )
    if given is not None and given.card.shape != shape:
        raise ValueError(
            f"the separator knows images of {_times(given.card.shape)}, and not of {_times(shape)};"
            " learn one of such images with `palimpsest train separator`"
        )
    return given


def sources_for(
    attack: SpanAttack, span: Subspace, shape: tuple[int, int, int], given: Separator | None = None
) -> SpanAttack:
    """The attack on one victim's span, with "auto" decided: a span that ends sharply hides no
    direction, so that sources are no more than these; nor does one without a start whose number of
    images is known. A separator that is asked for is taken whatever its card says."""
    if attack.sources != "auto":
        return attack
    separator, k = separator_for(attack, shape, given=given), len(span.vectors)
    asked = given is not None or attack.separator != "auto"
    is_counted = attack.source != "weights" and attack.n_images is not None
    if span.ends_sharply or is_counted:
        attack = replace(attack, overcomplete=1.0)
        fits = separator is not None and k >= FEWEST and separator.card.beats_filters(k)
        if asked or fits:
            return replace(attack, sources="network")
    return replace(attack, sources="independent")


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
        separator = separator.fitted(flat[0])
        whiten = torch.stack([whitened(separator.whitened(some))[1] for some in flat])
        return Views(whiten @ flat, whiten, separator=separator)
    filters = dct_filters(attack.filter_size, c, colours=attack.colours)
    features = [whitened(outputs_of(p, filters, stride=attack.stride)) for p in pictures]
    z, whiten = (torch.stack([f[i] for f in features]) for i in (0, 1))
    return Views(z, whiten, len(filters))


def best_start(
    attack: SpanAttack, views: Views, generators: Sequence[torch.Generator], report: Report
) -> Descent:
    """Every victim's separation from that of `attack.n_starts` random starts that ends lowest."""
    k, n_sources, search = views.z.shape[1], None, _with_network
    if views.separator is None:
        search = _with_filters if attack.overcomplete == 1 else _with_frame
        n_sources = attack.n_sources(k)
    best: Descent | None = None
    for number in range(attack.n_starts):
        starts = torch.stack([rotation_start(k, g, n_sources=n_sources) for g in generators])
        told = partial(after, report, number * attack.n_iterations)
        ended = search(attack, views, starts.to(views.z), told)
        best = ended if best is None else _lower(best, ended)
    assert best is not None
    return best


def continued(
    attack: SpanAttack,
    unmixing: Float[Tensor, "r k k"],
    pictures: Float[Tensor, "r k c h w"],
    report: Report,
) -> Float[Tensor, "r k k"]:
    """The unmixing matrix of directions `pictures` to which the network leads from `unmixing`."""
    views = views_of(attack, pictures)
    begun = orthogonal(torch.linalg.solve(views.whiten.mT, unmixing.mT).mT)
    rows: Tensor = _with_network(attack, views, begun, report).rotation @ views.whiten
    return rows


def _with_network(attack: SpanAttack, views: Views, starts: Tensor, report: Report) -> Descent:
    assert views.separator is not None
    return apart(views.separator, views.z, starts, n_iterations=attack.n_network, report=report)


def _with_filters(attack: SpanAttack, views: Views, starts: Tensor, report: Report) -> Descent:
    rotated = rotate(views.z, starts, attack.stages, tolerance=attack.tolerance, report=report)
    n = sum(attack.n_rotations)
    turned = grouped_fixed_point(
        views.z,
        rotated.rotation,
        n_filters=views.n_filters,
        scale=attack.grouped_scale,
        n_iterations=attack.n_grouped,
        report=partial(after, report, n),
    )
    freed = minimise(
        Likelihood(attack.shape, attack.likelihood_scale),
        views.z,
        turned.rotation,
        n_iterations=attack.n_likelihood,
        tolerance=attack.tolerance,
        report=partial(after, report, n + attack.n_grouped),
    )
    total = rotated.n_iterations + turned.n_iterations + freed.n_iterations
    settled = rotated.settled and freed.settled
    return replace(freed, n_iterations=total, settled=settled)


def _with_frame(attack: SpanAttack, views: Views, starts: Tensor, report: Report) -> Descent:
    wide = round(WIDE * attack.n_grouped)
    search = partial(grouped_fixed_point, views.z, n_filters=views.n_filters)
    begun = search(starts, scale=WIDER * attack.grouped_scale, n_iterations=wide, report=report)
    ended = search(
        begun.rotation,
        scale=attack.grouped_scale,
        n_iterations=attack.n_grouped - wide,
        report=partial(after, report, wide),
    )
    return replace(ended, n_iterations=attack.n_grouped)


def _lower(a: Descent, b: Descent) -> Descent:
    first = (a.objective <= b.objective)[:, None, None]
    return Descent(
        torch.where(first, a.rotation, b.rotation),
        torch.where(first, a.sources, b.sources),
        torch.minimum(a.objective, b.objective),
        max(a.n_iterations, b.n_iterations),
        a.settled and b.settled,
    )


def _times(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
