"""The rows of `palimpsest study span`, from training to a page; the grid of `span-networks`, and a
few of its cells from images to the results page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.papers import studies
from benchmarks.results.page import build_pages
from flows.cli.main import app
from flows.families.weights.span_grid import search_operations
from flows.families.weights.span_study import KINDS, SPAN, cpu, tiny
from flows.study import make_record, study
from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.attacks.span.search import SpanAttack
from recon_core.experiments import KKT
from recon_core.types import no_progress
from storage.files import write_json
from tasks.campaign.plan import AFTER_VICTIMS
from tasks.families.weights.study.settings import Cell, Study
from tasks.families.weights.study.span import GIVEN, OPTIMISERS, SpanPlan
from tasks.study.executor import Outcome, run_unit
from tests.tasks.pages import Page


def plan_of(store: Path, **changes: Any) -> SpanPlan:
    return SPAN.plan(replace(tiny(), **changes), store, "cpu")


def test_the_grid_has_every_value_of_every_axis() -> None:
    rows = cpu().rows
    assert {row.images for row in rows} == set(KINDS)
    assert {row.has for row in rows} == set(GIVEN)
    assert {(r.optimiser, r.has) for r in rows} >= {
        (optimiser, has) for optimiser in OPTIMISERS for has in ("checkpoint", "known start")
    }
    assert {row.start for row in rows} == {None, 1e-4, 1e-3}
    assert {row.n for row in rows} == {50, 100, 200, 300, 400}
    assert not any(row.images == "mine" for row in cpu().chosen)


def test_every_source_but_weights_alone_gives_images_back(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    cells = {job.row.has: job.make(no_progress)[1]["cells"] for job in plan.jobs.values()}
    for has, found in cells.items():
        if has == "weights alone":
            assert found["identified"] < 10
        else:
            assert found["identified"] > 15 > 2 * found["identified decoys"]
            assert found["directions"] == 20
    used = {has: found["taken apart"] for has, found in cells.items()}
    assert (used["checkpoint"], used["gradients"]) == ("state", "gradients")


def test_training_is_its_seeds_and_leaves_torchs_generator_alone(tmp_path: Path) -> None:
    (job,) = plan_of(tmp_path, only="known start").jobs.values()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    weights = []
    for number in range(2):
        (folder := tmp_path / str(number)).mkdir()
        job._train(folder, no_progress)
        weights.append(torch.load(folder / "network.pt", weights_only=True)["model"])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_a_row_that_stands_is_not_computed_again_and_stays_on_the_page(tmp_path: Path) -> None:
    for only in ("checkpoint", "gradients"):
        plan = plan_of(tmp_path, only=only)
        outcome = {unit.name: run_unit(unit, 1) for unit in plan.first_units()}
        assert all(seconds is not None for _facts, seconds in outcome.values())
        assert all(run_unit(unit, 1)[1] is None for unit in plan.first_units())
    assert SPAN.costs(plan, "cpu")[0].seconds == 0
    record = make_record(SPAN, plan, Outcome({}, {"a row": "why"}))
    assert [row["name"].split(", ")[-1] for row in record["rows"]] == [
        *("checkpoint", "two checkpoints", "gradients"),
    ]
    SPAN.keep_pictures(tmp_path, plan, Outcome({}, {}), record)
    write_json(tmp_path / SPAN.record, record)
    page = Page(SPAN.page.write(tmp_path))
    page.check()
    assert len(page.images) == 2 * 3
    assert "a row (why)" in page.prose
    assert page.downloads["rows.csv"].count("photographs,20,") == 3
    lines = (tmp_path / "span.md").read_text().splitlines()
    assert sum(line.startswith("| photographs | 20 |") for line in lines) == 3
    other = replace(plan.study.kinds["photographs"], size=24)
    moved = plan_of(tmp_path, kinds={**plan.study.kinds, "photographs": other})
    assert moved.standing() == []


def test_a_refused_row_says_why(tmp_path: Path) -> None:
    victim = replace(tiny().victim, epochs=1, batch_size=20)
    (job,) = plan_of(tmp_path, only="weights alone", victim=victim).jobs.values()
    _arrays, facts = job.make(no_progress)
    assert "identified" not in facts["cells"]
    assert "noise" in facts["cells"]["refused"]


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
