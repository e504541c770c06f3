"""The numbers behind the page of an inversion study (MixCon paper): the words of its figures,
look-ups in the record, and tables. Figures are drawn from the tables, which are also the CSV files
beside the page (docs/pages.md)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tasks.page.charts import letter
from tasks.page.files import Arrays, Cell, Record, Table, claims_table, estimate, table_of
from tasks.page.formats import NOTHING, brackets, decibels, percent, power, score, short
from tasks.page.study_page import FigureWords, figure_spec

PAPER = "MixCon paper"
MEASURES = ("ssim", "psim", "psnr")
OF_CELL = ("accuracy", "train_accuracy", "distance", "min_distance")
WHERE = ("source", "cell", "name", "title", "cut", "kind", "lam", "beta", "letter", "roles")
Numbered = tuple[int, Record]
Row = dict[str, Cell]
ONE_NETWORK = (
    "What other networks or other images would give away, nor that nothing more can be brought "
    "back: a score is that of these attacks, and a stronger one may find more."
)

WORDS: dict[str, FigureWords] = {
    "table3": (
        "Accuracy and what the attacks bring back",
        f"{PAPER}, table 3",
        "Mean ± standard deviation over images, in parentheses the image that came back best. "
        "Chance: what reconstructions score against images other than their own. SSIM and PSIM "
        "are from 0 to 1; higher means that more leaks. Brackets are 95 % intervals over networks.",
        ONE_NETWORK,
    ),
    "plates": (
        "What comes back",
        f"{PAPER}, figure 4",
        "Test images, and what each attack makes of the features that are sent for them, with the "
        "SSIM. One network of each setting, the first images of the test, not chosen by how well "
        "they came back.",
        "How often it goes so: the means are in the table above.",
    ),
    "heatmaps": (
        "The grid of λ and β",
        f"{PAPER}, figures 3 and 6 to 17",
        "Test accuracy, mean distance of the features, and the mean SSIM under the attacks, by "
        "the weight λ of MixCon and the bound β of its distances. A letter is that of the tables.",
        "How sure a number is: one colour step may be chance. The CSV has the intervals, and the "
        "next figure draws them.",
    ),
    "pareto": (
        "Accuracy against leakage",
        f"{PAPER}, section 4.3",
        "Every setting at the layer of the grid: to the right it is more accurate, further down "
        "less comes back. Lines join the settings that no other beats in both. Whiskers are "
        "intervals of 95 % over networks. Dotted: what chance gives, on average over the cells.",
        "A choice: the front was found on the same images that it is drawn of, so its end looks "
        "a little better than it is.",
    ),
    "layers": (
        "Where the network is cut",
        f"{PAPER}, appendix D.2",
        "Mean SSIM by the number of the layer whose features are sent, without the defence and "
        "with it at that layer. Whiskers are intervals of 95 % over networks.",
        "Whether another setting would do better at a layer: λ and β were chosen at one layer.",
    ),
    "table4": (
        "UniCon, MixCon and no defence",
        f"{PAPER}, table 4",
        "UniCon makes the features uniform with λ alone, MixCon keeps them at least β apart. "
        "Beside each UniCon stands the MixCon that is nearest to it in accuracy. Scores as in the "
        "first table.",
        ONE_NETWORK,
    ),
}
"""By kind of figure, in the order of the page: title, place in the paper, caption, and what it does
not show."""


def describe_figures(record: Record) -> list[dict[str, Any]]:
    """List the figures for which the record has numbers, as they stand in inversion.json."""
    sources = record["sources"]
    chosen = [cell for source in sources for _k, cell in with_roles(record, source)]
    shown = {
        "table3": bool(chosen),
        "plates": any(seed["attacks"] for cell in chosen for seed in cell["seeds"]),
        "heatmaps": any(grid_of(record, source) for source in sources),
        "pareto": any(
            attacks_in(record, cells_of(record, source, cut=source["cut"])) for source in sources
        ),
        "layers": any(layer_groups(record, source) for source in sources),
        "table4": any(compared(record, source) for source in sources),
    }
    return [figure_spec(kind, kind, words) for kind, words in WORDS.items() if shown[kind]]


def cells_of(record: Record, source: Record, **where: Any) -> list[Numbered]:
    """(index in the record, cell) of a source's cells that have these values."""
    wanted = {"source": source["name"], **where}
    return [
        (k, cell)
        for k, cell in enumerate(record["cells"])
        if all(cell[key] == at for key, at in wanted.items())
    ]


