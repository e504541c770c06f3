"""Settings that are read from JSON, with the bounds of numbers as part of their types.

    @dataclass(frozen=True, kw_only=True)
    class Settings(Strict):
        epochs: Count = 100
        leak: Annotated[float, Within("[0, 1)", fix="torch's default is 0.01")] = 0.01

The core does not know pydantic, but pydantic asks what stands beside a type in `Annotated` how to
read it. For unions `Tagged` answers: a mapping is the member that its tag names, so that errors are
those of that member and not of all.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Within:
    """The interval that a number lies in, such as "[0, 1)" or "(0, inf)", which NaN never does; the
    error message ends with `fix`. Every number of a tuple lies there, and None is allowed where the
    type allows it."""

    interval: str
    fix: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raises ValueError, naming the setting, unless its value lies in the interval."""
        if value is None:
            return
        if isinstance(value, tuple):
            for i, part in enumerate(value):
                self.check(f"{name}[{i}]", part)
            return
        low, high = (float(end) for end in self.interval[1:-1].split(","))
        above = value >= low if self.interval[0] == "[" else value > low
        if above and (value <= high if self.interval[-1] == "]" else value < high):
            return
        expected = f"is outside {self.interval}"
        if high == math.inf and (self.interval[0] == "[" or low == 0):
            expected = f"must be {f'at least {low:g}' if self.interval[0] == '[' else 'positive'}"
        raise ValueError(f"{name}={value} {expected}{self.fix and '; ' + self.fix}")


Count = Annotated[int, Within("[1, inf)")]
Natural = Annotated[int, Within("[0, inf)")]
Positive = Annotated[float, Within("(0, inf)")]
NonNegative = Annotated[float, Within("[0, inf)")]
Share = Annotated[float, Within("[0, 1]")]


class Strict:
    """A dataclass of settings: an unknown one is an error when it is read, and numbers lie within
    their bounds. A `__post_init__` of its own, for what relates two settings, calls this one."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        settings: Any = type(self)
        for name, bound in bounds(settings):
            bound.check(name, getattr(self, name))


@cache
def bounds(settings: type[Any]) -> tuple[tuple[str, Within], ...]:
    """(name of a setting, its bound) of all settings that have one."""
    hints = get_type_hints(settings, include_extras=True)
    return tuple((name, bound) for name, hint in hints.items() for bound in _within(hint))


def _within(hint: Any) -> Iterator[Within]:
    """The bounds in a type, its parts included."""
    if get_origin(hint) is Annotated:
        yield from (part for part in hint.__metadata__ if isinstance(part, Within))
    for part in get_args(hint):
        yield from _within(part)


@dataclass(frozen=True)
class Tagged:
    """`Annotated[A | B, Tagged("kind")]`: members are dataclasses with a field `kind` that is a
    `Literal`. A mapping without a tag is the first member. `members`: by tag, those of a type that
    is no union, but what all of them are."""

    name: str
    members: Mapping[str, type] | None = field(default=None, hash=False)

    def by_tag(self, union: Any) -> Mapping[str, type]:
        if self.members is not None:
            return self.members
        hints = [typing.get_type_hints(member)[self.name] for member in typing.get_args(union)]
        tags = [str(typing.get_args(hint)[0]) for hint in hints]
        return dict(zip(tags, typing.get_args(union), strict=True))

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        name, members = self.name, self.by_tag(source)
        first = next(iter(members))

        def tag_of(value: Any) -> Any:
            given = value.get(name, first) if isinstance(value, Mapping) else value
            return given if isinstance(given, str) else getattr(given, name, None)

        return {
            "type": "tagged-union",
            "discriminator": tag_of,
            "choices": {tag: handler.generate_schema(one) for tag, one in members.items()},
            "custom_error_type": f"unknown_{name}",
            "custom_error_message": f"{name} must be one of {', '.join(members)}",
        }
