"""The report's charts: from the tables of `tasks.report.tables` to panels of `tasks.page.charts`.

Each returns a `Figure`: its panels, its legend and its tables. What they mean is the template's
business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.page.axes import log_axis, rank_axis, round_axis, unit_axis
from tasks.page.charts import MAX_DOTS, N_MARKERS, Line, Panel, Style, bands, lines
from tasks.page.files import Record
from tasks.page.formats import score
from tasks.page.tables import Table
from tasks.report.headline import method_title
from tasks.report.record import SIDES
from tasks.report.tables import (
    METRICS,
    halved,
    halves_table,
    ranked_table,
    roc_table,
    thresholds_table,
)

METRIC_TITLES = {"ssim": "SSIM", "haarpsi": "HaarPSI"}
GREYS, VIVID, MUTED = (0, 1, 10, 11), (2, 3, 4, 5, 6), (7, 8, 9)
LOWEST_RATE = 1e-4


@dataclass(frozen=True)
class Figure:
    """Panels side by side, a legend (style, title) and the tables behind them.

    `n_hidden` counts points that were not drawn, since there are too many.
    """

    name: str
    panels: Sequence[str]
    tables: Sequence[Table]
    legend: Sequence[tuple[Style, str]] = ()
    n_hidden: int = 0


def styles(record: Record) -> dict[str, Style]:
    """Look of every method: greys for attacks, thin muted lines for classical denoisers."""
    used = {"grey": 0, "vivid": 0, "muted": 0}
    found = {}
    for number, (name, method) in enumerate(record["methods"].items()):
        kind = {"attack": "grey", "vote": "grey", "classical": "muted"}.get(method["kind"], "vivid")
        palette = {"grey": GREYS, "vivid": VIVID, "muted": MUTED}[kind]
        colour = palette[used[kind] % len(palette)]
        used[kind] += 1
        found[name] = Style(number, colour, number % N_MARKERS, thin=kind == "muted")
    return found


def legend(record: Record, names: Sequence[str]) -> list[tuple[Style, str]]:
    """(style, title) of some methods."""
    looks = styles(record)
    return [(looks[name], method_title(name)[0]) for name in names]


def ranked_figure(record: Record) -> Figure:
    """The score of the i-th best image, SSIM and HaarPSI (image restoration paper, figure 2)."""
    table, looks, names = ranked_table(record), styles(record), list(record["methods"])
    halves = {side: table.where("side", side) for side in SIDES}
    n_images = max(half.n_rows for half in halves.values())
    panels = []
    for metric in METRICS:
        curves = [
            Line(looks[m], *(halves[side].points("rank", f"{m} {metric}") for side in SIDES))
            for m in names
        ]
        values = [y for line in curves for _x, y in (*line.targets, *line.decoys)]
        title = METRIC_TITLES[metric]
        shown = f"{title} ({good_title(record)})" if metric == "ssim" else title
        panel = Panel(shown, rank_axis("images, best first", n_images), unit_axis("", values))
        parts = lines(panel, curves)
        if metric == "ssim":
            parts.append(panel.horizontal(record["settings"]["good_threshold"]))
        panels.append(panel.svg(parts, f"{title} of the i-th best image. {_means(record, metric)}"))
    return Figure("ranked-curves", panels, [table], legend(record, names))


def good_title(record: Record) -> str:
    """Words for the dotted line of a panel of SSIM."""
    return f"dotted: good, above {record['settings']['good_threshold']:g}"


def _means(record: Record, metric: str) -> str:
    parts = []
    for name, method in record["methods"].items():
        means = [score(method[side]["summary"][f"mean_{metric}"]) for side in SIDES]
        parts.append(f"{method_title(name)[0]}: mean {means[0]} of targets, {means[1]} of decoys")
    return "; ".join(parts) + "."


def halves_figure(record: Record) -> Figure | None:
    """The area between the ranked curves of two halves of the attacks (image restoration paper,
    figure 5).

    None if no victim was attacked twice.
    """
    names, looks = halved(record), styles(record)
    if not names:
        return None
    table = halves_table(record)
    sides = {side: table.where("side", side) for side in SIDES}
    panels = []
    for metric in METRICS:
        areas = []
        for name in names:
            for side in reversed(SIDES):
                one, other = (sides[side].points("rank", f"{name} {metric} {k}") for k in (1, 2))
                areas.append((looks[name], side, one, other))
        values = [y for area in areas for _x, y in (*area[2], *area[3])]
        n_images = max(side.n_rows for side in sides.values())
        title = METRIC_TITLES[metric]
        panel = Panel(title, rank_axis("images, best first", n_images), unit_axis("", values))
        about = f"{title} of the i-th best image: the area between two halves of the attacks."
        panels.append(panel.svg([bands(panel, areas)], about))
    return Figure("split-halves", panels, [table], legend(record, names))


def thresholds_figure(record: Record) -> Figure:
    """Number of good images, by where good begins; targets and decoys."""
    table, looks, names = thresholds_table(record), styles(record), list(record["methods"])
    curves = [
        Line(looks[m], *(table.points("threshold", f"{m} {side}") for side in SIDES)) for m in names
    ]
    n_images = max((y for line in curves for _x, y in line.targets), default=0)
    counts = round_axis("", [n_images], from_zero=True)
    panel = Panel("images above the threshold", unit_axis("threshold of SSIM"), counts)
    threshold = record["settings"]["good_threshold"]
    parts = [*lines(panel, curves), panel.vertical(threshold, f"{threshold:g}")]
    svg = panel.svg(parts, "Number of images whose SSIM is above a threshold, per method.")
    return Figure("thresholds", [svg], [table], legend(record, names))


def roc_figure(record: Record) -> Figure | None:
    """Targets found against decoys taken for targets, linear and logarithmic; None if unknown."""
    table, looks = roc_table(record), styles(record)
    names = [name for name in record["methods"] if name in table.columns["method"]]
    if not names:
        return None
    curves = [
        Line(looks[m], table.where("method", m).points("false_positives", "found")) for m in names
    ]
    found, false = "share of targets found", "share of decoys taken for targets"
    straight = Panel(found, unit_axis(false), unit_axis(""))
    aucs = {name: record["methods"][name]["detection"]["auc"] for name in names}
    about = "; ".join(f"{method_title(m)[0]}: area {score(aucs[m])}" for m in names)
    panels = [straight.svg([straight.diagonal(), *lines(straight, curves)], f"ROC. {about}")]
    across, up = (
        max(
            LOWEST_RATE,
            min((p[k] for line in curves for p in line.targets if p[k] > 0), default=0.1),
        )
        for k in (0, 1)
    )
    log = Panel(f"{found} (log)", log_axis(f"{false} (log)", across), log_axis("", up))
    positive = [
        Line(line.style, [p for p in line.targets if min(p) > 0], line.decoys) for line in curves
    ]
    panels.append(log.svg([log.diagonal(), *lines(log, positive)], f"ROC, logarithmic. {about}"))
    shown = [
        (look, f"{title}: AUC {score(aucs[name])}")
        for name, (look, title) in zip(names, legend(record, names), strict=True)
    ]
    return Figure("roc", panels, [table], shown)


def n_not_drawn(*groups: Sequence[object]) -> int:
    """Number of points left out of a scatter, since it draws MAX_DOTS of each group at most."""
    return sum(max(0, len(group) - MAX_DOTS) for group in groups)
