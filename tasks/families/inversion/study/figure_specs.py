"""Figures of an inversion study's page in its words, and look-ups in its record (the MixCon paper).

A figure that the record has no numbers for is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tasks.page.charts import Style, letter, styles_of
from tasks.page.files import Record
from tasks.page.formats import NOTHING, brackets, decibels, percent, power, score, short
from tasks.page.study_page import FigureWords, figure_spec

PAPER = "MixCon paper"
MEASURES = ("ssim", "psim", "psnr")
ATTACK_COLOURS = {"paper": 13, "strong": 14, "restored": 15}
OTHER_COLOURS = (12, 16, 17)
"""Told apart with any colour vision (templates/matrix.css)."""
ROLES = ("vanilla", "paper")
"""The roles that come first, in this order; sweet spots follow, then whatever else there is."""

ONE_NETWORK = (
    "What other networks or other images would give away, nor that nothing more can be brought "
    "back: a score is that of these attacks, and a stronger one may find more."
)

Numbered = tuple[int, Record]
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
"""By kind of figure, in the order of the page: title, where in the paper, caption, what it does not
show."""


def describe_figures(record: Record) -> list[dict[str, Any]]:
    """The figures of a study as they stand in inversion.json, in the order of the page."""
    sources = record["sources"]
    shown = {
        "table3": any(with_roles(record, source) for source in sources),
        "plates": any(
            seed["attacks"]
            for source in sources
            for _k, cell in with_roles(record, source)
            for seed in cell["seeds"]
        ),
        "heatmaps": any(grid_of(record, source) for source in sources),
        "pareto": any(
            attacks_in(record, cells_of(record, source, cut=source["cut"])) for source in sources
        ),
        "layers": any(layer_groups(record, source) for source in sources),
        "table4": any(compared(record, source) for source in sources),
    }
    return [figure_spec(kind, kind, words) for kind, words in WORDS.items() if shown[kind]]


def cells_of(record: Record, source: Record, **where: Any) -> list[Numbered]:
    """(place in the record, cell) of a source's cells that have these values."""
    return [
        (k, cell)
        for k, cell in enumerate(record["cells"])
        if cell["source"] == source["name"] and all(cell[key] == at for key, at in where.items())
    ]


def value_of(cell: Record, name: str, attack: str | None = None) -> Record:
    """The estimate `name` of a cell, or of an attack on it; of nothing if it was not run."""
    found = cell if attack is None else cell["attacks"].get(attack) or {}
    return found.get(name) or {"mean": None, "low": None, "high": None, "values": []}


def mean_of(cell: Record, name: str, attack: str | None = None) -> float | None:
    """The mean of that estimate, None if it is not known."""
    mean: float | None = value_of(cell, name, attack)["mean"]
    return mean


def with_roles(record: Record, source: Record) -> list[Numbered]:
    """The cells that have a role: vanilla, then the study's setting, then sweet spots."""

    def rank(numbered: Numbered) -> tuple[int, int]:
        k, cell = numbered
        ranks = [
            ROLES.index(role) if role in ROLES else 2 + (not role.startswith("sweet spot"))
            for role in cell["roles"]
        ]
        return min(ranks), k

    return sorted((found for found in cells_of(record, source) if found[1]["roles"]), key=rank)


def letters(record: Record, source: Record) -> dict[int, str]:
    """The letter of every cell with a role, the same in all figures of a source."""
    return {k: letter(n) for n, (k, _cell) in enumerate(with_roles(record, source))}


def role_titles(record: Record, cell: Record) -> str:
    """A cell's roles in words: `sweet spot under “the paper's descent”`."""
    attacks, titles = {attack["name"]: attack["title"] for attack in record["attacks"]}, []
    for role in cell["roles"]:
        kind, _blank, attack = role.rpartition(" ")
        if role == "paper":
            titles.append("the study's setting")
        elif kind and attack in attacks:
            titles.append(f"{kind} under “{attacks[attack]}”")
        elif role != "vanilla":
            titles.append(role)
    return "; ".join(titles)


def with_role(record: Record, source: Record, role: str) -> Numbered | None:
    """The first cell of a source that has this role; those of the grid's layer come first."""
    found = [(k, cell) for k, cell in cells_of(record, source) if role in cell["roles"]]
    found.sort(key=lambda numbered: numbered[1]["cut"] != source["cut"])
    return found[0] if found else None


def sweet_spot(record: Record, source: Record, attack: str) -> Record | None:
    """A source's sweet spot under an attack, as the record has it; None if none was sought."""
    for spot in record["sweet_spots"]:
        if (spot["source"], spot["attack"]) == (source["name"], attack):
            return dict(spot)
    return None


