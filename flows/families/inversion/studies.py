"""The settings of a study of split classifiers: a preset, single values replaced, or a folder's."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from flows.families.inversion.grids import PRESETS
from flows.naming import unknown_name
from flows.settings import explained, replace_setting, values_of
from flows.studies import SETTINGS_FIX
from storage.documents import read_document, understood
from tasks.families.inversion.study.settings import InversionStudy
from tasks.study.products import SETTINGS

STUDY = TypeAdapter(InversionStudy)
OF_EVERY_SOURCE = "source."
"""Settings that begin with this are set in every source."""


def inversion_study(
    preset: str, settings: Mapping[str, Any] | None = None, *, only: str = ""
) -> InversionStudy:
    """The study at a size, with single settings replaced; `only` the sources whose name has that.

    A name that begins with `source.` is set in every source, and `NAME.` in the one of that name.
    `data` is that of the only source, or of the last. Raises ValueError naming what is wrong and
    the fix.
    """
    if preset not in PRESETS:
        raise ValueError(unknown_name("preset", preset, PRESETS))
    made = PRESETS[preset]()
    if only:
        some = tuple(source for source in made.sources if only in source.name)
        if not some:
            raise ValueError(unknown_name("source", only, (s.name for s in made.sources)))
        made = replace(made, sources=some, only=only)
    return changed(made, settings or {})


def changed(made: InversionStudy, settings: Mapping[str, Any]) -> InversionStudy:
    """A study with single settings replaced, as `inversion_study` does."""
    tree: dict[str, Any] = to_json(made)
    by_name = {source["name"]: source for source in tree["sources"]}
    for setting, value in settings.items():
        first, _dot, rest = setting.partition(".")
        if setting == "data":
            if not by_name:
                raise ValueError("the study has no source to take data; leave --data out")
            tree["sources"][-1]["data"] = value
        elif f"{first}." == OF_EVERY_SOURCE:
            for source in tree["sources"]:
                replace_setting(source, rest, value)
        elif first in by_name and rest:
            replace_setting(by_name[first], rest, value)
        else:
            replace_setting(tree, setting, value)
    return from_json(tree)


def resolve_inversion(
    preset: str | None, settings: Mapping[str, Any] | None, store: Path, *, only: str = ""
) -> InversionStudy:
    """The study that `store` holds, unless a size or some sources are asked for; else the preset,
    at a CPU's size by default. Raises ValueError as `inversion_study` does, and for a store of
    another kind of study."""
    path = store / SETTINGS
    if preset is not None or only or not path.exists():
        return inversion_study(preset or "cpu", settings, only=only)
    tree = read_document(path, SETTINGS_FIX)
    if tree.get("name") != "inversion":
        raise ValueError(
            f"{store} holds study {tree.get('name')!r}, not 'inversion'; use another --store"
        )
    with understood(path, SETTINGS_FIX):
        kept = from_json(tree)
    return changed(kept, settings or {})


def from_json(tree: Mapping[str, Any]) -> InversionStudy:
    """The study of a JSON object; ValueError in one line for unknown keys and bad values."""
    try:
        return STUDY.validate_python(tree)
    except ValidationError as error:
        raise ValueError(explained(error)) from error


def to_json(made: InversionStudy) -> dict[str, Any]:
    """The study as a JSON object."""
    return dict(STUDY.dump_python(made, mode="json"))


def command(made: InversionStudy) -> str:
    """The command that makes this study from nothing."""
    base = to_json(inversion_study(made.preset, only=made.only))
    tree = to_json(made)
    found = {}
    own = {s["name"]: s for s in base.pop("sources")}
    for source in tree.pop("sources"):
        for name, value in values_of(source):
            if dict(values_of(own[source["name"]])).get(name, ...) != value:
                found[f"{source['name']}.{name}"] = value
    plain = dict(values_of(base))
    found |= {name: value for name, value in values_of(tree) if plain.get(name, ...) != value}
    words = ["palimpsest", "study", "inversion", "--preset", made.preset]
    if made.only:
        words += ["--only", made.only]
    if made.sources and (data := found.pop(f"{made.sources[-1].name}.data", None)):
        words += ["--data", data]
    for name, value in found.items():
        words += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(words)
