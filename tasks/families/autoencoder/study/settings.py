"""Settings of a study of the autoencoder paper: victims, masks, methods and losses, and the images.

Victims are trained on images and stored where they pass a loss; their images are then recovered
from copies with erased pixels. All masks, losses and methods of a victim share its images, so they
are compared image by image. Defaults are the paper's.

The victims of one source have the first images of one seeded order in which classes take turns: a
balanced subset, and a smaller training set is part of a larger one. The control images are drawn
the same way from the other split. The inpainter is trained on the rest of the train split, without
copies of any of these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Bool
from torch import Tensor

from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.plug_and_play import Iteration, KnownMask, UnknownMask
from recon_core.degradation import MASKS, mask_from_picture, mask_pattern
from recon_core.restore.inpaint import DDNM
from recon_core.strict import Count, Natural, Positive, Strict, Within
from recon_core.types import seeded_generator
from recon_core.victims.autoencoder import Autoencoder
from recon_core.victims.autoencoder_training import AutoencoderTraining
from storage.errors import SourceError
from storage.sources.load import ImageSet, Split, load_images
from storage.sources.pictures import CorruptPictureError, read_picture
from tasks.study.products import Ids, Pixels, balanced_order, content_of
from tasks.training.inpainter import Inpainter

STORED = 16
"""Images of a cell that are stored as pictures, and so can be shown."""
Source = tuple[str, int]
"""A source of images and their side in pixels."""


@dataclass(frozen=True, kw_only=True)
class RecoveryVictim(Strict):
    """An autoencoder, its training, and its own settings of the attack (autoencoder paper,
    section 3.2 and appendix D.2).

    `gamma` and `start` are settings of the methods `known` and `unknown`. `data` and `size`: its
    source of images and their side, if they are not the study's.
    """

    name: str
    title: str
    network: Autoencoder
    training: AutoencoderTraining
    n_images: Count
    gamma: Positive
    start: Literal["random", "nothing"]
    data: str | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", self.name):
            raise ValueError(
                f"name={self.name!r} of a victim names files; use small letters, digits, '-', '_' "
                "and '.'"
            )


@dataclass(frozen=True, kw_only=True)
class Methods(Strict):
    """Methods of recovery; None leaves one out.

    `unknown` and `known` take gamma and start from the victim, and `known` is told whether there is
    noise. `ddnm` uses the study's inpainter; `biharmonic` has no settings.
    """

    iteration: Iteration | None = field(default_factory=Iteration)
    unknown: UnknownMask | None = field(default_factory=UnknownMask)
    known: KnownMask | None = field(default_factory=KnownMask)
    noise_aware: NoiseAware | None = field(default_factory=NoiseAware)
    ddnm: DDNM | None = field(default_factory=DDNM)
    biharmonic: bool = True

    @property
    def of_victims(self) -> dict[str, Any]:
        """Methods that query the victim, by name, in the order of the page."""
        names = ("iteration", "unknown", "known", "noise_aware")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def generic(self) -> tuple[str, ...]:
        """Names of methods that know the mask and query no victim."""
        return ("ddnm",) * (self.ddnm is not None) + ("biharmonic",) * self.biharmonic

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.of_victims, *self.generic)


@dataclass(frozen=True, kw_only=True)
class Noise(Strict):
    """The experiment of the autoencoder paper's appendix G: one mask, and noise of standard
    deviation `sigma` on all pixels, with a `gamma` of its own. `victims`: their names; empty for
    the first alone."""

    sigma: Annotated[float, Within("(0, 1]", fix="a study without noise has noise=null")] = 0.02
    gamma: Positive = 0.1
    mask: str = "random"
    victims: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecoveryStudy(Strict):
    """Settings of a study.

    `data` and `size`: the source of the images and their side. `split`: the victims' split; control
    images are from the other one. `masks`: names of `recon_core.degradation`, or paths of pictures
    whose bright pixels are known. `levels`: losses at which victims are evaluated; empty for all
    that their training stores. `control`: also try images that no victim has seen, at the last loss
    that was reached. `n_generic`: the generic methods, which take far longer, get at most this many
    of a victim's first images. `n_shown`: pictures of each cell on the page. `only`: the common
    part of the victims' names, if they are not the whole preset.
    """

    preset: str
    data: str
    victims: tuple[RecoveryVictim, ...]
    name: Literal["autoencoder"] = "autoencoder"
    only: str = ""
    size: Count = 32
    split: Split = "train"
    skip_corrupt: bool = False
    root_seed: Natural = 42
    threads: Count = 1
    masks: tuple[str, ...] = MASKS
    noise: Noise | None = field(default_factory=Noise)
    methods: Methods = field(default_factory=Methods)
    levels: tuple[float, ...] = ()
    control: bool = True
    inpainter: Inpainter = field(default_factory=Inpainter)
    n_generic: Count = 600
    n_shown: Annotated[int, Within(f"[0, {STORED}]", fix="no more pictures are kept")] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        names, noise = [victim.name for victim in self.victims], self.noise
        if not names:
            raise ValueError("victims=() is no study; give at least one")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two victims are named {twice[0]!r}; every one needs its own name")
        if not self.masks or len(set(self.masks)) < len(self.masks):
            raise ValueError(f"masks={self.masks} must name at least one, and none twice")
        if not self.methods.names:
            raise ValueError("every method is null; leave at least one")
        if noise is not None and noise.mask not in self.masks:
            raise ValueError(f"noise.mask={noise.mask!r} is none of masks={self.masks}")
        if noise is not None and (unknown := sorted(set(noise.victims) - set(names))):
            raise ValueError(f"noise.victims={unknown} are none of the victims {names}")
        kept = {level for victim in self.victims for level in victim.training.levels}
        if missing := sorted(set(self.levels) - kept):
            raise ValueError(
                f"levels={missing} are kept by no victim's training, which have {sorted(kept)}"
            )

    def wanted(self, victim: RecoveryVictim) -> tuple[float, ...]:
        """The falling losses at which a victim is evaluated if it reaches them."""
        kept = victim.training.levels
        return tuple(level for level in kept if not self.levels or level in self.levels)

    def source_of(self, victim: RecoveryVictim) -> Source:
        data = self.data if victim.data is None else victim.data
        return data, self.size if victim.size is None else victim.size


@dataclass(frozen=True)
class Sources:
    """The images of a study: both splits of each source and side."""

    study: RecoveryStudy
    sets: Mapping[Source, Mapping[Split, ImageSet]]

    @classmethod
    def read(cls, study: RecoveryStudy) -> Sources:
        """Read all splits of the victims' sources.

        Raises ValueError, naming the victim, if it needs more images than its source has, and
        SourceError as `load_images` does.
        """
        splits: tuple[Split, ...] = ("train", "heldout")
        sets = {
            (data, size): {
                split: load_images(data, split=split, size=size, skip_corrupt=study.skip_corrupt)
                for split in splits
            }
            for data, size in dict.fromkeys(map(study.source_of, study.victims))
        }
        sources = cls(study, sets)
        for victim in study.victims:
            sources.victim_ids(victim)
        return sources

    @property
    def other(self) -> Split:
        """The split of the control images."""
        return "heldout" if self.study.split == "train" else "train"

    def images_of(self, victim: RecoveryVictim) -> ImageSet:
        """The split that the victim's images are drawn from."""
        return self.sets[self.study.source_of(victim)][self.study.split]

    def control_of(self, victim: RecoveryVictim) -> ImageSet:
        """The other split of its source."""
        return self.sets[self.study.source_of(victim)][self.other]

    def victim_ids(self, victim: RecoveryVictim) -> Ids:
        """Rows of `images_of`, in the order of training."""
        images = self.images_of(victim)
        if victim.n_images > len(images):
            raise ValueError(
                f"victim {victim.name!r} has n_images={victim.n_images}, but {images.name!r} "
                f"({images.split}) has {len(images)}; use fewer or a larger source"
            )
        return self._orders[self.study.source_of(victim), self.study.split][: victim.n_images]

    def control_ids(self, victim: RecoveryVictim) -> Ids:
        """Rows of `control_of`: as many as the victim has images, if there are; no copies of the
        victims' images."""
        control, source = self.control_of(victim), self.study.source_of(victim)
        used = self._hashes_of_victims(source)
        order = self._orders[source, self.other]
        unseen = [row for row in order if content_of(control.images[row]) not in used]
        return np.array(unseen[: victim.n_images], np.int64)

    def for_inpainter(self, source: Source) -> Pixels:
        """The train split without the images that are to be recovered, or copies of them."""
        used = self._hashes_of_victims(source)
        for victim in self._victims(source):
            control = self.control_of(victim).images
            used |= {content_of(control[row]) for row in self.control_ids(victim)}
        images = self.sets[source]["train"].images
        rest = [row for row, image in enumerate(images) if content_of(image) not in used]
        if not rest:
            raise ValueError(
                f"no image of {source[0]!r} is left for the inpainter; give the victims fewer "
                "images, or leave it out with methods.ddnm=null"
            )
        return np.ascontiguousarray(images[rest])

    @cached_property
    def _orders(self) -> dict[tuple[Source, Split], Ids]:
        return {
            (source, split): balanced_order(images.labels, root_seed=self.study.root_seed)
            for source, splits in self.sets.items()
            for split, images in splits.items()
        }

    def _victims(self, source: Source) -> list[RecoveryVictim]:
        return [v for v in self.study.victims if self.study.source_of(v) == source]

    def _hashes_of_victims(self, source: Source) -> set[bytes]:
        largest = max(self._victims(source), key=lambda victim: victim.n_images)
        images = self.images_of(largest).images
        return {content_of(images[row]) for row in self.victim_ids(largest)}


