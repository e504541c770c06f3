"""The page of a study of the attacks on weights (docs/pages.md): its tables, which are also the CSV
files beside it, and its figures, each drawn from its table so that the two cannot differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from tasks.page.charts import (
    HEIGHT,
    MAX_DOTS,
    N_BASELINES,
    N_MARKERS,
    WIDTH,
    Estimate,
    Panel,
    Style,
    baselines,
    category_axis,
    dots,
    estimates,
    fewer,
    letter,
    loss_axis,
    round_axis,
    unit_axis,
    values_axis,
)
from tasks.page.files import (
    Arrays,
    Cell,
    Record,
    Table,
    cells_of,
    claim_counts,
    claims_table,
    table_of,
)
from tasks.page.formats import count, fixed, number, percent, plural, score, with_interval
from tasks.page.heatmaps import Square, heatmap
from tasks.page.pictures import data_uri
from tasks.page.study_page import Drawing, Figure, Row, StudyPage, Tables

VALUES: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "n_good": ("good reconstructions per network", count),
    "good_fraction": ("share of good reconstructions", percent),
    "mean_ssim": ("mean SSIM", score),
    "test_accuracy": ("test accuracy", percent),
    "n_effective": ("effective number of images", count),
    "attack_seconds": ("seconds of an attack", count),
}
"""Values of a cell that figures can show: title and format."""
VICTIM_KEYS = (
    *("train_loss", "train_accuracy", "test_accuracy"),
    *("n_effective", "n_good", "mean_ssim"),
)
IMAGE_KEYS = ("victim", "image_id", "label")
SERIES_COLOURS = (2, 4, 3, 5, 6, 10, 11, 8, 7, 9, 0, 1)
SMALL = (260, 190)
FEW_PANELS = 2
THIRDS = (3, 5, 6, 9)  # numbers of panels that look better in rows of three than of four
WIDE_HEATMAP = 7  # columns
LARGE_CELLS = 6  # with more cells, their pictures are shown smaller
SCATTER_TITLES = {
    "margin": "distance from the decision boundary",
    "loss": "loss of the image",
}


def known_mean(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def measured(cell: Record, value: str) -> tuple[float | None, float | None, float | None]:
    """(`value` of a cell, low and high end of its interval), None where unknown."""
    targets, n_victims = cell["targets"], len(cell["victims"])
    if value == "attack_seconds":
        n_attacks = n_victims * cell["n_attacks"]
        return cell["seconds"] / n_attacks if n_attacks else None, None, None
    if value in ("test_accuracy", "n_effective"):
        return known_mean(cell["victim"][value]), None, None
    interval = "mean_ssim_interval" if value == "mean_ssim" else "good_interval"
    low, high = targets[interval] or (None, None)
    if value != "n_good":
        return targets[value], low, high
    per_victim = targets["n"] / n_victims if n_victims else 0.0
    found = targets["n_good"] / n_victims if n_victims else None
    if low is None or high is None:
        return found, None, None
    return found, low * per_victim, high * per_victim


def values_table(
    name: str, cells: Sequence[Record], axes: Sequence[str], value: str, baselines: Sequence[int]
) -> Table:
    """One row per cell of a heatmap or of lines: its position, its value and the interval."""
    rows: list[dict[str, Cell]] = []
    for cell in cells:
        found, low, high = measured(cell, value)
        rows.append(
            {"cell": cell["number"], "name": cell["name"]}
            | {f"at {axis}": cell["at"].get(axis) for axis in axes}
            | {"baseline": cell["number"] in baselines}
            | {value: found, "low": low, "high": high}
            | ({"share": cell["targets"]["good_fraction"]} if value == "n_good" else {})
        )
    named = ("cell", "name", *(f"at {axis}" for axis in axes), "baseline", value, "low", "high")
    return table_of(name, rows, named)


def own_tables(record: Record) -> list[Table]:
    """The tables of every page: cells, networks, claims, and the pairs that are shown."""
    cells: list[dict[str, Cell]] = []
    for cell in record["cells"]:
        row: dict[str, Cell] = {key: cell[key] for key in ("number", "name", "panel")}
        row |= {f"at {axis}": cell["at"].get(axis) for axis in record["axes"]}
        row |= {"n_images": cell["n_images"], "n_victims": len(cell["victims"])}
        row["n_attacks"] = cell["n_attacks"]
        for side in ("targets", "decoys"):
            row |= cells_of(cell[side], f"{side} ")
        row["auc"] = cell["auc"]
        vote = dict(cell["vote"] or {})
        row |= {f"nearest {key}": value for key, value in vote.pop("nearest", {}).items()}
        row |= {f"vote {key}": value for key, value in vote.items()}
        row |= {key: known_mean(cell["victim"][key]) for key in VICTIM_KEYS[:4]}
        row |= {f"runs {outcome}": n for outcome, n in cell["outcomes"].items()}
        cells.append(row | {"seconds": cell["seconds"]})
    networks: list[dict[str, Cell]] = [
        {"cell": cell["number"], "victim": victim}
        | {key: cell["victim"][key][k] for key in VICTIM_KEYS}
        for cell in record["cells"]
        for k, victim in enumerate(cell["victims"])
    ]
    images = record["images"]
    shown: list[dict[str, Cell]] = [
        {"cell": cell["number"], "place": place, "row": row}
        | {key: images[key][row] for key in (*IMAGE_KEYS, "ssim")}
        for cell in record["cells"]
        for place, row in enumerate(cell["shown"], 1)
    ]
    return [
        table_of("cells", cells, ("number", "name", "panel")),
        table_of("victims", networks, ("cell", "victim", *VICTIM_KEYS)),
        claims_table(record),
        table_of("shown", shown, ("cell", "place", "row", *IMAGE_KEYS, "ssim")),
    ]


def _text(row: Record, value: str) -> str:
    """A row of a figure's table in words, for tooltips and screen readers."""
    found = with_interval(VALUES[value][1], (row[value], row["low"], row["high"]))
    return f"{row['name']}: {found}"


