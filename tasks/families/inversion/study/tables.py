"""The numbers of an inversion study as tables: what its page draws, and the CSVs beside it.

A figure is drawn from its table, so the two cannot differ (docs/pages.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tasks.families.inversion.study.figure_specs import (
    MEASURES,
    Numbered,
    attacks_in,
    cells_of,
    grid_of,
    has_front,
    layer_groups,
    letters,
    mean_of,
    value_of,
    with_roles,
)
from tasks.page.files import Arrays, Record
from tasks.page.tables import Cell, Table, estimate, table_of

OF_CELL = ("accuracy", "train_accuracy", "distance", "min_distance")
WHERE = ("source", "cell", "name", "title", "cut", "kind", "lam", "beta", "letter", "roles")

Row = dict[str, Cell]


def _where(record: Record, source: Record, k: int, cell: Record) -> Row:
    """The columns that say which cell a row is of."""
    return {
        "source": source["name"],
        "cell": k,
        **{key: cell[key] for key in ("name", "title", "cut")},
        **{key: cell["defence"][key] for key in ("kind", "lam", "beta")},
        "letter": letters(record, source).get(k),
        "roles": "; ".join(cell["roles"]) or None,
    }


def _all_cells(record: Record) -> Iterator[tuple[Row, Record]]:
    """(the columns that say which it is, cell), source by source."""
    for source in record["sources"]:
        for k, cell in cells_of(record, source):
            yield _where(record, source, k, cell), cell


def _estimate(name: str, found: Record) -> Row:
    return estimate(name, (found["mean"], found["low"], found["high"]))


def _scores(cell: Record, attack: str) -> Row:
    row: Row = {}
    scores = cell["attacks"].get(attack) or {}
    for name in MEASURES:
        row |= _estimate(name, value_of(cell, name, attack))
        row |= {f"{name} {key}": (scores.get(key) or {}).get(name) for key in ("std", "worst")}
    return row | {"chance": scores.get("chance"), "n": scores.get("n")}


def scores_table(
    name: str, record: Record, groups: Sequence[tuple[Record, Sequence[Numbered]]]
) -> Table:
    """One row per cell and attack that was run on it: accuracy and every score."""
    rows: list[Row] = []
    for source, cells in groups:
        for k, cell in cells:
            about = _where(record, source, k, cell)
            about |= _estimate("accuracy", value_of(cell, "accuracy"))
            run = attacks_in(record, [(k, cell)])
            rows += [
                about | {"attack": attack["name"]} | _scores(cell, attack["name"]) for attack in run
            ] or [about]
    return table_of(name, rows, (*WHERE, "accuracy", "attack", *MEASURES, "chance", "n"))


def heatmaps_table(name: str, record: Record) -> Table:
    """One row per cell of the grids: where it is, and what the heatmaps shade."""
    rows: list[Row] = []
    for source in record["sources"]:
        grid = grid_of(record, source)
        for k, cell in grid:
            row = _where(record, source, k, cell)
            row |= {"diverged": cell["diverged"], "n_seeds": len(cell["seeds"])}
            for value in ("accuracy", "distance"):
                row |= _estimate(value, value_of(cell, value))
            for attack in attacks_in(record, grid):
                row |= _estimate(f"ssim {attack['name']}", value_of(cell, "ssim", attack["name"]))
            rows.append(row)
    return table_of(name, rows, (*WHERE, "diverged", "n_seeds", "accuracy", "distance"))


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The places of (accuracy, leakage) that no other beats in both, by accuracy.

    A point is beaten by one that is at least as good in both and better in one.
    """
    kept = [
        k
        for k, (x, y) in enumerate(points)
        if not any(a >= x and b <= y and (a > x or b < y) for a, b in points)
    ]
    return sorted(kept, key=lambda k: points[k])


def _attacked(record: Record, source: Record, k: int, cell: Record, attack: str) -> Row:
    """A cell's accuracy, and its SSIM under an attack beside that of unrelated images."""
    row = _where(record, source, k, cell) | {"attack": attack}
    row |= _estimate("accuracy", value_of(cell, "accuracy"))
    row |= _estimate("ssim", value_of(cell, "ssim", attack))
    return row | {"chance": cell["attacks"][attack]["chance"]}


