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

from tasks.page.formats import NOTHING, duration, interval, percent, score
from tasks.page.pictures import strips
from tasks.report.figures import images_table, styles
from tasks.report.headline import method_title
from tasks.report.image_grids import attacks_sheet, curves_sheet
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

CONTEXT = {
    "created": "1 May",
    "command": "palimpsest demo --set <x>&co",
    "stages": [{"name": "generate", "seconds": 61.0}, {"name": "evaluate", "seconds": 2.5}],
    "recipe": {"family": "kkt", "widths": [20, 30], "phases": [{"n_runs": 4711}]},
    "machine": "a toaster",
    "seeds": {"root_seed": 17},
    "versions": {"torch": "9.9"},
    "pairs": {"n_pairs": 12345},
    "restorers": {
        "edm": {
            "n_steps": 678,
            "loss_curve": [[1, 0.98765]],
            "restorer": {"strength": 0.3},
            "validation": {"strength_curve": [[0.0, 0.4], [0.3, 0.5]]},
        },
        "bf_dncnn": {
            "restorer": {"strength": 0.0},
            "validation": {"strength_curve": [[0.0, 0.4], [0.3, 0.4]]},
        },
        "full": {"restorer": {"strength": 1.0}, "validation": {"strength_curve": []}},
    },
}
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


def test_the_table_is_the_record(full: Made) -> None:
    page, record, _path = full
    assert list(page.rows) == list(record["methods"])
    for name, method in record["methods"].items():
        expected = [method_title(name)[0]]
        summaries = [method[side]["summary"] for side in ("targets", "decoys")]
        for s in summaries:
            low, high = s["good_interval"]
            share = f"{percent(s['good_fraction'])}[{100 * low:.1f}, {100 * high:.1f}]"
            expected.append(f"{s['n_good']} of {s['n']}{share}")
        expected += [f"{s['n_identified']} of {s['n']}" for s in summaries]
        expected += [f"{s['n_good_ssim3']}mean {score(s['mean_ssim3'])}" for s in summaries]
        for metric in ("mean_ssim", "mean_haarpsi"):
            expected += [score(s[metric]) + interval(s[f"{metric}_interval"]) for s in summaries]
        expected += [
            percent(method["detection"]["found_at"][rate]) for rate in ("0", "0.01", "0.05")
        ]
        expected.append(str(method["n_targets_above_every_decoy"]))
        assert [cell.strip() for cell in page.rows[name]] == expected


def test_methods_inside_the_span_have_their_share_of_the_headroom(tmp_path: Path) -> None:
    page, record, _path = _page(tmp_path, *with_a_span(), **CONTEXT)
    shown = [page.rows[name][-1].strip() for name in ("edm_x3_projected", "tv", "oracle")]
    assert shown == ["50.0 %", "12.5 %", NOTHING]
    table = list(csv.DictReader(io.StringIO(page.downloads["methods.csv"])))
    closed = {row["method"]: row["headroom_closed"] for row in table}
    assert (closed["edm_x3_projected"], closed["plain"]) == ("0.5", "")
    looks = styles(record)
    assert looks["edm_x3_projected"].colour == looks["edm_x3"].colour
    assert [looks[name].twin for name in ("edm_x3_projected", "edm_x3")] == [True, False]
    assert curves_sheet(tmp_path).startswith(b"\x89PNG")


def test_the_scores_under_the_pictures_are_the_records(full: Made) -> None:
    page, record, _path = full
    expected = []
    for side, kind in (("targets", "Training picture"), ("decoys", "Decoy")):
        rows = record["grid"][side]
        for first in range(0, len(rows), 15):
            band = rows[first : first + 15]
            expected += [f"{kind} {record[side]['image_id'][row]}" for row in band]
            expected += [
                f"{method_title(m)[0]}, SSIM {record['methods'][m][side]['ssim'][row]:.2f}"
                for m in record["grid"]["methods"]
                for row in band
            ]
    assert [image["alt"] for image in page.images][: len(expected)] == expected


def test_every_figure_has_its_numbers_in_the_page_and_beside_it(full: Made) -> None:
    page, record, path = full
    beside = {file.name: file.read_bytes().decode() for file in _data(path).glob("*.csv")}
    assert page.downloads == beside
    rows = list(csv.DictReader(io.StringIO(beside["before-after.csv"])))
    assert [float(row["edm_x3 ssim"]) for row in rows] == [
        value
        for side in ("targets", "decoys")
        for value in record["methods"]["edm_x3"][side]["ssim"]
    ]
    roc = list(csv.DictReader(io.StringIO(beside["roc.csv"])))
    found = record["methods"]["plain"]["detection"]["roc"]["found"]
    assert [float(row["found"]) for row in roc if row["method"] == "plain"] == found
    examples = list(csv.DictReader(io.StringIO(beside["examples.csv"])))
    assert [int(row["row"]) for row in examples if row["side"] == "decoys"] == [
        row for of_bin in record["examples"]["decoys"] for row in of_bin
    ]
    best = list(csv.DictReader(io.StringIO(beside["best-images.csv"])))
    assert [int(row["row"]) for row in best] == [
        *record["grid"]["targets"],
        *record["grid"]["decoys"],
    ]


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
    table = list(csv.DictReader(io.StringIO(page.downloads["ranked-curves.csv"])))
    shown = [float(row["edm_x3 ssim"]) for row in table if row["side"] == "targets"]
    assert shown == ranked
    slope, base = np.polyfit(ranked, heights, 1)
    assert slope < 0
    np.testing.assert_allclose(np.polyval((slope, base), ranked), heights, atol=0.1)
    counts = list(csv.DictReader(io.StringIO(page.downloads["thresholds.csv"])))
    scores = record["methods"]["plain"]["decoys"]["ssim"]
    assert int(counts[40]["plain decoys"]) == sum(value > 0.4 for value in scores)
    n_dots = re.findall(r'class="dots m\d+" d="([^"]*)"', source)[0].count("M")
    assert n_dots == images_table(record).where("side", "targets").n_rows


