"""The page of an audit: its answer first, and every number of it the record's."""

from __future__ import annotations

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


def test_the_tables_of_the_page_are_the_record(folder: Path, page: Page, made: Made) -> None:
    record = made[0]
    for cell in record["cells"][:-1]:
        row = page.rows[f"cell {cell['number']}"]
        assert cell["name"] in row[0]
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
    assert f"no numbers: {DIVERGED}" in page.rows["cell 18"][1]
    numbers, row = record["cells"][0]["attacks"]["span"], page.rows["span 0"]
    for k, rate in enumerate(RATES):
        assert row[2 + k].startswith(share(numbers["good_at"][f"{rate:g}"]["mean"]))
        assert row[6 + k].startswith(share(numbers["found_at"][f"{rate:g}"]["mean"]))
    assert row[10] == f"{numbers['n_good']} of {numbers['n']}"
    for place, entry in enumerate(record["exposed"], 1):
        row = page.rows[f"image {place}"]
        assert row[3] == f"{entry['n_back']} of {entry['n_in']}"
        assert (row[4], row[7]) == (f"{entry['mean_ssim']:.2f}", entry["why"] or "–")
    strip = (folder / "audit.html").read_text().partition('<div class="sides')[2]
    first = re.findall(r'<span class="score(?: good)?">([\d.]+)</span>', strip.split("</div>")[0])
    shown = [entry["mean_ssim"] for entry in record["exposed"][:8]]
    shown += [entry["ssim"] for entry in record["decoys_shown"][:4]]
    assert first == [f"{value:.2f}" for value in shown]


def test_the_tables_beside_the_page_are_the_record(folder: Path, page: Page, made: Made) -> None:
    cells = made[0]["cells"]
    names = {"cells", "attacks", "victims", "exposed", "classes", "decoys", "checks", "front",
             "rates", "epsilon"}  # fmt: skip
    assert set(page.downloads) == {f"{name}.csv" for name in names}
    rows = PAGES.rows_of(folder, "cells")
    assert [row["name"] for row in rows] == [cell["name"] for cell in cells]
    assert rows[0]["leak"] == str(cells[0]["leak"]["mean"])
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
    rows = PAGES.rows_of(folder, "epsilon")
    assert [row["epsilon"] for row in rows] == ["", "1.0", "8.0", "50.0"]
    tested = [cells[k]["accuracy"]["test"] for k in (0, 11, 12, 13)]
    assert [float(row["test accuracy"]) for row in rows] == tested


def boxes_of(svg: str) -> tuple[list[Any], list[Any]]:
    """Boxes of the labels of marks, letters as wide as a bold one of 14 px, and of the marks."""
    labels, marks = [], []
    for attributes, text in re.findall(r"<text ([^>]*letter halo[^>]*)>([^<]*)<", svg):
        x, y = (float(re.search(rf'{name}="([^"]+)"', attributes)[1]) for name in "xy")  # type: ignore[index]
        labels.append((x - 4.0 * len(text), y - 10, x + 4.0 * len(text), y))
    for x, y in re.findall(r'class="marker" cx="([^"]+)" cy="([^"]+)" r="3.2"', svg):
        marks.append((float(x) - 3, float(y) - 3, float(x) + 3, float(y) + 3))
    for corners in re.findall(r'class="marker" points="([^"]+)"', svg):
        at = np.array([corner.split(",") for corner in corners.split()], float)
        marks.append((*at.min(0), *at.max(0)))
    return labels, marks


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
    labels, marks = boxes_of(front_figure(record, pictures, figure).rows[0].panels[0].svg)
    assert len(marks) == front_table(record).n_rows
    for k, one in enumerate(labels):
        for other in [*labels[k + 1 :], *marks]:
            across = one[2] <= other[0] or other[2] <= one[0]
            assert across or one[3] <= other[1] or other[3] <= one[1], (one, other)


def test_the_figures_draw_the_record(folder: Path, made: Made) -> None:
    record = made[0]
    figure = PAGES.figure_of(folder, "front")
    (line,) = re.findall(r'class="curve thin" points="([^"]*)"', figure)
    assert len(line.split()) == sum(cell["on_front"] for cell in record["cells"])
    drawn = {row["name"] for row in PAGES.rows_of(folder, "front")}
    assert set(re.findall(r"<title>(.*?): leak", figure)) == drawn
    found = record["cells"][0]["attacks"]
    told = PAGES.figure_of(folder, "rates").partition("told from images it never saw")[2]
    for k, name in enumerate(("span", "span_known", "kkt", "loss", "likelihood_ratio")):
        points_of = re.findall(rf'<g class="s{k} m\d+">.*?points="([^"]*)"', told, re.DOTALL)[0]
        heights = [float(point.split(",")[1]) for point in points_of.split()]
        means = [found[name]["found_at"][f"{rate:g}"]["mean"] for rate in RATES]
        assert heights == pytest.approx([250 - 222 * mean for mean in means], abs=0.06)


def test_other_audits_have_pages(tmp_path: Path) -> None:
    """One file, of which no accuracy is known; attacks that were all refused; a failed base."""
    given, refused, failed = weights(), nothing(), nothing()
    page = PAGES.page_of(tmp_path / "given", given)
    assert [figure["name"] for figure in given[0]["figures"]] == ["rates"]
    assert (page.rows["cell 2"][4], page.rows["image 1"][3]) == ("not run1", "yes")
    assert PAGES.rows_of(tmp_path / "given", "cells")[0]["test accuracy"] == ""
    page = PAGES.page_of(tmp_path / "refused", refused)
    assert all(text == "not run1" for text in page.rows["cell 0"][2:7])
    assert page.images == []
    failed[0]["cells"][0] |= {"failed": DIVERGED, "attacks": {}, "accuracy": None}
    failed[0]["figures"] = describe_figures(failed[0])
    page = PAGES.page_of(tmp_path / "failed", failed)
    assert DIVERGED in page.rows["cell 0"][1]


def test_pictures_of_another_record_are_refused() -> None:
    record, pictures = audit()
    fewer: dict[str, Any] = pictures | {"exposed/original": pictures["exposed/original"][:3]}
    with pytest.raises(ValueError, match="shows 24 images of exposed, but the pictures hold 3"):
        PAGES.page.render(record, fewer)


def test_shares_never_round_to_none_or_all_and_changes_have_their_sign() -> None:
    shares = {None: "–", 0.0: "0 %", 0.004: "0.4 %", 0.66: "66 %", 0.998: "99.8 %", 1.0: "100 %"}
    assert {value: share(value) for value in shares} == shares
    texts = [points(change) for change in (-0.03, 0.0, -0.0001, 0.004, None)]
    assert texts == ["−3.0", "0.0", "0.0", "+0.4", "–"]
