"""Merging stores: what comes together, what is refused, and what an interruption leaves."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from storage.documents import seal_of
from storage.errors import CorruptPartError, StorageError, StoreFullError, StoreMismatchError
from storage.object_store import LocalPlace, Location
from storage.pairs import merge as merging
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.merge import merge
from storage.pairs.parts import write_part
from storage.pairs.statistics import attacks_of
from storage.pairs.verify import vacuum
from tests.storage.calls import Calls, Killed
from tests.storage.s3_server import S3Server
from tests.storage.stores import MANIFEST, columns, provenance, store, write


def some_parts(root: Path, *parts: int) -> Dataset:
    create_or_open(root, MANIFEST)
    for part in parts:
        write(root, part)
    return Dataset(root)


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    return {
        path.relative_to(root).as_posix(): (path.stat().st_mtime_ns, path.read_bytes())
        for path in root.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("into", ["new", "existing", "a"])
def test_the_result_is_the_store_that_one_machine_would_have_written(tmp_path: Path, into: str):
    sources = [some_parts(tmp_path / "a", 0, 3), some_parts(tmp_path / "b", 1, 3, 4)]
    if into == "existing":
        some_parts(tmp_path / "existing", 2)
    else:
        sources.append(some_parts(tmp_path / "c", 2, 4))
    unchanged = {d.root: snapshot(Path(d.root)) for d in sources if Path(d.root).name != into}
    report = merge([d.root for d in sources], tmp_path / into)
    whole = store(tmp_path / "whole", 5)
    merged = Dataset(tmp_path / into)
    assert merged.content_hash == whole.content_hash == report.dataset.content_hash
    found = merged.verify()
    assert (found.ok, found.orphans, found.gaps) == (True, (), ())
    assert report.n_copied + report.n_present == 5
    assert report.n_present == {"new": 0, "existing": 1, "a": 2}[into]
    assert {root: snapshot(Path(root)) for root in unchanged} == unchanged


def test_merging_again_copies_nothing(tmp_path: Path):
    sources: list[Location] = [
        some_parts(tmp_path / "a", 0).root,
        some_parts(tmp_path / "b", 1).root,
    ]
    first = merge(sources, tmp_path / "m")
    before = snapshot(tmp_path / "m")
    calls: list[tuple[int, int]] = []
    again = merge(sources, tmp_path / "m", on_part=lambda done, n: calls.append((done, n)))
    assert (first.n_copied, again.n_copied, again.n_bytes) == (2, 0, 0)
    assert calls == [(0, 0)]
    assert snapshot(tmp_path / "m") == before


def test_receipts_keep_where_a_part_came_from(tmp_path: Path):
    source = create_or_open(tmp_path / "a", MANIFEST)
    write_part(tmp_path / "a", 0, columns(), provenance=provenance(device="gpu-7", seconds=12.5))
    source.refresh()
    copied = merge([tmp_path / "a"], tmp_path / "m").dataset.receipts[0]
    original = source.receipts[0]
    assert (copied.device, copied.seconds, copied.files) == ("gpu-7", 12.5, original.files)
    assert copied.group != original.group


@pytest.mark.parametrize(
    ("manifest", "encoding", "part", "error", "said"),
    [
        ({"root_seed": 9}, "float16", None, StoreMismatchError, r"root_seed is [09] there, [09] "),
        ({}, "uint8", None, StoreMismatchError, r"encoding is \w+ there, \w+ here"),
        ({}, "float16", {}, CorruptPartError, "part 1 is not the same .*pairs/ssim_best"),
        ({}, "float16", {"plan_hash": "q"}, CorruptPartError, "part 1 .*trained on other images"),
    ],
)
def test_what_differs_is_refused_with_its_stores_before_anything_is_made(
    tmp_path: Path, manifest: Any, encoding: Any, part: Any, error: type[Exception], said: str
):
    some_parts(tmp_path / "a", 0, 1)
    create_or_open(tmp_path / "b", MANIFEST | manifest, encoding=encoding)
    if part is not None:
        other = columns(seed=1)
        other["pairs/ssim_best"][3] += 0.001
        write_part(tmp_path / "b", 1, other, provenance=provenance(**part))
    before = snapshot(tmp_path)
    for sources, into in ([["a", "b"], "m"], [["a"], "b"], [["b"], "a"]):
        with pytest.raises(error, match=said) as caught:
            merge([tmp_path / source for source in sources], tmp_path / into)
        assert str(tmp_path / "a") in str(caught.value)
        assert str(tmp_path / "b") in str(caught.value)
    assert snapshot(tmp_path) == before


def test_what_is_no_store_is_named(tmp_path: Path):
    with pytest.raises(StorageError, match="nowhere is not a store"):
        merge([tmp_path / "nowhere"], tmp_path / "m")
    with pytest.raises(ValueError, match="at least one"):
        merge([], tmp_path / "m")


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_is_not_copied_and_the_next_merge_goes_on(tmp_path: Path, damage: str):
    some_parts(tmp_path / "a", 0, 1, 2)
    intact = tmp_path / "intact"
    shutil.copytree(tmp_path / "a", intact)
    group = tmp_path / "a" / "parts" / Dataset(tmp_path / "a").receipt(1).group
    victim = next(group.rglob("pairs/reconstruction/c.*"))
    content = bytearray(victim.read_bytes())
    if damage == "remove":
        victim.unlink()
    else:
        content[len(content) // 2] ^= 16
        victim.write_bytes(content if damage == "flip" else content[:-1])
    with pytest.raises(CorruptPartError, match=r"part 1 of .*reconstruction"):
        merge([tmp_path / "a"], tmp_path / "m")
    left = Dataset(tmp_path / "m")
    assert [receipt.part for receipt in left.receipts] == [0]
    assert (left.verify().ok, left.verify().orphans) == (True, ())
    report = merge([intact], tmp_path / "m")
    assert report.n_copied == 2
    assert report.dataset.content_hash == Dataset(intact).content_hash


@pytest.mark.slow
@pytest.mark.parametrize("death", [True, False], ids=["killed", "full"])
def test_interrupted_at_any_moment_it_resumes_and_no_reader_sees_half_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: bool
):
    """At every 17th of the calls by which the store changes."""
    monkeypatch.setattr(merging, "_BATCH_BYTES", 8000)  # several writes per part

    def error() -> BaseException:
        return Killed() if death else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sources: list[Location] = [
        some_parts(tmp_path / "a", 0, 2).root,
        some_parts(tmp_path / "b", 1).root,
    ]
    wanted = store(tmp_path / "whole", 3).content_hash
    with monkeypatch.context() as patch:
        calls = Calls(patch, error, death=death)
        merge(sources, tmp_path / "undisturbed")
        n_moments = calls.n
    assert n_moments > 200
    for at in range(0, n_moments, 17):
        target = tmp_path / f"m{at}"
        with monkeypatch.context() as patch:
            Calls(patch, error, at=at, death=death)
            with pytest.raises(Killed if death else StoreFullError):
                merge(sources, target)
        if (target / "store.json").exists():
            report = Dataset(target).verify()
            assert report.ok, report.problems
            assert bool(report.orphans) <= death
        result = merge(sources, target).dataset
        assert result.content_hash == wanted
        vacuum(target, older_than_s=0)
        final = result.verify()
        assert (final.ok, final.orphans, final.gaps) == (True, (), ())


def test_two_merges_at_once_leave_one_of_each_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = some_parts(tmp_path / "a", 0, 1).root
    real = LocalPlace.write_tree
    nested = False

    def write_tree(self: LocalPlace, files: dict[str, bytes]) -> None:
        nonlocal nested
        real(self, files)
        if not nested:
            nested = True
            merge([source], tmp_path / "m")  # the other one overtakes

    monkeypatch.setattr(LocalPlace, "write_tree", write_tree)
    merge([source], tmp_path / "m")
    found = Dataset(tmp_path / "m").verify()
    assert (found.ok, found.orphans, found.n_checked) == (True, (), 2)


@pytest.mark.parametrize("way", ["s3 to local", "local to s3", "s3 and local to s3"])
def test_buckets_and_folders_in_any_combination(tmp_path: Path, s3: S3Server, way: str):
    local = some_parts(tmp_path / "a", 0, 1)
    whole = store(tmp_path / "whole", 3)
    bucket = s3.location("b")
    merge([whole.root] if way != "s3 and local to s3" else [local.root], bucket)
    if way == "s3 to local":
        result = merge([bucket], tmp_path / "m").dataset
    elif way == "local to s3":
        result = Dataset(bucket)
        assert result.root.startswith("s3://")
    else:
        result = merge([bucket, whole.root], s3.location("m")).dataset
    assert result.content_hash == whole.content_hash
    found = result.verify()
    assert (found.ok, found.orphans) == (True, ())


KINDS = ("kkt", "span")


def of_attack(root: Path, kind: str, parts: list[int], **changes: Any) -> Dataset:
    """A store of a campaign with that kind of attack."""
    experiment = {"family": "kkt", "attack": {"kind": kind}}
    manifest = {"campaign": {"experiment": experiment}, "source": {"hash": "s"}, **changes}
    create_or_open(root, manifest)
    for part in parts:
        made = columns(seed=part, n_runs=2 if kind == "kkt" else 3)
        write_part(root, part, made, provenance=provenance(fingerprint=seal_of(manifest)))
    return Dataset(root)


def test_attacks_of_two_kinds_stand_in_one_store_told_apart_by_their_receipts(tmp_path: Path):
    stores = [
        of_attack(tmp_path / "kkt", "kkt", [0, 1, 2]),
        of_attack(tmp_path / "span", "span", [0, 1]),
    ]
    roots = [one.root for one in stores]
    mixed = merge(roots, tmp_path / "m", mix=True).dataset
    assert [r.part for r in mixed.receipts] == [0, 1, 2, 3, 4]
    assert mixed.manifest["mixture"] == [one.manifest for one in stores]
    for receipt in mixed.receipts:
        original = stores[receipt.part % 2].receipts[receipt.part // 2]
        assert receipt.array_hashes == original.array_hashes
        assert receipt.fingerprint == seal_of(stores[receipt.part % 2].manifest)
    found = mixed.verify()
    assert (found.ok, found.orphans, found.gaps) == (True, (), ())
    assert attacks_of(mixed, {"kkt"}) == {"kkt": 3, "span": 2}
    assert attacks_of(stores[0], {"kkt"}) == {"kkt": 3}
    assert mixed.n_pairs == sum(one.n_pairs for one in stores)
    _ids, counts = mixed.image_counts()
    assert counts.sum() == sum(one.image_counts()[1].sum() for one in stores)
    of_attack(tmp_path / "span", "span", [3])
    again = merge(roots, tmp_path / "m", mix=True)
    assert (again.n_copied, again.n_present) == (1, 5)
    assert [r.part for r in again.dataset.receipts] == [0, 1, 2, 3, 4, 7]


def test_what_cannot_be_mixed_is_refused_before_anything_is_made(tmp_path: Path):
    kkt = of_attack(tmp_path / "kkt", "kkt", [0]).root
    span = of_attack(tmp_path / "span", "span", [0]).root
    other = of_attack(tmp_path / "other", "span", [0], source={"hash": "t"}).root
    for sources, mix, said in [
        ([kkt, span], False, r"or mix them \(--mix\)"),
        ([kkt, other], True, "are of different images or encodings"),
    ]:
        with pytest.raises(StoreMismatchError, match=said):
            merge(sources, tmp_path / "m", mix=mix)
        assert not (tmp_path / "m").exists()
    merge([kkt, span], tmp_path / "m", mix=True)
    for sources, mix, said in [
        ([span, kkt], True, "was written with other settings: mixture is"),
        ([tmp_path / "m", span], True, "is a mixture already"),
        ([kkt], False, "are of different experiments"),
    ]:
        before = snapshot(tmp_path / "m")
        with pytest.raises(StoreMismatchError, match=said):
            merge(sources, tmp_path / "m", mix=mix)
        assert snapshot(tmp_path / "m") == before


def test_a_receipt_of_no_experiment_of_a_mixture_is_a_problem(tmp_path: Path):
    roots = [of_attack(tmp_path / kind, kind, [0]).root for kind in KINDS]
    mixed = merge(roots, tmp_path / "m", mix=True).dataset
    stranger = provenance(fingerprint="0" * 64)
    write_part(tmp_path / "m", 2, columns(seed=5), provenance=stranger)
    mixed.refresh()
    assert [problem for problem in mixed.verify().problems if "part 2 was made with" in problem]
    assert attacks_of(mixed, {"kkt"}) == {"kkt": 1, "span": 1, "unknown": 1}
