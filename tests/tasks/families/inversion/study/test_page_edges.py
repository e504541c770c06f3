"""Inversion studies with little or nothing in them, hostile ones, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.families.inversion.study import image_grids as inversion_plates
from tasks.families.inversion.study.figure_specs import describe_figures
from tests.tasks.families.inversion.inversions import (
    PAGES,
    estimate,
    find,
    inversion,
    page_of,
)
from tests.tasks.page.study_pages import Arrays, Edge, Edges, Made

Record = dict[str, Any]
edges = Edges()


def small(**changes: Any) -> Made:
    """One source, a grid of three by two, nothing else; anything may be asked for otherwise."""
    asked = {"sources": 1, "lams": (0.1, 1.0, 5.0), "betas": (1e-2, 1e-4), "n": 6, "n_shown": 3,
             "layers": False, "unicon": False}  # fmt: skip
    return inversion(**(asked | changes))


@edges.says("one network of each setting, so there are no intervals",
            n_seeds=1, layers=True, unicon=True)  # fmt: skip
def one_seed(record: Record, pictures: Arrays) -> None:
    pass


@edges.says("digits, 8×8: Adam was not run.", attacks=("paper",))
def an_attack_that_was_not_run(record: Record, pictures: Arrays) -> None:
    record["attacks"].append({"name": "strong", "title": "Adam", "ours": True})


@edges.says("no attack was run", "no sweet spot was sought", "cannot be compared", attacks=())
def no_attack_at_all(record: Record, pictures: Arrays) -> None:
    assert [figure["kind"] for figure in record["figures"]] == ["table3", "heatmaps"]


@edges.says("no setting of the grid costs at most 1 point of accuracy and leaks less; ",
            "; the study’s setting, MixCon (1, 10⁻⁴) , has an accuracy of 9",
            "digits, 8×8: no sweet spot under “the paper's descent”;")  # fmt: skip
def no_sweet_spot_was_found(record: Record, pictures: Arrays) -> None:
    for spot in record["sweet_spots"]:
        record["cells"][spot["cell"]]["roles"].remove(f"sweet spot {spot['attack']}")
        spot.update(cell=None, accuracy_loss=None, leakage=None)
    for name in list(pictures):
        if name[0].isdigit() and name.partition("/")[0] not in ("0", "4"):
            del pictures[name]


@edges.says("no setting that keeps the accuracy leaks less than no defence.")
def no_defence_is_no_sweet_spot(record: Record, pictures: Arrays) -> None:
    for spot in record["sweet_spots"]:
        spot["cell"] = spot["vanilla"]


@edges.says("On digits, 8×8 , no sweet spot was sought.", sweet_spots=False)
def no_vanilla_and_no_setting_of_the_paper(record: Record, pictures: Arrays) -> None:
    for cell in record["cells"]:
        cell["roles"] = []


@edges.says("Without pictures here: MixCon (1, 10⁻⁴).", lams=(0.1, 1.0), sweet_spots=False)
def a_setting_of_the_paper_that_diverged(record: Record, pictures: Arrays) -> None:
    cell = find(record, "mixcon 1 0.0001")[1]
    assert (cell["roles"], cell["diverged"]) == (["paper"], 3)


@edges.says("training diverged with every seed")
def everything_diverged(record: Record, pictures: Arrays) -> None:
    keys = ("accuracy", "train_accuracy", "distance", "min_distance")
    for cell in record["cells"]:
        cell.update({key: estimate([]) for key in keys}, diverged=3, attacks={})
        for seed in cell["seeds"]:
            seed.update(dict.fromkeys(keys), diverged=True, attacks={})
    record["sweet_spots"] = []


@edges.says("digits")
def a_cell_that_is_missing_in_the_grid(record: Record, pictures: Arrays) -> None:
    find(record, "mixcon 1 0.01")[1]["in_grid"] = False


@edges.says("Nothing was run on this source.", "photos, 8×8 nothing was measured", sources=2)
def a_source_without_cells(record: Record, pictures: Arrays) -> None:
    record["cells"] = [cell for cell in record["cells"] if cell["source"] == "digits"]
    record["sweet_spots"] = [s for s in record["sweet_spots"] if s["source"] == "digits"]


@edges.says("The study has no source of images.", sources=0)
def nothing(record: Record, pictures: Arrays) -> None:
    record |= {"claims": [], "settings": {}}


@edges.says("Without pictures here: vanilla, layer 3; MixCon (1, 10⁻⁴), layer 3.", layers=True)
def pictures_of_a_layer_that_were_left_out(record: Record, pictures: Arrays) -> None:
    for k, cell in enumerate(record["cells"]):
        for attack in cell["attacks"] if cell["cut"] == 3 else ():
            pictures.pop(f"{k}/{attack}", None)


@edges.says("1 part of the study failed , so the page lacks what follows from it: train <x>",
            "digits, 8×8: 2 of 7 settings have one network each, so no interval.")  # fmt: skip
def parts_that_failed_or_were_trained_once(record: Record, pictures: Arrays) -> None:
    record["failed"] = [{"unit": "train <x>", "why": "no memory"}]
    for name in ("mixcon 0.1 0.01", "mixcon 1 0.01"):
        cell = find(record, name)[1]
        cell["seeds"] = cell["seeds"][:1]


@edges.parametrised()
def test_a_study_with_little_in_it_has_a_page(edge: Edge, tmp_path: Path) -> None:
    record, pictures = small(**edge.asked)
    edge.change(record, pictures)
    record["figures"] = describe_figures(record)
    prose = page_of(tmp_path, (record, pictures)).prose
    assert [said for said in edge.said if said not in prose] == []


def test_many_pictures_are_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inversion_plates, "MOST_PICTURES", 1300)
    page = page_of(tmp_path, small())
    assert re.search("The first [12] images? of 3", page.prose)


def _cell(name: str, **changes: Any) -> Callable[[Record, Arrays], None]:
    def change(record: Record, pictures: Arrays) -> None:
        find(record, name)[1].update(changes)

    return change


def _outside_the_grid(lam: float) -> dict[str, Any]:
    return {"defence": {"kind": "mixcon", "lam": lam, "beta": 0.01}}


def _spot_elsewhere(record: Record, pictures: Arrays) -> None:
    record["sweet_spots"][0]["cell"] = 99


def _one_picture(record: Record, pictures: Arrays) -> None:
    pictures["0/paper"] = pictures["0/paper"][:1]


@pytest.mark.parametrize(
    ("change", "asked", "said"),
    [
        (_cell("vanilla", source="x"), {},
         "cell 0 is of source 'x'; expected one of ['digits']"),
        (_cell("mixcon 1 0.01", **_outside_the_grid(7.0)), {},
         "is said to be in the grid, but its λ, β (7.0, 0.01) are not among"),
        (_cell("mixcon 1 0.01", **_outside_the_grid(5.0)), {},
         "figure 'heatmaps' has two cells at λ=5, β=0.01 of source 'digits'"),
        (_spot_elsewhere, {}, "has cell 99, but the study has 7 cells"),
        (lambda _r, pictures: pictures.pop("digits/original"), {},
         "no 'digits/original', the images that the record shows of source"),
        (lambda _r, pictures: pictures.pop("0/paper"), {},
         "no '0/paper', what the paper's descent made of 'vanilla'"),
        (_one_picture, {}, "hold (1, 8, 8) in '0/paper' for originals of (3, 8"),
        (lambda *_: None, {"n": 2}, "and 2 scores; make the study's record again"),
    ],
)  # fmt: skip
def test_a_record_that_cannot_be_drawn_is_refused(
    change: Callable[[Record, Arrays], None], asked: dict[str, Any], said: str
) -> None:
    record, pictures = small(**asked)
    change(record, pictures)
    with pytest.raises(ValueError, match=re.escape(said)):
        PAGES.page.render(record, pictures)
