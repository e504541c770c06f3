"""The report's charts: from the tables of `tasks.report.tables` to panels of `tasks.page.charts`.

Each returns a `Figure`: its panels, its legend and its tables. What they mean is the template's
business. In scatter plots targets are dots, decoys crosses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tasks.evaluation.settings import PROJECTED
from tasks.page.axes import log_axis, rank_axis, round_axis, unit_axis
from tasks.page.charts import MAX_DOTS, N_MARKERS, Line, Panel, Point, Style, bands, dots, lines
from tasks.page.files import Record
from tasks.page.formats import score
from tasks.page.tables import Table
from tasks.report.headline import criterion_title, method_title
from tasks.report.record import SIDES, best_trained
from tasks.report.tables import (
    METRICS,
    bins_table,
    hallucination_table,
    halved,
    halves_table,
    images_table,
    margin_table,
    ranked_table,
    ranking_table,
    roc_table,
    runs_table,
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
    """Look of every method: greys for attacks, thin muted lines for classical denoisers and the
    mean image, dots in the colour of a method for its twin."""
    used = {"grey": 0, "vivid": 0, "muted": 0}
    greys = dict.fromkeys(("attack", "vote", "oracle"), "grey")
    found: dict[str, Style] = {}
    for number, (name, method) in enumerate(record["methods"].items()):
        source = found.get(name.removesuffix(PROJECTED))
        if source is not None:
            found[name] = replace(source, number=number, twin=True)
            continue
        kind = {**greys, "classical": "muted", "control": "muted"}.get(method["kind"], "vivid")
        palette = {"grey": GREYS, "vivid": VIVID, "muted": MUTED}[kind]
        colour = palette[used[kind] % len(palette)]
        used[kind] += 1
        found[name] = Style(number, colour, number % N_MARKERS, thin=kind == "muted")
    return found


def legend(record: Record, names: Sequence[str]) -> list[tuple[Style, str]]:
    """(style, title) of some methods."""
    looks = styles(record)
    return [(looks[name], method_title(name)[0]) for name in names]


def ranked_panel(title: str, curves: Sequence[Sequence[Point]]) -> Panel:
    """The frame of scores over images, best first."""
    ys = [y for curve in curves for _x, y in curve]
    n_images = max((len(curve) for curve in curves), default=0)
    return Panel(title, rank_axis("images, best first", n_images), unit_axis("", ys))


def ranked_figure(record: Record) -> Figure:
    """The score of the i-th best image, SSIM and HaarPSI (image restoration paper, figure 2)."""
    table, looks, names = ranked_table(record), styles(record), list(record["methods"])
    halves = [table.where("side", side) for side in SIDES]
    panels = []
    for metric in METRICS:
        curves = [
            Line(looks[m], *(half.points("rank", f"{m} {metric}") for half in halves))
            for m in names
        ]
        title = METRIC_TITLES[metric]
        shown = f"{title} ({good_title(record)})" if metric == "ssim" else title
        panel = ranked_panel(shown, [c for line in curves for c in (line.targets, line.decoys)])
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
    figure 5); None if no victim was attacked twice."""
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
        title = METRIC_TITLES[metric]
        panel = ranked_panel(title, [curve for area in areas for curve in area[2:]])
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
    drawn = [point for line in curves for point in line.targets]
    across, up = (
        max(LOWEST_RATE, min((p[k] for p in drawn if p[k] > 0), default=0.1)) for k in (0, 1)
    )
    log = Panel(f"{found} (log)", log_axis(f"{false} (log)", across), log_axis("", up))
    positive = [Line(line.style, [p for p in line.targets if min(p) > 0]) for line in curves]
    panels.append(log.svg([log.diagonal(), *lines(log, positive)], f"ROC, logarithmic. {about}"))
    shown = [
        (look, f"{title}: AUC {score(aucs[name])}")
        for name, (look, title) in zip(names, legend(record, names), strict=True)
    ]
    return Figure("roc", panels, [table], shown)


def n_not_drawn(*groups: Sequence[object]) -> int:
    """Number of points left out of a scatter, since it draws MAX_DOTS of each group at most."""
    return sum(max(0, len(group) - MAX_DOTS) for group in groups)


