"""A folder for an export that appears whole or not at all.

Files are written into a hidden folder beside it, which gets its name by one rename when everything
is on the device; the next export to the same place removes what a killed one left. `export.json`
marks a folder as one that may be replaced.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from storage.errors import StorageError
from storage.files import TEMPORARY_PREFIX, full_device_explained, sync_folder, write_json

EXPORT_FILE = "export.json"
SCHEMA, VERSION = "palimpsest-export", 1


def check_replaceable(folder: Path, *, fresh: bool) -> None:
    """Raises ValueError if an export to `folder` would meet something that it may not replace."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"--out {folder} is a file; name a folder that does not exist yet")
    if any(folder.iterdir()):
        if not (folder / EXPORT_FILE).is_file():
            raise ValueError(
                f"--out {folder} is not empty and not an export; choose another folder, or remove "
                "it yourself"
            )
        if not fresh:
            raise ValueError(
                f"--out {folder} has an export already; add --fresh to replace it, or choose "
                "another folder"
            )


@contextmanager
def whole_folder(folder: Path, *, fresh: bool = False) -> Iterator[Path]:
    """A folder to write in, which becomes `folder` at the end unless there was an error.

    An earlier export in `folder` is replaced if `fresh`, and stays until the new one is complete.
    Raises ValueError if `folder` may not be replaced, StorageError if another process is exporting
    to it or it cannot be made, StoreFullError with `folder` as it was.
    """
    check_replaceable(folder, fresh=fresh)
    folder = folder.absolute()
    staging = folder.with_name(f"{TEMPORARY_PREFIX}{folder.name}")
    with full_device_explained(folder):
        lock = _locked(staging)
        try:
            _clear(staging)
            content = staging / "export"
            content.mkdir()
            yield content
            _sync(content)
            if folder.exists():
                check_replaceable(folder, fresh=fresh)
                folder.rename(staging / "replaced")
            content.rename(folder)
            sync_folder(folder.parent)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            os.close(lock)


def write_description(folder: Path, description: dict[str, Any]) -> None:
    """Origin of the export in `folder`, as `export.json`; the last file of an export."""
    write_json(folder / EXPORT_FILE, {"schema": SCHEMA, "version": VERSION, **description})


def _locked(staging: Path) -> int:
    try:
        staging.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise StorageError(
            f"cannot write in {staging.parent} ({error.strerror}); choose another --out"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise StorageError(
            f"another process is exporting to {staging.parent} ({staging.name} is locked); wait "
            "for it, or choose another --out"
        ) from error
    return descriptor


def _clear(staging: Path) -> None:
    for entry in staging.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _sync(folder: Path) -> None:
    for current, _folders, files in os.walk(folder, topdown=False):
        for name in files:
            descriptor = os.open(Path(current, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(current))
