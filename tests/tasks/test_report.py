"""The report: one file without requests, whose numbers are those of evaluation.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from storage.sources import ImageSet
from tasks.evaluate import Evaluation, evaluate
from tasks.report import (
    data_uri,
    duration,
    method_title,
    percent,
    score,
    victims,
    write_report,
)
from tasks.report_chart import ranked_curves
from tests.tasks.evaluations import Blender, image_set, planted_store, weights

VOID = {"meta", "img", "br", "link", "input", "hr"}
DRAWN = {"line", "polyline"}


class _Page(HTMLParser):
    """Checks that tags nest, and collects the text, the images, the links and the table rows."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.addresses: list[str] = []
        self.captions = 0
        self.rows: dict[str, list[str]] = {}
        self.method: str | None = None
        self.feed(page.read_text())
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.addresses += [v for k, v in attributes if k in ("src", "href", "srcset") and v]
        if tag == "img":
            self.images.append(found)
        if tag == "tr":
            self.method = found.get("data-method")
        if tag in ("td", "th") and self.method:
            self.rows.setdefault(self.method, []).append("")
        self.captions += tag == "caption"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in DRAWN

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)
        if self.method and self.rows.get(self.method) and "tr" in self.open:
            self.rows[self.method][-1] += data

    @property
    def prose(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))


def _report(
    tmp_path: Path,
    *,
    restorers: bool = True,
    context: Mapping[str, Any] | None = None,
    config: Evaluation | None = None,
    **store: Any,
) -> tuple[_Page, dict[str, Any], Path]:
    images: ImageSet = image_set()
    blenders = {"bf_dncnn": Blender(1), "edm": Blender()}
    out = tmp_path / "out"
    record = evaluate(
        config or Evaluation(n_samples=2, grid_rows=3),
        dataset=planted_store(tmp_path / "store", images, n_parts=1, **store),
        heldout=images,
        restorers={name: weights(tmp_path, name) for name in blenders} if restorers else {},
        out=out,
        device="cpu",
        load=lambda path, _device: (blenders[path.stem], nn.Identity()),
    )
    page = write_report(out, context or {})
    return _Page(page), record, page


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[_Page, dict[str, Any], Path]:
    context = {
        "created": "1 May",
        "command": "palimpsest demo --set <x>&co",
        "stages": [{"name": "generate", "seconds": 61.0}, {"name": "evaluate", "seconds": 2.5}],
        "recipe": {"family": "kkt", "widths": [20, 30], "phases": [{"n_runs": 4711}]},
        "machine": "a toaster",
        "seeds": {"root_seed": 17},
        "versions": {"torch": "9.9"},
        "pairs": {"n_pairs": 12345},
        "restorers": {"edm": {"n_steps": 678, "loss_curve": [[1, 0.98765]]}},
    }
    return _report(tmp_path_factory.mktemp("full"), context=context, planted=2)


def test_the_page_asks_nothing_of_the_network(full: tuple[_Page, dict[str, Any], Path]) -> None:
    page, _record, path = full
    assert page.addresses
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    source = path.read_text()
    for forbidden in ("http:", "https:", "url(", "@import", "<script", "<link", "<iframe"):
        assert forbidden not in source


def test_the_table_is_the_record(full: tuple[_Page, dict[str, Any], Path]) -> None:
    page, record, _path = full
    assert list(page.rows) == list(record["methods"])
    for name, method in record["methods"].items():
        expected = [method_title(name)[0]]
        summaries = [method[side]["summary"] for side in ("targets", "decoys")]
        for s in summaries:
            assert s["good_fraction"] == s["n_good"] / s["n"]
            low, high = s["good_interval"]
            assert low <= s["good_fraction"] <= high
            share = f"{percent(s['good_fraction'])}[{100 * low:.1f}, {100 * high:.1f}]"
            expected.append(f"{s['n_good']} of {s['n']}{share}")
        for metric in ("mean_ssim", "mean_haarpsi"):
            for s in summaries:
                low, high = s[f"{metric}_interval"]
                assert low <= s[metric] <= high
                expected.append(f"{score(s[metric])}[{score(low)}, {score(high)}]")
        expected.append(str(method["n_targets_above_every_decoy"]))
        assert [cell.strip() for cell in page.rows[name]] == expected


def test_the_scores_under_the_pictures_are_the_records(
    full: tuple[_Page, dict[str, Any], Path],
) -> None:
    page, record, _path = full
    expected = []
    for side, kind in (("targets", "Training picture"), ("decoys", "Decoy")):
        for row in record["grid"][side]:
            expected.append(f"{kind} {record[side]['image_id'][row]}")
            expected += [
                f"{method_title(m)[0]}, SSIM {record['methods'][m][side]['ssim'][row]:.2f}"
                for m in record["grid"]["methods"]
            ]
    assert [image["alt"] for image in page.images] == expected


