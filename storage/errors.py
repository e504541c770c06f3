"""What can go wrong with stored data, named by what the caller does about it.

Every message is one line that names the value and the fix, so that a command can print it as is.
"""

from __future__ import annotations


class StorageError(Exception):
    """Anything below; show the message and stop."""


class SourceError(StorageError):
    """The images cannot be read as asked: fix the folder or the `--data` argument."""


class StoreMismatchError(StorageError):
    """What is there was written with other settings or another version: use another folder."""


class CorruptPartError(StorageError):
    """Stored bytes are not what was written: verify, remove the part, generate it again."""


class StoreFullError(StorageError):
    """The device is full: make room and run the same command again; nothing is half written."""


class UnsettledError(StorageError):
    """A request failed without an answer and may still take effect: look again, then repeat it."""
