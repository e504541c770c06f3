"""The page of a recovery study: one file without requests, whose figures, tables and CSVs agree."""

from __future__ import annotations

import base64
import io
import math
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

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
    set_rates,
)
from tests.tasks.page.study_pages import Made, written
from tests.tasks.pages import Page

FIGURES = ("masks", "examples", "rates-accurate", "rates-approximate", "rates-psnr", "thresholds",
           "moderate-1", "control", "contraction", "noise")  # fmt: skip
BEST = "unet-leaky_relu"


made, folder = written(PAGES, recovery)


def test_figures_are_those_the_record_has_numbers_for(made: Made) -> None:
    record = made[0]
    figures = describe_figures(record)
    assert tuple(figure["name"] for figure in figures) == FIGURES
    assert (
        figures[2]["victims"] == figures[3]["victims"] == [v["name"] for v in record["victims"]][:3]
    )
    assert (figures[5]["victim"], figures[5]["mask"]) == (BEST, "window")
    assert (figures[6]["victim"], figures[6]["where"]) == (
        "fc20-moderate",
        "autoencoder paper, table 1",
    )
    bare = describe_figures(
        recovery(moderate=False, control=False, noise=False, contraction=False, n_groups=0)[0]
    )
    kinds = [figure["kind"] for figure in bare]
    assert kinds == ["masks", "rates", "rates", "rates", "thresholds"]


@pytest.mark.parametrize("value", ["accurate", "approximate", "psnr"])
def test_rates_are_their_csv_and_the_record(folder: Path, made: Made, value: str) -> None:
    rows = rows_of(folder, f"rates-{value}")
    assert len(rows) == 3 * len(MASKS) * len(METHODS) * len(LEVELS)
    keys = ("victim", "mask", "method")
    for row in rows:
        where = {key: row[key] for key in keys} | {"level": float(row["level"])}
        found = cell(made[0], sigma=0.0, split="train", **where)
        shown = [float(row[key]) for key in (value, f"{value} low", f"{value} high")]
        assert shown == found[value]
        assert float(row["loss"]) == found["loss"]


def test_thresholds_are_the_records_counts(folder: Path, made: Made) -> None:
    rows = rows_of(folder, "thresholds")
    assert len(rows) == len(LEVELS) * len(METHODS) * len(THRESHOLDS)
    for row in rows:
        found = cell(made[0], victim=BEST, mask="window", sigma=0.0, split="train",
                     level=float(row["level"]), method=row["method"])  # fmt: skip
        count = found["by_threshold"][THRESHOLDS.index(float(row["threshold"]))]
        assert (int(row["count"]), float(row["share"])) == (count, count / 20)


def test_the_moderate_table_is_the_record(folder: Path, made: Made) -> None:
    page = Page(folder / "recovery.html")
    rows = rows_of(folder, "moderate-1")
    assert len(rows) == len(MASKS) * len(METHODS)
    for method, title in zip(METHODS, TITLES, strict=True):
        texts = page.rows[f"moderate-1 {title}"][1:]
        for mask, text in zip(MASKS, texts, strict=True):
            found = cell(made[0], victim="fc20-moderate", mask=mask, method=method, sigma=0.0,
                         split="train")  # fmt: skip
            low, high = (f"{100 * end:.1f}" for end in found["approximate"][1:])
            assert text == f"{percent(found['approximate'][0])}[{low}, {high}]"


def test_control_shows_training_beside_test_images(tmp_path: Path) -> None:
    record, pictures = recovery()
    where = {"victim": BEST, "method": "unknown", "mask": "half", "split": "test"}
    set_rates(cell(record, **where), 1, 3)
    page = page_of(tmp_path, (record, pictures))
    assert "1 of 480 with paper, mask unknown came back accurately" in page.prose
    assert "3 of 480 with paper, mask unknown came back approximately" in page.prose
    assert "at most 0.8 % came back so" in page.prose
    row = next(r for r in rows_of(tmp_path, "control") if all(r[k] == v for k, v in where.items()))
    assert (row["accurate"], row["approximate"]) == ("0.05", "0.15")


