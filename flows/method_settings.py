"""Single settings of attack methods, as `--set` has them: `name=value`, or `kind.name=value`.

Nothing here needs a flow, so nothing here imports Prefect: preflight and refusals come at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from flows.naming import unknown_name

AnyMethod = TypeVar("AnyMethod", bound=Any)
"""A frozen dataclass of settings, tagged by `kind`."""


def with_settings(
    methods: Sequence[AnyMethod], settings: Mapping[str, str] | None
) -> list[AnyMethod]:
    """Methods with `name=value` for all that have it, or `kind.name=value` for one.

    Raises ValueError for unknown names and bad values.
    """
    for setting, value in (settings or {}).items():
        methods = _with_setting(methods, setting, value)
    return list(methods)


def _with_setting(methods: Sequence[AnyMethod], setting: str, value: str) -> list[AnyMethod]:
    prefix, dot, name = setting.rpartition(".")
    if dot and prefix not in [m.kind for m in methods]:
        raise ValueError(unknown_name("method in --set", prefix, [m.kind for m in methods]))
    takes = [m for m in methods if _has(m, name) and prefix in ("", m.kind)]
    if not takes:
        known = {f.name for m in methods for f in fields(m) if f.name != "kind"}
        raise ValueError(unknown_name("setting", name, known))
    return [_with(m, name, value) if m in takes else m for m in methods]


def _has(method: AnyMethod, name: str) -> bool:
    return name != "kind" and name in {f.name for f in fields(method)}


def _with(method: AnyMethod, name: str, value: str) -> AnyMethod:
    from flows.settings import explained, replace_setting

    tree = json.loads(json.dumps(asdict(method)))
    replace_setting(tree, name, value)
    adapter: TypeAdapter[AnyMethod] = TypeAdapter(type(method))
    try:
        return adapter.validate_python(tree)
    except ValidationError as error:
        raise ValueError(f"--set {name}={value}: {explained(error)}") from error
