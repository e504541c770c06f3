"""Folders of pictures: which folders are splits and which classes, what else is there, and the
pictures of a split as images of one size."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from storage.errors import SourceError, listed, shown
from storage.sources.pictures import (
    AS_IMAGE_FOLDER,
    IMAGE_FOLDER,
    SUFFIXES,
    Decoding,
    Reading,
    read_picture_files,
)

TreeKind = Literal["auto", "classes", "splits"]
Kind = Literal["train", "test", "heldout", "val", "all"]
"""Kinds of splits; "all" is a tree that has none."""
Wanted = Literal["all", "train", "heldout"]
Classes = dict[str, list[Path]]
"""Files by class; under "" where there are no class folders."""

HELD_OUT: tuple[Kind, ...] = ("test", "heldout", "val")
"""The first of these that is there is the held-out split."""
_WORDS: dict[str, Kind] = {
    **dict.fromkeys(("train", "training", "trainset", "trainval"), "train"),
    **dict.fromkeys(("test", "testing", "testset"), "test"),
    **dict.fromkeys(("heldout", "holdout", "eval", "evaluation"), "heldout"),
    **dict.fromkeys(("val", "valid", "validation", "valset", "dev", "devset"), "val"),
}
_FLAT = ""


@dataclass(frozen=True)
class Taken:
    """Files of a split. `labels` index `class_names`, and are None where there are no class
    folders. `said`: what was taken and what left aside, for people."""

    files: list[Path]
    labels: list[int] | None
    class_names: tuple[str, ...]
    said: dict[str, str]


@dataclass(frozen=True)
class Tree:
    """Pictures below a folder by split and class; `folders` are the splits' own. `said`: how it was
    understood, for people."""

    root: Path
    parts: Mapping[Kind, Classes]
    folders: Mapping[Kind, Path]
    walk: Walk
    said: dict[str, str] = field(default_factory=dict)

    @property
    def is_divided(self) -> bool:
        """True if folders tell training images from held-out ones."""
        return len(self.parts) > 1

    def take(self, wanted: Wanted, *, beside: Wanted | None = None) -> Taken:
        """The pictures of a split. `beside`: another one that is read for itself, and so not left
        aside. Raises SourceError if the split is not there, or has no pictures."""
        kinds = self._kinds(wanted)
        entries = [
            (file, name)
            for kind in kinds
            for name, files in sorted(self.parts[kind].items())
            for file in files
        ]
        if not entries:
            other = "".join(f", but {text}" for text in self.walk.said.values())
            raise SourceError(
                f"{self.root} has no pictures (.png, .jpg, .webp, ...){other}; give "
                "PATH/CLASS/*.jpg, or such trees in PATH/train and PATH/test"
            )
        labelled = not any(name == _FLAT for _file, name in entries)
        read = {*kinds, *(self._kinds(beside) if beside else ())}
        # Classes of the training split, as ImageFolder numbers them, and those of others alone.
        own = {*self.parts.get("train", ())} - {_FLAT}
        every = {name for kind in read for name in self.parts[kind]} - {_FLAT}
        names, extra = (sorted(own), sorted(every - own)) if own else (sorted(every), [])
        said = self._said(kinds, read)
        if labelled and extra:
            said["classes not in train"] = listed([shown(name) for name in extra])
        endings = [file.suffix.lower() for file, _name in entries]
        if beyond := counted(ending for ending in endings if ending not in IMAGE_FOLDER):
            said["unlike ImageFolder"] = f"read, though by ImageFolder passed over: {beyond}"
        place = {name: number for number, name in enumerate([*names, *extra])}
        return Taken(
            files=[file for file, _name in entries],
            labels=[place[name] for _file, name in entries] if labelled else None,
            class_names=tuple(map(shown, place)) if labelled else (),
            said=said,
        )

    def _kinds(self, wanted: Wanted) -> list[Kind]:
        if wanted == "all" or not self.is_divided:
            return list(self.parts)
        if wanted == "heldout":
            return [kind for kind in HELD_OUT if kind in self.parts][:1]
        if "train" not in self.parts:
            raise SourceError(
                f"{self.root} has {_named(self.folders.values())}, but no folder train; give the "
                f"one that is meant, such as folder:{next(iter(self.folders.values()))}"
            )
        return ["train"]

    def _said(self, kinds: Sequence[Kind], read: Collection[Kind]) -> dict[str, str]:
        if "all" in self.parts:
            return self.said | self.walk.said
        aside = {kind: folder for kind, folder in self.folders.items() if kind not in read}
        said = {"taken": self._counted(kinds)}
        if aside:
            said["left aside"] = self._counted(aside)
        others = [folder for kind, folder in self.folders.items() if kind not in kinds]
        passed = [
            (path, why)
            for path, why in self.walk.passed
            if not any(path.is_relative_to(folder) for folder in others)
        ]
        return said | self.said | passed_over(passed)

    def _counted(self, kinds: Iterable[Kind]) -> str:
        counts = {kind: sum(map(len, self.parts[kind].values())) for kind in kinds}
        return ", ".join(
            f"{_named([self.folders[kind]])} ({_pictures(n)})" for kind, n in counts.items()
        )


def read_tree(root: Path, how: TreeKind = "auto") -> Tree:
    """Find the splits and classes below a folder. Raises SourceError, naming the folders, where
    pictures lie beside class folders, or splits beside or inside classes."""
    if not root.is_dir():
        raise SourceError(f"{root} is not a folder; give folder:PATH with PATH/CLASS/*.jpg inside")
    walk = pictures_below(root)
    groups = _grouped(root, walk.files)
    named = [name for name in groups if name != _FLAT]
    splits = {} if how == "classes" else _splits(named)
    n_others = sum(len(files) for name, files in groups.items() if name not in splits)
    others = _named(Path(name) for name in named if name not in splits) or "no folder"
    said: dict[str, str] = {}
    both = {"train"} < {*splits.values()} and others == "no folder"
    if splits and n_others and how == "auto" and not both:
        if not _is_class(splits, groups, root):
            raise SourceError(
                f"{root} has {_named(map(Path, splits))} beside {_pictures(n_others)} in {others}: "
                "add ?tree=splits to read the former alone, or ?tree=classes if all are classes"
            )
        said["no split"] = (
            f"{_named(map(Path, splits))}, a class like the others, which have no folders either"
        )
        splits = {}
    if how == "splits" and not splits:
        raise SourceError(f"{root} has no folders train and test; leave out ?tree=splits")
    if not splits:
        return Tree(root, {"all": _classes(root, walk.files, how, said)}, {"all": root}, walk, said)
    parts: dict[Kind, Classes] = {}
    folders_of: dict[Kind, Path] = {}
    for name, kind in splits.items():
        if kind in parts:
            raise SourceError(
                f"{root} has two folders of one split, {folders_of[kind].name} and {name}; merge "
                "or rename them, or give one as folder:PATH"
            )
        folders_of[kind] = root / name
        parts[kind] = _classes(root / name, groups[name], how, said, within=kind)
    if n_others:
        said["not read"] = f"{_pictures(n_others)} in {others}, beside the splits"
    return Tree(root, parts, folders_of, walk, said)


def _classes(
    folder: Path, files: list[Path], how: TreeKind, said: dict[str, str], within: Kind | None = None
) -> Classes:
    """Classes in the root of a tree, or in a split of it; names of one spelling in two Unicode
    forms are one."""
    groups = _grouped(folder, files)
    loose = groups.pop(_FLAT, [])
    if loose and groups:
        raise SourceError(
            f"{folder} has {_pictures(len(loose))} beside its class folders, {loose[0].name} the "
            "first; move them into class folders"
        )
    if loose or not groups:
        return {_FLAT: loose} if loose else {}
    first = next(iter(groups))
    names = (folder.name.casefold(), *(word for word, kind in _WORDS.items() if kind == within))
    if within and len(groups) == 1 and first.casefold() in names:
        return _classes(folder / first, files, how, said, within)  # train/train/*.jpg
    if how != "classes":
        splits = _splits(groups)
        if within and splits and not _is_class(splits, groups, folder):
            raise _inside(folder, splits)
        inside: dict[Path, set[str]] = defaultdict(set)  # folders by the one that they are in
        depth = len(folder.parts) + 1
        for parent in {file.parent for own in groups.values() for file in own}:
            for path in (parent, *parent.parents)[: len(parent.parts) - depth]:
                inside[path.parent].add(path.name)
        for above, names_inside in inside.items():
            splits = _splits(sorted(names_inside))
            whole = len(splits) == len(names_inside)
            if splits and (whole or len({*splits.values()}) > 1):
                raise _inside(above, splits)
    classes: Classes = defaultdict(list)
    for name, own in groups.items():
        classes[unicodedata.normalize("NFC", name)] += own
    if len(classes) < len(groups):
        twice = len(groups) - len(classes)
        said["one class"] = f"folders whose names differ in Unicode form alone ({twice:,})"
    return dict(classes)


def _inside(above: Path, splits: Iterable[str]) -> SourceError:
    return SourceError(
        f"{above} has {_named(map(Path, splits))}, inside what would be a class: give "
        f"folder:{above}, put splits above classes, or add ?tree=classes if they are none"
    )


def _grouped(folder: Path, files: Iterable[Path]) -> dict[str, list[Path]]:
    """Files by the folder in `folder` that they are in, by its name."""
    groups: dict[str, list[Path]] = defaultdict(list)
    depth = len(folder.parts)
    for file in files:
        inside = file.parts[depth:]
        groups[inside[0] if len(inside) > 1 else _FLAT].append(file)
    return dict(groups)


def _splits(names: Iterable[str]) -> dict[str, Kind]:
    """Names of splits: train and its like, and pairs as seg_train and seg_test."""
    found = [(name, kind, rest) for name in names for kind, rest in _words(name)]
    kinds: dict[tuple[str, ...], set[Kind]] = defaultdict(set)
    for _name, kind, rest in found:
        kinds[rest].add(kind)
    return {
        name: kind
        for name, kind, rest in found
        if not rest or ("train" in kinds[rest] and len(kinds[rest]) > 1)
    }


def _words(name: str) -> list[tuple[Kind, tuple[str, ...]]]:
    """Each word of a name that a split is called by, with the others around it."""
    text = re.sub(r"(?i)(held|hold)[^a-z0-9]out", r"\1out", name)
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+|[^\W\d_]+", text)
    lower = [word.casefold() for word in words]
    return [
        (_WORDS[word], (*lower[:k], "", *lower[k + 1 :]) if len(lower) > 1 else ())
        for k, word in enumerate(lower)
        if word in _WORDS
    ]


def _is_class(splits: Collection[str], groups: Mapping[str, list[Path]], folder: Path) -> bool:
    """True if one folder is called like a split, but lies among classes: pictures are directly in
    each of several folders, and no other is called by a split's word."""
    flat = all(file.parent.parent == folder for files in groups.values() for file in files)
    return flat and len(groups) > len(splits) == 1 == sum(bool(_words(name)) for name in groups)