def is_spot(spot: Record) -> bool:
    """True if a cell was found, and it is not the one without a defence."""
    return spot["cell"] is not None and spot["cell"] != spot["vanilla"]


def attacks_in(record: Record, cells: Sequence[Numbered]) -> list[Record]:
    """The attacks that were run on any of the cells, in the record's order."""
    return [
        attack
        for attack in record["attacks"]
        if any(mean_of(cell, "ssim", attack["name"]) is not None for _k, cell in cells)
    ]


def grid_of(record: Record, source: Record) -> list[Numbered]:
    """The cells of MixCon that stand on the axes of a source's grid, at its layer."""
    here = cells_of(record, source, cut=source["cut"], in_grid=True)
    return [found for found in here if found[1]["defence"]["kind"] == "mixcon"]


def has_front(record: Record, source: Record, attack: str) -> bool:
    """True if an attack was run on at least half of the cells that could be on its front."""
    here = cells_of(record, source, cut=source["cut"])
    could = [cell for _k, cell in here if mean_of(cell, "accuracy") is not None]
    run = [cell for cell in could if mean_of(cell, "ssim", attack) is not None]
    return bool(run) and 2 * len(run) >= len(could)


def setting_of(cell: Record) -> tuple[str, float, float | None]:
    """(kind of defence, lambda, beta): what is equal for one setting at several layers."""
    defence = cell["defence"]
    return defence["kind"], defence["lam"], defence["beta"]


def layer_groups(record: Record, source: Record) -> list[list[Numbered]]:
    """The settings that were also trained at a layer other than the grid's, vanilla first."""
    groups: dict[tuple[str, float, float | None], list[Numbered]] = {}
    for k, cell in cells_of(record, source):
        groups.setdefault(setting_of(cell), []).append((k, cell))
    elsewhere = [
        sorted(group, key=lambda numbered: numbered[1]["cut"])
        for group in groups.values()
        if any(cell["cut"] != source["cut"] for _k, cell in group)
    ]
    elsewhere.sort(key=lambda group: group[0][1]["defence"]["kind"] != "none")
    return elsewhere


def compared(record: Record, source: Record) -> list[Numbered]:
    """Vanilla, every UniCon and the MixCon to set beside it; nothing where there is no UniCon.

    That is MixCon with a role at the same layer, and the cell whose accuracy is nearest UniCon's.
    """
    here = cells_of(record, source, cut=source["cut"])
    unicon = [found for found in here if found[1]["defence"]["kind"] == "unicon"]
    if not unicon:
        return []
    mixcon = [found for found in here if found[1]["defence"]["kind"] == "mixcon"]
    chosen = {k for k, cell in mixcon if cell["roles"]}
    for _k, other in unicon:
        wanted = mean_of(other, "accuracy")
        near = [
            (abs(at - wanted), k)
            for k, cell in mixcon
            if wanted is not None and (at := mean_of(cell, "accuracy")) is not None
        ]
        chosen |= {min(near)[1]} if near else set()
    vanilla = [found for found in here if found[1]["defence"]["kind"] == "none"]
    return [*vanilla, *unicon, *(found for found in mixcon if found[0] in chosen)]


def attack_styles(record: Record) -> dict[str, Style]:
    """Look of each attack, the same everywhere on the page."""
    names = [attack["name"] for attack in record["attacks"]]
    return styles_of(names, ATTACK_COLOURS, OTHER_COLOURS)


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


def ends(name: str, estimate: Record) -> str:
    """`[0.401, 0.423]`; nothing for one seed."""
    return brackets(partial(measure, name), estimate["low"], estimate["high"])


def scores_of(cell: Record, attack: str) -> dict[str, str]:
    """An attack's scores as the paper's tables have them, `0.64 ± 0.11 (0.83)`, their intervals
    `NAME_ends`, and what unrelated images score."""
    scores = cell["attacks"].get(attack) or {}
    found = {"chance": score(scores.get("chance"))}
    for name in MEASURES:
        mean = mean_of(cell, name, attack)
        std, worst = ((scores.get(key) or {}).get(name) for key in ("std", "worst"))
        text = NOTHING if mean is None else measure(name, mean)
        text += f" ± {measure(name, std)}" if mean is not None and std is not None else ""
        text += f" ({measure(name, worst)})" if mean is not None and worst is not None else ""
        found |= {name: text, f"{name}_ends": ends(name, value_of(cell, name, attack))}
    return found


def divergence(cell: Record) -> str:
    """Number of a cell's networks that diverged, in words; nothing if none did."""
    if not cell["diverged"]:
        return ""
    if cell["diverged"] >= len(cell["seeds"]):
        return "training diverged with every seed"
    return f"training diverged with {cell['diverged']} of {len(cell['seeds'])} seeds"
