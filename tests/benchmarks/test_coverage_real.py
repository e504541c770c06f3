"""The comparison of samplers on real images, at its smallest, and the arithmetic of its lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.coverage.real import (
    UNIFORM,
    Size,
    draw_plot,
    main,
    measurements,
    runs_to,
)
from tasks.campaign.status import CoverageCurve


def curve(*covered: int) -> CoverageCurve:
    n = len(covered)
    return CoverageCurve(
        n_runs=tuple(range(2, 2 * n + 2, 2)),
        n_trained=(9,) * n,
        n_covered=covered,
        gini=tuple(0.1 * (k + 1) for k in range(n)),
        pairs_per_run=(1.0,) * n,
    )


CURVES = {UNIFORM: [curve(3, 5, 6, 8), curve(3, 5, 6, 6)], "adaptive": [curve(4, 7, 8, 9)] * 2}


def test_lines_compare_with_uniform_at_the_same_number_of_runs(tmp_path: Path) -> None:
    lines = {line.case: line for line in measurements(CURVES, Size(n_runs=8), 9)}
    half = lines["adaptive after 4 runs on 9 images: images covered (7, 7)"]
    assert (half.value, half.reference_value) == (7, 5)
    full = lines["adaptive after 8 runs on 9 images: images covered (9, 9)"]
    assert (full.value, full.reference_value) == (9, 7)
    assert lines["uniform after 8 runs on 9 images: images covered (8, 6)"].reference is None
    (reached,) = [line for case, line in lines.items() if "runs to" in case]
    assert (reached.value, reached.reference_value, reached.unit) == (4, 8, "runs")
    draw_plot(CURVES, 9, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_goal_that_is_not_reached_has_no_number_of_runs() -> None:
    assert runs_to(curve(3, 5), 5) == 4
    assert runs_to(curve(3, 5), 6) is None


@pytest.mark.slow
def test_the_command_runs_every_sampler_and_is_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--quick", "--workers", "1", "--folder", str(tmp_path / "runs")]
    main([*words, "--json", str(tmp_path / "one.json"), "--plot", str(tmp_path / "plot.png")])
    first = [json.loads(line)["value"] for line in capsys.readouterr().out.splitlines()]
    receipts = sorted(tmp_path.glob("runs/*/receipts/*.json"))
    written = [path.stat().st_mtime_ns for path in receipts]
    assert len(receipts) == 3 * 8
    main(words)
    assert [json.loads(line)["value"] for line in capsys.readouterr().out.splitlines()] == first
    assert [path.stat().st_mtime_ns for path in receipts] == written
