"""What a training writes to be watched: the log, its continuation, pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from storage.pairs.dataset import Dataset
from tasks.training.loop import TrainingLog, grid
from tasks.training.validation import Validation
from tests.storage import stores
from tests.tasks.training.logs import read_log
from tests.tasks.training.test_train import TRAINING, one_thread, stopped, train

__all__ = ["one_thread"]

SIDE = 16


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return stores.store(tmp_path / "store", n_parts=3, size=SIDE)


def watched(dataset: Dataset, out: Path, **changes: object) -> dict[str, object]:
    images = np.random.default_rng(0).integers(0, 256, (20, 3, SIDE, SIDE), dtype=np.uint8)
    settings = {"images_for_noise": images, "validation": Validation(every=4, n_pairs=3)}
    return train(dataset, out, **(settings | changes))


def clockless(out: Path) -> list[dict[str, float]]:
    times = ("images_per_s", "wait_share")
    return [{k: v for k, v in line.items() if k not in times} for line in read_log(out)]


def test_the_log_has_every_step_and_validation(dataset: Dataset, tmp_path: Path) -> None:
    losses: list[float] = []
    card = watched(dataset, tmp_path, on_step=lambda _done, _n, loss: losses.append(loss))
    lines = read_log(tmp_path)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [line["loss"] for line in steps] == losses
    assert [line["lr"] for line in steps] == [TRAINING.learning_rate(step) for step in range(12)]
    assert all(line["images_per_s"] > 0 and 0 <= line["wait_share"] <= 1 for line in steps)
    scored = [(line["step"], line["validation_ssim"]) for line in lines if "loss" not in line]
    assert scored == card["validation"]["ssim_curve"]
    with Image.open(tmp_path / "validation.png") as picture:
        assert picture.size == (3 * (2 * SIDE + 4), 3 * (2 * SIDE + 4))


def test_a_resumed_log_is_the_log_of_one_training(dataset: Dataset, tmp_path: Path) -> None:
    watched(dataset, tmp_path / "through")
    stopped(watched, dataset, tmp_path / "out", after=6)
    assert read_log(tmp_path / "out")[-1]["step"] > 6
    with (tmp_path / "out" / "log.jsonl").open("ab") as log:
        log.write(b'{"step": 8, "lo')  # a kill in the middle of a line
    watched(dataset, tmp_path / "out")
    assert clockless(tmp_path / "out") == clockless(tmp_path / "through")


@pytest.mark.parametrize("damage", [b"\0" * 40 + b"\n", b"[]\n", b'{"loss": 1}\n', b"\xff\n"])
def test_a_damaged_log_does_not_end_a_resumed_training(tmp_path: Path, damage: bytes) -> None:
    lines = [b'{"step": %d, "loss": 1.0}\n' % step for step in (1, 2, 3)]
    (tmp_path / "log.jsonl").write_bytes(lines[0] + damage + lines[1] + lines[2])
    TrainingLog(tmp_path, step=2).close()
    assert (tmp_path / "log.jsonl").read_bytes() == lines[0] + lines[1]


def test_the_grid_has_a_row_per_kind_and_a_column_per_pair() -> None:
    pictures = torch.zeros(3, 4, 3, 5, 6)
    pictures[1, 2, 0] = 1.0  # the third pair, restored, is red
    found = grid(pictures)
    assert found.shape == (3 * 14, 4 * 16, 3)
    assert (found[0] == 255).all()
    tile = found[14 + 2 : 14 + 12, 2 * 16 + 2 : 2 * 16 + 14]
    assert (tile == [255, 0, 0]).all()
    assert (found[2:12, 2:14] == 0).all()


def test_a_log_goes_on_at_its_step(tmp_path: Path) -> None:
    for step in (0, 2):
        log = TrainingLog(tmp_path, step=step)
        log.scalars(step + 1, loss=1.0)
        log.scalars(step + 2, loss=2.0)
        log.scalars(step + 3, loss=3.0)
        log.close()
    assert [line["step"] for line in read_log(tmp_path)] == [1, 2, 3, 4, 5]
