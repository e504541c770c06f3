"""A study of the autoencoder paper: which victims, masks, methods and losses.

Victims are trained on a nested, balanced draw of images, are kept where they pass a loss, and are
asked for their images from pictures of which pixels were erased. All masks, losses and methods of a
victim share its images, so they are compared image by image. Defaults are the paper's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.plug_and_play import Iteration, KnownMask, UnknownMask
from recon_core.degradation import MASKS
from recon_core.restore.inpaint import DDNM
from recon_core.victims.autoencoder import Autoencoder
from recon_core.victims.autoencoder_training import AutoencoderTraining
from storage.sources.load import Split
from tasks.training.inpainter import Inpainter

FORBID = {"extra": "forbid"}
STORED = 16
"""Images of a cell that are kept as pictures; at most so many can be shown."""
Start = Literal["random", "nothing"]
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True)
class RecoveryVictim:
    """An autoencoder, what it is trained on and how, and the settings of the attack that are its
    own (autoencoder paper, section 3.2 and appendix D.2).

    `gamma` and `start` are those of the methods `known` and `unknown`. `data` and `size`: its
    source of images and their side, where they are not the study's.
    """

    name: str
    title: str
    network: Autoencoder
    training: AutoencoderTraining
    n_images: int
    gamma: float
    start: Start
    data: str | None = None
    size: int | None = None
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"name={self.name!r} of a victim names files; use small letters, digits, '-', '_' "
                "and '.'"
            )
        if self.n_images < 1:
            raise ValueError(f"n_images={self.n_images} must be at least 1")
        if not self.gamma > 0:
            raise ValueError(f"gamma={self.gamma} must be positive")


@dataclass(frozen=True, kw_only=True)
class Methods:
    """Methods of recovery; None leaves one out.

    `unknown` and `known` get gamma and start from the victim, and `known` whether there is noise.
    `ddnm` uses the study's inpainter; `biharmonic` has no settings.
    """

    iteration: Iteration | None = field(default_factory=Iteration)
    unknown: UnknownMask | None = field(default_factory=UnknownMask)
    known: KnownMask | None = field(default_factory=KnownMask)
    noise_aware: NoiseAware | None = field(default_factory=NoiseAware)
    ddnm: DDNM | None = field(default_factory=DDNM)
    biharmonic: bool = True
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID

    @property
    def of_victims(self) -> dict[str, Any]:
        """Methods that ask the victim, by name, in the order of the page."""
        names = ("iteration", "unknown", "known", "noise_aware")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def generic(self) -> dict[str, Any]:
        """Methods that know the mask and no victim."""
        found = {} if self.ddnm is None else {"ddnm": self.ddnm}
        return found | ({"biharmonic": None} if self.biharmonic else {})

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.of_victims, *self.generic)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The experiment of the autoencoder paper, appendix G: one mask, and noise of standard
    deviation `sigma` on all pixels, with a `gamma` of its own. `victims`: their names; none is the
    first one alone."""

    sigma: float = 0.02
    gamma: float = 0.1
    mask: str = "random"
    victims: tuple[str, ...] = ()
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID

    def __post_init__(self) -> None:
        if not (0 < self.sigma <= 1 and self.gamma > 0):
            raise ValueError(
                f"sigma={self.sigma} must be in (0, 1] and gamma={self.gamma} positive; a study "
                "without noise has noise=null"
            )


@dataclass(frozen=True, kw_only=True)
class RecoveryStudy:
    """Every setting of a study.

    `data` and `size`: the source of the images and their side; `split`: the victims' part of it,
    the control images are of the other one. `masks`: names of `recon_core.degradation`, or paths of
    pictures of which the bright pixels are known. `levels`: losses at which victims are evaluated;
    none are all those that their training keeps. `control`: also images that no victim has seen, at
    the last loss that was reached. `n_generic`: the generic methods, which take far longer, get at
    most so many images of a victim, its first. `n_shown`: pictures of each cell on the page.
    `only`: what the names of the victims have in common, if these are not all of the preset.
    """

    preset: str
    data: str
    victims: tuple[RecoveryVictim, ...]
    name: Literal["autoencoder"] = "autoencoder"
    only: str = ""
    size: int = 32
    split: Split = "train"
    skip_corrupt: bool = False
    root_seed: int = 42
    threads: int = 1
    masks: tuple[str, ...] = MASKS
    noise: Noise | None = field(default_factory=Noise)
    methods: Methods = field(default_factory=Methods)
    levels: tuple[float, ...] = ()
    control: bool = True
    inpainter: Inpainter = field(default_factory=Inpainter)
    n_generic: int = 600
    n_shown: int = 8
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID

    def __post_init__(self) -> None:
        names = [victim.name for victim in self.victims]
        if not names:
            raise ValueError("victims=() is no study; give at least one")
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two victims are named {twice!r}; every one needs its own name")
        if not self.masks or len(set(self.masks)) < len(self.masks):
            raise ValueError(f"masks={self.masks} must name at least one, and none twice")
        if not self.methods.names:
            raise ValueError("every method is null; leave at least one")
        for name, low in (("root_seed", 0), ("threads", 1), ("size", 1), ("n_generic", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {low}")
        if not 0 <= self.n_shown <= STORED:
            raise ValueError(f"n_shown={self.n_shown} must be from 0 to {STORED}, which are kept")
        self._check_noise(names)
        kept = {level for victim in self.victims for level in victim.training.levels}
        if strange := sorted(set(self.levels) - kept):
            raise ValueError(
                f"levels={strange} are kept by no victim's training, which have {sorted(kept)}"
            )

    def _check_noise(self, names: list[str]) -> None:
        if self.noise is None:
            return
        if self.noise.mask not in self.masks:
            raise ValueError(f"noise.mask={self.noise.mask!r} is none of masks={self.masks}")
        if strange := sorted(set(self.noise.victims) - set(names)):
            raise ValueError(f"noise.victims={strange} are none of the victims {names}")

    def has_noise(self, victim: RecoveryVictim) -> bool:
        """True if the victim is also asked with noise."""
        noise = self.noise
        return noise is not None and victim.name in (noise.victims or (self.victims[0].name,))

    def wanted(self, victim: RecoveryVictim) -> tuple[float, ...]:
        """The losses at which it is evaluated if it gets there, falling."""
        kept = victim.training.levels
        return tuple(level for level in kept if not self.levels or level in self.levels)

    def source_of(self, victim: RecoveryVictim) -> tuple[str, int]:
        """Source of its images, and their side."""
        return (
            self.data if victim.data is None else victim.data,
            self.size if victim.size is None else victim.size,
        )


def level_name(level: float) -> str:
    """`1e-08`: how a loss is written in names."""
    return f"{level:g}"
