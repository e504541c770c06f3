"""The page of an inversion study: one file without requests, whose numbers are the record's."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
from PIL import Image

from tasks.families.inversion.study.figure_specs import (
    compared,
    describe_figures,
    layer_groups,
)
from tasks.families.inversion.study.tables import front
from tests.tasks.families.inversion.inversions import (
    BETAS,
    LAMS,
    PAGES,
    figure_of,
    find,
    inversion,
    rows_of,
)
from tests.tasks.page.study_pages import Made, written
from tests.tasks.pages import Page

FIGURES = ("table3", "plates", "heatmaps", "pareto", "layers", "table4")
MEASURES = ("ssim", "psim", "psnr")


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
    record = made[0]
    spot = next(s for s in record["sweet_spots"] if s["source"] == "digits")
    cell, vanilla = record["cells"][spot["cell"]], find(record, "vanilla")[1]
    said = (
        f"{cell['title']} , the sweet spot under “the paper's descent”, has an accuracy of "
        f"{100 * cell['accuracy']['mean']:.1f} % ({100 * vanilla['accuracy']['mean']:.1f} % "
        "without a defence). The mean SSIM of what comes back is "
        f"{cell['attacks']['paper']['ssim']['mean']:.3f} instead of "
        f"{vanilla['attacks']['paper']['ssim']['mean']:.3f} under “the paper's descent” "
        f"(chance: 0.490) and {cell['attacks']['strong']['ssim']['mean']:.3f} instead of "
        f"{vanilla['attacks']['strong']['ssim']['mean']:.3f} under “Adam, three starts, tuned”"
    )
    prose = Page(folder / "inversion.html").prose
    assert said in prose
    told = "Of 2 claims of the paper, 1 holds here, 1 is undecided; of 1 question of ours, 0 hold"
    assert told in prose


def test_table_3_is_the_record(folder: Path, made: Made) -> None:
    page, rows = Page(folder / "inversion.html"), rows_of(folder, "table3")
    chosen = [(k, c) for k, c in enumerate(made[0]["cells"]) if c["roles"]]
    assert len(rows) == sum(len(cell["attacks"]) for _k, cell in chosen)
    for k, cell in chosen:
        for attack, scores in cell["attacks"].items():
            row = next(r for r in rows if (r["cell"], r["attack"]) == (f"{k}", attack))
            assert float(row["accuracy"]) == cell["accuracy"]["mean"]
            assert float(row["chance"]) == scores["chance"]
            for name in MEASURES:
                found = [float(row[name + end]) for end in ("", " low", " high", " std", " worst")]
                ends = scores[name]["mean"], scores[name]["low"], scores[name]["high"]
                assert found == [*ends, scores["std"][name], scores["worst"][name]]
            texts = [text.strip() for text in page.rows[f"table3 {k} {attack}"]]
            low, high = scores["ssim"]["low"], scores["ssim"]["high"]
            ssim = f"{ends_of(scores, 'ssim')}[{low:.3f}, {high:.3f}]"
            assert texts[-4:-2] == [ssim, f"{scores['chance']:.3f}"]
            assert texts[-1].startswith(f"{scores['psnr']['mean']:.1f} ± ")


def ends_of(scores: dict[str, dict[str, dict[str, float]]], name: str) -> str:
    mean, std, worst = scores[name]["mean"], scores["std"][name], scores["worst"][name]
    return f"{mean:.3f} ± {std:.3f} ({worst:.3f})"


def test_heatmaps_are_their_csv_and_the_record(folder: Path, made: Made) -> None:
    record, rows = made[0], rows_of(folder, "heatmaps")
    assert len(rows) == 2 * len(LAMS) * len(BETAS)
    for row in rows:
        cell = record["cells"][int(row["cell"])]
        mean = cell["accuracy"]["mean"]
        assert row["accuracy"] == ("" if mean is None else f"{mean}")
        assert (float(row["lam"]), float(row["beta"])) == tuple(
            cell["defence"][key] for key in ("lam", "beta")
        )


def test_the_front_is_what_nothing_else_beats() -> None:
    points = [(0.9, 0.5), (0.95, 0.6), (0.95, 0.7), (0.8, 0.5), (0.7, 0.3), (0.99, 0.9)]
    assert front(points) == [4, 0, 1, 5]
    assert front([(0.5, 0.5), (0.5, 0.5)]) == [0, 1]
    assert front([]) == []


def test_the_front_of_the_page_is_the_front_of_its_table(folder: Path) -> None:
    rows = [row for row in rows_of(folder, "pareto") if row["source"] == "digits"]
    for attack in ("paper", "strong"):
        mine = [row for row in rows if row["attack"] == attack]
        points = [(float(row["accuracy"]), float(row["ssim"])) for row in mine]
        best = [k for k, row in enumerate(mine) if row["on_front"] == "True"]
        assert sorted(front(points)) == best
    assert {row["on_front"] for row in rows if row["attack"] == "restored"} == {"False"}
    assert "Adam and restored was run on 2 of 14 settings, so it has no line." in (
        Page(folder / "inversion.html").prose
    )


def test_layers_are_lines_of_a_setting_at_several_cuts(folder: Path, made: Made) -> None:
    record, rows = made[0], rows_of(folder, "layers")
    groups = layer_groups(record, record["sources"][0])
    assert [[cell["cut"] for _k, cell in group] for group in groups] == [[1, 2, 3], [1, 2, 3]]
    for row in rows:
        scores = record["cells"][int(row["cell"])]["attacks"][row["attack"]]
        assert float(row["ssim"]) == scores["ssim"]["mean"]


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
    figure = figure_of(folder, "plates")
    shown = re.findall(
        r'<img src="data:image/png;base64,([^"]*)" alt="image 3: vanilla, layer 2, the paper&#39;s '
        r'descent"><span class="score" title="SSIM ([\d.]+)">([\d.]+)<', figure
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
    assert [row["outcome"] for row in rows_of(folder, "claims")] == [
        "holds",
        "does not hold",
        "undecided",
    ]
    spots = rows_of(folder, "sweet-spots")
    assert [int(row["cell"]) for row in spots] == [s["cell"] for s in made[0]["sweet_spots"]]
