"""Where a store's files are: a local folder, or a prefix of an S3 bucket.

A store needs little of its place: whole files, ranges of them, an exclusive create, and that what
was written stays. A folder gives the last two by hard links and fsync, S3 by conditional requests
(`If-None-Match: *`), so the protocol of parts and receipts is the same on both. Credentials and the
endpoint of an S3 service come from the usual `AWS_*` variables.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Protocol

from storage.errors import StorageError
from storage.files import (
    create_file,
    full_device_explained,
    sync_folder,
    write_file,
    write_synced,
)

if TYPE_CHECKING:
    from obstore.store import S3Store

Location = str | Path
"""A folder, or "s3://bucket/prefix"."""

S3_SCHEME = "s3://"
_WRITERS = 8
_S3_REQUESTS = 16


@dataclass(frozen=True)
class FileInfo:
    """A file of a place: `modified` in seconds since 1970; another `version` is another content."""

    name: str
    size: int
    modified: float
    version: str


class Place(Protocol):
    """The files below one location. Names are relative, with "/" between folders.

    Reading what is not there raises FileNotFoundError. Writing on a full device raises
    StoreFullError; an unreachable or refusing service StorageError. `n_parallel` is the number of
    small requests that are worth making at once.
    """

    n_parallel: int

    def __hash__(self) -> int: ...

    def read(self, name: str) -> bytes: ...

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop), fewer where the file ends before."""
        ...

    def read_many(self, names: Sequence[str]) -> Iterator[bytes]:
        """`read` of each, in order."""
        ...

    def size(self, name: str) -> int: ...

    def modified(self, name: str) -> float:
        """When a file, or a folder itself, changed last: seconds since 1970."""
        ...

    def replace(self, name: str, content: bytes) -> None:
        """Writes or replaces a file, whole or not at all."""
        ...

    def create(self, name: str, content: bytes) -> bool:
        """Writes a file unless there is one: True for exactly one of all who try."""
        ...

    def write_tree(self, files: Mapping[str, bytes]) -> None:
        """Writes new files, durable on return; interrupted, it leaves some of them."""
        ...

    def files(self, folder: str) -> list[FileInfo]:
        """All files below a folder, by name; none if there is no such folder."""
        ...

    def children(self, folder: str) -> list[str]:
        """Names of the files and folders directly inside a folder, sorted."""
        ...

    def remove(self, name: str) -> None:
        """Removes a file, or a folder with all that is in it. What is not there is fine."""
        ...

    def make_folders(self, names: Sequence[str]) -> None:
        """Folders that exist even while they are empty, where a place has such."""
        ...


def open_place(location: Location | Place) -> Place:
    """The place at `location`; nothing is created, and S3 is not asked yet.

    Raises:
        ValueError: it is a URL, but not "s3://bucket/prefix".
    """
    if not isinstance(location, str | PurePath):
        return location
    text = str(location)
    if text.startswith(S3_SCHEME):
        bucket, _slash, prefix = text.removeprefix(S3_SCHEME).partition("/")
        if not bucket:
            raise ValueError(f"location {text!r} names no bucket; write s3://bucket/prefix")
        return S3Place(bucket, prefix.strip("/"))
    if "://" in text or text.startswith("s3:/"):
        raise ValueError(f"location {text!r}; expected a folder or s3://bucket/prefix")
    return LocalPlace(Path(location))


class LocalPlace:
    """A folder. Needs hard links and an atomic rename, as local disks, NFS and Lustre have them."""

    n_parallel = 1

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def __str__(self) -> str:
        return str(self.root)

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        with (self.root / name).open("rb", buffering=0) as file:
            pieces = []
            while start < stop and (piece := os.pread(file.fileno(), stop - start, start)):
                pieces.append(piece)
                start += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read_many(self, names: Sequence[str]) -> Iterator[bytes]:
        return map(self.read, names)

    def size(self, name: str) -> int:
        return (self.root / name).stat().st_size

    def modified(self, name: str) -> float:
        return (self.root / name).stat().st_mtime

    def replace(self, name: str, content: bytes) -> None:
        write_file(self.root / name, content)

    def create(self, name: str, content: bytes) -> bool:
        return create_file(self.root / name, content)

    def write_tree(self, files: Mapping[str, bytes]) -> None:
        folders = {self.root / above for name in files for above in PurePosixPath(name).parents}
        with full_device_explained(self.root / next(iter(files), "")):
            for folder in sorted(folders):
                folder.mkdir(exist_ok=True)
            with ThreadPoolExecutor(_WRITERS) as pool:  # one fsync costs what many at once do
                paths = [self.root / name for name in files]
                list(pool.map(write_synced, paths, files.values()))
            for folder in sorted(folders, reverse=True):
                sync_folder(folder)

    def files(self, folder: str) -> list[FileInfo]:
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
        try:
            return sorted(path.name for path in (self.root / folder).iterdir())
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> None:
        path = self.root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def make_folders(self, names: Sequence[str]) -> None:
        try:
            with full_device_explained(self.root):
                for name in names:
                    (self.root / name).mkdir(parents=True, exist_ok=True)
                sync_folder(self.root)
                sync_folder(self.root.parent)
        except OSError as error:
            raise StorageError(
                f"cannot make a store at {self.root} ({error.strerror}); choose another folder"
            ) from error


