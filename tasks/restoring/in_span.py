"""The span of one network's first layer, in which what is restored has to lie.

    span = open_span(Span(weights=Path("victim.safetensors")), pictures)

A restorer's answers are projected on it, or every step of one that has steps is
(`recon_core.restore.edm.Constraint`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from recon_core.attacks.span.attack import check_victim
from recon_core.attacks.span.restoration import InSpan, in_span
from recon_core.attacks.span.settings import SpanAttack
from recon_core.strict import Strict
from tasks.attack_file.record import check_std
from tasks.families.weights.inputs import read_victim
from tasks.families.weights.preflight import best_source
from tasks.families.weights.preprocessing import read_mean, read_std
from tasks.restoring.inputs import Inputs

Steps = Literal["every", "last"]
"""The steps of a restorer that are kept in the span."""
OF_THE_NETWORK = 0.8
"""Largest ratio of what of the pictures lies outside the span to what of their mirror images does,
which the network never saw: 1 for pictures of any other network, 0 for those of this one."""
WITHIN = 0.99
"""Share inside from which on mirror images tell nothing: they may have been trained on, too."""


@dataclass(frozen=True, kw_only=True)
class Span(Strict):
    """A network whose training images are restored: the file of its `weights`, and as for an attack
    on them what it started from, files of its optimiser's states and of gradients, the mean that
    was subtracted in training (default: the pictures' own), and what was then divided by. `steps`
    of a restorer are kept in the span, but for `tolerance`, a standard deviation per pixel
    (default: see `OpenSpan`). A restorer without steps restores what its answer has in the span
    again, in so many `rounds`."""

    weights: Path
    initial: Path | None = None
    optimizers: tuple[Path, ...] = ()
    checkpoints: tuple[Path, ...] = ()
    gradients: tuple[Path, ...] = ()
    mean: str | None = None
    std: tuple[float, ...] | None = None
    steps: Steps | None = None
    tolerance: float = 0.0
    rounds: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_std(self.std or ())
        if not 0 <= self.tolerance < 1:
            raise ValueError(
                f"--span-tolerance {self.tolerance:g} is no distance in pixels that go from 0 to "
                "1: use 0, or a little more"
            )
        if self.rounds < 1:
            raise ValueError(f"--span-rounds {self.rounds} is too few: use 1 or more")
        if self.tolerance and self.steps == "last":
            raise ValueError(
                "--span-tolerance is of every step, and --span-steps last puts answers in the span "
                "as they are: leave out one of them"
            )


@dataclass(frozen=True)
class OpenSpan:
    """Pictures that a network's first layer allows, and for people and records what they are
    of; `steps`, `tolerance` and `rounds` as they were asked for. `exact`: the span stands out of
    the noise by far. At every step one that does not costs more than it brings, unless there is a
    tolerance."""

    allowed: InSpan
    facts: dict[str, Any]
    exact: bool = True
    steps: Steps | None = None
    tolerance: float = 0.0
    rounds: int = 1

    @property
    def at_every_step(self) -> bool:
        """True if a restorer that has steps is kept in the span at each of them."""
        if self.steps is None:
            return self.exact or self.tolerance > 0
        return self.steps == "every"


def open_span(of: Span, pictures: Inputs) -> OpenSpan:
    """The span of a network whose training images `pictures` are to show.

    Raises WeightsError or SourceError for files that cannot be read, NoSpanError where nothing
    stands out of the start's noise, ValueError for a network without a dense first layer or of
    other images, or pictures that are not of this network.
    """
    victim = read_victim(
        of.weights, arch=None, shape=None, activation="relu", leak=0.01, dtype="float32",
        initial=of.initial, optimizers=of.optimizers, checkpoints=of.checkpoints,
        gradients=of.gradients,
    )  # fmt: skip
    check_victim(victim.architecture)
    shape = victim.architecture.shape
    given = _stacked(pictures, of.weights, shape)
    source = best_source(victim, SpanAttack())
    allowed, span = in_span(
        victim.sources[source],
        given.mean(0) if of.mean is None else read_mean(of.mean, shape),
        std=read_std(of.std, shape),
    )
    share, mirrored = allowed.share(given), allowed.share(given.flip(3))
    if share < WITHIN and 1 - share > OF_THE_NETWORK * (1 - mirrored):
        raise ValueError(
            f"{share:.1%} of these pictures lies in the span of {of.weights} ({span.n_signal} "
            f"directions), and as much of their mirror images ({mirrored:.1%}): they are not of "
            "this network. Give --span the weights that they were reconstructed from, with "
            "--initial and --mean as the attack had them"
        )
    facts = {
        "weights": victim.file.sha256,
        "initial": None if victim.start is None else victim.start.file.sha256,
        "source": source,
        "beside": [part.sha256 for part in (*victim.states, *victim.gradients)],
        "directions": len(allowed.directions),
        "mean": of.mean,
        "std": None if of.std is None else list(of.std),
        "share_of_pictures": round(share, 4),
    }
    return OpenSpan(allowed, facts, span.ends_sharply, of.steps, of.tolerance, of.rounds)


def _stacked(pictures: Inputs, weights: Path, shape: tuple[int, int, int]) -> Tensor:
    """All pictures, float32 (n, c, h, w) in [0, 1]; ValueError if one has another shape."""
    rows = []
    for picture in pictures:
        if picture.pixels.shape != shape:
            sides = "x".join(map(str, shape))
            raise ValueError(
                f"{picture.name} is {picture.pixels.shape[1]}x{picture.pixels.shape[2]} in colour, "
                f"and the network in {weights} takes images of {sides}: give --span the network "
                "that these pictures were reconstructed from, or --size"
            )
        rows.append(torch.from_numpy(picture.pixels).float() / 255)
    return torch.stack(rows)
