"""The page of an audit: audit.json and its pictures as one HTML file (docs/pages.md).

The answer stands first: the verdict, the numbers that it rests on, and the images that leak most
beside the decoys that came nearest. Figures: leak against accuracy, shares by false positive rate,
and by epsilon. `describe_figures` says which of them a record has numbers for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby
from typing import Any

import numpy as np

from tasks.audit.tables import (
    EXPOSED,
    NUMBERS,
    SIDES,
    Estimated,
    accuracy,
    attacked,
    attacks_table,
    cells_table,
    change,
    estimated,
    front_table,
    headline,
    key_of,
    membership,
    own_tables,
    points,
    rate_text,
    share,
    side_of,
)
from tasks.audit.verdict import does
from tasks.page.charts import (
    BOTTOM,
    LEFT,
    TOP,
    Axis,
    Estimate,
    Panel,
    Style,
    category_axis,
    estimates,
    letter,
    marker,
    round_axis,
    rule,
    styles_of,
    values_axis,
    words,
)
from tasks.page.files import Arrays, Record, Table
from tasks.page.formats import brackets, fixed, number, plural, with_interval
from tasks.page.pictures import data_uri
from tasks.page.study_page import Drawing, Figure, Row, StudyPage, Tables, figure_spec

N_FIRST, N_NEAR = 8, 4
"""Most exposed images, and nearest decoys, on the first screen."""
N_LISTED = 8
"""Most exposed images whose reasons are not folded away."""
GROUPS = {"reconstruction": "Come back as pictures", "membership": "Told from images it never saw"}
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
BESIDE = ((1, 0), (0, -1), (-1, 0), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1))
"""Directions of a label from its marks."""


def page_words(record: Record, pictures: Arrays, _tables: Tables) -> dict[str, Any]:
    """Values that only this page shows."""
    exposed = _pairs(pictures, "exposed", record["exposed"], "mean_ssim", record["good_threshold"])
    decoys = _pairs(pictures, "decoys", record["decoys_shown"], "ssim", record["good_threshold"])
    groups = [
        {"title": title, "attacks": [a for a in record["attacks"] if a["kind"] == kind]}
        for kind, title in GROUPS.items()
    ]
    groups = [group for group in groups if group["attacks"]]
    grid: list[dict[str, Any]] = []
    reasons: dict[str, int] = {}  # why numbers are missing
    for cell in record["cells"]:
        squares: list[dict[str, Any]] = []
        for attack in (attack for group in groups for attack in group["attacks"]):
            found = headline(record, cell, attack)
            if found[0] is not None:
                shade = f"{min(1.0, max(0.0, found[0])):.4f}"
                squares.append({**shown(found), "share": shade})
                continue
            why = (cell["attacks"].get(attack["name"]) or {}).get("why") or "it was not run"
            reason = None if cell["failed"] else reasons.setdefault(str(why), len(reasons) + 1)
            squares.append({"share": None, "reason": reason})
        ran = any(attacked(cell, attack["name"]) for attack in record["attacks"])
        grid.append(
            {
                "cell": cell,
                "letter": letter(cell["number"]),
                "accuracy": shown(accuracy(cell)),
                "change": shown(change(cell), points),
                "squares": squares,
                "empty": bool(cell["failed"]) and not ran,
            }
        )
    return {
        "stats": [stat | {"what": stat["what"].replace(" %", "\u00a0%")}
                  for stat in _stats(record)],
        "n_failing": sum(check["outcome"] == "fails" for check in record["checks"]),
        "rate": rate_text(record["rate"]),
        "threshold": f"{record['good_threshold']:g}",
        "several": record["n_victims"] > 1,
        "first": exposed[:N_FIRST],
        "near": decoys[:N_NEAR],
        "exposed": {"shown": exposed[:N_LISTED], "folded": exposed[N_LISTED:]},
        "groups": groups,
        "has_accuracy": any(accuracy(cell)[0] is not None for cell in record["cells"]),
        "has_change": any(change(cell)[0] is not None for cell in record["cells"]),
        "grid": grid,
        "reasons": list(reasons),
        "numbers": _numbers(record),
        "titles": {attack["name"]: attack["title"] for attack in record["attacks"]},
        "run": [("networks per defence", record["n_victims"]),
                ("training images of each", record["n_images"]),
                (f"images that {record['price']} is measured on", record["n_tests"])],
        "price": record["price"],
    }  # fmt: skip


def shown(found: Estimated, show: Callable[[float | None], str] = share) -> dict[str, str]:
    """A value as text, and its interval in brackets."""
    value, low, high = found
    return {"value": show(value), "ends": brackets(show, low, high)}


def _stats(record: Record) -> list[dict[str, str]]:
    """The leak, the best membership attack, and the defence that the verdict names, or the one that
    leaves least."""
    base, at, stats = record["cells"][0], rate_text(record["rate"]), []
    if (leak := base["leak"]) is not None:
        attack = next(a for a in record["attacks"] if a["name"] == leak["attack"])
        what = "of the training images come back well enough to recognise, from nothing but "
        what += f"{attack['knows']}, at {at} false positives ({attack['title']})"
        stats.append({**shown(estimated(leak)), "kind": "leak", "what": what})
    title, found = membership(record, base)
    if found[0] is not None:
        what = f"are told from images that the network never saw, at {at} false positives; "
        what += f"guessing gets {at} ({title})"
        stats.append({**shown(found), "kind": "membership", "what": what})
    others = [
        c for c in record["cells"] if c["kind"] == "defence" and c["leak"] and not c["failed"]
    ]
    if leak is None or not leak["mean"] or not others:
        return stats
    cell = next((c for c in others if c["name"] == record["verdict"].get("defence")), None)
    if cell is None:
        cell = min(others, key=lambda cell: float(cell["leak"]["mean"]))
        about = f"which leaks least of {plural(len(others), 'defence', 'defences')}; "
    elif record["no_price"]:
        about = "the defence that leaves least: "
    else:
        about = f"the cheapest defence that {does(cell)}: "
    cost = shown(change(cell), points)
    price = f"{record['price']} {cost['value']} points {cost['ends']}".rstrip()
    if change(cell)[0] is None:
        price = f"its price in {record['price']} is {record['no_price'] or 'not known'}"
    what = f"are left with {cell['name']}, {about}{price}"
    return [*stats, {**shown(estimated(cell["leak"])), "kind": "defence", "what": what}]


def _pairs(
    pictures: Arrays, side: str, rows: Sequence[Record], score: str, good: float
) -> list[dict[str, Any]]:
    """Images beside their reconstructions as URLs; "" for a black picture, which stands for none.

    Raises ValueError if there are not as many pictures as the record says.
    """
    both = [pictures.get(f"{side}/{kind}", ()) for kind in ("original", "reconstruction")]
    if not len(both[0]) == len(both[1]) == len(rows):
        raise ValueError(
            f"the record shows {len(rows)} images of {side}, but the pictures hold {len(both[0])} "
            f"originals and {len(both[1])} reconstructions; make the record again"
        )
    return [
        {key: entry.get(key) for key in EXPOSED}
        | {
            "original": data_uri(original),
            "uri": data_uri(found) if found.any() else "",
            "alt": f"{'Training image' if side == 'exposed' else 'Decoy'} {entry['image_id']}",
            "score": fixed(entry[score], 2),
            "good": (entry[score] or 0.0) > good,
        }
        for original, found, entry in zip(*both, rows, strict=True)
    ]


def _numbers(record: Record) -> list[dict[str, Any]]:
    """Every number of every attack that ran, at all false positive rates."""
    rows = []
    for cell in record["cells"]:
        for attack in record["attacks"]:
            if (ran := attacked(cell, attack["name"])) is None:
                continue
            row = {"cell": cell, "attack": attack}
            for side, key in SIDES:
                of_rates = [(ran[key] or {}).get(key_of(rate)) for rate in record["rates"]]
                row[side] = [shown(estimated(found)) for found in of_rates]
            row |= {key: ran[key] for key in (*NUMBERS, "seconds")}
            for key in ("identified", "identified_decoys"):
                row[key] = shown(estimated(ran[key]))
            rows.append(row)
    return rows


def describe_figures(record: Record) -> list[dict[str, Any]]:
    """The figures that the record has numbers for, as they stand in it."""
    figures = []
    at, base = rate_text(record["rate"]), record["cells"][0]
    over = "networks" if record["n_victims"] > 1 else "images of the one network"
    whiskers = f"Whiskers are 95 % intervals over {over}."

    def add(kind: str, title: str, caption: str, cannot: str) -> None:
        figures.append(figure_spec(kind, kind, (title, "", f"{caption} {whiskers}", cannot)))

    if front_table(record).n_rows > 1:
        add(
            "front",
            "What each defence costs, and what it saves",
            "Up: the share of the training images that the best reconstruction attack brings back "
            f"at {at} false positives. To the right: {record['price']} on images that no network "
            "saw. Low and right is good. The line joins the defences that no other beats in both.",
            "that a defence beyond these is worse, or that an attack made against a defence would "
            "not get more. The line is chosen from the numbers that it is drawn of, so it looks a "
            "little better than it is.",
        )
    if any(attacked(base, attack["name"]) for attack in record["attacks"]):
        add(
            "rates",
            "How sure an attacker can be",
            "The network without a defence. The further left, the fewer decoys may be taken for "
            "training images; at 0 not one. Left: images that also come back well enough to "
            "recognise. Right: images that are told from others, with or without a picture of "
            "them; grey is what guessing gets.",
            "how many decoys there would be for an attacker. A rate of 0 is 0 among the decoys of "
            "this audit.",
        )
    private = [cell for cell in record["cells"] if cell["epsilon"] is not None]
    if sum(accuracy(c)[0] is not None or c["leak"] is not None for c in private) > 1:
        add(
            "epsilon",
            "The price of differential privacy",
            f"Leak at {at} false positives, and accuracy on images that no network saw, by the "
            "epsilon of DP-SGD: the smaller, the more is promised. Dotted: without a defence.",
            "the promise itself. Epsilon bounds every attack there can be; these points are what "
            "some attacks got.",
        )
    return figures


def front_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """Leak against accuracy: a mark per defence with its letter, those on the front joined."""
    table, price = front_table(record), record["price"]
    rows = list(table.rows())
    others = [cell for cell in record["cells"] if cell["number"] not in table.columns["cell"]]
    absent = [cell["name"] for cell in others if cell["kind"] != "variant"]
    notes = [f"Without both numbers, so not drawn: {'; '.join(absent)}."] if absent else []
    panel = Panel(
        "images that come back, %",
        round_axis(f"test {price}, %", _percents(rows, "test accuracy")),
        round_axis("", _percents(rows, "leak"), from_zero=True),
    )
    kept = sorted(panel.at(_place(row)) for row in rows if row["on_front"])
    parts = [_grey_line(f"s{FRONT.number} m{FRONT.colour}", kept)] if kept else []
    about = {row["cell"]: f"{row['name']}: leak {_said(row, 'leak')}, {price} "
             f"{_said(row, 'test accuracy')}" for row in rows}  # fmt: skip
    for row in sorted(rows, key=lambda row: -_style(row).number):  # the base on top
        style, (x, y), path = _style(row), panel.at(_place(row)), ""
        if row["leak low"] is not None:
            low, high = (panel.at((0, 100 * row[f"leak {end}"]))[1] for end in ("low", "high"))
            path += f"M{x:.1f} {low:.1f}V{high:.1f}"
        if row["test accuracy low"] is not None:
            ends = (100 * row[f"test accuracy {end}"] for end in ("low", "high"))
            low, high = (panel.at((end, 0))[0] for end in ends)
            path += f"M{low:.1f} {y:.1f}H{high:.1f}"
        whisker = f'<path class="whisker" d="{path}"/>' if path else ""
        parts.append(
            f'<g class="s{style.number} m{style.colour}"><title>{escape(about[row["cell"]])}'
            f"</title>{whisker}{marker(style.marker, x, y)}</g>"
        )
    svg = panel.svg([*parts, *_letters(panel, rows)],
                    f"Leak against {price}. {'; '.join(about.values())}")  # fmt: skip
    titles = ((BASE, "without a defence"), (FRONT, "on the front"), (OTHER, "beaten by another"))
    legend = [(style, title) for style, title in titles if style in map(_style, rows)]
    letters = []
    for row in rows:
        numbers = f"{share(row['leak'])} back, {price} {share(row['test accuracy'])}"
        letters.append((row["letter"], row["name"], numbers, row["on_front"]))
    drawings = [Row("", "", [Drawing(svg)])]
    return Figure(figure, [table], drawings, legend, notes, {"letters": letters})


def _percents(rows: Sequence[Record], key: str) -> list[float]:
    """The values and ends of an estimate, as far as they are known."""
    every = (row[name] for row in rows for name in (key, f"{key} low", f"{key} high"))
    return [100 * value for value in every if value is not None]


def _style(row: Record) -> Style:
    if row["base"]:
        return BASE
    return FRONT if row["on_front"] else OTHER


def _place(row: Record) -> tuple[float, float]:
    return 100 * row["test accuracy"], 100 * row["leak"]


def _said(row: Record, key: str) -> str:
    return with_interval(share, (row[key], row[f"{key} low"], row[f"{key} high"]))


def _grey_line(look: str, at: Sequence[tuple[float, float]]) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    return f'<g class="{look}"><polyline class="curve thin" points="{path}"/></g>'


def _letters(panel: Panel, rows: Sequence[Record]) -> list[str]:
    """Letters beside their marks, on no other letter and on no mark; marks that lie too close for a
    letter each share a label, as `A–D G`. A box is (left, top, right, bottom)."""
    marks = np.array([panel.at(_place(row)) for row in rows])
    is_near = (np.abs(marks[:, None] - marks) < NEAR).all(2)
    group = (np.linalg.matrix_power(is_near.astype(float), len(rows)) > 0).argmax(1)
    taken = np.hstack([marks - MARKER_BOX / 2, marks + MARKER_BOX / 2])
    parts = []
    for first in np.unique(group):
        own: list[int] = np.flatnonzero(group == first).tolist()
        runs = [[rows[k]["cell"] for _, k in run] for _, run in
                groupby(enumerate(own), lambda pair: rows[pair[1]]["cell"] - pair[0])]  # fmt: skip
        text = " ".join(
            f"{letter(run[0])}–{letter(run[-1])}" if len(run) > 2 else " ".join(map(letter, run))
            for run in runs
        )
        low, high = taken[own, :2].min(0), taken[own, 2:].max(0)
        half = np.array([LETTER_WIDTH * len(text) + 2, LETTER_HEIGHT]) / 2
        middles = np.array([
            (low + high) / 2 + np.array(step) * ((high - low) / 2 + gap + half)
            for gap in GAPS for step in BESIDE
        ])  # fmt: skip
        boxes = np.hstack([middles - half, middles + half])
        is_inside = (boxes[:, :2] >= (LEFT, TOP)).all(1)
        is_inside &= (boxes[:, 2:] <= (panel.width - 2, panel.height - BOTTOM)).all(1)
        boxes = boxes[is_inside] if is_inside.any() else boxes
        shared = np.minimum(boxes[:, None, 2:], taken[:, 2:])
        shared = shared - np.maximum(boxes[:, None, :2], taken[:, :2])
        box = boxes[shared.clip(0).prod(2).sum(1).argmin()]
        taken = np.vstack([taken, box])
        middle = (box[:2] + box[2:]) / 2
        mark = middle.clip(low, high)
        end = mark.clip(box[:2], box[2:])
        is_far = np.hypot(*(end - mark)) > GAPS[1]
        lead = rule("tick", *map(float, (*mark, *end))) if is_far else ""
        style = min(_style(rows[k]).number for k in own)
        named = words(text, float(middle[0]), float(box[3]) - 2, "axis letter halo", at="middle")
        parts.append(f'<g class="s{style}">{lead}{named}</g>')
    return parts


def rates_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """Shares of the base by false positive rate: good ones, and those told from others."""
    every, rates = attacks_table(record).where("cell", 0).where("status", "ran"), record["rates"]
    table = Table("rates", every.columns)
    titles = {attack["name"]: attack["title"] for attack in record["attacks"]}
    styles, ran = styles_of(titles, COLOURS, OTHERS), [row["attack"] for row in table.rows()]
    across = category_axis("false positives", [rate_text(rate) for rate in rates])
    panel = Panel("share of the training images, %", across, Axis(0.0, 1.0, PERCENTS, ""))
    guess = [_grey_line("m1", [panel.at(point) for point in enumerate(rates)])]
    panels = []
    for side, title in (
        ("good", "come back as pictures"),
        ("found", "told from images it never saw"),
    ):
        series = [
            (styles[row["attack"]], [
                _estimate(row, f"{side} at {key_of(rate)}", k,
                          f"{titles[row['attack']]}, {rate_text(rate)}")
                for k, rate in enumerate(rates) if row[f"{side} at {key_of(rate)}"] is not None
            ])
            for row in table.rows()
        ]  # fmt: skip
        lines = guess if side == "found" else []
        panels.append(_drawn(panel, series, f"Images that {title}", lines, title=title))
    legend = [(styles[name], titles[name]) for name in ran]
    return Figure(figure, [table], [Row("", "", panels)], legend, more={"guess": True})


def _estimate(row: Record, key: str, x: float, about: str) -> Estimate:
    ends = row[f"{key} low"], row[f"{key} high"]
    return Estimate(x, row[key], *ends, f"{about}: {_said(row, key)}")


def _drawn(
    panel: Panel,
    series: Sequence[tuple[Style, Sequence[Estimate]]],
    about: str,
    lines: Sequence[str],
    more: Sequence[str] = (),
    *,
    title: str = "",
) -> Drawing:
    """Lines of estimates over others; empty where no estimate is known."""
    known = [(style, run) for style, run in series if any(point.y is not None for point in run)]
    if not known:
        return Drawing("", title)
    said = "; ".join([*(point.about for _style, run in known for point in run), *more])
    return Drawing(panel.svg([*lines, *estimates(panel, known)], f"{about}. {said}"), title)


def epsilon_figure(record: Record, _pictures: Arrays, figure: Record) -> Figure:
    """Leak and accuracy by the epsilon of DP-SGD, beside the base."""
    table = cells_table(record, "epsilon", lambda c: c["base"] or c["epsilon"] is not None)
    base, *rows = table.rows()
    rows.sort(key=lambda row: float(row["epsilon"]))
    leaks = [(LEAK, "leak", "come back as pictures")]
    if any(row["membership"] is not None for row in rows):
        leaks.append((MEMBERSHIP, "membership", "told from images it never saw"))
    priced = [(ACCURACY, "test accuracy", "test accuracy")]
    around = round_axis("", _percents((*rows, base), "test accuracy"))
    ticks = [(value / 100, label) for value, label in around.ticks]
    epsilons = list(dict.fromkeys(float(row["epsilon"]) for row in rows))
    across = values_axis("epsilon", epsilons, [number(at) for at in epsilons], log=True)
    panels = []
    for title, up, drawn in (
        ("share of the training images, %", Axis(0.0, 1.0, PERCENTS, ""), leaks),
        ("test accuracy, %", Axis(around.low / 100, around.high / 100, ticks, ""), priced),
    ):
        panel, levels, said = Panel(title, across, up), [], []
        series = [
            (style, [_estimate(row, key, float(row["epsilon"]),
                               f"epsilon {number(row['epsilon'])}, {name}") for row in rows])
            for style, key, name in drawn
        ]  # fmt: skip
        for style, key, name in drawn:
            if base[key] is not None:
                line = panel.horizontal(base[key], "without")
                levels.append(f'<g class="s{style.number} m{style.colour}">{line}</g>')
                said.append(f"without a defence, {name}: {_said(base, key)}")
        panels.append(_drawn(panel, series, title, levels, said))
    legend = [(style, name) for style, _key, name in (*leaks, *priced)]
    found = dict.fromkeys(row["delta"] for row in rows if row["delta"] is not None)
    notes = [f"Delta is {number(list(found))}."] if found else []
    return Figure(figure, [table], [Row("", "", panels)], legend, notes, {"dotted": True})


AUDIT_PAGE = StudyPage(
    name="audit",
    version=1,
    command="palimpsest audit",
    kinds={"front": front_figure, "rates": rates_figure, "epsilon": epsilon_figure},
    tables=own_tables,
    words=page_words,
    stages={
        "train": "to train the networks",
        "attack": "to attack them",
        "score": "to score what came back",
    },
    filters={"share": share, "rate": rate_text, "points": points, "side": side_of},
)
