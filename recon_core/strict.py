"""Settings that are read from JSON, and the checks of their numbers."""

from __future__ import annotations

import math
from typing import ClassVar


class Strict:
    """A dataclass of settings, of which an unknown one is an error when it is read."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def _at_least(self, least: int, *names: str) -> None:
        """Raises ValueError for a setting below `least`, or infinite; None is none."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= least):
                raise ValueError(f"{name}={value} must be at least {least}")

    def _positive(self, *names: str) -> None:
        """Raises ValueError for a setting that is not above 0, or infinite; None is none."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value} must be positive")