def value_of(cell: Record, name: str, attack: str | None = None) -> Record:
    """The estimate `name` of a cell, or of an attack on it; an empty one if it was not run."""
    found = cell if attack is None else cell["attacks"].get(attack) or {}
    return found.get(name) or {"mean": None, "low": None, "high": None, "values": []}


def mean_of(cell: Record, name: str, attack: str | None = None) -> float | None:
    """The mean of that estimate; None if unknown."""
    mean: float | None = value_of(cell, name, attack)["mean"]
    return mean


def with_roles(record: Record, source: Record) -> list[Numbered]:
    """The cells with a role: vanilla, then the study's setting, then sweet spots."""

    def rank(numbered: Numbered) -> tuple[int, int]:
        first = {"vanilla": 0, "paper": 1}
        return min(first.get(role, 2) for role in numbered[1]["roles"]), numbered[0]

    return sorted((found for found in cells_of(record, source) if found[1]["roles"]), key=rank)


def letters(record: Record, source: Record) -> dict[int, str]:
    """The letter of every cell with a role, the same in all figures of a source."""
    return {k: letter(n) for n, (k, _cell) in enumerate(with_roles(record, source))}


def role_titles(record: Record, cell: Record) -> str:
    """A cell's roles in words: `sweet spot under “the paper's descent”`."""
    titles = {"paper": "the study's setting"}
    for attack in record["attacks"]:
        titles[f"sweet spot {attack['name']}"] = f"sweet spot under “{attack['title']}”"
    return "; ".join(titles.get(role, role) for role in cell["roles"] if role != "vanilla")


def with_role(record: Record, source: Record, role: str) -> Numbered | None:
    """The first cell of a source with this role; cells at the grid's layer come first."""
    found = [(k, cell) for k, cell in cells_of(record, source) if role in cell["roles"]]
    return min(found, key=lambda numbered: numbered[1]["cut"] != source["cut"], default=None)


def sweet_spot(record: Record, source: Record, attack: str) -> Record | None:
    """A source's sweet spot under an attack; None if none was sought."""
    wanted = (source["name"], attack)
    spots = (s for s in record["sweet_spots"] if (s["source"], s["attack"]) == wanted)
    return next(spots, None)


def is_spot(spot: Record) -> bool:
    """True if the sweet spot is a cell with a defence."""
    return spot["cell"] is not None and spot["cell"] != spot["vanilla"]


def attacks_in(record: Record, cells: Sequence[Numbered]) -> list[Record]:
    """The attacks that were run on any of the cells, in the record's order."""
    return [
        attack
        for attack in record["attacks"]
        if any(mean_of(cell, "ssim", attack["name"]) is not None for _k, cell in cells)
    ]


def grid_of(record: Record, source: Record) -> list[Numbered]:
    """The cells of a source's grid of MixCon settings, at its layer."""
    here = cells_of(record, source, cut=source["cut"], in_grid=True)
    return [found for found in here if found[1]["defence"]["kind"] == "mixcon"]


def has_front(record: Record, source: Record, attack: str) -> bool:
    """True if an attack was run on at least half of the cells that might be on its front."""
    here = cells_of(record, source, cut=source["cut"])
    could = [cell for _k, cell in here if mean_of(cell, "accuracy") is not None]
    n_run = sum(mean_of(cell, "ssim", attack) is not None for cell in could)
    return n_run > 0 and len(could) <= 2 * n_run


def layer_groups(record: Record, source: Record) -> list[list[Numbered]]:
    """The settings that were also trained at a layer other than the grid's, vanilla first."""
    groups: dict[tuple[str, float, float | None], list[Numbered]] = {}
    for k, cell in sorted(cells_of(record, source), key=lambda numbered: numbered[1]["cut"]):
        at = cell["defence"]
        groups.setdefault((at["kind"], at["lam"], at["beta"]), []).append((k, cell))
    elsewhere = [g for g in groups.values() if any(c["cut"] != source["cut"] for _k, c in g)]
    return sorted(elsewhere, key=lambda group: group[0][1]["defence"]["kind"] != "none")


