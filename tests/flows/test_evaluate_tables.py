"""The table of scores from a record of a sweep, and what an evaluation refuses before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.chain import evaluate, summary_rows
from flows.settings import resolve
from storage.errors import StorageError
from tests.tasks.evaluation.evaluations import N_IMAGES, evaluated_sweep


def test_every_table_has_the_numbers_of_the_record(tmp_path: Path) -> None:
    record = evaluated_sweep(tmp_path)
    scores = {row["method"]: row for row in summary_rows(record)}
    assert list(scores) == list(record["methods"])
    assert scores["plain"]["good"] == f"{2 * N_IMAGES}/{2 * N_IMAGES}"


def test_restorers_from_elsewhere_are_opened_before_a_victim_is_attacked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(*_given: object) -> None:
        raise AssertionError("attacked")

    monkeypatch.setattr("flows.chain._attacked", never)
    absent = {"evaluation.external.mine": str(tmp_path / "absent.onnx")}
    with pytest.raises((ValueError, StorageError), match=r"absent\.onnx"):
        evaluate(resolve("smoke", absent), tmp_path / "store")
