"""Every bound of every settings class refuses what lies outside it, and names the setting."""

from __future__ import annotations

import importlib
import inspect
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
        bare: Any = type("Bare", (cls,), {"__post_init__": Strict.__post_init__})
        bare.__abstractmethods__ = frozenset()
        settings = object.__new__(bare)
        others = {other: None for other, _bound in bounds(cls)}
        hint = str(get_type_hints(cls)[name])
        for bad in outside(bound, whole="float" not in hint):
            vars(settings).update(others | {name: (bad,) if "tuple" in hint else bad})
            with pytest.raises(ValueError, match=rf"^{name}(\[0\])?={bad}"):
                settings.__post_init__()


def test_every_class_of_settings_checks_its_bounds():
    for cls in {cls for cls, _name, _bound in all_bounds()}:
        for own in (base.__dict__.get("__post_init__") for base in cls.__mro__):
            if own is None or own is Strict.__post_init__:
                continue
            names = inspect.unwrap(own).__code__.co_names
            assert "__post_init__" in names, f"{own.__qualname__} calls no super"


def test_nothing_is_refused_within_a_bound_and_none_where_the_type_allows_it():
    bound = Within("(0, 1]", fix="half is usual")
    for value in (1e-9, 1, 1.0, None, (0.5, 1.0)):
        bound.check("share", value)
    with pytest.raises(ValueError, match=r"share\[1\]=0.0 is outside \(0, 1\]; half is usual"):
        bound.check("share", (0.5, 0.0))
