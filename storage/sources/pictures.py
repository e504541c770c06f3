"""One picture file as an RGB array, with the values that torchvision's ImageFolder gives."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from storage.errors import shown
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


def is_picture(path: Path, *, below: Path) -> bool:
    """True if `path` is named like a picture, not hidden (nor in a hidden folder of `below`); a
    dangling link counts by its own name."""
    if path.suffix.lower() not in SUFFIXES or path.is_dir():
        return False
    return not any(part.startswith(".") for part in path.relative_to(below).parts)


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


@dataclass(frozen=True, eq=False)
class Decoded:
    """A picture in its own size, uint8 (h, w, 3), and what its file holds."""

    pixels: npt.NDArray[np.uint8]
    found: Found


def read_picture(path: Path, size: int) -> tuple[npt.NDArray[np.uint8], bool]:
    """The picture as uint8 (size, size, 3), and whether it had another size.

    Raises CorruptPictureError if it is truncated, not a picture, or unreadable.
    """
    pixels = decoded(path).pixels
    return square(pixels, size), pixels.shape[:2] != (size, size)


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
    except OSError as error:
        raise CorruptPictureError(_said(error.strerror or str(error))) from error
    except MemoryError:
        raise
    except Exception as error:  # a damaged file may fail in any way
        raise CorruptPictureError(_said(str(error))) from error


def check_pixels(width: int, height: int) -> None:
    """Raises ValueError if a picture would have more than `MAX_PIXELS`."""
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width} x {height} is more than {MAX_PIXELS:,} pixels; make it smaller")


def _said(text: str) -> str:
    return shown(text.splitlines()[0]) if text else "no reason given"


def square(pixels: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.uint8]:
    """The central square of (h, w, 3), resized to (size, size, 3)."""
    return central(pixels, size, size)


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
    now = _orientation(image)  # Pillow turns a TIFF itself
    ignored = now != 1 and how.orientation == "stored"
    upright = image if now == 1 or ignored else image.transpose(_TURNS[now])
    pixels = _rgb_pixels(upright, image.format, how)
    if deep_colours:
        _check_depth(256 * int(pixels.max()) + 255)
    orientation: Literal["upright", "ignored", "turned"] = "upright"
    if turned_by != 1:
        orientation = "ignored" if ignored else "turned"
    height, width = pixels.shape[:2]
    return Decoded(pixels, Found(height, width, mode, _n_frames(image), orientation))


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By EXIF's orientation, the turn that makes a picture upright."""


def _orientation(image: Image.Image) -> int:
    """EXIF's 2 to 8; 1 for upright, and where there is none or it cannot be read."""
    try:
        found = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # noqa: BLE001 (damage beside the pixels, which may fail in any way)
        return 1
    return found if found in _TURNS else 1


def _n_frames(image: Image.Image) -> int:
    """Counted after the first one is read, so that damage behind it does no harm; at least 1."""
    try:
        return max(1, int(getattr(image, "n_frames", 1)))
    except Exception:  # noqa: BLE001 (damage behind the first frame)
        return 2 if getattr(image, "is_animated", False) else 1


def _rgb_pixels(
    image: Image.Image, file_format: str | None, how: Decoding
) -> npt.NDArray[np.uint8]:
    """(h, w, 3) of a picture of any mode. Raises ValueError for values whose white is not known."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return np.asarray(image)
    if image.mode == "F":
        return _grey(255 * _unit_floats(np.asarray(image)))
    if image.mode.startswith("I"):
        return _grey(_depth_16(np.asarray(image, np.int64), image.mode, file_format) / 257)
    has_alpha = image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
    if has_alpha and how.transparency == "black":
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image)
    return np.asarray(image.convert("RGB"))


def _grey(values: npt.NDArray[np.floating]) -> npt.NDArray[np.uint8]:
    return np.repeat(np.rint(values).astype(np.uint8)[..., None], 3, axis=2)


def _unit_floats(values: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    low, high = float(values.min()) + 0.0, float(values.max()) + 0.0  # no -0
    if not 0 <= low <= high <= 1:
        raise ValueError(
            f"floating point from {low:.4g} to {high:.4g}: white is 1 here, so divide, or save 8 "
            "bits"
        )
    return values


def _depth_16(
    values: npt.NDArray[np.int64], mode: str, file_format: str | None
) -> npt.NDArray[np.int64]:
    if mode == "I" and file_format not in ("PPM", "PNG"):  # whose white Pillow makes 65,535
        raise ValueError(
            f"integers from {values.min()} to {values.max()}: which of them is white is not known, "
            "so save 8 or 16 bits"
        )
    if values.any():
        _check_depth(int(values.max()))
    return values


def _check_depth(largest: int) -> None:
    """ValueError where a picture of 16 bits would come out black: its values have fewer bits."""
    if largest < 4096:
        raise ValueError(
            f"16 bits of which no value is above {largest:,} of 65,535, as of fewer bits: save 8 "
            "bits, or scale them"
        )
