"""Sources of images: embedded ones, a folder, or one of several well-known data sets.

The two splits of a source never share an image: victims that restorers learn from are trained on
`train`, victims that are evaluated on `heldout`. A further source is one function here and one line
in `_LOADERS`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
from PIL import Image

from storage.errors import SourceError, shown
from storage.sources.cifar import CIFAR_CLASSES, cifar10_pictures, cifar100_pictures
from storage.sources.embedded import (
    DIGITS_NOTE,
    PHOTOGRAPHS_NOTES,
    digits_pictures,
    photograph_tiles,
)
from storage.sources.official import mnist_pictures, svhn_pictures, tiny_imagenet_files
from storage.sources.pictures import (
    Pictures,
    Reading,
    central,
    check_pixels,
    facts_of,
    read_picture_files,
)
from storage.sources.trees import PicturePath, read_folder

__all__ = ["CIFAR_CLASSES", "HELDOUT_ONE_IN", "ImageSet", "Split", "cached_images", "load_images"]

Split = Literal["train", "heldout"]

HELDOUT_ONE_IN = 5
"""Of a folder without split folders, the images whose hash is 0 modulo this are held out."""

EMBEDDED = ("photos", "digits")

Loaded = tuple[Pictures, list[str], Reading | None]
"""Pictures with their notes, and what was read of the source."""

_cached: WeakValueDictionary[tuple[object, ...], ImageSet] = WeakValueDictionary()
"""The images that somebody in this process works with, by what they were read from."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageSet:
    """N pictures of one split of a source.

    `images` is uint8 (n, c, h, w) with c = 3, or 1 where grey was asked for; `labels` is int64 (n,)
    indexing `class_names`. `content_hash` is the SHA-256 over shape, images, labels and class
    names. `notes` say how the images were made. `reading`: what was read of the source, of both
    splits where it is not divided itself; None where nothing is known of it.
    """

    name: str
    split: Split
    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    class_names: tuple[str, ...]
    notes: tuple[str, ...] = ()
    reading: Reading | None = None
    content_hash: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256(repr((self.images.shape, self.class_names)).encode())
        digest.update(np.ascontiguousarray(self.images).data)
        digest.update(np.ascontiguousarray(self.labels, dtype="<i8").data)
        object.__setattr__(self, "content_hash", digest.hexdigest())

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def facts(self) -> dict[str, str]:
        """Summary of what was read, for people, before work starts."""
        return {"source": self.name} | facts_of(len(self), self.class_names, self.reading)

    def without(self, rows: Sequence[int], *, because: str) -> ImageSet:
        """The set without the pictures in `rows`, with a note that says how many and `because`; its
        ids are its own rows. Raises ValueError if no picture would be left."""
        if not len(rows):
            return self
        kept = np.ones(len(self), np.bool_)
        kept[np.asarray(rows, np.int64)] = False
        if not kept.any():
            raise ValueError(
                f"all {len(self)} pictures of {self.name!r} ({self.split}) would be left out "
                f"({because}); use other pictures"
            )
        n_left_out = int((~kept).sum())
        note = f"{n_left_out} of {len(self)} pictures were left out: {because}."
        reading = self.reading
        if reading is not None:
            reading = replace(
                reading, said={**reading.said, "not used": f"{n_left_out}: {because}"}
            )
        return replace(
            self,
            images=self.images[kept],
            labels=self.labels[kept],
            notes=(*self.notes, note),
            reading=reading,
        )


def cached_images(source: str, *, split: Split, skip_corrupt: bool, channels: int) -> ImageSet:
    """The same as `load_images`, read once for as long as somebody in this process has them."""
    key = (source, split, skip_corrupt, channels)
    if (images := _cached.get(key)) is None:
        images = load_images(source, split=split, skip_corrupt=skip_corrupt, channels=channels)
        _cached[key] = images
    return images


def load_images(
    source: str, *, split: Split, size: int = 32, skip_corrupt: bool = False, channels: int = 3
) -> ImageSet:
    """The `split` of `source` as pictures of `size` by `size` pixels.

    They are RGB whatever the source has, grey being repeated. `channels=1` makes them grey: those
    of grey sources as they were, others by their luma (ITU-R BT.601), which the notes say.

    `photos` and `digits` (8 by 8) need nothing. `folder:PATH` has PATH/<class>/*.jpg, or two such
    trees in PATH/train and PATH/test (`storage.sources.trees`); pictures with the same pixels count
    once. `cifar10:PATH` and `cifar100:PATH` are the
    official archive or the folder in it, `mnist:PATH` and `fashion-mnist:PATH` the folder of the
    official idx files, gzipped or not, or torchvision's above it (28 by 28), `svhn:PATH` the folder
    of the official train_32x32.mat and test_32x32.mat, `tiny-imagenet:PATH` the unpacked folder
    tiny-imagenet-200 (64 by 64).

    Raises SourceError if nothing of that kind is there, or a file is corrupt (`skip_corrupt=True`
    leaves corrupt pictures out and counts them in the notes); ValueError if `size` is not positive
    or too large, or `channels` neither 3 nor 1.
    """
    kind, _colon, path = source.partition(":")
    if kind not in _LOADERS or (kind in EMBEDDED) == bool(path):
        raise SourceError(
            f"unknown image source {source!r}; use photos, digits, folder:PATH, cifar10:PATH, "
            "cifar100:PATH, mnist:PATH, fashion-mnist:PATH, svhn:PATH or tiny-imagenet:PATH"
        )
    if size < 1:
        raise ValueError(f"size={size}; expected a positive number of pixels")
    check_pixels(size, size)
    if channels not in (1, 3):
        raise ValueError(f"channels={channels}; expected 3 for RGB or 1 for grey")
    (name, images, labels, class_names), notes, reading = _LOADERS[kind](
        path, split, size, skip_corrupt
    )
    if channels == 1 and (images == images[:, :1]).all():
        images = np.ascontiguousarray(images[:, :1])
    elif channels == 1:
        grey = np.empty((len(images), 1, *images.shape[2:]), np.uint8)
        for row, image in enumerate(images):
            grey[row, 0] = np.asarray(Image.fromarray(image.transpose(1, 2, 0)).convert("L"))
        images = grey
        notes.append("Colours were made grey: 0.299 red + 0.587 green + 0.114 blue.")
    return ImageSet(
        name=name,
        split=split,
        images=images,
        labels=labels,
        class_names=class_names,
        notes=tuple(notes),
        reading=reading,
    )


