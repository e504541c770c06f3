"""The studies that there are: by name, what each asks, its grid, its figures and its claims.

A study is one function in `flows.families.weights.grids`, its figures and claims one each in
`figure_specs` and `claims` of `tasks.families.weights.study`, and one line here.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from flows.families.weights import grids
from flows.families.weights import span_grid as study_span
from flows.naming import unknown_name
from flows.settings import explained, replace_setting, replace_settings
from storage.documents import read_document, understood
from tasks.study.settings import Cell, Study

STUDY, CELL = TypeAdapter(Study), TypeAdapter(Cell)
PRESETS = tuple(grids.SIZES)
SETTINGS = "settings.json"
SETTINGS_FIX = "restore it, or use another --store"
"""In the store's folder: every setting of its study."""
OF_EVERY_CELL = "experiment."
"""Settings that begin with this are set in the experiment of every cell."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a study asks, where the paper does, and its grid at a size."""

    title: str
    question: str
    paper: str
    grid: Callable[[grids.Size], Study]


STUDIES: dict[str, Kind] = {
    "multiclass": Kind(
        title="More classes, more reconstructions",
        question="Does a classifier of more classes give back more of its training images?",
        paper="002, section 4.2 and appendix C",
        grid=grids.multiclass,
    ),
    "losses": Kind(
        title="Losses other than cross-entropy",
        question="Do networks trained by regression with weight decay give back their images, and "
        "which of them?",
        paper="002, section 5.2 and appendix D",
        grid=grids.losses,
    ),
    "weight-decay": Kind(
        title="The role of weight decay",
        question="Does weight decay make a network with a standard start vulnerable, and for which "
        "values?",
        paper="002, section 6.1 and appendix E",
        grid=grids.weight_decay,
    ),
    "cnn": Kind(
        title="Convolutional networks",
        question="Do networks that begin with a convolution give back their images, and with which "
        "kernels?",
        paper="002, section 6.1 and appendix F",
        grid=grids.cnn,
    ),
    "width": Kind(
        title="Width against number of images",
        question="How many images come back by the width of the network and the number of images?",
        paper="002, section 6.2",
        grid=grids.width,
    ),
    "large": Kind(
        title="Many images",
        question="Does a wide network give back some of very many images that it learned in "
        "minibatches?",
        paper="002, appendix G",
        grid=grids.large,
    ),
    "span": Kind(
        title="Where the span attack works",
        question="From which networks does the span attack give back more than half of the images, "
        "where does it break, and what of paper 002 stands when the start is known?",
        paper="ours, beside 002",
        grid=study_span.span,
    ),
}


def study(
    name: str, preset: str, settings: Mapping[str, Any] | None = None, *, only: str = ""
) -> Study:
    """The named study at a size, with single settings replaced.

    `only`: just the cells whose name contains it; numbers of cells in settings then count those.

    A name that begins with `experiment.` is set in every cell, others are the study's own
    (`n_victims`, `data`, `cells.0.images_per_run`). Raises ValueError naming what is wrong and the
    fix.
    """
    if name not in STUDIES:
        raise ValueError(unknown_name("study", name, STUDIES))
    if preset not in grids.SIZES:
        raise ValueError(unknown_name("preset", preset, grids.SIZES))
    made = STUDIES[name].grid(grids.SIZES[preset])
    if only:
        cells = tuple(cell for cell in made.cells if only in cell.name)
        if not cells:
            raise ValueError(unknown_name("cell", only, (cell.name for cell in made.cells)))
        made = replace(made, cells=cells, only=only)
    return changed(made, settings or {})


def changed(made: Study, settings: Mapping[str, Any]) -> Study:
    """A study with single settings replaced, as `study` does."""
    tree: dict[str, Any] = STUDY.dump_python(made, mode="json")
    of_cells = {name: v for name, v in settings.items() if name.startswith(OF_EVERY_CELL)}
    tree["cells"] = [replace_settings(cell, of_cells, _completed) for cell in tree["cells"]]
    for setting, value in settings.items():
        if setting not in of_cells:
            replace_setting(tree, setting, value)
    return from_json(tree)


def resolve(
    name: str,
    preset: str | None,
    settings: Mapping[str, Any] | None,
    store: Path,
    *,
    only: str = "",
) -> Study:
    """The study that `store` holds, unless a size or some cells are asked for; else the named one,
    at a CPU's size by default. Raises ValueError as `study` does, and for a store of another."""
    path = store / SETTINGS
    if name not in STUDIES:
        raise ValueError(unknown_name("study", name, STUDIES))
    if preset is not None or only or not path.exists():
        return study(name, preset or "cpu", settings, only=only)
    with understood(path, SETTINGS_FIX):
        kept = from_json(read_document(path, SETTINGS_FIX))
    if kept.name != name:
        raise ValueError(f"{store} holds study {kept.name!r}, not {name!r}; use another --store")
    return changed(kept, settings or {})


class Named(Protocol):
    """What the command of a study says of it."""

    @property
    def name(self) -> str: ...

    @property
    def preset(self) -> str: ...

    @property
    def data(self) -> str: ...

    @property
    def only(self) -> str: ...


def study_command(made: Named, settings: Mapping[str, Any]) -> str:
    """The `palimpsest study` command of a study with these settings besides its preset's."""
    words = ["palimpsest", "study", made.name, "--preset", made.preset, "--data", made.data]
    if made.only:
        words += ["--only", made.only]
    for name, value in settings.items():
        words += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(words)


def _completed(cell: Mapping[str, Any]) -> dict[str, Any]:
    """A cell as a JSON object, with the defaults of what is not in it."""
    try:
        return dict(CELL.dump_python(CELL.validate_python(cell), mode="json"))
    except ValidationError as error:
        raise ValueError(explained(error)) from error


def from_json(tree: Mapping[str, Any]) -> Study:
    """The study of a JSON object; ValueError in one line for unknown keys and bad values."""
    try:
        return STUDY.validate_python(tree)
    except ValidationError as error:
        raise ValueError(explained(error)) from error


def to_json(of: Study) -> dict[str, Any]:
    """The study as a JSON object."""
    return dict(STUDY.dump_python(of, mode="json"))
