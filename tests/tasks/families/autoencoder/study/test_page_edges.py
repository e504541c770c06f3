"""Recovery studies with little or nothing in them, hostile ones, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.families.autoencoder.study.figure_specs import describe_figures, group_name
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
from tests.tasks.page.study_pages import Arrays, Edge, Edges, Made

BEST = "unet-leaky_relu"
Record = dict[str, Any]
edges = Edges()


def small(**changes: Any) -> Made:
    """Two masks, three methods and two levels; anything may be asked for otherwise."""
    asked = {"victims": 2, "masks": ("random", "half"), "methods": ("iteration", "unknown", "ddnm"),
             "levels": (1e-4, 1e-8), "n": 8, "n_groups": 0}  # fmt: skip
    return recovery(**(asked | changes))


@edges.says("From U-Net, leaky ReLU")
def no_claims(record: Record, pictures: Arrays) -> None:
    record["claims"] = []


@edges.says("1 is undecided; of 1 question of ours, 1 holds", "Our own questions")
def a_claim_of_ours(record: Record, pictures: Arrays) -> None:
    record["claims"][0]["where"] = "ours"


@edges.says("From U-Net", victims=1, moderate=False, levels=(1e-8,), noise=False)
def one_network_at_one_level(record: Record, pictures: Arrays) -> None:
    assert "noise" not in {figure["kind"] for figure in record["figures"]}


@edges.says("10⁻⁸ was not reached (3.1e−8 after 9,000 epochs)", "Without test images: U-Net, soft")
def a_level_that_was_not_reached(record: Record, pictures: Arrays) -> None:
    victim = record["victims"][1]
    victim["levels"], victim["last"] = victim["levels"][:1], {"loss": 3.1e-8, "epoch": 9000}
    record["cells"] = [
        c for c in record["cells"] if (c["victim"], c["level"]) != (victim["name"], 1e-8)
    ]
    record["figures"] = describe_figures(record)


@edges.says("It copies its input")
def a_network_that_copies_is_not_overfitted(record: Record, pictures: Arrays) -> None:
    victim = next(v for v in record["victims"] if v["name"] == "fc20-moderate")
    victim["test_loss"] = 2 * victim["levels"][-1]["loss"]
    record["figures"] = describe_figures(record)


@edges.says("no network was attacked: none reached", "Nothing was run on this network",
            moderate=False)  # fmt: skip
def no_level_was_reached(record: Record, pictures: Arrays) -> None:
    for victim in record["victims"]:
        victim["levels"] = []
    record["cells"] = []
    record["figures"] = describe_figures(record)


@edges.says("The study has no network.", victims=0, moderate=False, masks=(), methods=())
def nothing(record: Record, pictures: Arrays) -> None:
    record["claims"] = []


@edges.says("Not everything was run: f alone: not run; paper, mask unknown: not run;")
def figures_that_lost_their_cells(record: Record, pictures: Arrays) -> None:
    record["cells"] = []


@edges.says("Not everything was run: paper, mask unknown: run on 4 of 8 cells.")
def a_method_that_was_not_run_everywhere(record: Record, pictures: Arrays) -> None:
    record["cells"] = [
        c
        for c in record["cells"]
        if not (c["method"] == "unknown" and c["mask"] == "half")
        and not (c["method"] == "ddnm" and c["level"] == 1e-4 and c["victim"] != "fc20-moderate")
    ]
    record["figures"] = describe_figures(record)


@edges.says("no training image came back accurately", "No image reaches accurate recovery in any")
def all_rates_are_zero(record: Record, pictures: Arrays) -> None:
    for found in record["cells"]:
        set_errors(found, [0.01] * 8)


@edges.says("From U-Net")
def contraction_that_is_known_in_part(record: Record, pictures: Arrays) -> None:
    record["victims"][0]["contraction"] = {"train": [None, 0.5, 700.0], "test": []}
    record["victims"][1]["contraction"] = None


@edges.says("No radius is known")
def contraction_that_is_not_known(record: Record, pictures: Arrays) -> None:
    for victim in record["victims"]:
        victim["contraction"] = {"train": [None], "test": [None]}


@edges.says("No pictures of this cell were kept.", "Without pictures here: paper, mask unknown.",
            n_groups=2)  # fmt: skip
def pictures_that_were_not_kept(record: Record, pictures: Arrays) -> None:
    first, second = (group_name(shown) for shown in record["shown"])
    lost = [f"{second}/unknown", f"{second}/iteration/mse", "masks/half"]
    for name in [*lost, *(name for name in pictures if name.startswith(first))]:
        del pictures[name]


@edges.says("From U-Net", n_groups=1)
def grey_pictures(record: Record, pictures: Arrays) -> None:
    pictures |= {name: array[:, :1] for name, array in pictures.items() if array.ndim == 4}


@edges.parametrised()
def test_a_study_with_little_in_it_has_a_page(edge: Edge, tmp_path: Path) -> None:
    record, pictures = small(**edge.asked)
    edge.change(record, pictures)
    prose = page_of(tmp_path, (record, pictures)).prose
    assert [said for said in edge.said if said not in prose] == []


def test_generic_methods_without_the_lowest_level_are_still_in_its_tables(tmp_path: Path) -> None:
    record, pictures = small()
    record["cells"] = [
        c for c in record["cells"] if not (c["method"] == "ddnm" and c["level"] == 1e-8)
    ]
    set_rates(cell(record, victim=BEST, method="ddnm", mask="half", split="train", sigma=0.0), 0, 4)
    record["figures"] = describe_figures(record)
    page_of(tmp_path, (record, pictures))
    row = rows_of(tmp_path, "summary")[2]
    assert (row["method"], row["train n"], row["test n"]) == ("ddnm", "16", "0")
    assert int(row["train n_approximate"]) >= 4


def test_unknown_numbers_are_dashes(tmp_path: Path) -> None:
    record, pictures = small(n_groups=1)
    for found in record["cells"]:
        set_errors(found, [])
        found.update(dict.fromkeys(("n_applied", "endings", "mask_accuracy", "seconds", "psnr")))
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
    mine = [row for row in rows_of(tmp_path, "examples") if row["method"] == "unknown"]
    assert [row["psnr"] for row in mine] == ["", "", "120.0"]
    assert figure_of(tmp_path, "rates-psnr").count("not run") == 4


def test_the_noise_of_several_strengths_has_figures_of_their_own() -> None:
    record, _pictures = small()
    record["cells"] += [found | {"sigma": 0.1} for found in cells(record, sigma=0.02)]
    found = [(f["name"], f["sigma"]) for f in describe_figures(record) if f["kind"] == "noise"]
    assert found == [("noise-1", 0.02), ("noise-2", 0.1)]


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("rates", {"value": "ssim"}, "figure 'rates-accurate' shows value 'ssim'; expected"),
        ("rates", {"victims": ["x"]}, "figure 'rates-accurate' shows victim 'x'; expected"),
        ("thresholds", {"mask": "x"}, "figure 'thresholds' shows mask 'x'; expected one of"),
        ("table", {"victim": "x"}, "figure 'moderate-1' shows victim 'x'; expected one of"),
    ],
)
def test_a_figure_that_cannot_be_drawn_is_refused(
    kind: str, changes: dict[str, Any], said: str
) -> None:
    record = small()[0]
    next(figure for figure in record["figures"] if figure["kind"] == kind).update(changes)
    with pytest.raises(ValueError, match=re.escape(said)):
        PAGES.page.render(record, {})


@pytest.mark.parametrize("part", ["original", "unknown", "unknown/mse", "mask/unknown"])
def test_pictures_that_do_not_belong_are_refused(part: str) -> None:
    record, pictures = small(n_groups=1)
    name = f"{group_name(record['shown'][0])}/{part}"
    pictures[name] = pictures[name][:1]
    with pytest.raises(ValueError, match=r"the record shows 3 images of .* pictures hold 1 in"):
        PAGES.page.render(record, pictures)
