"""The settings of a study of recovery: a preset, single values replaced, what a folder holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from flows.families.autoencoder.grids import PRESETS
from flows.naming import unknown_name
from flows.settings import explained, replace_setting, values_of
from flows.studies import SETTINGS_FIX, study_command
from storage.documents import read_document, understood
from tasks.families.autoencoder.study.settings import RecoveryStudy
from tasks.study.products import SETTINGS

STUDY = TypeAdapter(RecoveryStudy)
OF_EVERY_VICTIM = "victim."
"""Settings that begin with this are set in every victim."""


def recovery_study(
    preset: str, settings: Mapping[str, Any] | None = None, *, only: str = ""
) -> RecoveryStudy:
    """The study at a size, with single settings replaced; `only` the victims whose name has that.

    A name that begins with `victim.` is set in every victim that has it. Raises ValueError naming
    what is wrong and the fix.
    """
    if preset not in PRESETS:
        raise ValueError(unknown_name("preset", preset, PRESETS))
    made = PRESETS[preset]()
    if only:
        made = _some(made, only)
    return changed(made, settings or {})


def _some(made: RecoveryStudy, only: str) -> RecoveryStudy:
    victims = tuple(victim for victim in made.victims if only in victim.name)
    if not victims:
        raise ValueError(unknown_name("victim", only, (victim.name for victim in made.victims)))
    noise, names = made.noise, {victim.name for victim in victims}
    if noise is not None and noise.victims:
        left = tuple(name for name in noise.victims if name in names)
        noise = replace(noise, victims=left) if left else None
    return replace(made, victims=victims, noise=noise, only=only)


def changed(made: RecoveryStudy, settings: Mapping[str, Any]) -> RecoveryStudy:
    """A study with single settings replaced, as `recovery_study` does."""
    tree: dict[str, Any] = STUDY.dump_python(made, mode="json")
    for setting, value in settings.items():
        if not setting.startswith(OF_EVERY_VICTIM):
            replace_setting(tree, setting, value)
            continue
        own = setting.removeprefix(OF_EVERY_VICTIM)
        having = [v for v in tree["victims"] if own in dict(values_of(v))] or tree["victims"]
        for victim in having:
            replace_setting(victim, own, value)
    return from_json(tree)


def resolve_recovery(
    preset: str | None, settings: Mapping[str, Any] | None, store: Path, *, only: str = ""
) -> RecoveryStudy:
    """The study that `store` holds, unless a size or some victims are asked for; else the preset,
    at a CPU's size by default. Raises ValueError as `recovery_study` does, and for a store of
    another kind of study."""
    path = store / SETTINGS
    if preset is not None or only or not path.exists():
        return recovery_study(preset or "cpu", settings, only=only)
    tree = read_document(path, SETTINGS_FIX)
    if tree.get("name") != "autoencoder":
        raise ValueError(
            f"{store} holds study {tree.get('name')!r}, not 'autoencoder'; use another --store"
        )
    with understood(path, SETTINGS_FIX):
        kept = from_json(tree)
    return changed(kept, settings or {})


def from_json(tree: Mapping[str, Any]) -> RecoveryStudy:
    """The study of a JSON object; ValueError in one line for unknown keys and bad values."""
    try:
        return STUDY.validate_python(tree)
    except ValidationError as error:
        raise ValueError(explained(error)) from error


def to_json(made: RecoveryStudy) -> dict[str, Any]:
    """The study as a JSON object."""
    return dict(STUDY.dump_python(made, mode="json"))


def command(made: RecoveryStudy) -> str:
    """The command that makes this study from nothing."""
    base = dict(values_of(to_json(recovery_study(made.preset, only=made.only))))
    found = {
        name: value
        for name, value in values_of(to_json(made))
        if name != "data" and base.get(name, ...) != value
    }
    return study_command(made, found)