def compared(record: Record, source: Record) -> list[Numbered]:
    """Vanilla, every UniCon and the MixCon cells to compare with it; empty without UniCon.

    The MixCon cells are those with a role at the same layer, and the nearest in accuracy.
    """
    here = cells_of(record, source, cut=source["cut"])
    vanilla, unicon, mixcon = (
        [found for found in here if found[1]["defence"]["kind"] == kind]
        for kind in ("none", "unicon", "mixcon")
    )
    if not unicon:
        return []
    chosen = {k for k, cell in mixcon if cell["roles"]}
    for _k, other in unicon:
        wanted = mean_of(other, "accuracy")
        near = [
            (abs(at - wanted), k)
            for k, cell in mixcon
            if wanted is not None and (at := mean_of(cell, "accuracy")) is not None
        ]
        chosen |= {min(near)[1]} if near else set()
    return [*vanilla, *unicon, *(found for found in mixcon if found[0] in chosen)]


def measure(name: str, found: float | None) -> str:
    """A value as tables show it: `97.6 %`, `0.0031`, `0.412`, `18.3`."""
    if name.endswith("accuracy"):
        return percent(found)
    if name.endswith("distance"):
        return small(found)
    return decibels(found) if name == "psnr" else score(found)


def small(found: float | None) -> str:
    """Two digits: `0.31`, `3.1·10⁻⁷`; 0 as it is."""
    if found is None or found <= 0 or abs(found) >= 1e-3:
        return short(found)
    return power(float(f"{found:.2g}"))


def ends(name: str, found: Record) -> str:
    """`[0.401, 0.423]`; nothing for one seed."""
    return brackets(partial(measure, name), found["low"], found["high"])


def scores_of(cell: Record, attack: str) -> dict[str, str]:
    """An attack's scores as in the paper's tables, `0.64 ± 0.11 (0.83)`, their intervals as
    `NAME_ends`, and the score of unrelated images."""
    scores = cell["attacks"].get(attack) or {}
    found = {"chance": score(scores.get("chance"))}
    for name in MEASURES:
        text = NOTHING
        if (mean := mean_of(cell, name, attack)) is not None:
            std, worst = (measure(name, scores[key][name]) for key in ("std", "worst"))
            text = f"{measure(name, mean)} ± {std} ({worst})"
        found |= {name: text, f"{name}_ends": ends(name, value_of(cell, name, attack))}
    return found


def divergence(cell: Record) -> str:
    """How many of a cell's networks diverged, in words; empty if none did."""
    lost, n = cell["diverged"], len(cell["seeds"])
    seeds = "every seed" if lost >= n else f"{lost} of {n} seeds"
    return f"training diverged with {seeds}" if lost else ""


def first_seed(cell: Record) -> Record:
    """A cell's entry for seed 0, or an empty one."""
    return next((dict(found) for found in cell["seeds"] if found["seed"] == 0), {"attacks": {}})


def _where(record: Record, source: Record, k: int, cell: Record) -> Row:
    """The columns that identify the cell of a row."""
    return {
        "source": source["name"],
        "cell": k,
        **{key: cell[key] for key in ("name", "title", "cut")},
        **{key: cell["defence"][key] for key in ("kind", "lam", "beta")},
        "letter": letters(record, source).get(k),
        "roles": "; ".join(cell["roles"]) or None,
    }


def _estimate(name: str, found: Record) -> Row:
    return estimate(name, (found["mean"], found["low"], found["high"]))


def _scores(cell: Record, attack: str) -> Row:
    row: Row = {}
    scores = cell["attacks"][attack]
    for name in MEASURES:
        row |= _estimate(name, value_of(cell, name, attack))
        row |= {f"{name} {key}": scores[key].get(name) for key in ("std", "worst")}
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
    """One row per cell of the grids: its position, and the values that the heatmaps shade."""
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
    """Indices of the points (accuracy, leakage) on the Pareto front, by accuracy.

    A point is dominated by one that is at least as good in both values and better in one.
    """
    kept = [
        k
        for k, (x, y) in enumerate(points)
        if not any(a >= x and b <= y and (a > x or b < y) for a, b in points)
    ]
    return sorted(kept, key=lambda k: points[k])


