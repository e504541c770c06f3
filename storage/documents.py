"""JSON documents, read as what anybody may have written there.

What is not a JSON object in UTF-8, is too long or too deep, has a name twice, NaN or infinity, is
refused in one line that names the file and the fix. What it must say is for its reader to check,
inside `understood`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from storage.errors import DocumentError
from storage.files import WHOLE_BYTES, read_bounded, reason_of

MAX_DEPTH = 64
"""Objects and lists inside each other; the deepest of the records has 8."""

_CONTAINERS = {dict, list}
_LONGEST_REASON = 200


def read_document(path: Path, fix: str) -> dict[str, Any]:
    """The JSON object in the file `path`, of at most `WHOLE_BYTES`. Raises FileNotFoundError,
    OSError for a name that no file can have, and DocumentError if it cannot be read, is no regular
    file, or as `parse_document`."""
    try:
        content = read_bounded(path, WHOLE_BYTES)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise
        raise DocumentError(f"{path} cannot be read ({reason_of(error)}); {fix}") from error
    return parse_document(content, str(path), fix)


def parse_document(content: bytes, where: str, fix: str) -> dict[str, Any]:
    """The JSON object in `content`, which was found at `where`; `fix` ends the message. Raises
    DocumentError if it is not JSON in UTF-8, not an object, too deep, has NaN, infinity, a lone
    surrogate, or a name twice in one object."""
    try:
        found = json.loads(
            content.decode("utf-8-sig"),
            object_pairs_hook=_unambiguous,
            parse_constant=_not_json,
        )
        if b"\\" in content:  # half a character stands for a byte of a file's name, or is none
            json.dumps(found, ensure_ascii=False).encode("utf-8", "surrogateescape")
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{where} is not JSON ({_short(error)}); {fix}") from error
    if not isinstance(found, dict):
        kind = "null" if found is None else f"a {type(found).__name__}"
        raise DocumentError(f"{where} is {kind}, expected a JSON object; {fix}")
    if _is_deeper(found, MAX_DEPTH):
        raise DocumentError(f"{where} is nested more than {MAX_DEPTH} deep; {fix}")
    return found


def seal_of(body: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object with sorted keys and no spaces; ValueError if it has infinity."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


@contextlib.contextmanager
def understood(where: str | Path, fix: str) -> Iterator[None]:
    """Turns what goes wrong on taking a document apart (a missing name, a value of another type or
    out of range) into DocumentError with the document's name and the fix."""
    try:
        yield
    except DocumentError:
        raise
    except KeyError as error:
        raise DocumentError(f"{where} has no {_short(error)}; {fix}") from error
    except (ValueError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise DocumentError(f"{where} is not as it was written ({_short(error)}); {fix}") from error


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _value in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} stands twice in one object")
    return found


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"it has {constant}")


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            inside
            for container in level
            for inside in (container.values() if type(container) is dict else container)
            if type(inside) in _CONTAINERS
        ]
        if not level:
            return False
    return True


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."
