"""Seconds add up over attempts; progress reads well, on screens of different widths."""

import io
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tasks import progress
from tasks.evaluation import record
from tasks.evaluation.record import Work
from tasks.progress import stage_progress
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


@pytest.mark.parametrize(
    ("first", "seconds", "last", "text"),
    [
        ((0, 40), 20, (4, 40), "4 / 40 runs  5.0 s/run  3:00 left"),
        ((0, 40), 10, (20, 40), "20 / 40 runs  2.0 runs/s  0:10 left"),
        ((0, 40), 30, (0, 40), "0 / 40 runs    ? left"),
        ((20, 40), 20, (24, 40), "24 / 40 runs  5.0 s/run  1:20 left"),
        ((20, 40), 30, (20, 40), "20 / 40 runs    ? left"),
        ((0, 400, 0.0), 60, (1, 400, 0.5), "1 / 400 runs  60.0 s/run  1:00 left"),
        ((5, 400, 0.4), 60, (9, 400, 0.5), "9 / 400 runs  15.0 s/run  5:00 left"),
    ],
)
def test_progress_has_count_rate_and_the_time_left_of_the_work(
    first: Any, seconds: float, last: Any, text: str, clock: Clock, capsys: Any
) -> None:
    """What was there before counts for no rate, and shares of the work go before counts."""
    with stage_progress("Generate", "run") as advance:
        for now, (done, total, *share) in ((0.0, first), (seconds, last)):
            clock.now = now
            advance(done, total, share=share[0] if share else None)
    assert capsys.readouterr().err.splitlines()[-1] == f"Generate  {text}"


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


NOTE = "Generate: attack noise of 50 % on the weights, span_known, victim 3"


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_a_long_note_costs_no_other_part_of_the_line(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()

    def console(**_asked: object) -> Console:
        return Console(file=screen, force_terminal=True, width=width, color_system=None)

    monkeypatch.setattr(progress, "Console", console)
    with stage_progress("Audit", "unit") as advance:
        advance(100, 112, NOTE, share=0.1)
        advance(105, 112, NOTE, share=0.9)
    lines = [
        re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)
        for line in re.split(r"[\r\n]", screen.getvalue())
    ]
    last = [line.rstrip() for line in lines if line.strip()][-1]
    assert len(last) <= width
    assert re.search(r"━+.* 105 / 112 units +\S+ units/s +\d?\d:\d\d", last), last
    assert last.endswith("victim 3" if width == 160 else "…")