def test_the_page_says_what_was_attacked_and_with_what(
    full: tuple[_Page, dict[str, Any], Path],
) -> None:
    page, record, _path = full
    good = record["methods"]["plain"]["targets"]["summary"]["n_good"]
    decoys = record["methods"]["plain"]["decoys"]["summary"]["n_good"]
    assert good >= 4
    assert "2 networks were trained on 4 pictures each, 8 in all, and then attacked." in page.prose
    assert re.search(rf"the attack alone, {good} of 8 training pictures", page.prose)
    assert re.search(rf"in the same way, {decoys} of 8 decoys", page.prose)
    assert "0.98765" not in page.prose
    for text in ("4711", "a toaster"):
        assert text in page.prose
    for text in ("1 min 1 s", "2.5 s", "1 min 4 s", "20, 30", "17", "9.9", "12345", "678", "1 May"):
        assert text in page.prose
    assert "palimpsest demo --set <x>&co" in page.prose
    assert page.captions == 1


def test_without_restorers(tmp_path: Path) -> None:
    page, record, _path = _report(tmp_path, restorers=False)
    assert list(page.rows) == ["plain", "plain_all", "nlm", "tv", "wavelet"]
    assert "After restoration" not in page.prose
    assert "Restorers are networks" not in page.prose
    assert len(page.images) == 2 * 2 * len(record["grid"]["targets"])


def test_when_nothing_is_good(tmp_path: Path) -> None:
    page, record, _path = _report(tmp_path, planted=0, config=Evaluation(good_threshold=0.99))
    assert record["methods"]["plain"]["targets"]["summary"]["n_good"] == 0
    assert "0 of 8 training pictures" in page.prose
    assert "None is good, that is, above 0.99" in page.prose


def test_one_run_and_runs_that_diverged(tmp_path: Path) -> None:
    page, record, path = _report(tmp_path / "one", outcomes=(0,))
    assert "What 1 trained network gave back" in page.prose
    assert "1 network was trained on 4 pictures, 4 in all" in page.prose
    page, record, path = _report(tmp_path / "nan", outcomes=(2, 2))
    assert record["dataset"]["outcomes"]["nonfinite"] == 2
    assert "In 2 runs of 2 the numbers diverged" in page.prose
    assert "0 of 8 training pictures" in page.prose
    assert 'aria-label="no picture"' in path.read_text()
    assert "nan" not in path.read_text(encoding="utf-8").partition("<body>")[2].lower().replace(
        "resonan", ""
    )


def test_without_pictures_there_is_no_grid(tmp_path: Path) -> None:
    page, _record, _path = _report(tmp_path, config=Evaluation(grid_rows=0), restorers=False)
    assert page.images == []
    assert "What came back" not in page.prose


def test_an_unfinished_or_foreign_evaluation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no finished evaluation"):
        write_report(tmp_path, {})
    (tmp_path / "pictures.npz").write_bytes(b"")
    (tmp_path / "evaluation.json").write_text(
        json.dumps({"schema": "palimpsest-evaluation", "version": 99})
    )
    with pytest.raises(ValueError, match="version 99, expected"):
        write_report(tmp_path, {})
    with pytest.raises(ValueError, match=r"context has \['seed'\]; expected"):
        write_report(tmp_path, {"seed": 1})


def test_the_page_can_go_elsewhere(tmp_path: Path) -> None:
    _page, _record, path = _report(tmp_path, restorers=False)
    elsewhere = write_report(path.parent, {}, page=tmp_path / "page.html")
    assert elsewhere == tmp_path / "page.html"
    assert elsewhere.read_text() == path.read_text()


def test_pictures_survive_the_encoding() -> None:
    import base64
    import io

    from PIL import Image

    picture = np.random.default_rng(0).integers(0, 256, (3, 8, 8), dtype=np.uint8)
    content = base64.b64decode(data_uri(picture).partition(",")[2])
    back = np.asarray(Image.open(io.BytesIO(content))).transpose(2, 0, 1)
    np.testing.assert_array_equal(back, picture)


def test_the_chart_draws_ranked_scores() -> None:
    svg = ranked_curves(
        {"A & b": ([0.2, 1.0, 0.6], [0.1]), "C": ([], [])}, threshold=0.4, description='of "x"'
    )
    assert svg.count("<polyline") == 2
    solid = re.search(r'class="curve targets m0" points="([^"]*)"', svg)
    assert solid is not None
    heights = [float(point.split(",")[1]) for point in solid[1].split()]
    assert heights == sorted(heights)
    assert heights[0] == 14.0  # a score of 1 is at the top
    assert "of &quot;x&quot;" in svg
    assert ranked_curves({}, threshold=0.4, description="").count("<polyline") == 0


def test_a_long_curve_keeps_its_ends() -> None:
    scores = np.linspace(0, 1, 5001).tolist()
    svg = ranked_curves({"A": (scores, [])}, threshold=0.4, description="")
    points = re.search(r'points="([^"]*)"', svg)
    assert points is not None
    pairs = points[1].split()
    assert len(pairs) == 400
    assert (pairs[0], pairs[-1]) == ("46.0,14.0", "706.0,354.0")


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


def test_the_victims_in_words() -> None:
    def record(victim: dict[str, Any]) -> dict[str, Any]:
        return {"dataset": {"manifest": {"campaign": {"experiment": {"victim": victim}}}}}

    two = "The networks are fully connected classifiers with hidden layers of 30 and 20 units. "
    assert victims(record({"widths": [30, 20]})) == two
    assert "hidden layer of 9 units" in victims(record({"widths": [9]}))
    assert victims(record({})) == ""
    assert victims({"dataset": {"manifest": {}}}) == ""
