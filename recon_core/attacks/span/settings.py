"""Settings of the span attack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from recon_core.attacks.span.rows import Source
from recon_core.attacks.span.separation import Stage
from recon_core.attacks.span.separator import N_FREED
from recon_core.strict import Strict

MOST_OVERCOMPLETE = 100


@dataclass(frozen=True, kw_only=True)
class SpanAttack(Strict):
    """Settings of the attack.

    `source`: what is taken apart, the first layer's weights, the optimiser's state of it, or
    gradients (`rows`). `start`: whether the weights' start is known and taken off. `n_images`: the
    number of directions; None counts those that stand out of the noise and takes the share
    `surplus` more.
    `sources`: "independent" takes filters' outputs for independent, which bears noise in the span.
    "network" follows a network that was learned from images of the kind (`separator`), for at most
    `n_network` iterations, and tells hundreds of images apart. "auto" is "network" where the span
    ends sharply, after 32 directions or more, and the network's card says that it beats filters.
    `separator`: the name of a shipped one, "auto" for the one of the images' shape, or
    "sha256:..." of one that is given beside these settings. The rest is of "independent":

    `filter_size`, `colours`, `stride`: the cosine filters whose outputs are separated. `scales` and
    `n_rotations`: c of the score and the most iterations at each. `n_grouped`: steps of the grouped
    fixed point at `grouped_scale`. `n_likelihood`: iterations without orthogonality, of sources
    with shape `shape` and scale `likelihood_scale`; 0 leaves them out. A stage ends early once the
    objective falls by less than `tolerance` of itself in 20 iterations. `n_starts`: random starts,
    of which the one with the lowest objective is kept.

    `overcomplete`: sources for each direction. Where noise hides some of the images' directions,
    there are more images than directions, and a tight frame of sources shows more of them than a
    rotation does: above 1 the `n_grouped` steps search it, and no other stage does. "auto" takes
    no frame where the span ends sharply.
    """

    kind: Literal["span"] = "span"
    source: Source = "weights"
    start: Literal["unknown", "known"] = "unknown"
    n_images: int | None = None
    surplus: float = 0.1
    sources: Literal["auto", "independent", "network"] = "auto"
    separator: str = "auto"
    n_network: int = 300
    filter_size: int = 4
    colours: bool = True
    stride: int = 2
    scales: tuple[float, ...] = (2.0, 1.0, 0.7, 0.5)
    n_rotations: tuple[int, ...] = (40, 200, 150, 150)
    n_grouped: int = 100
    grouped_scale: float = 0.4
    n_likelihood: int = 60
    shape: float = 2.0
    likelihood_scale: float = 1.5
    tolerance: float = 1e-6
    n_starts: int = 1
    overcomplete: float = 1.0

    def __post_init__(self) -> None:
        if self.source != "weights" and self.start == "known":
            raise ValueError(
                f"start='known' with source={self.source!r}, in which there is no start; use "
                "start='unknown'"
            )
        self._at_least(2, "filter_size", "n_images")
        self._at_least(1, "stride", "n_starts", "n_network")
        self._at_least(0, "n_grouped", "n_likelihood")
        self._positive("grouped_scale", "shape", "likelihood_scale")
        if not 1 <= self.overcomplete <= MOST_OVERCOMPLETE:
            raise ValueError(
                f"overcomplete={self.overcomplete} sources for each direction; give 1 to "
                f"{MOST_OVERCOMPLETE}"
            )
        if self.overcomplete > 1 and (self.sources == "network" or self.n_grouped == 0):
            raise ValueError(
                f"overcomplete={self.overcomplete} with sources={self.sources!r} and n_grouped="
                f"{self.n_grouped}; a frame is searched by the grouped steps of 'independent', so "
                "use that or 'auto' with some steps, or overcomplete=1"
            )
        if not 0 <= self.surplus <= 1:
            raise ValueError(f"surplus={self.surplus} is a share, from 0 to 1")
        if len(self.scales) != len(self.n_rotations) or not self.scales:
            raise ValueError(
                f"scales={self.scales} and n_rotations={self.n_rotations} must go together, one "
                "number of iterations for each scale, and at least one"
            )
        if min(self.scales) <= 0 or min(self.n_rotations) < 1 or not 0 <= self.tolerance < 1:
            raise ValueError(
                f"scales={self.scales} must be above 0, n_rotations={self.n_rotations} at least 1, "
                f"tolerance={self.tolerance} in [0, 1)"
            )

    def n_sources(self, n_directions: int) -> int:
        """Number of sources that "independent" finds in a span."""
        return round(self.overcomplete * n_directions)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(Stage(c, n) for c, n in zip(self.scales, self.n_rotations, strict=True))

    @property
    def n_iterations(self) -> int:
        independent = self.n_grouped
        if self.overcomplete == 1:
            independent += sum(self.n_rotations) + self.n_likelihood
        by_sources = {
            "independent": independent,
            "network": self.n_network + N_FREED,
        }
        by_sources["auto"] = max(independent, by_sources["network"])
        return by_sources[self.sources]