def _folder(text: str, split: Split, size: int, skip_corrupt: bool) -> Loaded:
    other: Split = "heldout" if split == "train" else "train"
    found = read_folder(text, split, size, skip_corrupt=skip_corrupt, beside=other)
    reading, images, class_names = found.reading, found.images, found.class_names
    notes, folder = _notes_of(reading), shown(found.path.name)
    if found.labels is None:
        class_names, labels = ("even", "odd"), np.arange(len(images), dtype=np.int64) % 2
        notes.append(
            f"{folder} has no class folders: pictures were put into two arbitrary classes, "
            "even and odd places in the sorted order."
        )
    else:
        labels = np.array(found.labels, np.int64)
    if not found.is_divided:
        digests = [hashlib.sha256(image.tobytes()).digest()[0] for image in images]
        held_out = np.array(digests) % HELDOUT_ONE_IN == 0
        chosen = held_out if split == "heldout" else ~held_out
        images, labels = images[chosen], labels[chosen]
        notes.append(
            f"{folder} has no train and test folders: about one picture in {HELDOUT_ONE_IN} is "
            "held out, chosen by the hash of its pixels, so that copies stay on one side."
        )
        said = {"divided": f"by the hash of pixels; one in {HELDOUT_ONE_IN} is held out"}
        reading = replace(reading, said={**reading.said, **said})
        if not len(images):
            raise SourceError(
                f"{found.path} has too few pictures ({len(found.images)}) for a {split!r} split; "
                "add pictures or make the folders train and test yourself"
            )
    return (f"folder {folder}", images, labels, class_names), notes, reading


def _notes_of(reading: Reading) -> list[str]:
    noted = ("resized", "left out", "counted once")
    return [f"{k.capitalize()}: {text}." for k, text in reading.facts.items() if k in noted]


def _tiny_imagenet(text: str, split: Split, size: int, skip_corrupt: bool) -> Loaded:
    chosen = PicturePath.parse(text)
    entries, class_names = tiny_imagenet_files(chosen.path, split)
    files = [file for file, _label in entries]
    found = read_picture_files(
        files, size, below=chosen.path, skip_corrupt=skip_corrupt, how=chosen.decoding
    )
    labels = np.array([entries[place][1] for place in found.places], np.int64)
    notes = _notes_of(found.reading)
    if split == "heldout":
        notes.insert(0, "Tiny ImageNet's validation images are held out.")
    return ("Tiny ImageNet", found.images, labels, class_names), notes, found.reading


def _official(
    pictures: Callable[[Path, str], Pictures],
    text: str,
    split: Split,
    size: int,
    _skip_corrupt: bool,
) -> Loaded:
    name, images, labels, class_names = pictures(Path(text).expanduser(), split)
    notes = [f"{name}'s test images are held out."] if split == "heldout" else []
    if pictures is digits_pictures:
        which = f"first {len(labels):,}" if split == "train" else f"last {len(labels):,}"
        notes = [f"{DIGITS_NOTE}: the {which} of its test set."]
    n, side = len(images), images.shape[-1]
    reading = Reading(sizes=Counter({(side, side): n}))
    if side != size:
        reading.size = (size, size)
        notes += _notes_of(reading)
        resized = np.empty((n, 3, size, size), np.uint8)
        for row, image in enumerate(images):
            resized[row] = central(image.transpose(1, 2, 0), size, size).transpose(2, 0, 1)
        images = resized
    return (name, images, labels, class_names), notes, reading


_LOADERS: dict[str, Callable[[str, Split, int, bool], Loaded]] = {
    "photos": lambda _text, split, size, _skip_corrupt: (
        photograph_tiles(split, size),
        list(PHOTOGRAPHS_NOTES),
        None,
    ),
    "digits": partial(_official, digits_pictures),
    "folder": _folder,
    "cifar10": partial(_official, cifar10_pictures),
    "cifar100": partial(_official, cifar100_pictures),
    "mnist": partial(_official, mnist_pictures),
    "fashion-mnist": partial(_official, partial(mnist_pictures, kind="fashion-mnist")),
    "svhn": partial(_official, svhn_pictures),
    "tiny-imagenet": _tiny_imagenet,
}
