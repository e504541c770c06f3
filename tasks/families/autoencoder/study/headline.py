"""The words of a recovery study's page: the answer on top, and values as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.families.autoencoder.study.figure_specs import at_lowest, best_victim, lowest, unreached
from tasks.page.files import Record
from tasks.page.formats import NOTHING, decibels, names, percent, plural, power, short
from tasks.page.tables import Table, claim_counts, whose_claims

TITLES = {
    "accurate": "accurate recovery",
    "approximate": "approximate recovery",
    "psnr": "mean PSNR",
}


def measure(value: str, found: float | None) -> str:
    """A value of a figure: `61.0 %`, `42.3 dB`."""
    if value == "psnr":
        return NOTHING if found is None else f"{decibels(found)} dB"
    return percent(found)


def headline(record: Record, summary: Table) -> dict[str, Any]:
    """Facts of the first sentences: claims by outcome, and the network of the summary."""
    victim = best_victim(record)
    rows = list(summary.rows())
    blind = [row for row in rows if not row["knows_mask"] and row["train n"]]
    tested = [row for row in rows if row["test n"]]
    return {
        **claim_counts(record),
        "whose": whose_claims(record),
        "victim": victim,
        "level": lowest(victim) if victim else None,
        "rows": rows,
        "blind": blind,
        "n_masks": max((row["train n_masks"] for row in rows), default=0),
        "any": any(row["train n_accurate"] for row in blind),
        "tested": bool(tested),
        "tested_most": max((row["test accurate"] or 0.0 for row in tested), default=None),
        "tested_loosely": max((row["test approximate"] or 0.0 for row in tested), default=None),
    }


def victim_note(victim: Record) -> str:
    """Under the title of a network: its size, and which losses it did not reach."""
    text = f"{plural(victim['n_images'], 'image', 'images')}, {victim['n_parameters']:,} parameters"
    at = lowest(victim)
    text += f"; trained to a loss of {short(at['loss'])}" if at else ""
    missed = unreached(victim)
    if missed:
        were = "was" if len(missed) == 1 else "were"
        text += (
            f"; {names([power(level) for level in missed])} {were} not reached "
            f"({short(victim['last']['loss'])} after {victim['last']['epoch']:,} epochs)"
        )
    return text + ("; its training diverged" if victim["diverged"] else "")


def incomplete(record: Record, victims: Sequence[Record], cells: Sequence[Record]) -> list[str]:
    """A sentence on methods that were not run at every mask and level that the networks reached.

    A generic method needs one level, since it does not ask the network.
    """
    masks = {cell["mask"] for cell in cells} or {mask["name"] for mask in record["masks"]}
    per_mask = {victim["name"]: len(victim["levels"]) for victim in victims}
    parts = []
    for method in record["methods"]:
        mine = [cell for cell in cells if cell["method"] == method["name"]]
        if method["generic"]:
            found = len({(cell["victim"], cell["mask"]) for cell in mine})
            wanted = len(masks) * sum(n > 0 for n in per_mask.values())
        else:
            found = len({(cell["victim"], cell["mask"], cell["level"]) for cell in mine})
            wanted = len(masks) * sum(per_mask.values())
        if found < wanted:
            done = f"run on {found} of {wanted} cells" if found else "not run"
            parts.append(f"{method['title']}: {done}")
    return [f"Not everything was run: {'; '.join(parts)}."] if parts else []


def tested(record: Record, victims: Sequence[Record]) -> str:
    """A sentence on how many test images came back."""
    cells = [
        cell for victim in victims for cell in at_lowest(record, victim, split="test", sigma=0.0)
    ]
    counts: dict[str, Mapping[str, int]] = {}
    for method in record["methods"]:
        mine = [cell for cell in cells if cell["method"] == method["name"]]
        if mine:
            counts[method["title"]] = {
                key: sum(cell[key] for cell in mine) for key in ("n", "n_accurate", "n_approximate")
            }
    n = sum(of["n"] for of in counts.values())
    parts = []
    for key, word in (("n_accurate", "accurately"), ("n_approximate", "approximately")):
        some = [f"{of[key]} of {of['n']} with {t}" for t, of in counts.items() if of[key]]
        parts.append(f"{names(some)} came back {word}" if some else f"none came back {word}")
    return f"Of {n:,} attempts on test images, {'; '.join(parts)}."
