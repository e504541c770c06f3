"""Tensors and their description, saved so that both or neither of a version are found.

`save_checkpoint(folder, "last", tensors, meta)` writes `last-<first 16 of the SHA-256>.safetensors`
and then replaces `last.json`, which names that file and its SHA-256. A kill before that leaves the
old checkpoint, and a tensor file nobody names, which the next save removes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from storage.documents import read_document, understood
from storage.errors import CorruptPartError, DocumentError
from storage.files import full_device_explained, open_regular, write_file, write_json

_NAME = re.compile(r"[A-Za-z0-9_.]+")
_TENSORS = re.compile(r"[A-Za-z0-9_.]+-[0-9a-f]{16}\.safetensors")


def save_checkpoint(
    folder: Path, name: str, tensors: Mapping[str, npt.NDArray[Any]], meta: Mapping[str, Any]
) -> Path:
    """Replaces checkpoint `name` in `folder` (made if needed); returns the JSON file's path.

    `meta` is JSON (no NaN). Tensors may be of any numeric dtype and shape, scalars included. Raises
    ValueError for another `name` than letters, digits, "_" and ".", and StoreFullError, with the
    previous checkpoint as it was.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"name={name!r}; expected letters, digits, '_' and '.' only")
    with full_device_explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    content = save({key: np.array(value, order="C") for key, value in tensors.items()})
    digest = hashlib.sha256(content).hexdigest()
    file = folder / f"{name}-{digest[:16]}.safetensors"
    body = {"tensors": file.name, "sha256": digest, "meta": dict(meta)}
    json.dumps(body, allow_nan=False)  # refuses before anything is written
    write_file(file, content)
    write_json(folder / f"{name}.json", body)
    for other in folder.glob(f"{name}-*.safetensors"):
        if other != file:
            other.unlink(missing_ok=True)
    return folder / f"{name}.json"


def load_checkpoint(
    folder: Path, name: str
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]] | None:
    """Tensors and meta of checkpoint `name`, or None if there is none. Raises CorruptPartError if
    the files are not as they were written, or no regular files."""
    described = _described(folder, name)
    if described is None:
        return None
    file, digest, meta, fix = described
    try:
        with open_regular(file) as opened:
            content = opened.read()
    except OSError as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise CorruptPartError(f"{file}, which {name}.json names, {why}; {fix}") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise CorruptPartError(f"{file} is not what was written (SHA-256 differs); {fix}")
    try:
        return load(content), meta
    except SafetensorError as error:
        raise CorruptPartError(f"{file} is not a safetensors file ({error}); {fix}") from error


def read_meta(folder: Path, name: str) -> dict[str, Any] | None:
    """The meta of checkpoint `name`, or None; its tensors are not looked at. Raises
    CorruptPartError if the JSON file is not as it was written."""
    described = _described(folder, name)
    return None if described is None else described[2]


def _described(folder: Path, name: str) -> tuple[Path, str, dict[str, Any], str] | None:
    path = folder / f"{name}.json"
    fix = f"remove {path} to start over, or restore both files"
    try:
        with understood(path, fix):
            body = read_document(path, fix)
            if not _TENSORS.fullmatch(body["tensors"]):
                raise ValueError(f"its tensors are at {body['tensors']!r}, not beside it")
            return folder / body["tensors"], body["sha256"], dict(body["meta"]), fix
    except FileNotFoundError:
        return None
    except DocumentError as error:
        raise CorruptPartError(str(error)) from error