def _description(value: str, by: str, rows: Sequence[Record]) -> str:
    return f"{VALUES[value][0]} by {by}. {'; '.join(_text(row, value) for row in rows)}"


def heat_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """A value by two axes (KKT paper, figures 3b and 7)."""
    name, value = figure["name"], figure["value"]
    title, show = VALUES[value]
    x, y = (record["axes"][figure[key]] for key in ("x", "y"))
    table = values_table(name, _cells(record, figure), (figure["x"], figure["y"]), value, ())
    found: dict[tuple[int, int], Record] = {}
    off = []
    for row in table.rows():
        at = row[f"at {figure['x']}"], row[f"at {figure['y']}"]
        if at[0] not in x["values"] or at[1] not in y["values"]:
            off.append(_text(row, value))
            continue
        place = x["values"].index(at[0]), y["values"].index(at[1])
        if place in found:
            raise ValueError(
                f"figure {name!r} has two cells at {figure['x']}={at[0]!r}, {figure['y']}={at[1]!r}"
                f" ({found[place]['name']!r} and {row['name']!r}); give them panels of their own"
            )
        found[place] = row
    most = max((row[value] for row in found.values() if row[value] is not None), default=0.0)
    labels, upwards = [number(at) for at in y["values"]], y["scale"] != "category"
    squares: dict[tuple[int, int], Square] = {}
    for (column, k), row in found.items():
        part = None if row[value] is None else (row[value] / most if most > 0 else 0.0)
        lines = [show(row[value])]
        lines += [percent(row["share"])] if row.get("share") is not None else []
        line = len(labels) - 1 - k if upwards else k
        squares[column, line] = Square(part, lines, _text(row, value))
    svg = heatmap(
        [number(at) for at in x["values"]],
        labels[::-1] if upwards else labels,
        squares,
        titles=(x["title"], y["title"]),
        description=_description(value, f"{x['title']} and {y['title']}", [*found.values()]),
    )
    reads = f"In each cell: {title}"
    more = {
        "scale": ("0", show(most)) if most > 0 else None,
        "reads": reads + ("; below it, the share of the training pictures" * (value == "n_good")),
        "layout": "beside" if len(x["values"]) <= WIDE_HEATMAP else "",
    }
    notes = [f"Not on these axes: {'; '.join(off)}."] if off else []
    return Figure(figure, [table], [Row("", "", [Drawing(svg)])], notes=notes, more=more)


