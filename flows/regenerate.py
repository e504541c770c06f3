"""Regenerate: make a dataset again from its manifest, and compare the two, hash by hash.

A manifest is one JSON file: the settings, the hash of the images, and a hash of every column of
every part. It names no pixel, so it can be published where the pairs cannot. The same settings,
seeds and images give the same pairs with the same code on the same kind of device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import StringConstraints

from flows.generate import generate, images_of
from flows.naming import counted, listed
from flows.recipe import HELDOUT_SEED_OFFSET, Recipe
from flows.settings import from_json, to_json, validated
from storage.documents import read_document, understood
from storage.errors import CorruptPartError, SourceError, StorageError, StoreMismatchError
from storage.pairs.dataset import Dataset, is_store, manifest_differences
from storage.pairs.layout import fits
from storage.pairs.receipts import Receipt
from tasks.artifacts import publish_campaign, publish_facts
from tasks.campaign.plan import code_version
from tasks.cluster.workers import Workers
from tasks.orchestration import flow
from tasks.workspace import Workspace

MANIFEST_SCHEMA = "palimpsest-manifest/1"
PLAN = "plan"
"""Stands before the columns: the hash of which images a part's runs train on."""


@dataclass(frozen=True)
class _Source:
    split: Literal["train", "heldout"]
    hash: str
    n: int


@dataclass(frozen=True)
class _MadeFrom:
    source: _Source


@dataclass(frozen=True)
class _Manifest:
    """What `describe` writes, as far as somebody reads it."""

    manifest: _MadeFrom
    recipe: dict[str, Any]
    content_hash: str
    first_group: str
    columns: list[str]
    parts: dict[Annotated[str, StringConstraints(pattern=r"^[0-9]{1,6}$")], str]
    code_versions: list[str]
    torch_versions: list[str]
    devices: list[str]
    threads: list[int]


_HASH_CHARS = 16
_SHOWN = 5


@flow(name="regenerate", flow_run_name="{store} from {manifest}")
def regenerate(
    manifest: Path,
    store: Path,
    data: str | None = None,
    pairs_at: str | None = None,
    workers: Workers | None = None,
) -> dict[str, Any]:
    """Run a manifest's campaign into a new store and compare what comes out.

    1. Read the manifest. 2. Read the images, and refuse others than it was made from. 3. Generate,
    or continue what an interrupted attempt left. 4. Compare the hashes. Raises ValueError if the
    file is no manifest, SourceError if the images are others, StoreMismatchError if `store` holds
    the dataset itself, or a copy of its files.

    Args:
        manifest: The dataset's manifest, a JSON file.
        store: A new folder.
        data: Where the images are now, such as `folder:PATH`; by default where they were.
        pairs_at: Where pairs are stored, such as s3://bucket/prefix; by default in `store`.
        workers: Where parts are computed: cluster, number of workers, device.
    """
    expected = read_manifest(manifest)
    split = expected["manifest"]["source"]["split"]
    recipe = replace(recipe_in(expected, data), pairs_at=pairs_at)
    source, images = expected["manifest"]["source"], images_of(recipe, split, store)
    if images.content_hash != source["hash"]:
        raise SourceError(
            f"the {split} images of {recipe.data} are not those of {manifest}: hash "
            f"{images.content_hash[:12]} with {len(images):,} images, expected "
            f"{source['hash'][:12]} with {source['n']:,}; give the right ones with --data"
        )
    place = Workspace(store, pairs_at).pairs(split)
    if is_store(place) and expected["first_group"] in {r.group for r in Dataset(place).receipts}:
        raise StoreMismatchError(
            f"{place} holds the files that the manifest was written from, and comparing them with "
            "themselves says nothing; give a new --store"
        )
    generate(recipe, store, split, workers=workers)
    dataset = Dataset(place)
    differences = compare(expected, dataset)
    facts = {
        "equal": dataset.content_hash == expected["content_hash"],
        "runs": dataset.n_runs,
        "parts": len(dataset.receipts),
        "dataset hash": dataset.content_hash,
        "expected hash": expected["content_hash"],
        "differences": differences,
    }
    shown = {**facts, "differences": "; ".join(differences) or "none"}
    publish_facts(f"regenerate-{split}", shown, f"{dataset.root} against {manifest}")
    publish_campaign(dataset, split, title=f"{store}, {split}")
    return facts


