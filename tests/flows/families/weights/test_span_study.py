"""The rows of `palimpsest study span`: trained, attacked, kept, and shown on a page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flows.families.weights.span_study import KINDS, SPAN, cpu, tiny
from flows.study import make_record
from recon_core.types import no_progress
from storage.files import write_json
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
        assert all(ran.seconds is not None for ran in outcome.values())
        assert all(run_unit(unit, 1).seconds is None for unit in plan.first_units())
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
