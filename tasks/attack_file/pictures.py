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
from storage.errors import SourceError, shown
from storage.sources.load import HELDOUT_FOLDERS, load_images
from storage.sources.picture_files import Reading, facts_of, read_picture_files
from storage.sources.pictures import CorruptPictureError, is_picture, read_picture_as_it_is

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
    """Images in [0, 1] of a network's shape, and what each is called; `labels` index `class_names`
    and are None of a folder without class folders."""

    source: str
    images: Float[Tensor, "n c h w"]
    names: tuple[str, ...]
    labels: tuple[int, ...] | None = None
    class_names: tuple[str, ...] = ()
    reading: Reading | None = None

    @property
    def facts(self) -> dict[str, str]:
        """The reading, for people."""
        return facts_of(len(self), self.class_names, self.reading)

    def __len__(self) -> int:
        return len(self.names)

    def check_disjoint(self, other: Named | None, why: str) -> None:
        """ValueError, of which `why` is the end, if images of `other` are among these to the last
        bit; SOURCE in it is where the others are from."""
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
    """At most `limit` images of a source, drawn by the seed, in the source's order, cropped to
    squares and resized. Split "all": every picture below the folder, the first folder on the way
    being its class. Raises SourceError if there are none or one cannot be read, ValueError for
    shapes that no picture has."""
    channels, height, width = shape
    if channels not in (1, 3) or height != width:
        raise ValueError(
            f"no picture has the shape {channels}x{height}x{width}: expected 1 or 3 channels and a "
            "square; give --shape"
        )
    kind, _colon, path = source.partition(":")
    if split == "all" and kind != "folder":
        raise ValueError(f"--split all is for folders; {source} has train and heldout")
    reading: Reading | None
    if split == "all":
        root = Path(path).expanduser()
        files = picture_files(root, "the source")
        chosen = [files[row] for row in _drawn(len(files), limit, seed)]
        pixels, kept, reading = read_picture_files(
            chosen, height, below=root, skip_corrupt=skip_corrupt
        )
        chosen = [chosen[place] for place in kept]
        names = [shown(str(file.relative_to(root))) for file in chosen]
        labels, classes = _class_folders(files, chosen, root)
    else:
        found = load_images(source, split=split, size=height, skip_corrupt=skip_corrupt)
        reading = found.reading
        rows = _drawn(len(found), limit, seed)
        pixels, names = found.images[rows], [f"{split} {row}" for row in rows]
        labels, classes = tuple(found.labels[rows].tolist()), found.class_names
    images = in_channels(pixels, channels)
    return Named(f"{source} ({split})", images, tuple(names), labels, classes, reading)


def default_split(source: str, of_sets: Split) -> Split:
    """The split where none is given: all of a folder that is not divided itself, else `of_sets`."""
    kind, _colon, path = source.partition(":")
    root = Path(path).expanduser()
    divided = (root / "train").is_dir() and any((root / n).is_dir() for n in HELDOUT_FOLDERS)
    return "all" if kind == "folder" and not divided else of_sets


def side_of(source: str) -> int | None:
    """The side of a source's images, where they are squares."""
    kind, _colon, path = source.partition(":")
    if kind != "folder":
        return SIDES.get(kind)
    height, width = first_size(picture_files(Path(path).expanduser(), "--data"))
    return height if height == width else None


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


def picture_files(folder: Path, option: str) -> list[Path]:
    """Every picture below a folder, sorted; SourceError, which names the option, without one."""
    if not folder.is_dir():
        raise SourceError(f"{folder} is not a folder; give {option} a folder of pictures")
    files = sorted(p for p in folder.rglob("*") if is_picture(p, below=folder))
    if not files:
        raise SourceError(f"{folder} has no pictures in it (.png, .jpg, .webp, ...)")
    return files


def first_size(files: list[Path]) -> tuple[int, int]:
    """(height, width) of the first that can be read, or SourceError for the first of all."""
    for file in files:
        with suppress(CorruptPictureError):
            height, width = read_picture_as_it_is(file).shape[:2]
            return height, width
    height, width = pixels_of(files[0]).shape[:2]
    return height, width


def pixels_of(file: Path) -> npt.NDArray[np.uint8]:
    """(h, w, 3) as it is; transparent parts are black. SourceError if it cannot be read."""
    try:
        return read_picture_as_it_is(file)
    except CorruptPictureError as error:
        raise SourceError(f"{file} cannot be read as a picture ({error}); remove it") from error


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


def _class_folders(
    files: list[Path], chosen: list[Path], root: Path
) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """The classes of the chosen files by the folders below `root`, in their sorted order; no labels
    where a file lies in none."""
    parts = {file: file.relative_to(root).parts for file in files}
    if min(len(names) for names in parts.values()) < 2:
        return None, ()
    classes = sorted({names[0] for names in parts.values()})
    labels = tuple(classes.index(parts[file][0]) for file in chosen)
    return labels, tuple(shown(name) for name in classes)


def _drawn(n: int, limit: int | None, seed: int) -> list[int]:
    if limit is None or n <= limit:
        return list(range(n))
    order = torch.randperm(n, generator=seeded_generator(seed, 0, "images"))
    return sorted(order[:limit].tolist())
