"""Place of a store's files: a local folder, or a prefix of an S3 bucket.

A store needs whole files, ranges of them, an exclusive create, and that what was written stays. A
folder gives the last two by hard links and fsync, S3 by conditional requests (`If-None-Match: *`).
Credentials and the endpoint of an S3 service come from the usual `AWS_*` variables.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, TypeAlias

from storage.errors import StorageError
from storage.files import (
    S3_SCHEME,
    WHOLE_BYTES,
    FileInfo,
    Tree,
    create_file,
    full_device_explained,
    open_regular,
    read_bounded,
    sync,
    write_file,
    write_synced,
)

if TYPE_CHECKING:
    from storage.s3 import S3Place

Location = str | Path

_WRITERS = 8


Place: TypeAlias = "LocalPlace | S3Place"


def open_place(location: Location | Place) -> Place:
    """The place at `location`; nothing is created, and S3 is not asked yet. Raises ValueError for a
    URL other than "s3://bucket/prefix"."""
    if not isinstance(location, str | PurePath):
        return location
    text = str(location)
    if text.startswith(S3_SCHEME):
        bucket, _slash, prefix = text.removeprefix(S3_SCHEME).partition("/")
        if not bucket:
            raise ValueError(f"location {text!r} names no bucket; write s3://bucket/prefix")
        from storage.s3 import S3Place

        return S3Place(bucket, prefix.strip("/"))
    if "://" in text or text.startswith("s3:/"):
        raise ValueError(f"location {text!r}; expected a folder or s3://bucket/prefix")
    return LocalPlace(Path(location))


class LocalPlace:
    """A folder. Needs hard links and an atomic rename, as local disks, NFS and Lustre have them.

    Names are relative, with "/" between folders. Reading what is not there raises
    FileNotFoundError; what is no regular file, or larger than the limit that the reader gives,
    OSError before anything is read. Writing on a full device raises StoreFullError; an unreachable
    or refusing service StorageError. `n_parallel` small requests are worth making at once.
    """

    n_parallel = 1

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def __str__(self) -> str:
        return str(self.root)

    def read(self, name: str, limit: int = WHOLE_BYTES) -> bytes:
        return read_bounded(self.root / name, limit)

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop), fewer where the file ends before."""
        with open_regular(self.root / name) as file:
            pieces = []
            while start < stop and (piece := os.pread(file.fileno(), stop - start, start)):
                pieces.append(piece)
                start += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def modified(self, name: str) -> float:
        """Time of the last change of a file, or of a folder itself: seconds since 1970."""
        return (self.root / name).stat().st_mtime

    def replace(self, name: str, content: bytes) -> None:
        """Writes or replaces a file, whole or not at all."""
        write_file(self.root / name, content)

    def create(self, name: str, content: bytes) -> bool:
        """Writes a file unless there is one: True for exactly one of all who try."""
        path = self.root / name
        with full_device_explained(path):
            path.parent.mkdir(exist_ok=True)  # a copied store may lack its empty folders
        return create_file(path, content)

    def write_tree(self, files: Tree) -> None:
        """Writes new files as they come, durable on return; interrupted, it leaves some of them."""
        written: list[Future[None]] = []
        folders: set[Path] = set()
        with full_device_explained(self.root), ThreadPoolExecutor(_WRITERS) as pool:
            for name, content in files:
                above = {self.root / folder for folder in PurePosixPath(name).parents}
                for folder in sorted(above - folders):
                    folder.mkdir(exist_ok=True)
                folders |= above
                written.append(pool.submit(write_synced, self.root / name, content))
            for future in written:
                future.result()
            for folder in sorted(folders, reverse=True):
                sync(folder)

    def files(self, folder: str) -> list[FileInfo]:
        """All files below a folder, by name; none if there is no such folder."""
        found = []
        for current, _folders, names in os.walk(self.root / folder):
            for name in names:
                path = Path(current, name)
                try:
                    status = path.lstat()
                except FileNotFoundError:  # of a writer that is finishing
                    continue
                version = f"{status.st_ino}-{status.st_mtime_ns}"
                relative = path.relative_to(self.root).as_posix()
                found.append(FileInfo(relative, status.st_size, status.st_mtime, version))
        return sorted(found, key=lambda info: info.name)

    def children(self, folder: str) -> list[str]:
        """Names of the files and folders directly inside a folder, sorted."""
        try:
            return sorted(path.name for path in (self.root / folder).iterdir())
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> None:
        """Removes a file, or a folder with all that is in it. What is not there is fine."""
        path = self.root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def make_folders(self, names: Sequence[str]) -> None:
        """Folders that exist even while they are empty, where a place has such."""
        try:
            with full_device_explained(self.root):
                for name in names:
                    (self.root / name).mkdir(parents=True, exist_ok=True)
                sync(self.root)
                sync(self.root.parent)
        except OSError as error:
            raise StorageError(
                f"cannot make a store at {self.root} ({error.strerror}); choose another folder"
            ) from error
