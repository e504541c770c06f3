"""Seconds add up over attempts; progress reads well; the contact sheet shows every method."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tasks.progress import progress_line, rate_text
from tasks.report.image_grids import contact_sheet
from tasks.workspace import Workspace


def test_seconds_add_up_over_attempts_and_survive_an_interrupt(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    with workspace.timed("train edm"):
        pass
    first = workspace.timings["train edm"]
    with pytest.raises(KeyboardInterrupt), workspace.timed("train edm"):
        raise KeyboardInterrupt
    with workspace.timed("evaluate"):
        pass
    assert workspace.timings["train edm"] >= first
    assert set(workspace.timings) == {"train edm", "evaluate"}


def test_nothing_is_written_where_there_is_no_workspace(tmp_path: Path) -> None:
    with Workspace(tmp_path / "none").timed("curate"):
        pass
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("done", "seconds", "text"),
    [(0, 5, ""), (10, 2, "5.0 runs/s"), (2, 10, "5.0 s/run"), (3, 0, "")],
)
def test_rates_are_given_the_way_they_read_better(done, seconds, text) -> None:
    assert rate_text(done, seconds, "run") == text


def test_a_line_of_progress_has_count_rate_and_remaining_time() -> None:
    assert progress_line("Generate", "run", 4, 40, 20) == (
        "Generate  4 / 40 runs  5.0 s/run  3:00 left"
    )
    assert progress_line("Generate", "run", 0, 40, 3).endswith("? left")


def test_what_was_there_before_counts_for_no_rate() -> None:
    assert progress_line("Generate", "run", 24, 40, 20, before=20) == (
        "Generate  24 / 40 runs  5.0 s/run  1:20 left"
    )
    assert progress_line("Generate", "run", 20, 40, 3, before=20).endswith("? left")


def test_the_contact_sheet_has_a_row_per_method_of_the_grid(tmp_path: Path) -> None:
    def evaluation(shown: int) -> Path:
        methods = ["plain", "bf_dncnn", "edm_x2", "plain_all"]
        folder = tmp_path / str(shown)
        folder.mkdir()
        scores = {"targets": {"ssim": [0.9, 0.1]}, "decoys": {"ssim": [0.2]}}
        record = {
            "methods": dict.fromkeys(methods, scores),
            "grid": {"targets": [0, 1], "decoys": [0], "methods": methods[:shown]},
            "settings": {"good_threshold": 0.4},
        }
        (folder / "evaluation.json").write_text(json.dumps(record))
        rng = np.random.default_rng(0)
        pictures = {
            f"{side}/{name}": rng.integers(0, 256, (n, 3, 8, 8), dtype=np.uint8)
            for side, n in (("targets", 2), ("decoys", 1))
            for name in ("original", *methods)
        }
        np.savez(folder / "pictures.npz", **pictures)
        return folder

    def height(shown: int) -> int:
        return Image.open(io.BytesIO(contact_sheet(evaluation(shown)))).height

    assert height(1) < height(3) < height(4)
