"""Seconds add up over attempts; progress reads well; the contact sheet shows every method."""

import time
from pathlib import Path

import pytest

from tasks import progress
from tasks.evaluation import record
from tasks.evaluation.record import Work
from tasks.progress import progress_line, rate_text, stage_progress
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


class Clock:
    """Time that passes as it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_the_time_left_does_not_count_the_start_of_workers(clock: Clock, capsys) -> None:
    with stage_progress("Generate", "run") as advance:
        advance(0, 10)
        for done in range(1, 8):
            clock.now = 590 + 10 * done  # ten minutes until the first, then ten seconds each
            advance(done, 10)
    assert capsys.readouterr().err.splitlines()[-1].endswith("0:30 left")


@pytest.mark.parametrize(("early", "said"), [(False, "  1:30 left"), (True, "at most 1:30 left")])
def test_the_time_left_is_a_bound_where_a_stage_may_end_early(
    early: bool, said: str, clock: Clock, capsys
) -> None:
    with stage_progress("Attack", "attack", may_end_early=early) as advance:
        for done in (0, 0.1, 0.2, 0.4):
            clock.now = 150 * done
            advance(done, 1)
    assert capsys.readouterr().err.splitlines()[-1].endswith(said)


def test_a_silent_stage_is_heard_of(clock: Clock, capsys, monkeypatch) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.1)
    with stage_progress("Evaluate", "step") as advance:
        clock.now = 1.0
        deadline = time.monotonic() + 20
        shown = ""
        while "Evaluate  starting  (still at it)" not in shown and time.monotonic() < deadline:
            shown += capsys.readouterr().err
            time.sleep(0.01)
        clock.now = 20.0
        advance(1000, 1000, "run 3: edm")
        shown = capsys.readouterr().err
        assert "1000 / 1000 steps" in shown
        assert "finishing  run 3: edm" in shown
        assert "0:00 left" not in shown
        clock.now = 30.0
        while "(still at it)" not in shown and time.monotonic() < deadline:
            shown += capsys.readouterr().err
            time.sleep(0.01)
    assert "run 3: edm  (still at it)" in shown


def test_the_share_of_an_evaluation_is_of_its_time(tmp_path: Path, monkeypatch) -> None:
    told: list[tuple[int, int, float]] = []
    work = Work(
        folder=tmp_path, key=[], jobs={"plain": 2, "edm": 2},
        on_progress=lambda done, total, _said, share: told.append((done, total, share)),
    )  # fmt: skip
    took = {"plain": 1.0, "edm": 9.0}
    monkeypatch.setattr(record, "cached", lambda _f, name, _k, make: (make(), took[name]))
    for name in ("plain", "edm", "plain", "edm"):
        work.do(name, name, [], lambda advance: advance(0.5) or {})
    assert told[-1] == (350, 400, pytest.approx((1 + 9 + 1 + 4.5) / 20))
    assert told[-3] == (250, 400, pytest.approx((1 + 9 + 0.5) / 20))
