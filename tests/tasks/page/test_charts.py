"""Charts as pure functions: where points fall, which ticks are set, what is thinned."""

from __future__ import annotations

import re

import pytest

from tasks.page.charts import (
    MAX_DOTS,
    MAX_POINTS,
    Line,
    Panel,
    Style,
    bands,
    dots,
    lines,
    log_axis,
    rank_axis,
    round_axis,
    unit_axis,
)
from tasks.page.files import Table
from tasks.report.figures import n_not_drawn

STYLE = Style(3, 2, 0)
UNIT = Panel("A & b", unit_axis("x"), unit_axis("y"))


def test_a_panel_maps_its_corners_and_escapes_its_words() -> None:
    assert UNIT.at((0, 0)) == (38, 250)
    assert UNIT.at((1, 1)) == (342, 28)
    svg = UNIT.svg([], 'of "x"')
    assert "A &amp; b" in svg
    assert 'aria-label="of &quot;x&quot;"' in svg


def test_lines_draw_decoys_below_targets_with_markers() -> None:
    (group,) = lines(UNIT, [Line(STYLE, [(0, 1), (1, 0)], [(0, 0.5), (1, 0.5)])])
    assert group.index("curve decoys") < group.index("curve targets") < group.index("marker")
    assert 'class="s3 m2"' in group
    assert 'points="38.0,28.0 342.0,250.0"' in group
    (thin,) = lines(UNIT, [Line(Style(3, 2, 0, thin=True), [(0, 1), (1, 0)])])
    assert "marker" not in thin
    (empty,) = lines(UNIT, [Line(STYLE, [])])
    assert "polyline" not in empty


def test_a_long_line_keeps_its_ends_and_a_point_has_a_length() -> None:
    points = [(k / 5000, k / 5000) for k in range(5001)]
    for drawn, n, ends in (
        (points, MAX_POINTS, ("38.0,250.0", "342.0,28.0")),
        ([(0.5, 0.5)], 2, ("190.0,139.0", "196.0,139.0")),
    ):
        (pairs,) = re.findall(r'points="([^"]*)"', lines(UNIT, [Line(STYLE, drawn)])[0])[:1]
        assert len(pairs.split()) == n
        assert (pairs.split()[0], pairs.split()[-1]) == ends


def test_a_band_goes_there_and_back_and_dots_and_crosses_are_counted() -> None:
    svg = bands(UNIT, [(STYLE, "decoys", [(0, 1), (1, 1)], [(0, 0.5), (1, 0.5)])])
    assert 'points="38.0,28.0 342.0,28.0 342.0,139.0 38.0,139.0"' in svg
    assert bands(UNIT, [(STYLE, "decoys", [], [])]) == ""
    targets = [(0.5, 0.5)] * (MAX_DOTS + 7)
    svg = dots(UNIT, targets, [(0.1, 0.1), (0.2, 0.2)], colour=4)
    circles, crosses = re.findall(r' d="([^"]*)"', svg)
    assert (circles.count("M"), crosses.count("M")) == (MAX_DOTS, 2)
    assert n_not_drawn(targets, [(0.1, 0.1)]) == 7


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.0, 1.0], ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([3.0, 97.0], ["0", "20", "40", "60", "80", "100"]),
        ([-0.4, 0.2], ["−0.4", "−0.2", "0.0", "0.2"]),
        ([5.0], ["2", "4", "6", "8"]),
        ([0.9229, 0.9369], ["0.922", "0.926", "0.930", "0.934", "0.938"]),
        ([1e-6, 5e-6], ["1e−6", "2e−6", "3e−6", "4e−6", "5e−6"]),
        ([], ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ],
)
def test_round_ticks(values: list[float], labels: list[str]) -> None:
    axis = round_axis("", values)
    assert [label for _value, label in axis.ticks] == labels
    assert all(0 <= axis.share(value) <= 1 for value in values)


def test_axes_begin_and_end_where_they_should() -> None:
    assert [label for _v, label in rank_axis("", 24).ticks] == ["1", "5", "10", "15", "20", "24"]
    assert [label for _v, label in rank_axis("", 1200).ticks][-1] == "1200"
    assert [label for _v, label in rank_axis("", 1).ticks] == ["1"]
    assert rank_axis("", 0).ticks == []
    assert unit_axis("", [-0.2, 0.5]).low == -0.2
    axis = log_axis("", 0.003)
    assert [label for _v, label in axis.ticks] == ["0.001", "0.01", "0.1", "1"]
    assert axis.share(0.01) == pytest.approx(1 / 3)
    assert log_axis("", 1.0).low == 0.1


def test_a_table_is_written_as_csv() -> None:
    table = Table("t", {"a": [1, None], "b, c": ['say "x"', 0.5]})
    assert table.csv() == 'a,"b, c"\r\n1,"say ""x"""\r\n,0.5\r\n'
    assert table.points("a", "b, c") == []
    assert table.where("a", 1).columns["b, c"] == ['say "x"']
    with pytest.raises(ValueError, match="columns of"):
        Table("t", {"a": [1], "b": []})
