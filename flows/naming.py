"""Say what was meant: one line for a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

MOST_SHOWN = 40
"""So many names are listed; of more only the first ones, beside the nearest."""
PRESET_NAMES = (
    *("demo", "cifar-small", "cifar-hundred", "digits", "smoke"),
    *("restoration", "restoration-small", "restoration-cpu"),
    *("span-hundred", "span-pairs", "span-paper"),
    *("haim2022", "buzaglo2023-multiclass", "buzaglo2023-regression"),
    *("restoration-generate", "restoration-evaluate"),
    *("autoencoder-demo", "autoencoder-paper", "instahide-small", "instahide-challenge"),
)
"""The keys of `flows.presets.PRESETS`, for help texts that load nothing heavy."""
PRESET_HELP = f"Named settings: {', '.join(PRESET_NAMES)}; default: those of the store, else demo."


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """`unknown preset 'demmo'; did you mean 'demo'? there are: demo, smoke`, in one line."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if not near:  # the right name in the wrong place: compare the last components
        last = name.rpartition(".")[2]
        ends = {n.rpartition(".")[2]: n for n in names}
        near = [ends[end] for end in difflib.get_close_matches(last, list(ends), n=1, cutoff=0.6)]
    hint = f" did you mean {near[0]!r}?" if near else ""
    if near and len(names) > MOST_SHOWN:
        return f"unknown {what} {name!r};{hint}"
    return f"unknown {what} {name!r};{hint} there are: {listed(names, MOST_SHOWN)}"


def listed(things: Sequence[Any], most: int = 5) -> str:
    """`1, 2, 3 and 1,204 more`."""
    shown = ", ".join(map(str, things[:most]))
    return shown + (f" and {len(things) - most:,} more" if len(things) > most else "")


def counted(n: int, name: str) -> str:
    """`1 part`, `1,204 parts`."""
    return f"{n:,} {name}{'s' * (n != 1)}"
