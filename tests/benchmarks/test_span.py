"""The span attack's benchmarks: each runs small, and sides that differ are not timed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.span import features as span_features
from benchmarks.span import kkt as span_kkt
from benchmarks.span import speed as span
from benchmarks.span.kkt import SMALL, SpanCoordinates, check_gradients, paired, planted
from storage.sources.load import load_images


@pytest.mark.slow
def test_the_whole_of_it_runs_small() -> None:
    lines = list(span.measure(load_images("photos", split="heldout"), quick=True, seed=0))
    by_case = {(line.case, line.unit): line.value for line in lines}
    assert (
        by_case["20 planted Laplacian sources, 2,000 samples, float64", "smallest correlation"]
        > 0.9
    )
    good = {case: value for (case, unit), value in by_case.items() if unit == "good of 10"}
    cases = {
        "true span of 10 images",
        "victim of restoration-cpu, 10 images, start unknown",
        "victim of restoration-cpu, 10 images, start known",
    }
    assert set(good) == cases | {f"{case}, nothing clipped" for case in cases}
    assert min(good.values()) >= 8
    assert by_case["true span of 10 images", "mean SSIM"] > 0.5


def test_planted_sources_that_do_not_come_back_are_seen() -> None:
    smallest, *_rest = span.planted(n=20, t=60)  # too few samples to tell sources apart
    assert smallest.value < 0.9


def test_features_come_back_and_those_of_other_images_do_not() -> None:
    images = load_images("photos", split="heldout")
    lines = list(span_features.measure(images, quick=True, seed=0))
    found = {(line.case, line.unit): line.value for line in lines}
    known = "20 maps of (16, 14, 14), known start"
    assert {case for case, _unit in found} == {known, known.replace("known", "unknown")}
    assert found[known, "features of 20"] >= 5
    assert found[known, "other images' features of 20"] <= 2
    assert (
        found[known, "median correlation"]
        > 0.2 + found[known, "median correlation with other images' features"]
    )


@pytest.mark.slow
def test_the_whole_comparison_of_coordinates_runs_small() -> None:
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
