"""Makes the calls fail by which a store changes: the n-th of them, or that one and all later ones.

A place of files changes by opening, writing, syncing, linking, renaming and making folders; one on
S3 by putting objects. A full device refuses these before they are made. Death comes before or after
them, and before or after removals, too: a process that dies does not clean up.
"""

from __future__ import annotations

import io
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

import obstore
import pytest

GROWTH = ("fsync", "link", "mkdir", "replace")
REMOVALS = ("unlink", "rmdir")


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, and `Calls` lets nothing be done after it."""


class Calls:
    """While `patch` lasts, counts the calls, and raises `error()` from number `at` on.

    With `death` every call counts twice, before it is made and after, and so do removals; else
    once. `once` fails that moment only. `n` is the number of moments so far. A write that fails
    has written half. Making a folder that is there changes nothing and does not count.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        error: Callable[[], BaseException],
        *,
        at: float = float("inf"),
        once: bool = False,
        death: bool = False,
    ) -> None:
        self._error, self._at, self._once, self._death = error, at, once, death
        self._count, self._lock, self.n = itertools.count(), threading.Lock(), 0
        for name in GROWTH + (REMOVALS if death else ()):
            patch.setattr(os, name, self._around(getattr(os, name)))
        for name in ("put", *(("delete",) if death else ())):
            patch.setattr(obstore, name, self._around(getattr(obstore, name)))
        patch.setattr(io, "open", self._opening(io.open))

    def moment(self) -> None:
        """Counts one, and fails if it is time."""
        with self._lock:
            number = next(self._count)
            self.n = number + 1
        if number == self._at or (number > self._at and not self._once):
            raise self._error()

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if function.__name__ == "mkdir" and os.path.isdir(args[0]):  # noqa: PTH112
                return function(*args, **kwargs)
            self.moment()
            result = function(*args, **kwargs)
            if self._death:
                self.moment()
            return result

        return call

    def _opening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not set(mode) & set("wxa+"):
                return function(file, mode, *args, **kwargs)
            self.moment()
            return _File(function(file, mode, *args, **kwargs), self)

        return call


class _File:
    """A file that is written to, whose writes count."""

    def __init__(self, file: Any, calls: Calls) -> None:
        self._file, self._calls = file, calls

    def write(self, content: Any) -> int:
        try:
            self._calls.moment()
        except BaseException:
            self._file.write(memoryview(content)[: len(content) // 2])
            raise
        n_written: int = self._file.write(content)
        return n_written

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        self._file.__exit__(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
