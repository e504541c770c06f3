"""Files that are either whole or absent, whatever kills the writer.

The discipline: write under a temporary name, fsync the file, give it its final name in one system
call (`rename` to replace, `link` to create exclusively), fsync the folder.

A folder for an export appears whole or not at all, too: its files are written into a hidden folder
beside it, which gets its name by one rename when everything is on the device; the next export to
the same place removes what a killed one left. `export.json` marks a folder that may be replaced.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import secrets
import shutil
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from storage.errors import StorageError, StoreFullError

TEMPORARY_PREFIX = ".tmp-"
"""Files that start so are leftovers of a killed writer; nothing refers to them."""

Content = bytes | Sequence[bytes]

Tree = Iterable[tuple[str, Content]]
"""Files by name, which may be made while earlier ones are being written."""

S3_SCHEME = "s3://"
EXPORT_FILE = "export.json"

WHOLE_BYTES = 2**26
"""The most that a document may have; the files of parts have limits of their own."""

_PIECES_AT_ONCE = 512  # of at least 1,024 that one call takes
_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class FileInfo:
    """A file of a place: `modified` in seconds since 1970; another `version` is another content."""

    name: str
    size: int
    modified: float
    version: str


@contextlib.contextmanager
def full_device_explained(path: Path) -> Iterator[None]:
    """Turns "no space left" and "quota exceeded" into `StoreFullError` with the fix."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise StoreFullError(
            f"no space left to write {path}; free some space or use a folder on another device, "
            "then run the same command again: it continues from what is complete"
        ) from error


_KINDS = {
    **{stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"},
    **{stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"},
}


def open_regular(path: Path) -> BinaryIO:
    """`path` opened for reading bytes, if it is a regular file or a link to one. Others, a pipe
    that nobody writes to or a device that has no end, raise OSError without waiting, as what cannot
    be opened does."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "something else")
            raise OSError(f"it is {kind}, not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bounded(path: Path, at_most: int) -> bytes:
    """Content of the regular file `path`; OSError, before anything is read, if it is none, cannot
    be opened, or has more than `at_most` bytes."""
    with open_regular(path) as file:
        check_size(os.fstat(file.fileno()).st_size, at_most)
        return file.read()


def check_size(n_bytes: int, at_most: int) -> None:
    """Raises OSError if a file of `n_bytes` bytes has more than `at_most`."""
    if n_bytes > at_most:
        raise OSError(f"it has {n_bytes:,} bytes, more than {at_most:,}")


def reason_of(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def machine_memory() -> int:
    """Bytes of memory that this machine has; nothing that takes more needs to be tried."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def json_bytes(value: Any) -> bytes:
    """`value` as readable JSON; NaN and infinity are refused with ValueError. A byte of a file's
    name that is not UTF-8 becomes JSON's escape."""
    return text_bytes(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def text_bytes(text: str) -> bytes:
    r"""`text` as UTF-8; bytes of file names that are not UTF-8 are escaped with `\u`."""
    return text.encode("utf-8", "backslashreplace")


def write_file(path: Path, content: bytes) -> None:
    """Replaces `path` by `content` atomically and durably, or raises StoreFullError and leaves
    it."""
    with full_device_explained(path):
        with temporary_file(path.parent, content) as temporary:
            temporary.replace(path)
        sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_file(path, json_bytes(value))


def sync(path: Path) -> None:
    """Waits until the device has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: Content) -> None:
    """Writes a new file and waits until the device has it; its folder is not synced."""
    left = deque(memoryview(piece) for piece in pieces_of(content) if piece)
    with path.open("xb", buffering=0) as file:
        while left:
            n_bytes = os.writev(file.fileno(), list(itertools.islice(left, _PIECES_AT_ONCE)))
            while left and n_bytes >= len(left[0]):
                n_bytes -= len(left.popleft())
            if n_bytes:
                left[0] = left[0][n_bytes:]
        os.fsync(file.fileno())


def pieces_of(content: Content) -> Sequence[bytes]:
    return (content,) if isinstance(content, bytes) else content


@contextlib.contextmanager
def temporary_file(folder: Path, content: bytes) -> Iterator[Path]:
    """A file of `content` that is on the device, to be renamed or linked; gone at the end."""
    path = folder / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    try:
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield path
    finally:
        path.unlink(missing_ok=True)


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


@contextlib.contextmanager
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
        try:
            staging.mkdir(parents=True, exist_ok=True)
            lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise StorageError(
                f"cannot write in {staging.parent} ({error.strerror}); choose another --out"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise StorageError(
                f"another process is exporting to {staging.parent} ({staging.name} is locked); "
                "wait for it, or choose another --out"
            ) from error
        try:
            for entry in staging.iterdir():  # of an export that was killed
                if entry.is_dir():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
            content = staging / "export"
            content.mkdir()
            yield content
            for current, _folders, files in os.walk(content, topdown=False):
                for name in files:
                    sync(Path(current, name))
                sync(Path(current))
            if folder.exists():
                check_replaceable(folder, fresh=fresh)
                folder.rename(staging / "replaced")
            content.rename(folder)
            sync(folder.parent)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            os.close(lock)


def write_description(folder: Path, description: dict[str, Any]) -> None:
    """Origin of the export in `folder`, as `export.json`; the last file of an export."""
    about = {"schema": "palimpsest-export", "version": 1, **description}
    write_json(folder / EXPORT_FILE, about)
