"""Scores of an attack beside decoys and beside the mean image: planted leaks, and none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from recon_core.metrics import ssim_pairs
from tasks.attack_file import comparison
from tasks.attack_file.comparison import compared, leads, sentences
from tests.recon_core.drawing import generator
from tests.recon_core.tiles import digits

N = 24
IMAGES, DECOYS = digits(2 * N).split(N)
MEAN = IMAGES.mean(0)


def record(pictures: Tensor, for_decoys: Tensor) -> dict[str, Any]:
    sides = {
        "images": (IMAGES, pictures, ssim_pairs(pictures, IMAGES)),
        "decoys": (DECOYS, for_decoys, ssim_pairs(for_decoys, DECOYS)),
    }
    found = compared(sides, MEAN, good=0.2)
    scores = {name: {"n": N, "n_good": int((s > 0.2).sum())} for name, (_i, _p, s) in sides.items()}
    return scores | {"compared": found}


def test_pictures_of_the_images_identify_them_and_decoys_score_otherwise() -> None:
    noisy = (IMAGES + 0.1 * torch.randn(IMAGES.shape, generator=generator())).clamp(0, 1)
    scores = record(noisy, noisy)  # the best of a decoy is a picture of some image
    found = scores["compared"]
    assert found["identified"]["images"] >= N - 2
    assert found["identified"]["decoys"] < N / 3
    assert found["p_value"] < 0.01
    said = sentences(scores, "good")
    assert f"{found['identified']['images']} of {N} images" in said[0]
    assert not any("no evidence" in sentence for sentence in said)


def test_the_mean_alone_identifies_nothing_and_is_no_evidence() -> None:
    """On a black ground many of its scores are good, of images and of decoys."""
    alone = MEAN.expand_as(IMAGES).clone()
    scores = record(alone, alone)
    found = scores["compared"]
    assert scores["images"]["n_good"] >= 5
    assert found["mean_image"]["images"]["n_good"] == scores["images"]["n_good"]
    assert found["identified"]["images"] <= 1
    said = " ".join(sentences(scores, "good"))
    assert f"good match of {scores['images']['n_good']} of {N}" in said


def test_an_attack_whose_decoys_score_alike_says_so() -> None:
    both = torch.rand(N, 1, 16, 16, generator=generator(1))
    scores = record(both, both)
    assert scores["compared"]["p_value"] > 0.05
    assert scores["images"]["n_good"] == 0
    said = sentences(scores, "good")
    assert any("no evidence" in sentence for sentence in said)
    assert any("nothing came back well" in sentence for sentence in said)
    assert not any("nothing came back well" in sentence for sentence in sentences(scores, "poor"))


def test_few_images_have_no_p_value_and_no_decoys_are_no_error() -> None:
    some = {"images": (IMAGES[:4], IMAGES[:4], torch.ones(4))}
    found = compared(some, MEAN, good=0.4)
    assert found["p_value"] is None
    assert set(found["identified"]) == {"images"}
    few = some | {"decoys": (DECOYS, DECOYS, torch.ones(N))}
    assert compared(few, MEAN, good=0.4)["p_value"] is None


def test_many_images_are_compared_with_the_nearest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.cat([IMAGES, DECOYS])
    member = torch.arange(2 * N) < N
    pictures = images.roll(1, 0) * 0.5 + images * 0.5
    pictures[3] = torch.nan
    whole = leads(pictures, images, member)
    assert whole[3] == -torch.inf
    monkeypatch.setattr(comparison, "MAX_PAIRS", 10)
    near = leads(pictures, images, member)
    assert (near >= whole - 1e-5).all()
    assert (near - whole)[whole.isfinite()].abs().median() < 1e-5