def before_after_figure(record: Record, name: str, metrics: Sequence[str] = METRICS) -> Figure:
    """Every image's scores before and after restoration by method `name` (image restoration paper,
    figure 3)."""
    table, colour, title = images_table(record), styles(record)[name].colour, method_title(name)[0]
    sides = [table.where("side", side) for side in SIDES]
    compared = record["methods"][name]["targets"]["compared_with_plain"]
    panels, n_hidden = [], 0
    for metric in metrics:
        points = [side.points(f"plain {metric}", f"{name} {metric}") for side in sides]
        values = [value for side in points for point in side for value in point]
        measure = METRIC_TITLES[metric]
        before = unit_axis(f"{measure} before: attack alone", values)
        panel = Panel(f"{measure} after: {title}", before, unit_axis("", values))
        about = (
            f"{measure} of each image before and after {title}. By SSIM {compared['n_better']} "
            f"targets are better, {compared['n_worse']} worse."
        )
        panels.append(panel.svg([panel.diagonal(), dots(panel, *points, colour=colour)], about))
        n_hidden = max(n_hidden, n_not_drawn(*points))
    return Figure("before-after", panels, [table], n_hidden=n_hidden)


def margin_figure(record: Record) -> Figure | None:
    """SSIM against distance from the decision boundary (KKT paper, section 3.2); None if
    unknown."""
    table = margin_table(record)
    if not table.n_rows:
        return None
    best = best_trained(record)
    panels, n_hidden = [], 0
    for name in ("plain", *([best] if best else [])):
        points, title = table.points("margin", f"{name} ssim"), method_title(name)[0]
        across = round_axis("distance from the decision boundary, y φ(x)", [x for x, _y in points])
        shown = f"SSIM: {title} ({good_title(record)})"
        panel = Panel(shown, across, unit_axis("", [y for _x, y in points]))
        parts = [
            dots(panel, points, [], colour=styles(record)[name].colour),
            panel.horizontal(record["settings"]["good_threshold"]),
        ]
        panels.append(panel.svg(parts, f"SSIM of {title} against distance from the boundary."))
        n_hidden = n_not_drawn(points)
    return Figure("margin", panels, [table], n_hidden=n_hidden)


def ranking_figure(record: Record) -> Figure | None:
    """Criteria that need no original against what truly came back of a run; None if not ranked."""
    if not record["ranking"]:
        return None
    table = runs_table(record)
    shown = table.kept([count > 0 for count in record["runs"]["n_pictures"]])
    panels = []
    for name, found in record["ranking"].items():
        points = shown.points(name, "mean_ssim") if name in shown.columns else []
        if not points or found["spearman"] is None:
            continue
        across = round_axis(criterion_title(name), [x for x, _y in points])
        panel = Panel("true mean SSIM of a run", across, round_axis("", [y for _x, y in points]))
        about = f"{criterion_title(name)}: rank correlation {score(found['spearman'])}."
        panels.append(panel.svg([dots(panel, points, [], colour=2)], about))
    return Figure("runs", panels, [table, ranking_table(record)])


def hallucination_figure(record: Record) -> Figure | None:
    """Disagreement of samples against the error of their mean; None without means of samples."""
    table = hallucination_table(record)
    panels, n_hidden = [], 0
    for name, check in record["hallucination"].items():
        rows, title = table.where("method", name), method_title(name)[0]
        points = [rows.where("side", side).points("disagreement", "rmse") for side in SIDES]
        both = [*points[0], *points[1]]
        if not both:
            continue
        across = round_axis("disagreement of the samples", [x for x, _y in both], from_zero=True)
        up = round_axis("", [y for _x, y in both], from_zero=True)
        panel = Panel(f"error (RMSE): {title}", across, up)
        steps = " ".join(
            "{:.1f},{:.1f}".format(*panel.at((sum(part["disagreement"]) / 2, part["mean_rmse"])))
            for part in check["bins"]
            if part["mean_rmse"] is not None
        )
        parts = [
            dots(panel, *points, colour=styles(record)[name].colour),
            f'<polyline class="curve means" points="{steps}"/>',
        ]
        about = f"Error against disagreement, {title}: rank correlation {score(check['spearman'])}"
        panels.append(panel.svg(parts, about))
        n_hidden = max(n_hidden, n_not_drawn(*points))
    if not panels:
        return None
    return Figure("hallucination", panels, [table, bins_table(record)], n_hidden=n_hidden)


FIGURES = (ranked_figure, halves_figure, margin_figure, thresholds_figure, roc_figure,
           ranking_figure, hallucination_figure)  # fmt: skip


def figures_of(record: Record) -> dict[str, Figure]:
    """The charts that this record has the numbers for, by name."""
    best = best_trained(record)
    made = [make(record) for make in FIGURES]
    made += [before_after_figure(record, best)] if best else []
    return {figure.name: figure for figure in made if figure is not None}