def test_contraction_is_its_csv_and_the_record(folder: Path, made: Made) -> None:
    rows = rows_of(folder, "contraction")
    for victim in made[0]["victims"]:
        for split, radii in victim["contraction"].items():
            mine = [r for r in rows if (r["victim"], r["split"]) == (victim["name"], split)]
            assert [float(row["radius"]) for row in mine] == radii


def test_plates_show_every_result_with_its_psnr(folder: Path, made: Made) -> None:
    record, pictures = made
    rows = rows_of(folder, "examples")
    assert len(rows) == 3 * 3 * len(METHODS)
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
    assert [float(row["mse"]) for row in rows[:3]] == errors[:: len(METHODS)][:3]
    images = re.findall(r'<td><img src="data:image/png;base64,([^"]*)" alt="([^"]*)"', figure)
    assert len(images) == 3 * 3 * (2 + len(METHODS) + 2)
    content, alt = images[3]
    assert alt == "image 2: paper, mask unknown"
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(content)))).transpose(2, 0, 1)
    np.testing.assert_array_equal(picture, pictures[f"{BEST}/1e-08/random/0/unknown"][0])


def test_the_answer_on_top_is_of_the_network_with_the_lowest_loss(folder: Path, made: Made) -> None:
    record = made[0]
    assert (best_victim(record) or {})["name"] == BEST
    page, shares = Page(folder / "recovery.html"), {}
    for row, method in zip(rows_of(folder, "summary"), METHODS, strict=True):
        mine = cells(record, victim=BEST, level=1e-8, sigma=0.0, split="train", method=method)
        shares[method] = sum(found["n_accurate"] for found in mine) / 120
        assert (row["victim"], row["method"], row["train n"]) == (BEST, method, "120")
        assert float(row["train accurate"]) == shares[method]
        texts = [text.strip() for text in page.rows[f"summary {method}"]]
        worst, best = (f"{100 * end(c['accurate'][0] for c in mine):g}" for end in (min, max))
        between = "" if worst == best else f"{worst} to {best} %"
        assert texts[1] == f"{percent(shares[method])}{between}"
        assert texts[2] == "0.0 %"
        assert texts[-1] == ("–" if method in METHODS[4:] else "640")
    assert (
        "From U-Net, leaky ReLU , trained on 20 images to a loss of 9.7e−9, "
        f"{percent(shares['iteration'])} of the training images came back accurately (f alone), "
        f"{percent(shares['unknown'])} (paper, mask unknown) and "
        f"{percent(shares['noise_aware'])} (ours, mask unknown). Of images that it was not trained "
        "on, none did, by any method. Of 3 claims of the paper, 1 holds here, 1 does not, 1 is "
        "undecided."
    ) in page.prose


def test_all_cells_at_the_lowest_level_are_in_the_page(folder: Path, made: Made) -> None:
    page, table = Page(folder / "recovery.html"), rows_of(folder, "cells")
    assert len(table) == len(made[0]["cells"])
    names = [name for name in page.rows if name.startswith("cell ")]
    lowest = [c for c in made[0]["cells"] if c["level"] == 1e-8 or c["victim"] == "fc20-moderate"]
    assert len(names) == len(lowest)
    found = cell(made[0], victim=BEST, level=1e-8, mask="half", sigma=0.0, split="train",
                 method="unknown")  # fmt: skip
    texts = [text.strip() for text in page.rows[f"cell {BEST} half 0 train unknown"]]
    share, low, high = found["accurate"]
    limits = " ".join(f"{100 * end:.1f}".removesuffix(".0") for end in (low, high)).split()
    assert texts[0] == "paper, mask unknownmask 5: lower half"
    assert texts[1:4] == ["20training", "none", f"{found['n_accurate']} of 20{percent(share)} "
                          f"[{limits[0]}, {limits[1]}]"]  # fmt: skip
    assert texts[6:] == ["640", "98.0 %", "15 converged, 5 limit", "12 s"]
    where = {"victim": BEST, "level": "1e-08", "mask": "half", "sigma": "0.0", "split": "train"}
    row = next(r for r in table if all(r[k] == v for k, v in where.items())
               and r["method"] == "unknown")  # fmt: skip
    assert [int(row[f"below {t:g}"]) for t in THRESHOLDS] == found["by_threshold"]
    assert (float(row["psnr"]), row["ended limit"], row["mask_accuracy"]) == (
        found["psnr"][0], "5", "0.98")  # fmt: skip
