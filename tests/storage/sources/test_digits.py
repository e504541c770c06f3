from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from storage.errors import SourceError
from storage.sources import embedded
from storage.sources.load import load_images

HASHES = {
    "train": "e5bf22ea03e423eb434bcd16581e6f6c2c730ab4f1f0a69cbae069eef8d82b1c",
    "heldout": "57ae0f381884f794d7c4067c81077da11a629f41e1c18f9aba5966af3e642691",
}


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_content_hash_is_that_of_the_pictures(split: Any):
    assert load_images("digits", split=split, size=8).content_hash == HASHES[split]


def test_an_installation_without_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedded, "_DIGITS", tmp_path / "digits.npz")
    with pytest.raises(SourceError, match=r"digits\.npz is missing; install palimpsest again"):
        load_images("digits", split="train")


def test_file_and_licence_are_packaged():
    root = Path(__file__).parents[3]
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    assert all((root / file).is_file() for file in settings["project"]["license-files"])
    packaged = settings["tool"]["setuptools"]["package-data"]["storage.sources"]
    assert {"digits.npz", "digits.txt"} <= set(packaged)
