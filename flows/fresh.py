"""`--fresh`: delete what a command made, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path


def start_over(folder: Path, entries: Collection[str], *, option: str) -> None:
    """Delete `folder` if all in it is among `entries`, the names that the command itself makes.

    The last step before the work begins: whatever can be refused was refused before. Raises
    ValueError naming `option`, under which the folder was given, if there is anything else.
    """
    if not folder.exists():
        return
    strangers = sorted({entry.name for entry in folder.iterdir()} - set(entries))
    if strangers:
        raise ValueError(
            f"--fresh would delete {folder}, which also holds {', '.join(strangers[:3])}; "
            f"remove the folder yourself or use another {option}"
        )
    try:
        shutil.rmtree(folder)
    except OSError as error:  # which has the last part of the path only
        raise OSError(error.errno, error.strerror, str(folder)) from error
