"""A store below a prefix of an S3 bucket, through obstore: an object is whole and durable once its
PUT has answered, and the exclusive create is a conditional PUT (`If-None-Match: *`)."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError
from obstore.store import S3Store

from storage.errors import StorageError, UnsettledError
from storage.files import S3_SCHEME, WHOLE_BYTES, FileInfo, Tree, check_size, pieces_of


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
