"""The benchmark of features behind a frozen network, small, on the photographs of scikit-image."""

from __future__ import annotations

import torch

from benchmarks import span_features
from storage.sources.load import load_images


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


def test_likeness_knows_neither_sign_nor_scale_nor_level() -> None:
    true = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    found = torch.stack([-4 * true[2] + 7, true[0] + 0.01])
    best = span_features.likeness(found, true)
    torch.testing.assert_close(best[[0, 2]], torch.ones(2))
    assert float(best[1]) < 0.3
