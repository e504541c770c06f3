"""The studies that there are; each is one line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flows.audit import AUDIT
from flows.families.autoencoder.study import AUTOENCODER
from flows.families.inversion.study import INVERSION
from flows.families.weights.span_study import SPAN
from flows.families.weights.study import GRIDS
from flows.naming import unknown_name
from flows.study_kind import StudyKind

STUDIES: dict[str, StudyKind[Any, Any]] = {
    kind.name: kind for kind in (*GRIDS, SPAN, AUTOENCODER, INVERSION, AUDIT)
}


def kind_of(name: str) -> StudyKind[Any, Any]:
    """The study of that name; ValueError with the nearest name if there is none."""
    if name not in STUDIES:
        raise ValueError(unknown_name("study", name, [*STUDIES, "list"]))
    return STUDIES[name]


def study(
    name: str, preset: str, settings: Mapping[str, Any] | None = None, *, only: str = ""
) -> Any:
    """Settings of the named study, as `StudyKind.named`."""
    return kind_of(name).named(preset, settings, only=only)
