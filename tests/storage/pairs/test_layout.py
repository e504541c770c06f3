from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from storage.pairs.layout import (
    COLUMNS,
    GIVEN_COLUMNS,
    LATER_COLUMNS,
    compress_reconstruction,
    expand_reconstruction,
)
from tests.storage.stores import columns, stored_columns

finite = st.floats(-(2.0**127), 2.0**127, width=32)


@settings(max_examples=200, deadline=None)
@given(
    arrays(
        np.float32,
        st.tuples(st.integers(0, 3), st.just(1), st.just(2), st.just(2)),
        elements=finite,
    )
)
def test_reconstructions_come_back_within_2_to_the_minus_12_of_their_scale(x: np.ndarray[Any, Any]):
    stored, scale = compress_reconstruction(x)
    assert stored.dtype == np.float16
    assert np.isfinite(stored).all()
    back = expand_reconstruction(stored, scale)
    error = np.abs(back.astype(np.float64) - x).max(axis=(1, 2, 3), initial=0)
    assert (error <= scale * 2.0**-12 * 1.001).all()
    zero = np.abs(x).max(axis=(1, 2, 3), initial=0) == 0
    assert (scale[zero] == 1).all()


def test_stored_columns_have_the_dtypes_of_the_schema():
    stored = stored_columns(columns())
    assert list(stored) == list(COLUMNS)
    for name, array in stored.items():
        assert array.dtype == np.dtype(COLUMNS[name].dtype)
        assert array.flags.c_contiguous


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
        ("pairs/target_row", poked(0, 10), "refers to rows .* to 10 but targets has 10 rows"),
        ("pairs/target_row", poked(0, -1), "refers to rows -1"),
        ("targets/run_row", poked(0, 2), "runs has 2 rows"),
        ("pairs/target_row", poked(0, 9), "row 0 is of run row 0 but its target is of run row 1"),
        ("runs/outcome", poked(0, 4), "outcome has 4"),
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
    assert {*GIVEN_COLUMNS, *LATER_COLUMNS} == set(columns())
