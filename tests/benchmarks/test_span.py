"""The benchmark of the span attack, small, on the photographs that come with scikit-image."""

from __future__ import annotations

from benchmarks import span
from storage.sources.load import load_images


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
