"""Inputs of restoring: a folder of pictures, what an attack on one file left, or the confident
reconstructions of a store of pairs, of each candidate the last saved iteration, scaled as far as
they stay in [0, 1] around the mean image of their run. All give 8-bit pictures with a name each."""

from __future__ import annotations

import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from safetensors import SafetensorError, safe_open

from storage.errors import SourceError, shown
from storage.object_store import Location
from storage.pairs.dataset import Dataset, is_store
from storage.sources.pictures import (
    AS_IMAGE_FOLDER,
    COLOUR,
    GREY,
    CorruptPictureError,
    Decoding,
    Found,
    Reading,
    Tally,
    check_pixels,
    decoded,
    unreadable,
)
from storage.sources.trees import PicturePath, pictures_below
from tasks.dataset.export import rendered

Size = int | tuple[int, int]
"""The side of a square, or (height, width)."""

ROWS_AT_ONCE = 256
"""Reconstructions of a store that are read together."""
RECONSTRUCTIONS = "reconstructions.safetensors"
"""File with the pictures of an attack on one file, best first."""


@dataclass(frozen=True)
class InputPicture:
    """A picture to restore: uint8 `pixels` (3, h, w), in `facts` where it is from; `name`, a
    relative path without an ending, is unique. `found`: what its file holds."""

    name: str
    pixels: npt.NDArray[np.uint8]
    facts: dict[str, Any]
    found: Found


