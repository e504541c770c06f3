"""The report's scatter plots: one dot per image, or per run.

Targets are dots, decoys crosses. Nothing is computed but where a dot goes.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasks.page.axes import round_axis, unit_axis
from tasks.page.charts import Panel, dots
from tasks.page.files import Record
from tasks.page.formats import score
from tasks.page.tables import Table
from tasks.report.figures import METRIC_TITLES, Figure, good_title, n_not_drawn, styles
from tasks.report.headline import criterion_title, method_title
from tasks.report.record import SIDES, best_trained
from tasks.report.tables import (
    METRICS,
    bins_table,
    hallucination_table,
    images_table,
    margin_table,
    ranking_table,
    runs_table,
)


def before_after_figure(record: Record, name: str, metrics: Sequence[str] = METRICS) -> Figure:
    """Every image's scores before and after restoration by method `name` (image restoration paper,
    figure 3)."""
    table, colour, title = images_table(record), styles(record)[name].colour, method_title(name)[0]
    sides = {side: table.where("side", side) for side in SIDES}
    panels, n_hidden = [], 0
    for metric in metrics:
        points = [sides[side].points(f"plain {metric}", f"{name} {metric}") for side in SIDES]
        values = [value for side in points for point in side for value in point]
        measure = METRIC_TITLES[metric]
        panel = Panel(
            f"{measure} after: {title}",
            unit_axis(f"{measure} before: attack alone", values),
            unit_axis("", values),
        )
        compared = record["methods"][name]["targets"]["compared_with_plain"]
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
        distances = round_axis(
            "distance from the decision boundary, y φ(x)", [x for x, _y in points]
        )
        shown = f"SSIM: {title} ({good_title(record)})"
        panel = Panel(shown, distances, unit_axis("", [y for _x, y in points]))
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
    pictured = [count > 0 for count in record["runs"]["n_pictures"]]
    shown = table.kept(pictured)
    panels = []
    for name, found in record["ranking"].items():
        points = shown.points(name, "mean_ssim") if name in shown.columns else []
        if not points or found["spearman"] is None:
            continue
        across = round_axis(criterion_title(name), [x for x, _y in points])
        up = round_axis("", [y for _x, y in points])
        panel = Panel("true mean SSIM of a run", across, up)
        about = f"{criterion_title(name)}: rank correlation {score(found['spearman'])}."
        panels.append(panel.svg([dots(panel, points, [], colour=2)], about))
    return Figure("runs", panels, [table, ranking_table(record)])


def hallucination_figure(record: Record) -> Figure | None:
    """Disagreement of samples against the error of their mean; None without means of samples."""
    table: Table = hallucination_table(record)
    panels, n_hidden = [], 0
    for name in record["hallucination"]:
        rows = table.where("method", name)
        points = [rows.where("side", side).points("disagreement", "rmse") for side in SIDES]
        if not points[0] and not points[1]:
            continue
        both = [*points[0], *points[1]]
        across = round_axis("disagreement of the samples", [x for x, _y in both], from_zero=True)
        up = round_axis("", [y for _x, y in both], from_zero=True)
        panel = Panel(f"error (RMSE): {method_title(name)[0]}", across, up)
        means = [
            (sum(part["disagreement"]) / 2, part["mean_rmse"])
            for part in record["hallucination"][name]["bins"]
            if part["mean_rmse"] is not None
        ]
        steps = " ".join("{:.1f},{:.1f}".format(*panel.at(point)) for point in means)
        parts = [
            dots(panel, *points, colour=styles(record)[name].colour),
            f'<polyline class="curve means" points="{steps}"/>',
        ]
        about = f"Error against disagreement, {method_title(name)[0]}: rank correlation "
        about += score(record["hallucination"][name]["spearman"])
        panels.append(panel.svg(parts, about))
        n_hidden = max(n_hidden, n_not_drawn(*points))
    if not panels:
        return None
    return Figure("hallucination", panels, [table, bins_table(record)], n_hidden=n_hidden)
