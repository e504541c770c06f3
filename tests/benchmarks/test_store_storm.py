"""The storm's numbers, and that a fault ends the benchmark; pairs/test_storm runs one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.store import storm as store_storm


def test_a_fault_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run_apart(storm: Any, environment: dict[str, str], timeout_s: float) -> dict[str, Any]:
        assert storm.location == str(tmp_path / "race")
        return {"faults": ["part 3 is lost"]}

    monkeypatch.setattr(store_storm, "run_apart", run_apart)
    with pytest.raises(SystemExit, match="race: part 3 is lost"):
        store_storm.storm(tmp_path, "race", None, n_kills=1, n_parts=1)
