"""What is sealed is not yet true: stores that were made to do harm are refused in one line."""

from __future__ import annotations

import base64
import os
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs.zstd import Zstd

from storage.documents import seal_of
from storage.errors import CorruptPartError, StorageError
from storage.export.rows import Selection, selected_pairs
from storage.object_store import Location
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.layout import MAX_PART
from storage.pairs.merge import merge
from storage.pairs.parts import write_part
from storage.pairs.receipts import Receipt, receipt_path
from storage.pairs.verify import vacuum, verify_store
from tests.storage.damage import Body, replace_column, reseal
from tests.storage.s3_server import S3Server
from tests.storage.stores import MANIFEST, columns, provenance, store

MOST_BYTES = 20 * 2**20
"""Memory that refusing a store may take: far less than any of them asks for."""


def _packed(content: bytes) -> str:
    return base64.b64encode(Zstd(level=1).encode(content)).decode()


def _without_its_size() -> str:
    """A frame whose header does not say how large its content is."""
    return base64.b64encode(b"\x28\xb5\x2f\xfd\x00\x58\x01\x00\x00" + bytes(8)).decode()


EVIL: list[tuple[str, Any, str]] = [
    ("files", {"../../../victimdir/x.txt": [15, 2**32 - 1]}, "victimdir"),
    ("files", {"/etc/x": [1, 1]}, "/etc/x"),
    ("files", {"runs/../zarr.json": [1, 1]}, "runs/.."),
    ("files", {"x.txt": [1, 1]}, "x.txt"),
    ("files", {"runs/run/c.1": [1, 1]}, "run/c.1"),
    ("files", {"runs/run/c.0": None}, "lack 'runs/run/c.0'"),
    ("files", {"runs/run/c.0": [2**40, 1]}, "1099511"),
    ("files", {"zarr.json": [2**40, 1]}, "1099511"),
    ("files", {"zarr.json": [2**22, 1]}, "zarr.json has 4194304 bytes"),
    ("group", "../../other", "group is '../../other'"),
    ("group", "part-000001-01234567.zarr", "expected part-000000-"),
    ("group", "part-000000-01234567.zarr\n", "group is"),
    ("n_pairs", 10**12, "n_pairs is 1000000000000"),
    ("n_pairs", 10**9, "bytes; expected at most"),
    ("n_pairs", 10**6, "too few for its rows"),
    ("n_pairs", 1e12, "should be a valid integer"),
    ("picture", [3, 10**5, 10**5], "100000 x 100000"),
    ("images", _packed(bytes(2**28)), "268,435,456 bytes"),
    ("images", _without_its_size(), "an unknown number of bytes"),
    ("images", 7, "images is 7"),
    ("seconds", -1, "seconds is -1"),
    ("array_hashes", {"runs/run": None}, "runs/run"),
    ("outcomes", {"ok": 3}, "outcomes are {'ok': 3"),
]
"""A field of a receipt, what it becomes (of an object, its entries; None takes one out), and what
is said of it."""


def changed(field: str, value: Any) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        if isinstance(value, dict):
            whole = body[field] | value
            body[field] = {name: v for name, v in whole.items() if v is not None}
        else:
            body[field] = value

    return change


