"""Many picture files as one array, and what was read: said before work starts, and in reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.errors import SourceError, listed, shown
from storage.sources.pictures import CorruptPictureError, Decoded, check_pixels, decoded, square

COLOUR = "RGB"
GREY = "L"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Record of what was read, and what was done to it; names are printable
    (`storage.errors.shown`).

    `sizes` and `modes` count pictures by width x height and by what their files hold (Pillow's
    modes), the most frequent first. `size` is (width, height) of what they were made into, None if
    they stay as they are; cropped are those of another shape. `left_out`: file and reason.
    """

    sizes: tuple[tuple[str, int], ...]
    modes: tuple[tuple[str, int], ...] = ()
    size: tuple[int, int] | None = None
    n_cropped: int = 0
    n_resized: int = 0
    left_out: tuple[tuple[str, str], ...] = ()

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
        converted = [f"{n:,} {_MODES.get(mode, mode)}" for mode, n in self.modes if mode != COLOUR]
        if converted:
            facts["converted to colour"] = listed(converted)
        if self.left_out:
            facts["left out"] = self.left_out_text
        return facts

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
        }


_MODES = {
    **{"L": "grey", "1": "black and white", "P": "palette", "CMYK": "CMYK"},
    **{"RGBA": "with transparency, now black", "LA": "grey with transparency, now black"},
    **{"I;16": "16-bit grey", "I;16B": "16-bit grey", "I": "16-bit grey"},
}


@dataclass
class Tally:
    size: tuple[int, int] | None = None
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def count(self, picture: Decoded) -> None:
        height, width = picture.pixels.shape[:2]
        self.count_one(width, height, picture.mode)

    def count_one(self, width: int, height: int, mode: str) -> None:
        self.sizes[width, height] += 1
        self.modes[mode] += 1

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
        )


def read_picture_files(
    files: Sequence[Path], size: int, *, below: Path, skip_corrupt: bool
) -> tuple[npt.NDArray[np.uint8], list[int], Reading]:
    """Pictures uint8 (n, 3, size, size), the places in `files` that they are from, and the reading.
    Files are called by their path below `below`. Raises SourceError if a file cannot be read, or,
    with `skip_corrupt`, none can; ValueError if `size` is more than a picture may have."""
    check_pixels(size, size)
    images = np.empty((len(files), 3, size, size), np.uint8)
    kept: list[int] = []
    tally = Tally((size, size))
    for place, path in enumerate(files):
        try:
            picture = decoded(path)
        except CorruptPictureError as error:
            if not skip_corrupt:
                raise unreadable(path, error) from error
            tally.leave_out(path.relative_to(below).as_posix(), str(error))
            continue
        tally.count(picture)
        images[len(kept)] = square(picture.pixels, size).transpose(2, 0, 1)
        kept.append(place)
    if not kept:
        raise SourceError(f"none of the {len(files)} files could be read; use other pictures")
    return images[: len(kept)], kept, tally.reading()


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
