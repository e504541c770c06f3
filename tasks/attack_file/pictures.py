"""Pictures beside an attacked file: a source's images in the network's shape, with their names and
classes."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.types import seeded_generator
from storage.errors import SourceError
from storage.sources.load import load_images
from storage.sources.pictures import (
    ON_BLACK,
    CorruptPictureError,
    Decoding,
    Reading,
    decoded,
    facts_of,
)
from storage.sources.trees import PicturePath, is_divided, pictures_below, read_folder

Shape = tuple[int, int, int]
"""(channels, height, width)."""
Split = Literal["all", "train", "heldout"]
SIDES = {
    **{"cifar10": 32, "cifar100": 32, "svhn": 32, "tiny-imagenet": 64},
    **{"mnist": 28, "fashion-mnist": 28, "digits": 8},
}
"""Sides of the pictures of a source, as they are published."""
LUMA = (0.299, 0.587, 0.114)
"""Grey of red, green and blue, as Pillow and torchvision have it."""


@dataclass(frozen=True, eq=False)
class Named:
    """Images in [0, 1] of a network's shape, each once, and what each is called; `labels` index
    `class_names` and are None of a folder without class folders. `times` is how often each was
    there, where that is not once."""

    source: str
    images: Float[Tensor, "n c h w"]
    names: tuple[str, ...]
    labels: tuple[int, ...] | None = None
    class_names: tuple[str, ...] = ()
    reading: Reading | None = None
    times: tuple[int, ...] | None = None

    @property
    def mean(self) -> Float[Tensor, "c h w"]:
        """The mean image, with each as often as it was there."""
        times = torch.tensor(self.times or (1,) * len(self), dtype=self.images.dtype)
        return (self.images * times.view(-1, 1, 1, 1)).sum(0) / times.sum()

    @property
    def facts(self) -> dict[str, str]:
        """The reading, for people."""
        return facts_of(len(self), self.class_names, self.reading)

    def __len__(self) -> int:
        return len(self.names)

    def check_disjoint(self, other: Named | None, why: str) -> None:
        """Raise ValueError, ending with `why`, if images of `other` are among these, bit by bit.
        SOURCE in `why` is replaced by the source of the others."""
        seen = {image.numpy().tobytes() for image in self.images}
        others = [] if other is None else [image.numpy().tobytes() for image in other.images]
        if other is not None and (n_shared := sum(image in seen for image in others)):
            raise ValueError(f"{n_shared} of {len(other)} {why.replace('SOURCE', other.source)}")


def read_source(
    source: str,
    split: Split,
    shape: Shape,
    limit: int | None = None,
    seed: int = 0,
    *,
    skip_corrupt: bool = False,
) -> Named:
    """At most `limit` images of a source, drawn by the seed, in the source's order, cropped to the
    shape and resized. Split "all": every picture below the folder, whatever splits it has.

    Raises SourceError if there are none or one cannot be read, ValueError for shapes that no
    picture has.
    """
    channels, height, width = shape
    kind, _colon, path = source.partition(":")
    if channels not in (1, 3) or (height != width and kind != "folder"):
        raise ValueError(
            f"no picture of {source} has the shape {channels}x{height}x{width}: expected 1 or 3 "
            "channels and, but for a folder, a square; give --shape"
        )
    if split == "all" and kind != "folder":
        raise ValueError(f"--split all is for folders; {source} has train and heldout")
    if kind == "folder" and (split == "all" or is_divided(path)):
        read = read_folder(
            path, split, (height, width), skip_corrupt=skip_corrupt,
            drawn=lambda n: _drawn(n, limit, seed),
        )  # fmt: skip
        return Named(
            f"{source} ({split})", in_channels(read.images, channels), read.names, read.labels,
            read.class_names, read.reading, read.times,
        )  # fmt: skip
    assert split != "all"
    if height != width:
        raise ValueError(
            f"{source} has no splits of its own, and is divided as squares alone, not as "
            f"{height}x{width}: give --split all, or folders train and test"
        )
    found = load_images(source, split=split, size=height, skip_corrupt=skip_corrupt)
    rows = _drawn(len(found), limit, seed)
    return Named(
        f"{source} ({split})", in_channels(found.images[rows], channels),
        tuple(f"{split} {row}" for row in rows), tuple(found.labels[rows].tolist()),
        found.class_names, found.reading,
    )  # fmt: skip


def default_split(source: str, of_sets: Split) -> Split:
    """The split where none is given: all of a folder that is not divided itself, else `of_sets`."""
    kind, _colon, path = source.partition(":")
    return "all" if kind == "folder" and not is_divided(path) else of_sets


def size_of(source: str, option: str = "--data") -> tuple[int, int] | None:
    """(height, width) of a source's pictures, a folder's first one, where that is known."""
    kind, _colon, path = source.partition(":")
    if kind == "folder":
        return picture_folder(path, option).first_size()
    return (SIDES[kind], SIDES[kind]) if kind in SIDES else None


def shape_of(d: int) -> Shape | None:
    """(c, h, w) of d values: a square in colour if it can be, else in grey, else None."""
    for channels in (3, 1):
        side = math.isqrt(d // channels)
        if channels * side**2 == d:
            return channels, side, side
    return None


def by_channel(numbers: tuple[float, ...], name: str, x: Float[Tensor, "b c h w"]) -> Tensor:
    """Numbers of `--name`, one or one per channel, as they go with images (1, c or 1, 1, 1)."""
    if len(numbers) not in (1, x.shape[1]):
        raise ValueError(f"--{name} has {len(numbers)} numbers for {x.shape[1]} channels")
    return x.new_tensor(numbers).view(1, -1, 1, 1)


@dataclass(frozen=True, eq=False)
class PictureFolder:
    """Files named like pictures below a folder, and how they are read: transparent parts are black,
    as missing pixels are."""

    folder: Path
    files: list[Path]
    how: Decoding
    said: dict[str, str]

    def first_size(self) -> tuple[int, int]:
        """(height, width) of the first that can be read, or SourceError for the first of all."""
        for file in self.files:
            with suppress(CorruptPictureError):
                height, width = decoded(file, self.how).pixels.shape[:2]
                return height, width
        height, width = pixels_of(self.files[0], self.how).shape[:2]
        return height, width


def picture_folder(path: Path | str, option: str) -> PictureFolder:
    """Every picture below a folder, sorted; SourceError, which names the option, without one."""
    chosen = PicturePath.parse(str(path), decoding=ON_BLACK)
    if not chosen.path.is_dir():
        raise SourceError(f"{chosen.path} is not a folder; give {option} a folder of pictures")
    walk = pictures_below(chosen.path)
    if not walk.files:
        raise SourceError(f"{chosen.path} has no pictures in it (.png, .jpg, .webp, ...)")
    return PictureFolder(chosen.path, walk.files, chosen.decoding, walk.said)


def pixels_of(
    file: Path, how: Decoding = ON_BLACK, reading: Reading | None = None
) -> npt.NDArray[np.uint8]:
    """(h, w, 3) as it is; transparent parts are black. SourceError if it cannot be read."""
    try:
        picture = decoded(file, how)
    except CorruptPictureError as error:
        raise SourceError(f"{file} cannot be read as a picture ({error}); remove it") from error
    if reading is not None:
        reading.count(picture.found)
    return picture.pixels


def in_channels(pixels: npt.NDArray[np.uint8], channels: int) -> Float[Tensor, "n c h w"]:
    """Colours (n, 3, h, w) in [0, 1]; of one channel, grey as it is, or the luma of colours."""
    images = torch.from_numpy(np.ascontiguousarray(pixels)).float() / 255
    if channels == 3:
        return images
    if channels != 1:
        raise ValueError(f"no picture has {channels} channels; expected 1 or 3")
    if bool((images == images[:, :1]).all()):
        return images[:, :1].contiguous()
    return (images * torch.tensor(LUMA)[:, None, None]).sum(1, keepdim=True)


def _drawn(n: int, limit: int | None, seed: int) -> list[int]:
    if limit is None or n <= limit:
        return list(range(n))
    order = torch.randperm(n, generator=seeded_generator(seed, 0, "images"))
    return sorted(order[:limit].tolist())