def recipe_in(manifest: Mapping[str, Any], data: str | None) -> Recipe:
    """The recipe of what `read_manifest` gave; `data` is where its images are now."""
    return from_json(manifest["recipe"] | ({} if data is None else {"data": data}))


def describe(
    dataset: Dataset, recipe: Mapping[str, Any] | None, data: str | None
) -> dict[str, Any]:
    """Return the manifest of `dataset`. `recipe` is its job's; `data` says where its images are.
    Raises StorageError for a store that is not complete, ValueError if nothing says where the
    images are."""
    if "campaign" not in dataset.manifest or not dataset.receipts:
        what = "no part" if "campaign" in dataset.manifest else "no campaign"
        raise StorageError(f"{dataset.root} has {what}: there is nothing to describe; generate one")
    gaps = sorted(set(range(dataset.receipts[-1].part)) - {r.part for r in dataset.receipts})
    if gaps:
        raise StorageError(
            f"{dataset.root} is not complete yet: part {gaps[0]} is missing; let its generate "
            "command finish, then describe it"
        )
    others = [r.part for r in dataset.receipts if fits(dataset.manifest, r.fingerprint) is False]
    if others:
        raise CorruptPartError(
            f"{dataset.root}: its store.json has not the settings that part {others[0]} was made "
            "with; restore it, then describe the store"
        )
    base = dict(recipe or {"name": "regenerated"}) | ({} if data is None else {"data": data})
    if "data" not in base:
        raise ValueError(
            f"{dataset.root} has no recipe.json beside it that says where its images are; give "
            "--data, for example --data folder:cifar10"
        )
    columns = sorted(dataset.receipts[0].array_hashes)
    return {
        "schema": MANIFEST_SCHEMA,
        "store": dataset.root,
        "manifest": dataset.manifest,
        "recipe": to_json(recipe_of(dataset, base)),
        "encoding": dataset.encoding,
        "n_runs": dataset.n_runs,
        "source_hash": dataset.manifest["source"]["hash"],
        "content_hash": dataset.content_hash,
        **circumstances(dataset.receipts),
        "first_group": dataset.receipts[0].group,
        "columns": [PLAN, *columns],
        "parts": {str(r.part): " ".join(_short_hashes(r, columns)) for r in dataset.receipts},
    }


def recipe_of(dataset: Dataset, base: Mapping[str, Any]) -> Recipe:
    """Return the recipe that reproduces this store: its own settings, the rest from `base`.

    Raises StorageError if there are fewer runs than the phases before the last one have.
    """
    campaign = dataset.manifest["campaign"]
    *earlier, last = campaign["sampling"]["phases"]
    n_last = dataset.n_runs - sum(phase["n_runs"] for phase in earlier)
    if n_last < 1:
        raise StorageError(
            f"{dataset.root} has {dataset.n_runs} runs, which do not reach its last phase; let its "
            "generate command finish, then describe it"
        )
    sampling = {**campaign["sampling"], "phases": [*earlier, {**last, "n_runs": n_last}]}
    own: dict[str, Any] = {
        "pairs_at": None,
        "encoding": dataset.encoding,
        "threads": campaign["threads"],
    }
    experiment, seed = campaign["experiment"], campaign["root_seed"]
    if dataset.manifest["source"]["split"] == "train":
        own |= {"experiment": experiment, "sampling": sampling, "seed": seed}
    else:
        own |= {"heldout_experiment": experiment, "heldout": sampling}
        own |= {"seed": seed - HELDOUT_SEED_OFFSET}
    return from_json({**base, **own})


MANIFEST_FIX = "write one with: palimpsest dataset manifest --store STORE --out manifest.json"


