"""Picture files as RGB arrays, with the values that torchvision's ImageFolder gives, and what was
read: reported before work starts, and in reports."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError

from storage.errors import SourceError, listed, shown
from storage.files import open_regular

_ENDINGS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png", ".apng"),
    "WEBP": (".webp",),
    "BMP": (".bmp", ".dib"),
    "DIB": (),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm", ".pfm"),
    "JPEG2000": (".jp2", ".j2k", ".jpc", ".jpf", ".jpx", ".j2c"),
    "AVIF": (".avif", ".avifs"),
}
SUFFIXES = {ending for endings in _ENDINGS.values() for ending in endings}
IMAGE_FOLDER = {".webp", ".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff"}
"""Endings that torchvision's ImageFolder reads."""
FORMATS = tuple(_ENDINGS)
"""What is looked for in a file, whatever its name: Pillow would give PostScript to a program."""
Pictures = tuple[str, npt.NDArray[np.uint8], npt.NDArray[np.int64], tuple[str, ...]]
"""Name of a data set, images (n, 3, side, side), labels (n,) and class names."""
MAX_PIXELS = 89_478_485
"""Largest width times height: Pillow's limit, a quarter of a gigabyte in colour, where it warns."""


class CorruptPictureError(Exception):
    """The file has a picture's name but no readable picture in it; says why in a few words."""


@dataclass(frozen=True)
class Decoding:
    """Choices that picture files leave open; the defaults are those of torchvision's ImageFolder.

    `orientation`: "stored" reads the pixels as they lie in the file, "exif" turns them as EXIF
    says. `transparency`: "dropped" reads the colours under it, "black" lays them on black.
    """

    orientation: Literal["stored", "exif"] = "stored"
    transparency: Literal["dropped", "black"] = "dropped"


AS_IMAGE_FOLDER = Decoding()
ON_BLACK = Decoding(transparency="black")


@dataclass(frozen=True)
class Found:
    """What a picture file holds: its size when read, its mode (Pillow's, with `;16` for colours of
    16 bits, and `+alpha` for transparency beside it), its number of frames, and what became of an
    EXIF orientation other than upright."""

    height: int
    width: int
    mode: str = "RGB"
    n_frames: int = 1
    orientation: Literal["upright", "ignored", "turned"] = "upright"


class Decoded(NamedTuple):
    """A picture in its own size, uint8 (h, w, 3), and what its file holds."""

    pixels: npt.NDArray[np.uint8]
    found: Found


def read_picture(path: Path, size: int) -> tuple[npt.NDArray[np.uint8], bool]:
    """The picture as uint8 (size, size, 3), and whether it had another size. Raises
    CorruptPictureError if it is truncated, not a picture, or unreadable."""
    pixels = decoded(path).pixels
    return central(pixels, size, size), pixels.shape[:2] != (size, size)


def decoded(path: Path, how: Decoding = AS_IMAGE_FOLDER) -> Decoded:
    """The picture in a file, in colour, of several frames the first. Its size is checked before
    memory is taken for its pixels."""
    try:
        with open_regular(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of too many pixels, which are refused below
            with Image.open(file, formats=FORMATS) as image:
                check_pixels(*image.size)
                return _decoded(image, how)
    except UnidentifiedImageError as error:
        raise CorruptPictureError("not a known picture format") from error
    except FileNotFoundError as error:
        raise CorruptPictureError("a link to a file that does not exist") from error
    except MemoryError:
        raise
    except Exception as error:  # a damaged file may fail in any way
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        first = reason.splitlines()[0] if reason else "no reason given"
        raise CorruptPictureError(shown(first)) from error


def check_pixels(width: int, height: int) -> None:
    """Raises ValueError if a picture would have more than `MAX_PIXELS`."""
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width} x {height} is more than {MAX_PIXELS:,} pixels; make it smaller")


def central(pixels: npt.NDArray[np.uint8], height: int, width: int) -> npt.NDArray[np.uint8]:
    """The largest central part of (h, w, 3) in the shape of (height, width, 3), resized to it:
    averaged over areas, or bicubic."""
    h, w = pixels.shape[:2]
    if (h, w) == (height, width):
        return pixels
    scale = min(h / height, w / width)
    high, wide = round(height * scale), round(width * scale)
    top, left = (h - high) // 2, (w - wide) // 2
    resample = Image.Resampling.BOX if scale >= 1 else Image.Resampling.BICUBIC
    box = (left, top, left + wide, top + high)
    return np.asarray(Image.fromarray(pixels).resize((width, height), resample, box=box))


