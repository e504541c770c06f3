"""The generic diffusion model: it learns, resumes bit for bit, and inpaints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from recon_core.restore import EDM, NonfiniteLossError, Training
from recon_core.restore.edm import Denoiser
from recon_core.restore.inpaint import DDNM, unconditional
from storage.checkpoints import load_checkpoint
from tasks.training.inpainter import (
    Inpainter,
    inpainter_fingerprint,
    train_inpainter,
)

SIZE = 8
TINY = Inpainter(
    restorer=EDM(size="tiny", resolution=SIZE),
    training=Training(n_steps=6, batch_size=4, lr=1e-2, warmup_images=0, ema_halflife_images=8),
)


class KilledError(Exception):
    """What the tests stop a training with."""


def ramps(n: int, *, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Smooth pictures: between any two pixels it is a straight line."""
    rng = np.random.default_rng(seed)
    low, across, down = rng.uniform(0, 85, (3, n, 3, 1, 1))
    place = np.linspace(0, 1, SIZE)
    return (low + across * place[None] + down * place[:, None]).astype(np.uint8)


def kill_at(step: int) -> Any:
    def on_step(done: int, _n_steps: int, _loss: float) -> None:
        if done == step:
            raise KilledError

    return on_step


def model(out: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Weights and card."""
    found = load_checkpoint(out, "model")
    assert found is not None
    return found


def test_a_training_that_was_killed_ends_bit_for_bit_as_one_that_was_not(tmp_path: Path) -> None:
    images = ramps(9)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train_inpainter(TINY, images, out=whole, device="cpu")
    with pytest.raises(KilledError):
        train_inpainter(
            TINY, images, out=killed, device="cpu", on_step=kill_at(4), checkpoint_seconds=0
        )
    assert not (killed / "model.json").exists()
    steps: list[int] = []
    train_inpainter(
        TINY, images, out=killed, device="cpu", on_step=lambda step, _n, _loss: steps.append(step)
    )
    assert 1 < steps[0] <= 4  # checkpoints are written as often as their time allows
    assert steps[-1] == 6
    (ours, card), (theirs, card_of_whole) = model(killed), model(whole)
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        assert np.array_equal(ours[name], values), name
    assert card["loss_curve"] == card_of_whole["loss_curve"]
    assert [file.name for file in killed.iterdir() if "latest" in file.name] == []


def test_a_finished_training_is_not_repeated_and_one_of_other_settings_replaced(
    tmp_path: Path,
) -> None:
    images = ramps(9)
    first = train_inpainter(TINY, images, out=tmp_path, device="cpu")
    again = train_inpainter(TINY, images, out=tmp_path, device="cpu", on_step=kill_at(1))
    x = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    assert torch.equal(first(x, 0.5), again(x, 0.5))
    other = replace(TINY, training=replace(TINY.training, seed=1))
    for inpainter, pictures in ((other, images), (TINY, ramps(9, seed=1))):
        assert inpainter_fingerprint(inpainter, pictures) != inpainter_fingerprint(TINY, images)
        with pytest.raises(KilledError):
            train_inpainter(inpainter, pictures, out=tmp_path, device="cpu", on_step=kill_at(1))


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Denoiser:
    training = Training(
        n_steps=150, batch_size=16, lr=1e-2, warmup_images=160, decay="cosine",
        ema_halflife_images=200,
    )  # fmt: skip
    out = tmp_path_factory.mktemp("inpainter")
    inpainter = replace(TINY, training=training)
    return train_inpainter(inpainter, ramps(300), out=out, device="cpu")


def test_it_learns_to_denoise(learned: Denoiser) -> None:
    clean = torch.from_numpy(ramps(32, seed=1)).float() / 127.5 - 1
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    for sigma in (0.5, 1.0):
        error = (learned(clean + sigma * noise, sigma) - clean).square().mean().sqrt().item()
        assert error < 0.5 * sigma
    assert learned(clean.double(), 0.5).dtype == torch.float64


def test_ddnm_inpaints_with_it(learned: Denoiser) -> None:
    clean = torch.from_numpy(ramps(8, seed=2)).float() / 255
    mask = torch.rand(8, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = mask.expand_as(clean)
    method = DDNM(n_steps=12, sigma_max=5.0, travel_repeat=3)

    def error(denoiser: Denoiser) -> float:
        generators = [torch.Generator().manual_seed(seed) for seed in range(8)]
        x = method.inpaint(denoiser, clean * mask, mask, generators=generators)
        assert torch.equal(x[mask], clean[mask])
        return (x - clean)[~mask].square().mean().item()

    untrained = unconditional(TINY.restorer, TINY.restorer.build(seed=0))
    assert error(learned) < 0.6 * error(untrained), (error(learned), error(untrained))


def test_a_diverged_training_says_so_and_leaves_no_model(tmp_path: Path) -> None:
    wild = replace(TINY, training=replace(TINY.training, lr=1e30))
    with pytest.raises(NonfiniteLossError, match="learning rate 1e"):
        train_inpainter(wild, ramps(9), out=tmp_path, device="cpu")
    assert not (tmp_path / "model.json").exists()


def test_bad_settings_and_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"restorer\.target='residual'"):
        Inpainter(restorer=EDM(target="residual"))
    pictures = ramps(2)
    wrong = (pictures.astype(np.float32), pictures[:, :1], pictures[:, :, 1:], pictures[:0])
    for images in wrong:
        with pytest.raises(ValueError, match=r"expected uint8 \(n, 3, 8, 8\)"):
            train_inpainter(TINY, images, out=tmp_path, device="cpu")
