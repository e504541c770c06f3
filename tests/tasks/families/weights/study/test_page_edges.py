"""Studies with little or nothing in them, hostile ones, and what is refused."""

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
from tests.tasks.page.study_pages import Arrays, Edge, Edges

Record = dict[str, Any]
edges = Edges()


@edges.says("with 2 classes, 1 per class came back", grid=1, decays=0, losses=0, level=0.6)
def one_cell_only(record: Record, pictures: Arrays) -> None:
    pass


@edges.says("no training picture was scored", "The study has no cell", grid=0, decays=0, losses=0)
def no_cell_at_all(record: Record, pictures: Arrays) -> None:
    pass


@edges.says("no training picture came back good in any cell; the best mean SSIM is", level=-1.0)
def nothing_is_good(record: Record, pictures: Arrays) -> None:
    pass


@edges.says("No pictures of this cell were kept", "No kernels of this cell were kept")
def a_cell_without_pictures(record: Record, pictures: Arrays) -> None:
    for name in ("cell_0001/original", "cell_0001/reconstruction", "kernels_0017"):
        del pictures[name]


@edges.says("Not on these axes: 5 classes, 5 per class: ")
def a_cell_that_has_no_place(record: Record, pictures: Arrays) -> None:
    record["cells"][4]["at"] = {"n_classes": 7, "per_class": 5}


def _one_claim(outcome: str) -> Callable[[Record, Arrays], None]:
    def change(record: Record, pictures: Arrays) -> None:
        record["claims"] = [record["claims"][0] | {"outcome": outcome}]

    return change


for _outcome, _said in (
    ("holds", "The one claim of the paper holds here;"),
    ("does not hold", "Of 1 claim of the paper, 0 hold here, 1 does not;"),
    ("undecided", "Of 1 claim of the paper, 0 hold here, 1 is undecided;"),
    ("not testable", "Of 1 claim of the paper, 0 hold here, 1 is not testable on this study;"),
):
    edges.says(_said, grid=2, decays=0, losses=0)(_one_claim(_outcome))


@edges.says("the margin of its images is not known",
            "Without a number: 2 classes, weight decay 0.0001;")  # fmt: skip
def every_number_is_unknown(record: Record, pictures: Arrays) -> None:
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


@edges.parametrised()
def test_a_study_with_little_in_it_has_a_page(edge: Edge, tmp_path: Path) -> None:
    record, pictures = study(**edge.asked)
    edge.change(record, pictures)
    prose = page_of(tmp_path, (record, pictures)).prose
    assert [said for said in edge.said if said not in prose] == []


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


def _figure(**changes: Any) -> Callable[[Record, Arrays], None]:
    return lambda record, _pictures: record["figures"][0].update(changes)


def _same_place(record: Record, pictures: Arrays) -> None:
    record["cells"][1]["at"] = record["cells"][0]["at"]


def _one_picture(record: Record, pictures: Arrays) -> None:
    pictures["cell_0001/original"] = pictures["cell_0001/original"][:1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_figure(x="width"), "figure 'good' has x 'width'; expected an axis of the study"),
        (_figure(value="haarpsi"), "shows value 'haarpsi'; expected one of"),
        (_figure(kind="scatter", cells=[7], x="loss"), "shows cell 7, but the study has 2 cells"),
        (_figure(kind="scatter", cells=[], x="ssim"), "has x 'ssim'; expected one of"),
        (_figure(kind="lines", x="n_classes", series=None, baselines=[]), "same n_classes of one"),
        (_same_place, "has two cells at per_class=1, n_classes=2"),
        (_one_picture, "cell 1 shows 4 images, but the pictures hold 1 orig"),
    ],
)
def test_a_record_that_cannot_be_drawn_is_refused(
    change: Callable[[Record, Arrays], None], said: str
) -> None:
    record, pictures = study(grid=2, decays=0, losses=0)
    change(record, pictures)
    with pytest.raises(ValueError, match=re.escape(said)):
        PAGES.page.render(record, pictures)
