"""The grid of `palimpsest study span-networks`, and a few of its cells from images to a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.papers import studies
from benchmarks.results.page import build_pages
from flows.cli.main import app
from flows.families.weights.span_grid import search_operations
from flows.study import study
from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.attacks.span.search import SpanAttack
from recon_core.experiments import KKT
from tasks.campaign.plan import AFTER_VICTIMS
from tasks.families.weights.study.settings import Cell, Study

SHAPE = (3, 32, 32)
PRESETS = ("cpu", "paper")


def points(made: Study) -> dict[str, dict[str, Cell]]:
    """Of every point its cells, by attack."""
    found: dict[str, dict[str, Cell]] = {}
    for cell in made.cells:
        name, attack = cell.name.split("; ")
        found.setdefault(name, {})[attack] = cell
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_every_value_of_every_axis_occurs_one_setting_from_the_base(preset: str) -> None:
    made = study("span-networks", preset)
    base = made.cells[0].at
    for name, axis in made.axes.items():
        panels = ("base", name) if name != "attack" else ("base",)
        found = {cell.at[name] for cell in made.cells if cell.panel in panels}
        assert found == set(axis.values)
    for cell in made.cells:
        assert set(cell.at) == set(made.axes)
        changed = {name for name in base if cell.at[name] != base[name]} - {"attack"}
        n_changed = {"base": 0, "layers, known start": 2, "decay, standard start": 2}
        assert len(changed) == n_changed.get(cell.panel, 1)


@pytest.mark.parametrize("preset", PRESETS)
def test_both_attacks_of_a_point_are_on_the_same_victims(preset: str) -> None:
    for both in points(study("span-networks", preset)).values():
        assert set(both) == {"span", "KKT"}
        span, kkt = (vars(both[name].experiment) for name in ("span", "KKT"))
        for name in set(span) - {*AFTER_VICTIMS, *KKT.after_victims} | {"released"}:
            assert span[name] == kkt[name]
        assert isinstance(span["attack"], SpanAttack)
        assert isinstance(kkt["attack"], KKTAttack)


def test_the_search_has_the_separations_time_by_operations() -> None:
    """300 iterations, two sources for each of 1.25 directions an image, 45 filters, 225 places."""
    for name in ("base", "200 images", "width 10 per image", "MSE"):
        kkt = points(study("span-networks", "cpu"))[name]["KKT"]
        n = kkt.images_per_run
        search = kkt.experiment.attack
        assert isinstance(search, KKTAttack)
        work = search.n_iterations * search_operations(kkt.experiment, SHAPE)
        assert work == pytest.approx(1.5 * 300 * 2 * 6 * (1.25 * n) ** 2 * 45 * 225, rel=0.05)


SOME = ["study", "span-networks", "--only", "20 images", "--data", "photos", "--device", "cpu",
        "--workers", "1", "--set", "n_tests=20", "--set", "experiment.training.epochs=200",
        "--set", "cells.1.experiment.attack.save_at=20"]  # fmt: skip


@pytest.mark.slow
def test_some_cells_go_from_images_to_the_results_page(tmp_path: Path) -> None:
    store = tmp_path / "span"
    done = CliRunner().invoke(app, [*SOME, "--store", str(store)])
    assert done.exit_code == 0, done.output
    record: dict[str, Any] = json.loads((store / "study.json").read_bytes())
    assert set(record["seconds"]) == {"train", "attack", "score"}
    assert [cell["name"] for cell in record["cells"]] == ["20 images; span", "20 images; KKT"]
    assert len(record["claims"]) == 20
    one, other = (cell["victim"]["train_loss"] for cell in record["cells"])
    assert one == other
    kept = {path.name for path in (store / "heldout" / "victims").iterdir()}
    assert len(kept) >= 4
    out = tmp_path / "claims.json"
    studies.main([str(store), "--json", str(out)])
    record_text = (store / "study.json").read_text()
    pages = build_pages({"claims/span.json": out.read_text(),
                         "studies/span-networks/study.json": record_text})  # fmt: skip
    page = pages["span.md"]
    assert "# Span attack (ours)" in page
    assert "20 images; KKT" in page