class S3Place:
    """A prefix of a bucket. S3 has no folders: a name is there when an object is."""

    n_parallel = _S3_REQUESTS

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket, self.prefix = bucket, prefix
        self._opened: S3Store | None = None

    def __str__(self) -> str:
        return f"{S3_SCHEME}{self.bucket}/{self.prefix}".rstrip("/")

    def __getstate__(self) -> tuple[str, str]:
        return self.bucket, self.prefix  # a connection does not travel to other processes

    def __setstate__(self, state: tuple[str, str]) -> None:
        self.bucket, self.prefix = state
        self._opened = None

    @property
    def _store(self) -> S3Store:
        if self._opened is None:
            from obstore.store import S3Store

            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
            self._opened = S3Store(
                self.bucket,
                prefix=self.prefix or None,
                endpoint=endpoint,
                client_options={"allow_http": bool(endpoint and endpoint.startswith("http://"))},
            )
        return self._opened

    def read(self, name: str) -> bytes:
        import obstore

        with self._explained(name):
            return bytes(obstore.get(self._store, name).bytes())

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        import obstore

        if stop <= start:
            return b""
        with self._explained(name):
            return bytes(obstore.get_range(self._store, name, start=start, end=stop))

    def read_many(self, names: Sequence[str]) -> Iterator[bytes]:
        with ThreadPoolExecutor(_S3_REQUESTS) as pool:
            yield from pool.map(self.read, names)

    def size(self, name: str) -> int:
        import obstore

        with self._explained(name):
            return int(obstore.head(self._store, name)["size"])

    def modified(self, name: str) -> float:
        import obstore

        with self._explained(name):
            return float(obstore.head(self._store, name)["last_modified"].timestamp())

    def replace(self, name: str, content: bytes) -> None:
        import obstore

        with self._explained(name):
            obstore.put(self._store, name, content)

    def create(self, name: str, content: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with self._explained(name):
            try:
                obstore.put(self._store, name, content, mode="create", use_multipart=False)
            except AlreadyExistsError:
                # A request that was repeated because its answer was lost meets its own object.
                return bytes(obstore.get(self._store, name).bytes()) == content
        return True

    def write_tree(self, files: Mapping[str, bytes]) -> None:
        with ThreadPoolExecutor(_S3_REQUESTS) as pool:
            list(pool.map(self.replace, files.keys(), files.values()))

    def files(self, folder: str) -> list[FileInfo]:
        import obstore

        with self._explained(folder):
            listed = obstore.list(self._store, folder or None).collect()
        return sorted(
            (
                FileInfo(
                    info["path"],
                    int(info["size"]),
                    info["last_modified"].timestamp(),
                    str(info["e_tag"]),
                )
                for info in listed
            ),
            key=lambda info: info.name,
        )

    def children(self, folder: str) -> list[str]:
        import obstore

        with self._explained(folder):
            listed = obstore.list_with_delimiter(self._store, folder or None)
        paths = [*listed["common_prefixes"], *(info["path"] for info in listed["objects"])]
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def remove(self, name: str) -> None:
        import obstore

        names = [info.name for info in self.files(name)] or [name]
        with self._explained(name):
            try:
                obstore.delete(self._store, names)
            except FileNotFoundError:
                return

    def make_folders(self, names: Sequence[str]) -> None:
        """Nothing to make."""

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Turns a service's errors into one line; an absent object stays FileNotFoundError."""
        from obstore.exceptions import BaseError

        try:
            yield
        except BaseError as error:
            reason = str(error).split("\n")[0].split(", source:")[0][:300]
            raise StorageError(
                f"{self}/{name}: {type(error).__name__}: {reason}; check the bucket, the AWS_* "
                "variables (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...) and the network"
            ) from error
