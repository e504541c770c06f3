"""Damages a store of known contents byte by byte, and looks whether anybody notices; and stores
that somebody made to do harm: receipts and columns that are changed and sealed again.

A reader of a damaged part may raise CorruptPartError or return what was written, never anything
else; verify must name the file and the fix.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.documents import seal_of
from storage.errors import CorruptPartError
from storage.object_store import Location, open_place
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.layout import COLUMNS, STORE_FILE, Encoding
from storage.pairs.parts import write_part
from storage.pairs.receipts import PARTS_FOLDER, array_hash, load_receipt, receipt_path
from storage.pairs.shards import crc32c, encode_chunk, shard_pieces
from storage.pairs.verify import verify_store
from tests.storage.stores import MANIFEST, columns, provenance

SHAPE = {"n_runs": 2, "n_images": 8, "n_pairs": 300, "size": 3}
"""600 pairs: three inner chunks in one shard."""


class Bytes:
    """The files of a store, to damage and to mend again."""

    def __init__(self, root: Location) -> None:
        self.root, self._place = root, open_place(root)

    def names(self, folder: str = "parts") -> list[str]:
        return [info.name for info in self._place.files(folder)]

    def get(self, name: str) -> bytes:
        return self._place.read(name)

    def put(self, name: str, content: bytes) -> None:
        """Without sync: a thousand of them are made."""
        if isinstance(self.root, Path):
            (self.root / name).write_bytes(content)
        else:
            self._place.replace(name, content)

    @contextmanager
    def damaged(self, name: str, content: bytes) -> Iterator[None]:
        intact = self.get(name)
        self.put(name, content)
        try:
            yield
        finally:
            self.put(name, intact)


class Known:
    """A store of one part and what its columns are, as read and as stored."""

    def __init__(self, root: Location, encoding: Encoding) -> None:
        self.root, self.bytes = root, Bytes(root)
        create_or_open(root, MANIFEST, encoding=encoding)
        write_part(root, 0, columns(**SHAPE), provenance=provenance())
        self.standing = Dataset(root)
        self.read = self.standing.read(0, list(COLUMNS))
        self.stored = {name: self.standing.stored(0, name) for name in COLUMNS}
        self.group = f"parts/{self.standing.receipts[0].group}"

    def column_of(self, name: str) -> str | None:
        """The column whose numbers are in this file, if it is a shard."""
        inside = name.removeprefix(f"{self.group}/")
        return None if inside.endswith("zarr.json") else inside.rpartition("/")[0]

    def check(self, dataset: Dataset, name: str, rng: random.Random) -> str:
        """Reads everything in several ways, `name` being damaged; says how that was noticed.

        Fails if anything that is returned is not what was written.
        """
        damaged = self.column_of(name)
        refused = set()
        for column, right in self.stored.items():
            start = rng.randrange(len(right))
            rows = slice(start, rng.randrange(start, len(right)) + 1)
            ways: list[tuple[str, Callable[[], Any], Any]] = [
                ("stored", lambda c=column: dataset.stored(0, c), right),
                ("rows", lambda c=column, r=rows: dataset.stored(0, c, r), right[rows]),
                ("read", lambda c=column: dataset.read(0, [c])[c], self.read[column]),
            ]
            if column == damaged:
                ways.append(("column", lambda c=column: dataset.column(c), self.read[column]))
                if column.startswith("pairs/"):
                    some = np.array(rng.sample(range(len(right)), 5))
                    values = self.read[damaged][some]
                    ways.append(("take", lambda s=some: dataset.take([damaged], s), values))
            for way, read, expected in ways:
                try:
                    found = read()
                except CorruptPartError:
                    refused.add((column, way))
                    continue
                found = found[damaged] if way == "take" else found
                np.testing.assert_array_equal(found, expected, err_msg=f"{way} {column} of {name}")
                assert found.dtype == expected.dtype
        if damaged is None:
            assert refused == set(), name
            return "metadata"
        assert {column for column, _way in refused} <= {damaged, "pairs/reconstruction"}
        return "refused" if (damaged, "stored") in refused else "right values"


def flipped(content: bytes, rng: random.Random) -> bytes:
    """One byte replaced by another one."""
    damaged = bytearray(content)
    damaged[rng.randrange(len(content))] ^= rng.randrange(1, 256)
    return bytes(damaged)


def truncated(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def damage(
    known: Known, names: Sequence[str], harm: Callable[[bytes, random.Random], bytes], n: int
) -> Counter[str]:
    """Harms `n` files of `names`, one at a time: verify names each, and no read returns it."""
    rng = random.Random(f"{harm.__name__} {known.standing.encoding}")
    tally: Counter[str] = Counter()
    for number in range(n):
        name = rng.choice(names)
        content = harm(known.bytes.get(name), rng)
        with known.bytes.damaged(name, content):
            report = verify_store(known.root)
            assert not report.ok, f"{number}: {name} is damaged and verify says nothing"
            assert len(report.problems) == 1, report.problems
            assert name.rpartition("/")[0] in report.problems[0]
            assert "generate it again" in report.problems[0]
            fresh = number % 2 == 0  # the other half finds what it read before in its caches
            dataset = Dataset(known.root) if fresh else known.standing
            noticed = known.check(dataset, name, rng)
            assert not (fresh and harm is truncated and noticed == "right values"), name
            tally[noticed] += 1
    assert verify_store(known.root).ok
    return tally


Body = dict[str, Any]


def reseal(
    root: Location, change: Callable[[Body], object], *, part: int = 0, name: str | None = None
) -> str:
    """Changes the fields of a part's receipt and seals it anew, also under another name; the
    file's name."""
    path = receipt_path(part)
    content = _resealed(open_place(root).read(path), change)
    if name is not None:
        open_place(root).remove(path)
    open_place(root).replace(name or path, content)
    return name or path


def reseal_store(root: Location, change: Callable[[Body], object]) -> None:
    """Changes the fields of a store's description and seals it anew."""
    place = open_place(root)
    place.replace(STORE_FILE, _resealed(place.read(STORE_FILE), change))


def _resealed(content: bytes, change: Callable[[Body], object]) -> bytes:
    body = json.loads(content)
    (seal,) = (name for name in body if name.endswith("_sha256"))
    del body[seal]
    change(body)
    return json.dumps(body | {seal: seal_of(body)}).encode()


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
