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
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from flows.naming import unknown_name
from flows.presets import PRESETS, preset
from flows.recipe import Recipe
from storage.documents import understood
from tasks.workspace import RECIPE_FIX, Workspace

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
    """Replace single settings of a tree; `completed` fills in the defaults that a tree lacks.
    Raises ValueError as `resolve` does."""

    def turn(name: str) -> tuple[int, int]:
        """Sort key: tags come before the settings beside them, a defence or a scheme after all
        others, since it is read with them."""
        is_late = ".defence." in name or ".scheme." in name
        return 2 * is_late + (name not in TAGS), name.count(".")

    for name in sorted(given, key=turn):
        experiment, _, rest = name.partition(".")
        node, changed = tree.get(experiment), value_at(tree, name) != given[name]
        if rest == "defence.kind" and isinstance(node, dict) and node.get("defence", name) is None:
            node["defence"] = {"kind": None}
        replace_setting(tree, name, given[name])
        if name not in TAGS or not changed:
            continue
        path, _, tag = name.rpartition(".")
        beside = value_at(tree, path)
        chosen = beside[tag]
        beside.clear()  # of what the tag named before
        beside[tag] = chosen
        evaluated = "heldout_experiment" if tree.get("heldout_experiment") else "experiment"
        if rest == "attack.kind":  # it has other iterations, and knows of an output per class
            if chosen == "kkt" and value_at(tree, f"{experiment}.training.loss.kind") == "ce":
                beside["condition"] = "multiclass"
            if experiment == "experiment" and "curation" in tree:
                tree["curation"]["min_iteration"] = 0
            asked = value_at(tree, "evaluation.restore_iterations")
            if experiment == evaluated and isinstance(asked, list):
                tree["evaluation"]["restore_iterations"] = "last"
        if rest in ("attack.kind", "family") and "further_attacks" in tree:
            victims = tree[evaluated]
            own = (victims.get("attack") or {}).get("kind", "kkt")
            further = tree["further_attacks"] if victims.get("family", "kkt") == "kkt" else []
            tree["further_attacks"] = [attack for attack in further if attack["kind"] != own]
        tree = completed(tree)
    return tree


def from_json(tree: Mapping[str, Any]) -> Recipe:
    """The recipe of a JSON object; ValueError in one line for unknown keys and bad values."""
    return cast(Recipe, validated(Recipe, tree))


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def validated(kind: Any, tree: Mapping[str, Any]) -> Any:
    """Settings of a JSON object; ValueError in one line for unknown keys and bad values."""
    try:
        return adapter(kind).validate_python(tree)
    except ValidationError as error:
        raise ValueError(explained(error, tree)) from error


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
    before, after = to_json(base), to_json(recipe)
    changed = {}
    if recipe.further_attacks != base.further_attacks:  # of which there may be another number
        changed["further_attacks"] = after["further_attacks"]
    for name in ("name", "data", "further_attacks"):
        before.pop(name)
        after.pop(name)
    return shlex.join([*words, "--store", str(store), *set_words(changed | changes(before, after))])


def changes(base: Any, tree: Any) -> dict[str, Any]:
    """Single settings of a tree that are not those of another, by dotted name."""
    plain = dict(values_of(base))
    return {name: value for name, value in values_of(tree) if plain.get(name, ...) != value}


def set_words(settings: Mapping[str, Any]) -> list[str]:
    """`--set name=value` of each of the settings."""
    texts = {n: v if isinstance(v, str) else json.dumps(v) for n, v in settings.items()}
    return [word for name, text in texts.items() for word in ("--set", f"{name}={text}")]


def portable(value: Any) -> Any:
    """Shorten absolute paths in a text, or in the texts of a tree, for a record that others read.

    A path below the current folder becomes relative to it; of any other the last part stays.
    """
    if isinstance(value, str):
        here = Path.cwd()
        return _ABSOLUTE.sub(
            lambda found: (
                str(path.relative_to(here))
                if (path := Path(found[0])).is_relative_to(here)
                else path.name
            ),
            value,
        )
    if isinstance(value, Mapping):
        return {key: portable(of) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [portable(of) for of in value]
    return value


def replace_setting(tree: dict[str, Any], name: str, value: Any) -> None:
    """Sets one value of a tree of settings; ValueError with the nearest name if there is none."""
    path, _, last = name.rpartition(".")
    node: Any = value_at(tree, path) if path else tree
    there = value_at(node, last, ...)
    if there is not ... and not isinstance(there, dict):
        node[int(last) if isinstance(node, list) else last] = _parsed(value, there)
    elif isinstance(there, dict) and value in (None, "null"):
        node[last] = None
    elif isinstance(node, dict) and path in NAMED_BY_USERS:
        node[last] = value
    else:
        raise ValueError(unknown_name("setting", name, [name for name, _value in values_of(tree)]))


def value_at(tree: Any, name: str, default: Any = None) -> Any:
    """Value at a dotted name; the default if there is none."""
    for key in name.split("."):
        if isinstance(tree, dict):
            tree = tree.get(key, default)
        elif isinstance(tree, list) and key.isdigit() and int(key) < len(tree):
            tree = tree[int(key)]
        else:
            return default
    return tree


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


def explained(error: ValidationError, tree: Any) -> str:
    """Errors of pydantic in one line: our own messages as they are, others with name and value.

    A name has what the tree has, and so no kind, which pydantic puts behind settings of several.
    """
    lines = []
    for one in error.errors():
        node: Any = tree
        names: list[str] = []
        for part in one["loc"]:
            is_item = isinstance(node, list | tuple) and isinstance(part, int)
            if is_item or (isinstance(node, Mapping) and part in node):
                node = node[part]
                names.append(str(part))
        if one["type"] == "missing":
            names.append(str(one["loc"][-1]))
        name = ".".join(names)
        message = str(one["msg"]).removeprefix("Value error, ")
        if one["type"] == "value_error":
            lines.append(f"{name}: {message}" if name else message)
        else:
            lines.append(f"{name}={one['input']!r}: {message}")
    return "; ".join(lines)
