"""Inputs of restoring: a folder of pictures, what an attack on one file left, or the confident
reconstructions of a store of pairs, of each candidate the last saved iteration, scaled as far as
they stay in [0, 1] around the mean image of their run. All give 8-bit pictures with a name each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
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
    Found,
    Reading,
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


@dataclass(frozen=True, eq=False)
class Inputs:
    """Pictures that can be gone through more than once, always in the same order.

    `location` is where they are, `description` their identity wherever they are, but for their
    pixels. `at` gives those of some places, counted from 0 and ascending; `new_reading`
    has the facts that are known before any is counted: the size they are made into, what is left
    out.
    """

    location: str
    description: dict[str, Any]
    n: int
    at: Callable[[Sequence[int]], Iterator[InputPicture]]
    new_reading: Callable[[], Reading] = Reading

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[InputPicture]:
        return self.at(range(self.n))


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
    folder, of_store = Path(source), is_store(source)
    if of_store or (folder / RECONSTRUCTIONS).is_file():
        if sides is not None:
            raise ValueError(
                f"--size {size_text(*sides)} is for folders of pictures; those of the "
                f"{'store' if of_store else 'attack in'} {source} are restored at the size that "
                "they were attacked at"
            )
        return _of_store(Dataset(source), limit) if of_store else _of_attack(folder, limit)
    chosen = PicturePath.parse(str(source))
    if not chosen.path.is_dir():
        raise SourceError(
            f"--input {source} is neither a folder of pictures nor a store of pairs; give one"
        )
    if chosen.tree != "auto":
        raise SourceError(f"--input {source}: a folder is restored whole; leave out tree=")
    return _of_folder(chosen, limit, sides, skip_corrupt=skip_corrupt)


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


def _of_folder(
    source: PicturePath, limit: int | None, size: tuple[int, int] | None, *, skip_corrupt: bool
) -> Inputs:
    """Picture files, those in folders inside included, in the order of their names. Reading raises
    SourceError naming a file that cannot be read."""
    folder, how = source.path, source.decoding
    walk = pictures_below(folder)
    if not walk.files:
        passed = "".join(f" but {text}" for text in walk.said.values())
        raise SourceError(
            f"{folder} has no picture (.png, .jpg, ...){passed} and is no store of pairs; give a "
            "folder that has some"
        )
    left_out: list[tuple[str, str]] = []

    def readable() -> Iterator[Path]:
        for path in walk.files:
            try:
                decoded(path, how)
            except CorruptPictureError as error:
                left_out.append((shown(path.relative_to(folder).as_posix()), str(error)))
            else:
                yield path

    files = [*itertools.islice(readable() if skip_corrupt else walk.files, limit)]
    if not files:
        raise SourceError(f"none of the {len(walk.files)} files in {folder} could be read")
    names: dict[str, Path] = {}
    for path in files:
        name = path.relative_to(folder).with_suffix("").as_posix()
        if (other := names.setdefault(name, path)) != path:
            raise SourceError(f"{other} and {path} would be restored to the same name; rename one")
    named = list(names.items())

    def at(places: Sequence[int]) -> Iterator[InputPicture]:
        for place in places:
            name, path = named[place]
            try:
                picture = decoded(path, how)
            except CorruptPictureError as error:
                raise unreadable(path, error) from error
            pixels = picture.pixels if size is None else resized(picture.pixels, *size)
            facts = {"file": path.relative_to(folder).as_posix()}
            channels_first = np.ascontiguousarray(pixels.transpose(2, 0, 1))
            yield InputPicture(name, channels_first, facts, picture.found)

    square = size[0] if size and size[0] == size[1] else size
    description = {"kind": "folder", "size": square} | {
        name: value
        for name, value in asdict(how).items()
        if value != getattr(AS_IMAGE_FOLDER, name)
    }
    read_at = size and (size[1], size[0])
    new_reading = partial(Reading, size=read_at, how=how, said=walk.said, left_out=left_out)
    return Inputs(str(folder.absolute()), description, len(files), at, new_reading)


def _of_attack(folder: Path, limit: int | None) -> Inputs:
    """Pictures of an attack on one file, best first, named by their ranks. Raises SourceError for
    a file that is damaged, or holds no picture."""
    path = folder / RECONSTRUCTIONS
    try:
        with safe_open(path, "np") as opened:
            named = "picture" in opened.keys()  # noqa: SIM118 (no mapping)
            pictures = opened.get_tensor("picture") if named else np.zeros((0, 3, 1, 1))
    except (SafetensorError, OSError) as error:
        raise SourceError(f"{path} cannot be read ({error}); attack again") from error
    if pictures.ndim != 4 or pictures.shape[1] not in (1, 3) or len(pictures) == 0:
        raise SourceError(
            f"{path} has no pictures in colour or grey ({pictures.shape}); attack again, or give a "
            "folder of pictures"
        )
    every = np.rint(pictures[:limit].clip(0, 1) * 255).astype(np.uint8)

    def at(places: Sequence[int]) -> Iterator[InputPicture]:
        for rank in (place + 1 for place in places):
            yield _picture(f"rank-{rank:05d}", every[rank - 1], {"rank": rank})

    return Inputs(str(folder.absolute()), {"kind": "attack"}, len(every), at)


def _of_store(dataset: Dataset, limit: int | None) -> Inputs:
    """Rows of a store's pairs, in its order: the last saved one of each confident candidate.
    Reading raises CorruptPartError where the stored bytes are not what was written."""
    rows, parts, first = np.zeros(0, np.int64), np.zeros(0, np.int64), 0
    names = ("confident", "run_row", "candidate", "iteration")
    for receipt in dataset.receipts:
        pairs = dataset.read(receipt.part, [f"pairs/{name}" for name in names])
        confident = np.flatnonzero(pairs["pairs/confident"])
        run, candidate, iteration = (pairs[f"pairs/{name}"][confident] for name in names[1:])
        order = np.lexsort((iteration, candidate, run))
        another = (np.diff(run[order]) != 0) | (np.diff(candidate[order]) != 0)
        last = np.sort(confident[order[np.append(another, True)[: len(order)]]])
        rows = np.append(rows, first + last)
        parts = np.append(parts, np.full(len(last), receipt.part))
        first += receipt.n_pairs
        if limit is not None and len(rows) >= limit:
            break
    if not len(rows):
        raise SourceError(
            f"{dataset.root} has no confident reconstruction ({dataset.n_pairs} pairs); generate "
            "more, or look at its outcomes with: palimpsest dataset info"
        )
    numbers = ("pairs/candidate", "pairs/iteration", "runs/run", "targets/image_id")

    def at(places: Sequence[int]) -> Iterator[InputPicture]:
        for start in range(0, len(places), ROWS_AT_ONCE):
            chosen = np.asarray(places[start : start + ROWS_AT_ONCE], np.int64)
            wanted = ["pairs/reconstruction", "runs/mean_image", *numbers]
            taken = dataset.take(wanted, rows[chosen])
            pictures = rendered(taken["pairs/reconstruction"], taken["runs/mean_image"])
            for k, (part, pixels) in enumerate(zip(parts[chosen], pictures, strict=True)):
                facts = {"part": int(part)}
                facts |= {name.partition("/")[2]: int(taken[name][k]) for name in numbers}
                name = "part-{part:06d}-run-{run:08d}-candidate-{candidate:05d}".format_map(facts)
                yield _picture(name, pixels, facts)

    description = {"kind": "store", "content_hash": dataset.content_hash}
    return Inputs(dataset.root, description, len(rows[:limit]), at)


def _picture(name: str, pixels: npt.NDArray[np.uint8], facts: dict[str, Any]) -> InputPicture:
    """A picture (3, h, w), or a grey one (1, h, w), which is repeated."""
    rgb = pixels.repeat(3 // len(pixels), axis=0)
    found = Found(pixels.shape[1], pixels.shape[2], COLOUR if len(pixels) == 3 else GREY)
    return InputPicture(name, rgb, facts, found)


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
