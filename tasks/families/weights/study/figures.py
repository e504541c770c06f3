"""The figures of a study: from its record's list of figures to drawings, each with its table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

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
from tasks.page.formats import number, score, with_interval
from tasks.page.heatmaps import Square, heatmap
from tasks.page.pictures import data_uri
from tasks.page.study_page import Drawing, Figure, Row

SERIES_COLOURS = (2, 4, 3, 5, 6, 10, 11, 8, 7, 9, 0, 1)
SMALL = (260, 190)
FEW_PANELS = 2
THIRDS = (3, 5, 6, 9)  # numbers of panels that look better in rows of three than of four
WIDE_HEATMAP = 7  # columns
SCATTER_TITLES = {
    "margin": "distance from the decision boundary",
    "loss": "loss of the image",
}


def measure(value: str, found: float | None) -> str:
    """The value of a figure as its cells show it."""
    return VALUES[value][1](found)


def _said(row: Record, value: str) -> str:
    found = with_interval(partial(measure, value), (row[value], row["low"], row["high"]))
    return f"{row['name']}: {found}"


def _description(value: str, by: str, rows: Sequence[Record]) -> str:
    return f"{VALUES[value][0]} by {by}. {'; '.join(_said(row, value) for row in rows)}"


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
            off.append(_said(row, value))
            continue
        place = x["values"].index(at[0]), y["values"].index(at[1])
        if place in found:
            raise ValueError(
                f"figure {name!r} has two cells at {figure['x']}={at[0]!r}, {figure['y']}={at[1]!r}"
                f" ({found[place]['name']!r} and {row['name']!r}); give them panels of their own"
            )
        found[place] = row
    most = max((row[value] for row in found.values() if row[value] is not None), default=0.0)
    upwards = y["scale"] != "category"
    labels = [number(at) for at in y["values"]]
    svg = heatmap(
        [number(at) for at in x["values"]],
        labels[::-1] if upwards else labels,
        {
            (column, len(labels) - 1 - k if upwards else k): _square(row, value, most)
            for (column, k), row in found.items()
        },
        titles=(x["title"], y["title"]),
        description=_description(value, f"{x['title']} and {y['title']}", [*found.values()]),
    )
    reads = f"In each cell: {VALUES[value][0]}"
    more = {
        "scale": ("0", measure(value, most)) if most > 0 else None,
        "reads": reads + ("; below it, the share of the training pictures" * (value == "n_good")),
        "layout": "beside" if len(x["values"]) <= WIDE_HEATMAP else "",
    }
    notes = [f"Not on these axes: {'; '.join(off)}."] if off else []
    return Figure(figure, [table], [Row("", "", [Drawing(svg)])], notes=notes, more=more)


def _square(row: Record, value: str, most: float) -> Square:
    found = row[value]
    share = None if found is None else (found / most if most > 0 else 0.0)
    text = [measure(value, found)]
    if row.get("share") is not None:
        text.append(measure("good_fraction", row["share"]))
    return Square(share, text, _said(row, value))


def lines_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """A value along an axis, one line per value of the series (KKT paper, figures 5 and 9).

    Cells without a place on the axis (0 on a logarithmic one) are baselines too.
    """
    value, x, series = figure["value"], figure["x"], figure["series"]
    axis, cells = _axis(record, figure, "x"), _cells(record, figure)
    named = [_cell(record, figure, wanted) for wanted in figure["baselines"]]
    placed = [c for c in cells if c not in named and _has_place(axis, c["at"].get(x))]
    levels = [*named, *(c for c in cells if c not in placed and c not in named)]
    axes, numbers = [x, series] if series else [x], [cell["number"] for cell in levels]
    table = values_table(figure["name"], [*placed, *levels], axes, value, numbers)
    rows = list(table.rows())
    drawn: list[tuple[Style, str, list[Estimate]]] = []
    for k, group in enumerate(_axis(record, figure, "series")["values"] if series else [None]):
        mine = [r for r in rows if not r["baseline"] and (not series or r[f"at {series}"] == group)]
        if points := _points(figure, axis, mine):
            style = Style(k, SERIES_COLOURS[k % 12], (k + k // 12) % N_MARKERS)
            title = f"{record['axes'][series]['title']}: {number(group)}" if series else ""
            drawn.append((style, title, points))
    known = [(r["name"], r[value]) for r in rows if r["baseline"] and r[value] is not None]
    known.sort(key=lambda level: -level[1])
    panel = _lines_panel(axis, value, [p for _s, _t, ps in drawn for p in ps], known)
    parts = [
        *baselines(panel, [at for _name, at in known]),
        *estimates(panel, [(style, points) for style, _title, points in drawn]),
    ]
    svg = panel.svg(parts, _description(value, axis["title"], rows))
    unknown = [row["name"] for row in rows if row[value] is None]
    notes = [f"Without a number: {'; '.join(unknown)}."] if unknown else []
    if len(drawn) > 1:
        notes.append("The lines are set apart a little sideways, so that each mark can be seen.")
    if axis["scale"] == "category":
        labels = [number(at) for at in axis["values"]]
        if [label for _k, label in panel.x.ticks] != labels:
            notes.append(f"Across, from the left: {'; '.join(labels)}.")
    dotted = [
        (k % N_BASELINES, letter(k), f"{title}: {measure(value, at)}")
        for k, (title, at) in enumerate(known)
    ]
    legend = [(style, title) for style, title, _points in drawn] if series else []
    more = {"dotted": dotted, "layout": "beside"}
    return Figure(figure, [table], [Row("", "", [Drawing(svg)])], legend, notes, more)


def _points(figure: Record, axis: Record, rows: Sequence[Record]) -> list[Estimate]:
    """The rows in the order of the axis; for a text, its place on the axis stands for it."""
    value, x = figure["value"], figure["x"]
    points = []
    for row in rows:
        at = row[f"at {x}"]
        place = axis["values"].index(at) if axis["scale"] == "category" else at
        points.append(Estimate(place, row[value], row["low"], row["high"], _said(row, value)))
    points.sort(key=lambda point: point.x)
    if len({point.x for point in points}) < len(points):
        raise ValueError(
            f"figure {figure['name']!r} has two cells at the same {x} of one line "
            f"({'; '.join(point.about for point in points)}); name the axis in which they differ "
            "as its series, or give them panels of their own"
        )
    return points


def _lines_panel(
    axis: Record, value: str, points: Sequence[Estimate], levels: Sequence[tuple[str, float]]
) -> Panel:
    if axis["scale"] == "category":
        across = category_axis(axis["title"], [number(at) for at in axis["values"]])
    else:
        places, log = sorted({point.x for point in points}), axis["scale"] == "log"
        across = values_axis(axis["title"], places, [number(at) for at in places], log=log)
    ends = [end for p in points for end in (p.low, p.y, p.high) if end is not None]
    ends += [at for _name, at in levels]
    up = round_axis("", ends, from_zero=min(ends, default=0.0) >= 0)
    return Panel(VALUES[value][0], across, up)


def scatter_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """SSIM of every training image against its margin or loss, a panel per cell (KKT paper,
    figures 2, 4, 14 and 15)."""
    x, n_panels = figure["x"], len(figure["cells"])
    if x not in SCATTER_TITLES:
        raise ValueError(
            f"figure {figure['name']!r} has x {x!r}; expected one of {sorted(SCATTER_TITLES)}"
        )
    table = scatter_table(figure["name"], record, figure["cells"], x)
    small = n_panels > FEW_PANELS
    layout = "small" + (" thirds" if n_panels in THIRDS else "") if small else ""
    scores = [found for found in table.columns["ssim"] if isinstance(found, int | float)]
    low, panels, n_hidden = min(scores, default=0.0), [], 0
    for wanted in figure["cells"]:
        cell, rows = _cell(record, figure, wanted), table.where("cell", wanted)
        n_hidden += max(0, len(rows.points(x, "ssim")) - MAX_DOTS)
        decoys = [at for at in rows.columns["decoy_ssim"] if isinstance(at, int | float)]
        points, best = rows.points(x, "ssim"), max(decoys, default=None)
        panels.append(
            _scatter(
                cell,
                points,
                x,
                best=best,
                n=rows.n_rows,
                low=low,
                small=small,
                threshold=record["good_threshold"],
            )
        )
    notes = []
    if n_hidden:
        notes.append(f"{n_hidden} dots are not drawn, evenly picked; the CSV has all of them.")
    return Figure(figure, [table], [Row("", "", panels)], notes=notes, more={"layout": layout})


def _scatter(
    cell: Record,
    points: Sequence[tuple[float, float]],
    x: str,
    *,
    best: float | None,
    n: int,
    low: float,
    small: bool,
    threshold: float,
) -> Drawing:
    """A cell's panel; `best`: the highest SSIM of a decoy, `n`: images, known or not."""
    note = f"{cell['targets']['n_good']} of {cell['targets']['n']} good"
    note += f"; best decoy {score(best)}" if best is not None else ""
    if not points:
        return Drawing("", cell["name"], f"{note}; the {x} of its images is not known")
    if len(points) < n:
        note += f"; the {x} of {n - len(points)} images is not known"
    (width, height), title = SMALL if small else (WIDTH, HEIGHT), SCATTER_TITLES[x]
    places = [place for place, _score in points]
    across = loss_axis(f"{title} (log)", places, width) if x == "loss" else None
    across = across or fewer(round_axis(title, places), width)
    panel = Panel("SSIM", across, unit_axis("", [low]), width, height)
    parts = [dots(panel, points, [], colour=2), panel.horizontal(threshold)]
    parts += [panel.level(best)] if best is not None else []
    about = f"{cell['name']}: SSIM against {title}; {note}."
    return Drawing(panel.svg(parts, about), cell["name"], note)


