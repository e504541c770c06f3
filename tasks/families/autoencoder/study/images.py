"""Images of a study of recovery: its victims', those of the control, the inpainter's.

The victims of one source have the first images of one seeded order in which every class comes
before any comes again: a balanced subset, and that of a smaller training set is part of the larger
one's. The control images are drawn in the same way from the other split. The inpainter has the
train split without any of these, nor copies of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Bool
from torch import Tensor

from recon_core.degradation import MASKS, mask_from_picture, mask_pattern
from recon_core.types import seeded_generator
from storage.errors import SourceError
from storage.sources.load import ImageSet, Split, load_images
from storage.sources.pictures import CorruptPictureError, read_picture
from tasks.families.autoencoder.study.settings import RecoveryStudy, RecoveryVictim
from tasks.study.images import Ids, Pixels, balanced_order, content_of

OTHER: Mapping[Split, Split] = {"train": "heldout", "heldout": "train"}


@dataclass(frozen=True)
class Sources:
    """The images of a study, by source and side: both splits of each.

    Made by `read`; raises ValueError from `of` where a source has too few.
    """

    study: RecoveryStudy
    sets: Mapping[tuple[str, int], Mapping[Split, ImageSet]]

    @classmethod
    def read(cls, study: RecoveryStudy) -> Sources:
        """Every split of every source that a victim needs.

        Raises ValueError, naming the victim, if one has more images than its source, and
        SourceError as `load_images` does.
        """
        wanted = dict.fromkeys(study.source_of(victim) for victim in study.victims)
        splits = (study.split, OTHER[study.split])
        sets = {
            (data, size): {
                split: load_images(data, split=split, size=size, skip_corrupt=study.skip_corrupt)
                for split in splits
            }
            for data, size in wanted
        }
        made = cls(study, sets)
        for victim in study.victims:
            made.victim_ids(victim)
        return made

    @property
    def images(self) -> list[ImageSet]:
        """Sets of images that were read."""
        return [images for splits in self.sets.values() for images in splits.values()]

    def images_of(self, victim: RecoveryVictim) -> ImageSet:
        """The split that the victim's images are drawn from."""
        return self.sets[self.study.source_of(victim)][self.study.split]

    def control_of(self, victim: RecoveryVictim) -> ImageSet:
        """The other split of its source."""
        return self.sets[self.study.source_of(victim)][OTHER[self.study.split]]

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
        """Rows of `control_of`: as many as the victim has images, or as there are; no copy of an
        image of the victims."""
        control, source = self.control_of(victim), self.study.source_of(victim)
        order = self._orders[source, OTHER[self.study.split]]
        used = self._hashes_of_victims(source)
        strangers = [row for row in order if content_of(control.images[row]) not in used]
        return np.array(strangers[: victim.n_images], np.int64)

    def for_inpainter(self, source: tuple[str, int]) -> Pixels:
        """The train split without any image that recovery is tried on, nor copies of one."""
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
    def _orders(self) -> dict[tuple[tuple[str, int], Split], Ids]:
        return {
            (source, split): balanced_order(images.labels, root_seed=self.study.root_seed)
            for source, splits in self.sets.items()
            for split, images in splits.items()
        }

    def _victims(self, source: tuple[str, int]) -> list[RecoveryVictim]:
        return [v for v in self.study.victims if self.study.source_of(v) == source]

    def _hashes_of_victims(self, source: tuple[str, int]) -> set[bytes]:
        largest = max(self._victims(source), key=lambda victim: victim.n_images)
        images = self.images_of(largest).images
        return {content_of(images[row]) for row in self.victim_ids(largest)}


def masks_of(study: RecoveryStudy, side: int) -> dict[str, Bool[Tensor, "h w"]]:
    """The study's masks at a size, by name; a picture is named after its file.

    Raises ValueError for an unknown name, a picture of another size, or two of one name, and
    SourceError for a file that cannot be read.
    """
    found: dict[str, Tensor] = {}
    for mask in study.masks:
        name = mask_name(mask)
        if name in found:
            raise ValueError(f"two masks are named {name!r}; rename a picture")
        if mask in MASKS:
            generator = seeded_generator(study.root_seed, 0, f"mask {mask}")
            found[name] = mask_pattern(mask, side, side, generator=generator)
        else:
            found[name] = _of_picture(Path(mask), side)
    return found


def mask_name(mask: str) -> str:
    """Name of one of `RecoveryStudy.masks`: itself, or a picture's without folder and ending."""
    return mask if mask in MASKS else Path(mask).stem


def _of_picture(path: Path, side: int) -> Bool[Tensor, "h w"]:
    if not path.is_file():
        raise ValueError(
            f"mask {str(path)!r} is no file and none of {', '.join(MASKS)}; give one of these, or "
            f"a black and white picture of {side}x{side}"
        )
    try:
        pixels, was_resized = read_picture(path, side)
    except CorruptPictureError as error:
        raise SourceError(f"{path} cannot be read as a picture ({error}); save it again") from error
    if was_resized:
        raise ValueError(
            f"{path} is not {side}x{side}; a mask has one pixel for each of the images'"
        )
    return mask_from_picture(pixels, side, side)
