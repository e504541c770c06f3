"""The folder that restored pictures go to: whether it may be used, by whom, and what is its record.

What is in it is in `restore_job`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from storage.documents import read_document
from storage.errors import DocumentError, StorageError, StoreMismatchError
from storage.files import TEMPORARY_PREFIX
from storage.pairs.dataset import manifest_differences

SCHEMA, VERSION = "palimpsest-restored", 1
FINISHED, UNFINISHED, SHEET = "restored.json", "restoring.json", "contact-sheet.png"
ENTRIES = frozenset({"mean", "disagreement", "samples", SHEET, FINISHED, UNFINISHED})
"""All that a restoration puts into its folder."""
N_DIFFERENCES_SHOWN = 3


def check_free(out: Path, source: str, *, fresh: bool) -> None:
    """ValueError, with the fix, if restorations of what is at `source` cannot be put into `out`."""
    here, there = out.resolve(), Path(source).resolve()
    if there in here.parents:
        raise ValueError(
            f"--out {out} lies in --input {source}, so that its pictures would be "
            "restored next time; choose a folder outside"
        )
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder")
    if not out.is_dir():
        return
    if fresh:
        _check_clearable(out, here == there or here in there.parents)
        return
    if any((out / name).is_file() for name in (FINISHED, UNFINISHED)):
        return
    if any(not entry.name.startswith(TEMPORARY_PREFIX) for entry in out.iterdir()):
        raise ValueError(
            f"--out {out} is not empty and holds no restoration; choose another folder"
        )


def _check_clearable(out: Path, holds_inputs: bool) -> None:
    if holds_inputs:
        raise ValueError(
            f"--fresh would delete --input, which is in --out {out}; use another --out"
        )
    names = {entry.name for entry in out.iterdir()}
    strangers = sorted(name for name in names - ENTRIES if not name.startswith(TEMPORARY_PREFIX))
    if strangers:
        raise ValueError(
            f"--fresh would delete {out}, which also holds {', '.join(strangers[:3])}; remove the "
            "folder yourself or use another --out"
        )


def clear(out: Path) -> None:
    """Removes an earlier restoration; its records last, so that it is known as one until then."""
    for name in sorted(ENTRIES, key=lambda name: name in (FINISHED, UNFINISHED)):
        path = out / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def read_record(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The record in `path`, if there is one.

    Raises StoreMismatchError if it is not one of a restoration with the same settings; says how.
    """
    if not path.exists():
        return None
    fix = "use those settings again, another --out, or --fresh to replace it"
    try:
        record = read_document(path, fix)
        there = dict(record["settings"])
        if record.get("schema") != SCHEMA:
            raise ValueError(f"schema is {record.get('schema')!r}, not {SCHEMA!r}")
    except DocumentError as error:
        raise StoreMismatchError(str(error)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise StoreMismatchError(f"{path} is not a restoration's ({error}); {fix}") from error
    versions = [{"version": record.get("version")} | there, {"version": VERSION} | settings]
    differences = manifest_differences(*versions)
    if differences:
        shown = "; ".join(differences[:N_DIFFERENCES_SHOWN])
        more = len(differences) - N_DIFFERENCES_SHOWN
        raise StoreMismatchError(
            f"{path.parent} was restored with other settings: {shown}"
            + (f" and {more} more" if more > 0 else "")
            + f"; {fix}"
        )
    return record


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """`out`, made if needed, for this process alone."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise StorageError(f"cannot write to {out} ({error.strerror}); choose another") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StorageError(
                f"another process is restoring into {out}; wait for it, or choose another --out"
            ) from error
        yield
    finally:
        os.close(descriptor)
