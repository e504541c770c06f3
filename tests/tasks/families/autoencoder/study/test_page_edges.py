"""Recovery studies with little or nothing in them, hostile ones, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.families.autoencoder.study.figure_specs import best_victim, describe_figures, group_name
from tests.tasks.families.autoencoder.study_records import (
    PAGES,
    cell,
    cells,
    figure_of,
    page_of,
    recovery,
    rows_of,
    set_errors,
    set_rates,
)
from tests.tasks.page.study_pages import Made

BEST = "unet-leaky_relu"


def small(**changes: Any) -> Made:
    """Two masks, three methods and two levels; anything may be asked for otherwise."""
    asked = {"victims": 2, "masks": ("random", "half"), "methods": ("iteration", "unknown", "ddnm"),
             "levels": (1e-4, 1e-8), "n": 8, "n_groups": 0}  # fmt: skip
    return recovery(**(asked | changes))


def _described(record: dict[str, Any]) -> dict[str, Any]:
    record["figures"] = describe_figures(record)
    return record


def test_no_claims(tmp_path: Path) -> None:
    record, pictures = small()
    record["claims"] = []
    page = page_of(tmp_path, (record, pictures))
    assert "claim" not in page.prose.replace("claims.csv", "")
    assert "From U-Net, leaky ReLU" in page.prose


def test_one_network_at_one_level(tmp_path: Path) -> None:
    page = page_of(tmp_path, small(victims=1, moderate=False, levels=(1e-8,), noise=False))
    figure = figure_of(tmp_path, "rates-accurate")
    assert "polyline" in figure  # of the generic method, which is level
    assert re.findall(r'<g class="s1 m\d+">\s*<polyline', figure) == []
    assert "Not everything was run" not in page.prose
    assert len(rows_of(tmp_path, "rates-accurate")) == 2 * 3


def test_a_level_that_was_not_reached_is_said_and_drawn(tmp_path: Path) -> None:
    record, pictures = small()
    victim = record["victims"][1]
    victim["levels"], victim["last"] = victim["levels"][:1], {"loss": 3.1e-8, "epoch": 9000}
    record["cells"] = [
        c for c in record["cells"] if (c["victim"], c["level"]) != (victim["name"], 1e-8)
    ]
    page = page_of(tmp_path, (_described(record), pictures))
    assert "10⁻⁸ was not reached (3.1e−8 after 9,000 epochs)" in page.prose
    assert "<s>10⁻⁸</s>" in (tmp_path / "recovery.html").read_text()
    figure = figure_of(tmp_path, "rates-accurate")
    assert figure.count('<rect class="unreached" x="6"') == 1
    assert figure.count("<title>a loss of 10⁻⁸ was not reached</title>") == 2
    assert "Without test images: U-Net, softplus." in page.prose
    assert "Not everything was run" not in page.prose


def test_the_table_of_a_network_is_of_its_lowest_loss_alone(tmp_path: Path) -> None:
    record, pictures = small()
    victim = next(v for v in record["victims"] if v["name"] == "fc20-moderate")
    victim["levels"] = [{**victim["levels"][0], "level": 1e-3}, *victim["levels"]]
    page = page_of(tmp_path, (_described(record), pictures))
    assert len(rows_of(tmp_path, "moderate-1")) == 2 * 3
    assert "Not everything was run" not in page.prose


def test_the_first_sentences_say_that_claims_are_also_ours(tmp_path: Path) -> None:
    record, pictures = small()
    assert "claims of the paper, 1 holds" in page_of(tmp_path, (record, pictures)).prose
    record["claims"][0]["where"] = "ours"
    assert "claims of the paper and ours, 1 holds" in page_of(tmp_path, (record, pictures)).prose


def test_a_network_that_copies_is_not_called_overfitted(tmp_path: Path) -> None:
    record, _pictures = small()
    victim = next(v for v in record["victims"] if v["name"] == "fc20-moderate")
    for factor, said in ((2, "It copies its input"), (200, "Moderately overfitted")):
        victim["test_loss"] = factor * victim["levels"][-1]["loss"]
        (table,) = [f for f in _described(record)["figures"] if f["kind"] == "table"]
        assert table["title"].startswith(f"{said}: ")


def test_no_level_was_reached_at_all(tmp_path: Path) -> None:
    record, pictures = small(moderate=False)
    for victim in record["victims"]:
        victim["levels"] = []
    record["cells"] = []
    page = page_of(tmp_path, (_described(record), pictures))
    assert best_victim(record) is None
    assert "1 is undecided; no network was attacked: none reached" in page.prose
    assert "Nothing was run on this network" in page.prose
    assert {figure["kind"] for figure in record["figures"]} == {"masks", "contraction"}


def test_a_record_of_nothing(tmp_path: Path) -> None:
    record, pictures = small(victims=0, moderate=False, masks=(), methods=())
    record["claims"] = []
    page = page_of(tmp_path, (record, pictures))
    assert "No network was attacked" in page.prose
    assert "The study has no network." in page.prose
    assert record["figures"] == []


def test_figures_that_lost_their_cells_say_so(tmp_path: Path) -> None:
    record, pictures = small()
    record["cells"] = []
    page = page_of(tmp_path, (record, pictures))
    for name in ("rates-accurate", "rates-psnr"):
        figure = figure_of(tmp_path, name)
        assert figure.count('<p class="unknown">not run</p>') == 4
        assert "<svg viewBox" not in figure
    assert "nothing was run" in figure_of(tmp_path, "moderate-1")
    assert "nothing to draw" in figure_of(tmp_path, "noise")
    assert "Not everything was run: f alone: not run; paper, mask unknown: not run;" in page.prose


def test_a_method_that_was_not_run_is_named(tmp_path: Path) -> None:
    record, pictures = small()
    record["cells"] = [
        c
        for c in record["cells"]
        if not (c["method"] == "unknown" and c["mask"] == "half")
        and not (c["method"] == "ddnm" and c["level"] == 1e-4 and c["victim"] != "fc20-moderate")
    ]
    page = page_of(tmp_path, (_described(record), pictures))
    said = "Not everything was run: paper, mask unknown: run on 4 of 8 cells."
    assert said in page.prose
    figure = figure_of(tmp_path, "rates-accurate")
    across = re.findall(r'<g class="s2 m16"><polyline class="curve targets" points="38', figure)
    assert len(across) == 4
    assert "1 mask only" in page.rows["summary unknown"][-1]


def test_generic_methods_without_the_lowest_level_are_still_in_its_tables(tmp_path: Path) -> None:
    record, pictures = small()
    record["cells"] = [
        c for c in record["cells"] if not (c["method"] == "ddnm" and c["level"] == 1e-8)
    ]
    set_rates(cell(record, victim=BEST, method="ddnm", mask="half", split="train", sigma=0.0), 0, 4)
    page_of(tmp_path, (_described(record), pictures))
    row = rows_of(tmp_path, "summary")[2]
    assert (row["method"], row["train n"], row["test n"]) == ("ddnm", "16", "0")
    assert int(row["train n_approximate"]) >= 4


def test_all_rates_are_zero(tmp_path: Path) -> None:
    record, pictures = small()
    for found in record["cells"]:
        set_errors(found, [0.01] * 8)
    page = page_of(tmp_path, (record, pictures))
    assert (
        "no training image came back accurately by a method that does not know what is missing"
        in page.prose
    )
    assert "No image reaches accurate recovery in any of these cells." in page.prose
    assert "No image reaches approximate recovery in any of these cells." in page.prose
    assert "none came back accurately; none came back approximately" in page.prose


def test_contraction_may_be_unknown_in_part_or_at_all(tmp_path: Path) -> None:
    record, pictures = small()
    record["victims"][0]["contraction"] = {"train": [None, 0.5, 700.0], "test": []}
    record["victims"][1]["contraction"] = None
    page_of(tmp_path, (record, pictures))
    figure = figure_of(tmp_path, "contraction")
    assert ">1 of 2<" in figure
    assert figure.count(">–<") == 3
    assert "(log)" in figure
    for victim in record["victims"]:
        victim["contraction"] = {"train": [None], "test": [None]}
    page = page_of(tmp_path, (record, pictures))
    assert "No radius is known" in page.prose
    for victim in record["victims"]:
        victim["contraction"] = None
    assert "contraction" not in {figure["kind"] for figure in describe_figures(record)}


def test_what_is_unknown_is_a_dash(tmp_path: Path) -> None:
    record, pictures = small(n_groups=1)
    for found in record["cells"]:
        set_errors(found, [])
        found.update(dict.fromkeys(("n_applied", "endings", "mask_accuracy", "seconds")))
        found["psnr"] = None
    for victim in record["victims"]:
        victim |= {"test_loss": None, "seconds": None}
        victim["last"]["loss"] = None
    for claim in record["claims"]:
        claim.update(theirs=None, ours=None, outcome="not testable")
    record["seconds"] = {"train": None, "inpainter": None, "recover": None}
    shown = group_name(record["shown"][0])
    pictures[f"{shown}/unknown/mse"] = np.array([np.nan, np.inf, 0.0])
    page = page_of(tmp_path, (record, pictures))
    texts = [text.strip() for text in page.rows["cell unet-leaky_relu half 0 train unknown"]]
    assert texts[3:] == ["0 of 0–", "0 of 0–", "–", "–", "–", "–", "–"]
    assert page.rows["summary unknown"][1].strip() == "–"
    mine = [row for row in rows_of(tmp_path, "examples") if row["method"] == "unknown"]
    assert [row["psnr"] for row in mine] == ["", "", "120.0"]
    assert figure_of(tmp_path, "rates-psnr").count("not run") == 4


def test_pictures_that_were_not_kept(tmp_path: Path) -> None:
    record, pictures = small(n_groups=2)
    first, second = (group_name(shown) for shown in record["shown"])
    for name in [name for name in pictures if name.startswith(first)]:
        del pictures[name]
    for name in (f"{second}/unknown", f"{second}/iteration/mse", "masks/half"):
        del pictures[name]
    page = page_of(tmp_path, (record, pictures))
    assert "No pictures of this cell were kept." in page.prose
    assert "Without pictures here: paper, mask unknown." in page.prose
    assert "no picture" in figure_of(tmp_path, "masks")
    assert {row["method"] for row in rows_of(tmp_path, "examples")} == {"unknown", "ddnm"}


def test_grey_pictures(tmp_path: Path) -> None:
    record, pictures = small(n_groups=1)
    for name, array in pictures.items():
        if array.ndim == 4:
            pictures[name] = array[:, :1]
    assert len(page_of(tmp_path, (record, pictures)).images) > 12


def test_the_noise_of_several_strengths_has_figures_of_their_own() -> None:
    record, _pictures = small()
    record["cells"] += [found | {"sigma": 0.1} for found in cells(record, sigma=0.02)]
    found = [(f["name"], f["sigma"]) for f in describe_figures(record) if f["kind"] == "noise"]
    assert found == [("noise-1", 0.02), ("noise-2", 0.1)]


def _changed(of_kind: str, /, **changes: Any) -> dict[str, Any]:
    record = small()[0]
    next(figure for figure in record["figures"] if figure["kind"] == of_kind).update(changes)
    return record


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (_changed("rates", value="ssim"), "figure 'rates-accurate' shows value 'ssim'; expected"),
        (_changed("rates", victims=["x"]), "figure 'rates-accurate' shows victim 'x'; expected"),
        (_changed("thresholds", mask="x"), "figure 'thresholds' shows mask 'x'; expected one of"),
        (_changed("table", victim="x"), "figure 'moderate-1' shows victim 'x'; expected one of"),
    ],
)
def test_a_figure_that_cannot_be_drawn_is_refused(record: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        PAGES.page.render(record, {})


@pytest.mark.parametrize("part", ["original", "unknown", "unknown/mse", "mask/unknown"])
def test_pictures_that_do_not_belong_are_refused(part: str) -> None:
    record, pictures = small(n_groups=1)
    name = f"{group_name(record['shown'][0])}/{part}"
    pictures[name] = pictures[name][:1]
    with pytest.raises(ValueError, match=r"the record shows 3 images of .* pictures hold 1 in"):
        PAGES.page.render(record, pictures)
