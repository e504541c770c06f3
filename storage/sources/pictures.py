"""One picture file as a square RGB array, whatever its size, mode or orientation."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from storage.errors import shown
from storage.files import open_regular

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
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


def read_picture(path: Path, size: int) -> tuple[npt.NDArray[np.uint8], bool]:
    """The picture as uint8 (size, size, 3), and whether it had another size.

    Transparent parts become black, 16-bit greys are scaled, EXIF orientation is applied, only the
    first frame of an animation is read. Raises CorruptPictureError if it is truncated, not a
    picture, or unreadable.
    """
    pixels = read_picture_as_it_is(path)
    return square(pixels, size), pixels.shape[:2] != (size, size)


def read_picture_as_it_is(path: Path) -> npt.NDArray[np.uint8]:
    return decoded(path).pixels


@dataclass(frozen=True, eq=False)
class Decoded:
    """A picture in its own size, uint8 (h, w, 3), and the mode that its file has (Pillow's)."""

    pixels: npt.NDArray[np.uint8]
    mode: str


def decoded(path: Path) -> Decoded:
    """The picture in a file, upright and in colour; its size is checked before memory is taken for
    its pixels."""
    try:
        with open_regular(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # refused below
            with Image.open(file, formats=FORMATS) as image:
                check_pixels(*image.size)
                mode = image.mode
                image.load()
                upright = ImageOps.exif_transpose(image) if image.getexif() else image
                return Decoded(rgb_pixels(upright), mode)
    except UnidentifiedImageError as error:
        raise CorruptPictureError("not a known picture format") from error
    except FileNotFoundError as error:
        raise CorruptPictureError("a link to a file that does not exist") from error
    except OSError as error:
        raise CorruptPictureError(_said(error.strerror or str(error))) from error
    except (ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise CorruptPictureError(_said(str(error))) from error


def check_pixels(width: int, height: int) -> None:
    """Raises ValueError if a picture would have more than `MAX_PIXELS`."""
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width} x {height} is more than {MAX_PIXELS:,} pixels; make it smaller")


def _said(text: str) -> str:
    return shown(text.splitlines()[0]) if text else "no reason given"


def square(pixels: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.uint8]:
    """The central square of (h, w, 3), resized to (size, size, 3): averaged over areas, or
    bicubic."""
    height, width = pixels.shape[:2]
    if (height, width) == (size, size):
        return pixels
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    resample = Image.Resampling.BOX if side >= size else Image.Resampling.BICUBIC
    box = (left, top, left + side, top + side)
    return np.asarray(Image.fromarray(pixels).resize((size, size), resample, box=box))


def rgb_pixels(image: Image.Image) -> npt.NDArray[np.uint8]:
    """(h, w, 3) of a picture of any mode: grey is repeated, 16 bits are cut to 8, and transparency
    is laid on black."""
    if image.mode == "RGB":
        return np.asarray(image)
    if image.mode.startswith("I;16") or image.mode == "I":
        grey = (np.clip(np.asarray(image, np.int64), 0, 65535) // 257).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=2)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        black = Image.new("RGBA", image.size, (0, 0, 0, 255))
        image = Image.alpha_composite(black, image)
    return np.asarray(image.convert("RGB"))