def masks_of(study: RecoveryStudy, side: int) -> dict[str, Bool[Tensor, "h w"]]:
    """The study's masks at a size, by name; a picture is named after its file.

    Raises ValueError for an unknown name, a picture of another size, or two masks of one name, and
    SourceError for a file that cannot be read.
    """
    masks: dict[str, Tensor] = {}
    for mask in study.masks:
        name, path = mask_name(mask), Path(mask)
        if name in masks:
            raise ValueError(f"two masks are named {name!r}; rename a picture")
        if mask in MASKS:
            generator = seeded_generator(study.root_seed, 0, f"mask {mask}")
            masks[name] = mask_pattern(mask, side, side, generator=generator)
            continue
        if not path.is_file():
            raise ValueError(
                f"mask {mask!r} is no file and none of {', '.join(MASKS)}; give one of these, or a "
                f"black and white picture of {side}x{side}"
            )
        try:
            pixels, was_resized = read_picture(path, side)
        except CorruptPictureError as error:
            raise SourceError(
                f"{path} cannot be read as a picture ({error}); save it again"
            ) from error
        if was_resized:
            raise ValueError(
                f"{path} is not {side}x{side}; a mask has one pixel for each of the images'"
            )
        masks[name] = mask_from_picture(pixels, side, side)
    return masks


def mask_name(mask: str) -> str:
    """Name of one of `RecoveryStudy.masks`; a picture's is its file name without the suffix."""
    return mask if mask in MASKS else Path(mask).stem
