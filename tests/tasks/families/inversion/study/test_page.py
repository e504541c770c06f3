"""The page of an inversion study: its numbers are the record's; with little in it; refusals."""

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

from tasks.families.inversion.study import page as inversion_page
from tasks.families.inversion.study.record import estimate
from tasks.families.inversion.study.tables import compared, describe_figures, front, layer_groups
from tests.tasks.page.kept import PAGES as KINDS
from tests.tasks.page.kept import kept
from tests.tasks.page.study_pages import Arrays, Made, written
from tests.tasks.pages import Page

PAGES = KINDS["inversion"]
Record = dict[str, Any]
FIGURES = ("table3", "plates", "heatmaps", "pareto", "layers", "table4")
made, folder = written(PAGES, lambda: kept("inversion"))


def find(record: Record, name: str) -> tuple[int, Record]:
    """The place of the cell with this name, and the cell."""
    (found,) = [(k, c) for k, c in enumerate(record["cells"]) if (c["name"], c["cut"]) == (name, 2)]
    return found


def test_figures_are_those_the_record_has_numbers_for(made: Made) -> None:
    assert tuple(figure["kind"] for figure in describe_figures(made[0])) == FIGURES
    bare = kept("inversion")[0]
    bare["cells"] = [c | {"roles": []} for c in bare["cells"] if c["in_grid"]]
    assert [figure["kind"] for figure in describe_figures(bare)] == ["heatmaps", "pareto"]


def test_table_3_is_the_record(folder: Path, made: Made) -> None:
    page, rows = Page(folder / "inversion.html"), PAGES.rows_of(folder, "table3")
    chosen = [(k, c) for k, c in enumerate(made[0]["cells"]) if c["roles"]]
    assert len(rows) == sum(len(cell["attacks"]) for _k, cell in chosen) > 0
    for k, cell in chosen:
        for attack, scores in cell["attacks"].items():
            row = next(r for r in rows if (r["cell"], r["attack"]) == (f"{k}", attack))
            assert float(row["accuracy"]) == cell["accuracy"]["mean"]
            assert float(row["chance"]) == scores["chance"]
            for name in ("ssim", "psim", "psnr"):
                found = [float(row[name + end]) for end in ("", " low", " high", " std", " worst")]
                ends = [scores[name][end] for end in ("mean", "low", "high")]
                assert found == [*ends, scores["std"][name], scores["worst"][name]]
            texts = [text.strip() for text in page.rows[f"table3 {k} {attack}"]]
            mean, low, high = (scores["ssim"][end] for end in ("mean", "low", "high"))
            std, worst = scores["std"]["ssim"], scores["worst"]["ssim"]
            ssim = f"{mean:.3f} ± {std:.3f} ({worst:.3f})[{low:.3f}, {high:.3f}]"
            assert texts[-4:-2] == [ssim, f"{scores['chance']:.3f}"]


def test_tables_of_figures_are_the_record(folder: Path, made: Made) -> None:
    record = made[0]
    cells, (source,) = record["cells"], record["sources"]
    heat = PAGES.rows_of(folder, "heatmaps")
    assert len(heat) == len(source["lams"]) * len(source["betas"])
    for row in heat:
        cell = cells[int(row["cell"])]
        mean = cell["accuracy"]["mean"]
        assert row["accuracy"] == ("" if mean is None else f"{mean}")
        assert {key: float(row[key]) for key in ("lam", "beta")}.items() <= cell["defence"].items()
    for row in PAGES.rows_of(folder, "layers"):
        scores = cells[int(row["cell"])]["attacks"][row["attack"]]
        assert float(row["ssim"]) == scores["ssim"]["mean"]
    for group in layer_groups(record, source):
        assert len(cuts := [cell["cut"] for _k, cell in group]) == len(set(cuts)) > 1
    table = PAGES.rows_of(folder, "cells")
    assert float(table[0]["strong ssim worst"]) == cells[0]["attacks"]["strong"]["worst"]["ssim"]
    assert len(PAGES.rows_of(folder, "seeds")) == sum(len(cell["seeds"]) for cell in cells)
    spots = PAGES.rows_of(folder, "sweet-spots")
    assert [int(row["cell"]) for row in spots] == [s["cell"] for s in record["sweet_spots"]]


def test_the_front_is_what_nothing_else_beats(folder: Path) -> None:
    points = [(0.9, 0.5), (0.95, 0.6), (0.95, 0.7), (0.8, 0.5), (0.7, 0.3), (0.99, 0.9)]
    assert front(points) == [4, 0, 1, 5]
    assert front([(0.5, 0.5), (0.5, 0.5)]) == [0, 1]
    assert front([]) == []
    rows = PAGES.rows_of(folder, "pareto")
    for attack in ("paper", "strong"):
        mine = [row for row in rows if row["attack"] == attack]
        points = [(float(row["accuracy"]), float(row["ssim"])) for row in mine]
        best = [k for k, row in enumerate(mine) if row["on_front"] == "True"]
        assert sorted(front(points)) == best
    assert {row["on_front"] for row in rows if row["attack"] == "restored"} == {"False"}


