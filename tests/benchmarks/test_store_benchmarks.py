"""The benchmarks of the pair store at tiny sizes: do they measure what their lines say?"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from benchmarks.store import sample as store_sample
from benchmarks.store import scale as store_scale
from benchmarks.store.sample import Sizes, sample_columns
from benchmarks.store.scale import Campaign, made_up_receipt
from storage.object_store import open_place
from storage.pairs.dataset import create_or_open
from storage.pairs.parts import write_part
from storage.pairs.receipts import load_receipt, receipt_path


def test_a_made_up_receipt_has_everything_that_a_written_one_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_scale, "RUN_IMAGES", 4)
    monkeypatch.setattr(store_scale, "RUN_PAIRS", 5)
    campaign = Campaign(n_parts=1, n_images=30)
    made_up = made_up_receipt(campaign, 0)
    sizes = Sizes(n_parts=1, n_runs=62, n_images=4, n_pairs=5)
    create_or_open(tmp_path, {})
    columns = sample_columns(0, sizes) | {
        name: campaign.columns(0)[name] for name in ("targets/image_id",)
    }
    written = write_part(tmp_path, 0, columns, provenance=store_sample.PROVENANCE)
    for field in ("schema", "encoding", "picture", "n_runs", "n_targets", "n_pairs", "outcomes"):
        assert getattr(made_up, field) == getattr(written, field), field
    assert made_up.files.keys() == written.files.keys()
    assert made_up.array_hashes.keys() == written.array_hashes.keys()
    assert len(made_up.fingerprint) == 64
    made_up_table, table = made_up.image_table(), written.image_table()
    np.testing.assert_array_equal(made_up_table.image_ids, table.image_ids)
    np.testing.assert_array_equal(made_up_table.n_runs, table.n_runs)
    assert made_up_table.n_pairs.sum() == table.n_pairs.sum() == 310
    (tmp_path / receipt_path(0)).write_bytes(made_up.to_json())
    again = load_receipt(open_place(tmp_path), receipt_path(0))
    assert all(
        getattr(again, field.name) == getattr(made_up, field.name) for field in fields(made_up)
    )
