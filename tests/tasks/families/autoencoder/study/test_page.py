"""The page of a recovery study: its figures and tables are the record's; with little in it; and
what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.families.autoencoder.study.figure_specs import describe_figures, group_name
from tests.tasks.page.kept import PAGES as KINDS
from tests.tasks.page.kept import kept
from tests.tasks.page.study_pages import Arrays, Made, written

PAGES = KINDS["recovery"]
Record = dict[str, Any]
made, folder = written(PAGES, lambda: kept("recovery"))


def test_figures_are_those_the_record_has_numbers_for(made: Made) -> None:
    for record in (made[0], kept("recovery", "autoencoder")[0]):
        found, drawn = describe_figures(record), record["figures"]
        assert [figure["name"] for figure in found] == [figure["name"] for figure in drawn]
    assert describe_figures(record | {"victims": [], "cells": [], "shown": [], "masks": []}) == []


@pytest.mark.parametrize("value", ["accurate", "approximate", "psnr"])
def test_rates_are_their_csv_and_the_record(folder: Path, made: Made, value: str) -> None:
    rows = PAGES.rows_of(folder, f"rates-{value}")
    assert rows
    for row in rows:
        where = {key: row[key] for key in ("victim", "mask", "method")}
        where |= {"level": float(row["level"]), "sigma": 0.0, "split": "train"}
        (found,) = [cell for cell in made[0]["cells"] if where.items() <= cell.items()]
        shown = [float(row[key]) for key in (value, f"{value} low", f"{value} high")]
        assert (shown, float(row["loss"])) == (found[value], found["loss"])


def test_plates_show_every_result_with_its_psnr(folder: Path, made: Made) -> None:
    record, pictures = made
    figure = PAGES.figure_of(folder, "examples")
    shown = re.findall(r'<span class="score (\w*)" title="[^"]*">([^<]*)</span>', figure)
    names = [method["name"] for method in record["methods"]]
    groups = [group_name(shown) for shown in record["shown"]]
    errors = [
        pictures[f"{group}/{method}/mse"][k]
        for group in groups
        for k in range(len(pictures[f"{group}/original"]))
        for method in names
        if f"{group}/{method}/mse" in pictures
    ]
    for error, (kind, text) in zip(errors, shown, strict=True):
        assert text == f"{-10 * math.log10(error):.1f}".replace("-", "−")
        assert kind == ("accurate" if error < 1e-7 else "approximate" if error < 5e-4 else "")


def no_level_was_reached(record: Record, _pictures: Arrays) -> None:
    for victim in record["victims"]:
        victim["levels"] = []
    record["cells"] = record["shown"] = []


def nothing(record: Record, _pictures: Arrays) -> None:
    record |= {"claims": [], "victims": [], "masks": [], "methods": [], "cells": [], "shown": []}


def a_method_that_was_not_run_everywhere(record: Record, _pictures: Arrays) -> None:
    record["cells"] = record["cells"][:1] + record["cells"][3:]


def pictures_that_were_not_kept(record: Record, pictures: Arrays) -> None:
    first = group_name(record["shown"][0])
    for name in [name for name in pictures if name.startswith((first, "masks/"))]:
        del pictures[name]


def unknown_numbers(record: Record, pictures: Arrays) -> None:
    for found in record["cells"]:
        found.update(dict.fromkeys(("n_applied", "endings", "mask_accuracy", "seconds")))
        found |= {key: [None] * 3 for key in ("psnr", "accurate", "approximate")}
    for victim in record["victims"]:
        victim |= {"test_loss": None, "seconds": None, "contraction": {"train": [None]}}
        victim["last"]["loss"] = None
    record["seconds"] = {"train": None, "inpainter": None, "recover": None}
    name = f"{group_name(record['shown'][0])}/unknown/mse"
    pictures[name] = np.array([np.nan, np.inf, 0.0, 1.0])[: len(pictures[name])]


@pytest.mark.parametrize(
    "change",
    [
        no_level_was_reached,
        nothing,
        a_method_that_was_not_run_everywhere,
        pictures_that_were_not_kept,
        unknown_numbers,
    ],
)
def test_a_study_with_little_in_it_has_a_page(
    change: Callable[[Record, Arrays], None], tmp_path: Path
) -> None:
    record, pictures = kept("recovery")
    change(record, pictures)
    record["figures"] = describe_figures(record)
    PAGES.page_of(tmp_path, (record, pictures))


@pytest.mark.parametrize("part", ["original", "unknown", "unknown/mse", "mask/unknown"])
def test_pictures_that_do_not_belong_are_refused(part: str) -> None:
    record, pictures = kept("recovery")
    name = f"{group_name(record['shown'][0])}/{part}"
    pictures[name] = pictures[name][:1]
    with pytest.raises(ValueError, match=r"the record shows 4 images of .* pictures hold 1 in"):
        PAGES.page.render(record, pictures)
