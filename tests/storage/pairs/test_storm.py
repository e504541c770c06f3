"""Writers and a reader that are killed at random; `benchmarks.store.storm` does it longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.s3_server import S3Server
from tests.storage.storm import Storm, run_apart

TIMEOUT_S = 240.0


def survived(storm: Storm, environment: dict[str, str]) -> None:
    report = run_apart(storm, environment, TIMEOUT_S)
    assert report["faults"] == [], report
    assert report["n_kills"] == storm.n_kills
    assert 0 < report["n_parts_during_the_storm"] <= storm.n_parts
    assert report["reader_columns"] >= 22 * storm.n_parts
    assert report["left_groups"] <= storm.n_kills


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "n_kills"), [("spread", 15), ("race", 8)])
def test_a_storm_of_kills(tmp_path: Path, variant: str, n_kills: int):
    """Nothing torn is seen, nothing receipted is lost, and the end is as if nobody had died."""
    storm = Storm(
        variant=variant,
        location=str(tmp_path / "s"),
        expected=str(tmp_path / "expected.json"),
        scratch=str(tmp_path),
        n_parts=40,
        n_kills=n_kills,
    )
    survived(storm, {})


@pytest.mark.slow
def test_a_storm_of_kills_on_s3(tmp_path: Path, s3: S3Server):
    """The same content hash as in a folder, with two writers at every part."""
    storm = Storm(
        variant="race",
        location=s3.location("s"),
        expected=str(tmp_path / "expected.json"),
        scratch=str(tmp_path),
        n_parts=16,
        n_kills=8,
    )
    survived(storm, s3.environment)
