"""The words of an inversion study's page: the answer on top, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tasks.families.inversion.study.figure_specs import (
    all_diverged,
    attacks_in,
    cells_of,
    has_front,
    mean_of,
    sweet_spot,
    with_role,
    with_roles,
)
from tasks.page.files import Record
from tasks.page.formats import NOTHING, brackets, decibels, percent, power, score, short
from tasks.page.tables import claim_counts, whose_claims


def measure(name: str, found: float | None) -> str:
    """A value as tables show it: `97.6 %`, `0.0031`, `0.412`, `18.3`."""
    if name.endswith("accuracy"):
        return percent(found)
    if name.endswith("distance"):
        return small(found)
    return decibels(found) if name == "psnr" else score(found)


def small(found: float | None) -> str:
    """Two digits: `0.31`, `3.1·10⁻⁷`; 0 as it is."""
    if found is None or found == 0 or abs(found) >= 1e-3:
        return short(found)
    return power(float(f"{found:.2g}")) if found > 0 else short(found)


def ends(name: str, estimate: Record) -> str:
    """`[0.401, 0.423]`; nothing for one seed."""
    return brackets(partial(measure, name), estimate["low"], estimate["high"])


def with_ends(name: str, estimate: Record) -> str:
    """`0.412 [0.401, 0.423]`."""
    return f"{measure(name, estimate['mean'])} {ends(name, estimate)}".strip()


def spread(name: str, scores: Record | None) -> str:
    """The paper's way to say it: `0.64 ± 0.11 (0.83)`; a dash if the attack was not run."""
    if not scores or scores[name]["mean"] is None:
        return NOTHING
    std, worst = ((scores[key] or {}).get(name) for key in ("std", "worst"))
    text = measure(name, scores[name]["mean"])
    text += f" ± {measure(name, std)}" if std is not None else ""
    return text + (f" ({measure(name, worst)})" if worst is not None else "")


def divergence(cell: Record) -> str:
    """Number of a cell's networks that diverged, in words; nothing if none did."""
    if not cell["diverged"]:
        return ""
    if all_diverged(cell):
        return "training diverged with every seed"
    return f"training diverged with {cell['diverged']} of {len(cell['seeds'])} seeds"


def headline(record: Record) -> dict[str, Any]:
    """Facts of the first sentences: claims by outcome, and the answer for every source."""
    return {
        **claim_counts(record),
        "whose": whose_claims(record),
        "answers": [_answer(record, source) for source in record["sources"]],
    }


def _answer(record: Record, source: Record) -> dict[str, Any]:
    """A source's sweet spot under the first attack that has one, beside vanilla, attack by attack.

    `shown` is None if nothing stands beside vanilla; `why` says then what was found.
    """
    vanilla = with_role(record, source, "vanilla")
    shown, under, sought = None, "", False
    for attack in record["attacks"]:
        spot = sweet_spot(record, source, attack["name"])
        sought = sought or spot is not None
        if spot and found_spot(spot) and shown is None:
            shown, under = record["cells"][spot["cell"]], attack["title"]
    loss = f"{100 * record['thresholds']['accuracy_loss']:g}"
    points = "point" if loss == "1" else "points"
    why = f"no setting of the grid costs at most {loss} {points} of accuracy and leaks less"
    is_spot = shown is not None
    paper = with_role(record, source, "paper")
    if shown is None and paper and mean_of(paper[1], "accuracy") is not None:
        shown = paper[1]
    cells = [found for found in (vanilla,) if found]
    return {
        "source": source,
        "vanilla": vanilla[1] if vanilla else None,
        "shown": shown,
        "is_spot": is_spot,
        "under": under,
        "why": why if sought else "no sweet spot was sought",
        "attacks": [
            {
                "title": attack["title"],
                "before": mean_of(vanilla[1], "ssim", attack["name"]) if vanilla else None,
                "after": mean_of(shown, "ssim", attack["name"]),
                "chance": chance(shown, attack["name"]),
            }
            for attack in attacks_in(record, cells)
            if shown and mean_of(shown, "ssim", attack["name"]) is not None
        ],
    }


def chance(cell: Record, attack: str) -> float | None:
    """Score of unrelated images under an attack on a cell."""
    found: float | None = (cell["attacks"].get(attack) or {}).get("chance")
    return found


def incomplete(record: Record, source: Record) -> list[str]:
    """Sentences on what is missing of a source: attacks, intervals, sweet spots, diverged cells."""
    cells = cells_of(record, source)
    run = {attack["name"] for attack in attacks_in(record, cells)}
    notes = [
        f"{source['title']}: {attack['title']} was not run."
        for attack in record["attacks"]
        if attack["name"] not in run
    ]
    if source["n_seeds"] == 1:
        notes.append(f"{source['title']}: one network of each setting, so there are no intervals.")
    for attack in record["attacks"]:
        spot = sweet_spot(record, source, attack["name"])
        if spot and not found_spot(spot):
            notes.append(
                f"{source['title']}: no sweet spot under “{attack['title']}”; no setting that "
                "keeps the accuracy leaks less than no defence."
            )
    lost = [cell["title"] for _k, cell in cells if cell["diverged"]]
    if lost:
        notes.append(
            f"{source['title']}: training diverged, with some or all seeds, for {listed(lost)}."
        )
    if not with_roles(record, source):
        notes.append(f"{source['title']}: no cell stands for vanilla or for a chosen setting.")
    return notes


def found_spot(spot: Record | None) -> bool:
    """True if a sweet spot is one: a cell was found, and it is not the one without a defence."""
    return spot is not None and spot["cell"] is not None and spot["cell"] != spot["vanilla"]


def few_networks(record: Record, source: Record) -> list[str]:
    """A sentence on the cells that have one network while others have several."""
    here = cells_of(record, source, cut=source["cut"])
    ones = sum(len(cell["seeds"]) == 1 for _k, cell in here)
    if not ones or source["n_seeds"] == 1:
        return []
    return [
        f"{source['title']}: {ones} of {len(here)} settings have one network each, so no interval."
    ]


def n_networks(cells: Sequence[Record]) -> str:
    """`3`, `1 to 3`: how many networks the cells have each."""
    counts = sorted({len(cell["seeds"]) for cell in cells}) or [0]
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def without_front(record: Record, source: Record) -> list[str]:
    """Sentences on the attacks that were run on too few cells of a source to have a front."""
    here = cells_of(record, source, cut=source["cut"])
    return [
        f"{source['title']}: {attack['title']} was run on {n} of {len(here)} settings, so it has "
        "no line."
        for attack in attacks_in(record, here)
        if not has_front(record, source, attack["name"])
        and (n := sum(attack["name"] in cell["attacks"] for _k, cell in here))
    ]


def listed(titles: Sequence[str], most: int = 6) -> str:
    """`a; b; c`, and how many others there are."""
    shown = "; ".join(titles[:most])
    return shown if len(titles) <= most else f"{shown} and {len(titles) - most} more"