@pytest.fixture(params=["folder", "bucket"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """A place for a store: evil ones come from both."""
    if request.param == "folder":
        return tmp_path / "inside" / "evil"
    server: S3Server = request.getfixturevalue("s3")
    return server.location("evil")


def exported(dataset: Dataset) -> Any:
    every = Selection(confident_only=False)
    return list(selected_pairs(dataset, every, render=lambda x, _mean: x.astype(np.uint8)))


@contextmanager
def frugal() -> Iterator[None]:
    """Nothing inside may take memory that the store only says it needs."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def _refused(root: Location, words: str, tmp_path: Path) -> None:
    """Every way to read the store ends in the same line, and nothing is written."""
    before = sorted(path for path in tmp_path.rglob("*") if "inside" not in path.parts)
    with frugal():
        (problem,) = verify_store(root).problems
        assert words in problem
        assert "\n" not in problem
        ways: list[Callable[[], object]] = [
            lambda: Dataset(root),
            lambda: merge([root], tmp_path / "inside" / "t"),
            lambda: vacuum(root, older_than_s=0),
        ]
        for way in ways:
            with pytest.raises(CorruptPartError) as caught:
                way()
            assert str(caught.value) == problem
    assert before == sorted(path for path in tmp_path.rglob("*") if "inside" not in path.parts)
    assert not (tmp_path / "inside" / "t").exists()


@pytest.mark.parametrize(("field", "value", "words"), EVIL)
def test_receipts_that_were_sealed_again_are_refused(
    field: str, value: Any, words: str, tmp_path: Path
):
    root = tmp_path / "inside" / "evil"
    root.parent.mkdir()
    store(root, 1)
    name = reseal(root, changed(field, value))
    _refused(root, words, tmp_path)
    assert name in verify_store(root).problems[0]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=9), inside),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def one_part(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("one") / "s"
    store(root, 1)
    return root


@settings(max_examples=60, deadline=None)
@given(field=st.sampled_from([field.name for field in fields(Receipt)]), value=JSON)
def test_whatever_a_field_says_it_is_refused_or_read_as_it_is(
    one_part: Path, field: str, value: Any
):
    content = (one_part / receipt_path(0)).read_bytes()
    try:
        reseal(one_part, lambda body: body.update({field: value}))
        try:
            found = getattr(Dataset(one_part).receipts[0], field)
        except CorruptPartError:
            (problem,) = verify_store(one_part).problems
            assert receipt_path(0) in problem
        else:
            assert found == (tuple(value) if isinstance(value, list) else value)
    finally:
        (one_part / receipt_path(0)).write_bytes(content)


def test_names_are_checked_in_folders_and_buckets(where: Location, tmp_path: Path):
    (tmp_path / "inside").mkdir()
    store(where, 1)
    for field, value, words in (EVIL[0], EVIL[9]):
        reseal(where, changed(field, value))
        _refused(where, words, tmp_path)


def test_a_part_number_without_bound_is_no_list_of_gaps(where: Location, tmp_path: Path):
    (tmp_path / "inside").mkdir()
    store(where, 1)
    group = "part-999999999-00000000.zarr"
    change = lambda body: body.update(part=999_999_999, group=group)  # noqa: E731
    reseal(where, change, name="receipts/part-999999999.json")
    with frugal():
        report = verify_store(where)
    assert f"less than or equal to {MAX_PART}" in report.problems[0]
    assert report.gaps == ()
    with pytest.raises(CorruptPartError, match=f"less than or equal to {MAX_PART}"):
        Dataset(where)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pairs/target_row", 10**9),
        ("pairs/target_row", -1),
        ("pairs/run_row", 2**31 - 1),
        ("targets/run_row", -1),
        ("targets/image_id", 2**31 - 1),
        ("runs/outcome", 255),
    ],
)
def test_row_numbers_that_lead_nowhere(name: str, value: int, tmp_path: Path):
    """Columns with right checksums and hashes, whose values would be used as rows."""
    dataset = store(tmp_path / "s", 1)
    values = dataset.stored(0, name).copy()
    values[2 if len(values) > 2 else 0] = value
    replace_column(tmp_path / "s", name, values)
    (problem,) = verify_store(tmp_path / "s").problems
    assert name in problem or name == "targets/run_row"
    assert "\n" not in problem
    opened = Dataset(tmp_path / "s")
    with pytest.raises(CorruptPartError, match=name):
        opened.read(0, [name])
    if name != "targets/run_row":  # which no export reads
        with pytest.raises(CorruptPartError, match=name):
            exported(opened)


def test_a_table_of_images_that_lies_about_its_ids(tmp_path: Path):
    """The counts are an array as long as the largest id: two bytes may not ask for gigabytes."""
    root = tmp_path / "s"
    store(root, 1)
    rows = np.zeros((4, 2), "<i4")
    rows[0] = 5, 2**31 - 1
    reseal(root, lambda body: body.update(images=_packed(rows.tobytes())))
    with frugal(), pytest.raises(CorruptPartError, match="part 0 cannot be read: its images are"):
        Dataset(root).image_counts()
    assert "counts in its receipt" in verify_store(root).problems[0]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("pipe", "it is a pipe, not a regular file"),
        ("device", "it is a device, not a regular file"),
        ("sparse", "it has 68,719,476,736 bytes, more than"),
    ],
)
def test_what_is_no_file_is_not_waited_for(kind: str, words: str, tmp_path: Path):
    """The store's documents are tried in tests/flows/test_documents.py."""
    dataset = store(tmp_path / "s", 1)
    path = tmp_path / "s" / "parts" / dataset.receipt(0).group / "runs/run/c.0"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 2**36)
    with frugal():
        (problem,) = verify_store(tmp_path / "s").problems
        assert words in problem
        assert str(path) in problem
        with pytest.raises(StorageError, match=words):
            Dataset(tmp_path / "s").with_whole_files().stored(0, "runs/run")
        with pytest.raises(StorageError):
            merge([tmp_path / "s"], tmp_path / "t")


# store.json


def test_every_byte_of_the_description_counts(tmp_path: Path):
    """Whatever single byte is another one: it is refused, or says the same as before."""
    intact = store(tmp_path / "s", 1)
    path = tmp_path / "s" / "store.json"
    content = path.read_bytes()
    n_refused = 0
    for position in range(len(content)):
        for other in (content[position] ^ 1, content[position] ^ 32, ord(" "), ord("7")):
            path.write_bytes(content[:position] + bytes([other]) + content[position + 1 :])
            try:
                found = Dataset(tmp_path / "s")
            except StorageError:
                n_refused += 1
            else:
                assert (found.manifest, found.encoding) == (intact.manifest, intact.encoding)
    assert n_refused > 3 * len(content)
    path.write_bytes(content.replace(b"store_sha256", b"store_sha255"))
    with pytest.raises(CorruptPartError, match="no store_sha256"):
        Dataset(tmp_path / "s")


def test_a_sealed_description_of_another_store_does_not_pass(tmp_path: Path):
    create_or_open(tmp_path / "s", MANIFEST)
    given = provenance(fingerprint=seal_of(MANIFEST))
    write_part(tmp_path / "s", 0, columns(), provenance=given)
    create_or_open(tmp_path / "other", {"experiment": "another"})
    content = (tmp_path / "other" / "store.json").read_bytes()
    (tmp_path / "s" / "store.json").write_bytes(content)
    (problem,) = verify_store(tmp_path / "s").problems
    assert "has not the settings" in problem


# the same file in another part


def test_exports_notice_files_in_each_others_place(tmp_path: Path):
    """Both have right chunks, index and size; only their checksums in the receipts differ."""
    dataset = store(tmp_path / "s", 2)
    files = [
        tmp_path / "s" / "parts" / receipt.group / "pairs/scale/c.0" for receipt in dataset.receipts
    ]
    first, second = (file.read_bytes() for file in files)
    assert len(first) == len(second)
    files[0].write_bytes(second)
    files[1].write_bytes(first)
    assert [text.partition(":")[0] for text in verify_store(tmp_path / "s").problems] == [
        "part 0",
        "part 1",
    ]
    with pytest.raises(CorruptPartError, match="is damaged: it is not the file"):
        exported(Dataset(tmp_path / "s"))
    with pytest.raises(CorruptPartError, match="not the file"):
        Dataset(tmp_path / "s").with_whole_files().read(0, ["pairs/scale"])
