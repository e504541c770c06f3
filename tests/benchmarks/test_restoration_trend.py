"""The trend's trainings, on a tiny job: all cases, one held-out set, nothing trained twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import parse_lines
from benchmarks.restore.trend import main, measure
from flows.presets import smoke
from flows.settings import to_json
from recon_core.restore import EDM, BFDnCNN
from tasks.training.validation import Validation
from tests.storage import stores


@pytest.fixture
def job(tmp_path: Path) -> Path:
    stores.store(tmp_path / "pairs", n_parts=8, size=32)
    small: dict[str, Any] = {
        "bf_dncnn": BFDnCNN(depth=3, n_channels=8, patch=2),
        "edm": EDM(size="tiny", n_steps=2),
    }
    recipe = smoke()
    plans = {
        name: replace(
            plan,
            restorer=small[name],
            training=replace(plan.training, batch_size=4),
            validation=Validation(every=1, n_pairs=4, n_parts=1),
        )
        for name, plan in recipe.restorers.items()
    }
    recipe = replace(
        recipe, restorers=plans, curation=replace(recipe.curation, mixture_fraction=1.0)
    )
    (tmp_path / "recipe.json").write_text(json.dumps(to_json(recipe)))
    return tmp_path


def test_every_case_is_trained_once_and_compared_with_the_same_pairs(job: Path) -> None:
    out = job / "trend.json"
    main([str(job), "--only", "bf_dncnn", "--quick", "--json", str(out)])
    found = parse_lines(out.read_text(), name=out.name)
    assert len(found) == 6
    assert len({m.case for m in found}) == 6
    assert len({m.reference_value for m in found}) == 1
    assert {m.case.split(", ")[-1] for m in found} == {"1 mixtures to a pair", "no mixtures"}
    cards = {path: path.read_bytes() for path in (job / "trend").glob("*/model.json")}
    assert len(cards) == 6
    held_out = {
        tuple(json.loads(text)["meta"]["validation"]["held_out_parts"]) for text in cards.values()
    }
    assert len(held_out) == 1
    main([str(job), "--only", "bf_dncnn", "--quick"])
    assert cards == {path: path.read_bytes() for path in (job / "trend").glob("*/model.json")}


def test_what_is_not_there_is_said(job: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--only gan: the job has the restorers \['bf_dncnn'"):
        next(measure(job, only="gan", n_steps=8))
    with pytest.raises(ValueError, match=r"has no recipe\.json"):
        next(measure(tmp_path / "empty", only=None, n_steps=8))
