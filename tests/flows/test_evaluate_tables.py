"""The tables that the evaluation leaves on its Prefect page, from a record of a sweep; and what it
refuses before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.evaluate import evaluate, hallucination_rows, ranking_rows, summary_rows
from flows.settings import resolve
from storage.errors import StorageError
from tests.tasks.evaluation.evaluations import N_IMAGES, evaluated_sweep


def test_every_table_has_the_numbers_of_the_record(tmp_path: Path) -> None:
    record = evaluated_sweep(tmp_path)
    scores = {row["method"]: row for row in summary_rows(record)}
    assert list(scores) == list(record["methods"])
    assert scores["plain"]["good"] == f"{2 * N_IMAGES}/{2 * N_IMAGES}"
    ranking = {row["criterion"]: row for row in ranking_rows(record)}
    assert ranking["kkt_residual"]["runs"] == 6
    assert ranking["kkt_residual"]["best run in the top quarter"] == "2/2"
    found = record["ranking"]["kkt_residual"]
    assert ranking["kkt_residual"]["rank correlation"] == round(found["spearman"], 3)
    assert ranking["attack_loss"]["rank correlation"] is None
    assert not ranking["attack_loss"]["95 %"]
    bins = hallucination_rows(record)
    assert [row["method"] for row in bins] == ["edm_x3"] * 5
    assert sum(row["images"] for row in bins) == 2 * N_IMAGES
    low, high = record["hallucination"]["edm_x3"]["bins"][0]["disagreement"]
    assert bins[0]["disagreement"] == f"{low:.3f} to {high:.3f}"


def test_restorers_from_elsewhere_are_opened_before_a_victim_is_attacked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(*_given: object) -> None:
        raise AssertionError("attacked")

    monkeypatch.setattr("flows.evaluate._attacked", never)
    absent = {"evaluation.external.mine": str(tmp_path / "absent.onnx")}
    with pytest.raises((ValueError, StorageError), match=r"absent\.onnx"):
        evaluate(resolve("smoke", absent), tmp_path / "store")


def test_a_criterion_that_no_run_has_gets_no_row() -> None:
    nothing = {"n_runs": 0, "spearman": None, "interval": None}
    assert ranking_rows({"ranking": {"residual_relu": nothing}}) == []