def read_manifest(file: Path) -> dict[str, Any]:
    """The manifest in `file`; ValueError if there is none or it is of another kind."""
    try:
        manifest = read_document(file, MANIFEST_FIX)
    except FileNotFoundError as error:
        raise ValueError(f"{file} is not there; {MANIFEST_FIX}") from error
    schema = manifest.get("schema")
    if schema != MANIFEST_SCHEMA:
        raise ValueError(
            f"{file} has schema {schema!r}, expected {MANIFEST_SCHEMA!r}; read it with the release "
            "of palimpsest that wrote it"
        )
    with understood(file, MANIFEST_FIX):
        validated(_Manifest, manifest)
        from_json(manifest["recipe"])
        n_columns = len(manifest["columns"])
        for part, hashes in manifest["parts"].items():
            if len(hashes.split()) != n_columns:
                raise ValueError(f"part {part} has not one hash for each of {n_columns} columns")
    return manifest


def foreseen(expected: Mapping[str, Any]) -> list[str]:
    """List differences of code and torch, known before anything runs; a sentence each."""
    pairs = (
        ("code", ", ".join(expected["code_versions"]), code_version()),
        ("torch", ", ".join(expected["torch_versions"]), torch.__version__),
    )
    return [
        f"{name} was {there} and is {here} here: the pairs may differ"
        for name, there, here in pairs
        if there != here
    ]


def compare(expected: Mapping[str, Any], dataset: Dataset) -> list[str]:
    """List how `dataset` differs from the manifest, a sentence each; the machine comes last."""
    if dataset.content_hash == expected["content_hash"]:
        return []
    found = {receipt.part: receipt for receipt in dataset.receipts}
    wanted = {int(part): hashes.split() for part, hashes in expected["parts"].items()}
    sentences = []
    for name, parts in (("missing", wanted.keys() - found), ("too many", found.keys() - wanted)):
        if parts:
            sentences.append(f"{counted(len(parts), 'part')} {name}: {listed(sorted(parts))}")
    columns = expected["columns"]
    differing: dict[int, list[str]] = {}
    for part in sorted(found.keys() & wanted):
        hashes = _short_hashes(found[part], columns[1:])
        changed = [n for n, a, b in zip(columns, hashes, wanted[part], strict=True) if a != b]
        if changed:
            differing[part] = changed
    if differing:
        first = f", the first {_SHOWN} of them" if len(differing) > _SHOWN else ""
        sentences.append(f"of {counted(len(wanted), 'part')}, {len(differing):,} differ{first}:")
        sentences += [f"part {p}: {listed(differing[p])}" for p in list(differing)[:_SHOWN]]
        always = [n for n in columns if all(n not in changed for changed in differing.values())]
        sentences.append(f"equal in every part: {', '.join(always) or 'nothing'}")
    reasons = [
        f"{name.replace('_', ' ')}: {listed(expected[name])} there, {listed(values)} here"
        for name, values in circumstances(dataset.receipts).items()
        if expected[name] != values
    ]
    settings = manifest_differences(expected["manifest"], dataset.manifest)
    reasons += [f"setting {difference}" for difference in settings[:_SHOWN]]
    same = (
        "code, devices, threads, torch and settings are the same: the kind of processor or another "
        "library may differ, or the runs are not deterministic here"
    )
    return sentences + (reasons or [same])


def circumstances(receipts: Sequence[Receipt]) -> dict[str, list[Any]]:
    """Versions, devices and threads, which may influence the values beside the settings."""
    return {
        "code_versions": sorted({receipt.code_version for receipt in receipts}),
        "torch_versions": sorted({receipt.torch_version for receipt in receipts}),
        "devices": sorted({receipt.device for receipt in receipts}),
        "threads": sorted({receipt.threads for receipt in receipts}),
    }


def _short_hashes(receipt: Receipt, columns: Sequence[str]) -> list[str]:
    """The starts of the hashes of a part's plan and columns, in the order of `columns`."""
    full = [receipt.plan_hash, *(receipt.array_hashes.get(name, "absent") for name in columns)]
    return [hash_[:_HASH_CHARS] for hash_ in full]
