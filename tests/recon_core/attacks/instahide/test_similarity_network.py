"""Learned similarity of images never seen, and the similarity that knows the truth."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from jaxtyping import Float
from safetensors.torch import save as save_tensors
from torch import Tensor

from benchmarks.instahide.oracles import auc, oracle_similarity
from recon_core.attacks.instahide.mixing import InstaHide
from recon_core.attacks.instahide.similarity_network import (
    HiddenExamples,
    Similarity,
    SimilarityNetwork,
    load,
    of_unit_energy,
    save,
    shared_images,
    unfolding_loss,
    whitening_filter,
    windows,
)
from recon_core.restore.fit import Training
from tests.recon_core.drawing import generator, refuses

SHAPE = (1, 16, 16)
TRAINING = Training(
    n_steps=80, batch_size=48, lr=4e-3, warmup_images=200, decay="cosine", ema_halflife_images=400
)
TINY = SimilarityNetwork(
    width=16,
    deep_width=16,
    n_private=12,
    n_calibration=60,
    scheme=InstaHide(k_pub=0),
    training=TRAINING,
)


def smooth_images(n: int, seed: int, side: int = 16) -> Float[Tensor, "n 1 s s"]:
    """Random fields with power falling as frequency cubed, in [-1, 1]."""
    drawn = generator(seed)
    spectrum = torch.fft.fft2(torch.randn(n, 1, side, side, generator=drawn))
    frequency = torch.fft.fftfreq(side) * side
    radius = (frequency[:, None].square() + frequency.square()).sqrt().clamp(min=0.7)
    fields = torch.fft.ifft2(spectrum / radius**1.5).real
    return (fields / fields.std() / 2).clamp(-1, 1)


def leaves(n: int, seed: int, side: int = 16) -> Float[Tensor, "n 1 s s"]:
    """Discs of many sizes in front of each other, each of one grey with a slope, in [-1, 1]: edges
    and areas, as in photographs (Lee, Mumford and Huang 2001)."""
    drawn = generator(seed)
    at, images = torch.arange(side).float(), torch.zeros(n, side, side)
    for _ in range(25):
        centre = torch.rand(n, 2, generator=drawn) * side
        radius = side * 0.06 / (torch.rand(n, generator=drawn) + 0.12)
        grey = torch.rand(n, generator=drawn) * 2 - 1
        slope = torch.randn(n, 2, generator=drawn) * 0.04
        down = at[None, :, None] - centre[:, :1, None]
        across = at[None, None] - centre[:, 1:, None]
        inside = down.square() + across.square() < radius[:, None, None].square()
        value = grey[:, None, None] + slope[:, :1, None] * down + slope[:, 1:, None] * across
        images = torch.where(inside, value, images)
    padded = torch.nn.functional.pad(images[:, None], (1, 1, 1, 1), mode="replicate")
    return torch.nn.functional.avg_pool2d(padded, 3, 1).clamp(-1, 1)


def held_out() -> HiddenExamples:
    return replace(TINY, n_private=30).drawn(leaves(500, 99), 300, generator(5))


@pytest.fixture(scope="module")
def trained() -> Similarity:
    return TINY.train(leaves(1000, 1))


def test_training_tells_encodings_of_unseen_images_better_than_none(trained: Similarity) -> None:
    batch = held_out()
    untrained = replace(TINY, training=replace(TRAINING, n_steps=1, lr=1e-9)).train(leaves(1000, 1))
    before, after = (
        auc(net.scores(batch.condition.flatten(1)), batch.private) for net in (untrained, trained)
    )
    assert 0.7 < before < after - 0.005
    losses = []
    for net in (untrained, trained):
        fields = net.unfold(batch.condition)
        target = of_unit_energy(net.unfold.whitened(batch.target))
        losses.append(float(unfolding_loss(fields, target, 4)))
    assert losses[1] < losses[0] - 0.1


def test_scores_of_all_are_the_definition_pair_by_pair(trained: Similarity) -> None:
    y = held_out().condition[:9]
    found = trained.scores(y.flatten(1))
    fields = trained.unfold(y).double()
    parameters = {name: value.double() for name, value in trained.named_parameters()}
    for i in range(9):
        for j in range(9):
            product = (fields[i] * fields[j]).sum(0)
            blocks = product.reshape(4, 4, 4, 4).sum((1, 3))
            expected = parameters["bias"] + parameters["linear"] * product.sum()
            for e in (i, j):
                expected = expected - parameters["energy"] * fields[e].square().mean()
            for k, side in enumerate((1, 2, 4)):
                inner, outer = parameters[f"inner.{k}"], parameters[f"outer.{k}"]
                at = [(r, c) for r in range(5 - side) for c in range(5 - side)]
                for v, (r, c) in enumerate(at):
                    g = blocks[r : r + side, c : c + side].sum()
                    expected = expected + outer[v] * ((1 + (inner[v] * g) ** 2).sqrt() - 1)
            torch.testing.assert_close(found[i, j].double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found, found.T)


def test_scores_ignore_signs(trained: Similarity) -> None:
    batch = held_out()
    y, signed = batch.condition[:20].flatten(1), batch.target[:20].flatten(1)
    assert torch.equal(trained.scores(y), trained.scores(signed))


def test_what_is_saved_is_loaded(trained: Similarity) -> None:
    y = held_out().condition[:20].flatten(1)
    again = load(save(trained))
    assert again.shape == SHAPE
    assert torch.equal(again.scores(y), trained.scores(y))
    refuses("not the weights of a similarity", load, save_tensors({"a": torch.zeros(1)}))


def test_drawn_encodings_are_mixtures_by_the_scheme() -> None:
    batch = TINY.drawn(smooth_images(300, 3), 50, generator(0))
    assert torch.equal(batch.condition, batch.target.abs())
    assert batch.private.min() >= 0
    assert batch.private.max() < TINY.n_private
    assert bool((batch.private[:, 0] != batch.private[:, 1]).all())
    part = batch.rows(10, 20)
    assert torch.equal(part.private, batch.private[10:20])


def test_the_whitening_makes_power_flat() -> None:
    images = smooth_images(400, 4, side=32)
    white = torch.nn.functional.conv2d(images, whitening_filter(images))
    power = torch.fft.fft2(white - white.mean()).abs().square().mean((0, 1))
    raw = torch.fft.fft2(images).abs().square().mean((0, 1))
    assert white.std() == pytest.approx(1.0, rel=1e-4)
    spread = [float(p[1:9, 1:9].std() / p[1:9, 1:9].mean()) for p in (power, raw)]
    assert spread[0] < spread[1] / 3


def test_the_loss_is_least_at_the_target_up_to_a_sign() -> None:
    target = of_unit_energy(torch.randn(4, 3, 16, 16, generator=generator(0)))
    energy = float(target.square().mean())
    assert float(unfolding_loss(-target, target, 4)) == pytest.approx(-energy, rel=0.1)
    halves = target.clone()
    halves[..., 8:] *= -1
    losses = [float(unfolding_loss(f, target, 4)) for f in (target, halves, 0 * target)]
    assert losses[0] < losses[1] < losses[2] == 0.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training": replace(TRAINING, mirror=True)}, "mirror"),
        ({"training": replace(TRAINING, batch_size=1)}, "batch_size=1"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, object], words: str) -> None:
    refuses(words, replace, TINY, **changes)


def test_images_that_do_not_fit_are_errors(trained: Similarity) -> None:
    refuses("too few", TINY.drawn, smooth_images(11, 0), 5, torch.Generator())
    refuses("multiples of 8", replace(TINY, shape=(1, 12, 16)).build, seed=0)
    refuses("10 pixels", trained.scores, torch.zeros(3, 10))


def pairs(m: int, n: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(n, generator=generator)[:2] for _ in range(m)])


@pytest.mark.parametrize(("noise", "expected"), [(1.0, 0.760), (0.5, 0.921), (0.0, 1.0)])
def test_noise_sets_the_auc(noise, expected):
    private = pairs(900, 200)
    found = oracle_similarity(private, noise=noise, generator=generator(1))
    assert torch.equal(found, found.T)
    assert auc(found, private) == pytest.approx(expected, abs=0.01)


def test_the_auc_counts_all_pairs():
    private = pairs(40, 8)
    scores = torch.randn(40, 40, generator=generator(2)).round(decimals=1)
    scores = scores + scores.T
    shared = shared_images(private) > 0
    i, j = torch.triu_indices(40, 40, 1)
    ones, none = scores[i, j][shared[i, j]], scores[i, j][~shared[i, j]]
    apart = ones[:, None] - none
    expected = float(((apart > 0).double() + (apart == 0).double() / 2).mean())
    assert auc(scores, private) == pytest.approx(expected, abs=1e-12)
    assert auc(torch.zeros(40, 40), private) == 0.5


def test_windows_are_sums_of_blocks() -> None:
    blocks = torch.randn(6, 6, 2, generator=generator(0))
    sums = windows(blocks)
    assert [tuple(s.shape[:2]) for s in sums] == [(6, 6), (5, 5), (3, 3), (1, 1)]
    torch.testing.assert_close(sums[2][1, 2], blocks[1:5, 2:6].sum((0, 1)))
    torch.testing.assert_close(sums[3][0, 0], blocks.sum((0, 1)))
