"""The benchmark of span coordinates, small, on the photographs that come with scikit-image."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import span_kkt
from benchmarks.span_kkt import SMALL, SpanCoordinates, check_gradients, paired, planted
from storage.sources.load import load_images


def test_the_whole_of_it_runs_small() -> None:
    images = load_images("photos", split="heldout")
    lines = list(span_kkt.measure(images, quick=True, n_victims=2))
    steps = [line for line in lines if "attack step" in line.case]
    assert {line.reference for line in steps} == {
        span_kkt.PUBLISHED,
        span_kkt.LEAN,
        span_kkt.IN_SPAN,
        span_kkt.IN_PIXELS,
    }
    good = [
        line for line in lines if line.case.startswith("2 victims") and "span less" in line.case
    ]
    assert [line.unit for line in good] == ["good of 10", "mean SSIM", "good decoys of 10", "s"]


def test_sides_with_other_gradients_are_not_timed() -> None:
    start = planted(load_images("photos", split="heldout"), SMALL)
    span = SpanCoordinates.of(SMALL.architecture, start.victims[0])
    check_gradients(SMALL, start, span)
    elsewhere = replace(start, lam=start.lam.flip(1))
    other = replace(span, vectors=span.vectors.flip(1))
    check_gradients(SMALL, elsewhere, span)
    with pytest.raises(ValueError, match="not comparable"):
        check_gradients(SMALL, start, other)


def test_the_interval_is_students() -> None:
    mean, low, high = paired([1.0, 2.0, 3.0])
    assert (mean, low, high) == pytest.approx((2.0, 2 - 2.4841, 2 + 2.4841), abs=1e-3)
