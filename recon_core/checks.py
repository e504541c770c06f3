"""Ranges of settings, checked with messages that name the value and what is allowed."""

from __future__ import annotations

import math


def within(settings: object, interval: str, *names: str, fix: str = "") -> None:
    """Raises ValueError unless each setting is in `interval`, "[0, 1)" or "(0, inf)"; None is.

    NaN is in no interval. `fix` ends the message.
    """
    low, high = (float(end) for end in interval[1:-1].split(","))
    said = {"(0, inf)": "must be positive", "[0, inf)": "must be 0 or more"}
    if interval[0] == "[" and high == math.inf:
        said.setdefault(interval, f"must be at least {low:g}")
    expected = said.get(interval, f"is outside {interval}")
    for name in names:
        value = getattr(settings, name)
        if value is None:
            continue
        above = value >= low if interval[0] == "[" else value > low
        if not (above and (value <= high if interval[-1] == "]" else value < high)):
            raise ValueError(f"{name}={value} {expected}{fix and '; ' + fix}")
