"""The storm's numbers, and that a fault ends the benchmark; pairs/test_storm runs one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import parse_lines
from benchmarks.store import storm as store_storm

REPORT = {
    "n_kills": 12,
    "kills": {"reading": 1, "syncing": 9, "reader": 2},
    "seconds": 3.5,
    "n_parts": 40,
    "n_parts_during_the_storm": 0,
    "reader_columns": 900,
    "left_groups": 7,
    "left_temporary_files": 2,
}


def test_measurements_say_where_the_kills_fell():
    found = list(store_storm.measurements("race on S3", REPORT))
    cases = {measurement.case: measurement.value for measurement in found}
    assert cases["race on S3: SIGKILLs (reading 1, syncing 9, reader 2)"] == 12
    assert cases["race on S3: orphans that vacuum freed, 2 of them temporary files"] == 9
    assert len(found) == 5  # no line for what was 0
    lines = "\n".join(json.dumps(asdict(measurement)) for measurement in found)
    assert parse_lines(lines, name="x") == found


def test_a_fault_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run_apart(storm: Any, environment: dict[str, str], timeout_s: float) -> dict[str, Any]:
        assert storm.location == str(tmp_path / "race")
        return REPORT | {"faults": ["part 3 is lost"]}

    monkeypatch.setattr(store_storm, "run_apart", run_apart)
    with pytest.raises(SystemExit, match="race: part 3 is lost"):
        store_storm.storm(tmp_path, "race", None, n_kills=1, n_parts=1)
