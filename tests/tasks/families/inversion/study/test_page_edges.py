"""Inversion studies with little or nothing in them, hostile ones, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tasks.families.inversion.study import image_grids as inversion_plates
from tasks.families.inversion.study.figure_specs import describe_figures
from tests.tasks.families.inversion.inversions import (
    PAGES,
    estimate,
    figure_of,
    find,
    inversion,
    page_of,
    rows_of,
)
from tests.tasks.page.study_pages import Made


def small(**changes: Any) -> Made:
    """One source, a grid of three by two, nothing else; anything may be asked for otherwise."""
    asked = {"sources": 1, "lams": (0.1, 1.0, 5.0), "betas": (1e-2, 1e-4), "n": 6, "n_shown": 3,
             "layers": False, "unicon": False, "synthetic": False}  # fmt: skip
    return inversion(**(asked | changes))


def _described(record: dict[str, Any]) -> dict[str, Any]:
    record["figures"] = describe_figures(record)
    return record


def test_one_seed_has_no_intervals(tmp_path: Path) -> None:
    page = page_of(tmp_path, small(n_seeds=1, layers=True, unicon=True))
    assert "one network of each setting, so there are no intervals" in page.prose
    assert {row["accuracy low"] for row in rows_of(tmp_path, "table3")} == {""}
    assert 'class="whisker"' not in figure_of(tmp_path, "pareto")
    assert 'class="whisker"' not in figure_of(tmp_path, "layers")


def test_only_the_papers_attack(tmp_path: Path) -> None:
    page = page_of(tmp_path, small(attacks=("paper",)))
    assert "SSIM, Adam" not in page.prose
    assert page.prose.count("(chance: ") == 1


def test_an_attack_that_was_not_run_is_said(tmp_path: Path) -> None:
    record, pictures = small(attacks=("paper",))
    record["attacks"].append({"name": "strong", "title": "Adam", "ours": True})
    page = page_of(tmp_path, (_described(record), pictures))
    assert "digits, 8×8: Adam was not run." in page.prose


def test_no_attack_at_all(tmp_path: Path) -> None:
    record, pictures = small(attacks=())
    page = page_of(tmp_path, (record, pictures))
    kinds = [figure["kind"] for figure in record["figures"]]
    assert kinds == ["table3", "heatmaps"]
    assert "no attack was run" in page.prose
    assert "no sweet spot was sought" in page.prose
    assert "cannot be compared" in page.prose


def test_no_sweet_spot_was_found(tmp_path: Path) -> None:
    record, pictures = small()
    for spot in record["sweet_spots"]:
        record["cells"][spot["cell"]]["roles"].remove(f"sweet spot {spot['attack']}")
        spot.update(cell=None, accuracy_loss=None, leakage=None)
    pictures = {name: array for name, array in pictures.items() if not name[0].isdigit()} | {
        name: array for name, array in pictures.items() if name.partition("/")[0] in ("0", "4")
    }
    page = page_of(tmp_path, (_described(record), pictures))
    assert "no setting of the grid costs at most 1 point of accuracy and leaks less; " in page.prose
    assert "; the study’s setting, MixCon (1, 10⁻⁴) , has an accuracy of 9" in page.prose
    assert "digits, 8×8: no sweet spot under “the paper's descent”;" in page.prose
    assert {row["cell"] for row in rows_of(tmp_path, "sweet-spots")} == {""}


def test_no_vanilla_and_no_paper_setting(tmp_path: Path) -> None:
    record, pictures = small(sweet_spots=False)
    for cell in record["cells"]:
        cell["roles"] = []
    page = page_of(tmp_path, (_described(record), pictures))
    assert "On digits, 8×8 , no sweet spot was sought." in page.prose
    assert "without vanilla" in figure_of(tmp_path, "heatmaps")
    assert "letter halo" not in figure_of(tmp_path, "pareto")


def test_everything_diverged(tmp_path: Path) -> None:
    record, pictures = small(synthetic=True)
    for cell in record["cells"]:
        cell |= {"diverged": 3, "attacks": {}}
        for key in ("accuracy", "train_accuracy", "distance", "min_distance"):
            cell[key] = estimate([])
        for seed in cell["seeds"]:
            seed.update(dict.fromkeys(("accuracy", "train_accuracy", "distance", "min_distance")))
            seed.update(diverged=True, attacks={})
    record["sweet_spots"] = []
    page = page_of(tmp_path, (_described(record), pictures))
    assert [figure["kind"] for figure in record["figures"]] == ["table3", "heatmaps", "synthetic"]
    assert figure_of(tmp_path, "heatmaps").count(">div.</text>") == 2 * 6
    assert "training diverged with every seed" in page.prose
    assert [text.strip() for text in page.rows["cell 0"][2:]] == ["–training –", "–least –"]


def test_a_cell_that_is_missing_in_the_grid_is_hatched(tmp_path: Path) -> None:
    record, pictures = small()
    place, _cell = find(record, "mixcon 1 0.01")
    record["cells"][place]["in_grid"] = False
    page_of(tmp_path, (record, pictures))
    figure = figure_of(tmp_path, "heatmaps")
    assert figure.count("<title>no such cell</title>") == 4
    assert len(rows_of(tmp_path, "heatmaps")) == 5


def test_a_source_without_cells(tmp_path: Path) -> None:
    record, pictures = small(sources=2)
    record["cells"] = [cell for cell in record["cells"] if cell["source"] == "digits"]
    record["sweet_spots"] = [s for s in record["sweet_spots"] if s["source"] == "digits"]
    page = page_of(tmp_path, (_described(record), pictures))
    assert "Nothing was run on this source." in page.prose
    assert "photos, 8×8 nothing was measured nothing to draw" in page.prose


def test_a_record_of_nothing(tmp_path: Path) -> None:
    record, pictures = small(sources=0)
    record |= {"claims": [], "settings": {}}
    page = page_of(tmp_path, (_described(record), pictures))
    assert record["figures"] == []
    assert "The study has no source of images." in page.prose
    assert "claim" not in page.prose.replace("claims.csv", "")


def test_synthetic_points_without_features_or_scores(tmp_path: Path) -> None:
    record, pictures = small(synthetic=True)
    for cell in record["synthetic"]["cells"]:
        cell |= {"se": None, "cs": None, "features": None, "distance": estimate([])}
    page = page_of(tmp_path, (record, pictures))
    assert "No features were kept to be drawn." in page.prose
    assert page.rows["synthetic vanilla default paper"][5:] == ["–", "–", "–"]


def test_features_that_are_no_numbers_are_not_drawn(tmp_path: Path) -> None:
    record, pictures = small(synthetic=True)
    features = record["synthetic"]["cells"][0]["features"]
    features["end"] = [[None, None]] * 39 + [[0.25, 0.5]]
    page_of(tmp_path, (record, pictures))
    figure = figure_of(tmp_path, "synthetic")
    assert "h₁ from 0.25 to 0.25, h₂ from 0.5 to 0.5" in figure


def test_pictures_of_layers_may_have_been_left_out(tmp_path: Path) -> None:
    record, pictures = small(layers=True)
    page = page_of(tmp_path / "all", (record, pictures))
    assert "digits, 8×8: by layer" in page.prose
    for k, cell in enumerate(record["cells"]):
        if cell["cut"] == 3:
            for attack in cell["attacks"]:
                pictures.pop(f"{k}/{attack}", None)
    page = page_of(tmp_path / "some", (record, pictures))
    said = "Without pictures here: vanilla, layer 3; MixCon (1, 10⁻⁴), layer 3."
    assert said in page.prose


def test_many_pictures_are_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inversion_plates, "MOST_PICTURES", 1300)
    page = page_of(tmp_path, small())
    assert "The first 2 images of 3" in page.prose or "The first 1 image of 3" in page.prose


def _with_cell(name: str, **changes: Any) -> dict[str, Any]:
    record = small()[0]
    find(record, name)[1].update(changes)
    return record


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (_with_cell("vanilla", source="x"), "cell 0 is of source 'x'; expected one of ['digits']"),
        (
            _with_cell("mixcon 1 0.01", defence={"kind": "mixcon", "lam": 7.0, "beta": 0.01}),
            "is said to be in the grid, but its λ, β (7.0, 0.01) are not among",
        ),
        (
            _with_cell("mixcon 1 0.01", defence={"kind": "mixcon", "lam": 5.0, "beta": 0.01}),
            "figure 'heatmaps' has two cells at λ=5, β=0.01 of source 'digits'",
        ),
    ],
)
def test_a_record_that_cannot_be_drawn_is_refused(record: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        PAGES.page.render(record, small()[1])


def test_a_sweet_spot_beyond_the_cells_is_refused() -> None:
    record, pictures = small()
    record["sweet_spots"][0]["cell"] = 99
    with pytest.raises(ValueError, match="has cell 99, but the study has 7 cells"):
        PAGES.page.render(record, pictures)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("digits/original", "no 'digits/original', the images that the record shows of source"),
        ("0/paper", "no '0/paper', what the paper's descent made of 'vanilla'"),
    ],
)
def test_missing_pictures_are_refused(name: str, said: str) -> None:
    record, pictures = small()
    del pictures[name]
    with pytest.raises(ValueError, match=said):
        PAGES.page.render(record, pictures)


def test_pictures_that_do_not_belong_are_refused() -> None:
    record, pictures = small()
    pictures["0/paper"] = pictures["0/paper"][:1]
    with pytest.raises(ValueError, match=r"hold \(1, 8, 8\) in '0/paper' for originals of \(3, 8"):
        PAGES.page.render(record, pictures)
    record, pictures = small(n=2)
    with pytest.raises(ValueError, match=r"and 2 scores; make the study's record again"):
        PAGES.page.render(record, pictures)


def test_a_paper_setting_that_diverged_is_not_the_answer(tmp_path: Path) -> None:
    record, pictures = small(lams=(0.1, 1.0), sweet_spots=False)
    place, cell = find(record, "mixcon 1 0.0001")
    assert (cell["roles"], cell["diverged"]) == (["paper"], 3)
    page = page_of(tmp_path, (record, pictures))
    assert "On digits, 8×8 , no sweet spot was sought." in page.prose
    assert [text.strip() for text in page.rows[f"table3 {place}"]][1:] == ["–", "no attack was run"]
    assert "Without pictures here: MixCon (1, 10⁻⁴)." in page.prose


def test_no_defence_is_no_sweet_spot(tmp_path: Path) -> None:
    record, pictures = small()
    for spot in record["sweet_spots"]:
        spot["cell"] = spot["vanilla"]
    page = page_of(tmp_path, (record, pictures))
    assert "costs at most 1 point of accuracy and leaks less; the study’s setting" in page.prose
    assert "no setting that keeps the accuracy leaks less than no defence." in page.prose


def test_what_failed_and_what_was_trained_once_is_said(tmp_path: Path) -> None:
    record, pictures = small()
    record["failed"] = [{"unit": "train <x>", "why": "no memory"}]
    for name in ("mixcon 0.1 0.01", "mixcon 1 0.01"):
        cell = find(record, name)[1]
        cell["seeds"] = cell["seeds"][:1]
    page = page_of(tmp_path, (record, pictures))
    assert "1 part of the study failed , so the page lacks what follows from it: train <x>" in (
        page.prose
    )
    assert "digits, 8×8: 2 of 7 settings have one network each, so no interval." in page.prose
