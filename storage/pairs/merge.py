"""One store from several of the same experiment, for example from machines that shared the work.

A part that several stores have must have the same arrays in each: a difference is a fault and not a
choice. All of that is settled from the receipts before a byte is copied. Stores of different
experiments on the same images can be mixed: the manifest of such a store lists theirs (`MIXTURE`),
part p of the k-th of n is its part p n + k, and a receipt keeps its fingerprint.

A part is copied as it is written: its files under a new random name, each compared with the
checksum in its receipt on the way, then the receipt, exclusively. Killed in between, a merge leaves
an orphan for `vacuum`; run again, it goes on. The sources are only read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from storage.errors import CorruptPartError, StoreMismatchError, listed
from storage.files import reason_of
from storage.object_store import Location, Place
from storage.pairs.dataset import Dataset, create_or_open, is_store, manifest_differences
from storage.pairs.layout import MAX_PART, MIXTURE, OnPart
from storage.pairs.receipts import PARTS_FOLDER, Receipt, new_group, publish_receipt
from storage.pairs.shards import crc32c

_BATCH_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class MergeReport:
    """Summary of a merge: parts and bytes copied, parts that were there before, and the result."""

    n_copied: int
    n_bytes: int
    n_present: int
    dataset: Dataset


class _Found(NamedTuple):
    receipt: Receipt
    dataset: Dataset


def merge(
    sources: Sequence[Location],
    target: Location,
    *,
    mix: bool = False,
    on_part: OnPart = lambda _done, _n: None,
) -> MergeReport:
    """Copies to the store `target` every part of `sources` that it lacks; it may be new, or one of
    `sources`. `on_part` is called with the parts done and the parts to copy. `mix`: stores of
    different experiments; `target` is new, or such a mixture of the same in the same order.

    Raises StorageError if a source is no store or cannot be read; StoreMismatchError (nothing was
    copied) for other settings, encodings or, mixed, images; CorruptPartError if a part differs
    between the stores (nothing was copied), or a file is not what was written (the parts before it
    were copied); StoreFullError (likewise).
    """
    if not sources:
        raise ValueError("merge needs at least one store to copy from")
    datasets = [Dataset(source) for source in sources]
    standing = Dataset(target) if is_store(target) else None
    if mix:
        manifest, parts = _mixture(datasets)
    else:
        everyone = datasets if standing is None else [standing, *datasets]
        first = everyone[0]
        for other in everyone[1:]:
            differences = manifest_differences(first.manifest, other.manifest)
            if first.encoding != other.encoding:
                differences.append(f"encoding is {first.encoding} there, {other.encoding} here")
            if differences:
                raise StoreMismatchError(
                    f"{other.root} (here) and {first.root} (there) are of different experiments: "
                    f"{listed(differences, 3, between='; ')}; merge only stores that were made "
                    "with the same settings, or mix them (--mix)"
                )
        manifest, parts = datasets[0].manifest, _union(everyone)
    result = create_or_open(target, manifest, encoding=datasets[0].encoding)
    if mix:
        for receipt in result.receipts:
            if receipt.part in parts:
                _check_same_part(_Found(receipt, result), parts[receipt.part])
    present = {receipt.part for receipt in result.receipts}
    wanted = [(part, found) for part, found in sorted(parts.items()) if part not in present]
    place = result.place
    n_bytes = 0
    on_part(0, len(wanted))
    for done, (part, found) in enumerate(wanted, start=1):
        _copy_part(found, part, place)
        n_bytes += sum(size for size, _crc in found.receipt.files.values())
        on_part(done, len(wanted))
    result.refresh()
    return MergeReport(
        n_copied=len(wanted), n_bytes=n_bytes, n_present=len(present), dataset=result
    )


def _mixture(datasets: Sequence[Dataset]) -> tuple[dict[str, Any], dict[int, _Found]]:
    first = datasets[0]
    for other in datasets:
        if MIXTURE in other.manifest:
            raise StoreMismatchError(
                f"{other.root} is a mixture already; mix the stores that it was made from"
            )
        if other.encoding != first.encoding or other.manifest.get("source") != first.manifest.get(
            "source"
        ):
            raise StoreMismatchError(
                f"{other.root} and {first.root} are of different images or encodings; mix only "
                "attacks on victims of the same images, stored alike"
            )
    manifests: list[dict[str, Any]] = []
    for dataset in datasets:
        if dataset.manifest not in manifests:
            manifests.append(dataset.manifest)
    parts: dict[int, _Found] = {}
    for k, manifest in enumerate(manifests):
        same = [dataset for dataset in datasets if dataset.manifest == manifest]
        for part, found in _union(same).items():
            number = part * len(manifests) + k
            if number > MAX_PART:
                raise StoreMismatchError(
                    f"part {part} of {found.dataset.root} would be part {number:,} of a mixture of "
                    f"{len(manifests)}; a store ends at {MAX_PART:,}"
                )
            parts[number] = found
    source = {"source": first.manifest["source"]} if "source" in first.manifest else {}
    return {MIXTURE: manifests} | source, parts


def _union(datasets: Sequence[Dataset]) -> dict[int, _Found]:
    parts: dict[int, _Found] = {}
    for dataset in datasets:
        for receipt in dataset.receipts:
            first = parts.setdefault(receipt.part, _Found(receipt, dataset))
            _check_same_part(first, _Found(receipt, dataset))
    return parts


def _check_same_part(first: _Found, other: _Found) -> None:
    here, there = first.receipt, other.receipt
    where = f"part {here.part} is not the same in {first.dataset.root} and {other.dataset.root}"
    if here.plan_hash != there.plan_hash:
        raise CorruptPartError(
            f"{where}: they trained on other images (plans {here.plan_hash[:12]} and "
            f"{there.plan_hash[:12]}), because the parts of earlier rounds differ; keep one store, "
            "and continue the other from the earlier rounds' parts of that one"
        )
    names = {*here.array_hashes, *there.array_hashes}
    differing = sorted(n for n in names if here.array_hashes.get(n) != there.array_hashes.get(n))
    if differing:
        raise CorruptPartError(
            f"{where}: {listed(differing, 3, what=' columns')} differ (code {here.code_version} on "
            f"{here.device}, {there.code_version} on {there.device}); verify both; then remove its "
            "receipt in one of them, and generate it again or merge"
        )


def _copy_part(found: _Found, part: int, place: Place) -> None:
    receipt, source = found
    with new_group(place, part) as group:
        for names in _batches(receipt):
            paths = [f"{PARTS_FOLDER}/{receipt.group}/{name}" for name in names]
            limits = [receipt.files[name][0] for name in names]
            problem = ""
            try:
                with ThreadPoolExecutor(source.place.n_parallel) as pool:
                    contents = pool.map(source.place.read, paths, limits)
                    files = dict(zip(names, contents, strict=True))
            except (FileNotFoundError, NotADirectoryError) as error:
                problem = f"a file of {receipt.group} is missing ({error})"
            except OSError as error:
                problem = f"a file of {receipt.group} cannot be read ({reason_of(error)})"
            else:
                for name, content in files.items():
                    if (len(content), crc32c(content)) != receipt.files[name]:
                        problem = f"{receipt.group}/{name} is not what was written"
            if problem:
                raise CorruptPartError(
                    f"part {receipt.part} of {source.root}: {problem}; nothing of this part was "
                    "copied. Verify that store, remove the part's receipt and generate it again, "
                    "then merge again: it continues with this part"
                )
            place.write_tree((f"{PARTS_FOLDER}/{group}/{n}", data) for n, data in files.items())
        publish_receipt(place, replace(receipt, part=part, group=group))


def _batches(receipt: Receipt) -> Iterator[list[str]]:
    """The files of a part, some of them at a time."""
    batch: list[str] = []
    for name, (size, _crc) in sorted(receipt.files.items()):
        if batch and size + sum(receipt.files[other][0] for other in batch) > _BATCH_BYTES:
            yield batch
            batch = []
        batch.append(name)
    yield batch
