"""Pictures as Pillow and torchvision's ImageFolder read them, and what is refused or said."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from storage.errors import SourceError
from storage.sources.load import load_images
from storage.sources.pictures import CorruptPictureError, Decoding, decoded
from storage.sources.trees import read_folder

ENDINGS = {
    **{".jpg": "JPEG", ".jfif": "JPEG", ".JPE": "JPEG", ".png": "PNG", ".tif": "TIFF"},
    **{".webp": "WEBP", ".gif": "GIF", ".bmp": "BMP", ".pnm": "PPM", ".jp2": "JPEG2000"},
}
WITH_EXIF = ("JPEG", "PNG", "TIFF", "WEBP")


def noise(height: int = 9, width: int = 6, *, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def as_image_folder(path: Path) -> np.ndarray:
    """The code of its loader; a path in place of the open file would leave some TIFFs unturned."""
    with warnings.catch_warnings(), path.open("rb") as file:
        warnings.simplefilter("ignore")  # of transparency in a palette
        return np.asarray(Image.open(file).convert("RGB"))


@settings(deadline=None)
@given(
    ending=st.sampled_from(sorted(ENDINGS)),
    mode=st.sampled_from(["1", "L", "P", "RGB", "RGBA", "LA", "CMYK"]),
    orientation=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_pixels_are_those_that_image_folder_trains_on(
    ending: str, mode: str, orientation: int, seed: int
) -> None:
    """Turned only when asked; EXIF's 0 and 9 are no orientations."""
    with tempfile.TemporaryDirectory() as folder:
        path, kind = Path(folder) / f"x{ending}", ENDINGS[ending]
        image = noise(seed=seed).convert(mode)
        if mode in ("RGBA", "LA"):
            image.putalpha(noise(seed=seed + 1).convert("L"))
        exif = Image.Exif()
        exif[0x0112] = orientation
        try:
            image.save(path, kind, **({"exif": exif} if kind in WITH_EXIF else {}))
        except (OSError, ValueError):  # a format without that mode
            return
        found, turned = decoded(path), decoded(path, Decoding(orientation="exif"))
        np.testing.assert_array_equal(found.pixels, as_image_folder(path))
        with path.open("rb") as file, Image.open(file) as image:
            image.load()
            upright = ImageOps.exif_transpose(image)
            upright.info.pop("transparency", None)
            np.testing.assert_array_equal(turned.pixels, np.asarray(upright.convert("RGB")))
        asked = kind in WITH_EXIF and 2 <= orientation <= 8
        assert turned.found.orientation == ("turned" if asked else "upright")
        assert found.found.orientation == (
            "upright" if not asked else "turned" if kind == "TIFF" else "ignored"
        )


def test_transparent_parts_are_black_when_asked(tmp_path: Path) -> None:
    image = noise()
    image.putalpha(Image.new("L", image.size, 0))
    image.save(tmp_path / "x.png")
    assert not decoded(tmp_path / "x.png", Decoding(transparency="black")).pixels.any()
    np.testing.assert_array_equal(decoded(tmp_path / "x.png").pixels, np.asarray(noise()))


grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
DEEP = {
    "float": grey / np.float32(255),
    "16 bits": grey.astype(np.uint16) * 257,
}


