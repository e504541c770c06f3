"""`store.json`: what a store was made from, sealed so that no byte of it changes unnoticed.

The seal, `store_sha256`, is that of the other fields. `storage.pairs.verify` compares the manifest
with the receipts, whose fingerprint is its hash (`fits`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from storage.documents import parse_document, seal_of
from storage.errors import CorruptPartError, DocumentError, StorageError, StoreMismatchError
from storage.files import json_bytes, reason_of
from storage.object_store import Place
from storage.pairs.layout import ENCODINGS, SCHEMA, VERSION, Encoding

STORE_FILE = "store.json"
MIXTURE = "mixture"
"""In the manifest of a store of several experiments: the manifests of each."""
_SEAL = "store_sha256"
_FIELDS = {"schema", "version", "encoding", "manifest", _SEAL}
_FIX = "restore it, or use another folder"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class StoreFile:
    """Content of `store.json`."""

    encoding: Encoding
    manifest: dict[str, Any]


def fits(manifest: Mapping[str, Any], fingerprint: str) -> bool | None:
    """True if a receipt with this fingerprint is of a store with this manifest, or of one of those
    that it mixes; None if it cannot be told, because its writer's fingerprints are no SHA-256."""
    if not _SHA256.fullmatch(fingerprint):
        return None
    return any(fingerprint == seal_of(one) for one in mixed(manifest))


def mixed(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The manifests of a store's experiments: of a mixture several, otherwise its own."""
    several = manifest.get(MIXTURE)
    return list(several) if isinstance(several, list) else [manifest]


def create_store_file(place: Place, encoding: Encoding, manifest: dict[str, Any]) -> None:
    """Writes the `store.json` of a new store, unless somebody else has."""
    body = {"schema": SCHEMA, "version": VERSION, "encoding": encoding, "manifest": manifest}
    place.create(STORE_FILE, json_bytes(body | {_SEAL: seal_of(body)}))


def read_store_file(place: Place) -> StoreFile:
    """The `store.json` of the store at `place`. Raises StorageError if there is none,
    CorruptPartError if it cannot be read or is not what was written, StoreMismatchError for another
    schema or version."""
    where = f"{place}/{STORE_FILE}"
    try:
        body = parse_document(place.read(STORE_FILE), where, _FIX)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StorageError(
            f"{place} is not a store: it has no {STORE_FILE}; generate one first"
        ) from error
    except OSError as error:
        raise CorruptPartError(f"{where} cannot be read ({reason_of(error)}); {_FIX}") from error
    except DocumentError as error:
        raise CorruptPartError(str(error)) from error
    if set(body) != _FIELDS:
        raise CorruptPartError(
            f"{where} has {', '.join(sorted(body)) or 'nothing'}, expected "
            f"{', '.join(sorted(_FIELDS))}; {_FIX}"
        )
    seal = body.pop(_SEAL)
    schema, version = body["schema"], body["version"]
    if schema != SCHEMA or type(version) is not int or version != VERSION:
        raise StoreMismatchError(
            f"{where} has schema {schema!r} version {version!r}, this is {SCHEMA!r} version "
            f"{VERSION}; use the release of palimpsest that wrote it, or another folder"
        )
    manifest, encoding = body["manifest"], body["encoding"]
    if encoding not in ENCODINGS:
        raise CorruptPartError(
            f"{where} has encoding {encoding!r}, expected one of {', '.join(ENCODINGS)}; {_FIX}"
        )
    if not isinstance(manifest, dict):
        raise CorruptPartError(f"{where} has no manifest, which is an object; {_FIX}")
    if not _is_seal(seal, body):
        raise CorruptPartError(
            f"{where} is not what was written (its {_SEAL} differs from its content); {_FIX}"
        )
    return StoreFile(encoding=encoding, manifest=manifest)


def _is_seal(seal: Any, body: dict[str, Any]) -> bool:
    try:
        return bool(seal == seal_of(body))
    except ValueError:  # a number that is too large for a float was none when it was written
        return False
