"""Place of a store's files: a local folder, or a prefix of an S3 bucket.

A store needs whole files, ranges of them, an exclusive create, and that what was written stays. A
folder gives the last two by hard links and fsync. On S3, reached through obstore, an object is
whole and durable once its PUT has answered, and the exclusive create is a conditional PUT
(`If-None-Match: *`). Credentials and the endpoint of an S3 service come from the usual `AWS_*`
variables.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath
from typing import TypeAlias

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError
from obstore.store import S3Store

from storage.errors import StorageError, UnsettledError
from storage.files import (
    S3_SCHEME,
    WHOLE_BYTES,
    FileInfo,
    Tree,
    check_size,
    full_device_explained,
    open_regular,
    pieces_of,
    read_bounded,
    sync,
    temporary_file,
    write_file,
    write_synced,
)

Location = str | Path

_WRITERS = 8
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}

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
        """Writes a file unless there is one: True for exactly one of all who try. The content is
        complete and synced before the name appears. Raises StorageError without hard links."""
        path = self.root / name
        with full_device_explained(path):
            path.parent.mkdir(exist_ok=True)  # a copied store may lack its empty folders
            with temporary_file(path.parent, content) as temporary:
                try:
                    os.link(temporary, path)
                except FileExistsError:
                    return False
                except OSError as error:
                    if error.errno not in _NO_LINKS:
                        raise
                    raise StorageError(
                        f"the file system of {path.parent} has no hard links ({error.strerror}); "
                        "use a store on a local disk, NFS or Lustre"
                    ) from error
            sync(path.parent)
        return True

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


@functools.lru_cache(maxsize=64)
def _opened(bucket: str, prefix: str, endpoint: str | None) -> S3Store:
    """A connection of this process; a place travels to others without it."""
    return S3Store(
        bucket,
        prefix=prefix or None,
        endpoint=endpoint,
        client_options={"allow_http": bool(endpoint and endpoint.startswith("http://"))},
    )


class S3Place:
    """A prefix of a bucket. S3 has no folders: a name is there when an object is."""

    n_parallel = 16

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket, self.prefix = bucket, prefix

    def __str__(self) -> str:
        return f"{S3_SCHEME}{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def _store(self) -> S3Store:
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        return _opened(self.bucket, self.prefix, endpoint)

    def read(self, name: str, limit: int = WHOLE_BYTES) -> bytes:
        with self._explained(name):
            found = obstore.get(self._store, name)
            check_size(int(found.meta["size"]), limit)
            return bytes(found.bytes())

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        if stop <= start:
            return b""
        with self._explained(name):
            try:
                return bytes(obstore.get_range(self._store, name, start=start, end=stop))
            except GenericError:
                if start < obstore.head(self._store, name)["size"]:  # else 416, beyond its end
                    raise
                return b""

    def modified(self, name: str) -> float:
        with self._explained(name):
            return float(obstore.head(self._store, name)["last_modified"].timestamp())

    def replace(self, name: str, content: bytes) -> None:
        with self._explained(name):
            obstore.put(self._store, name, content)

    def create(self, name: str, content: bytes) -> bool:
        try:
            obstore.put(self._store, name, content, mode="create", use_multipart=False)
        except AlreadyExistsError:
            # A request that was repeated because its answer was lost meets its own object.
            return self.read(name) == content
        except (BaseError, FileNotFoundError) as error:
            raise UnsettledError(f"{self._reason(name, error)}; it may still be written") from error
        return True

    def write_tree(self, files: Tree) -> None:
        with ThreadPoolExecutor(self.n_parallel) as pool:
            whole = ((name, b"".join(pieces_of(content))) for name, content in files)
            for _ in pool.map(lambda file: self.replace(*file), whole):
                pass

    def files(self, folder: str) -> list[FileInfo]:
        with self._explained(folder):
            listed = obstore.list(self._store, folder or None).collect()
        found = [
            FileInfo(i["path"], int(i["size"]), i["last_modified"].timestamp(), str(i["e_tag"]))
            for i in listed
        ]
        return sorted(found, key=lambda info: info.name)

    def children(self, folder: str) -> list[str]:
        with self._explained(folder):
            listed = obstore.list_with_delimiter(self._store, folder or None)
        paths = [*listed["common_prefixes"], *(info["path"] for info in listed["objects"])]
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def remove(self, name: str) -> None:
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
        try:
            yield
        except FileNotFoundError as error:
            if "NoSuchBucket" not in str(error):
                raise
            raise StorageError(self._reason(name, error)) from error
        except BaseError as error:
            raise StorageError(self._reason(name, error)) from error

    def _reason(self, name: str, error: Exception) -> str:
        if "NoSuchBucket" in str(error):
            return (
                f"{self}/{name}: there is no bucket {self.bucket!r}; create it, or check the "
                "location and the AWS_* variables (AWS_ENDPOINT_URL, AWS_REGION, ...)"
            )
        reason = str(error).split("\n")[0].split(", source:")[0][:300]
        return (
            f"{self}/{name}: {type(error).__name__}: {reason}; check the bucket, the AWS_* "
            "variables (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...) and the network"
        )
