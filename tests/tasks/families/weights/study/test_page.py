"""The page of a study: its figures, tables and CSVs agree; with little in it; and refusals."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.tasks.page.kept import PAGES as KINDS
from tests.tasks.page.kept import kept
from tests.tasks.page.study_pages import Arrays, Made, floats, written
from tests.tasks.pages import Page

PAGES = KINDS["study"]
Record = dict[str, Any]
BASE, PLOT = 250, 222  # of a panel: where y = 0 is drawn, and the height from there to the top
made, folder = written(PAGES, lambda: kept("study"))


def test_a_heatmaps_squares_are_its_csv_and_the_record(folder: Path, made: Made) -> None:
    cells = {cell["number"]: cell for cell in made[0]["cells"]}
    rows = PAGES.rows_of(folder, "good")
    squares = re.findall(
        r'<g class="square"><title>(.*?)</title>(.*?)</g>', PAGES.figure_of(folder, "good")
    )
    drawn = {title.partition(":")[0]: body for title, body in squares}
    (value,) = {f["value"] for f in made[0]["figures"] if f["name"] == "good"}
    most = max(float(row[value]) for row in rows)
    assert len(rows) == len(squares) > 3
    for row in rows:
        cell = cells[int(row["cell"])]
        assert float(row[value]) == cell["targets"][value]
        share = floats(r"--share: ([\d.]+)", drawn[row["name"]])
        assert share == [pytest.approx(float(row[value]) / most, abs=1e-4)]


def test_lines_are_their_csv_with_intervals_and_baselines(tmp_path: Path) -> None:
    record, pictures = kept("study", "weight-decay")
    PAGES.page_of(tmp_path, (record, pictures))
    (line,) = [f for f in record["figures"] if f["name"] == "good-fraction-2"]
    rows = PAGES.rows_of(tmp_path, line["name"])
    cells = {cell["number"]: cell for cell in record["cells"]}
    for row in rows:
        cell = cells[int(row["cell"])]
        assert float(row[line["value"]]) == pytest.approx(cell["targets"][line["value"]])
        assert row["baseline"] == str(cell["at"]["weight_decay"] == 0)
    figure = PAGES.figure_of(tmp_path, line["name"])
    heights = [float(p.split(",")[1]) for p in _points(figure)]
    shown = [float(row[line["value"]]) for row in rows if row["baseline"] == "False"]
    scale = (BASE - np.array(heights)) / np.array(shown)
    assert np.ptp(scale) < 0.01 * scale.max()
    assert figure.count('class="whisker"') + figure.count("whisker") >= len(shown)


def _points(figure: str) -> list[str]:
    return re.findall(r'class="curve targets" points="([^"]*)"', figure)[0].split()


def test_every_dot_of_a_scatter_is_a_row_of_its_csv(folder: Path, made: Made) -> None:
    images, rows = made[0]["images"], PAGES.rows_of(folder, "boundary")
    (scatter,) = [f for f in made[0]["figures"] if f["kind"] == "scatter"]
    wanted = [k for k, cell in enumerate(images["cell"]) if cell in scatter["cells"]]
    for key in ("ssim", "decoy_ssim", "image_id"):
        assert [float(row[key]) for row in rows] == [images[key][k] for k in wanted]


def test_kernels_are_their_csv_and_the_pictures(folder: Path, made: Made) -> None:
    kernels = np.concatenate([v for name, v in made[1].items() if name.startswith("kernels")])
    rows = PAGES.rows_of(folder, "kernels")
    values = np.array([row["values"].split() for row in rows], np.uint8)
    np.testing.assert_array_equal(values.reshape(kernels.shape), kernels)


def test_pairs_are_shown_with_their_scores(folder: Path, made: Made) -> None:
    record, pictures = made
    page, images = Page(folder / "study.html"), record["images"]
    rows = [row for cell in record["cells"] for row in cell["shown"]]
    assert [int(row["row"]) for row in PAGES.rows_of(folder, "shown")] == rows
    found = [i for i in page.images if (i["alt"] or "").startswith("what came back")]
    assert [image["alt"] for image in found] == [
        f"what came back of it, SSIM {images['ssim'][row]:.2f}" for row in rows
    ]
    n = len(record["cells"][0]["shown"])
    content = base64.b64decode(str(found[n + 1]["src"]).partition(",")[2])
    picture = np.asarray(Image.open(io.BytesIO(content))).transpose(2, 0, 1)
    number = record["cells"][1]["number"]
    np.testing.assert_array_equal(picture, pictures[f"cell_{number:04d}/reconstruction"][1])


def without_pictures(record: Record, pictures: Arrays) -> None:
    for name in [n for n in pictures if n.startswith(("cell_0001", "kernels"))]:
        del pictures[name]


def off_the_axes(record: Record, pictures: Arrays) -> None:
    record["cells"][4]["at"] = dict.fromkeys(record["cells"][4]["at"], 77)


def every_number_is_unknown(record: Record, pictures: Arrays) -> None:
    scores = ("good_fraction", "good_interval", "mean_ssim", "mean_ssim_interval", "best_ssim")
    asked = ("train_loss", "train_accuracy", "test_accuracy", "n_effective", "mean_ssim")
    for cell in record["cells"]:
        for side in ("targets", "decoys"):
            cell[side] |= dict.fromkeys((*scores, "mean_ssim3", "n_good_ssim3"))
        cell |= {"auc": None, "vote": None, "seconds": None}
        cell["victim"] |= {key: [None] * len(cell["victims"]) for key in asked}
    images = record["images"]
    for key in ("label", "margin", "loss", "ssim", "ssim3", "decoy_ssim"):
        images[key] = [None] * len(images["cell"])
    for claim in record["claims"]:
        claim.update(theirs=None, ours=None, outcome="not testable")
    record["seconds"] = {"attack": None, "score": None}
    for figure in record["figures"]:
        if "value" in figure:
            figure["value"] = "n_effective" if figure["kind"] == "lines" else "mean_ssim"


def nothing(record: Record, pictures: Arrays) -> None:
    record |= {"cells": [], "figures": []}
    record["images"] = {key: [] for key in record["images"]}


@pytest.mark.parametrize(
    "change", [without_pictures, off_the_axes, every_number_is_unknown, nothing]
)
def test_a_study_with_little_in_it_has_a_page(
    change: Callable[[Record, Arrays], None], tmp_path: Path
) -> None:
    record, pictures = kept("study")
    change(record, pictures)
    PAGES.page_of(tmp_path, (record, pictures))


@pytest.mark.parametrize("kind", ["heatmap", "lines"])
def test_two_cells_in_one_place_are_refused(kind: str) -> None:
    record, pictures = kept("study")
    panel = next(f["panel"] for f in record["figures"] if f["kind"] == kind)
    one, other = [c for c in record["cells"] if c["panel"] == panel][-2:]
    one["at"] = other["at"]
    with pytest.raises(ValueError, match="two cells at"):
        PAGES.page.render(record, pictures)
