"""JSON documents and numpy arrays, read as what anybody may have written there.

What is not a JSON object in UTF-8, is too long or too deep, has a name twice, NaN or infinity, is
refused in one line that names the file and the fix. What it must say is for its reader to check,
inside `understood` or by a pydantic model. Arrays are never unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from storage.errors import CorruptPartError, DocumentError, SourceError
from storage.files import WHOLE_BYTES, open_regular, read_bounded, reason_of

if TYPE_CHECKING:
    from pydantic import ConfigDict

    from storage.object_store import Place

MAX_DEPTH = 64
"""Objects and lists inside each other; the deepest of the records has 8."""

_LONGEST_REASON = 200

Model = TypeVar("Model")

STRICT: ConfigDict = {"strict": True, "extra": "forbid"}
"""Of every model of a document."""


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
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH):
        level = [
            inside
            for container in level
            for inside in (container.values() if type(container) is dict else container)
            if type(inside) in (dict, list)
        ]
    if level:
        raise DocumentError(f"{where} is nested more than {MAX_DEPTH} deep; {fix}")
    return found


def seal_of(body: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object with sorted keys and no spaces; ValueError if it has infinity."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def read_sealed(place: Place, name: str, seal: str, fix: str) -> dict[str, Any]:
    """The JSON object in the file `name` of a store, less its field `seal`, which has to be the
    seal of the others. Raises FileNotFoundError, NotADirectoryError, and CorruptPartError if it
    cannot be read, is no such document, or was edited."""
    where = f"{place}/{name}"
    try:
        body = parse_document(place.read(name), where, fix)
        if missing := {"schema", seal} - body.keys():
            kind = seal.removesuffix("_sha256")
            raise DocumentError(f"{where} is not a {kind} (it has no {min(missing)}); {fix}")
        expected = body.pop(seal)
        if expected != seal_of(body):
            raise ValueError
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise CorruptPartError(f"{where} cannot be read ({reason_of(error)}); {fix}") from error
    except DocumentError as error:
        raise CorruptPartError(str(error)) from error
    except ValueError as error:  # or infinity, which no writer seals
        raise CorruptPartError(
            f"{where} was edited after it was written ({seal} differs); {fix}"
        ) from error
    return body


def model_of(model: Callable[..., Model], body: Mapping[str, Any], where: str, fix: str) -> Model:
    """`model` of the fields in `body`, which was found at `where`. Raises CorruptPartError with the
    first fault that pydantic finds."""
    import pydantic

    try:
        return model(**body)
    except pydantic.ValidationError as error:
        fault = error.errors(include_url=False)[0]
        said = str(fault.get("ctx", {}).get("error", ""))  # of a validator of ours
        value = repr(fault["input"])
        value = value if len(value) <= 80 else f"{value[:77]}..."
        said = said or f"{'.'.join(map(str, fault['loc']))} is {value}: {fault['msg']}"
        raise CorruptPartError(f"{where} is not of this schema: {said}; {fix}") from error


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


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


def read_array(path: Path, what: str, *, at_most: int | None = None) -> npt.NDArray[Any]:
    """The array in `path`, an .npy file, of any shape and type but objects.

    `what` it should be, and `at_most` so many numbers, for the errors. Raises SourceError if the
    file is not there, is no regular file, none that numpy.save made, needs pickle, holds several
    arrays (.npz), or fewer numbers than its header announces.
    """
    try:
        with open_regular(path) as file:
            if zipfile.is_zipfile(file):
                raise SourceError(f"{path} holds several arrays; save {what} alone, as .npy")
        with np.errstate(over="raise"):  # of a shape beyond all files
            mapped = np.lib.format.open_memmap(path, mode="r")  # takes no memory yet
        if at_most is not None and mapped.size > at_most:
            raise ValueError(f"its shape is {mapped.shape}, more than {at_most:,} numbers")
        return np.array(mapped)
    except FileNotFoundError:
        raise SourceError(f"{path} is not there; it should hold {what}") from None
    except (OSError, ValueError, ArithmeticError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SourceError(
            f"{path} is not an array that can be read safely ({reason}); save {what} with "
            "numpy.save as numbers, without pickle"
        ) from error
