"""The benchmarks of the pair store at tiny sizes: do they measure what their lines say?"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from benchmarks.store import sample as store_sample
from benchmarks.store import scale as store_scale
from benchmarks.store.sample import Sizes, sample_columns
from benchmarks.store.scale import Campaign, made_up_receipt, opening
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


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Campaign:
    monkeypatch.setattr(store_scale, "RUN_IMAGES", 8)
    monkeypatch.setattr(store_scale, "RUN_PAIRS", 10)
    return Campaign(n_parts=4, n_images=50)


def test_opening_is_measured_in_a_process_of_its_own(tmp_path: Path, few: Campaign) -> None:
    n_bytes = store_scale.write_receipts(tmp_path, few)
    assert n_bytes == sum(path.stat().st_size for path in tmp_path.glob("receipts/*.json"))
    open_s, peak, imports, hash_s = opening(tmp_path, few, n_bytes, repeats=1)
    assert f"4 parts, {few.n_pairs} pairs" in open_s.case
    assert few.n_pairs == 10 * (62 + 63 + 62 + 63)
    assert (open_s.reference_value, peak.reference_value) == (3.0, 1.5)
    assert 0.02 < imports.value <= peak.value < 0.5  # without torch, which the benchmark has
    assert hash_s.value < 1
    (tmp_path / "receipts" / "part-000003.json").unlink()
    with pytest.raises(ValueError, match=f"wrote {few.n_pairs}"):
        list(opening(tmp_path, few, n_bytes, repeats=1))