class Inputs(ABC):
    """Pictures that can be gone through more than once, always in the same order."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def at(self, places: Sequence[int]) -> Iterator[InputPicture]:
        """Those that iterating gives at `places`, counted from 0 and ascending."""

    @property
    @abstractmethod
    def location(self) -> str:
        """Place of the pictures."""

    @property
    @abstractmethod
    def description(self) -> dict[str, Any]:
        """Identity of the pictures, wherever they are, but for their pixels."""

    def __iter__(self) -> Iterator[InputPicture]:
        return self.at(range(len(self)))

    def tally(self) -> Tally:
        """Facts that are known before any is counted: the size they are made into, what is left
        out."""
        return Tally()


def open_inputs(
    source: Location,
    *,
    limit: int | None = None,
    size: Size | None = None,
    skip_corrupt: bool = False,
) -> Inputs:
    """The pictures in the folder, of the attack, or in the store of pairs, at `source`; the first
    `limit`.

    A folder may end in `?orientation=exif` or the like (`PicturePath`). With `skip_corrupt` files
    of it that cannot be read are left out, which reads them all once more. With `size` every one of
    a folder is cropped to its centre of that shape and resized to that size (`resized`); a store's
    never are.

    Raises ValueError for `limit` or a side of `size` below 1, a `size` beyond what a picture may
    have, or one for a store; SourceError if there is no picture, or two have the same name but for
    the ending; StorageError for a store that cannot be read.
    """
    sides = (size, size) if isinstance(size, int) else size
    if (limit is not None and limit < 1) or (sides is not None and min(sides) < 1):
        raise ValueError(f"limit={limit} and size={size} must be at least 1, or left out")
    if sides is not None:
        check_pixels(*sides)
    if is_store(source):
        if sides is not None:
            raise ValueError(
                f"--size {size_text(*sides)} is for folders of pictures; those of the store "
                f"{source} are restored at the size that they were attacked at"
            )
        return StorePictures.found(Dataset(source), limit)
    folder = Path(source)
    if (folder / RECONSTRUCTIONS).is_file():
        if sides is not None:
            raise ValueError(
                f"--size {size_text(*sides)} is for folders of pictures; those of the attack in "
                f"{source} are restored at the size that they were attacked at"
            )
        return AttackPictures.found(folder, limit)
    chosen = PicturePath.parse(str(source))
    if not chosen.path.is_dir():
        raise SourceError(
            f"--input {source} is neither a folder of pictures nor a store of pairs; give one"
        )
    if chosen.tree != "auto":
        raise SourceError(f"--input {source}: a folder is restored whole; leave out tree=")
    return FolderPictures.found(
        chosen.path, limit, sides, how=chosen.decoding, skip_corrupt=skip_corrupt
    )


def parse_size(text: str) -> tuple[int, int]:
    """(height, width) of "32" or "24x32"; ValueError for anything else."""
    height, x, width = text.lower().partition("x")
    try:
        return int(height), int(width if x else height)
    except ValueError as error:
        raise ValueError(
            f"--size {text!r} is no size; give the side of a square, as in 32, or height x width, "
            "as in 24x32"
        ) from error


def size_text(height: int, width: int) -> str:
    """Text that `parse_size` reads."""
    return str(height) if height == width else f"{height}x{width}"


@dataclass(frozen=True)
class FolderPictures(Inputs):
    """Picture files, those in folders inside included, in the order of their names."""

    folder: Path
    files: tuple[Path, ...]
    size: tuple[int, int] | None = None
    left_out: tuple[tuple[str, str], ...] = ()
    how: Decoding = AS_IMAGE_FOLDER
    said: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def found(
        cls,
        folder: Path,
        limit: int | None,
        size: tuple[int, int] | None,
        *,
        how: Decoding = AS_IMAGE_FOLDER,
        skip_corrupt: bool = False,
    ) -> FolderPictures:
        walk = pictures_below(folder)
        files = walk.files
        if not files:
            passed = "".join(f" but {text}" for text in walk.said.values())
            raise SourceError(
                f"{folder} has no picture (.png, .jpg, ...){passed} and is no store of pairs; give "
                "a folder that has some"
            )
        left_out: list[tuple[str, str]] = []
        if skip_corrupt:
            readable = _readable(files, folder, how, left_out)
            chosen = list(itertools.islice(readable, limit))
            if not chosen:
                raise SourceError(f"none of the {len(files)} files in {folder} could be read")
        else:
            chosen = files[:limit]
        names: dict[str, Path] = {}
        for path in chosen:
            other = names.setdefault(_name(path, folder), path)
            if other != path:
                raise SourceError(
                    f"{other} and {path} would be restored to the same name; rename one"
                )
        return cls(folder, tuple(chosen), size, tuple(left_out), how, walk.said)

    def __len__(self) -> int:
        return len(self.files)

    def at(self, places: Sequence[int]) -> Iterator[InputPicture]:
        """Raises SourceError naming a file that cannot be read."""
        for place in places:
            path = self.files[place]
            try:
                picture = decoded(path, self.how)
            except CorruptPictureError as error:
                raise unreadable(path, error) from error
            pixels = picture.pixels
            if self.size is not None:
                pixels = resized(pixels, *self.size)
            channels_first = np.ascontiguousarray(pixels.transpose(2, 0, 1))
            file = path.relative_to(self.folder).as_posix()
            yield InputPicture(
                _name(path, self.folder), channels_first, {"file": file}, picture.found
            )

    @property
    def description(self) -> dict[str, Any]:
        square = self.size is not None and self.size[0] == self.size[1]
        changed = {
            name: value
            for name, value in asdict(self.how).items()
            if value != getattr(AS_IMAGE_FOLDER, name)
        }
        size = self.size[0] if self.size and square else self.size
        return {"kind": "folder", "size": size} | changed

    @property
    def location(self) -> str:
        return str(self.folder.absolute())

    def tally(self) -> Tally:
        size = None if self.size is None else (self.size[1], self.size[0])
        named = [(shown(file), why) for file, why in self.left_out]
        return Tally(size, self.how, self.said, left_out=named)


@dataclass(frozen=True, eq=False)
class AttackPictures(Inputs):
    """Pictures that an attack on one file left, best first, named by their ranks."""

    folder: Path
    pixels: npt.NDArray[np.uint8]
    mode: str

    @classmethod
    def found(cls, folder: Path, limit: int | None) -> AttackPictures:
        """Raises SourceError for a file that is damaged, or holds no picture."""
        path = folder / RECONSTRUCTIONS
        try:
            with safe_open(path, "np") as opened:
                named = "picture" in opened.keys()  # noqa: SIM118 (no mapping)
                pictures = opened.get_tensor("picture") if named else np.zeros((0, 3, 1, 1))
        except (SafetensorError, OSError) as error:
            raise SourceError(f"{path} cannot be read ({error}); attack again") from error
        if pictures.ndim != 4 or pictures.shape[1] not in (1, 3) or len(pictures) == 0:
            raise SourceError(
                f"{path} has no pictures in colour or grey ({pictures.shape}); attack again, or "
                "give a folder of pictures"
            )
        pixels = np.rint(pictures[:limit].clip(0, 1) * 255).astype(np.uint8)
        mode = COLOUR if pixels.shape[1] == 3 else GREY
        return cls(folder, pixels.repeat(3 // pixels.shape[1], axis=1), mode)

    def __len__(self) -> int:
        return len(self.pixels)

    def at(self, places: Sequence[int]) -> Iterator[InputPicture]:
        for place in places:
            pixels = np.ascontiguousarray(self.pixels[place])
            facts = {"rank": place + 1}
            height, width = pixels.shape[1:]
            found = Found(height, width, self.mode)
            yield InputPicture(f"rank-{place + 1:05d}", pixels, facts, found)

    @property
    def description(self) -> dict[str, Any]:
        return {"kind": "attack"}

    @property
    def location(self) -> str:
        return str(self.folder.absolute())


@dataclass(frozen=True)
class StorePictures(Inputs):
    """Rows of a store's pairs, in its order: the last saved one of each confident candidate."""

    dataset: Dataset
    rows: npt.NDArray[np.int64] = field(repr=False)
    parts: npt.NDArray[np.int64] = field(repr=False)

    @classmethod
    def found(cls, dataset: Dataset, limit: int | None) -> StorePictures:
        rows: list[npt.NDArray[np.int64]] = []
        parts: list[npt.NDArray[np.int64]] = []
        first = n_found = 0
        for receipt in dataset.receipts:
            mine = _last_of_confident(dataset, receipt.part)
            rows.append(first + mine)
            parts.append(np.full(len(mine), receipt.part, np.int64))
            first += receipt.n_pairs
            n_found += len(mine)
            if limit is not None and n_found >= limit:
                break
        if n_found == 0:
            raise SourceError(
                f"{dataset.root} has no confident reconstruction ({dataset.n_pairs} pairs); "
                "generate more, or look at its outcomes with: palimpsest dataset info"
            )
        return cls(dataset, np.concatenate(rows)[:limit], np.concatenate(parts)[:limit])

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, places: Sequence[int]) -> Iterator[InputPicture]:
        """Raises CorruptPartError where the stored bytes are not what was written."""
        numbers = ("pairs/candidate", "pairs/iteration", "runs/run", "targets/image_id")
        for start in range(0, len(places), ROWS_AT_ONCE):
            chosen = np.asarray(places[start : start + ROWS_AT_ONCE], np.int64)
            taken = self.dataset.take(
                ["pairs/reconstruction", "runs/mean_image", *numbers], self.rows[chosen]
            )
            pictures = rendered(taken["pairs/reconstruction"], taken["runs/mean_image"])
            for k, (part, pixels) in enumerate(zip(self.parts[chosen], pictures, strict=True)):
                facts = {"part": int(part)}
                facts |= {name.partition("/")[2]: int(taken[name][k]) for name in numbers}
                name = "part-{part:06d}-run-{run:08d}-candidate-{candidate:05d}".format_map(facts)
                rgb = pixels if len(pixels) == 3 else np.repeat(pixels, 3, axis=0)  # grey
                height, width = rgb.shape[1:]
                found = Found(height, width, COLOUR if len(pixels) == 3 else GREY)
                yield InputPicture(name, rgb, facts, found)

    @property
    def description(self) -> dict[str, Any]:
        return {"kind": "store", "content_hash": self.dataset.content_hash}

    @property
    def location(self) -> str:
        return self.dataset.root


