"""Studies with little or nothing in them, hostile ones, and what is refused."""

from __future__ import annotations

import re
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
from tests.tasks.page.study_pages import floats


def _emptied(record: dict[str, Any]) -> None:
    """None wherever a record may have it."""
    for cell in record["cells"]:
        for side in ("targets", "decoys"):
            cell[side] |= dict.fromkeys(
                ("good_fraction", "good_interval", "mean_ssim", "mean_ssim_interval", "best_ssim",
                 "mean_ssim3", "n_good_ssim3")
            )  # fmt: skip
        cell |= {"auc": None, "vote": None, "seconds": None}
        cell["victim"] |= {key: [None, None] for key in ("train_loss", "train_accuracy",
                           "test_accuracy", "n_effective", "mean_ssim")}  # fmt: skip
    images = record["images"]
    for key in ("label", "margin", "loss", "ssim", "ssim3", "decoy_ssim"):
        images[key] = [None] * len(images["cell"])
    for claim in record["claims"]:
        claim.update(theirs=None, ours=None, outcome="not testable")
    record["seconds"] = {"attack": None, "score": None}
    for figure in record["figures"]:
        if "value" in figure:
            figure["value"] = "n_effective" if figure["kind"] == "lines" else "mean_ssim"


def test_what_is_unknown_is_a_dash(tmp_path: Path) -> None:
    record, pictures = study()
    _emptied(record)
    page = page_of(tmp_path, (record, pictures))
    cells = [text.strip() for text in page.rows["cell 0"]]
    assert cells[2] == "0 of 4–" or cells[2].endswith("of 4–")
    assert set(cells[4:8]) == {"–"}
    assert {cells[10], cells[-1]} == {"–"}
    assert "the margin of its images is not known" in page.prose
    assert "Without a number: 2 classes, weight decay 0.0001;" in page.prose
    squares = re.findall(r'<g class="square">', figure_of(tmp_path, "good"))
    assert len(squares) == figure_of(tmp_path, "good").count('class="void-square" x=') == 9
    assert all(row["mean_ssim"] == "" for row in rows_of(tmp_path, "good"))


def test_a_line_is_broken_where_a_number_is_unknown(tmp_path: Path) -> None:
    record, pictures = study(grid=0, losses=0)
    record["figures"][0]["value"] = "test_accuracy"
    record["cells"][2]["victim"]["test_accuracy"] = [None, None]
    record["cells"][3]["victim"]["test_accuracy"] = [None, 0.25]
    page_of(tmp_path, (record, pictures))
    figure = figure_of(tmp_path, "decays")
    first = re.findall(r'<g class="s0 m\d+">(.*?)\n</g>', figure, re.DOTALL)[0]
    assert "polyline" not in first
    assert first.count('class="marker"') == 2
    assert [row["test_accuracy"] for row in rows_of(tmp_path, "decays")][:2] == ["0.3", ""]
    assert rows_of(tmp_path, "decays")[2]["test_accuracy"] == "0.25"


def test_one_cell_only(tmp_path: Path) -> None:
    page = page_of(tmp_path, study(grid=1, decays=0, losses=0, level=0.6))
    assert "with 2 classes, 1 per class came back" in page.prose
    assert "the least" not in page.prose
    assert "2 networks were trained in one cell and attacked 4 times each." in page.prose
    assert figure_of(tmp_path, "good").count('class="void-square" x=') == 8


def test_no_cell_at_all(tmp_path: Path) -> None:
    record, pictures = study(grid=0, decays=0, losses=0)
    page = page_of(tmp_path, (record, pictures))
    assert "no training picture was scored" in page.prose
    assert "The study has no cell" in page.prose


def test_when_nothing_is_good(tmp_path: Path) -> None:
    record, pictures = study(level=-1.0)
    page = page_of(tmp_path, (record, pictures))
    assert "no training picture came back good in any cell; the best mean SSIM is" in page.prose
    assert "None is good, that is, above 0.4" in page.prose
    assert floats(r"--share: ([\d.]+)", figure_of(tmp_path, "good")) == [0.0] * 9


def test_a_cell_without_pictures_says_so(tmp_path: Path) -> None:
    record, pictures = study()
    for name in ("cell_0001/original", "cell_0001/reconstruction", "kernels_0017"):
        del pictures[name]
    page = page_of(tmp_path, (record, pictures))
    assert "No pictures of this cell were kept" in page.prose
    assert "No kernels of this cell were kept" in page.prose
    assert len(page.images) == 2 * (sum(len(c["shown"]) for c in record["cells"]) - 4)


def test_cells_that_have_no_place_are_named_not_dropped(tmp_path: Path) -> None:
    record, pictures = study()
    record["cells"][4]["at"] = {"n_classes": 7, "per_class": 5}
    page = page_of(tmp_path, (record, pictures))
    assert "Not on these axes: 5 classes, 5 per class: " in page.prose
    assert len(rows_of(tmp_path, "good")) == 9


def _changed(**changes: Any) -> dict[str, Any]:
    record = study(grid=2, decays=0, losses=0)[0]
    record["figures"][0] |= changes
    return record


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (_changed(x="width"), "figure 'good' has x 'width'; expected an axis of the study"),
        (_changed(value="haarpsi"), "shows value 'haarpsi'; expected one of"),
        (_changed(kind="scatter", cells=[7], x="loss"), "shows cell 7, but the study has 2 cells"),
        (_changed(kind="scatter", cells=[], x="ssim"), "has x 'ssim'; expected one of"),
        (_changed(kind="lines", x="n_classes", series=None, baselines=[]), "same n_classes of one"),
    ],
)
def test_a_figure_that_cannot_be_drawn_is_refused(record: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        PAGES.page.render(record, {})


def test_two_cells_at_one_place_are_refused() -> None:
    record, pictures = study(grid=2, decays=0, losses=0)
    record["cells"][1]["at"] = record["cells"][0]["at"]
    with pytest.raises(ValueError, match="has two cells at per_class=1, n_classes=2"):
        PAGES.page.render(record, pictures)


def test_pictures_that_do_not_belong_are_refused() -> None:
    record, pictures = study(grid=2, decays=0, losses=0)
    pictures["cell_0001/original"] = pictures["cell_0001/original"][:1]
    with pytest.raises(ValueError, match="cell 1 shows 4 images, but the pictures hold 1 orig"):
        PAGES.page.render(record, pictures)
