"""Separators of one's own: learned from a folder, written, read, and refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from recon_core.attacks.span.search import SpanAttack
from recon_core.attacks.span.separator import Separator, build_network
from recon_core.restore.unet import CompactUNet, UNet
from storage.errors import SourceError
from storage.weights import WeightsError
from tasks.families.weights import separators
from tasks.families.weights.separators import (
    SeparatorJob,
    given_separator,
    read_separator,
    train_separator,
)
from tests.recon_core.tiles import photograph_tiles


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 340 pictures 16x16, 60 of them for tests."""
    path = tmp_path_factory.mktemp("public")
    tiles = photograph_tiles(16, shrink=1)[::3].numpy()
    for i, tile in enumerate(tiles):
        place = path / ("test" if i % 6 == 0 else "train") / "tile"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(tile.transpose(1, 2, 0).astype(np.uint8)).save(place / f"{i:03}.png")
    return path


@pytest.fixture(scope="module")
def learned(folder: Path) -> Path:
    said: list[str] = []

    def advance(done: float, total: float, note: str = "", *, share: float | None = None) -> None:
        said.append(note)

    job = SeparatorJob(data=f"folder:{folder}", shape=(1, 16, 16), n_steps=8)
    card = train_separator(job, folder / "it.safetensors", device="cpu", advance=advance)
    assert "not tried yet" in said[0]
    assert "of 50 held-out pictures" in said[-1]
    assert card.source == folder.name
    assert (card.n_steps, card.shifted, card.mirrored) == (8, 2, True)
    assert card.n_pictures > 200
    ((n, ours, theirs),) = card.separated
    assert n == 50
    assert 0 <= ours <= 50
    assert theirs > 5
    return folder / "it.safetensors"


def test_a_file_is_read_as_it_was_written(learned: Path) -> None:
    separator, name = read_separator(learned)
    assert isinstance(separator, Separator)
    assert name.startswith("sha256:")
    found = given_separator(SpanAttack(separator=str(learned)))
    assert found is not None
    assert found[1] == name
    assert torch.equal(found[0].mean, separator.mean)
    assert given_separator(SpanAttack(separator="digits")) is None
    assert given_separator(SpanAttack()) is None


def test_a_file_that_is_damaged_or_none_is_refused_in_a_line(learned: Path, tmp_path: Path) -> None:
    content = learned.read_bytes()
    damaged = {
        "cut.safetensors": content[: len(content) // 2],
        "text.safetensors": b"not a separator",
        "empty.safetensors": b"",
        "card.safetensors": content.replace(b'\\"patch\\": 1', b'\\"patch\\": 2'),
    }
    for name, some in damaged.items():
        (tmp_path / name).write_bytes(some)
        with pytest.raises(WeightsError, match=r"--separator") as refusal:
            read_separator(tmp_path / name)
        assert "\n" not in str(refusal.value)
    with pytest.raises(WeightsError, match="does not exist"):
        read_separator(tmp_path / "nothing")


def test_too_few_pictures_and_minutes_of_learning(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = SeparatorJob(data=f"folder:{folder}", shape=(1, 16, 16))
    monkeypatch.setattr(separators, "FEWEST", 1000)
    with pytest.raises(SourceError, match="pictures to learn from and"):
        train_separator(job, tmp_path / "it", device="cpu", advance=lambda *_a, **_k: None)
    with pytest.raises(ValueError, match="minutes=0"):
        replace(job, minutes=0)
    with pytest.raises(ValueError, match="squares with sides that are multiples of 4"):
        SeparatorJob(data="folder:x", shape=(1, 32, 30), large=True)


@pytest.mark.parametrize(
    ("settings", "widths", "kind", "on_gpu"),
    [
        ({"minutes": 29.0}, separators.WIDTHS, CompactUNet, 96),
        ({"minutes": 30.0}, separators.WIDER, CompactUNet, 96),
        ({"large": True}, (), UNet, 512),
    ],
)
def test_long_learning_is_for_wider_networks_and_the_large_one_sees_more_mixtures(
    settings: dict[str, Any], widths: tuple[int, ...], kind: type, on_gpu: int
) -> None:
    pictures = photograph_tiles(16, shrink=1)[:200].float() / 255
    job = SeparatorJob(data="folder:x", shape=(3, 16, 16), **settings)
    card = separators._card(job, pictures)
    assert (card.widths, card.patch) == (widths, 1)
    assert isinstance(build_network(card), kind)
    assert [separators._batch(card, device) for device in ("cpu", "cuda:0")] == [96, on_gpu]
