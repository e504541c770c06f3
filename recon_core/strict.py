"""Settings that are read from JSON, and the checks of their numbers."""

from __future__ import annotations

import math
from typing import ClassVar


class Strict:
    """A dataclass of settings, of which an unknown one is an error when it is read."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def _within(self, interval: str, *names: str, fix: str = "") -> None:
        """Raises ValueError unless each setting is in `interval`, "[0, 1)" or "(0, inf)", or None.
        NaN is in no interval. `fix` ends the message."""
        low, high = (float(end) for end in interval[1:-1].split(","))
        expected = f"is outside {interval}"
        if high == math.inf and (interval[0] == "[" or low == 0):
            expected = f"must be {f'at least {low:g}' if interval[0] == '[' else 'positive'}"
        for name in names:
            value = getattr(self, name)
            if value is None:
                continue
            above = value >= low if interval[0] == "[" else value > low
            if not (above and (value <= high if interval[-1] == "]" else value < high)):
                raise ValueError(f"{name}={value} {expected}{fix and '; ' + fix}")

    def _at_least(self, least: int, *names: str) -> None:
        self._within(f"[{least}, inf)", *names)

    def _positive(self, *names: str) -> None:
        self._within("(0, inf)", *names)
