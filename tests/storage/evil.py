"""Stores that somebody made to do harm: receipts and columns that are changed and sealed again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.documents import seal_of
from storage.object_store import Location, open_place
from storage.pairs.layout import STORE_FILE
from storage.pairs.receipts import PARTS_FOLDER, array_hash, load_receipt, receipt_path
from storage.pairs.shards import crc32c, encode_chunk, shard_pieces

Body = dict[str, Any]


def reseal(
    root: Location, change: Callable[[Body], object], *, part: int = 0, name: str | None = None
) -> str:
    """Changes the fields of a part's receipt and seals it anew, also under another name; the
    file's name."""
    place = open_place(root)
    path = receipt_path(part)
    body = json.loads(place.read(path))
    del body["receipt_sha256"]
    change(body)
    if name is not None:
        place.remove(path)
        path = name
    place.replace(path, json.dumps(body | {"receipt_sha256": seal_of(body)}).encode())
    return path


def reseal_store(root: Location, change: Callable[[Body], object]) -> None:
    """Changes the fields of a store's description and seals it anew."""
    place = open_place(root)
    body = json.loads(place.read(STORE_FILE))
    del body["store_sha256"]
    change(body)
    place.replace(STORE_FILE, json.dumps(body | {"store_sha256": seal_of(body)}).encode())


def replace_column(root: Location, name: str, values: npt.NDArray[Any], *, part: int = 0) -> None:
    """Other values in a column of one chunk, with right checksums, hashes and seal."""
    place = open_place(root)
    group = load_receipt(place, receipt_path(part)).group
    file = f"{name}/c.0" + ".0" * (values.ndim - 1)
    content = b"".join(shard_pieces([encode_chunk(values)], len(values)))
    place.replace(f"{PARTS_FOLDER}/{group}/{file}", content)

    def change(body: Body) -> None:
        body["files"][file] = [len(content), crc32c(content)]
        body["array_hashes"][name] = array_hash(np.asarray(values))

    reseal(root, change, part=part)
