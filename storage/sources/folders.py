"""A folder of pictures as images of one size, by split and class, and what is chosen with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.errors import SourceError, shown
from storage.sources.picture_files import Reading, read_picture_files
from storage.sources.pictures import AS_IMAGE_FOLDER, Decoding
from storage.sources.trees import TreeKind, Wanted, read_tree

CHOICES: Mapping[str, tuple[str, ...]] = {
    "orientation": ("stored", "exif"),
    "transparency": ("dropped", "black"),
    "tree": ("auto", "classes", "splits"),
}


@dataclass(frozen=True)
class PicturePath:
    """A folder, and how its pictures and its tree are read."""

    path: Path
    decoding: Decoding = AS_IMAGE_FOLDER
    tree: TreeKind = "auto"

    @classmethod
    def parse(cls, text: str, *, decoding: Decoding = AS_IMAGE_FOLDER) -> PicturePath:
        """`PATH`, or `PATH?orientation=exif&tree=classes`; `decoding` where the text says nothing.
        Raises SourceError for choices that there are not."""
        path, _question, query = text.rpartition("?")
        if not path or "=" not in query or Path(text).expanduser().exists():
            return cls(Path(text).expanduser(), decoding)
        chosen: dict[str, Any] = {}
        for assignment in query.split("&"):
            name, _equals, value = assignment.partition("=")
            if value not in CHOICES.get(name, ()):
                every = ", ".join(f"{name}={'|'.join(CHOICES[name])}" for name in CHOICES)
                raise SourceError(f"{shown(text)}: {assignment!r} is none of {every}")
            chosen[name] = value
        tree: TreeKind = chosen.pop("tree", "auto")
        return cls(Path(path).expanduser(), replace(decoding, **chosen), tree)


@dataclass(frozen=True, eq=False)
class FolderImages:
    """Images uint8 (n, 3, size, size), each once, of files of these paths in their folder; `times`
    is how often each was there. `labels` are None where there are no class folders."""

    images: npt.NDArray[np.uint8]
    names: tuple[str, ...]
    times: tuple[int, ...]
    labels: tuple[int, ...] | None
    class_names: tuple[str, ...]
    reading: Reading
    path: Path
    is_divided: bool


def read_folder(
    text: str,
    wanted: Wanted,
    size: int | tuple[int, int],
    *,
    skip_corrupt: bool,
    beside: Wanted | None = None,
    drawn: Callable[[int], list[int]] | None = None,
) -> FolderImages:
    """The pictures of a split, all of a folder that is not divided; `beside` is the split that is
    read for itself. `drawn` chooses some of so many files before they are read. Raises SourceError
    where there are none, or one cannot be read."""
    chosen = PicturePath.parse(text)
    tree = read_tree(chosen.path, chosen.tree)
    taken = tree.take(wanted, beside=beside)
    if beside is not None and taken.labels is None and tree.has_classes:
        raise SourceError(
            f"{chosen.path} has class folders in one split, but none for {wanted!r}; sort its "
            "pictures into the same class folders"
        )
    rows = list(range(len(taken.files))) if drawn is None else drawn(len(taken.files))
    found = read_picture_files(
        [taken.files[row] for row in rows],
        size,
        below=chosen.path,
        skip_corrupt=skip_corrupt,
        how=chosen.decoding,
        once=True,
        said=taken.said,
    )
    kept = [rows[place] for place in found.places]
    names = tuple(shown(taken.files[row].relative_to(chosen.path).as_posix()) for row in kept)
    times = np.ones(len(kept), np.int64)
    np.add.at(times, [row for _place, row in found.repeats], 1)
    reading, labels = found.reading, taken.labels
    if labels is not None:
        n = sum(labels[rows[place]] != labels[kept[row]] for place, row in found.repeats)
        if n:
            said = {"in two classes": f"{n:,} of these, counted in the first"}
            reading = replace(reading, said={**reading.said, **said})
    return FolderImages(
        images=found.images,
        names=names,
        times=tuple(times.tolist()),
        labels=None if labels is None else tuple(labels[row] for row in kept),
        class_names=taken.class_names,
        reading=reading,
        path=chosen.path,
        is_divided=tree.is_divided,
    )


def is_divided(text: str) -> bool:
    """True if a folder has splits of its own."""
    chosen = PicturePath.parse(text)
    return read_tree(chosen.path, chosen.tree).is_divided
