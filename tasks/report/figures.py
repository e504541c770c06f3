"""The report's tables, named after the record's own names (docs/pages.md), and its charts, each
drawn from its table. What they mean is the template's business. In scatter plots targets are dots,
decoys crosses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from tasks.evaluation.record import SIDES, best_trained, sampled_means
from tasks.evaluation.settings import PROJECTED
from tasks.page.charts import (
    MAX_DOTS,
    N_MARKERS,
    Line,
    Panel,
    Point,
    Style,
    bands,
    dots,
    lines,
    log_axis,
    rank_axis,
    round_axis,
    unit_axis,
)
from tasks.page.files import Cell, Record, Table, cells_of, table_of
from tasks.page.formats import score
from tasks.report.headline import criterion_title, method_title

METRIC_TITLES = {"ssim": "SSIM", "haarpsi": "HaarPSI"}
METRICS = tuple(METRIC_TITLES)
THRESHOLDS = [k / 100 for k in range(101)]
GREYS, VIVID, MUTED = (0, 1, 10, 11), (2, 3, 4, 5, 6), (7, 8, 9)
LOWEST_RATE = 1e-4
Columns = dict[str, list[Cell]]


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


def tables_of(record: Record) -> dict[str, Table]:
    """The tables that stand on every page of this record, but for those of its figures alone."""
    spans, nothing = bool(record.get("span")), record["nothing"]
    methods: list[dict[str, Cell]] = []
    for name, method in record["methods"].items():
        row: dict[str, Cell] = {"method": name, "kind": method["kind"]}
        for side in SIDES:
            row |= cells_of(method[side]["summary"], f"{side} ")
        detection = method["detection"]
        row |= {"auc": detection["auc"]} | cells_of(detection["found_at"] or {}, "found at ")
        row["n_targets_above_every_decoy"] = method["n_targets_above_every_decoy"]
        if spans:
            row["headroom_closed"] = record["span"]["headroom_closed"].get(name)
        methods.append(row | cells_of(method["targets"]["compared_with_plain"], "compared "))

    def shown(name: str, place: str) -> Table:
        return _both(name, lambda side: _placed(record, side, record[place][side]))

    made = [table_of("methods", methods), shown("best-images", "grid")]
    made += [shown("attacks-side-by-side", "side_by_side")] if record["side_by_side"] else []
    made.append(Table("all-images", _placed(record, "targets", record["appendix"]["targets"])))
    examples, edges = record["examples"], ("row", "above", "at most")

    def columns(side: str) -> Columns:
        bins = zip(pairwise(examples["edges"]), examples[side], strict=True)
        found = [(row, low, high) for (low, high), rows in bins for row in rows]
        limits = {name: [f[k] for f in found] for k, name in enumerate(edges)}
        return limits | _scores(record, side, ("ssim",), limits["row"])

    made.append(_both("examples", columns))
    if record["side_by_side"]:
        names = ("method", "kind", "n_runs", "n_candidates", "seconds", "content_hash")
        made.append(Table("attacks", {n: [a[n] for a in record["attacks"]] for n in names}))
    if nothing["n"]:
        names = ("victim", "run", "candidate", "iteration", "ssim", "closest")
        place: Columns = {"place": list(range(1, nothing["n"] + 1))}
        made.append(Table("nothing", place | {name: nothing[name] for name in names}))
    if record["excluded"]:
        of_images = ("image_id", "nearest", "correlation")
        made.append(table_of("excluded", record["excluded"]["rows"], of_images))
    made += [images_table(record), Table("runs", dict(record["runs"]))]
    return {table.name: table for table in made}


def images_table(record: Record) -> Table:
    """One row per image, targets then decoys: every method's scores."""
    return _both("before-after", lambda side: _scores(record, side, METRICS))


def figures_of(record: Record) -> dict[str, Figure]:
    """The charts that this record has the numbers for, by name."""
    best = best_trained(record)
    made = [make(record) for make in FIGURES]
    made += [before_after_figure(record, best)] if best else []
    return {figure.name: figure for figure in made if figure is not None}