def test_table_4_sets_unicon_beside_the_nearest_mixcon(folder: Path, made: Made) -> None:
    record = made[0]
    chosen = [cell for _k, cell in compared(record, record["sources"][0])]
    (unicon,) = [cell for cell in chosen if cell["name"].startswith("unicon")]
    wanted = unicon["accuracy"]["mean"]
    known = [c for c in record["cells"] if c["in_grid"] and c["accuracy"]["mean"] is not None]
    nearest = min(known, key=lambda c: abs(c["accuracy"]["mean"] - wanted))
    assert nearest["name"] in [cell["name"] for cell in chosen]
    kinds = {row["kind"] for row in PAGES.rows_of(folder, "table4")}
    assert kinds == {"none", "unicon", "mixcon"}


def test_plates_show_each_picture_with_its_ssim(folder: Path, made: Made) -> None:
    record, pictures = made
    k, cell = find(record, "vanilla")
    shown = re.findall(
        r'<img src="data:image/png;base64,([^"]*)" alt="image 2: [^"]*">'
        r'<span class="score" title="SSIM ([\d.]+)">([\d.]+)<',
        PAGES.figure_of(folder, "plates"),
    )
    ssim = cell["seeds"][0]["attacks"]["paper"]["ssim"][2]
    assert shown[0][1:] == (f"{ssim:.3f}", f"{ssim:.2f}")
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(shown[0][0]))))
    np.testing.assert_array_equal(picture[..., 0], pictures[f"{k}/paper"][2])


def no_attack_at_all(record: Record, _pictures: Arrays) -> None:
    record |= {"attacks": [], "sweet_spots": []}
    for cell in record["cells"]:
        cell["attacks"] = {}
        for seed in cell["seeds"]:
            seed["attacks"] = {}


def no_sweet_spot_was_found(record: Record, _pictures: Arrays) -> None:
    for spot in record["sweet_spots"]:
        record["cells"][spot["cell"]]["roles"].remove(f"sweet spot {spot['attack']}")
        spot.update(cell=None, accuracy_loss=None, leakage=None)


def no_roles(record: Record, _pictures: Arrays) -> None:
    record["sweet_spots"] = []
    for cell in record["cells"]:
        cell["roles"] = []


def everything_diverged(record: Record, _pictures: Arrays) -> None:
    keys = ("accuracy", "train_accuracy", "distance", "min_distance")
    for cell in record["cells"]:
        cell.update({key: estimate([]) for key in keys}, diverged=3, attacks={})
        for seed in cell["seeds"]:
            seed.update(dict.fromkeys(keys), diverged=True, attacks={})
    record["sweet_spots"] = []


def a_source_without_cells(record: Record, _pictures: Arrays) -> None:
    record |= {"cells": [], "sweet_spots": []}


def nothing(record: Record, _pictures: Arrays) -> None:
    record |= {"claims": [], "sources": [], "cells": [], "sweet_spots": []}


def pictures_of_a_layer_that_were_left_out(record: Record, pictures: Arrays) -> None:
    for k, cell in enumerate(record["cells"]):
        for attack in cell["attacks"] if cell["cut"] == 3 else ():
            pictures.pop(f"{k}/{attack}", None)


def parts_that_failed(record: Record, _pictures: Arrays) -> None:
    record["failed"] = [{"unit": "train <x>", "why": "no memory"}]


@pytest.mark.parametrize(
    "change",
    [
        no_attack_at_all,
        no_sweet_spot_was_found,
        no_roles,
        everything_diverged,
        a_source_without_cells,
        nothing,
        pictures_of_a_layer_that_were_left_out,
        parts_that_failed,
    ],
)
def test_a_study_with_little_in_it_has_a_page(
    change: Callable[[Record, Arrays], None], tmp_path: Path
) -> None:
    record, pictures = kept("inversion")
    change(record, pictures)
    record["figures"] = describe_figures(record)
    PAGES.page_of(tmp_path, (record, pictures))


def test_many_pictures_are_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inversion_page, "MOST_PICTURES", 1300)
    assert re.search(
        "The first [12] images? of 3", PAGES.page_of(tmp_path, kept("inversion")).prose
    )


def _one_picture(_record: Record, pictures: Arrays) -> None:
    pictures["0/paper"] = pictures["0/paper"][:1]


def _few_scores(record: Record, _pictures: Arrays) -> None:
    record["cells"][0]["seeds"][0]["attacks"]["paper"]["ssim"] = [0.5] * 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _r, pictures: pictures.pop("digits/original"), "no 'digits/original'"),
        (lambda _r, pictures: pictures.pop("0/paper"), "no '0/paper'"),
        (_one_picture, "in '0/paper' for originals of (3,"),
        (_few_scores, "and 2 scores"),
    ],
)
def test_a_record_that_cannot_be_drawn_is_refused(
    change: Callable[[Record, Arrays], None], said: str
) -> None:
    record, pictures = kept("inversion")
    change(record, pictures)
    with pytest.raises(ValueError, match=re.escape(said)):
        PAGES.page.render(record, pictures)
