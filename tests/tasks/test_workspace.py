"""Seconds add up over attempts; progress reads well; the contact sheet shows every method."""

from pathlib import Path

import pytest

from tasks.progress import progress_line, rate_text
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


def test_the_time_left_is_that_of_the_work_and_not_of_its_parts() -> None:
    assert progress_line("Audit", "unit", 1, 400, 60, parts=(0.0, 0.5)) == (
        "Audit  1 / 400 units  60.0 s/unit  1:00 left"
    )
    assert progress_line("Audit", "unit", 9, 400, 60, before=5, parts=(0.4, 0.5)) == (
        "Audit  9 / 400 units  15.0 s/unit  5:00 left"
    )