def test_a_report_is_made_again_from_its_folder_alone(full: Made, tmp_path: Path) -> None:
    path = full[2]
    assert saved_context(path.parent) == json.loads(json.dumps(CONTEXT))
    again = write_report(path.parent, saved_context(path.parent), page=tmp_path / "again.html")
    assert again.read_text() == path.read_text()
    assert saved_context(write(tmp_path / "fresh", *evaluation())) == {}
    (tmp_path / "fresh" / "report-data").mkdir()
    (tmp_path / "fresh" / "report-data" / "context.json").write_text('{"colour": 1}')
    with pytest.raises(ValueError, match=r"context.json is not a report's context; remove it"):
        saved_context(tmp_path / "fresh")


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


def test_an_earlier_figure_does_not_stay_beside_the_page(tmp_path: Path) -> None:
    _page(tmp_path, *evaluation())
    record, pictures = evaluation()
    record["targets"]["margin"] = [None] * len(record["targets"]["margin"])
    _page(tmp_path, record, pictures)
    assert not (_data(tmp_path / "report.html") / "margin.csv").exists()


def test_attacks_on_the_same_victims_are_shown_side_by_side(tmp_path: Path) -> None:
    record, pictures = with_a_further_attack()
    for side in ("targets", "decoys"):
        record[side]["victim"] = ["<b>" if v == 0 else v for v in record[side]["victim"]]
    record["side_by_side"]["victim"] = "<b>"
    page, _record, path = _page(tmp_path / "full", record, pictures)
    text, data = path.read_text(), path.parent / "report-data"
    section = text[text.index('<h2 id="attacks">') : text.index('<h2 id="came-back">')]
    assert section.index("Span attack") < section.index("KKT attack")
    assert "network &lt;b&gt; was" in section
    assert "<b> was" not in section
    for name, title, seconds, guesses in (
        ("plain_span", "Span attack", "8.5", "24"),
        ("plain", "KKT attack", "–", "40"),
    ):
        method = record["methods"][name]
        sides = [method[side]["summary"] for side in ("targets", "decoys")]
        row = re.search(f'<tr data-attack="{name}">(.*?)</tr>', section)
        assert row is not None
        cells = [re.sub("<[^>]*>", "", cell) for cell in re.split("</t[hd]>", row[1])[:-1]]
        assert cells == [
            title,
            *(f"{s['n_good']} of {s['n']}" for s in sides),
            *(score(s["mean_ssim"]) for s in sides),
            *(percent(method["detection"]["found_at"][rate]) for rate in ("0", "0.01", "0.05")),
            guesses,
            seconds,
        ]
    rows = record["side_by_side"]["targets"]
    shown = re.findall(r'alt="(Span attack|Attack alone), SSIM ([0-9.]+)"', section)
    for method, title in (("plain_span", "Span attack"), ("plain", "Attack alone")):
        expected = [f"{record['methods'][method]['targets']['ssim'][row]:.2f}" for row in rows]
        assert [ssim for name, ssim in shown if name == title][:4] == expected
    table = list(csv.DictReader(io.StringIO((data / "attacks-side-by-side.csv").read_text())))
    assert [int(row["row"]) for row in table] == [*rows, 3, 1]
    assert "attacks" not in page.rows
    sheet = attacks_sheet(path.parent)
    assert sheet is not None
    assert sheet.startswith(b"\x89PNG")
    assert attacks_sheet(write(tmp_path / "one", *evaluation())) is None
    assert 'id="attacks"' not in _page(tmp_path / "old", *evaluation())[2].read_text()


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
    ],
)  # fmt: skip
def test_what_is_no_evaluation_is_refused(tmp_path: Path, files: dict[str, str], said: str) -> None:
    for name, content in files.items():
        text = json.dumps(evaluation()[0]) if content == "{record}" else content
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        write_report(tmp_path, {})
    assert not (tmp_path / "report.html").exists()


def test_a_wrong_folder_or_context_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder"):
        write_report(tmp_path / "nowhere", {})
    with pytest.raises(ValueError, match=r"context has \['seed'\]; expected"):
        write_report(tmp_path, {"seed": 1})


def _data(page: Path) -> Path:
    return page.parent / "report-data"


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
    assert [duration(v) for v in (0.44, 41.2, 200, 7500)] == [
        "0.4 s",
        "41 s",
        "3 min 20 s",
        "2 h 5 min",
    ]
    assert method_title("edm_x20")[:2] == ("EDM, mean of 20", "EDM ×20")
    assert method_title("my_x_net")[0] == "my_x_net"
    assert method_title("deblur", "external")[2] == "a model brought by the user"
