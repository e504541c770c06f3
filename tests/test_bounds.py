"""Every bound of every settings class refuses what lies outside it, and names the setting."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest

import flows
import recon_core
import storage
import tasks
from recon_core.strict import Strict, Within, bounds
from tasks.families.inversion.study.settings import InversionSource

SOURCE: dict[str, Any] = {"name": "digits", "title": "digits", "data": "digits"}
SOURCE |= {"n_train": 1000, "n_tests": 300, "n_public": 200}
NEEDED: dict[str, dict[str, object]] = {
    "Audit": {"preset": "small"},
    "Card": {"shape": (1, 16, 16), "widths": (8,), "patch": 1, "centred": True, "mirrored": True}
    | {"shifted": 0, "floor": 0.1, "source": "", "n_pictures": 1, "sha256": "", "n_steps": 1}
    | {"alone": 0.0, "spread": 1.0},
    "InversionJob": {"weights": "net.pt", "out": "out", "data": "photos"},
    "InversionSource": SOURCE,
    "InversionStudy": {"preset": "test", "sources": (InversionSource(**SOURCE),)},
    "Kind": {"data": "synthetic"},
    "Private": {"epsilon": 1.0},
    "SeparatorJob": {"data": "synthetic", "shape": (1, 16, 16)},
}
"""What the classes are given that have no default for everything."""
WITHOUT_DEFAULTS = {"Denoiser", "FamilyRun", "KKTSettings", "SpanStudy", "TrainedRun"}
"""Classes that are abstract, or whose parts need more than a line here."""


def below(cls: type[Strict]) -> Iterator[type[Strict]]:
    for child in cls.__subclasses__():
        yield child
        yield from below(child)


def all_bounds() -> list[tuple[type[Strict], str, Within]]:
    for package in (recon_core, storage, tasks, flows):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)
    classes = sorted(set(below(Strict)), key=lambda cls: (cls.__module__, cls.__qualname__))
    return [(cls, *bound) for cls in classes for bound in bounds(cls)]


def outside(bound: Within, *, whole: bool) -> list[float]:
    low, high = (float(end) for end in bound.interval[1:-1].split(","))
    closed = (bound.interval[0] == "[", bound.interval[-1] == "]")
    values = [
        *([low - 1] if closed[0] else [low, low - 1]),
        *([] if math.isinf(high) and closed[1] else [high + 1] if closed[1] else [high]),
        math.nan,
    ]
    return [int(value) for value in values if math.isfinite(value)] if whole else values


def test_every_bound_refuses_what_lies_outside_and_names_the_setting():
    for cls, name, bound in all_bounds():
        if cls.__name__ in WITHOUT_DEFAULTS:
            continue
        settings = cls(**NEEDED.get(cls.__name__, {}))
        value = getattr(settings, name)
        hint = str(get_type_hints(cls)[name])
        for bad in outside(bound, whole="float" not in hint):
            given = (bad,) * max(1, len(value)) if isinstance(value, tuple) else bad
            with pytest.raises(ValueError, match=rf"\b{name}(\[\d\])?="):
                dataclasses.replace(settings, **{name: given})


def test_nothing_is_refused_within_a_bound_and_none_where_the_type_allows_it():
    bound = Within("(0, 1]", fix="half is usual")
    for value in (1e-9, 1, 1.0, None, (0.5, 1.0)):
        bound.check("share", value)
    with pytest.raises(ValueError, match=r"share\[1\]=0.0 is outside \(0, 1\]; half is usual"):
        bound.check("share", (0.5, 0.0))
