"""A file may announce what it likes: it is refused in one line before memory is taken for it."""

from __future__ import annotations

import gzip
import os
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from storage.challenge import read_challenge
from storage.documents import read_array
from storage.errors import SourceError
from storage.sources import cifar, official
from storage.sources.cifar import restricted_load
from storage.sources.load import load_images
from tests.storage.sources.test_official import archive

MEGABYTE = 2**20


@contextmanager
def refused(message: str, *, megabytes: float = 4) -> Iterator[None]:
    """One line that matches `message`, and never more than so much memory."""
    tracemalloc.start()
    try:
        with pytest.raises(SourceError, match=message) as caught:
            yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert peak < megabytes * MEGABYTE


def png(width: int, height: int) -> bytes:
    """The beginning of a black and white picture of any size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels)


@pytest.mark.parametrize(
    "size", [(13_300, 13_300), (1, 170_000_000), (170_000_000, 1), (60_000, 60_000)]
)
def test_pictures_of_too_many_pixels(tmp_path: Path, size: tuple[int, int]):
    (tmp_path / "a.png").write_bytes(png(*size))
    with refused(r"a\.png cannot be read as a picture \(.* (pixels|decompression bomb)"):
        load_images(f"folder:{tmp_path}", split="train")


def test_a_picture_may_have_as_many_pixels_as_a_camera_gives(tmp_path: Path):
    """It is truncated, and that is what is said of it."""
    (tmp_path / "a.png").write_bytes(png(9_000, 9_000))
    with pytest.raises(SourceError, match=r"a\.png cannot be read as a picture \(.*truncated"):
        load_images(f"folder:{tmp_path}", split="train")


def test_only_formats_of_pictures_are_looked_for(tmp_path: Path):
    """Pillow would hand PostScript to a program."""
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    (tmp_path / "a.png").write_bytes(script)
    with pytest.raises(SourceError, match="not a known picture format"):
        load_images(f"folder:{tmp_path}", split="train")


@pytest.mark.parametrize("name", ["a.png", "b.jpg"])
def test_pipes_and_devices_among_pictures(tmp_path: Path, name: str):
    (tmp_path / "0.png").write_bytes(png(8, 8))
    if name == "a.png":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(SourceError, match=rf"{name}.*it is a (pipe|device), not a regular file"):
        load_images(f"folder:{tmp_path}/", split="train")


@pytest.mark.parametrize(
    ("data", "file"),
    [
        ("mnist", "train-images-idx3-ubyte.gz"),
        ("svhn", "train_32x32.mat"),
        ("cifar10", "data_batch_1"),
        ("tiny-imagenet", "wnids.txt"),
    ],
)
def test_pipes_among_the_files_of_a_data_set(tmp_path: Path, data: str, file: str):
    os.mkfifo(tmp_path / file)
    with pytest.raises(SourceError, match=f"has no .*{file.split('.', maxsplit=1)[0]}"):
        load_images(f"{data}:{tmp_path}", split="train")
    for pipe in (tmp_path / file, tmp_path / "encodings.npy"):
        if not pipe.exists():
            os.mkfifo(pipe)
        with pytest.raises(SourceError, match="it is a pipe, not a regular file"):
            read_challenge(pipe)


def test_a_gzipped_idx_file_is_unpacked_only_as_far_as_it_announces(tmp_path: Path):
    content = struct.pack(">4BI", 0, 0, 8, 1, 5) + bytes(64 * MEGABYTE)
    images = struct.pack(">4B3I", 0, 0, 8, 3, 5, 28, 28) + bytes(5 * 28 * 28)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(content, 1))
    with refused("more than 5 bytes of values"):
        load_images(f"mnist:{tmp_path}", split="train")
    images = struct.pack(">4B3I", 0, 0, 8, 3, 10_000_000, 28, 28)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
    with refused(r"shape \(10000000, 28, 28\); expected .* at most 500,000"):
        load_images(f"mnist:{tmp_path}", split="train")


def matlab(folder: Path, *, X: np.ndarray) -> None:
    savemat(folder / "train_32x32.mat", {"X": X, "y": np.ones((1, 1))}, do_compression=True)


def test_a_matlab_file_that_unpacks_to_more_than_svhn_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(official, "MOST_SVHN_BYTES", MEGABYTE)
    matlab(tmp_path, X=np.zeros((32, 32, 3, 20_000), np.uint8))
    with refused("it unpacks to more than 1,048,576 bytes", megabytes=8):
        load_images(f"svhn:{tmp_path}", split="train")


def test_a_matlab_file_whose_variables_are_not_svhns(tmp_path: Path):
    matlab(tmp_path, X=np.zeros((1, 700_000), np.uint8))
    with refused(r"X as uint8 \(1, 700000\); expected .* at most 600,000"):
        load_images(f"svhn:{tmp_path}", split="train")
    content = bytearray((tmp_path / "train_32x32.mat").read_bytes()[:128])
    dims = struct.pack("<6I", 5, 8, 1000, 0, 1, 0)  # announces 1,000 times what follows
    array = struct.pack("<4I", 6, 8, 1, 0) + dims[:8] + struct.pack("<2I", 2**20, 2**20)
    content += struct.pack("<2I", 14, len(array)) + array
    (tmp_path / "train_32x32.mat").write_bytes(content)
    with refused("train_32x32.mat"):
        load_images(f"svhn:{tmp_path}", split="train")


@pytest.mark.parametrize(
    "bomb",
    [
        {"members": {"data_batch_1": bytes(16 * MEGABYTE)}},
        {"members": {"something": bytes(16 * MEGABYTE)}},
        {"members": {"data_batch_1": b""}, "long_name": 16 * MEGABYTE},
    ],
    ids=["a batch", "another member", "a name"],
)
def test_an_archive_that_unpacks_to_more_than_cifar_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bomb: dict[str, dict[str, bytes]]
):
    monkeypatch.setattr(cifar, "MAX_ARCHIVE", 8 * MEGABYTE)
    archive(tmp_path / "cifar.tar.gz", **bomb)  # type: ignore[arg-type]
    with refused(r"cifar\.tar\.gz unpacks to more than 8,388,608 bytes", megabytes=20):
        load_images(f"cifar10:{tmp_path / 'cifar.tar.gz'}", split="train")
    monkeypatch.setattr(cifar, "MAX_FILE", MEGABYTE)
    (tmp_path / "data_batch_1").write_bytes(bytes(2 * MEGABYTE))
    with refused("data_batch_1 cannot be read .* more than 1,048,576"):
        load_images(f"cifar10:{tmp_path}", split="train")


TEXT = b"X" + struct.pack("<I", MEGABYTE) + b"a" * MEGABYTE + b"q\x01"
PICKLES: dict[str, tuple[bytes, str]] = {
    "a memo of two thousand million places": (b"Nr\xff\xff\xff\x7f.", ""),
    "an array by its shape alone": (
        b"cnumpy\nndarray\n(J\xff\xff\xff\x7f\x85U\x01Ot\x85R.",
        "not a readable pickle",
    ),
    "one text many times": (
        b"(" + TEXT + b"c_codecs\nencode\n(h\x01X\x06\x00\x00\x00latin1tR" * 64 + b"t.",
        "more text than is in the file",
    ),
    "many arrays": (
        b"(" + b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR" * 64,
        "more than 8 arrays",
    ),
    "bytes that do not follow": (b"\x8e" + struct.pack("<Q", 2**40) + b".", "not a readable"),
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_that_asks_for_more_than_it_holds(name: str):
    content, message = PICKLES[name]
    tracemalloc.start()
    try:
        if message:
            with pytest.raises(SourceError, match=message):
                restricted_load(content, "batch")
        else:
            assert restricted_load(content, "batch") is None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * MEGABYTE


def test_text_files_of_tiny_imagenet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(official, "MOST_TEXT_BYTES", MEGABYTE)
    (tmp_path / "wnids.txt").write_bytes(bytes(16 * MEGABYTE))
    with refused(r"wnids\.txt cannot be read \(it has 16,777,216 bytes, more than 1,048,576"):
        load_images(f"tiny-imagenet:{tmp_path}", split="train")


def test_an_array_of_more_numbers_than_it_may_have(tmp_path: Path):
    np.save(tmp_path / "mean.npy", np.zeros(8 * MEGABYTE, np.uint8))
    with refused(r"its shape is \(8388608,\), more than 3,072 numbers\); save the mean image"):
        read_array(tmp_path / "mean.npy", "the mean image", at_most=3072)
