"""Single settings of attack methods, as `--set` has them: `name=value`, or `kind.name=value`.

Nothing here needs a flow, so nothing here imports Prefect: preflight and refusals come at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar

from flows.naming import unknown_name

AnyMethod = TypeVar("AnyMethod", bound=Any)
"""A frozen dataclass of settings, tagged by `kind`."""


def with_settings(
    methods: Sequence[AnyMethod], settings: Mapping[str, str] | None
) -> list[AnyMethod]:
    """Methods with `name=value` for all that have it, or `kind.name=value` for one.

    Raises ValueError for unknown names and bad values.
    """
    kinds = [method.kind for method in methods]
    for setting, value in (settings or {}).items():
        prefix, dot, name = setting.rpartition(".")
        if dot and prefix not in kinds:
            raise ValueError(unknown_name("method in --set", prefix, kinds))
        names = {m.kind: {f.name for f in fields(m)} - {"kind"} for m in methods}
        taking = [kind for kind in kinds if name in names[kind] and prefix in ("", kind)]
        if not taking:
            raise ValueError(unknown_name("setting", name, sorted(set().union(*names.values()))))
        methods = [_with(m, name, value) if m.kind in taking else m for m in methods]
    return list(methods)


def _with(method: AnyMethod, name: str, value: str) -> AnyMethod:
    from flows.settings import replace_setting, validated

    tree = json.loads(json.dumps(asdict(method)))
    replace_setting(tree, name, value)
    try:
        changed: AnyMethod = validated(type(method), tree)
    except ValueError as error:
        raise ValueError(f"--set {name}={value}: {error}") from error
    return changed