def kernels_figure(record: Record, pictures: Arrays, figure: Record) -> Figure:
    """First-layer kernels as RGB pictures (KKT paper, figure 16)."""
    strips: list[dict[str, Any]] = []
    for wanted in figure["cells"]:
        cell = _cell(record, figure, wanted)
        tiles = list(pictures.get(f"kernels_{cell['number']:04d}", ()))
        size = " of {} × {}".format(*tiles[0].shape[1:]) if tiles else ""
        strips.append({"cell": cell, "tiles": [data_uri(tile) for tile in tiles], "size": size})
    table = kernels_table(figure["name"], pictures, figure["cells"])
    return Figure(figure, [table], more={"tiles": strips, "layout": ""})


def _cells(record: Record, figure: Record) -> list[Record]:
    also = figure.get("also", ())
    return [c for c in record["cells"] if c["panel"] == figure["panel"] or c["number"] in also]


def _cell(record: Record, figure: Record, wanted: int) -> Record:
    for cell in record["cells"]:
        if cell["number"] == wanted:
            return dict(cell)
    raise ValueError(
        f"figure {figure['name']!r} shows cell {wanted}, but the study has "
        f"{len(record['cells'])} cells, numbered from 0"
    )


def _axis(record: Record, figure: Record, key: str) -> dict[str, Any]:
    if figure[key] not in record["axes"]:
        raise ValueError(
            f"figure {figure['name']!r} has {key} {figure[key]!r}; expected an axis of the study: "
            f"{', '.join(record['axes'])}"
        )
    return dict(record["axes"][figure[key]])


def _has_place(axis: Record, at: Any) -> bool:
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
