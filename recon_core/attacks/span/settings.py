"""Settings of the span attack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from recon_core.attacks.span.guided import N_FREE, N_LAST
from recon_core.attacks.span.rows import Source
from recon_core.strict import Count, Share, Strict, Within


@dataclass(frozen=True, kw_only=True)
class SpanAttack(Strict):
    """Settings of the attack.

    `source`: what is taken apart, the first layer's weights, its optimiser's state, or gradients
    (`rows`). `start`: whether the weights' start is known and taken off. `n_images`: the number of
    directions; None counts those that stand out of the noise and takes the share `surplus` more.
    `sources`: "independent" takes filters' outputs for independent, which bears noise in the span,
    for at most `n_independent` iterations. "network" follows a network that learned from images of
    the kind (`separator`), for at most `n_network`, and tells hundreds apart. "auto" is "network"
    for 32 directions or more of which its card says that it beats filters.
    `separator`: the name of a shipped one, "auto" for the one of the images' shape, or
    "sha256:..." of one that is given beside these settings.
    `overcomplete`: sources for each direction, 1 where the span ends sharply. Else noise hides
    directions, and more images come back from a tight frame of sources ("independent") or from so
    many searches ("network").
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