def _attacked(record: Record, source: Record, cells: Sequence[Numbered], attack: str) -> list[Row]:
    """Accuracy, and SSIM under an attack beside chance, of cells that have both."""
    rows = []
    for k, cell in cells:
        row = _where(record, source, k, cell) | {"attack": attack}
        row |= _estimate("accuracy", value_of(cell, "accuracy"))
        row |= _estimate("ssim", value_of(cell, "ssim", attack))
        if row["accuracy"] is not None and row["ssim"] is not None:
            rows.append(row | {"chance": cell["attacks"][attack]["chance"]})
    return rows


def pareto_table(name: str, record: Record) -> Table:
    """One row per attack and cell at the grid's layer. An attack that was run on less than half of
    the cells has no front."""
    rows: list[Row] = []
    for source in record["sources"]:
        cells = cells_of(record, source, cut=source["cut"])
        for attack in (found["name"] for found in attacks_in(record, cells)):
            mine: list[Any] = _attacked(record, source, cells, attack)
            points = [(row["accuracy"], row["ssim"]) for row in mine]
            best = front(points) if has_front(record, source, attack) else []
            rows += [row | {"on_front": k in best} for k, row in enumerate(mine)]
    return table_of(name, rows, (*WHERE, "attack", "accuracy", "ssim", "chance", "on_front"))


def layers_table(name: str, record: Record) -> Table:
    """One row per cell of the study of layers and attack."""
    rows = [
        row
        for source in record["sources"]
        for group in layer_groups(record, source)
        for numbered in group
        for attack in attacks_in(record, [numbered])
        for row in _attacked(record, source, [numbered], attack["name"])
    ]
    return table_of(name, rows, (*WHERE, "attack", "accuracy", "ssim", "chance"))


def examples_table(name: str, record: Record, pictures: Arrays) -> Table:
    """One row per reconstruction that the page may show, with its scores."""
    rows: list[Row] = []
    keys = ("source", "cell", "name", "cut", "letter")
    for source in record["sources"]:
        n_shown = len(pictures.get(f"{source['name']}/original", ()))
        chosen = with_roles(record, source)
        chosen += [f for group in layer_groups(record, source) for f in group if f not in chosen]
        for k, cell in chosen:
            about = _where(record, source, k, cell)
            for attack, scores in first_seed(cell)["attacks"].items():
                if f"{k}/{attack}" in pictures:
                    rows += [
                        {key: about[key] for key in keys}
                        | {"attack": attack, "image": image}
                        | {measure: scores[measure][image] for measure in MEASURES}
                        for image in range(min(n_shown, len(scores["ssim"])))
                    ]
    return table_of(name, rows, (*keys, "attack", "image", *MEASURES))


def own_tables(record: Record) -> list[Table]:
    """The tables of every page: one row per cell, without the numbers of single seeds and images;
    per network, with the mean scores of its images; per claim; per sweet spot."""
    of_seed = ("source", "cell", "name", "cut", "seed", *OF_CELL, "diverged")
    cells: list[Row] = []
    seeds: list[Row] = []
    every = [(s, *found) for s in record["sources"] for found in cells_of(record, s)]
    for source, k, cell in every:
        about = _where(record, source, k, cell)
        row = about | {"in_grid": cell["in_grid"], "n_seeds": len(cell["seeds"])}
        row |= {"diverged": cell["diverged"]}
        for value in OF_CELL:
            row |= _estimate(value, value_of(cell, value))
        for attack, found in cell["attacks"].items():
            row |= {f"{attack} {key}": at for key, at in _scores(cell, attack).items()}
            zetas = (f"{at:g}" for at in found.get("zeta") or () if at is not None)
            row[f"{attack} zeta"] = " ".join(zetas)
        cells.append(row)
        for seed in cell["seeds"]:
            row = {key: about[key] if key in about else seed[key] for key in of_seed}
            for attack, scores in seed["attacks"].items():
                for name in MEASURES:
                    known = [value for value in scores[name] if value is not None]
                    row[f"{attack} {name}"] = sum(known) / len(known) if known else None
            seeds.append(row)
    of_spot = ("source", "attack", "cell", "vanilla", "accuracy_loss", "leakage", "vanilla_leakage")
    spots: list[Row] = [{key: spot[key] for key in of_spot} for spot in record["sweet_spots"]]
    return [
        table_of("cells", cells, (*WHERE, "in_grid", "n_seeds", "diverged", *OF_CELL)),
        table_of("seeds", seeds, of_seed),
        claims_table(record),
        table_of("sweet-spots", spots, of_spot),
    ]
