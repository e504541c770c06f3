"""Settings of the span attack, and its search for sources: by filters or by a separator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.span.guided import N_FREE, N_LAST, separated
from recon_core.attacks.span.rows import Source
from recon_core.attacks.span.separation import (
    Descent,
    Report,
    check_features,
    features_of,
    independent,
    n_filters,
    rotation_start,
    whitening,
)
from recon_core.attacks.span.separator import SHIPPED, Separator, Shape, shipped_separator
from recon_core.attacks.span.subspace import Subspace
from recon_core.strict import Count, Share, Strict, Within


@dataclass(frozen=True, kw_only=True)
class SpanAttack(Strict):
    """Settings of the attack.

    `source`: what is separated, the first layer's weights, its optimiser's state, or gradients
    (`rows`). `start`: whether the weights' start is known and subtracted. `n_images`: the number of
    directions; None counts those that stand out of the noise and adds the share `surplus`.
    `sources`: "independent" assumes independent outputs of filters, which tolerates noise in the
    span, for at most `n_independent` iterations. "network" follows a network that learned from
    images of the kind (`separator`), for at most `n_network`, and separates hundreds. "auto" is
    "network" from 32 directions on, where its card says that it beats filters.
    `separator`: the name of a shipped one, "auto" for the one of the images' shape, or
    "sha256:..." of one that is passed beside these settings.
    `overcomplete`: sources per direction; 1 is used where the span ends sharply. Otherwise noise
    hides directions, and more images come back from a tight frame of sources ("independent") or
    from as many searches ("network").
    """

    kind: Literal["span"] = "span"
    source: Source = "weights"
    start: Literal["unknown", "known"] = "unknown"
    n_images: Annotated[int | None, Within("[2, inf)")] = None
    surplus: Share = 0.2
    sources: Literal["auto", "independent", "network"] = "auto"
    separator: str = "auto"
    n_network: Count = 300
    n_independent: Count = 300
    overcomplete: Annotated[float, Within("[1, 100]")] = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source != "weights" and self.start == "known":
            raise ValueError(
                f"start='known' with source={self.source!r}, in which there is no start; use "
                "start='unknown'"
            )

    def n_sources(self, n_directions: int) -> int:
        """Number of sources that "independent" finds in a span without a sharp end."""
        return round(self.overcomplete * n_directions)

    @property
    def n_iterations(self) -> int:
        network = self.n_network + N_FREE + N_LAST  # of the first search
        counts = {"independent": self.n_independent, "network": network}
        return counts.get(self.sources, max(counts.values()))


FEWEST, MOST = 32, 400
"""Least directions at which a network separates better than filters, and most at which "auto" takes
it where they are noisy: more are mostly noise."""


def separator_for(
    attack: SpanAttack, shape: Shape, given: Separator | None = None
) -> Separator | None:
    """The separator `given`, else the shipped one that is named or that fits the shape.

    None if no shipped one fits. Raises ValueError for a separator of another shape, for an unknown
    name, and if none fits although `attack.sources` is "network".
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
    direction, nor does one without a start whose number of images is known: they need no more
    sources than directions. A separator that is asked for is taken whatever its card says."""
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
    """The separator of an attack with "auto" decided, None for filters. Raises ValueError for
    pictures that neither fits."""
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
    """Separate every victim's pictures from a random start, by a separator or else by filters. W
    applies to the pictures themselves; `ones` as in `guided.separated`."""
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
