"""Say what was meant: one line for a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """`unknown setting 'alfa'; did you mean 'alpha'?`, with the nearest name that exists."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if not near:  # the right name in the wrong place: compare the last components
        last = name.rpartition(".")[2]
        ends = {n.rpartition(".")[2]: n for n in names}
        near = [ends[end] for end in difflib.get_close_matches(last, list(ends), n=1, cutoff=0.6)]
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names[:12])}"
    return f"unknown {what} {name!r}; {hint}"