def pareto_table(name: str, record: Record) -> Table:
    """One row per cell of the grid's layer and attack, with both means known.

    An attack that was run on less than half of the cells has no front.
    """
    rows: list[Row] = []
    for source in record["sources"]:
        cells = cells_of(record, source, cut=source["cut"])
        for attack in (found["name"] for found in attacks_in(record, cells)):
            known = [
                (k, cell, (x, y))
                for k, cell in cells
                if (x := mean_of(cell, "accuracy")) is not None
                and (y := mean_of(cell, "ssim", attack)) is not None
            ]
            drawn = has_front(record, source, attack)
            best = set(front([point for _k, _cell, point in known])) if drawn else set()
            rows += [
                _attacked(record, source, k, cell, attack) | {"on_front": place in best}
                for place, (k, cell, _point) in enumerate(known)
            ]
    return table_of(name, rows, (*WHERE, "attack", "accuracy", "ssim", "chance", "on_front"))


def layers_table(name: str, record: Record) -> Table:
    """One row per cell of the study of layers and attack."""
    rows = [
        _attacked(record, source, k, cell, attack["name"])
        for source in record["sources"]
        for group in layer_groups(record, source)
        for k, cell in group
        for attack in attacks_in(record, [(k, cell)])
    ]
    return table_of(name, rows, (*WHERE, "attack", "accuracy", "ssim", "chance"))


def first_seed(cell: Record) -> Record:
    """A cell's entry for seed 0; empty if it does not have it."""
    return next((dict(found) for found in cell["seeds"] if found["seed"] == 0), {})


def examples_table(name: str, record: Record, pictures: Arrays) -> Table:
    """One row per picture that an attack made and the page may show: its scores."""
    rows: list[Row] = []
    for source in record["sources"]:
        n_shown = len(pictures.get(f"{source['name']}/original", ()))
        chosen = with_roles(record, source)
        chosen += [f for group in layer_groups(record, source) for f in group if f not in chosen]
        for k, cell in chosen:
            about = _where(record, source, k, cell)
            for attack, scores in (first_seed(cell).get("attacks") or {}).items():
                if f"{k}/{attack}" in pictures:
                    rows += [
                        {key: about[key] for key in ("source", "cell", "name", "cut", "letter")}
                        | {"attack": attack, "image": image}
                        | {measure: scores[measure][image] for measure in MEASURES}
                        for image in range(min(n_shown, len(scores["ssim"])))
                    ]
    keys = ("source", "cell", "name", "cut", "letter", "attack", "image", *MEASURES)
    return table_of(name, rows, keys)


def cells_table(record: Record) -> Table:
    """One row per cell: every number of it but those of single seeds and images."""
    rows: list[Row] = []
    for about, cell in _all_cells(record):
        row = about | {"in_grid": cell["in_grid"], "n_seeds": len(cell["seeds"])}
        row |= {"diverged": cell["diverged"]}
        for value in OF_CELL:
            row |= _estimate(value, value_of(cell, value))
        for attack in cell["attacks"]:
            row |= {f"{attack} {key}": at for key, at in _scores(cell, attack).items()}
            zeta = cell["attacks"][attack].get("zeta") or ()
            row[f"{attack} zeta"] = " ".join(f"{at:g}" for at in zeta if at is not None)
        rows.append(row)
    return table_of("cells", rows, (*WHERE, "in_grid", "n_seeds", "diverged", *OF_CELL))


def seeds_table(record: Record) -> Table:
    """One row per network: its accuracy and distances, and the mean scores of its images."""
    rows: list[Row] = []
    for about, cell in _all_cells(record):
        for seed in cell["seeds"]:
            row = {key: about[key] for key in ("source", "cell", "name", "cut")}
            row |= {key: seed[key] for key in ("seed", *OF_CELL, "diverged")}
            for attack, scores in seed["attacks"].items():
                for name in MEASURES:
                    known = [value for value in scores[name] if value is not None]
                    row[f"{attack} {name}"] = sum(known) / len(known) if known else None
            rows.append(row)
    return table_of("seeds", rows, ("source", "cell", "name", "cut", "seed", *OF_CELL, "diverged"))


def spots_table(record: Record) -> Table:
    """One row per sweet spot that was sought; without a cell where none was found."""
    keys = ("source", "attack", "cell", "vanilla", "accuracy_loss", "leakage", "vanilla_leakage")
    rows: list[Row] = [{key: spot[key] for key in keys} for spot in record["sweet_spots"]]
    return table_of("sweet-spots", rows, keys)