def _decoded(image: ImageFile.ImageFile, how: Decoding) -> Decoded:
    turned_by = _orientation(image)
    alpha = "transparency" in image.info and not image.mode.endswith("A")
    deep = any(";16" in str(tile.args) for tile in image.tile)
    deep_colours = deep and not image.mode.startswith("I")  # of which Pillow keeps the upper byte
    mode = image.mode + (";16" if deep_colours else "") + ("+alpha" if alpha else "")
    image.load()
    image.info.pop("exif", None)  # was read, and turning would write it anew, damage and all
    now = _orientation(image)  # Pillow turns a TIFF itself
    ignored = now != 1 and how.orientation == "stored"
    upright = image if now == 1 or ignored else ImageOps.exif_transpose(image)
    pixels = _rgb_pixels(upright, image.format, how)
    if deep_colours:
        _check_depth(256 * int(pixels.max()) + 255)
    orientation: Literal["upright", "ignored", "turned"] = "upright"
    if turned_by != 1:
        orientation = "ignored" if ignored else "turned"
    height, width = pixels.shape[:2]
    try:  # after the first frame, so that damage behind it does no harm
        n_frames = max(1, int(getattr(image, "n_frames", 1)))
    except Exception:  # noqa: BLE001 (damage behind the first frame)
        n_frames = 2 if getattr(image, "is_animated", False) else 1
    return Decoded(pixels, Found(height, width, mode, n_frames, orientation))


def _orientation(image: Image.Image) -> int:
    """EXIF's 2 to 8; 1 for upright, and where there is none or it cannot be read."""
    try:
        found = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # noqa: BLE001 (damage beside the pixels, which may fail in any way)
        return 1
    return found if found in range(2, 9) else 1