def styles(record: Record) -> dict[str, Style]:
    """Look of every method: greys for attacks, thin muted lines for classical denoisers and the
    mean image, dots in the colour of a method for its twin."""
    used = {GREYS: 0, VIVID: 0, MUTED: 0}
    palettes: dict[str, tuple[int, ...]] = dict.fromkeys(("attack", "vote", "oracle"), GREYS)
    palettes |= {"classical": MUTED, "control": MUTED}
    found: dict[str, Style] = {}
    for number, (name, method) in enumerate(record["methods"].items()):
        source = found.get(name.removesuffix(PROJECTED))
        if source is not None:
            found[name] = replace(source, number=number, twin=True)
            continue
        palette = palettes.get(method["kind"], VIVID)
        colour = palette[used[palette] % len(palette)]
        used[palette] += 1
        found[name] = Style(number, colour, number % N_MARKERS, thin=palette is MUTED)
    return found


def _legend(record: Record, names: Iterable[str]) -> list[tuple[Style, str]]:
    looks = styles(record)
    return [(looks[name], method_title(name)[0]) for name in names]


def ranked_panel(title: str, curves: Sequence[Sequence[Point]]) -> Panel:
    """The frame of scores over images, best first."""
    ys = [y for curve in curves for _x, y in curve]
    n_images = max((len(curve) for curve in curves), default=0)
    return Panel(title, rank_axis("images, best first", n_images), unit_axis("", ys))


def ranked_figure(record: Record) -> Figure:
    """The score of the i-th best image, SSIM and HaarPSI (image restoration paper, figure 2)."""
    methods, looks = record["methods"], styles(record)
    table = _ranked(
        "ranked-curves",
        record,
        lambda side: {
            f"{name} {metric}": method[side][metric]
            for name, method in methods.items()
            for metric in METRICS
        },
    )
    of_sides = [table.where("side", side) for side in SIDES]
    panels = []
    for metric, title in METRIC_TITLES.items():
        curves = [
            Line(look, *(rows.points("rank", f"{m} {metric}") for rows in of_sides))
            for m, look in looks.items()
        ]
        shown = f"{title} ({_good_title(record)})" if metric == "ssim" else title
        panel = ranked_panel(shown, [c for line in curves for c in (line.targets, line.decoys)])
        parts = lines(panel, curves)
        if metric == "ssim":
            parts.append(panel.horizontal(record["settings"]["good_threshold"]))
        means = []
        for name, method in methods.items():
            found = [score(method[side]["summary"][f"mean_{metric}"]) for side in SIDES]
            means.append(
                f"{method_title(name)[0]}: mean {found[0]} of targets, {found[1]} of decoys"
            )
        panels.append(panel.svg(parts, f"{title} of the i-th best image. {'; '.join(means)}."))
    return Figure("ranked-curves", panels, [table], _legend(record, methods))


def _ranked(name: str, record: Record, columns: Callable[[str], Mapping[str, Any]]) -> Table:
    """Columns of scores, each sorted by itself, the best first."""

    def of_side(side: str) -> Columns:
        ranks: Columns = {"rank": list(range(1, len(record[side]["image_id"]) + 1))}
        return ranks | {key: sorted(s, reverse=True) for key, s in columns(side).items()}

    return _both(name, of_side)


def _good_title(record: Record) -> str:
    """Words for the dotted line of a panel of SSIM."""
    return f"dotted: good, above {record['settings']['good_threshold']:g}"


def halves_figure(record: Record) -> Figure | None:
    """The area between the ranked curves of two halves of the attacks (image restoration paper,
    figure 5); None if no victim was attacked twice."""
    halved = {name: m["halves"] for name, m in record["methods"].items() if m["halves"]}
    if not halved:
        return None
    table = _ranked(
        "split-halves",
        record,
        lambda side: {
            f"{name} {metric} {k}": half
            for name, halves in halved.items()
            for metric in METRICS
            for k, half in enumerate(halves[side][metric], 1)
        },
    )
    looks, of_sides = styles(record), {side: table.where("side", side) for side in SIDES}
    panels = []
    for metric, title in METRIC_TITLES.items():
        areas = []
        for name in halved:
            for side in reversed(SIDES):
                one, other = (of_sides[side].points("rank", f"{name} {metric} {k}") for k in (1, 2))
                areas.append((looks[name], side, one, other))
        panel = ranked_panel(title, [curve for area in areas for curve in area[2:]])
        about = f"{title} of the i-th best image: the area between two halves of the attacks."
        panels.append(panel.svg([bands(panel, areas)], about))
    return Figure("split-halves", panels, [table], _legend(record, halved))


