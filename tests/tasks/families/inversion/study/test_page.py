"""The page of an inversion study: one file without requests, whose numbers are the record's; with
little or nothing in it, and what is refused."""

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
from tests.tasks.families.inversion.inversions import (
    BETAS,
    LAMS,
    PAGES,
    figure_of,
    find,
    inversion,
    page_of,
    rows_of,
)
from tests.tasks.page.study_pages import Arrays, Edge, Edges, Made, written
from tests.tasks.pages import Page

Record = dict[str, Any]
FIGURES = ("table3", "plates", "heatmaps", "pareto", "layers", "table4")
edges = Edges()


made, folder = written(PAGES, inversion)


def test_figures_are_those_the_record_has_numbers_for(made: Made) -> None:
    assert tuple(figure["kind"] for figure in describe_figures(made[0])) == FIGURES
    bare = inversion(layers=False, unicon=False)[0]
    kinds = [figure["kind"] for figure in describe_figures(bare)]
    assert kinds == ["table3", "plates", "heatmaps", "pareto"]
    for cell in bare["cells"]:
        cell["roles"] = []
    assert [figure["kind"] for figure in describe_figures(bare)] == ["heatmaps", "pareto"]


def test_the_answer_on_top_is_that_of_the_sweet_spot(folder: Path, made: Made) -> None:
    record, prose = made[0], Page(folder / "inversion.html").prose
    spot = next(s for s in record["sweet_spots"] if s["source"] == "digits")
    cell, vanilla = record["cells"][spot["cell"]], find(record, "vanilla")[1]
    assert (
        f"{cell['title']} , the sweet spot under “the descent, rate tuned”, has an accuracy of "
        f"{100 * cell['accuracy']['mean']:.1f} % ({100 * vanilla['accuracy']['mean']:.1f} % "
        "without a defence)."
    ) in prose
    for attack in record["attacks"][:3]:
        after, before = (c["attacks"][attack["name"]]["ssim"]["mean"] for c in (cell, vanilla))
        said = f"{after:.3f} instead of {before:.3f} under “{attack['title']}” (chance: 0.490)"
        assert said in prose


def test_table_3_is_the_record(folder: Path, made: Made) -> None:
    page, rows = Page(folder / "inversion.html"), rows_of(folder, "table3")
    chosen = [(k, c) for k, c in enumerate(made[0]["cells"]) if c["roles"]]
    assert len(rows) == sum(len(cell["attacks"]) for _k, cell in chosen)
    for k, cell in chosen:
        for attack, scores in cell["attacks"].items():
            row = next(r for r in rows if (r["cell"], r["attack"]) == (f"{k}", attack))
            assert float(row["accuracy"]) == cell["accuracy"]["mean"]
            assert float(row["chance"]) == scores["chance"]
            for name in ("ssim", "psim", "psnr"):
                found = [float(row[name + end]) for end in ("", " low", " high", " std", " worst")]
                ends = scores[name]["mean"], scores[name]["low"], scores[name]["high"]
                assert found == [*ends, scores["std"][name], scores["worst"][name]]
            texts = [text.strip() for text in page.rows[f"table3 {k} {attack}"]]
            mean, low, high = (scores["ssim"][end] for end in ("mean", "low", "high"))
            std, worst = scores["std"]["ssim"], scores["worst"]["ssim"]
            ssim = f"{mean:.3f} ± {std:.3f} ({worst:.3f})[{low:.3f}, {high:.3f}]"
            assert texts[-4:-2] == [ssim, f"{scores['chance']:.3f}"]


def test_tables_of_figures_are_the_record(folder: Path, made: Made) -> None:
    cells = made[0]["cells"]
    assert len(rows_of(folder, "heatmaps")) == 2 * len(LAMS) * len(BETAS)
    for row in rows_of(folder, "heatmaps"):
        cell = cells[int(row["cell"])]
        mean = cell["accuracy"]["mean"]
        assert row["accuracy"] == ("" if mean is None else f"{mean}")
        assert {key: float(row[key]) for key in ("lam", "beta")} == {
            key: cell["defence"][key] for key in ("lam", "beta")
        }
    for row in rows_of(folder, "layers"):
        scores = cells[int(row["cell"])]["attacks"][row["attack"]]
        assert float(row["ssim"]) == scores["ssim"]["mean"]
    groups = layer_groups(made[0], made[0]["sources"][0])
    assert [[cell["cut"] for _k, cell in group] for group in groups] == [[1, 2, 3], [1, 2, 3]]