def _rgb_pixels(
    image: Image.Image, file_format: str | None, how: Decoding
) -> npt.NDArray[np.uint8]:
    """(h, w, 3) of a picture of any mode. Raises ValueError for values whose white is not known."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return np.asarray(image)
    if image.mode == "F":
        floats = np.asarray(image)
        low, high = float(floats.min()) + 0.0, float(floats.max()) + 0.0  # no -0
        if not 0 <= low <= high <= 1:
            raise ValueError(
                f"floating point from {low:.4g} to {high:.4g}: white is 1 here, so divide, or save "
                "8 bits"
            )
        return _grey(255 * floats)
    if image.mode.startswith("I"):
        values = np.asarray(image, np.int64)
        if image.mode == "I" and file_format not in ("PPM", "PNG"):  # Pillow's white is 65,535
            raise ValueError(
                f"integers from {values.min()} to {values.max()}: which of them is white is not "
                "known, so save 8 or 16 bits"
            )
        if values.any():
            _check_depth(int(values.max()))
        return _grey(values / 257)
    has_alpha = image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
    if has_alpha and how.transparency == "black":
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image)
    return np.asarray(image.convert("RGB"))


def _grey(values: npt.NDArray[np.floating]) -> npt.NDArray[np.uint8]:
    return np.repeat(np.rint(values).astype(np.uint8)[..., None], 3, axis=2)


def _check_depth(largest: int) -> None:
    """ValueError where a picture of 16 bits would come out black: its values have fewer bits."""
    if largest < 4096:
        raise ValueError(
            f"16 bits of which no value is above {largest:,} of 65,535, as of fewer bits: save 8 "
            "bits, or scale them"
        )


COLOUR = "RGB"
GREY = "L"


@dataclass(kw_only=True)
class Reading:
    """Record of what was read, counted on reading, and what was done to it; names are printable
    (`storage.errors.shown`).

    `size` is (width, height) of what the pictures are made into, None if they stay as they are.
    `said`: facts of the folders that they are in. `sizes` counts pictures by width and height,
    `modes` by what their files hold (`Found.mode`), `orientations` by what became of EXIF's.
    `left_out`: file and reason. `n_first` are those of several frames, `n_repeated` those that
    were left out as others have the same pixels.
    """

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

    @property
    def n_read(self) -> int:
        return self.sizes.total()

    @property
    def n_resized(self) -> int:
        return self.n_read - self.sizes[self.size] if self.size else 0

    @property
    def n_cropped(self) -> int:
        """Those of them that are of another shape."""
        width, height = self.size or (0, 0)
        return sum(n for (w, h), n in self.sizes.items() if w * height != h * width)

    @property
    def facts(self) -> dict[str, str]:
        """In words for people; nothing is said of what was not done."""
        sizes = self.sizes.most_common()
        facts = {"sizes": listed([f"{n:,} of {w} x {h}" for (w, h), n in sizes])}
        if len(sizes) == 1:
            (((w, h), n),) = sizes
            facts["sizes"] = f"{'all ' if n > 1 else ''}{w} x {h}"
        if self.size is not None and self.n_resized:
            width, height = self.size
            shape = "square" if width == height else "shape"
            cropped = f", {self.n_cropped:,} of them cropped to the central {shape} first"
            facts["resized"] = (
                f"{self.n_resized:,} to {width} x {height}{cropped if self.n_cropped else ''}"
            )
        transparency = "now black" if self.how.transparency == "black" else "dropped"
        converted = []
        for mode, n in self.modes.most_common():  # such as P+alpha
            name, alpha, _nothing = mode.partition("+alpha")
            name, deep, _nothing = (name, "", "") if name in _MODES else name.partition(";16")
            text = f"{n:,} {'16-bit ' if deep else ''}{_MODES.get(name, name)}"
            text += " with transparency" if alpha else ""
            if mode != COLOUR:
                converted.append(f"{text}, {transparency}" if "transparency" in text else text)
        if converted:
            facts["converted to colour"] = listed(converted, 8)
        turned = []
        if n := self.orientations["ignored"]:
            turned.append(
                f"{n:,} that EXIF asks to be turned, read as stored, as ImageFolder does "
                "(?orientation=exif turns them)"
            )
        if n := self.orientations["turned"]:
            turned.append(f"{n:,} turned as EXIF asks")
        if turned:
            facts["orientation"] = ", ".join(turned)
        if self.n_first:
            facts["frames"] = f"the first of {self.n_first:,} that have several"
        if self.n_repeated:
            facts["counted once"] = f"{self.n_repeated:,} left out, with the pixels of others"
        if self.left_out:
            named = listed([f"{name} ({why})" for name, why in self.left_out])
            facts["left out"] = f"{len(self.left_out):,} that cannot be read: {named}"
        return dict(self.said) | facts

    @property
    def record(self) -> dict[str, Any]:
        return {
            "n_read": self.n_read,
            "sizes": {f"{w} x {h}": n for (w, h), n in self.sizes.most_common()},
            "modes": dict(self.modes.most_common()),
            "resized_to": None if self.size is None else list(self.size),
            "n_cropped": self.n_cropped,
            "n_resized": self.n_resized,
            "left_out": [{"file": name, "why": why} for name, why in self.left_out],
            "n_orientation_ignored": self.orientations["ignored"],
            "n_turned": self.orientations["turned"],
            "n_first_of_several_frames": self.n_first,
            "n_repeated": self.n_repeated,
            "said": dict(self.said),
        }


_MODES = {
    **{"L": "grey", "1": "black and white", "P": "palette", "CMYK": "CMYK", "F": "floating point"},
    **{"RGBA": "with transparency", "LA": "grey with transparency", "RGB": "colours"},
    **{"I;16": "16-bit grey", "I;16B": "16-bit grey", "I": "16-bit grey"},
}


class PictureArray(NamedTuple):
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
    reading = Reading(size=(width, height), how=how, said=said or {})
    for place, path in enumerate(files):
        try:
            picture = decoded(path, how)
        except CorruptPictureError as error:
            if not skip_corrupt:
                raise unreadable(path, error) from error
            reading.left_out.append((shown(path.relative_to(below).as_posix()), str(error)))
            continue
        reading.count(picture.found)
        row = len(places)
        images[row] = central(picture.pixels, height, width).transpose(2, 0, 1)
        if once:
            row = first.setdefault(hashlib.sha256(images[row]).digest(), row)
        if row < len(places):
            repeats.append((place, row))
        else:
            places.append(place)
    reading.n_repeated = len(repeats)
    if not places:
        raise SourceError(f"none of the {len(files)} files could be read; use other pictures")
    return PictureArray(images[: len(places)], places, repeats, reading)


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
