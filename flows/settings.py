"""Single settings of a recipe, changed by dotted name: `experiment.attack.alpha=50`.

Names are checked against the recipe itself, values by pydantic against the dataclasses, so there
is no second list of options to keep.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from flows.naming import unknown_name
from flows.presets import PRESETS, preset
from flows.recipe import Recipe
from storage.documents import understood
from tasks.workspace import RECIPE_FIX, Workspace

_ABSENT = object()
_ABSOLUTE = re.compile(r"(?<![\w./])/(?!/)[^\s'\":,=\[\]{}]+")


NAMED_BY_USERS = ("evaluation.external",)
"""Mappings whose keys are names that the user gives: a new one is added."""

TAGS = {
    f"{experiment}.{tag}"
    for experiment in ("experiment", "heldout_experiment")
    for tag in ("family", "attack.kind", "victim.kind", "defence.kind", "scheme.kind")
}
"""Settings that choose among several kinds of settings: those beside it become the defaults."""


def resolve(recipe: Recipe | str, settings: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe, or the preset of that name, with single settings replaced; a recipe without any
    to replace is itself, so that the stages of a chain have one object.

    Raises ValueError naming the setting, its value and the fix.
    """
    start = preset(recipe) if isinstance(recipe, str) else recipe
    if not settings:
        return start
    return from_json(replace_settings(to_json(start), settings, lambda t: to_json(from_json(t))))


def replace_settings(
    tree: dict[str, Any], given: Mapping[str, Any], completed: Callable[[dict[str, Any]], Any]
) -> dict[str, Any]:
    """The tree with single settings replaced; `completed` adds the defaults of what is not in a
    tree. Raises ValueError as `resolve` does."""
    for name in sorted(given, key=_turn):
        changed = value_at(tree, name) != given[name]
        _open_defence(tree, name)
        replace_setting(tree, name, given[name])
        if name in TAGS and changed:
            _keep_tag_alone(tree, name)
            if name.endswith("attack.kind"):
                _go_with_attack(tree, name.partition(".")[0])
            if name.endswith((".attack.kind", ".family")) and "further_attacks" in tree:
                _leave_out_further(tree)
            tree = completed(tree)
    return tree


def from_json(tree: Mapping[str, Any]) -> Recipe:
    """The recipe of a JSON object; ValueError in one line for unknown keys and bad values."""
    recipe: Recipe = validated(Recipe, tree)
    return recipe


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def validated(kind: Any, tree: Mapping[str, Any]) -> Any:
    """Settings of a JSON object; ValueError in one line for unknown keys and bad values."""
    try:
        return adapter(kind).validate_python(tree)
    except ValidationError as error:
        raise ValueError(explained(error)) from error


def read_recipe(workspace: Workspace) -> Recipe | None:
    """The recipe in a job's folder; None without one. Raises DocumentError if it is no recipe."""
    tree = workspace.settings()
    if tree is None:
        return None
    with understood(workspace.recipe, RECIPE_FIX):
        return from_json(tree)


def to_json(recipe: Recipe) -> dict[str, Any]:
    """The recipe as a JSON object, the form that reports show and `from_json` reads."""
    return dict(adapter(Recipe).dump_python(recipe, mode="json"))


def parse_assignments(assignments: Iterable[str]) -> dict[str, str]:
    """`name=value` strings as a mapping; ValueError if one has no `=`."""
    settings = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name:
            raise ValueError(f"--set {assignment!r} is not of the form name=value")
        settings[name.strip()] = value.strip()
    return settings


def command(recipe: Recipe, store: Path) -> str:
    """The `palimpsest demo` command that makes `store` from nothing with these settings."""
    words = ["palimpsest", "demo"]
    base = PRESETS[recipe.name]() if recipe.name in PRESETS else Recipe()
    if recipe.name in PRESETS:
        words += ["--preset", recipe.name]
    if recipe.data != base.data:
        words += ["--data", recipe.data]
    words += ["--store", str(store)]
    before, after = dict(values_of(to_json(base))), dict(values_of(to_json(recipe)))
    if recipe.further_attacks != base.further_attacks:
        words += ["--set", f"further_attacks={json.dumps(to_json(recipe)['further_attacks'])}"]
    for name, value in after.items():
        is_new = name not in ("name", "data") and not name.startswith("further_attacks")
        if is_new and before.get(name, _ABSENT) != value:
            words += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(words)


