"""Bars of long stages, on screens of different widths."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

import tasks.progress
from tasks.progress import stage_progress

NOTE = "Generate: attack noise of 50 % on the weights, span_known, victim 3"


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_a_long_note_costs_no_other_part_of_the_line(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()

    def console(**_asked: object) -> Console:
        return Console(file=screen, force_terminal=True, width=width, color_system=None)

    monkeypatch.setattr(tasks.progress, "Console", console)
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
