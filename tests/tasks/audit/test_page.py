"""The page of an audit: its answer first, and every number of it the record's."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.audit.page import describe_figures, front_figure
from tasks.audit.tables import front_table, points, share
from tests.tasks.audit.records import DIVERGED, PAGES, RATES, REFUSED, audit, nothing, weights
from tests.tasks.page.study_pages import Made, written
from tests.tasks.pages import Page

made, folder = written(PAGES, audit)


@pytest.fixture
def page(folder: Path) -> Page:
    return Page(folder / "audit.html")


def test_the_first_strip_has_scores_and_says_what_is_good(folder: Path, made: Made) -> None:
    source = (folder / "audit.html").read_text()
    strip = source.partition('<div class="sides')[2].partition("</div>")[0]
    scores = re.findall(r'<span class="score( good)?">([\d.]+)</span>', strip)
    found = [entry["mean_ssim"] for entry in made[0]["exposed"][:8]]
    found += [entry["ssim"] for entry in made[0]["decoys_shown"][:4]]
    assert [float(score) for _good, score in scores] == [round(value, 2) for value in found]
    assert [bool(good) for good, _score in scores] == [value > 0.4 for value in found]


def test_the_table_has_every_share_of_the_record(page: Page, made: Made) -> None:
    record = made[0]
    for cell in record["cells"][:-1]:
        row = page.rows[f"cell {cell['number']}"]
        assert cell["name"] in row[0]
        assert row[1].strip() == (cell["effect"] or {"word": ""})["word"]
        for text, attack in zip(row[2:7], record["attacks"], strict=True):
            found = cell["attacks"][attack["name"]]
            if found["status"] == "refused":
                assert text == "not run1"
                continue
            key = "good_at" if attack["kind"] == "reconstruction" else "found_at"
            entry = found[key]["0.01"]
            low, high = (share(end).removesuffix(" %") for end in entry["interval"])
            assert text == f"{share(entry['mean'])}[{low}, {high}]"
        assert row[7].startswith(share(cell["accuracy"]["test"]))
        expected = "" if cell["base"] else points(cell["accuracy"]["change"])
        assert row[8].startswith(expected)
    assert f"no numbers: {DIVERGED}" in page.rows["cell 18"][1]


def test_all_numbers_are_there_at_every_rate(page: Page, made: Made) -> None:
    cell = made[0]["cells"][0]
    row = page.rows["span 0"]
    for k, rate in enumerate(RATES):
        good, found = (cell["attacks"]["span"][key][f"{rate:g}"] for key in ("good_at", "found_at"))
        assert row[2 + k].startswith(share(good["mean"]))
        assert row[6 + k].startswith(share(found["mean"]))
    numbers = cell["attacks"]["span"]
    assert row[10] == f"{numbers['n_good']} of {numbers['n']}"
    assert page.rows["loss 0"][10] == "–"


def test_exposed_images_have_their_reasons(page: Page, made: Made) -> None:
    for place, entry in enumerate(made[0]["exposed"], 1):
        row = page.rows[f"image {place}"]
        assert row[0] == f"{entry['class']}image {entry['image_id']}"
        assert row[3] == f"{entry['n_back']} of {entry['n_in']}"
        assert row[4] == f"{entry['mean_ssim']:.2f}"
        assert row[7] == (entry["why"] or "–")


def test_the_tables_beside_the_page_are_the_record(folder: Path, page: Page, made: Made) -> None:
    cells = made[0]["cells"]
    names = {"cells", "attacks", "victims", "exposed", "classes", "decoys", "checks", "front",
             "rates", "epsilon"}  # fmt: skip
    assert set(page.downloads) == {f"{name}.csv" for name in names}
    rows = PAGES.rows_of(folder, "cells")
    assert [row["name"] for row in rows] == [cell["name"] for cell in cells]
    assert [row["leak"] for row in rows[:2]] == [str(c["leak"]["mean"]) for c in cells[:2]]
    assert rows[-1]["failed"] == DIVERGED
    attacks = PAGES.rows_of(folder, "attacks")
    assert len(attacks) == 5 * len(cells)
    refused = [row for row in attacks if row["why"] == REFUSED]
    assert [(row["name"], row["attack"]) for row in refused] == [(cells[4]["name"], "kkt")]
    first = cells[0]["attacks"]["span"]
    assert float(attacks[0]["good at 0.001 high"]) == first["good_at"]["0.001"]["interval"][1]
    assert attacks[0]["found at 0.05"] == str(first["found_at"]["0.05"]["mean"])
    victims = PAGES.rows_of(folder, "victims")
    assert len(victims) == 12 * 18
    each = [float(row["span good at 0.01"]) for row in victims[:12]]
    assert each == first["good_at"]["0.01"]["each"]
    assert [float(row["test accuracy"]) for row in victims[:12]] == cells[0]["accuracy"]["each"]


def labels_of(figure: str) -> list[tuple[float, float, float, float, str]]:
    """Boxes of the labels of marks, letters as wide as a bold one of 14 px, and their texts."""
    found = []
    for attributes, text in re.findall(r"<text ([^>]*letter halo[^>]*)>([^<]*)<", figure):
        x, y = (float(re.search(rf'{name}="([^"]+)"', attributes)[1]) for name in "xy")  # type: ignore[index]
        half = 4.0 * len(text)
        found.append((x - half, y - 10, x + half, y, text))
    return found


def marks_of(svg: str) -> list[tuple[float, float, float, float, str]]:
    """Boxes of the marks."""
    circles = re.findall(r'class="marker" cx="([^"]+)" cy="([^"]+)" r="3.2"', svg)
    found = [(float(x) - 3, float(y) - 3, float(x) + 3, float(y) + 3, "mark") for x, y in circles]
    for corners in re.findall(r'class="marker" points="([^"]+)"', svg):
        x, y = zip(*(map(float, corner.split(",")) for corner in corners.split()), strict=True)
        found.append((min(x), min(y), max(x), max(y), "mark"))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_labels_of_the_front_lie_on_no_other_and_on_no_mark(seed: int) -> None:
    record, pictures = audit()
    rng = np.random.default_rng(seed)
    record["cells"] = record["cells"][: 11 if seed else None]
    for cell in record["cells"][1:]:
        if seed and cell["leak"]:  # most of them in one corner
            place = rng.choice([0.02, 0.98]) + rng.normal(0, 0.02)
            cell["leak"] |= {"mean": min(1.0, abs(place)), "interval": None}
            cell["accuracy"] |= {"test": 0.74 + rng.normal(0, 0.01), "test_interval": None}
    figure = next(f for f in describe_figures(record) if f["name"] == "front")
    svg = front_figure(record, pictures, figure).rows[0].panels[0].svg
    labels, marks = labels_of(svg), marks_of(svg)
    assert len(marks) == len(front_table("front", record).columns["cell"])
    for k, one in enumerate(labels):
        for other in [*labels[k + 1 :], *marks]:
            across = one[2] <= other[0] or other[2] <= one[0]
            assert across or one[3] <= other[1] or other[3] <= one[1], (one, other)


def test_the_front_is_drawn_at_leak_and_accuracy(folder: Path, made: Made) -> None:
    rows = PAGES.rows_of(folder, "front")
    kept = {row["name"] for row in rows if row["on_front"] == "True"}
    assert kept == {cell["name"] for cell in made[0]["cells"] if cell["on_front"]}
    figure = PAGES.figure_of(folder, "front")
    line = re.findall(r'class="curve thin" points="([^"]*)"', figure)[0].split()
    assert len(line) == len(kept)
    titles = re.findall(r"<title>(.*?): leak", figure)
    assert set(titles) == {row["name"] for row in rows}


def test_rates_are_drawn_for_both_kinds_of_attacks(folder: Path, made: Made) -> None:
    figure = PAGES.figure_of(folder, "rates")
    found = made[0]["cells"][0]["attacks"]
    told = figure.partition("told from images it never saw")[2]
    for k, name in enumerate(("span", "span_known", "kkt", "loss", "likelihood_ratio")):
        points_of = re.findall(rf'<g class="s{k} m\d+">.*?points="([^"]*)"', told, re.DOTALL)[0]
        heights = [float(point.split(",")[1]) for point in points_of.split()]
        means = [found[name]["found_at"][f"{rate:g}"]["mean"] for rate in RATES]
        assert heights == pytest.approx([250 - 222 * mean for mean in means], abs=0.06)
    rows = PAGES.rows_of(folder, "rates")
    assert [row["good"] for row in rows if row["attack"] == "loss"] == [""] * 4


def test_epsilon_has_leak_and_accuracy_in_its_order(folder: Path, made: Made) -> None:
    rows = PAGES.rows_of(folder, "epsilon")
    assert [row["epsilon"] for row in rows] == ["1.0", "8.0", "50.0", ""]
    tested = [made[0]["cells"][k]["accuracy"]["test"] for k in (11, 12, 13, 0)]
    assert [float(row["accuracy"]) for row in rows] == tested


def test_other_audits_have_pages(tmp_path: Path) -> None:
    """One file, of which no accuracy is known; attacks that were all refused; a failed base."""
    given, refused, failed = weights(), nothing(), copy.deepcopy(nothing())
    page = PAGES.page_of(tmp_path / "given", given)
    assert [figure["name"] for figure in given[0]["figures"]] == ["rates"]
    assert page.rows["cell 2"][4] == "not run1"
    assert page.rows["image 1"][3] == "yes"
    assert PAGES.rows_of(tmp_path / "given", "cells")[0]["test accuracy"] == ""
    page = PAGES.page_of(tmp_path / "refused", refused)
    assert all(text == "not run1" for text in page.rows["cell 0"][2:7])
    assert page.images == []
    failed[0]["cells"][0] |= {"failed": DIVERGED, "attacks": {}, "accuracy": None}
    failed[0]["figures"] = describe_figures(failed[0])
    page = PAGES.page_of(tmp_path / "failed", failed)
    assert DIVERGED in page.rows["cell 0"][1]


def test_figures_are_those_that_have_numbers() -> None:
    record = copy.deepcopy(audit()[0])
    assert [f["name"] for f in describe_figures(record)] == ["front", "rates", "epsilon"]
    for cell in record["cells"]:
        cell["epsilon"] = 1.0 if cell["number"] == 6 else None
        cell["accuracy"] = None
    assert [f["name"] for f in describe_figures(record)] == ["rates"]


def test_pictures_of_another_record_are_refused() -> None:
    record, pictures = audit()
    fewer: dict[str, Any] = pictures | {"exposed/original": pictures["exposed/original"][:3]}
    with pytest.raises(ValueError, match="shows 24 images of exposed, but the pictures hold 3"):
        PAGES.page.render(record, fewer)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0 %"),
        (0.004, "0.4 %"),
        (0.66, "66 %"),
        (0.998, "99.8 %"),
        (1.0, "100 %"),
    ],
)
def test_shares_never_round_to_none_or_all(value: float | None, text: str) -> None:
    assert share(value) == text


def test_changes_have_their_sign() -> None:
    texts = [points(change) for change in (-0.03, 0.0, -0.0001, 0.004, None)]
    assert texts == ["−3.0", "0.0", "0.0", "+0.4", "–"]
