"""An InstaHide challenge on disk: whole or absent, read without pickle, checked against itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from storage import challenge
from storage.challenge import Challenge, read_challenge, read_images, write_challenge
from storage.errors import SourceError


def small(**changes) -> Challenge:
    rng = np.random.default_rng(0)
    parts = {
        "encodings": rng.standard_normal((5, 3, 4, 4)).astype(np.float32),
        "public": rng.standard_normal((6, 3, 4, 4)).astype(np.float32),
        "labels": np.eye(5, 2, dtype=np.float32),
        "facts": {"scheme": {"kind": "theory", "k_pub": 1}, "n_private": 3},
        "secret": {
            "private": rng.standard_normal((3, 3, 4, 4)).astype(np.float32),
            "edges": np.array([[0, 1], [1, 2], [0, 2], [0, 1], [1, 2]]),
        },
    }
    return Challenge(**(parts | changes))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_challenge(tmp_path / "c", small(), {"seed": 1})
    found, made = read_challenge(tmp_path / "c"), small()
    np.testing.assert_array_equal(found.encodings, made.encodings)
    np.testing.assert_array_equal(found.public, made.public)
    np.testing.assert_array_equal(found.labels, made.labels)
    np.testing.assert_array_equal(found.secret["edges"], made.secret["edges"])
    assert found.facts["n_private"] == 3
    assert found.shape == (3, 4, 4)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_published_folder_without_its_secret_is_enough(tmp_path: Path) -> None:
    write_challenge(tmp_path / "c", small(), {})
    (tmp_path / "c" / "secret").rename(tmp_path / "elsewhere")
    assert read_challenge(tmp_path / "c").secret == {}
    assert "private" in read_challenge(tmp_path / "c", truth=tmp_path / "elsewhere").secret


def test_a_writer_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_path: Path, _value: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(challenge, "write_json", full)
    with pytest.raises(OSError, match="no space"):
        write_challenge(tmp_path / "c", small(), {})
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "mine").touch()
    with pytest.raises(ValueError, match="is not empty"):
        write_challenge(tmp_path / "c", small(), {})
    with pytest.raises(ValueError, match="is a file"):
        write_challenge(tmp_path / "c" / "mine", small(), {})


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((5, 48), np.float32), "expected \\(n, c, h, w\\)"),
        (np.zeros((5, 2, 4, 4), np.float32), "2 channels"),
        (np.zeros((5, 3, 4, 4), np.uint8), "uint8; expected floating"),
        (np.zeros((0, 3, 4, 4), np.float32), "are none"),
        (np.full((5, 3, 4, 4), np.nan, np.float32), "number 0 has pixels that are not finite"),
    ],
)
def test_arrays_of_something_else(tmp_path: Path, array: np.ndarray, said: str) -> None:
    np.save(tmp_path / "e.npy", array)
    with pytest.raises(SourceError, match=said):
        read_challenge(tmp_path / "e.npy")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"public": np.zeros((6, 3, 8, 8), np.float32)}, "they must be alike"),
        ({"labels": np.zeros((4, 2), np.float32)}, r"expected \(5, n_classes\)"),
        ({"labels": np.full((5, 2), np.nan, np.float32)}, "labels are not finite"),
        ({"labels": np.full((5, 2), -1.0, np.float32)}, "labels are not finite"),
        ({"secret": {"private": np.zeros((3, 3, 8, 8), np.float32)}}, "the true images have"),
        (
            {"secret": {"private": np.zeros((3, 3, 4, 4)), "edges": np.zeros((9, 2), int)}},
            "give the --truth of these encodings",
        ),
        (
            {"secret": {"private": np.zeros((3, 3, 4, 4)), "edges": np.full((5, 2), 3)}},
            "give the --truth of these encodings",
        ),
    ],
)
def test_parts_that_do_not_fit(tmp_path: Path, changes: dict, said: str) -> None:
    write_challenge(tmp_path / "c", small(**changes), {})
    with pytest.raises(SourceError, match=said):
        read_challenge(tmp_path / "c")


def test_a_record_of_something_else(tmp_path: Path) -> None:
    write_challenge(tmp_path / "c", small(), {})
    facts = tmp_path / "c" / "challenge.json"
    about = json.loads(facts.read_text())
    for text, said in [
        ("{", "is not JSON"),
        ("{}", "not the record of a challenge"),
        (json.dumps(about | {"version": 99}), "version 99"),
    ]:
        facts.write_text(text)
        with pytest.raises(SourceError, match=said):
            read_challenge(tmp_path / "c")


def test_pictures_are_absolute_values_and_public_ones_signed(tmp_path: Path) -> None:
    for k, level in enumerate((0, 51, 255)):
        Image.new("RGB", (4, 3), (level, 0, 255)).save(tmp_path / f"{k}.png")
    encodings = read_images(tmp_path, "encodings")
    assert encodings.shape == (3, 3, 3, 4)
    np.testing.assert_allclose(encodings[:, 0, 0, 0], [0, 0.2, 1], atol=1e-6)
    (tmp_path / "phone.heic").touch()
    read: dict[str, str] = {}
    public = read_images(tmp_path, "public images", read, signed=True)
    assert read == {"public images, passed over": ".heic (1)"}
    np.testing.assert_allclose(public[:, 0, 0, 0], [-1, -0.6, 1], atol=1e-6)


def test_pictures_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="has no pictures"):
        read_images(tmp_path, "encodings")
    Image.new("RGB", (4, 3)).save(tmp_path / "a.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "b.png")
    with pytest.raises(SourceError, match="must be of one size"):
        read_images(tmp_path, "encodings")
    (tmp_path / "b.png").write_bytes(b"no picture")
    with pytest.raises(SourceError, match=r"b\.png cannot be read"):
        read_images(tmp_path, "encodings")