def test_the_front_is_what_nothing_else_beats(folder: Path) -> None:
    points = [(0.9, 0.5), (0.95, 0.6), (0.95, 0.7), (0.8, 0.5), (0.7, 0.3), (0.99, 0.9)]
    assert front(points) == [4, 0, 1, 5]
    assert front([(0.5, 0.5), (0.5, 0.5)]) == [0, 1]
    assert front([]) == []
    rows = [row for row in rows_of(folder, "pareto") if row["source"] == "digits"]
    for attack in ("paper", "strong"):
        mine = [row for row in rows if row["attack"] == attack]
        points = [(float(row["accuracy"]), float(row["ssim"])) for row in mine]
        best = [k for k, row in enumerate(mine) if row["on_front"] == "True"]
        assert sorted(front(points)) == best
    assert {row["on_front"] for row in rows if row["attack"] == "restored"} == {"False"}
    assert "restored was run on 2 of 14 settings, so it has no line." in (
        Page(folder / "inversion.html").prose
    )


def test_table_4_sets_unicon_beside_the_nearest_mixcon(folder: Path, made: Made) -> None:
    record = made[0]
    chosen = [cell["name"] for _k, cell in compared(record, record["sources"][0])]
    assert chosen[:2] == ["vanilla", "unicon 1"]
    wanted = find(record, "unicon 1")[1]["accuracy"]["mean"]
    grid = [c for c in record["cells"] if c["source"] == "digits" and c["in_grid"]]
    known = [c for c in grid if c["accuracy"]["mean"] is not None]
    nearest = min(known, key=lambda c: abs(c["accuracy"]["mean"] - wanted))
    assert nearest["name"] in chosen
    assert {row["kind"] for row in rows_of(folder, "table4")} == {"none", "unicon", "mixcon"}


def test_plates_show_each_picture_with_its_ssim(folder: Path, made: Made) -> None:
    record, pictures = made
    k, cell = find(record, "vanilla")
    shown = re.findall(
        r'<img src="data:image/png;base64,([^"]*)" alt="image 3: no defence, layer 2, the paper’s '
        r'descent"><span class="score" title="SSIM ([\d.]+)">([\d.]+)<', figure_of(folder, "plates")
    )  # fmt: skip
    ssim = cell["seeds"][0]["attacks"]["paper"]["ssim"][3]
    assert shown[0][1:] == (f"{ssim:.3f}", f"{ssim:.2f}")
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(shown[0][0]))))
    np.testing.assert_array_equal(picture[..., 0], pictures[f"{k}/paper"][3])
    row = next(r for r in rows_of(folder, "plates") if (r["cell"], r["image"]) == (f"{k}", "3"))
    assert float(row["ssim"]) == ssim


def test_all_cells_and_claims_are_in_the_page(folder: Path, made: Made) -> None:
    page, cells = Page(folder / "inversion.html"), made[0]["cells"]
    assert len([name for name in page.rows if name.startswith("cell ")]) == len(cells)
    for k, cell in enumerate(cells):
        if cell["accuracy"]["mean"] is not None:
            assert f"{100 * cell['accuracy']['mean']:.1f} %" in page.rows[f"cell {k}"][2]
    table = rows_of(folder, "cells")
    assert [int(row["cell"]) for row in table] == list(range(len(cells)))
    assert float(table[0]["strong ssim worst"]) == cells[0]["attacks"]["strong"]["worst"]["ssim"]
    assert len(rows_of(folder, "seeds")) == 3 * len(cells)
    outcomes = [row["outcome"] for row in rows_of(folder, "claims")]
    assert outcomes == ["holds", "does not hold", "undecided"]
    spots = rows_of(folder, "sweet-spots")
    assert [int(row["cell"]) for row in spots] == [s["cell"] for s in made[0]["sweet_spots"]]


def small(**changes: Any) -> Made:
    """One source, a grid of three by two, nothing else; anything may be asked for otherwise."""
    asked = {"sources": 1, "lams": (0.1, 1.0, 5.0), "betas": (1e-2, 1e-4), "n": 6, "n_shown": 3,
             "layers": False, "unicon": False}  # fmt: skip
    return inversion(**(asked | changes))


@edges.says("one network of each setting, so there are no intervals",
            n_seeds=1, layers=True, unicon=True)  # fmt: skip
def one_seed(record: Record, pictures: Arrays) -> None:
    pass


