"""Errors of stored data, named by what the caller does about them; each message is one line."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of what steers a terminal, turns the direction of text, ends a line, or
(surrogates) stands for a byte of a file's name that is not UTF-8."""


def shown(text: str, *, keep: str = "") -> str:
    """`text` with all that cannot be seen, or would do something else, as a backslash and its code.
    ESC[2J in a file's name would clear the screen that prints it, and a byte that is not UTF-8
    cannot be printed at all. Characters in `keep` stay as they are."""
    if text.isprintable():
        return text
    return "".join(
        c
        if c in keep or unicodedata.category(c) not in _UNSEEN
        else f"\\x{ord(c) - 0xDC00:02x}"
        if "\udc80" <= c <= "\udcff"  # how Python calls a byte that is not UTF-8
        else c.encode("unicode_escape").decode()
        for c in text
    )


def listed(names: Sequence[str], n: int = 5, *, between: str = ", ", what: str = "") -> str:
    """`a, b, c and 37 more`; `what` follows "more"."""
    more = len(names) - n
    return between.join(names[:n]) + (f" and {more:,} more{what}" if more > 0 else "")


class StorageError(Exception):
    """Anything below; show the message and stop."""


class SourceError(StorageError):
    """The images cannot be read as asked: fix the folder or the `--data` argument."""


class WeightsError(SourceError):
    """The weights cannot be used as asked: fix the file or the `--weights` argument."""


class StoreMismatchError(StorageError):
    """A store that was written with other settings or another version: use another folder."""


class CorruptPartError(StorageError):
    """Stored bytes are not what was written: verify, remove the part, generate it again."""


class StoreFullError(StorageError):
    """The device is full: make room and run the same command again; nothing is half written."""


class UnsettledError(StorageError):
    """A request failed without an answer and may still take effect: look again, then repeat it."""


class DocumentError(StorageError, ValueError):
    """A JSON document is not what its reader understands: mend, restore or remove that file."""
