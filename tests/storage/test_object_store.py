"""The same contract for a folder and for S3: exclusive creation, whole files, listings."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage.errors import StorageError, UnsettledError
from storage.object_store import Place, S3Place, open_place
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.parts import write_part
from storage.pairs.verify import vacuum, verify_store
from tests.storage.s3_server import S3Server
from tests.storage.stores import MANIFEST, columns, provenance, store


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3")
        return open_place(server.location("place"))
    (tmp_path / "place").mkdir()
    return open_place(tmp_path / "place")


def test_what_is_written_is_read(place: Place):
    place.make_folders(["a"])
    place.write_tree({"a/b/one": b"1", "a/two": b"22", "a/b/c/empty": b""}.items())
    assert [(info.name, info.size) for info in place.files("a")] == [
        ("a/b/c/empty", 0),
        ("a/b/one", 1),
        ("a/two", 2),
    ]
    assert place.children("a") == ["b", "two"]
    assert place.read("a/two") == b"22"
    before = place.files("a")[-1]
    place.replace("a/two", b"333")
    assert place.read("a/two") == b"333"
    assert place.files("a")[-1].version != before.version
    assert abs(place.modified("a/two") - before.modified) < 60


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [(0, 3, b"abc"), (2, 5, b"cde"), (4, 9, b"ef"), (3, 3, b""), (5, 2, b"")],
)
def test_ranges(place: Place, start: int, stop: int, expected: bytes):
    place.replace("letters", b"abcdef")
    assert place.read_range("letters", start, stop) == expected


def test_what_is_absent(place: Place):
    for name in ("none", "no/such/file"):
        with pytest.raises(FileNotFoundError):
            place.read(name)
        with pytest.raises(FileNotFoundError):
            place.read_range(name, 0, 4)
        with pytest.raises(FileNotFoundError):
            place.modified(name)
        place.remove(name)
    assert place.files("none") == []
    assert place.children("none") == []


def test_removing_a_folder_takes_nothing_else(place: Place):
    place.write_tree({"parts/a/x": b"1", "parts/a/b/y": b"2", "parts/ab/z": b"3"}.items())
    place.remove("parts/a")
    assert [info.name for info in place.files("parts")] == ["parts/ab/z"]
    place.remove("parts/ab/z")
    assert place.files("parts") == []


def test_exactly_one_of_many_creates(place: Place):
    assert place.create("solo", b"first")
    assert not place.create("solo", b"second")
    assert place.read("solo") == b"first"
    contents = [str(n).encode() for n in range(16)]
    with ThreadPoolExecutor(16) as pool:
        created = list(pool.map(lambda content: place.create("race", content), contents))
    assert sum(created) == 1
    assert place.read("race") == contents[created.index(True)]


def test_places_travel_to_other_processes(place: Place):
    place.replace("a", b"1")
    again: Place = pickle.loads(pickle.dumps(place))  # noqa: S301
    assert (str(again), again.read("a")) == (str(place), b"1")


@pytest.mark.parametrize("location", ["gs://bucket/x", "http://host/x", "s3:/bucket", "s3:///x"])
def test_other_locations_are_refused(location: str):
    with pytest.raises(ValueError, match=r"s3://bucket/prefix"):
        open_place(location)


def test_a_service_that_refuses_is_explained_in_a_line(s3: S3Server):
    elsewhere = open_place("s3://no-such-bucket/store")
    with pytest.raises(StorageError, match=r"no-such-bucket/store/a: there is no bucket") as raised:
        elsewhere.replace("a", b"")
    assert "\n" not in str(raised.value)
    with pytest.raises(StorageError, match="there is no bucket"):
        Dataset("s3://no-such-bucket/store")


# a whole store on S3


def test_a_store_on_s3_is_the_store_on_disk(s3: S3Server, tmp_path: Path):
    there, here = s3.location("store"), tmp_path / "store"
    create_or_open(there, MANIFEST)
    for part in range(3):
        write_part(there, part, columns(seed=part), provenance=provenance())
    remote, local = Dataset(there), store(here, 3)
    assert remote.root == there
    assert remote.content_hash == local.content_hash
    assert (remote.column("pairs/iteration") == local.column("pairs/iteration")).all()
    report = verify_store(there)
    assert (report.ok, report.n_checked, report.orphans) == (True, 3, ())
    group = f"parts/{remote.receipts[1].group}"
    remote.place.remove("receipts/part-000001.json")
    assert vacuum(there, older_than_s=3600) == ()
    assert vacuum(there, older_than_s=-1, dry_run=True) == (group,)
    assert vacuum(there, older_than_s=-1) == (group,)
    assert verify_store(there).gaps == (1,)
    remote.refresh()
    assert [receipt.part for receipt in remote.receipts] == [0, 2]


def test_a_publication_that_is_not_answered_keeps_its_arrays(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
):
    """The service acts on a request whose answer is lost; the part must have its arrays then."""
    there = s3.location("store")
    create_or_open(there, MANIFEST)
    late: list[tuple[str, bytes]] = []

    def unanswered(self: S3Place, name: str, content: bytes) -> bool:
        late.append((name, content))
        raise UnsettledError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(S3Place, "create", unanswered)
        with pytest.raises(UnsettledError):
            write_part(there, 0, columns(), provenance=provenance())
    assert len(verify_store(there).orphans) == 1
    ((name, content),) = late
    open_place(there).replace(name, content)
    report = verify_store(there)
    assert (report.ok, report.n_checked, report.orphans) == (True, 1, ())
    receipt = write_part(there, 0, columns(), provenance=provenance())
    assert receipt == Dataset(there).receipts[0]


def test_a_service_that_does_not_answer_leaves_it_open_whether_it_wrote(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with pytest.raises(UnsettledError, match=r"bucket/a/name: .*may still be written"):
        open_place("s3://bucket/a").create("name", b"")
