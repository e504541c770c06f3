"""Small stores for the tests: columns of a part with made-up but consistent contents."""

from __future__ import annotations

from typing import Any

import numpy as np

from storage.object_store import Location
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.layout import COLUMNS, GIVEN_COLUMNS, shape_of, table_of
from storage.pairs.parts import write_part
from storage.pairs.receipts import Provenance, Receipt

MANIFEST = {
    "experiment": {"family": "kkt", "width": 20, "attack": {"kind": "kkt"}},
    "root_seed": 0,
}


def columns(
    *, seed: int = 0, n_runs: int = 2, n_images: int = 5, n_pairs: int = 7, size: int = 4
) -> dict[str, np.ndarray[Any, Any]]:
    """`n_runs` runs of `n_images` images and `n_pairs` pairs each, numbered from `seed` up."""
    rng = np.random.default_rng(seed)
    picture = (3, size, size)
    run_row = np.repeat(np.arange(n_runs, dtype=np.int32), n_images)
    pair_run = np.repeat(np.arange(n_runs, dtype=np.int32), n_pairs)
    n_targets, n_all = n_runs * n_images, n_runs * n_pairs
    within = rng.integers(0, n_images, n_all) if n_images else np.zeros(0, np.int64)

    rows = {"runs": n_runs, "targets": n_targets, "pairs": n_all}
    measured = {
        name: rng.random(shape_of(name, rows[table_of(name)], picture), dtype=np.float32)
        for name in GIVEN_COLUMNS
        if COLUMNS[name].dtype == "<f4"
    }
    return measured | {
        "runs/run": np.arange(seed * n_runs, (seed + 1) * n_runs, dtype=np.int64),
        "runs/outcome": np.zeros(n_runs, np.uint8),
        "targets/image": rng.integers(0, 256, (n_targets, *picture), dtype=np.uint8),
        "targets/image_id": rng.integers(0, 12, n_targets),
        "targets/label": rng.integers(0, 2, n_targets),
        "targets/run_row": run_row,
        "pairs/reconstruction": rng.standard_normal((n_all, *picture), dtype=np.float32) * 7,
        "pairs/target_row": (pair_run * n_images + within).astype(np.int32),
        "pairs/run_row": pair_run,
        "pairs/candidate": np.arange(n_all, dtype=np.int32),
        "pairs/iteration": rng.choice([100, 500, 2000], n_all),
        "pairs/confident": rng.random(n_all) < 0.7,
    }


def provenance(**changes: Any) -> Provenance:
    values: dict[str, Any] = {
        "run_first": 0,
        "fingerprint": "f",
        "plan_hash": "p",
        "source_hash": "s",
        "code_version": "0.1.0",
        "torch_version": "2.13.0",
        "device": "cpu",
        "threads": 1,
        "seconds": 1.5,
    }
    return Provenance(**values | changes)


def write(root: Location, part: int, **shape: int) -> Receipt:
    create_or_open(root, MANIFEST)
    return write_part(root, part, columns(seed=part, **shape), provenance=provenance())


def store(root: Location, n_parts: int = 3, **shape: int) -> Dataset:
    """A store with `n_parts` parts."""
    create_or_open(root, MANIFEST)
    for part in range(n_parts):
        write(root, part, **shape)
    return Dataset(root)