def _named(folders: Iterable[Path]) -> str:
    return listed([f"{shown(folder.name)}/" for folder in folders])


def _pictures(n: int) -> str:
    return f"{n:,} picture{'s' if n != 1 else ''}"


@dataclass
class Walk:
    """Files that are named like pictures, sorted, and what was passed over, with a reason each."""

    files: list[Path] = field(default_factory=list)
    passed: list[tuple[Path, str]] = field(default_factory=list)

    @property
    def said(self) -> dict[str, str]:
        """A fact for people of what was passed over, if anything was."""
        return passed_over(self.passed)


def pictures_below(folder: Path) -> Walk:
    """All that are not hidden. Links to folders are followed, but for those that lead back to a
    folder above them; dangling ones with a picture's name are among the files. Raises SourceError
    for a folder that cannot be listed."""
    walk = Walk()

    def has_picture(folder: Path, above: frozenset[tuple[int, int]]) -> bool:
        try:
            found, entries = folder.stat(), sorted(folder.iterdir())
        except OSError as error:
            raise SourceError(f"{folder} cannot be listed ({error.strerror}); mend it") from error
        inode = (found.st_dev, found.st_ino)
        if inode in above:
            walk.passed.append((folder, "link back to a folder above"))
            return True
        any_picture = False
        for path in entries:
            ending, is_folder = path.suffix.lower(), path.is_dir()
            if path.name.startswith("."):
                if is_folder or ending in SUFFIXES:
                    walk.passed.append((path, "hidden"))
            elif is_folder and has_picture(path, above | {inode}):
                any_picture = True
            elif is_folder:
                walk.passed.append((path, "folder without pictures"))
            elif ending in SUFFIXES:
                walk.files.append(path)
                any_picture = True
            elif path.is_symlink() and not path.exists():
                walk.passed.append((path, "dangling link"))
            else:
                walk.passed.append((path, shown(ending) or "no ending"))
        return any_picture

    has_picture(folder, frozenset())
    walk.files.sort()
    return walk


def passed_over(passed: Iterable[tuple[Path, str]]) -> dict[str, str]:
    """{"passed over": ".heic (3), hidden (2)"}; nothing of nothing."""
    text = counted(reason for _path, reason in passed)
    return {"passed over": text} if text else {}


def counted(reasons: Iterable[str]) -> str:
    """`.heic (3), hidden (2)`, the most frequent first."""
    counts = Counter(reasons)
    return listed([f"{reason} ({n:,})" for reason, n in counts.most_common()], 8)


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
    classes = {name for of_split in tree.parts.values() for name in of_split} - {_FLAT}
    if beside is not None and taken.labels is None and classes:
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
