"""The figures of a study: from its record's list of figures to drawings, each with its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tasks.families.weights.study.headline import measure
from tasks.families.weights.study.image_grids import kernels
from tasks.families.weights.study.tables import VALUES, kernels_table, scatter_table, values_table
from tasks.page.axes import (
    HEIGHT,
    WIDTH,
    category_axis,
    fewer,
    loss_axis,
    round_axis,
    unit_axis,
    values_axis,
)
from tasks.page.charts import (
    MAX_DOTS,
    N_BASELINES,
    N_MARKERS,
    Estimate,
    Panel,
    Style,
    baselines,
    dots,
    estimates,
    letter,
)
from tasks.page.files import Arrays, Record
from tasks.page.formats import number, with_interval
from tasks.page.heatmaps import Square, heatmap
from tasks.page.study_page import Drawing, Figure, Row
from tasks.page.tables import Table

SERIES_COLOURS = (2, 4, 3, 5, 6, 10, 11, 8, 7, 9, 0, 1)
SMALL = (260, 190)
FEW_PANELS = 2
THIRDS = (3, 5, 6, 9)  # numbers of panels that look better in rows of three than of four
WIDE_HEATMAP = 7  # columns
SCATTER_TITLES = {
    "margin": "distance from the decision boundary",
    "loss": "loss of the image",
}


def heat_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """A value by two axes (KKT paper, figures 3b and 7)."""
    name, value = figure["name"], figure["value"]
    x, y = (_axis(record, figure, key) for key in ("x", "y"))
    table = values_table(name, _cells(record, figure), (figure["x"], figure["y"]), value, ())
    found: dict[tuple[int, int], Record] = {}
    off = []
    for row in table.rows():
        at = row[f"at {figure['x']}"], row[f"at {figure['y']}"]
        if at[0] not in x["values"] or at[1] not in y["values"]:
            off.append(f"{row['name']}: {_said(row, value)}")
            continue
        place = x["values"].index(at[0]), y["values"].index(at[1])
        if place in found:
            raise ValueError(
                f"figure {name!r} has two cells at {figure['x']}={at[0]!r}, {figure['y']}={at[1]!r}"
                f" ({found[place]['name']!r} and {row['name']!r}); give them panels of their own"
            )
        found[place] = row
    most = max((row[value] for row in found.values() if row[value] is not None), default=0.0)
    last = len(y["values"]) - 1
    upwards = y["scale"] != "category"
    squares = {
        (column, last - k if upwards else k): _square(row, value, most)
        for (column, k), row in found.items()
    }
    labels = [number(at) for at in y["values"]]
    svg = heatmap(
        [number(at) for at in x["values"]],
        labels[::-1] if upwards else labels,
        squares,
        titles=(x["title"], y["title"]),
        description=f"{VALUES[value]} by {x['title']} and {y['title']}. "
        + "; ".join(f"{row['name']}: {_said(row, value)}" for row in found.values()),
    )
    notes = [f"Not on these axes: {'; '.join(off)}."] if off else []
    scale = ("0", measure(value, most)) if most > 0 else None
    layout = "beside" if len(x["values"]) <= WIDE_HEATMAP else ""
    reads = f"In each cell: {VALUES[value]}"
    reads += "; below it, the share of the training pictures" if value == "n_good" else ""
    more = {"scale": scale, "reads": reads, "layout": layout}
    return Figure(figure, [table], [Row("", "", [Drawing(svg)])], notes=notes, more=more)


def _square(row: Record, value: str, most: float) -> Square:
    found = row[value]
    share = None if found is None else (found / most if most > 0 else 0.0)
    text = [measure(value, found)]
    if row.get("share") is not None:
        text.append(measure("good_fraction", row["share"]))
    return Square(share, text, f"{row['name']}: {_said(row, value)}")


def _said(row: Record, value: str) -> str:
    return with_interval(partial(measure, value), (row[value], row["low"], row["high"]))


def lines_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """A value along an axis, one line per value of the series (KKT paper, figures 5 and 9).

    Cells without a place on the axis (0 on a logarithmic one) are baselines too.
    """
    name, value, axis = figure["name"], figure["value"], _axis(record, figure, "x")
    cells, x = _cells(record, figure), figure["x"]
    named = [_cell(record, figure, wanted) for wanted in figure["baselines"]]
    placed = [c for c in cells if c not in named and _has_place(axis, c["at"].get(x))]
    level_cells = [*named, *(c for c in cells if c not in placed and c not in named)]
    series = figure["series"]
    groups = _axis(record, figure, "series")["values"] if series else [None]
    table = values_table(
        name,
        [*placed, *level_cells],
        [x, series] if series else [x],
        value,
        [cell["number"] for cell in level_cells],
    )
    rows = list(table.rows())
    drawn = []
    for k, group in enumerate(groups):
        style = Style(k, SERIES_COLOURS[k % 12], (k + k // 12) % N_MARKERS)
        mine = [
            row
            for row in rows
            if not row["baseline"] and (not series or row[f"at {series}"] == group)
        ]
        points = _points(figure, axis, mine)
        if points:
            drawn.append((style, _group_title(record, series, group), points))
    levels = [(row["name"], row[value]) for row in rows if row["baseline"]]
    seen = sorted(
        ((title, at) for title, at in levels if at is not None), key=lambda item: -item[1]
    )
    panel = _lines_panel(axis, value, drawn, seen)
    svg = panel.svg(
        [
            *baselines(panel, [at for _name, at in seen]),
            *estimates(panel, [(style, points) for style, _title, points in drawn]),
        ],
        f"{VALUES[value]} by {axis['title']}. "
        + "; ".join(f"{row['name']}: {_said(row, value)}" for row in rows),
    )
    dotted = [
        (k % N_BASELINES, letter(k), f"{title}: {measure(value, at)}")
        for k, (title, at) in enumerate(seen)
    ]
    return Figure(
        figure,
        [table],
        [Row("", "", [Drawing(svg)])],
        legend=[(style, title) for style, title, _points in drawn] if series else [],
        notes=_lines_notes(axis, drawn, [row["name"] for row in rows if row[value] is None]),
        more={"dotted": dotted, "layout": "beside"},
    )


def _points(figure: Record, axis: Record, rows: Sequence[Record]) -> list[Estimate]:
    """The rows in the order of the axis; for a text, its place on the axis stands for it."""
    value, x = figure["value"], figure["x"]
    points = []
    for row in rows:
        at = row[f"at {x}"]
        place = axis["values"].index(at) if axis["scale"] == "category" else at
        about = f"{row['name']}: {_said(row, value)}"
        points.append(Estimate(place, row[value], row["low"], row["high"], about))
    points.sort(key=lambda point: point.x)
    places = [point.x for point in points]
    if len(set(places)) < len(places):
        raise ValueError(
            f"figure {figure['name']!r} has two cells at the same {x} of one line "
            f"({'; '.join(point.about for point in points)}); name the axis in which they differ "
            "as its series, or give them panels of their own"
        )
    return points


def _lines_panel(
    axis: Record,
    value: str,
    drawn: Sequence[tuple[Style, str, Sequence[Estimate]]],
    levels: Sequence[tuple[str, float]],
) -> Panel:
    points = [point for _style, _title, group in drawn for point in group]
    if axis["scale"] == "category":
        across = category_axis(axis["title"], [number(at) for at in axis["values"]])
    else:
        places = sorted({point.x for point in points})
        log = axis["scale"] == "log"
        across = values_axis(axis["title"], places, [number(at) for at in places], log=log)
    ends = [end for p in points for end in (p.low, p.y, p.high) if end is not None]
    ends += [at for _name, at in levels]
    up = round_axis("", ends, from_zero=min(ends, default=0.0) >= 0)
    return Panel(VALUES[value], across, up)


def _lines_notes(
    axis: Record,
    drawn: Sequence[tuple[Style, str, Sequence[Estimate]]],
    unknown: Sequence[str],
) -> list[str]:
    notes = [f"Without a number: {'; '.join(unknown)}."] if unknown else []
    if len(drawn) > 1:
        notes.append("The lines are set apart a little sideways, so that each mark can be seen.")
    if axis["scale"] == "category":
        labels = [number(at) for at in axis["values"]]
        if [label for _k, label in category_axis("", labels).ticks] != labels:
            notes.append(f"Across, from the left: {'; '.join(labels)}.")
    return notes


def _group_title(record: Record, series: str | None, group: Any) -> str:
    return f"{record['axes'][series]['title']}: {number(group)}" if series else ""


def scatter_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """SSIM of every training image against its margin or loss, a panel per cell (KKT paper,
    figures 2, 4, 14 and 15)."""
    x = figure["x"]
    if x not in SCATTER_TITLES:
        raise ValueError(
            f"figure {figure['name']!r} has x {x!r}; expected one of {sorted(SCATTER_TITLES)}"
        )
    table = scatter_table(figure["name"], record, figure["cells"], x)
    n_panels = len(figure["cells"])
    small = n_panels > FEW_PANELS
    layout = "small" + (" thirds" if n_panels in THIRDS else "") if small else ""
    scores = [score for score in table.columns["ssim"] if isinstance(score, int | float)]
    panels, n_hidden = [], 0
    for wanted in figure["cells"]:
        rows, cell = table.where("cell", wanted), _cell(record, figure, wanted)
        points = rows.points(x, "ssim")
        n_hidden += max(0, len(points) - MAX_DOTS)
        panels.append(
            _scatter(record, cell, rows, points, x, low=min(scores, default=0.0), small=small)
        )
    notes = []
    if n_hidden:
        notes.append(f"{n_hidden} dots are not drawn, evenly picked; the CSV has all of them.")
    return Figure(figure, [table], [Row("", "", panels)], notes=notes, more={"layout": layout})


def _scatter(
    record: Record,
    cell: Record,
    rows: Table,
    points: Sequence[tuple[float, float]],
    x: str,
    *,
    low: float,
    small: bool,
) -> Drawing:
    targets = cell["targets"]
    note = f"{targets['n_good']} of {targets['n']} good"
    decoys = [score for score in rows.columns["decoy_ssim"] if isinstance(score, int | float)]
    best = max(decoys, default=None)
    if best is not None:
        note += f"; best decoy {measure('mean_ssim', best)}"
    if not points:
        return Drawing("", cell["name"], f"{note}; the {x} of its images is not known")
    if len(points) < rows.n_rows:
        note += f"; the {x} of {rows.n_rows - len(points)} images is not known"
    width, height = SMALL if small else (WIDTH, HEIGHT)
    places = [place for place, _score in points]
    across = loss_axis(f"{SCATTER_TITLES[x]} (log)", places, width) if x == "loss" else None
    across = across or fewer(round_axis(SCATTER_TITLES[x], places), width)
    panel = Panel("SSIM", across, unit_axis("", [low]), width, height)
    parts = [dots(panel, points, [], colour=2), panel.horizontal(record["good_threshold"])]
    if best is not None:
        parts.append(panel.level(best))
    about = f"{cell['name']}: SSIM against {SCATTER_TITLES[x]}; {note}."
    return Drawing(panel.svg(parts, about), cell["name"], note)


def kernels_figure(record: Record, pictures: Arrays, figure: Record) -> Figure:
    """First-layer kernels as RGB pictures (KKT paper, figure 16)."""
    cells = [_cell(record, figure, wanted) for wanted in figure["cells"]]
    table = kernels_table(figure["name"], pictures, figure["cells"])
    return Figure(figure, [table], more={"tiles": kernels(pictures, cells), "layout": ""})


def _cells(record: Record, figure: Record) -> list[Record]:
    also = figure.get("also", ())
    return [
        cell
        for cell in record["cells"]
        if cell["panel"] == figure["panel"] or cell["number"] in also
    ]


def _cell(record: Record, figure: Record, wanted: int) -> Record:
    for cell in record["cells"]:
        if cell["number"] == wanted:
            return dict(cell)
    raise ValueError(
        f"figure {figure['name']!r} shows cell {wanted}, but the study has "
        f"{len(record['cells'])} cells, numbered from 0"
    )


def _axis(record: Record, figure: Record, key: str) -> Record:
    axes: Mapping[str, Record] = record["axes"]
    if figure[key] not in axes:
        raise ValueError(
            f"figure {figure['name']!r} has {key} {figure[key]!r}; expected an axis of the study: "
            f"{', '.join(axes)}"
        )
    return axes[figure[key]]


def _has_place(axis: Record, at: Any) -> bool:
    """True if `at` can be drawn on the axis."""
    if axis["scale"] == "category":
        return at in axis["values"]
    if isinstance(at, bool) or not isinstance(at, int | float):
        return False
    return axis["scale"] != "log" or at > 0


KINDS = {
    "heatmap": heat_figure,
    "lines": lines_figure,
    "scatter": scatter_figure,
    "kernels": kernels_figure,
}
