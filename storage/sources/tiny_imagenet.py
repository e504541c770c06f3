"""Tiny ImageNet: 200 classes of ImageNet at 64 x 64, as it comes (Stanford's CS231n).

The folder tiny-imagenet-200 has the classes in `wnids.txt`, their names in `words.txt`, 500
training pictures each in `train/WNID/images`, and 50 validation pictures each in `val/images`,
whose classes `val/val_annotations.txt` gives. Those in `test` have no labels and are not read.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from storage.errors import SourceError
from storage.files import read_bounded
from storage.sources.pictures import is_picture

TINY_IMAGENET_FOLDER = "tiny-imagenet-200"
MAX_TEXT = 2**26
TINY_IMAGENET_SITE = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"


def tiny_imagenet_files(path: Path, split: str) -> tuple[list[tuple[Path, int]], tuple[str, ...]]:
    """The split's picture files with their classes, and the names of the classes.

    `path` is the folder tiny-imagenet-200 or the one that it is in. Classes are numbered as in
    `wnids.txt`, and called by the first of their words. Raises SourceError if a file is missing, or
    not what Tiny ImageNet has.
    """
    root = _root(path)
    wnids = _lines(root / "wnids.txt")
    twice = [wnid for wnid, count in Counter(wnids).items() if count > 1]
    if twice:
        raise SourceError(f"{root / 'wnids.txt'} has {twice[0]} twice; {_unpack_again()}")
    names = _names(root, wnids)
    files = _validation_files if split == "heldout" else _training_files
    return files(root, {wnid: label for label, wnid in enumerate(wnids)}), names


def _root(path: Path) -> Path:
    if not path.is_dir():
        raise SourceError(
            f"{path} is not a folder; give tiny-imagenet:PATH to the folder {TINY_IMAGENET_FOLDER} "
            f"in the unpacked {TINY_IMAGENET_SITE}"
        )
    inside = path / TINY_IMAGENET_FOLDER
    return inside if inside.is_dir() else path


def _names(root: Path, wnids: list[str]) -> tuple[str, ...]:
    """The first words of each class; two classes of the same ones are told apart by their ids."""
    words = dict(line.partition("\t")[::2] for line in _lines(root / "words.txt"))
    missing = [wnid for wnid in wnids if not words.get(wnid, "").strip()]
    if missing:
        raise SourceError(
            f"{root / 'words.txt'} has no words for {missing[0]} (of {len(missing)} such classes); "
            f"{_unpack_again()}"
        )
    names = [words[wnid].partition(",")[0].strip() for wnid in wnids]
    count = Counter(names)
    return tuple(
        f"{name} ({wnid})" if count[name] > 1 else name
        for name, wnid in zip(names, wnids, strict=True)
    )


def _training_files(root: Path, labels: dict[str, int]) -> list[tuple[Path, int]]:
    files = []
    for wnid, label in labels.items():
        folder = root / "train" / wnid / "images"
        found = sorted(folder.iterdir()) if folder.is_dir() else []
        pictures = [file for file in found if is_picture(file, below=folder)]
        if not pictures:
            raise SourceError(f"{folder} has no pictures; {_unpack_again()}")
        files += [(file, label) for file in pictures]
    return files


def _validation_files(root: Path, labels: dict[str, int]) -> list[tuple[Path, int]]:
    file, folder = root / "val" / "val_annotations.txt", root / "val" / "images"
    files = []
    for number, line in enumerate(_lines(file), start=1):
        name, wnid, *_box = [*line.split("\t"), ""]
        if wnid not in labels or "/" in name:
            raise SourceError(
                f"{file} has {line!r} in line {number}; expected the name of a picture and a class "
                f"of wnids.txt, with a tab between: {_unpack_again()}"
            )
        files.append((folder / name, labels[wnid]))
    missing = [path for path, _label in files if not path.is_file()]
    if missing:
        raise SourceError(
            f"{missing[0]} is missing (of {len(missing)} pictures of {file.name}); "
            f"{_unpack_again()}, or give folder:PATH if its pictures were sorted into class folders"
        )
    return files


def _lines(file: Path) -> list[str]:
    if not file.is_file():
        raise SourceError(f"{file.parent} has no {file.name}; {_unpack_again()}")
    try:
        text = read_bounded(file, MAX_TEXT).decode()
    except UnicodeDecodeError as error:
        raise SourceError(f"{file} is not text; {_unpack_again()}") from error
    except OSError as error:
        raise SourceError(f"{file} cannot be read ({error}); {_unpack_again()}") from error
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise SourceError(f"{file} is empty; {_unpack_again()}")
    return lines


def _unpack_again() -> str:
    return f"unpack {TINY_IMAGENET_SITE} again and give its folder {TINY_IMAGENET_FOLDER}"
