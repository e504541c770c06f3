"""Columns as they are stored, and the numbers of `dataset info` beside counting by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.layout import (
    GIVEN_COLUMNS,
    RECONSTRUCTION_DTYPES,
    Encoding,
    compress_reconstruction,
    expand_reconstruction,
    stored_columns,
)
from storage.pairs.parts import write_part
from storage.pairs.statistics import saved_iterations, summarise
from tests.storage.stores import MANIFEST, columns, provenance, store

finite = st.floats(-(2.0**127), 2.0**127, width=32)


@pytest.mark.parametrize(
    ("encoding", "tolerance"), [("float16", 2.0**-12), ("uint8", 0.5), ("float32", 0.0)]
)
@settings(max_examples=70, deadline=None)
@given(
    x=arrays(
        np.float32,
        st.tuples(st.integers(0, 3), st.just(1), st.just(2), st.just(2)),
        elements=finite,
    )
)
def test_reconstructions_come_back_within_a_share_of_their_scale(
    x: np.ndarray[Any, Any], encoding: Encoding, tolerance: float
):
    stored, scale = compress_reconstruction(x, encoding)
    assert stored.dtype == RECONSTRUCTION_DTYPES[encoding]
    assert np.isfinite(stored).all()
    back = expand_reconstruction(stored, scale, encoding)
    error = np.abs(back.astype(np.float64) - x).max(axis=(1, 2, 3), initial=0)
    assert (error <= scale * tolerance * 1.001 + 1e-38 * (encoding == "uint8")).all()
    zero = np.abs(x).max(axis=(1, 2, 3), initial=0) == 0
    assert not back[zero].any()


def changed(name: str, change: Any) -> dict[str, Any]:
    given = columns()
    given[name] = change(given[name].copy())
    return given


def poked(index: Any, value: Any) -> Any:
    def change(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        array[index] = value
        return array

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("pairs/iteration", lambda a: a[:-1], r"pairs/iteration has shape \(13,\).*pairs=14"),
        ("targets/image", lambda a: a[:, :, :2], r"targets/image has shape .*h=4"),
        ("targets/augment", lambda a: a[:, :8], "9"),
        ("runs/mean_image", lambda a: a[:, 0], r"runs/mean_image has shape"),
        (
            "pairs/target_row",
            poked(0, 10),
            r"target_row goes from 0 to 10, .* less than 10",
        ),
        ("pairs/target_row", poked(0, -1), "target_row goes from -1 to"),
        ("targets/run_row", poked(0, 2), "targets/run_row goes .* less than 2"),
        ("pairs/target_row", poked(0, 9), "row 0 is of run row 0 but its target is of run row 1"),
        ("runs/outcome", poked(0, 4), "outcome goes from 0 to 4"),
        ("runs/run", poked(0, 1), "a run number twice"),
        ("pairs/reconstruction", poked((3, 0, 0, 0), np.nan), "NaN or infinity in row 3"),
        ("targets/label", poked(0, 40000), "-32768 to 32767"),
        ("pairs/confident", lambda a: a.astype(np.uint8), "dtype uint8; expected bool"),
        ("targets/image", lambda a: a / 255, "dtype float64; expected uint8"),
    ],
)
def test_columns_that_do_not_fit_are_refused_by_name(name: str, change: Any, message: str):
    with pytest.raises(ValueError, match=message):
        stored_columns(changed(name, change))


def test_missing_and_unknown_columns_are_named():
    given = columns()
    del given["runs/run"]
    given["pairs/scale"] = np.ones(14, np.float32)
    with pytest.raises(ValueError, match=r"missing \['runs/run'\], unknown \['pairs/scale'\]"):
        stored_columns(given)
    assert set(GIVEN_COLUMNS) == set(columns())


def test_the_summary_counts_what_the_arrays_hold(tmp_path: Path):
    dataset = store(tmp_path / "s", 4, n_pairs=40)
    summary, counts = summarise(dataset)
    confident = dataset.column("pairs/confident")
    read = [
        dataset.read(r.part, ["targets/image_id", "pairs/target_row"]) for r in dataset.receipts
    ]
    image_of_pair = np.concatenate([c["targets/image_id"][c["pairs/target_row"]] for c in read])
    images = np.unique(dataset.column("targets/image_id"))
    by_hand = [int((confident & (image_of_pair == image)).sum()) for image in images]
    assert counts.tolist() == by_hand
    files = [path for path in (tmp_path / "s" / "parts").rglob("*") if path.is_file()]
    n_bytes = sum(path.stat().st_size for path in files)
    assert summary == {
        "parts": 4,
        "runs": 8,
        "outcomes": {"ok": 8},
        "targets": 40,
        "pairs": 320,
        "confident_pairs": confident.sum(),
        "images_trained_on": len(images),
        "images_with_a_confident_pair": np.count_nonzero(by_hand),
        "encoding": "float16",
        "bytes": n_bytes,
        "bytes_per_pair": round(n_bytes / 320, 1),
        "worker_seconds": 6.0,
        "code": ["0.1.0"],
        "torch": ["2.13.0"],
        "devices": ["cpu"],
        "dataset_hash": dataset.content_hash,
    }


def test_pairs_and_similarity_of_each_iteration_are_counted_over_all_parts(tmp_path: Path):
    create_or_open(tmp_path, MANIFEST)
    for part in range(3):
        given = columns(seed=part, n_pairs=50)
        given["pairs/confident"] &= given["pairs/iteration"] > 100
        given["runs/outcome"] = np.array([0, 1], np.uint8)
        write_part(tmp_path, part, given, provenance=provenance())
    dataset = Dataset(tmp_path)
    iteration, ssim, confident = (
        dataset.column(f"pairs/{name}") for name in ("iteration", "ssim_best", "confident")
    )
    calls: list[tuple[int, int]] = []
    rows = saved_iterations(dataset, on_part=lambda done, n: calls.append((done, n)))
    assert [row.iteration for row in rows] == [100, 500, 2000]
    for row in rows:
        here = iteration == row.iteration
        assert (row.n_pairs, row.n_confident) == (here.sum(), (here & confident).sum())
        assert row.ssim == pytest.approx(ssim[here].mean(dtype=np.float64))
        mean = ssim[here & confident].mean(dtype=np.float64) if row.n_confident else None
        assert row.ssim_confident == (mean if mean is None else pytest.approx(mean))
    assert rows[0].ssim_confident is None
    assert sum(row.n_pairs for row in rows) == dataset.n_pairs
    assert calls == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert summarise(dataset)[0]["outcomes"] == {"ok": 3, "unfitted": 3}
