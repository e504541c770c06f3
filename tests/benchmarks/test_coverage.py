"""The simulated worlds: their law, their calibration, and simulating by rounds against planning."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import logit

from benchmarks.coverage import simulated as coverage
from benchmarks.coverage.simulated import SMALL, Found, draw_curves, measurements, planned
from benchmarks.coverage.world import FAMILIES, World, ceiling, simulate
from benchmarks.record import parse_lines
from recon_core.sampling import Phase

LABELS = np.arange(1000) % 2


def world(chance: Any, *, company: float = 0.0) -> World:
    ease = logit(np.broadcast_to(np.asarray(chance, float), (1000,)).copy())
    return World("w", LABELS, ease, company, float(ease.mean()))


def last(world_: World, *phases: Phase, n_runs: int = 600) -> np.ndarray:
    ((_n_runs, now),) = simulate(world_, SMALL.sampling(*phases), every=n_runs)
    return now


@pytest.mark.parametrize("sampler", ["uniform", "least_seen", "adaptive"])
def test_simulated_by_rounds_is_planned_run_by_run(sampler: Any) -> None:
    w = FAMILIES[0].world(0.1, 0.5, np.random.default_rng(5).random(1000))
    phase = Phase(sampler=sampler, n_runs=600, pool_size=100)
    one_by_one, _ms = planned(w, SMALL.sampling(phase))
    by_rounds = last(w, phase)
    assert one_by_one[0].sum() == 600 * 60
    assert by_rounds[0].sum() == pytest.approx(600 * 60, rel=0.01)
    for row, tolerance in ((1, 0.06), (2, 0.08)):
        assert by_rounds[row].sum() == pytest.approx(one_by_one[row].sum(), rel=tolerance)
    covered = [(now[2] > 0).sum() for now in (one_by_one, by_rounds)]
    assert covered[0] == pytest.approx(covered[1], rel=0.05)
    order = np.argsort(w.ease)  # visits by difficulty
    for quarter in np.array_split(order, 4):
        assert by_rounds[0][quarter].sum() == pytest.approx(one_by_one[0][quarter].sum(), rel=0.1)


def test_the_ceiling_is_what_an_informed_search_covers_and_none_covers_more() -> None:
    # All alike: m visits cost (1 - (1 - p)^m) / p each.
    n_runs = 100
    covered = ceiling(world(0.05), SMALL, n_runs)
    assert covered == pytest.approx(0.05 * 60 * n_runs, abs=1)
    mixed = world(np.where(np.arange(1000) < 500, 0.002, 0.4))
    most = ceiling(mixed, SMALL, 600)
    for sampler in ("uniform", "least_seen", "adaptive"):
        phase = Phase(sampler=sampler, n_runs=600, pool_size=100)  # type: ignore[arg-type]
        assert (last(mixed, phase)[2] > 0).sum() < most + 3 * np.sqrt(most * (1 - most / 1000))
    with pytest.raises(ValueError, match="no such bound"):
        ceiling(world(0.3, company=0.1), SMALL, 10)


def test_quick_measurements_and_the_plot(tmp_path: Path) -> None:
    found = list(coverage.measure(True))
    cases = {m.case.split(":")[1].strip(): m for m in found}
    assert cases["adaptive after 300 runs, covered"].reference_value is not None
    assert "adaptive, 40 runs planned one by one, planning" in cases
    lines = "\n".join(json.dumps(asdict(measurement)) for measurement in found)
    assert parse_lines(lines, name="x") == found

    curve = {300: (5, 0.3, 8.0), 600: (9, 0.2, 7.0)}
    names = ("paper", "uniform", "least seen", "adaptive", "adaptive, enough=44")
    draw_curves([("w", 9, {name: [curve] for name in names})] * 2, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    small = {**dict.fromkeys(names, curve)}
    lines = measurements(Found("w", 0.1, 0.2, None, small), SMALL, tuned=False)
    reached = {line.case: line.value for line in lines if "runs to" in line.case}
    assert set(reached.values()) == {600}
