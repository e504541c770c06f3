"""The figures of an audit: leak against accuracy, shares by false positive rate, and by epsilon.

`describe_figures` says which of them a record has numbers for, `KINDS` draw them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from html import escape
from typing import Any

from tasks.audit.tables import (
    accuracy,
    attacked,
    base_of,
    epsilon_table,
    front_table,
    price_of,
    rate_text,
    rates_table,
    share,
    with_ends,
)
from tasks.page.axes import BOTTOM, LEFT, RIGHT, TOP, Axis, category_axis, round_axis, values_axis
from tasks.page.charts import Estimate, Panel, Style, estimates, marker, rule, styles_of, words
from tasks.page.files import Arrays, Record
from tasks.page.formats import number
from tasks.page.study_page import Drawing, Figure, Row, figure_spec
from tasks.page.tables import Table

COLOURS = {"span": 2, "span_known": 3, "span_state": 10, "kkt": 5, "loss": 4, "likelihood_ratio": 6}
OTHERS = (11, 8, 7, 9)
BASE, FRONT, OTHER = Style(20, 4, 3), Style(21, 2, 0), Style(22, 1, 1)
LEAK, MEMBERSHIP, ACCURACY = Style(30, 2, 0), Style(31, 6, 4), Style(32, 3, 1)
PERCENTS = [(k / 4, f"{25 * k}") for k in range(5)]
LETTER_WIDTH, LETTER_HEIGHT, MARKER_BOX = 8.5, 12.0, 9.0
NEAR = (18.0, 12.0)
"""Distances, across and up, below which marks share a label."""
GAPS = (2.0, 6.0, 12.0, 20.0, 30.0, 42.0)
"""Distances of a label from its marks, of which the nearest that is free is taken."""

Box = tuple[float, float, float, float]


def describe_figures(record: Record) -> list[dict[str, Any]]:
    """The figures that the record has numbers for, as they stand in it."""
    figures = []
    at = rate_text(record["rate"])
    over = "networks" if record["n_victims"] > 1 else "images of the one network"
    if front_table("front", record).n_rows > 1:
        words = _front_words(at, over, price_of(record))
        figures.append(figure_spec("front", "front", words))
    base = base_of(record)
    if any(attacked(base, attack["name"]) for attack in record["attacks"]):
        figures.append(figure_spec("rates", "rates", _rates_words(over)))
    private = [cell for cell in record["cells"] if cell["epsilon"] is not None]
    known = [c for c in private if accuracy(c)[0] is not None or c["leak"] is not None]
    if len(known) > 1:
        figures.append(figure_spec("epsilon", "epsilon", _epsilon_words(at, over)))
    return figures


def _front_words(at: str, over: str, price: str) -> tuple[str, str, str, str]:
    return (
        "What each defence costs, and what it saves",
        "",
        "Up: the share of the training images that the best reconstruction attack brings back at "
        f"{at} false positives. To the right: {price} on images that no network saw. Low and "
        "right is good. The line joins the defences that no other beats in both. Whiskers are "
        f"95 % intervals over {over}.",
        "that a defence beyond these is worse, or that an attack made against a defence would not "
        "get more. The line is chosen from the numbers that it is drawn of, so it looks a little "
        "better than it is.",
    )


def _rates_words(over: str) -> tuple[str, str, str, str]:
    return (
        "How sure an attacker can be",
        "",
        "The network without a defence. The further left, the fewer decoys may be taken for "
        "training images; at 0 not one. Left: images that also come back well enough to recognise. "
        "Right: images that are told from others, with or without a picture of them; grey is what "
        f"guessing gets. Whiskers are 95 % intervals over {over}.",
        "how many decoys there would be for an attacker. A rate of 0 is 0 among the decoys of this "
        "audit.",
    )


def _epsilon_words(at: str, over: str) -> tuple[str, str, str, str]:
    return (
        "The price of differential privacy",
        "",
        f"Leak at {at} false positives, and accuracy on images that no network saw, by the epsilon "
        "of DP-SGD: the smaller, the more is promised. Dotted: without a defence. Whiskers are "
        f"95 % intervals over {over}.",
        "the promise itself. Epsilon bounds every attack there can be; these points are what some "
        "attacks got.",
    )


def front_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """Leak against accuracy: a mark per defence with its letter, those on the front joined."""
    table = front_table(figure["name"], record)
    rows = list(table.rows())
    shown = table.columns["cell"]
    absent = [cell["name"] for cell in record["cells"]
              if cell["kind"] != "variant" and cell["number"] not in shown]  # fmt: skip
    notes = [f"Without both numbers, so not drawn: {'; '.join(absent)}."] if absent else []
    price = price_of(record)
    panel = Panel("images that come back, %", *_front_axes(rows, price))
    parts = [_front_line(panel, rows)]
    drawn = sorted(rows, key=lambda row: -_style(row).number)  # the base on top
    parts += [_front_mark(panel, row, price) for row in drawn]
    parts += _letters(panel, rows)
    about = f"Leak against {price}. {'; '.join(_front_said(row, price) for row in rows)}"
    svg = panel.svg(parts, about)
    more = {"letters": [(r["letter"], r["name"], _short(r, price), r["on_front"]) for r in rows]}
    return Figure(figure, [table], [Row("", "", [Drawing(svg)])], _front_legend(rows), notes, more)


def _front_axes(rows: Sequence[Record], price: str) -> tuple[Axis, Axis]:
    across, up = ([100 * end for row in rows for end in _known(row, key)]
                  for key in ("accuracy", "leak"))  # fmt: skip
    return round_axis(f"test {price}, %", across), round_axis("", up, from_zero=True)


def _known(row: Record, key: str) -> list[float]:
    ends = (row[key], row[f"{key} low"], row[f"{key} high"])
    return [float(end) for end in ends if end is not None]


def _style(row: Record) -> Style:
    if row["base"]:
        return BASE
    return FRONT if row["on_front"] else OTHER


def _front_legend(rows: Sequence[Record]) -> list[tuple[Style, str]]:
    titles = ((BASE, "without a defence"), (FRONT, "on the front"), (OTHER, "beaten by another"))
    used = [_style(row) for row in rows]
    return [(style, title) for style, title in titles if style in used]


def _front_line(panel: Panel, rows: Sequence[Record]) -> str:
    kept = [panel.at(_place(row)) for row in rows if row["on_front"]]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in sorted(kept))
    look = f"s{FRONT.number} m{FRONT.colour}"
    return f'<g class="{look}"><polyline class="curve thin" points="{path}"/></g>' if path else ""


def _place(row: Record) -> tuple[float, float]:
    return 100 * row["accuracy"], 100 * row["leak"]


def _front_mark(panel: Panel, row: Record, price: str) -> str:
    style, (x, y) = _style(row), panel.at(_place(row))
    drawn = [_whisker(panel, row), marker(style.marker, x, y)]
    from_here = f"<title>{escape(_front_said(row, price))}</title>"
    return f'<g class="s{style.number} m{style.colour}">{from_here}{"".join(drawn)}</g>'


def _whisker(panel: Panel, row: Record) -> str:
    x, y = panel.at(_place(row))
    path = ""
    if row["leak low"] is not None:
        low, high = (panel.at((0, 100 * row[f"leak {end}"]))[1] for end in ("low", "high"))
        path += f"M{x:.1f} {low:.1f}V{high:.1f}"
    if row["accuracy low"] is not None:
        low, high = (panel.at((100 * row[f"accuracy {end}"], 0))[0] for end in ("low", "high"))
        path += f"M{low:.1f} {y:.1f}H{high:.1f}"
    return f'<path class="whisker" d="{path}"/>' if path else ""


def _said(row: Record, key: str) -> str:
    return with_ends(share, (row[key], row[f"{key} low"], row[f"{key} high"]))


def _front_said(row: Record, price: str) -> str:
    return f"{row['name']}: leak {_said(row, 'leak')}, {price} {_said(row, 'accuracy')}"


def _short(row: Record, price: str) -> str:
    return f"{share(row['leak'])} back, {price} {share(row['accuracy'])}"


def _letters(panel: Panel, rows: Sequence[Record]) -> list[str]:
    """Letters beside their marks, on no other letter and on no mark; marks that lie too close for a
    letter each share a label."""
    marks = [panel.at(_place(row)) for row in rows]
    taken = [_box(x, y, MARKER_BOX, MARKER_BOX) for x, y in marks]
    parts = []
    for group in _groups(marks):
        text = _ranges([rows[k]["letter"] for k in group])
        left, top, right, bottom = zip(*(taken[k] for k in group), strict=True)
        around = min(left), min(top), max(right), max(bottom)
        width = LETTER_WIDTH * len(text) + 2
        boxes = [_box(x, y, width, LETTER_HEIGHT) for x, y in _beside(around, width)]
        inside = [box for box in boxes if _inside(panel, box)] or boxes
        chosen = min(inside, key=partial(_overlap, taken))
        taken.append(chosen)
        style = min((_style(rows[k]) for k in group), key=lambda style: style.number)
        middle = (chosen[0] + chosen[2]) / 2
        letters = words(text, middle, chosen[3] - 2, "axis letter halo", at="middle")
        parts.append(f'<g class="s{style.number}">{_lead(around, chosen)}{letters}</g>')
    return parts


def _groups(marks: Sequence[tuple[float, float]]) -> list[list[int]]:
    """Marks by groups, in which each is near another."""
    groups: list[list[int]] = []
    for k, (x, y) in enumerate(marks):
        near = [
            group for group in groups
            if any(abs(x - marks[j][0]) < NEAR[0] and abs(y - marks[j][1]) < NEAR[1] for j in group)
        ]  # fmt: skip
        groups = [group for group in groups if group not in near]
        groups.append(sorted([k, *(j for group in near for j in group)]))
    return sorted(groups)


def _ranges(letters: Sequence[str]) -> str:
    """`A–D G`: letters in the order of the alphabet, three or more in a row as a range."""
    runs: list[list[str]] = []
    for one in sorted(letters, key=lambda text: (len(text), text)):
        follows = runs and len(one) == 1 == len(runs[-1][-1]) and ord(one) == ord(runs[-1][-1]) + 1
        if follows:
            runs[-1].append(one)
        else:
            runs.append([one])
    return " ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else " ".join(run) for run in runs)


def _beside(around: Box, width: float) -> list[tuple[float, float]]:
    """Middles of labels of that width beside a box, the nearest first: right, left, above, below
    and at the corners."""
    left, top, right, bottom = around
    x, y = (left + right) / 2, (top + bottom) / 2
    found = []
    for gap in GAPS:
        east, west = right + gap + width / 2, left - gap - width / 2
        north, south = top - gap - LETTER_HEIGHT / 2, bottom + gap + LETTER_HEIGHT / 2
        found += [(east, y), (x, north), (west, y), (x, south)]
        found += [(east, north), (west, north), (east, south), (west, south)]
    return found


def _box(x: float, y: float, width: float, height: float) -> Box:
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _inside(panel: Panel, box: Box) -> bool:
    right, base = panel.width - RIGHT, panel.height - BOTTOM
    return box[0] >= LEFT and box[1] >= TOP and box[2] <= right + RIGHT - 2 and box[3] <= base


def _overlap(taken: Sequence[Box], box: Box) -> float:
    shared = 0.0
    for other in taken:
        across = min(box[2], other[2]) - max(box[0], other[0])
        up = min(box[3], other[3]) - max(box[1], other[1])
        shared += max(0.0, across) * max(0.0, up)
    return shared


def _lead(around: Box, box: Box) -> str:
    """A line from a label that is far to its marks."""
    x, y = ((box[k] + box[k + 2]) / 2 for k in (0, 1))
    at_x, at_y = min(max(x, around[0]), around[2]), min(max(y, around[1]), around[3])
    to_x, to_y = min(max(at_x, box[0]), box[2]), min(max(at_y, box[1]), box[3])
    far = math.hypot(to_x - at_x, to_y - at_y) > GAPS[1]
    return rule("tick", at_x, at_y, to_x, to_y) if far else ""


def rates_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """Shares of the base by false positive rate: good ones, and those told from others."""
    table = rates_table(figure["name"], record)
    titles = {attack["name"]: attack["title"] for attack in record["attacks"]}
    styles = styles_of(titles, COLOURS, OTHERS)
    ran = list(dict.fromkeys(str(name) for name in table.columns["attack"]))
    panels = [
        _rates_panel(record, table, [(name, styles[name], titles[name]) for name in ran], side)
        for side in ("good", "found")
    ]
    legend = [(styles[name], titles[name]) for name in ran]
    return Figure(figure, [table], [Row("", "", panels)], legend, more={"guess": True})


def _rates_panel(
    record: Record, table: Table, attacks: Sequence[tuple[str, Style, str]], side: str
) -> Drawing:
    rates = record["rates"]
    across = category_axis("false positives", [rate_text(rate) for rate in rates])
    panel = Panel("share of the training images, %", across, Axis(0.0, 1.0, PERCENTS, ""))
    series, said = [], []
    for name, style, title in attacks:
        rows = [row for row in table.where("attack", name).rows() if row[side] is not None]
        about = [f"{title}, {rate_text(row['rate'])}: {_said(row, side)}" for row in rows]
        found = [_estimate(rates.index(r["rate"]), r, side, a)
                 for r, a in zip(rows, about, strict=True)]  # fmt: skip
        if found:
            series.append((style, found))
            said += about
    title = "come back as pictures" if side == "good" else "told from images it never saw"
    if not series:
        return Drawing("", title)
    parts = estimates(panel, series)
    if side == "found":
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(panel.at, enumerate(rates)))
        parts = [f'<g class="m1"><polyline class="curve thin" points="{path}"/></g>', *parts]
    return Drawing(panel.svg(parts, f"Images that {title}. {'; '.join(said)}"), title)


def _estimate(x: float, row: Record, key: str, about: str) -> Estimate:
    return Estimate(x, row[key], row[f"{key} low"], row[f"{key} high"], about)


def epsilon_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """Leak and accuracy by the epsilon of DP-SGD, beside the base."""
    table = epsilon_table(figure["name"], record)
    rows, base = list(table.where("base", False).rows()), next(table.where("base", True).rows())
    drawn = [(LEAK, "leak", "come back as pictures")]
    if any(row["membership"] is not None for row in rows):
        drawn.append((MEMBERSHIP, "membership", "told from images it never saw"))
    priced = [(ACCURACY, "accuracy", "test accuracy")]
    panels = [
        _epsilon_panel("share of the training images, %", rows, base, drawn),
        _epsilon_panel("test accuracy, %", rows, base, priced),
    ]
    legend = [(style, title) for style, _key, title in (*drawn, *priced)]
    found = dict.fromkeys(row["delta"] for row in rows if row["delta"] is not None)
    notes = [f"Delta is {number(list(found))}."] if found else []
    return Figure(figure, [table], [Row("", "", panels)], legend, notes, {"dotted": True})


def _epsilon_panel(
    title: str, rows: Sequence[Record], base: Record, drawn: Sequence[tuple[Style, str, str]]
) -> Drawing:
    epsilons = list(dict.fromkeys(float(row["epsilon"]) for row in rows))
    across = values_axis("epsilon", epsilons, [number(at) for at in epsilons], log=True)
    is_accuracy = drawn[0][1] == "accuracy"
    ends = [end for row in (*rows, base) for _s, key, _t in drawn for end in _known(row, key)]
    up = _part_of_whole(ends) if is_accuracy else Axis(0.0, 1.0, PERCENTS, "")
    panel = Panel(title, across, up)
    series, said, levels = [], [], []
    for style, key, words_of in drawn:
        about = [f"epsilon {number(row['epsilon'])}, {words_of}: {_said(row, key)}" for row in rows]
        points = [_estimate(float(r["epsilon"]), r, key, a)
                  for r, a in zip(rows, about, strict=True)]  # fmt: skip
        if any(point.y is not None for point in points):
            series.append((style, points))
            said += about
        if base[key] is not None:
            look = f"s{style.number} m{style.colour}"
            levels.append(f'<g class="{look}">{panel.horizontal(base[key], "without")}</g>')
            said.append(f"without a defence, {words_of}: {_said(base, key)}")
    if not series:
        return Drawing("", "")
    return Drawing(panel.svg([*levels, *estimates(panel, series)], f"{title}. {'; '.join(said)}"))


def _part_of_whole(shares: Sequence[float]) -> Axis:
    """An axis of percents around shares."""
    axis = round_axis("", [100 * share for share in shares])
    ticks = [(value / 100, label) for value, label in axis.ticks]
    return Axis(axis.low / 100, axis.high / 100, ticks, "")


KINDS = {"front": front_figure, "rates": rates_figure, "epsilon": epsilon_figure}
