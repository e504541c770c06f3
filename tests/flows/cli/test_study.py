"""`palimpsest study`: listed, priced, run from nothing, and run again for free."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from flows.families.weights.study import GRIDS
from flows.study import kind_of, study
from tasks.families.weights.study.figure_specs import describe_figures, kernels_of
from tasks.families.weights.study.settings import (
    Pace,
)

RUN = CliRunner()
STUDIES = {kind.name: kind for kind in GRIDS}
changed, to_json, command = GRIDS[0].changed, GRIDS[0].to_json, STUDIES["losses"].command
TINY = {
    "n_victims": "2",
    "n_attacks": "2",
    "runs_per_part": "2",
    "n_tests": "20",
    "cells.0.images_per_run": "20",
    "experiment.n_classes": "4",
    "experiment.victim.widths": "12,12",
    "experiment.training.epochs": "30",
    "experiment.training.batch_size": "7",
    "experiment.attack.n_candidates": "20",
    "experiment.attack.save_at": "4",
}
"""Makes of `large` one cell of two victims with 20 images of four classes."""


def words(store: Path, *more: str) -> list[str]:
    settings = [word for item in TINY.items() for word in ("--set", "=".join(item))]
    return ["study", "large", "--data", "photos", "--store", str(store), "--workers", "1",
            "--device", "cpu", *settings, *more]  # fmt: skip


def test_a_study_goes_from_images_to_a_page_and_is_not_repeated(tmp_path: Path) -> None:
    store = tmp_path / "study"
    done = RUN.invoke(app, words(store))
    assert done.exit_code == 0, done.output
    assert "200 images, width 500" in done.stdout  # a cell keeps its name
    assert "Some of very many images come back" in " ".join(done.stdout.split())
    assert {path.name for path in store.iterdir()} == STUDIES["large"].entries
    record = json.loads((store / "study.json").read_bytes())
    assert (record["name"], record["preset"]) == ("large", "cpu")
    (cell,) = record["cells"]
    assert (cell["n_images"], cell["victims"], cell["targets"]["n"]) == (20, [0, 1], 40)
    assert sum(cell["outcomes"].values()) == 4
    assert len(record["claims"]) == 3
    assert all(n is not None for n in cell["victim"]["test_accuracy"])
    page = (store / "study.html").read_text()
    assert "Many images" in page
    before = {path: path.stat().st_mtime_ns for path in (store / "heldout").rglob("*.json")}
    again = RUN.invoke(app, ["study", "large", "--store", str(store), "--device", "cpu"])
    assert again.exit_code == 0, again.output  # with the settings of the store
    assert before == {path: path.stat().st_mtime_ns for path in before}
    same = json.loads((store / "study.json").read_bytes())
    for name in ("cells", "images", "claims", "settings", "fingerprint"):
        assert same[name] == record[name]


def test_some_cells_of_a_study(tmp_path: Path) -> None:
    made = study("multiclass", "cpu", {"cells.0.images_per_run": 6}, only="2 classes, 5 each")
    (cell,) = made.cells
    assert made.only == cell.name == "2 classes, 5 each"
    assert cell.images_per_run == 6
    assert kind_of("multiclass").resolve(None, {}, tmp_path, only="5 each").only == "5 each"
    for name in STUDIES:
        some = study(name, "cpu", only=study(name, "cpu").cells[0].name)
        (figure,) = describe_figures(some)
        assert figure["cells"] == tuple(range(len(some.cells)))
        assert kernels_of(some) == []
    with pytest.raises(ValueError, match="unknown cell '7 classes'"):
        study("multiclass", "cpu", only="7 classes")


PACE = Pace(epoch_s=1e-3, training_rate=1e9, iteration_s=2e-3, attack_rate=2e9)