def content_of(inputs: Inputs, check: Callable[[InputPicture], None]) -> tuple[str, Reading]:
    """SHA-256 over the names, facts and pixels of all inputs, each of which is read and checked,
    and what was read. Raises what reading and `check` raise: nothing is begun that cannot be
    finished."""
    digest, tally = hashlib.sha256(), inputs.tally()
    for picture in inputs:
        check(picture)
        head = [picture.name, picture.facts, picture.pixels.shape]
        digest.update(json.dumps(head, sort_keys=True).encode())
        digest.update(picture.pixels.data)
        tally.count(picture.found)
    return digest.hexdigest(), tally.reading()


def _readable(
    files: Sequence[Path], folder: Path, how: Decoding, left_out: list[tuple[str, str]]
) -> Iterator[Path]:
    """Those that can be read; the others, and why, go to `left_out`."""
    for path in files:
        try:
            decoded(path, how)
        except CorruptPictureError as error:
            left_out.append((path.relative_to(folder).as_posix(), str(error)))
        else:
            yield path


def _last_of_confident(dataset: Dataset, part: int) -> npt.NDArray[np.int64]:
    """The row of each confident candidate's last iteration in a part, ascending."""
    names = ("confident", "run_row", "candidate", "iteration")
    pairs = dataset.read(part, [f"pairs/{name}" for name in names])
    confident = np.flatnonzero(pairs["pairs/confident"])
    run = pairs["pairs/run_row"][confident].astype(np.int64)
    candidate = pairs["pairs/candidate"][confident].astype(np.int64)
    order = np.lexsort((pairs["pairs/iteration"][confident], candidate, run))
    another = (np.diff(run[order]) != 0) | (np.diff(candidate[order]) != 0)
    is_last = np.append(another, True)[: len(order)]
    return np.sort(confident[order[is_last]]).astype(np.int64)


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).with_suffix("").as_posix()


def resized(pixels: npt.NDArray[np.uint8], height: int, width: int) -> npt.NDArray[np.uint8]:
    """The largest centre of (h, w, 3) with the shape of height x width, in that size.

    Shrinking averages over areas; enlarging is bicubic.
    """
    if pixels.shape[:2] == (height, width):
        return pixels
    tall, wide = float(pixels.shape[0]), float(pixels.shape[1])
    if tall * width <= wide * height:
        wide = tall * width / height
    else:
        tall = wide * height / width
    top, left = (pixels.shape[0] - tall) // 2, (pixels.shape[1] - wide) // 2
    resample = Image.Resampling.BOX if tall >= height else Image.Resampling.BICUBIC
    box = (left, top, left + wide, top + tall)
    return np.asarray(Image.fromarray(pixels).resize((width, height), resample, box=box))
