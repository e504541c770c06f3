"""One picture file as a square RGB array, whatever its size, mode or orientation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}


class CorruptPictureError(Exception):
    """The file has a picture's name but no readable picture in it; says why in a few words."""


def is_picture(path: Path, *, below: Path) -> bool:
    """Whether `path` is named like a picture, not hidden (nor in a hidden folder of `below`).

    A link counts by its own name, so that a dangling one is reported and not passed over.
    """
    if path.suffix.lower() not in SUFFIXES or path.is_dir():
        return False
    return not any(part.startswith(".") for part in path.relative_to(below).parts)


def read_picture(path: Path, size: int) -> tuple[npt.NDArray[np.uint8], bool]:
    """The picture as uint8 (size, size, 3), and whether it had another size.

    Transparent parts become black, 16-bit greys are scaled, EXIF orientation is applied, only the
    first frame of an animation is read.

    Raises:
        CorruptPictureError: truncated, not a picture, or unreadable.
    """
    pixels = read_picture_as_it_is(path)
    return square(pixels, size), pixels.shape[:2] != (size, size)


def read_picture_as_it_is(path: Path) -> npt.NDArray[np.uint8]:
    """The picture as uint8 (h, w, 3); otherwise as `read_picture`."""
    try:
        with Image.open(path) as image:
            image.load()
            upright = ImageOps.exif_transpose(image) if image.getexif() else image
            pixels = rgb_pixels(upright)
    except UnidentifiedImageError as error:
        raise CorruptPictureError("not a known picture format") from error
    except FileNotFoundError as error:
        raise CorruptPictureError("a link to a file that does not exist") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise CorruptPictureError(str(error).splitlines()[0]) from error
    return pixels


def square(pixels: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.uint8]:
    """The central square of (h, w, 3), resized to (size, size, 3).

    Shrinking averages over areas; enlarging is bicubic.
    """
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
