"""Files of a store's place, whichever it is (`storage.object_store`, `storage.s3`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from storage.files import Content

Tree = Mapping[str, Content] | Iterable[tuple[str, Content]]
"""Files by name; as pairs they may be made while earlier ones are being written."""

S3_SCHEME = "s3://"


@dataclass(frozen=True)
class FileInfo:
    """A file of a place: `modified` in seconds since 1970; another `version` is another content."""

    name: str
    size: int
    modified: float
    version: str


def tree_items(files: Tree) -> Iterable[tuple[str, Content]]:
    """The names and contents of `files`, in order."""
    return files.items() if isinstance(files, Mapping) else files
