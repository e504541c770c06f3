"""Evaluations side by side: what differs, what is paired, and a page with the same numbers."""

from __future__ import annotations

import copy
import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recon_core.summary import bootstrap_interval
from tasks.page.formats import interval, score
from tasks.report.compare import (
    compare,
    open_runs,
    unpaired_interval,
    write_comparison,
)
from tests.tasks.pages import Page
from tests.tasks.report.report_records import evaluation, write


def _run(folder: Path, record: dict[str, Any]) -> Path:
    write(folder / "evaluation", record, {})
    return folder


def _pair(tmp_path: Path, change: Any) -> dict[str, Any]:
    """An evaluation called a, and one called b that `change` made of its record."""
    record = evaluation()[0]
    other = copy.deepcopy(record)
    change(other)
    return dict(open_runs([_run(tmp_path / "a", record), _run(tmp_path / "b", other)]))


def _raised(record: dict[str, Any]) -> None:
    """All scores 0.1 higher, images in the reverse order, another setting."""
    record["settings"]["n_samples"] = 4
    for side in ("targets", "decoys"):
        for key in ("victim", "image_id", "label"):
            record[side][key].reverse()
        for body in record["methods"].values():
            body[side]["ssim"] = [round(value + 0.1, 6) for value in reversed(body[side]["ssim"])]
            body[side]["haarpsi"].reverse()


def test_the_same_images_are_paired_whatever_their_order(tmp_path: Path) -> None:
    found = compare(_pair(tmp_path, _raised))
    first = found["differences"][0]
    assert (first["run"], first["against"], first["method"]) == ("b", "a", "plain")
    for side in ("targets", "decoys"):
        assert first[side]["paired"]
        assert first[side]["mean_ssim"] == pytest.approx(0.1)
        assert first[side]["mean_ssim_interval"] == pytest.approx([0.1, 0.1])
        assert first[side]["mean_haarpsi_interval"] == pytest.approx([0, 0])
    assert found["settings"] == {"evaluation.n_samples": ["3", "4"]}
    assert len(found["differences"]) == len(found["methods"])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda r: r["source"].update(content_hash="0" * 64), "different sources"),
        (lambda r: r["targets"]["image_id"].__setitem__(0, 9999), "other images of the same"),
        (lambda r: r["targets"]["victim"].__setitem__(0, 1), "or in other victims"),
    ],
)
def test_other_images_are_not_paired_and_said_so(tmp_path: Path, change: Any, why: str) -> None:
    runs = _pair(tmp_path, change)
    first = compare(runs)["differences"][0]["targets"]
    assert not first["paired"]
    assert why in first["why"]
    assert first["mean_ssim"] == 0
    low, high = first["mean_ssim_interval"]
    assert low < -0.02 < 0.02 < high  # images differ by far more than 0
    made = write_comparison(compare(runs), runs, tmp_path / "c.html")
    assert f"Unpaired, since {first['why']}" in Page(made["page"]).prose


def test_an_unpaired_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for seed in range(40):
        low, high = unpaired_interval(rng.normal(0, 1, 30), rng.normal(0.5, 1, 60), seed=seed)
        hits += low < 0.5 < high
    assert hits >= 34
    paired = bootstrap_interval(np.full(30, 0.5))
    assert paired == (0.5, 0.5)


def test_page_csv_and_json_have_the_same_numbers(tmp_path: Path) -> None:
    runs = _pair(tmp_path, _raised)
    comparison = compare(runs)
    made = write_comparison(comparison, runs, tmp_path / "pages.html")
    page = Page(made["page"])
    page.check()
    assert json.loads(made["numbers"].read_bytes()) == json.loads(json.dumps(comparison))
    assert made["data"].name == "pages-data"
    beside = {file.name: file.read_bytes().decode() for file in made["data"].iterdir()}
    assert page.downloads == beside
    rows = list(csv.DictReader(io.StringIO(beside["differences.csv"])))
    assert len(rows) == 2 * len(comparison["differences"])
    assert float(rows[0]["mean_ssim"]) == comparison["differences"][0]["targets"]["mean_ssim"]
    ranked = list(csv.DictReader(io.StringIO(beside["ranked-curves.csv"])))
    mine = [r for r in ranked if (r["method"], r["run"], r["side"]) == ("edm_x3", "b", "targets")]
    scores = runs["b"]["methods"]["edm_x3"]["targets"]["ssim"]
    assert [float(row["ssim"]) for row in mine] == sorted(scores, reverse=True)
    summary = comparison["methods"]["plain"][0]["targets"]
    cells = [cell.strip() for cell in page.rows["plain"]]
    assert cells[:2] == ["Attack alone", "a"]
    assert cells[4] == score(summary["mean_ssim"]) + interval(summary["mean_ssim_interval"])


def test_a_method_that_one_run_lacks_is_not_compared(tmp_path: Path) -> None:
    runs = _pair(tmp_path, lambda record: record["methods"].pop("edm_x3"))
    comparison = compare(runs)
    assert comparison["methods"]["edm_x3"][1] is None
    assert "edm_x3" not in {found["method"] for found in comparison["differences"]}
    made = write_comparison(comparison, runs, tmp_path / "c.html")
    assert "not evaluated" in Page(made["page"]).prose


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    record = evaluation()[0]
    folders = [_run(tmp_path / top / "same", record) for top in ("x", "y")]
    assert list(open_runs(folders)) == ["x/same", "y/same"]