def lines_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """A value along an axis, a line per value of the series (KKT paper, figures 5 and 9).

    Cells without a position on the axis, such as 0 on a logarithmic one, become baselines.
    """
    value, x, series = figure["value"], figure["x"], figure["series"]
    (title, show), axis, cells = VALUES[value], record["axes"][x], _cells(record, figure)
    category, wanted = axis["scale"] == "category", figure["baselines"]
    levels = [record["cells"][k] for k in wanted]
    placed: list[Record] = []
    for cell in cells:
        at = cell["at"].get(x)
        is_number = isinstance(at, int | float) and not isinstance(at, bool)
        on_axis = at in axis["values"] if category else is_number
        if on_axis and axis["scale"] == "log":
            on_axis = at > 0
        if cell["number"] not in wanted:
            (placed if on_axis else levels).append(cell)
    axes, numbers = [x, series] if series else [x], [cell["number"] for cell in levels]
    table = values_table(figure["name"], [*placed, *levels], axes, value, numbers)
    rows = list(table.rows())
    drawn: list[tuple[Style, str, list[Estimate]]] = []
    for k, group in enumerate(record["axes"][series]["values"] if series else [None]):
        mine = [r for r in rows if not r["baseline"] and (not series or r[f"at {series}"] == group)]
        points = []
        for row in mine:
            at = axis["values"].index(row[f"at {x}"]) if category else row[f"at {x}"]
            points.append(Estimate(at, row[value], row["low"], row["high"], _text(row, value)))
        points.sort(key=lambda point: point.x)
        if len({point.x for point in points}) < len(points):
            raise ValueError(
                f"figure {figure['name']!r} has two cells at the same {x} of one line "
                f"({'; '.join(point.about for point in points)}); name the axis in which they "
                "differ as its series, or give them panels of their own"
            )
        if points:
            style = Style(k, SERIES_COLOURS[k % 12], (k + k // 12) % N_MARKERS)
            legend = f"{record['axes'][series]['title']}: {number(group)}" if series else ""
            drawn.append((style, legend, points))
    known = [(r["name"], r[value]) for r in rows if r["baseline"] and r[value] is not None]
    known.sort(key=lambda level: -level[1])
    every = [point for _style, _legend, points in drawn for point in points]
    places = axis["values"] if category else sorted({point.x for point in every})
    labels = [number(at) for at in places]
    across = category_axis(axis["title"], labels)
    if not category:
        across = values_axis(axis["title"], places, labels, log=axis["scale"] == "log")
    ends = [end for p in every for end in (p.low, p.y, p.high) if end is not None]
    ends += [at for _name, at in known]
    panel = Panel(title, across, round_axis("", ends, from_zero=min(ends, default=0.0) >= 0))
    parts = [
        *baselines(panel, [at for _name, at in known]),
        *estimates(panel, [(style, points) for style, _legend, points in drawn]),
    ]
    svg = panel.svg(parts, _description(value, axis["title"], rows))
    unknown = [row["name"] for row in rows if row[value] is None]
    notes = [f"Without a number: {'; '.join(unknown)}."] if unknown else []
    if len(drawn) > 1:
        notes.append("The lines are set apart a little sideways, so that each mark can be seen.")
    if category and [label for _k, label in panel.x.ticks] != labels:
        notes.append(f"Across, from the left: {'; '.join(labels)}.")
    dotted = [
        (k % N_BASELINES, letter(k), f"{name}: {show(at)}") for k, (name, at) in enumerate(known)
    ]
    legends = [(style, legend) for style, legend, _points in drawn] if series else []
    more = {"dotted": dotted, "layout": "beside"}
    return Figure(figure, [table], [Row("", "", [Drawing(svg)])], legends, notes, more)


def scatter_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """SSIM of every training image against its margin or loss, one panel per cell (KKT paper,
    figures 2, 4, 14 and 15)."""
    x, wanted, images = figure["x"], figure["cells"], record["images"]
    place = {number: k for k, number in enumerate(wanted)}
    rows = [row for row, cell in enumerate(images["cell"]) if cell in place]
    rows.sort(key=lambda row: place[images["cell"][row]])
    columns = ("cell", *IMAGE_KEYS, x, "ssim", "decoy_ssim")
    table = Table(figure["name"], {key: [images[key][row] for row in rows] for key in columns})
    small = len(wanted) > FEW_PANELS
    layout = "small" + (" thirds" if len(wanted) in THIRDS else "") if small else ""
    scores = [found for found in table.columns["ssim"] if isinstance(found, int | float)]
    low, panels, n_hidden = min(scores, default=0.0), [], 0
    for k in wanted:
        own = table.where("cell", k)
        n_hidden += max(0, len(own.points(x, "ssim")) - MAX_DOTS)
        panels.append(_scatter(record, record["cells"][k], own, x, low=low, small=small))
    notes = []
    if n_hidden:
        notes.append(f"{n_hidden} dots are not drawn, evenly picked; the CSV has all of them.")
    return Figure(figure, [table], [Row("", "", panels)], notes=notes, more={"layout": layout})


def _scatter(
    record: Record, cell: Record, rows: Table, x: str, *, low: float, small: bool
) -> Drawing:
    """Draw a cell's panel; `low`: the lowest SSIM of all panels."""
    points = rows.points(x, "ssim")
    decoys = [at for at in rows.columns["decoy_ssim"] if isinstance(at, int | float)]
    note = f"{cell['targets']['n_good']} of {cell['targets']['n']} good"
    note += f"; best decoy {score(max(decoys))}" if decoys else ""
    if not points:
        return Drawing("", cell["name"], f"{note}; the {x} of its images is not known")
    if len(points) < rows.n_rows:
        note += f"; the {x} of {rows.n_rows - len(points)} images is not known"
    (width, height), title = SMALL if small else (WIDTH, HEIGHT), SCATTER_TITLES[x]
    places = [place for place, _score in points]
    across = loss_axis(f"{title} (log)", places, width) if x == "loss" else None
    across = across or fewer(round_axis(title, places), width)
    panel = Panel("SSIM", across, unit_axis("", [low]), width, height)
    parts = [dots(panel, points, [], colour=2), panel.horizontal(record["good_threshold"])]
    parts += [panel.horizontal(max(decoys), "baseline b1")] if decoys else []
    about = f"{cell['name']}: SSIM against {title}; {note}."
    return Drawing(panel.svg(parts, about), cell["name"], note)


def kernels_figure(record: Record, pictures: Arrays, figure: Record) -> Figure:
    """First-layer kernels as RGB pictures (KKT paper, figure 16)."""
    strips: list[dict[str, Any]] = []
    rows: list[dict[str, Cell]] = []  # one per kernel and colour, with its pixels row by row
    for wanted in figure["cells"]:
        tiles = list(pictures.get(f"kernels_{wanted:04d}", ()))
        size = " of {} × {}".format(*tiles[0].shape[1:]) if tiles else ""
        uris = [data_uri(tile) for tile in tiles]
        strips.append({"cell": record["cells"][wanted], "tiles": uris, "size": size})
        for k, kernel in enumerate(tiles):
            for colour, part in zip(("red", "green", "blue"), kernel, strict=True):
                values = " ".join(map(str, np.ravel(part)))
                rows.append({"cell": wanted, "kernel": k, "colour": colour, "values": values})
    table = table_of(figure["name"], rows, ("cell", "kernel", "colour", "values"))
    return Figure(figure, [table], more={"tiles": strips, "layout": ""})


def _cells(record: Record, figure: Record) -> list[Record]:
    also = figure.get("also", ())
    return [c for c in record["cells"] if c["panel"] == figure["panel"] or c["number"] in also]


def words(record: Record, pictures: Arrays, _tables: Tables) -> dict[str, Any]:
    """Values for this page's template alone."""
    cells = record["cells"]
    n = sum(len(cell["victims"]) for cell in cells)
    trained = plural(n, "network was", "networks were")
    where = "in one cell" if len(cells) == 1 else f"in {len(cells)} cells of settings"
    attacked = plural(record["n_attacks"], "time", "times") + (" each" if n != 1 else "")
    return {
        "headline": headline(record),
        "networks": f"{trained} trained {where} and attacked {attacked}.",
        "pairs": [{"cell": cell, "pairs": _pairs(record, cell, pictures)} for cell in cells],
        "large": len(cells) <= LARGE_CELLS,
        "run": [
            ("networks per cell", record["n_victims"]),
            ("attacks on each", record["n_attacks"]),
        ],
        "threshold": f"{record['good_threshold']:g}",
        "votes": any(cell["vote"] for cell in cells),
    }


def headline(record: Record) -> dict[str, Any]:
    """Counts of claims by outcome, and the best and worst cells, by the share of good images, then
    by mean SSIM. The worst is None if there are less than two cells."""

    def merit(cell: Record) -> tuple[float, float]:
        mean = cell["targets"]["mean_ssim"]
        return cell["targets"]["good_fraction"] or 0.0, -1.0 if mean is None else mean

    cells = [cell for cell in record["cells"] if cell["targets"]["n"]]
    ranked = sorted(cells, key=merit, reverse=True)
    return {
        **claim_counts(record),
        "best": ranked[0] if ranked else None,
        "worst": ranked[-1] if len(ranked) > 1 else None,
        "any_good": any(cell["targets"]["n_good"] for cell in record["cells"]),
    }


def _pairs(record: Record, cell: Record, pictures: Arrays) -> list[dict[str, Any]]:
    """A cell's best pairs (original, reconstruction) with their SSIM, best first; empty if none is
    stored. Raises ValueError if their number is not the record's."""
    names = [f"cell_{cell['number']:04d}/{kind}" for kind in ("original", "reconstruction")]
    if not all(name in pictures for name in names):
        return []
    originals, found = (pictures[name] for name in names)
    images = record["images"]
    return [
        {
            "original": data_uri(original),
            "uri": data_uri(reconstruction),
            "alt": f"Training picture {images['image_id'][row]} of network {images['victim'][row]}",
            "score": fixed(images["ssim"][row], 2),
            "good": (images["ssim"][row] or 0.0) > record["good_threshold"],
        }
        for original, reconstruction, row in zip(originals, found, cell["shown"], strict=True)
    ]


def _spread(values: Sequence[float | None], *, show: Callable[[float | None], str]) -> str:
    """Range over the networks of a cell, `0.41 to 0.52`; empty if the shown values are alike."""
    known = [value for value in values if value is not None]
    if len(known) < 2 or show(min(known)) == show(max(known)):
        return ""
    return f"{show(min(known)).removesuffix(' %')} to {show(max(known))}"


STUDY_PAGE = StudyPage(
    name="study",
    version=2,
    command="palimpsest study",
    kinds={
        "heatmap": heat_figure,
        "lines": lines_figure,
        "scatter": scatter_figure,
        "kernels": kernels_figure,
    },
    tables=own_tables,
    words=words,
    filters={
        "known_mean": known_mean,
        "percents": partial(_spread, show=percent),
        "counts": partial(_spread, show=count),
    },
)