def portable(value: Any) -> Any:
    """`value`, a text or a tree with texts, for a record that others read: absolute paths, which
    say something of this machine alone, are relative to the current folder, or their last part."""
    if isinstance(value, str):
        return _ABSOLUTE.sub(lambda found: _relative(found[0]), value)
    if isinstance(value, Mapping):
        return {key: portable(of) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [portable(of) for of in value]
    return value


def _relative(path: str) -> str:
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else Path(path).name


def replace_setting(tree: dict[str, Any], name: str, value: Any) -> None:
    """Sets one value of a tree of settings; ValueError with the nearest name if there is none."""
    *path, last = name.split(".")
    node: Any = tree
    for key in path:
        node = _child(node, key)
    if isinstance(node, list) and last.isdigit() and int(last) < len(node):
        node[int(last)] = _parsed(value, node[int(last)])
    elif isinstance(node, dict) and last in node and not isinstance(node[last], dict):
        node[last] = _parsed(value, node[last])
    elif isinstance(node, dict) and last in node and value in (None, "null"):
        node[last] = None
    elif isinstance(node, dict) and ".".join(path) in NAMED_BY_USERS:
        node[last] = value
    else:
        raise ValueError(unknown_name("setting", name, [name for name, _value in values_of(tree)]))


def value_at(tree: Mapping[str, Any], name: str) -> Any:
    """Value at a dotted name; None if there is none."""
    node: Any = tree
    for key in name.split("."):
        node = _child(node, key)
    return node


def _turn(name: str) -> tuple[int, int]:
    """When a setting has its turn: tags before what is beside them, and a defence or a scheme after
    what it is to go with, since it is read with all of that."""
    if ".defence." in name or ".scheme." in name:
        return (2 if name in TAGS else 3), name.count(".")
    return (0 if name in TAGS else 1), name.count(".")


def _open_defence(tree: dict[str, Any], name: str) -> None:
    experiment, _, rest = name.partition(".")
    node = tree.get(experiment)
    if rest == "defence.kind" and isinstance(node, dict) and node.get("defence", name) is None:
        node["defence"] = {"kind": None}


def _keep_tag_alone(tree: dict[str, Any], tag: str) -> None:
    """Without what stands beside a tag, which is of what it named before."""
    path, _, last = tag.rpartition(".")
    node = value_at(tree, path)
    chosen = node[last]
    node.clear()
    node[last] = chosen


def _go_with_attack(tree: dict[str, Any], experiment: str) -> None:
    """No iteration of the attack before is asked for, and a search on a victim with an output per
    class has the condition of those."""
    attack = value_at(tree, f"{experiment}.attack")
    if attack["kind"] == "kkt" and value_at(tree, f"{experiment}.training.loss.kind") == "ce":
        attack["condition"] = "multiclass"
    evaluated = "heldout_experiment" if tree.get("heldout_experiment") else "experiment"
    if experiment == "experiment" and "curation" in tree:
        tree["curation"]["min_iteration"] = 0
    if experiment == evaluated and isinstance(
        value_at(tree, "evaluation.restore_iterations"), list
    ):
        tree["evaluation"]["restore_iterations"] = "last"


def _leave_out_further(tree: dict[str, Any]) -> None:
    evaluated = tree.get("heldout_experiment") or tree["experiment"]
    kind = (evaluated.get("attack") or {}).get("kind", "kkt")
    given = tree["further_attacks"] if evaluated.get("family", "kkt") == "kkt" else []
    tree["further_attacks"] = [attack for attack in given if attack["kind"] != kind]


def _child(node: Any, key: str) -> Any:
    if isinstance(node, dict):
        return node.get(key)
    if isinstance(node, list) and key.isdigit() and int(key) < len(node):
        return node[int(key)]
    return None


def _parsed(value: Any, current: Any) -> Any:
    """A string from the command line as JSON where it is JSON; `200,200` where a list of numbers
    stands, `nlm,tv` where one of words or of kinds does; a word gives way to a list in brackets."""
    if value == "null":
        return None
    if not isinstance(value, str) or (isinstance(current, str) and not value.startswith("[")):
        return value
    as_list = isinstance(current, list) and not value.startswith("[")
    words = as_list and all(isinstance(item, str | dict) for item in current)
    if words and current:
        return value.split(",")
    try:
        return json.loads(f"[{value}]" if as_list else value)
    except (ValueError, RecursionError):  # no JSON, or none that can be held
        return value.split(",") if words else value


def values_of(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of every single setting of a tree; a list of numbers is one setting."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        name = f"{prefix}{key}"
        if isinstance(value, dict) or (
            isinstance(value, list) and value and isinstance(value[0], dict)
        ):
            yield from values_of(value, f"{name}.")
        else:
            yield name, value


def explained(error: ValidationError) -> str:
    """Line of what pydantic found wrong."""
    return "; ".join(_explained(dict(e)) for e in error.errors())


_TAGGED = (
    *("experiment", "heldout_experiment", "restorer"),
    *("attack", "victim", "defence", "scheme"),
)
"""Settings of several kinds: pydantic names the kind behind them, which is no part of the name."""


@cache
def _tags() -> frozenset[str]:
    """Every kind of settings that there is, published families' too."""

    def tags_in(schema: Any) -> Iterator[str]:
        inside = schema.values() if isinstance(schema, dict) else schema
        if isinstance(schema, dict) and schema.get("type") == "tagged-union":
            yield from schema["choices"]
        for part in inside if isinstance(schema, dict | list | tuple) else ():
            yield from tags_in(part)

    return frozenset(tags_in(adapter(Recipe).core_schema))


def _explained(error: Mapping[str, Any]) -> str:
    """One pydantic error: our own messages as they are, others with the name and the value."""
    tags = _tags()
    path = ["", *(str(part) for part in error["loc"])]
    is_further = path[1:2] == ["further_attacks"]
    kept = [
        part
        for before, part in pairwise(path)
        if part not in tags or not (before in _TAGGED or (is_further and before.isdigit()))
    ]
    name = ".".join(kept)
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{name}: {message}" if name else message
    return f"{name}={error['input']!r}: {message}"
