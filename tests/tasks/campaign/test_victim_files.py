"""Kept victims: what is read is what was put, and whatever is wrong means training again."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tasks.campaign.plan import VictimFiles, kept_victims

TENSORS = {"parameters.0": torch.randn(1, 3, 4), "loss": torch.tensor([float("nan")])}


def test_what_is_put_is_got(tmp_path: Path) -> None:
    files = VictimFiles(tmp_path / "victims", "key")
    assert files.get(3) is None
    files.put(3, TENSORS)
    got = files.get(3)
    assert got is not None
    assert {name: t.numpy().tobytes() for name, t in got.items()} == {
        name: t.numpy().tobytes() for name, t in TENSORS.items()
    }
    assert files.get(4) is None


def test_others_and_damaged_ones_are_not_taken(tmp_path: Path) -> None:
    files = VictimFiles(tmp_path, "key")
    files.put(0, TENSORS)
    assert VictimFiles(tmp_path, "another").get(0) is None
    (weights,) = tmp_path.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert files.get(0) is None
    files.put(0, TENSORS)
    assert files.get(0) is not None


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    files = VictimFiles(tmp_path / "file" / "victims", "key")
    files.put(0, TENSORS)
    assert files.get(0) is None


def test_the_key_has_settings_and_device(tmp_path: Path) -> None:
    cpu = kept_victims((os.fspath(tmp_path), "settings"), "cpu")
    gpu = kept_victims((os.fspath(tmp_path), "settings"), "NVIDIA H200")
    assert cpu is not None
    assert gpu is not None
    cpu.put(0, TENSORS)
    assert cpu.get(0) is not None
    assert gpu.get(0) is None
    assert kept_victims(None, "cpu") is None
