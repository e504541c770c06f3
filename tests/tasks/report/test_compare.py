"""Evaluations side by side: what differs, what is paired, and a page with the same numbers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.page.formats import interval, score
from tasks.report.compare import compare_runs, difference, open_runs
from tests.tasks.pages import Page
from tests.tasks.report.report_records import evaluation, write


def _pair(tmp_path: Path, change: Any) -> tuple[dict[str, Any], Page]:
    """The comparison, and its page, of an evaluation, a, and b, which `change` made of it."""
    record = evaluation()[0]
    other = copy.deepcopy(record)
    change(other)
    for name, one in (("a", record), ("b", other)):
        write(tmp_path / name / "evaluation", one, {})
    found = compare_runs([tmp_path / "a", tmp_path / "b"], tmp_path / "pages" / "c.html")
    assert json.loads((tmp_path / "pages" / "c.json").read_bytes()) == json.loads(json.dumps(found))
    page = Page(tmp_path / "pages" / "c.html")
    page.check()
    return found, page


def _raised(record: dict[str, Any]) -> None:
    """All scores 0.1 higher, images in the reverse order, another setting."""
    record["settings"]["n_samples"] = "<i>"
    for side in ("targets", "decoys"):
        for key in ("victim", "image_id", "label"):
            record[side][key].reverse()
        for body in record["methods"].values():
            body[side]["ssim"] = [round(value + 0.1, 6) for value in reversed(body[side]["ssim"])]
            body[side]["haarpsi"].reverse()


def test_the_same_images_are_paired_whatever_their_order(tmp_path: Path) -> None:
    found, page = _pair(tmp_path, _raised)
    first = found["differences"][0]
    assert (first["run"], first["against"], first["method"]) == ("b", "a", "plain")
    for side in ("targets", "decoys"):
        assert first[side]["paired"]
        assert first[side]["mean_ssim"] == pytest.approx(0.1)
        assert first[side]["mean_ssim_interval"] == pytest.approx([0.1, 0.1])
        assert first[side]["mean_haarpsi_interval"] == pytest.approx([0, 0])
    assert found["settings"] == {"evaluation.n_samples": ["3", "<i>"]}
    assert "<i>" in page.text
    assert len(found["differences"]) == len(found["methods"])
    summary = found["methods"]["plain"][0]["targets"]
    cells = [cell.strip() for cell in page.rows["plain"]]
    assert cells[:2] == ["Attack alone", "a"]
    assert cells[4] == score(summary["mean_ssim"]) + interval(summary["mean_ssim_interval"])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda r: r["source"].update(content_hash="0" * 64), "different sources"),
        (lambda r: r["targets"]["image_id"].__setitem__(0, 9999), "other images of the same"),
        (lambda r: r["targets"]["victim"].__setitem__(0, 1), "or in other victims"),
    ],
)
def test_other_images_are_not_paired_and_said_so(tmp_path: Path, change: Any, why: str) -> None:
    found, page = _pair(tmp_path, change)
    first = found["differences"][0]["targets"]
    assert not first["paired"]
    assert why in first["why"]
    assert first["mean_ssim"] == 0
    low, high = first["mean_ssim_interval"]
    assert low < -0.02 < 0.02 < high  # images differ by far more than 0
    assert f"Unpaired, since {first['why']}" in page.prose


def test_an_unpaired_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)

    def record(mean: float, n: int) -> dict[str, Any]:
        scores = rng.normal(mean, 1, n).tolist()
        return {"side": {"victim": [0] * n, "image_id": [*range(n)]},
                "source": {"content_hash": n}, "settings": {"good_threshold": 0},
                "methods": {"plain": {"side": {"ssim": scores, "haarpsi": scores}}}}  # fmt: skip

    hits = 0
    for _ in range(40):
        found = difference(record(0, 30), record(0.5, 60), "plain", "side")
        low, high = found["mean_ssim_interval"]
        hits += low < 0.5 < high
    assert hits >= 34


def test_a_method_that_one_run_lacks_is_not_compared(tmp_path: Path) -> None:
    found, page = _pair(tmp_path, lambda record: record["methods"].pop("edm_x3"))
    assert found["methods"]["edm_x3"][1] is None
    assert "edm_x3" not in {entry["method"] for entry in found["differences"]}
    assert "not evaluated" in page.prose


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    folders = [tmp_path / top / "same" for top in ("x", "y")]
    for folder in folders:
        write(folder / "evaluation", evaluation()[0], {})
    assert list(open_runs(folders)) == ["x/same", "y/same"]
