"""A union whose members are told apart by a tag, for whoever reads settings from JSON.

The core does not know pydantic. But pydantic asks what stands beside a type in `Annotated` how it
is to be read, and `Tagged` answers: a mapping is the member that its tag names, so that what is
wrong with it is said of that member and not of all of them.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
