"""Studies with little or nothing in them have a page; two cells in one place are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.families.weights.study.study_records import (
    PAGES,
    figure_of,
    page_of,
    rows_of,
    study,
)
from tests.tasks.page.study_pages import Arrays

Record = dict[str, Any]
Change = Callable[[Record, Arrays], None]


def unchanged(record: Record, pictures: Arrays) -> None:
    pass


def without_pictures(record: Record, pictures: Arrays) -> None:
    for name in ("cell_0001/original", "cell_0001/reconstruction", "kernels_0017"):
        del pictures[name]


def off_the_axes(record: Record, pictures: Arrays) -> None:
    record["cells"][4]["at"] = {"n_classes": 7, "per_class": 5}


def every_number_is_unknown(record: Record, pictures: Arrays) -> None:
    scores = ("good_fraction", "good_interval", "mean_ssim", "mean_ssim_interval", "best_ssim")
    asked = ("train_loss", "train_accuracy", "test_accuracy", "n_effective", "mean_ssim")
    for cell in record["cells"]:
        for side in ("targets", "decoys"):
            cell[side] |= dict.fromkeys((*scores, "mean_ssim3", "n_good_ssim3"))
        cell |= {"auc": None, "vote": None, "seconds": None}
        cell["victim"] |= {key: [None, None] for key in asked}
    images = record["images"]
    for key in ("label", "margin", "loss", "ssim", "ssim3", "decoy_ssim"):
        images[key] = [None] * len(images["cell"])
    for claim in record["claims"]:
        claim.update(theirs=None, ours=None, outcome="not testable")
    record["seconds"] = {"attack": None, "score": None}
    for figure in record["figures"]:
        if "value" in figure:
            figure["value"] = "n_effective" if figure["kind"] == "lines" else "mean_ssim"


@pytest.mark.parametrize(
    ("asked", "change"),
    [
        ({"grid": 1, "decays": 0, "losses": 0, "level": 0.6}, unchanged),
        ({"grid": 0, "decays": 0, "losses": 0}, unchanged),
        ({"level": -1.0}, unchanged),
        ({}, without_pictures),
        ({}, off_the_axes),
        ({}, every_number_is_unknown),
    ],
)
def test_a_study_with_little_in_it_has_a_page(
    asked: dict[str, Any], change: Change, tmp_path: Path
) -> None:
    record, pictures = study(**asked)
    change(record, pictures)
    page_of(tmp_path, (record, pictures))


def test_a_line_is_broken_where_a_number_is_unknown(tmp_path: Path) -> None:
    record, pictures = study(grid=0, losses=0)
    record["figures"][0]["value"] = "test_accuracy"
    record["cells"][2]["victim"]["test_accuracy"] = [None, None]
    record["cells"][3]["victim"]["test_accuracy"] = [None, 0.25]
    page_of(tmp_path, (record, pictures))
    figure = figure_of(tmp_path, "decays")
    first = re.findall(r'<g class="s0 m\d+">(.*?)\n</g>', figure, re.DOTALL)[0]
    assert "polyline" not in first
    assert [r["test_accuracy"] for r in rows_of(tmp_path, "decays")][:3] == ["0.3", "", "0.25"]


def test_two_cells_in_one_place_are_refused() -> None:
    for kind in ("heatmap", "lines"):
        record, pictures = study(grid=2, decays=0, losses=0)
        if kind == "heatmap":
            record["cells"][1]["at"] = record["cells"][0]["at"]
        else:
            record["figures"][0] |= {"kind": kind, "x": "n_classes", "series": None}
            record["figures"][0] |= {"baselines": []}
        with pytest.raises(ValueError, match="two cells at"):
            PAGES.page.render(record, pictures)