@edges.says("digits, 11×11: Adam was not run.", attacks=("paper",))
def an_attack_that_was_not_run(record: Record, pictures: Arrays) -> None:
    record["attacks"].append({"name": "strong", "title": "Adam", "ours": True})


@edges.says("no attack was run", "no sweet spot was sought", "cannot be compared", attacks=())
def no_attack_at_all(record: Record, pictures: Arrays) -> None:
    assert [figure["kind"] for figure in record["figures"]] == ["table3", "heatmaps"]


@edges.says("no setting of the grid costs at most 1 point of accuracy and leaks less; ",
            "; the study’s setting, MixCon (1, 10⁻⁴) , has an accuracy of 9",
            "digits, 11×11: no sweet spot under “our attack”;")  # fmt: skip
def no_sweet_spot_was_found(record: Record, pictures: Arrays) -> None:
    for spot in record["sweet_spots"]:
        record["cells"][spot["cell"]]["roles"].remove(f"sweet spot {spot['attack']}")
        spot.update(cell=None, accuracy_loss=None, leakage=None)


@edges.says("no setting that keeps the accuracy leaks less than no defence.")
def no_defence_is_no_sweet_spot(record: Record, pictures: Arrays) -> None:
    for spot in record["sweet_spots"]:
        spot["cell"] = spot["vanilla"]


@edges.says("On digits, 11×11 , no sweet spot was sought.", sweet_spots=False)
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


@edges.says("Nothing was run on this source.", "photos, 11×11 nothing was measured", sources=2)
def a_source_without_cells(record: Record, pictures: Arrays) -> None:
    record["cells"] = [cell for cell in record["cells"] if cell["source"] == "digits"]
    record["sweet_spots"] = [s for s in record["sweet_spots"] if s["source"] == "digits"]


@edges.says("The study has no source of images.")
def nothing(record: Record, pictures: Arrays) -> None:
    record |= {"claims": [], "settings": {}, "sources": [], "cells": [], "sweet_spots": []}


@edges.says("Without pictures here: no defence, layer 3; MixCon (1, 10⁻⁴), layer 3.", layers=True)
def pictures_of_a_layer_that_were_left_out(record: Record, pictures: Arrays) -> None:
    for k, cell in enumerate(record["cells"]):
        for attack in cell["attacks"] if cell["cut"] == 3 else ():
            pictures.pop(f"{k}/{attack}", None)


@edges.says("1 part of the study failed , so the page lacks what follows from it: train <x>",
            "digits, 11×11: 2 of 7 settings have one network each, so no interval.")  # fmt: skip
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
    monkeypatch.setattr(inversion_page, "MOST_PICTURES", 1300)
    assert re.search("The first [12] images? of 3", page_of(tmp_path, small()).prose)


def _cell(name: str, **changes: Any) -> Callable[[Record, Arrays], None]:
    return lambda record, _pictures: find(record, name)[1].update(changes)


def _in_grid_at(lam: float) -> Callable[[Record, Arrays], None]:
    return _cell("mixcon 1 0.01", defence={"kind": "mixcon", "lam": lam, "beta": 0.01})


def _spot_elsewhere(record: Record, _pictures: Arrays) -> None:
    record["sweet_spots"][0]["cell"] = 99


def _one_picture(_record: Record, pictures: Arrays) -> None:
    pictures["0/paper"] = pictures["0/paper"][:1]


def _few_scores(record: Record, _pictures: Arrays) -> None:
    record["cells"][0]["seeds"][0]["attacks"]["paper"]["ssim"] = [0.5] * 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_cell("vanilla", source="x"), "cell 0 is of source 'x'; expected one of ['digits']"),
        (_in_grid_at(7.0), "its λ, β (7.0, 0.01) are not among"),
        (_in_grid_at(5.0), "its λ, β (5.0, 0.01) are those of another cell"),
        (_spot_elsewhere, "has cell 99, but the study has 7 cells"),
        (lambda _r, pictures: pictures.pop("digits/original"), "no 'digits/original'"),
        (lambda _r, pictures: pictures.pop("0/paper"), "no '0/paper'"),
        (_one_picture, "hold (1, 11, 11) in '0/paper' for originals of (3, 11"),
        (_few_scores, "and 2 scores; make the study's record again"),
    ],
)
def test_a_record_that_cannot_be_drawn_is_refused(
    change: Callable[[Record, Arrays], None], said: str
) -> None:
    record, pictures = small()
    change(record, pictures)
    with pytest.raises(ValueError, match=re.escape(said)):
        PAGES.page.render(record, pictures)
