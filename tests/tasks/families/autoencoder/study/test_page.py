"""The page of a recovery study: its figures, tables and CSVs agree with the record; records with
little in them have a page; hostile ones are refused."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.families.autoencoder.study.figure_specs import best_victim, describe_figures, group_name
from tasks.page.formats import percent
from tests.tasks.families.autoencoder.study_records import (
    LEVELS,
    MASKS,
    METHODS,
    PAGES,
    THRESHOLDS,
    TITLES,
    cell,
    cells,
    figure_of,
    page_of,
    recovery,
    rows_of,
    set_errors,
    set_rates,
)
from tests.tasks.page.study_pages import Arrays, Edge, Edges, Made, written
from tests.tasks.pages import Page

FIGURES = ("masks", "examples", "rates-accurate", "rates-approximate", "rates-psnr", "thresholds",
           "moderate-1", "control", "contraction", "noise")  # fmt: skip
BEST = "unet-leaky_relu"
Record = dict[str, Any]


made, folder = written(PAGES, recovery)


def test_figures_are_those_the_record_has_numbers_for(made: Made) -> None:
    record = made[0]
    figures = describe_figures(record)
    assert tuple(figure["name"] for figure in figures) == FIGURES
    perfect = [v["name"] for v in record["victims"]][:3]
    assert figures[2]["victims"] == figures[3]["victims"] == perfect
    assert (figures[5]["victim"], figures[5]["mask"]) == (BEST, "window")
    assert (figures[6]["victim"], best_victim(record)["name"]) == ("fc20-moderate", BEST)  # type: ignore[index]
    bare = recovery(moderate=False, control=False, noise=False, contraction=False, n_groups=0)[0]
    kinds = [figure["kind"] for figure in describe_figures(bare)]
    assert kinds == ["masks", "rates", "rates", "rates", "thresholds"]


@pytest.mark.parametrize("value", ["accurate", "approximate", "psnr"])
def test_rates_are_their_csv_and_the_record(folder: Path, made: Made, value: str) -> None:
    rows = rows_of(folder, f"rates-{value}")
    assert len(rows) == 3 * len(MASKS) * len(METHODS) * len(LEVELS)
    for row in rows:
        where = {key: row[key] for key in ("victim", "mask", "method")}
        where |= {"level": float(row["level"])}
        found = cell(made[0], sigma=0.0, split="train", **where)
        shown = [float(row[key]) for key in (value, f"{value} low", f"{value} high")]
        assert (shown, float(row["loss"])) == (found[value], found["loss"])


def test_the_other_tables_are_the_record(folder: Path, made: Made) -> None:
    record, page = made[0], Page(folder / "recovery.html")
    for row in rows_of(folder, "thresholds"):
        found = cell(record, victim=BEST, mask="window", sigma=0.0, split="train",
                     level=float(row["level"]), method=row["method"])  # fmt: skip
        count = found["by_threshold"][THRESHOLDS.index(float(row["threshold"]))]
        assert (int(row["count"]), float(row["share"])) == (count, count / 20)
    for method, title in zip(METHODS, TITLES, strict=True):
        texts = page.rows[f"moderate-1 {title}"][1:]
        for mask, text in zip(MASKS, texts, strict=True):
            found = cell(record, victim="fc20-moderate", mask=mask, method=method, sigma=0.0,
                         split="train")  # fmt: skip
            low, high = (f"{100 * end:.1f}" for end in found["approximate"][1:])
            assert text == f"{percent(found['approximate'][0])}[{low}, {high}]"
    for row, method in zip(rows_of(folder, "summary"), METHODS, strict=True):
        mine = cells(record, victim=BEST, level=1e-8, sigma=0.0, split="train", method=method)
        share = sum(found["n_accurate"] for found in mine) / 120
        assert (row["victim"], row["method"], row["train n"]) == (BEST, method, "120")
        assert float(row["train accurate"]) == share
    radii = rows_of(folder, "contraction")
    for victim in record["victims"]:
        for split, expected in victim["contraction"].items():
            own = [r for r in radii if (r["victim"], r["split"]) == (victim["name"], split)]
            assert [float(row["radius"]) for row in own] == expected
    assert len(rows_of(folder, "cells")) == len(record["cells"])
    names = [name for name in page.rows if name.startswith("cell ")]
    lowest = [c for c in record["cells"] if c["level"] == 1e-8 or c["victim"] == "fc20-moderate"]
    assert len(names) == len(lowest)


def test_control_shows_training_beside_test_images(tmp_path: Path) -> None:
    record, pictures = recovery()
    where = {"victim": BEST, "method": "unknown", "mask": "half", "split": "test"}
    set_rates(cell(record, **where), 1, 3)
    prose = page_of(tmp_path, (record, pictures)).prose
    assert "1 of 480 with paper, mask unknown came back accurately" in prose
    row = next(r for r in rows_of(tmp_path, "control") if all(r[k] == v for k, v in where.items()))
    assert (row["accurate"], row["approximate"]) == ("0.05", "0.15")


def test_plates_show_every_result_with_its_psnr(folder: Path, made: Made) -> None:
    record, pictures = made
    figure = figure_of(folder, "examples")
    shown = re.findall(r'<span class="score (\w*)" title="[^"]*">([^<]*)</span>', figure)
    errors = [
        pictures[f"{group_name(shown)}/{method}/mse"][k]
        for shown in record["shown"]
        for k in range(3)
        for method in METHODS
    ]
    for error, (kind, text) in zip(errors, shown, strict=True):
        assert text == f"{-10 * math.log10(error):.1f}"
        assert kind == ("accurate" if error < 1e-7 else "approximate" if error < 5e-4 else "")
    images = re.findall(r'<td><img src="data:image/png;base64,([^"]*)" alt="([^"]*)"', figure)
    assert len(images) == 3 * 3 * (2 + len(METHODS) + 2)
    assert images[3][1] == "image 2: paper, mask unknown"


def small(**changes: Any) -> Made:
    """Two masks, three methods and two levels; anything may be asked for otherwise."""
    asked = {"victims": 2, "masks": ("random", "half"), "methods": ("iteration", "unknown", "ddnm"),
             "levels": (1e-4, 1e-8), "n": 8, "n_groups": 0}  # fmt: skip
    return recovery(**(asked | changes))


edges = Edges()


@edges.says("10⁻⁸ was not reached (3.1e−8 after 9,000 epochs)", "Without test images: U-Net, soft")
def a_level_that_was_not_reached(record: Record, _pictures: Arrays) -> None:
    victim = record["victims"][1]
    victim["levels"], victim["last"] = victim["levels"][:1], {"loss": 3.1e-8, "epoch": 9000}
    lost = (victim["name"], 1e-8)
    record["cells"] = [c for c in record["cells"] if (c["victim"], c["level"]) != lost]


@edges.says("It copies its input")
def a_network_that_copies_is_not_overfitted(record: Record, _pictures: Arrays) -> None:
    victim = next(v for v in record["victims"] if v["name"] == "fc20-moderate")
    victim["test_loss"] = 2 * victim["levels"][-1]["loss"]


@edges.says("no network was attacked: none reached", moderate=False)
def no_level_was_reached(record: Record, _pictures: Arrays) -> None:
    for victim in record["victims"]:
        victim["levels"] = []
    record["cells"] = []


@edges.says("The study has no network.", victims=0, moderate=False, masks=(), methods=())
def nothing(record: Record, _pictures: Arrays) -> None:
    record["claims"] = []


@edges.says("Not everything was run: paper, mask unknown: run on 4 of 8 cells.")
def a_method_that_was_not_run_everywhere(record: Record, _pictures: Arrays) -> None:
    record["cells"] = [
        c
        for c in record["cells"]
        if not (c["method"] == "unknown" and c["mask"] == "half")
        and not (c["method"] == "ddnm" and c["level"] == 1e-4 and c["victim"] != "fc20-moderate")
    ]


@edges.says("no training image came back accurately", "No image reaches accurate recovery in any")
def all_rates_are_zero(record: Record, _pictures: Arrays) -> None:
    for found in record["cells"]:
        set_errors(found, [0.01] * 8)


@edges.says()
def contraction_that_is_known_in_part(record: Record, _pictures: Arrays) -> None:
    record["victims"][0]["contraction"] = {"train": [None, 0.5, 700.0], "test": []}
    record["victims"][1]["contraction"] = None


@edges.says("No pictures of this cell were kept.", "Without pictures here: paper, mask unknown.",
            n_groups=2)  # fmt: skip
def pictures_that_were_not_kept(record: Record, pictures: Arrays) -> None:
    first, second = (group_name(shown) for shown in record["shown"])
    lost = [f"{second}/unknown", f"{second}/iteration/mse", "masks/half"]
    for name in [*lost, *(name for name in pictures if name.startswith(first))]:
        del pictures[name]


@edges.says(n_groups=1)
def unknown_numbers(record: Record, pictures: Arrays) -> None:
    for found in record["cells"]:
        set_errors(found, [])
        found.update(dict.fromkeys(("n_applied", "endings", "mask_accuracy", "seconds", "psnr")))
    for victim in record["victims"]:
        victim |= {"test_loss": None, "seconds": None, "contraction": {"train": [None]}}
        victim["last"]["loss"] = None
    record["seconds"] = {"train": None, "inpainter": None, "recover": None}
    errors = np.array([np.nan, np.inf, 0.0])
    pictures[f"{group_name(record['shown'][0])}/unknown/mse"] = errors


@edges.parametrised()
def test_a_study_with_little_in_it_has_a_page(edge: Edge, tmp_path: Path) -> None:
    record, pictures = small(**edge.asked)
    edge.change(record, pictures)
    record["figures"] = describe_figures(record)
    prose = page_of(tmp_path, (record, pictures)).prose
    assert [said for said in edge.said if said not in prose] == []


def test_generic_methods_without_the_lowest_level_are_still_in_its_tables(tmp_path: Path) -> None:
    record, pictures = small()
    lost = ("ddnm", 1e-8)
    record["cells"] = [c for c in record["cells"] if (c["method"], c["level"]) != lost]
    set_rates(cell(record, victim=BEST, method="ddnm", mask="half", split="train", sigma=0.0), 0, 4)
    page_of(tmp_path, (record, pictures))
    row = rows_of(tmp_path, "summary")[2]
    assert (row["method"], row["train n"], row["test n"]) == ("ddnm", "16", "0")
    assert int(row["train n_approximate"]) >= 4


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("rates", {"value": "ssim"}),
        ("rates", {"victims": ["x"]}),
        ("thresholds", {"mask": "x"}),
        ("table", {"victim": "x"}),
    ],
)
def test_a_figure_that_cannot_be_drawn_is_refused(kind: str, changes: dict[str, Any]) -> None:
    record = small()[0]
    next(figure for figure in record["figures"] if figure["kind"] == kind).update(changes)
    with pytest.raises(ValueError, match=r"figure .* shows .*; expected"):
        PAGES.page.render(record, {})


@pytest.mark.parametrize("part", ["original", "unknown", "unknown/mse", "mask/unknown"])
def test_pictures_that_do_not_belong_are_refused(part: str) -> None:
    record, pictures = small(n_groups=1)
    name = f"{group_name(record['shown'][0])}/{part}"
    pictures[name] = pictures[name][:1]
    with pytest.raises(ValueError, match=r"the record shows 3 images of .* pictures hold 1 in"):
        PAGES.page.render(record, pictures)
