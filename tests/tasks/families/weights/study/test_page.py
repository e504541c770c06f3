"""The page of a study: one file without requests, whose figures, tables and CSVs agree."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tasks.page.formats import percent
from tests.tasks.families.weights.study.study_records import (
    DECAYS,
    PAGES,
    figure_of,
    page_of,
    rows_of,
    study,
)
from tests.tasks.page.study_pages import Made, floats, written
from tests.tasks.pages import Page

BASE, PLOT = 250, 222  # of a panel: where y = 0 is drawn, and the height from there to the top


made, folder = written(PAGES, study)


def test_a_heatmaps_squares_are_its_csv_and_the_record(folder: Path, made: Made) -> None:
    cells = {cell["number"]: cell for cell in made[0]["cells"]}
    rows = rows_of(folder, "good")
    assert [int(row["cell"]) for row in rows] == list(range(9))
    for row in rows:
        cell = cells[int(row["cell"])]
        assert float(row["n_good"]) == cell["targets"]["n_good"] / 2
        assert float(row["share"]) == cell["targets"]["good_fraction"]
        assert [int(row[f"at {axis}"]) for axis in cell["at"]] == list(cell["at"].values())
        ends = [float(row[end]) / cell["n_images"] for end in ("low", "high")]
        assert ends == pytest.approx(cell["targets"]["good_interval"])
    squares = re.findall(
        r'<g class="square"><title>(.*?)</title>(.*?)</g>', figure_of(folder, "good")
    )
    drawn = {title.partition(":")[0]: body for title, body in squares}
    most = max(float(row["n_good"]) for row in rows)
    for row in rows:
        body, value = drawn[row["name"]], float(row["n_good"])
        assert re.findall(r">([^<]+)</text>", body) == [f"{value:g}", percent(float(row["share"]))]
        assert floats(r"--share: ([\d.]+)", body) == [pytest.approx(value / most, abs=1e-4)]


def test_lines_are_their_csv_with_intervals_and_baselines(folder: Path, made: Made) -> None:
    cells, rows = made[0]["cells"], rows_of(folder, "decays")
    for row in rows:
        cell = cells[int(row["cell"])]
        assert float(row["n_good"]) == cell["targets"]["n_good"] / 2
        assert float(row["at weight_decay"]) == cell["at"]["weight_decay"]
        assert row["baseline"] == str(cell["at"]["weight_decay"] == 0)
    figure = figure_of(folder, "decays")
    top = max(floats(r'text-anchor="end">(\d+)</text>', figure))
    for k, n_classes in ((0, "2"), (2, "10")):
        mine = [r for r in rows if r["at n_classes"] == n_classes and r["baseline"] == "False"]
        assert [float(row["at weight_decay"]) for row in mine] == list(DECAYS[1:])
        group = re.findall(rf'<g class="s{k} m\d+">(.*?)\n</g>', figure, re.DOTALL)[0]
        line = re.findall(r'class="curve targets" points="([^"]*)"', group)[0].split()
        drawn = [float(point.split(",")[1]) for point in line]
        assert drawn == pytest.approx([_height(row["n_good"], top) for row in mine], abs=0.06)
        lows, highs = zip(*re.findall(r'whisker" d="M[\d.]+ ([\d.]+)V([\d.]+)', group), strict=True)
        for ends, key in ((lows, "low"), (highs, "high")):
            expected = [_height(row[key], top) for row in mine]
            assert [float(end) for end in ends] == pytest.approx(expected, abs=0.06)


def _height(value: str, top: float) -> float:
    return BASE - PLOT * float(value) / top


def test_a_baseline_may_be_any_cell(tmp_path: Path) -> None:
    record, pictures = study(grid=1, losses=0)
    record["figures"][2]["baselines"] = [0, 3]
    page_of(tmp_path, (record, pictures))
    rows = [row for row in rows_of(tmp_path, "decays") if row["baseline"] == "True"]
    assert [int(row["cell"]) for row in rows] == [0, 3, 1, 5]
    figure = figure_of(tmp_path, "decays")
    assert sorted(re.findall(r'class="axis letter"[^>]*>(\w)</text>', figure)) == list("ABCD")
    keys = re.findall(r"<b>(\w)</b>&nbsp; ([^<]*): ", figure)
    rows.sort(key=lambda row: -float(row["n_good"]))
    assert keys == [(name, row["name"]) for name, row in zip("ABCD", rows, strict=True)]


def test_texts_are_categories_in_their_order(folder: Path, made: Made) -> None:
    rows = rows_of(folder, "losses")
    assert [row["at loss"] for row in rows] == made[0]["axes"]["loss"]["values"]
    assert [float(row["mean_ssim"]) for row in rows] == [
        cell["targets"]["mean_ssim"] for cell in made[0]["cells"] if cell["panel"] == "loss"
    ]


def test_every_dot_of_a_scatter_is_a_row_of_its_csv(folder: Path, made: Made) -> None:
    images, rows = made[0]["images"], rows_of(folder, "hard-ones")
    wanted = [k for k, cell in enumerate(images["cell"]) if cell >= 17]
    for key in ("loss", "ssim", "decoy_ssim", "image_id"):
        assert [float(row[key]) for row in rows] == [images[key][k] for k in wanted]


def test_kernels_are_their_csv_and_the_pictures(folder: Path, made: Made) -> None:
    kernels, rows = made[1]["kernels_0017"], rows_of(folder, "kernels")
    values = np.array([row["values"].split() for row in rows], np.uint8)
    np.testing.assert_array_equal(values.reshape(kernels.shape), kernels)
    shown = re.findall(r'<img src="data:image/png;base64,([^"]*)"', figure_of(folder, "kernels"))
    drawn = [np.asarray(Image.open(io.BytesIO(base64.b64decode(tile)))) for tile in shown]
    np.testing.assert_array_equal(np.stack(drawn).transpose(0, 3, 1, 2), kernels)


def test_the_table_of_cells_is_the_record(folder: Path, made: Made) -> None:
    table = rows_of(folder, "cells")
    for cell, row in zip(made[0]["cells"], table, strict=True):
        decoys = cell["decoys"]["mean_ssim_interval"]
        assert float(row["decoys mean_ssim_interval high"]) == decoys[1]
        assert (row["n_effective"], row["runs unfitted"], row["seconds"]) == ("5.5", "1", "61.0")
    outcomes = [row["outcome"] for row in rows_of(folder, "claims")]
    assert outcomes == ["holds", "does not hold", "undecided"]


def test_pairs_are_shown_with_their_scores(folder: Path, made: Made) -> None:
    record, pictures = made
    page, images = Page(folder / "study.html"), record["images"]
    alts = [image["alt"] or "" for image in page.images]
    rows = [row for cell in record["cells"] for row in cell["shown"]]
    assert [int(row["row"]) for row in rows_of(folder, "shown")] == rows
    assert [alt for alt in alts if alt.startswith("what came back")] == [
        f"what came back of it, SSIM {images['ssim'][row]:.2f}" for row in rows
    ]
    assert [alt for alt in alts if alt.startswith("Training picture")] == [
        f"Training picture {images['image_id'][row]} of network {images['victim'][row]}"
        for row in rows
    ]
    found = [i for i in page.images if (i["alt"] or "").startswith("what came back")][5]
    content = base64.b64decode(str(found["src"]).partition(",")[2])
    picture = np.asarray(Image.open(io.BytesIO(content))).transpose(2, 0, 1)
    np.testing.assert_array_equal(picture, pictures["cell_0001/reconstruction"][1])
