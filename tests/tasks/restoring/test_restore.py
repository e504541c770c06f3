"""Calling a restorer from Python: what comes out, on what it depends, what is refused."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from recon_core.restore.generic import GENERIC_RESTORERS
from storage.errors import StorageError
from tasks.restoring.inputs import Inputs, open_inputs
from tasks.restoring.restore import Span, open_restorer, open_span, picture_seeds, summarised
from tests.recon_core.drawing import generator
from tests.recon_core.tiles import photograph_tiles
from tests.tasks.restoring.restorers import (
    SIZE,
    TINY_BF_DNCNN,
    TINY_EDM,
    TINY_UNET,
    floats,
    identity,
    network_of,
    picture_folder,
    pixels,
    trained,
)

needs_wavelets = pytest.mark.skipif(
    importlib.util.find_spec("pywt") is None,
    reason="PyWavelets is not installed; pip install PyWavelets",
)
CLOSE = {"atol": 2e-5, "rtol": 0}
"""Float32 rounding, which differs between batches of different sizes."""


def test_three_lines_restore_arrays_and_tensors_alike(tmp_path: Path) -> None:
    restorer = open_restorer(trained(tmp_path / "edm"), device="cpu")
    pictures = floats(3)
    mean, disagreement = restorer(pictures, n_samples=4)
    assert isinstance(mean, np.ndarray)
    assert mean.shape == (3, 3, SIZE, SIZE)
    assert disagreement.shape == (3, SIZE, SIZE)
    assert mean.dtype == disagreement.dtype == np.float32
    assert 0 <= mean.min() <= mean.max() <= 1
    assert 0 <= disagreement.min() <= disagreement.max() <= 0.5
    assert (disagreement.mean(axis=(1, 2)) > 0.01).all()
    as_tensors = restorer(torch.from_numpy(pictures).double(), n_samples=4)
    assert all(isinstance(value, torch.Tensor) for value in as_tensors)
    np.testing.assert_array_equal(as_tensors[0].numpy(), mean)
    np.testing.assert_array_equal(as_tensors[1].numpy(), disagreement)


@pytest.mark.parametrize("restorer", [TINY_EDM, TINY_BF_DNCNN, TINY_UNET])
def test_a_result_does_not_depend_on_the_batch(tmp_path: Path, restorer) -> None:
    opened = open_restorer(trained(tmp_path / "model", restorer), device="cpu")
    pictures = floats(5)
    mean, disagreement = opened(pictures, n_samples=3)
    for batch_size in (1, 2, 4, 7):
        again = opened(pictures, n_samples=3, batch_size=batch_size)
        np.testing.assert_allclose(again[0], mean, **CLOSE)
        np.testing.assert_allclose(again[1], disagreement, **CLOSE)
    alone, shuffled = opened(pictures[3:4], n_samples=3), opened(pictures[::-1], n_samples=3)
    np.testing.assert_allclose(alone[0][0], mean[3], **CLOSE)
    np.testing.assert_allclose(shuffled[0][::-1], mean, **CLOSE)


def test_memory_is_for_a_batch_and_not_for_all() -> None:
    opened = identity()
    opened(floats(10), n_samples=50, batch_size=4)
    assert opened.restorer.given == [4, 4, 2]  # one answer each: samples do not count
    opened.restorer.given.clear()
    opened(np.zeros((3, 3, 512, 1024), np.float32))
    assert opened.restorer.given == [2, 1]  # a million pixels at once


def test_the_mean_is_that_of_the_samples_and_the_disagreement_their_spread(tmp_path: Path) -> None:
    opened = open_restorer(trained(tmp_path / "edm"), device="cpu")
    pictures = floats(2)
    mean, disagreement = opened(pictures, n_samples=5, seed=3)
    given = torch.from_numpy(pictures)
    seeds = picture_seeds(given, 3)
    singles = [opened.samples(given, seeds, n_samples=k + 1)[k].numpy() for k in range(5)]
    shown = np.clip(singles, 0, 1)
    np.testing.assert_allclose(mean, np.mean(singles, axis=0).clip(0, 1), **CLOSE)
    np.testing.assert_allclose(disagreement, np.std(shown, axis=0).mean(axis=1), **CLOSE)
    assert min(np.abs(singles[0] - other).max() for other in singles[1:]) > 0.01
    first, none = opened(pictures, n_samples=1, seed=3)
    np.testing.assert_allclose(first, shown[0], **CLOSE)
    assert not none.any()


def test_noise_on_black_does_not_brighten_the_mean() -> None:
    samples = 0.1 * torch.randn(400, 2, 3, 8, 8, generator=generator(5))
    mean, disagreement = summarised(samples)
    assert mean.mean() < 0.005
    assert samples.clamp(0, 1).mean() > 0.03
    assert disagreement.max() < 0.1


def test_a_seed_is_of_the_content_in_8_bits() -> None:
    pictures = torch.from_numpy(floats(3))
    seeds = picture_seeds(pictures)
    assert len(set(seeds.tolist())) == 3
    assert torch.equal(picture_seeds(pictures.flip(0)), seeds.flip(0))
    assert torch.equal(picture_seeds(pictures + 1e-4), seeds)
    assert not torch.equal(picture_seeds(pictures, 1), seeds)
    assert not torch.equal(picture_seeds(pictures.flip(1)), seeds)


@pytest.mark.parametrize(
    "name", ["bf_dncnn", *(pytest.param(name, marks=needs_wavelets) for name in GENERIC_RESTORERS)]
)
def test_one_answer_has_no_disagreement(tmp_path: Path, name: str) -> None:
    what = trained(tmp_path / "bf", TINY_BF_DNCNN) if name == "bf_dncnn" else name
    opened, pictures = open_restorer(what, device="cpu"), floats(2, size=48)[..., :33, :]
    mean, disagreement = opened(pictures, n_samples=6)
    assert mean.shape == (2, 3, 33, 48)
    assert not disagreement.any()
    assert np.abs(mean - pictures).max() > 0.01
    assert opened.name == name
    assert not opened.generative


def test_what_opened_it_is_told(tmp_path: Path) -> None:
    folder = trained(tmp_path / "edm")
    opened = open_restorer(folder, device="cpu")
    assert opened.settings["kind"] == opened.name == "edm"
    assert opened.resolution == (SIZE, SIZE)
    by_card = open_restorer(str(folder / "model.json"), device="cpu")
    assert by_card.fingerprint == opened.fingerprint
    other = open_restorer(trained(tmp_path / "other", seed=1), device="cpu")
    assert other.fingerprint != opened.fingerprint


@pytest.mark.parametrize(
    ("pictures", "said"),
    [
        ((floats(1) * 255).astype(np.uint8), "uint8.*x / 255"),
        (floats(1) * 255, r"go from 0 to 249.*\[0, 1\]"),
        (floats(1) * 2 - 1, r"go from -.*\(x \+ 1\) / 2"),
        (floats(1) * np.float32("nan"), "go from nan to nan"),
        (floats(1)[0], r"shape \(3, 8, 8\).*expected \(n, 3, h, w\)"),
        (floats(1).transpose(0, 2, 3, 1), r"shape \(1, 8, 8, 3\)"),
        (floats(1, size=10), "10 x 10, but edm works at 8 x 8; resize them to 8 x 8"),
        ([[0.5]], "pictures are list"),
    ],
)
def test_pictures_that_cannot_be_restored_are_refused(tmp_path: Path, pictures, said: str) -> None:
    opened = open_restorer(trained(tmp_path / "edm"), device="cpu")
    with pytest.raises(ValueError, match=said):
        opened(pictures)


@pytest.mark.parametrize(("height", "width"), [(10, 6), (9, 11), (9, 4), (1, 1)])
def test_a_convolutional_restorer_takes_any_size(tmp_path: Path, height: int, width: int) -> None:
    opened = open_restorer(trained(tmp_path / "bf", TINY_BF_DNCNN), device="cpu")
    pictures = floats(2, size=12)[..., :height, :width]
    mean, disagreement = opened(pictures)
    assert mean.shape == (2, 3, height, width)
    assert disagreement.shape == (2, height, width)
    beyond = [(0, 0), (0, 0), (0, height % 2), (0, width % 2)]
    expected = opened(np.pad(pictures, beyond, mode="edge"))[0]
    np.testing.assert_allclose(mean, expected[..., :height, :width], **CLOSE)


def test_rounding_beyond_the_range_is_clipped() -> None:
    pictures = np.full((1, 3, SIZE, SIZE), np.float32(1) + np.finfo(np.float32).eps, np.float32)
    assert identity()(pictures)[0].max() == 1


def test_what_cannot_restore_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_restorer(trained(tmp_path / "bf", TINY_BF_DNCNN), device="cpu")
    next(opened.net.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match="bf_dncnn gave values that are not finite"):
        opened(floats(1))
    for name, value in (("n_samples", 0), ("batch_size", 0), ("seed", -1)):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            identity()(floats(1), **{name: value})
    with pytest.raises(ValueError, match=r"edn is not there.*nlm, tv, wavelet"):
        open_restorer(tmp_path / "edn")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match="no finished restorer"):
        open_restorer(tmp_path / "empty", device="cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StorageError, match="pip install PyWavelets"):
        open_restorer("nlm")


@pytest.fixture
def spanned(tmp_path: Path) -> tuple[Tensor, Inputs, Span]:
    """Six pictures, and a network that learned them."""
    images = photograph_tiles(SIZE, shrink=4)[:6]
    inputs = open_inputs(picture_folder(tmp_path / "in", images.numpy()))
    weights, start = tmp_path / "victim.safetensors", tmp_path / "start.safetensors"
    network_of(images.numpy(), weights, start=start)
    return images.float() / 255, inputs, Span(weights=weights, initial=start)


def test_answers_lie_in_the_span_of_the_weights(
    spanned: tuple[Tensor, Inputs, Span], tmp_path: Path
) -> None:
    given, inputs, of = spanned
    opened = open_span(replace(of, steps="last"), inputs)
    assert opened.facts["directions"] == 5
    assert opened.facts["share_of_pictures"] == pytest.approx(1.0, abs=1e-4)
    assert len(opened.facts["initial"]) == 64
    free = open_restorer(trained(tmp_path / "edm"), device="cpu")
    bound = open_restorer(tmp_path / "edm", device="cpu", span=opened)
    assert bound.name == "edm, in the span"
    facts = opened.facts | {"steps": "last", "tolerance": 0.0}
    assert (bound.settings["span"], bound.fingerprint) == (facts, free.fingerprint)
    seeds = picture_seeds(given)
    samples = [r.samples(given, seeds, n_samples=2) for r in (free, bound)]
    assert not torch.allclose(*samples, atol=0.01)
    assert torch.allclose(opened.allowed.nearest(samples[0]), samples[1], atol=1e-6)


@pytest.mark.parametrize("std", [None, (0.2, 0.25, 0.3)])
def test_gradients_give_the_span_without_the_start(
    spanned: tuple[Tensor, Inputs, Span], tmp_path: Path, std: tuple[float, ...] | None
) -> None:
    _given, inputs, of = spanned
    begun, trained = load_file(str(of.initial)), load_file(of.weights)
    moved = (trained["0.weight"] - begun["0.weight"]).unflatten(1, (3, SIZE, SIZE))
    moved = (moved / torch.tensor(std or (1.0,))[:, None, None]).flatten(1)
    save_file({"0.weight": moved}, tmp_path / "gradients.safetensors")
    of = replace(of, initial=None, gradients=(tmp_path / "gradients.safetensors",), std=std)
    opened = open_span(of, inputs)
    assert (opened.facts["source"], opened.facts["directions"]) == ("gradients", 5)
    assert opened.facts["share_of_pictures"] == pytest.approx(1.0, abs=1e-4)
    assert open_span(replace(of, gradients=()), inputs).facts["source"] == "weights"


def test_one_answer_and_the_span_take_turns(
    spanned: tuple[Tensor, Inputs, Span], tmp_path: Path
) -> None:
    given, inputs, of = spanned
    opened = open_span(replace(of, rounds=3), inputs)
    folder = trained(tmp_path / "unet", TINY_UNET)
    bound, free = (open_restorer(folder, device="cpu", span=s) for s in (opened, None))
    assert bound.settings["span"] == opened.facts | {"rounds": 3}
    expected = given
    for _ in range(3):
        (expected,) = opened.allowed.nearest(free(expected.clamp(0, 1), n_samples=1)[0][None])
    torch.testing.assert_close(bound(given)[0], expected.clamp(0, 1))


def test_every_step_of_edm_is_kept_in_the_span(
    spanned: tuple[Tensor, Inputs, Span], tmp_path: Path
) -> None:
    given, inputs, of = spanned
    edm = replace(TINY_EDM, target="residual", sigma_max=0.1)  # little is clipped
    folder = trained(tmp_path / "edm", edm)
    settings: dict[str, dict[str, Any]] = {
        "every": {},
        "said": {"steps": "every"},
        "last": {"steps": "last"},
        "near": {"tolerance": 0.05},
    }
    opened = {
        name: open_restorer(folder, device="cpu", span=open_span(replace(of, **how), inputs))
        for name, how in settings.items()
    }
    seeds = picture_seeds(given)
    made = {name: r.samples(given, seeds, n_samples=2) for name, r in opened.items()}
    allowed, constraint = opened["last"].span, opened["every"].constraint
    assert allowed is not None
    assert constraint is not None

    def outside(samples: Tensor) -> float:
        return 1 - allowed.share(samples.flatten(0, 1))

    net = opened["every"].net
    drawn = edm.restore(net, given, n_samples=2, seeds=seeds, constraint=constraint)
    assert outside(drawn) < 1e-6
    assert torch.equal(allowed.nearest(drawn), made["every"])
    assert torch.equal(made["said"], made["every"])
    assert (made["every"] - made["last"]).abs().mean() > 3e-4
    assert outside(made["every"]) < outside(made["near"])
    facts = {name: r.settings["span"] for name, r in opened.items()}
    assert (facts["last"]["steps"], facts["last"]["tolerance"]) == ("last", 0.0)
    assert facts["every"] == facts["last"] | {"steps": "every"}
    assert facts["near"] == facts["last"] | {"steps": "every", "tolerance": 0.05}
    # Where the span does not stand out of the noise, steps are kept in it on demand alone.
    noisy = load_file(of.weights)
    noisy["0.weight"] += 0.1 * torch.randn(40, 3 * SIZE**2, generator=generator(4))
    save_file(noisy, tmp_path / "noisy.safetensors")
    unsure = replace(of, weights=tmp_path / "noisy.safetensors")
    near = [open_span(replace(unsure, **how), inputs) for how in settings.values()]
    assert [some.at_every_step for some in near] == [False, True, False, True]


def test_a_span_that_does_not_suit_the_restorer_is_refused(
    spanned: tuple[Tensor, Inputs, Span], tmp_path: Path
) -> None:
    _given, inputs, of = spanned
    bf, edm = trained(tmp_path / "bf", TINY_BF_DNCNN), trained(tmp_path / "edm")
    small = pixels(4, size=6)
    network_of(small, tmp_path / "small.safetensors")
    other = Span(weights=tmp_path / "small.safetensors")
    others = open_inputs(picture_folder(tmp_path / "small", small))
    for folder, span, pictures, said in (
        (bf, replace(of, steps="every"), inputs, r"--span-steps every is of .*EDM\)"),
        (bf, replace(of, tolerance=0.1), inputs, r"--span-tolerance is of .*EDM\), and --weights"),
        (edm, replace(of, rounds=3), inputs, "--span-rounds 3 is of a restorer with one answer"),
        (edm, other, others, "is 6 x 6, but edm works at 8 x 8; use another restorer"),
    ):
        with pytest.raises(ValueError, match=said):
            open_restorer(folder, device="cpu", span=open_span(span, pictures))
    open_restorer(bf, device="cpu", span=open_span(replace(of, steps="last"), inputs))
    for bad, said in (
        ({"rounds": 0}, "rounds=0"),
        ({"tolerance": 1.0}, r"tolerance=1.0 is outside \[0, 1\)"),
        ({"steps": "last", "tolerance": 0.1}, "--span-tolerance is of every step"),
    ):
        with pytest.raises(ValueError, match=said):
            replace(of, **bad)
