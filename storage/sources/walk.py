"""Picture files below a folder, behind links, too, and what else is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from storage.errors import SourceError, listed, shown
from storage.sources.pictures import SUFFIXES

Inode = tuple[int, int]


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
    _walk(folder, walk, frozenset())
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


def _walk(folder: Path, walk: Walk, above: frozenset[Inode]) -> bool:
    """True if there is a picture."""
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
        ending, hidden, is_folder = path.suffix.lower(), path.name.startswith("."), path.is_dir()
        if hidden and (is_folder or ending in SUFFIXES):
            walk.passed.append((path, "hidden"))
        elif hidden:
            continue
        elif is_folder:
            if not _walk(path, walk, above | {inode}):
                walk.passed.append((path, "folder without pictures"))
            else:
                any_picture = True
        elif ending in SUFFIXES:
            walk.files.append(path)
            any_picture = True
        elif path.is_symlink() and not path.exists():
            walk.passed.append((path, "dangling link"))
        else:
            walk.passed.append((path, shown(ending) or "no ending"))
    return any_picture
