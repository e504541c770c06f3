"""A registered attack family; packages publish theirs as entry points that name a `Family`."""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from recon_core.attacks.family_run import FamilyRun

GROUP = "palimpsest.families"


@dataclass(frozen=True)
class Family:
    """The settings of a family's runs, and the bytes of device memory that a run of such settings
    takes at most, on so many images of shape (c, h, w)."""

    experiment: type[FamilyRun]
    bytes_per_run: Callable[[Any, int, tuple[int, int, int]], int]

    @property
    def name(self) -> str:
        """The tag: the one value that `family` may have."""
        (tag,) = typing.get_args(typing.get_type_hints(self.experiment)["family"])
        return str(tag)


def registered(*own: Family) -> dict[str, Family]:
    """Families by name, the first being the one of settings that name none: `own`, then those of
    installed packages. Raises ValueError if one is no `Family`, or has another's name."""
    families = {family.name: family for family in own}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        family = point.load()
        if not isinstance(family, Family) or family.name in families:
            why = "is no Family" if not isinstance(family, Family) else "has another family's name"
            raise ValueError(
                f"entry point {point.name} = {point.value} of {GROUP} {why}; mend or uninstall "
                "the package that publishes it"
            )
        families[family.name] = family
    return families