def thresholds_figure(record: Record) -> Figure:
    """Number of good images, by where good begins; targets and decoys."""
    looks = styles(record)
    columns: Columns = {"threshold": list(THRESHOLDS)}
    for name, method in record["methods"].items():
        for side in SIDES:
            scores = method[side]["ssim"]
            columns[f"{name} {side}"] = [sum(s > level for s in scores) for level in THRESHOLDS]
    table = Table("thresholds", columns)
    curves = [
        Line(look, *(table.points("threshold", f"{m} {side}") for side in SIDES))
        for m, look in looks.items()
    ]
    n_images = max((y for line in curves for _x, y in line.targets), default=0)
    counts = round_axis("", [n_images], from_zero=True)
    panel = Panel("images above the threshold", unit_axis("threshold of SSIM"), counts)
    threshold = record["settings"]["good_threshold"]
    parts = [*lines(panel, curves), panel.vertical(threshold, f"{threshold:g}")]
    svg = panel.svg(parts, "Number of images whose SSIM is above a threshold, per method.")
    return Figure("thresholds", [svg], [table], _legend(record, looks))


def roc_figure(record: Record) -> Figure | None:
    """Targets found against decoys taken for targets, linear and logarithmic; None if unknown."""
    keys, looks = ("false_positives", "found"), styles(record)
    detections = {name: method["detection"] for name, method in record["methods"].items()}
    rows = [
        {"method": name} | dict(zip(keys, point, strict=True))
        for name, detection in detections.items()
        for point in zip(*(detection["roc"][key] for key in keys), strict=True)
    ]
    table = table_of("roc", rows, ("method", *keys))
    names = [name for name in detections if name in table.columns["method"]]
    if not names:
        return None
    curves = [Line(looks[m], table.where("method", m).points(*keys)) for m in names]
    found, false = "share of targets found", "share of decoys taken for targets"
    straight = Panel(found, unit_axis(false), unit_axis(""))
    titles = {m: (method_title(m)[0], score(detections[m]["auc"])) for m in names}
    about = "; ".join(f"{title}: area {area}" for title, area in titles.values())
    panels = [straight.svg([straight.diagonal(), *lines(straight, curves)], f"ROC. {about}")]
    drawn = [point for line in curves for point in line.targets]
    across, up = (
        max(LOWEST_RATE, min((p[k] for p in drawn if p[k] > 0), default=0.1)) for k in (0, 1)
    )
    log = Panel(f"{found} (log)", log_axis(f"{false} (log)", across), log_axis("", up))
    positive = [Line(line.style, [p for p in line.targets if min(p) > 0]) for line in curves]
    panels.append(log.svg([log.diagonal(), *lines(log, positive)], f"ROC, logarithmic. {about}"))
    shown = [(looks[m], f"{title}: AUC {area}") for m, (title, area) in titles.items()]
    return Figure("roc", panels, [table], shown)


def n_not_drawn(*groups: Sequence[object]) -> int:
    """Number of points left out of a scatter, since it draws MAX_DOTS of each group at most."""
    return sum(max(0, len(group) - MAX_DOTS) for group in groups)


def before_after_figure(record: Record, name: str, metrics: Sequence[str] = METRICS) -> Figure:
    """Every image's scores before and after restoration by method `name` (image restoration paper,
    figure 3)."""
    table, colour, title = images_table(record), styles(record)[name].colour, method_title(name)[0]
    of_sides = [table.where("side", side) for side in SIDES]
    compared = record["methods"][name]["targets"]["compared_with_plain"]
    panels, n_hidden = [], 0
    for metric in metrics:
        points = [rows.points(f"plain {metric}", f"{name} {metric}") for rows in of_sides]
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
    margins = record["targets"]["margin"]
    known = [i for i, margin in enumerate(margins) if margin is not None]
    if not known:
        return None
    scores = _scores(record, "targets", ("ssim",), known)
    table = Table("margin", {"margin": [margins[i] for i in known]} | scores)
    best, threshold = best_trained(record), record["settings"]["good_threshold"]
    panels, n_hidden = [], 0
    for name in ("plain", *([best] if best else [])):
        points, title = table.points("margin", f"{name} ssim"), method_title(name)[0]
        across = round_axis("distance from the decision boundary, y φ(x)", [x for x, _y in points])
        shown = f"SSIM: {title} ({_good_title(record)})"
        panel = Panel(shown, across, unit_axis("", [y for _x, y in points]))
        drawn = dots(panel, points, [], colour=styles(record)[name].colour)
        about = f"SSIM of {title} against distance from the boundary."
        panels.append(panel.svg([drawn, panel.horizontal(threshold)], about))
        n_hidden = n_not_drawn(points)
    return Figure("margin", panels, [table], n_hidden=n_hidden)


