"""The report: one file without requests, whose numbers are those of evaluation.json."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tasks.page.formats import duration, interval, percent, score
from tasks.page.pictures import strips
from tasks.report.headline import method_title
from tasks.report.image_grids import attacks_sheet, contact_sheet
from tasks.report.page import saved_context, write_report
from tests.tasks.page.study_pages import FORBIDDEN
from tests.tasks.pages import Page
from tests.tasks.report.report_records import (
    Arrays,
    evaluation,
    with_a_further_attack,
    with_a_span,
    write,
)

EVIL = "<script>&co"
CURVE = [[0.0, 0.4], [0.3, 0.5]]
CARD = {"restorer": {"strength": 0.3}, "validation": {"strength_curve": CURVE}}
CONTEXT = {"command": EVIL, "stages": [{"name": "evaluate", "seconds": 2.5}],
           "recipe": {"family": EVIL}, "restorers": {"edm": CARD}}  # fmt: skip
Made = tuple[Page, dict[str, Any], Path]


def _page(folder: Path, record: dict[str, Any], pictures: Arrays, **context: Any) -> Made:
    path = write_report(write(folder, record, pictures), context)
    page = Page(path)
    page.check()
    assert [text for text in FORBIDDEN if text in path.read_text()] == []
    return page, record, path


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return _page(tmp_path_factory.mktemp("full"), *evaluation(), **CONTEXT)


def _rows(page: Page, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(page.downloads[f"{name}.csv"])))


def test_the_table_is_the_record(full: Made) -> None:
    page, record, _path = full
    assert list(page.rows) == list(record["methods"])
    for name, method in record["methods"].items():
        cells = [cell.strip() for cell in page.rows[name]]
        assert cells[0] == method_title(name)[0]
        for k, side in enumerate(("targets", "decoys")):
            s = method[side]["summary"]
            assert cells[1 + k].startswith(
                f"{s['n_good']} of {s['n']}{percent(s['good_fraction'])}"
            )
            assert cells[3 + k] == f"{s['n_identified']} of {s['n']}"
            assert cells[7 + k] == score(s["mean_ssim"]) + interval(s["mean_ssim_interval"])


def test_the_scores_under_the_pictures_are_the_records(full: Made) -> None:
    page, record, _path = full
    expected = []
    for side in ("targets", "decoys"):  # of five rows, in one band each
        rows = record["grid"][side]
        expected += [f"{record[side]['image_id'][row]}" for row in rows]
        expected += [
            f"{record['methods'][m][side]['ssim'][row]:.2f}"
            for m in record["grid"]["methods"]
            for row in rows
        ]
    found = [str(image["alt"]).split()[-1] for image in page.images]
    assert found[: len(expected)] == expected


def test_every_figure_has_its_numbers_in_the_page_and_beside_it(full: Made) -> None:
    page, record, path = full
    beside = (path.parent / "report-data").glob("*.csv")
    assert page.downloads == {file.name: file.read_bytes().decode() for file in beside}
    edm = record["methods"]["edm_x3"]
    scores = [float(row["edm_x3 ssim"]) for row in _rows(page, "before-after")]
    assert scores == [*edm["targets"]["ssim"], *edm["decoys"]["ssim"]]
    found = record["methods"]["plain"]["detection"]["roc"]["found"]
    roc = _rows(page, "roc")
    assert [float(row["found"]) for row in roc if row["method"] == "plain"] == found
    grid = [*record["grid"]["targets"], *record["grid"]["decoys"]]
    assert [int(row["row"]) for row in _rows(page, "best-images")] == grid
    examples = [row for row in _rows(page, "examples") if row["side"] == "decoys"]
    expected = [row for of_bin in record["examples"]["decoys"] for row in of_bin]
    assert [int(row["row"]) for row in examples] == expected


def test_the_figures_draw_the_numbers_of_the_csv(full: Made) -> None:
    page, record, path = full
    number = list(record["methods"]).index("edm_x3")
    source = path.read_text()
    group = re.search(rf'<g class="s{number} m\d+">(.*?)</g>', source, re.DOTALL)
    assert group is not None
    solid = re.search(r'class="curve targets" points="([^"]*)"', group[1])
    assert solid is not None
    heights = [float(point.split(",")[1]) for point in solid[1].split()]
    ranked = sorted(record["methods"]["edm_x3"]["targets"]["ssim"], reverse=True)
    shown = [row for row in _rows(page, "ranked-curves") if row["side"] == "targets"]
    assert [float(row["edm_x3 ssim"]) for row in shown] == ranked
    slope, base = np.polyfit(ranked, heights, 1)
    assert slope < 0
    np.testing.assert_allclose(np.polyval((slope, base), ranked), heights, atol=0.1)
    scores = record["methods"]["plain"]["decoys"]["ssim"]
    counts = _rows(page, "thresholds")
    assert int(counts[40]["plain decoys"]) == sum(value > 0.4 for value in scores)
    n_dots = re.findall(r'class="dots m\d+" d="([^"]*)"', source)[0].count("M")
    assert n_dots == len(record["targets"]["image_id"])


def test_a_report_is_made_again_from_its_folder_alone(full: Made, tmp_path: Path) -> None:
    path = full[2]
    assert saved_context(path.parent) == json.loads(json.dumps(CONTEXT))
    again = write_report(path.parent, saved_context(path.parent), page=tmp_path / "again.html")
    assert again.read_text() == path.read_text()
    record, pictures = evaluation()
    record["targets"]["margin"] = [None] * len(record["targets"]["margin"])
    write_report(write(tmp_path, record, pictures), {})  # a figure less than beside the other
    assert not (tmp_path / "report-data" / "margin.csv").exists()
    assert saved_context(tmp_path) == json.loads(json.dumps(CONTEXT))
    (tmp_path / "report-data" / "context.json").write_text('{"colour": 1}')
    with pytest.raises(ValueError, match=r"context.json is not a report's context; remove it"):
        saved_context(tmp_path)


@pytest.mark.parametrize(
    "how",
    [
        {"n_victims": 1, "attacks": 1, "outcomes": (0,)},
        {"n_victims": 1, "n_images": 1},
        {"planted": 0},
        {"outcomes": (2, 2, 2)},
        {"outcomes": (3, 3, 3)},
    ],
)
def test_an_evaluation_with_little_in_it_has_a_page(tmp_path: Path, how: dict[str, Any]) -> None:
    page, record, path = _page(tmp_path, *evaluation(**how))
    assert list(page.rows) == list(record["methods"])
    assert re.search(r"\bnan\b", path.read_text().partition("<body>")[2], re.IGNORECASE) is None
    assert contact_sheet(tmp_path).startswith(b"\x89PNG")
    assert attacks_sheet(tmp_path) is None


@pytest.mark.parametrize("make", [with_a_span, with_a_further_attack])
def test_a_span_and_further_attacks_are_shown(tmp_path: Path, make: Any) -> None:
    record, pictures = make()
    page, _record, path = _page(tmp_path, record, pictures)
    if make is with_a_span:
        shown = [page.rows[name][-1].strip() for name in ("edm_x3_projected", "tv", "oracle")]
        assert shown == ["50.0 %", "12.5 %", "–"]
        return
    rows = [int(row["row"]) for row in _rows(page, "attacks-side-by-side")]
    assert rows == [*record["side_by_side"]["targets"], *record["side_by_side"]["decoys"]]
    for name, told in (("plain_span", "24 8.5"), ("plain", "40 –")):
        row = re.search(f'<tr data-attack="{name}">(.*?)</tr>', path.read_text())
        assert row is not None
        cells = re.sub("<[^>]*>", " ", row[1]).split()
        method = record["methods"][name]
        assert score(method["targets"]["summary"]["mean_ssim"]) in cells
        assert " ".join(cells).endswith(told)
    sheet = attacks_sheet(tmp_path)
    assert sheet is not None
    assert sheet.startswith(b"\x89PNG")


def test_names_are_text_not_markup(tmp_path: Path) -> None:
    record, pictures = with_a_further_attack()
    for side in ("targets", "decoys"):
        record[side]["victim"] = [EVIL if v == 0 else v for v in record[side]["victim"]]
    record["side_by_side"]["victim"] = EVIL
    record["source"]["name"] = EVIL
    page, _record, _path = _page(tmp_path, record, pictures, **CONTEXT)
    assert "".join(page.text).count(EVIL) >= 4


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "has no finished evaluation"),
        ({"evaluation.json": "{}"}, "evaluation.json but no pictures.npz"),
        ({"evaluation.json": "{", "pictures.npz": ""}, "is not JSON"),
        ({"evaluation.json": "[]", "pictures.npz": ""}, "is a list, expected a JSON object"),
        (
            {"evaluation.json": '{"schema": "palimpsest-evaluation", "version": 2}',
             "pictures.npz": ""},
            "version 2, expected 'palimpsest-evaluation' version 5; run `palimpsest evaluate`",
        ),
        ({"evaluation.json": "{record}", "pictures.npz": "PK"}, "cannot be read"),
        (None, "is not a folder"),
    ],
)  # fmt: skip
def test_what_is_no_evaluation_is_refused(
    tmp_path: Path, files: dict[str, str] | None, said: str
) -> None:
    for name, content in (files or {}).items():
        text = json.dumps(evaluation()[0]) if content == "{record}" else content
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        write_report(tmp_path if files is not None else tmp_path / "nowhere", {})
    assert not list(tmp_path.glob("*.html"))
    with pytest.raises(ValueError, match=r"context has \['seed'\]; expected"):
        write_report(tmp_path, {"seed": 1})


def test_a_strip_holds_its_pictures_and_stays_light() -> None:
    rows = [np.random.default_rng(0).integers(0, 256, (5, 3, 8, 8), dtype=np.uint8)]
    (url,), exact = strips(rows, most_bytes=10**6)
    assert exact
    content = base64.b64decode(url.partition(",")[2])
    image = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    assert image.shape == (8, 5 * 9 - 1, 3)
    np.testing.assert_array_equal(image[:, 18:26].transpose(2, 0, 1), rows[0][2])
    (lossy,), exact = strips(rows, most_bytes=100)
    assert not exact
    assert lossy.startswith("data:image/webp;base64,")


def test_numbers_for_people() -> None:
    assert [percent(v) for v in (None, 0.0, 0.0125, 1.0)] == ["–", "0.0 %", "1.2 %", "100.0 %"]
    assert [score(v) for v in (None, -0.0625, 0.4)] == ["–", "−0.062", "0.400"]
    times = [duration(v) for v in (0.44, 41.2, 200, 7500)]
    assert times == ["0.4 s", "41 s", "3 min 20 s", "2 h 5 min"]
    assert method_title("edm_x20")[:2] == ("EDM, mean of 20", "EDM ×20")
    assert method_title("my_x_net")[0] == "my_x_net"
    assert method_title("deblur", "external")[2] == "a model brought by the user"