@pytest.mark.parametrize("kind", DEEP)
@pytest.mark.parametrize("ending", ["tif", "png", "ppm"])
def test_floats_and_16_bits_have_the_values_of_8_bits(
    tmp_path: Path, kind: str, ending: str
) -> None:
    if (kind, ending) == ("float", "png"):
        return
    path = tmp_path / f"x.{ending}"
    Image.fromarray(DEEP[kind]).save(path)
    np.testing.assert_array_equal(decoded(path).pixels, np.repeat(grey[..., None], 3, 2))


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (grey.astype(np.int32), "integers from 0 to 255: which of them is white"),
        (grey.astype(np.float32), "floating point from 0 to 255: white is 1"),
        (grey / np.float32(-255), "floating point from -1 to 0"),
        (np.full((4, 4), np.nan, np.float32), "floating point from nan"),
        (grey.astype(np.uint16), "16 bits of which no value is above 255"),
        (grey.astype(np.uint16) * 16, "16 bits of which no value is above 4,080"),
    ],
)
def test_values_that_would_come_out_black_or_white_are_refused_by_name(
    tmp_path: Path, values: np.ndarray, why: str
) -> None:
    Image.fromarray(values).save(tmp_path / "x.tif")
    with pytest.raises(CorruptPictureError, match=why):
        decoded(tmp_path / "x.tif")
    with pytest.raises(SourceError, match=rf"x\.tif cannot be read as a picture \({why}"):
        read_folder(str(tmp_path), "all", 4, skip_corrupt=False)


def test_a_damaged_exif_block_spoils_no_pixels(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    noise().save(tmp_path / "x.png", exif=exif)
    whole = (tmp_path / "x.png").read_bytes()
    at = whole.index(b"eXIf")
    for cut in range(4, 12):
        damaged = whole[: at + cut] + b"\xff" + whole[at + cut + 1 :]
        (tmp_path / "x.png").write_bytes(damaged)
        try:
            pixels = decoded(tmp_path / "x.png", Decoding(orientation="exif")).pixels
        except CorruptPictureError:
            continue  # by its checksum
        assert {*pixels.shape[:2]} == {9, 6}


def test_all_that_is_done_to_pictures_is_said_with_its_number(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    more = [noise(8, 8, seed=seed) for seed in (20, 21)]
    for seed, name in enumerate(["turned.jpg", "again.jpg"]):
        noise(8, 8, seed=seed).save(tmp_path / name, exif=exif)
    noise(8, 8, seed=2).save(tmp_path / "frames.gif", save_all=True, append_images=more)
    noise(8, 8, seed=3).save(tmp_path / "stack.tif", save_all=True, append_images=more)
    noise(8, 8, seed=4).convert("RGBA").save(tmp_path / "alpha.png")
    noise(8, 8, seed=5).convert("CMYK").save(tmp_path / "cmyk.jpg")
    noise(8, 8, seed=6).save(tmp_path / "one.png")
    noise(8, 8, seed=6).save(tmp_path / "same.bmp")
    (tmp_path / "phone.heic").touch()
    read = read_folder(str(tmp_path), "all", 8, skip_corrupt=False)
    facts = read.reading.facts
    assert facts["orientation"].startswith("2 that EXIF asks to be turned, read as stored")
    assert facts["frames"] == "the first of 2 that have several"
    assert facts["converted to colour"] == "1 with transparency, dropped, 1 CMYK, 1 palette"
    assert facts["counted once"] == "1 left out, with the pixels of others"
    assert facts["passed over"] == ".heic (1)"
    assert len(read.images) == 7
    assert dict(zip(read.names, read.times, strict=True))["one.png"] == 2
    asked = read_folder(f"{tmp_path}?orientation=exif", "all", 8, skip_corrupt=False)
    assert asked.reading.facts["orientation"] == "2 turned as EXIF asks"
    back = asked.images[asked.names.index("turned.jpg")][:, ::-1, ::-1]
    np.testing.assert_array_equal(back, read.images[read.names.index("turned.jpg")])


def test_a_picture_counts_once_in_every_command_and_two_classes_are_said(tmp_path: Path) -> None:
    for folder in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / folder).mkdir(parents=True)
        for seed in range(3):
            noise(8, 8, seed=hash(folder) % 999 + seed).save(tmp_path / folder / f"{seed}.png")
    noise(8, 8, seed=hash("train/a") % 999).save(tmp_path / "train/b/copy.png")
    images = load_images(f"folder:{tmp_path}", split="train", size=8)
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert images.facts["counted once"].startswith("1 left out")
    assert images.facts["in two classes"] == "1 of these, counted in the first"
    assert len(load_images(f"folder:{tmp_path}", split="heldout", size=8)) == 6