def ranking_figure(record: Record) -> Figure | None:
    """Criteria that need no original against what truly came back of a run; None if not ranked."""
    ranking, runs = record["ranking"], record["runs"]
    if not ranking:
        return None
    kept = [k for k, count in enumerate(runs["n_pictures"]) if count > 0]
    shown = Table("runs", {name: [cells[k] for k in kept] for name, cells in runs.items()})
    panels = []
    for name, found in ranking.items():
        points = shown.points(name, "mean_ssim") if name in shown.columns else []
        if points and found["spearman"] is not None:
            title = criterion_title(name)
            across, up = (round_axis(t, [p[k] for p in points]) for k, t in enumerate((title, "")))
            panel = Panel("true mean SSIM of a run", across, up)
            about = f"{title}: rank correlation {score(found['spearman'])}."
            panels.append(panel.svg([dots(panel, points, [], colour=2)], about))
    rows = [{"criterion": name} | cells_of(found) for name, found in ranking.items()]
    return Figure(
        "runs", panels, [Table("runs", dict(runs)), table_of("ranking", rows, ("criterion",))]
    )


def hallucination_figure(record: Record) -> Figure | None:
    """Disagreement of samples against the error of their mean, in bins of disagreement, too; None
    without means of samples."""
    keys, methods, checks = ("disagreement", "rmse", "ssim"), record["methods"], []
    rows = [
        {"method": name, "side": side} | dict(zip(keys, values, strict=True))
        for name in sampled_means(record)
        for side in SIDES
        for values in zip(*(methods[name][side][key] for key in keys), strict=True)
        if values[0] is not None
    ]
    table = table_of("hallucination", rows, ("method", "side", *keys))
    panels, n_hidden, counted = [], 0, ("n", "mean_rmse", "mean_ssim")
    for name, check in record["hallucination"].items():
        checks += [
            {"method": name}
            | dict(zip(("from", "to"), part["disagreement"], strict=True))
            | {key: part[key] for key in counted}
            | {f"decoys {key}": (part.get("decoys") or {}).get(key) for key in counted}
            for part in check["bins"]
        ]
        mine, title = table.where("method", name), method_title(name)[0]
        points = [mine.where("side", side).points("disagreement", "rmse") for side in SIDES]
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
        drawn = dots(panel, *points, colour=styles(record)[name].colour)
        means = f'<polyline class="curve means" points="{steps}"/>'
        about = f"Error against disagreement, {title}: rank correlation {score(check['spearman'])}"
        panels.append(panel.svg([drawn, means], about))
        n_hidden = max(n_hidden, n_not_drawn(*points))
    if not panels:
        return None
    tables = [table, table_of("hallucination-bins", checks, ("method",))]
    return Figure("hallucination", panels, tables, n_hidden=n_hidden)


FIGURES = (ranked_figure, halves_figure, margin_figure, thresholds_figure, roc_figure,
           ranking_figure, hallucination_figure)  # fmt: skip


def _placed(record: Record, side: str, rows: Sequence[int]) -> Columns:
    place: Columns = {"place": list(range(1, len(rows) + 1)), "row": list(rows)}
    return place | _scores(record, side, ("ssim",), rows)


def _scores(
    record: Record, side: str, metrics: Sequence[str], rows: Iterable[Any] | None = None
) -> Columns:
    """Identity and scores of `rows` (all of them by default) of one side."""
    chosen = range(len(record[side]["image_id"])) if rows is None else list(rows)
    identity = {key: record[side][key] for key in ("victim", "image_id", "label")}
    scores = {
        f"{name} {metric}": method[side][metric]
        for name, method in record["methods"].items()
        for metric in metrics
    }
    return {key: [cells[i] for i in chosen] for key, cells in (identity | scores).items()}


def _both(name: str, columns: Callable[[str], Columns]) -> Table:
    """The columns of targets and decoys under each other, with the group in front."""
    parts = {side: columns(side) for side in SIDES}
    sides: list[Cell] = [
        side for side, part in parts.items() for _row in next(iter(part.values()), [])
    ]
    both = {key: [*cells, *parts["decoys"][key]] for key, cells in parts["targets"].items()}
    return Table(name, {"side": sides} | both)
