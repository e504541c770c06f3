"""Many picture files as one array, and what was read: said before work starts, and in reports."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.errors import SourceError, listed, shown
from storage.sources.pictures import (
    AS_IMAGE_FOLDER,
    CorruptPictureError,
    Decoding,
    Found,
    central,
    check_pixels,
    decoded,
)

COLOUR = "RGB"
GREY = "L"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Record of what was read, and what was done to it; names are printable
    (`storage.errors.shown`).

    `sizes` and `modes` count pictures by width x height and by what their files hold
    (`Found.mode`), the most frequent first. `size` is (width, height) of what they were made into,
    None if they stay as they are; cropped are those of another shape. `left_out`: file and reason.
    `n_ignored` and `n_turned` are those that EXIF asks to be turned, `n_first` those of several
    frames, `n_repeated` those that were left out as others have the same pixels. `said`: facts of
    the folders that they are in.
    """

    sizes: tuple[tuple[str, int], ...]
    modes: tuple[tuple[str, int], ...] = ()
    size: tuple[int, int] | None = None
    n_cropped: int = 0
    n_resized: int = 0
    left_out: tuple[tuple[str, str], ...] = ()
    n_ignored: int = 0
    n_turned: int = 0
    n_first: int = 0
    n_repeated: int = 0
    on_black: bool = False
    said: Mapping[str, str] = field(default_factory=dict)

    @property
    def n_read(self) -> int:
        return sum(n for _size, n in self.sizes)

    @property
    def facts(self) -> dict[str, str]:
        """In words for people; nothing is said of what was not done."""
        facts = {"sizes": _counts(self.sizes)}
        if self.size is not None and self.n_resized:
            width, height = self.size
            shape = "square" if width == height else "shape"
            cropped = f", {self.n_cropped:,} of them cropped to the central {shape} first"
            facts["resized"] = (
                f"{self.n_resized:,} to {width} x {height}{cropped if self.n_cropped else ''}"
            )
        converted = [
            f"{n:,} {_mode_text(mode, on_black=self.on_black)}"
            for mode, n in self.modes
            if mode != COLOUR
        ]
        if converted:
            facts["converted to colour"] = listed(converted, 8)
        turned = []
        if self.n_ignored:
            turned.append(
                f"{self.n_ignored:,} that EXIF asks to be turned, read as stored, as ImageFolder "
                "does (?orientation=exif turns them)"
            )
        if self.n_turned:
            turned.append(f"{self.n_turned:,} turned as EXIF asks")
        if turned:
            facts["orientation"] = ", ".join(turned)
        if self.n_first:
            facts["frames"] = f"the first of {self.n_first:,} that have several"
        if self.n_repeated:
            facts["counted once"] = f"{self.n_repeated:,} left out, with the pixels of others"
        if self.left_out:
            facts["left out"] = self.left_out_text
        return dict(self.said) | facts

    @property
    def left_out_text(self) -> str:
        """`2 that cannot be read: a.png (not a known picture format), b.png (...)`."""
        named = listed([f"{name} ({why})" for name, why in self.left_out])
        return f"{len(self.left_out):,} that cannot be read: {named}"

    @property
    def record(self) -> dict[str, Any]:
        return {
            "n_read": self.n_read,
            "sizes": dict(self.sizes),
            "modes": dict(self.modes),
            "resized_to": None if self.size is None else list(self.size),
            "n_cropped": self.n_cropped,
            "n_resized": self.n_resized,
            "left_out": [{"file": name, "why": why} for name, why in self.left_out],
            "n_orientation_ignored": self.n_ignored,
            "n_turned": self.n_turned,
            "n_first_of_several_frames": self.n_first,
            "n_repeated": self.n_repeated,
            "said": dict(self.said),
        }


_MODES = {
    **{"L": "grey", "1": "black and white", "P": "palette", "CMYK": "CMYK", "F": "floating point"},
    **{"RGBA": "with transparency", "LA": "grey with transparency", "RGB": "colours"},
    **{"I;16": "16-bit grey", "I;16B": "16-bit grey", "I": "16-bit grey"},
}


def _mode_text(mode: str, *, on_black: bool) -> str:
    """`palette with transparency, now black` of `P+alpha`."""
    name, alpha, _nothing = mode.partition("+alpha")
    name, deep, _nothing = (name, "", "") if name in _MODES else name.partition(";16")
    text = ("16-bit " if deep else "") + _MODES.get(name, name)
    if alpha:
        text += " with transparency"
    return f"{text}, {'now black' if on_black else 'dropped'}" if "transparency" in text else text


