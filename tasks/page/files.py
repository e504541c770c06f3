"""Inputs and outputs of pages: a JSON record and an .npz of pictures, read with errors that help;
the page from its template, one file that asks nothing of the network; tables as CSV beside it."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.documents import read_document, understood
from storage.files import text_bytes, write_file
from tasks.page import formats
from tasks.page.charts import marker
from tasks.page.formats import is_ours
from tasks.page.pictures import data_uri
from tasks.page.tables import Table

TEMPLATES = Path(__file__).parent / "templates"
FORMATS = ("percent", "score", "duration", "interval", "number", "count", "runs", "short", "power",
           "decibels", "whole", "with_names")  # fmt: skip

Record = Mapping[str, Any]
Arrays = Mapping[str, npt.NDArray[Any]]


def read_record(path: Path, *, schema: str, version: int, command: str) -> dict[str, Any]:
    """The JSON object in `path`, of this schema and version. Raises ValueError, which names
    `command` as the way to make it, if there is no such file, or it is something else."""
    try:
        record = read_document(path, f"run `{command}` again")
    except FileNotFoundError:
        raise ValueError(f"{path.parent} has no {path.name}; run `{command}` first") from None
    name, other = record.get("schema"), record.get("version")
    if (name, other) != (schema, version):
        raise ValueError(
            f"{path} is {name!r} version {other!r}, expected {schema!r} version {version}; "
            f"run `{command}` again with this release"
        )
    return record


@contextlib.contextmanager
def page_of(records: Path | str, command: str) -> Iterator[None]:
    """Turns what a page cannot be made of into ValueError of one line that names its `records` and
    the `command` that makes them anew."""
    import jinja2

    with understood(records, f"run `{command}` again"):
        try:
            yield
        except jinja2.UndefinedError as error:
            raise ValueError(str(error)) from error


def read_arrays(path: Path, *, again: str) -> dict[str, npt.NDArray[Any]]:
    """The arrays of the .npz `path`; ValueError, which says what to do `again`, if there is none,
    or it cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise ValueError(
            f"{path.parent} has no {path.name}, so its study was not finished or not copied whole; "
            f"copy it, or {again}"
        ) from None
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read ({error}); {again}") from error


def write_tables(folder: Path, tables: Iterable[Table]) -> None:
    """Every table as CSV in `folder`; CSVs of an earlier page there are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.csv"):
        old.unlink()
    for table in tables:
        write_file(folder / f"{table.name}.csv", text_bytes(table.csv()))


def page_html(template: str, filters: Mapping[str, Any], **values: Any) -> str:
    """The page that `template` makes of `values`; all of `FORMATS` are filters, and `uri` of a
    picture, `filters` come on top. Raises jinja2.UndefinedError for a value that is not there."""
    import jinja2

    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {name: getattr(formats, name) for name in FORMATS}
    found.filters |= {"uri": data_uri, **filters}
    found.tests["ours"] = is_ours
    found.globals |= {"marker": marker}
    return found.get_template(template).render(**values)