@dataclass
class Tally:
    size: tuple[int, int] | None = None
    how: Decoding = AS_IMAGE_FOLDER
    said: Mapping[str, str] = field(default_factory=dict)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    orientations: Counter[str] = field(default_factory=Counter)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    n_first: int = 0
    n_repeated: int = 0

    def count(self, found: Found) -> None:
        self.sizes[found.width, found.height] += 1
        self.modes[found.mode] += 1
        self.orientations[found.orientation] += 1
        self.n_first += found.n_frames > 1

    def leave_out(self, file: str, why: str) -> None:
        self.left_out.append((shown(file), why))

    def reading(self) -> Reading:
        width, height = self.size or (0, 0)
        others = {size: n for size, n in self.sizes.items() if self.size and size != self.size}
        return Reading(
            sizes=tuple((f"{w} x {h}", n) for (w, h), n in self.sizes.most_common()),
            modes=tuple(self.modes.most_common()),
            size=self.size,
            n_cropped=sum(n for (w, h), n in others.items() if w * height != h * width),
            n_resized=sum(others.values()),
            left_out=tuple(self.left_out),
            n_ignored=self.orientations["ignored"],
            n_turned=self.orientations["turned"],
            n_first=self.n_first,
            n_repeated=self.n_repeated,
            on_black=self.how.transparency == "black",
            said=self.said,
        )


@dataclass(frozen=True, eq=False)
class PictureArray:
    """Pictures uint8 (n, 3, size, size), and the places in the files that they are from. `repeats`:
    a place that was left out, and the row that has its pixels."""

    images: npt.NDArray[np.uint8]
    places: list[int]
    repeats: list[tuple[int, int]]
    reading: Reading


def read_picture_files(
    files: Sequence[Path],
    size: int | tuple[int, int],
    *,
    below: Path,
    skip_corrupt: bool,
    how: Decoding = AS_IMAGE_FOLDER,
    once: bool = False,
    said: Mapping[str, str] | None = None,
) -> PictureArray:
    """Every picture, or with `once` the first of each that have the same pixels, when they are of
    that size: a side, or height and width. Files are called by their path below `below`. Raises
    SourceError if a file cannot be read, or, with `skip_corrupt`, none can; ValueError if `size` is
    more than a picture may have."""
    height, width = (size, size) if isinstance(size, int) else size
    check_pixels(height, width)
    images = np.empty((len(files), 3, height, width), np.uint8)
    places: list[int] = []
    repeats: list[tuple[int, int]] = []
    first: dict[bytes, int] = {}
    tally = Tally((width, height), how, said or {})
    for place, path in enumerate(files):
        try:
            picture = decoded(path, how)
        except CorruptPictureError as error:
            if not skip_corrupt:
                raise unreadable(path, error) from error
            tally.leave_out(path.relative_to(below).as_posix(), str(error))
            continue
        tally.count(picture.found)
        row = len(places)
        images[row] = central(picture.pixels, height, width).transpose(2, 0, 1)
        if once:
            row = first.setdefault(hashlib.sha256(images[row]).digest(), row)
        if row < len(places):
            repeats.append((place, row))
        else:
            places.append(place)
    tally.n_repeated = len(repeats)
    if not places:
        raise SourceError(f"none of the {len(files)} files could be read; use other pictures")
    return PictureArray(images[: len(places)], places, repeats, tally.reading())


def unreadable(path: Path, error: CorruptPictureError) -> SourceError:
    return SourceError(
        f"{path} cannot be read as a picture ({error}); remove it, or leave such files out with "
        "--skip-corrupt"
    )


def facts_of(n: int, class_names: Sequence[str], reading: Reading | None) -> dict[str, str]:
    n_read = n if reading is None else reading.n_read
    facts = {"pictures": f"{n:,}" + (f" of {n_read:,} that were read" if n_read != n else "")}
    if class_names:
        facts["classes"] = f"{len(class_names)}: {listed(class_names, 10)}"
    return facts | ({} if reading is None else reading.facts)


def _counts(counts: Sequence[tuple[str, int]]) -> str:
    if len(counts) == 1:
        return f"all {counts[0][0]}" if counts[0][1] > 1 else counts[0][0]
    return listed([f"{n:,} of {name}" for name, n in counts])
