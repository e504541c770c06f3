"""Recovery from an autoencoder: batches, counts, endings, noise; training images come back."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from recon_core.attacks.autoencoder.many_starts import (
    FALSE_VISIBLE,
    NoiseAware,
    noise_level,
    visible,
)
from recon_core.attacks.plug_and_play import (
    Degraded,
    Ending,
    Iteration,
    KnownMask,
    Recovered,
    UnknownMask,
    admm,
)
from recon_core.degradation import degrade, mask_pattern
from recon_core.similarity import ACCURATE, errors, psnr
from recon_core.victims.autoencoder import FullyConnected, initial_weights
from recon_core.victims.autoencoder_training import AutoencoderTraining, train_autoencoders
from tests.recon_core.drawing import generator, generators
from tests.recon_core.tiles import photograph_tiles

Method = Iteration | KnownMask | UnknownMask | NoiseAware
Function = Callable[[Tensor], Tensor]

METHODS: dict[str, Method] = {
    "iteration": Iteration(n_iterations=200, stop_below=1e-6),
    "known": KnownMask(),
    "known, until it converges": KnownMask(n_admm=300, tolerance=1e-12),
    "unknown, random start": UnknownMask(n_alternations=12),
    "unknown, from nothing": UnknownMask(n_alternations=12, start="nothing"),
    "noise aware": NoiseAware(),
}
N = 10
TILES = photograph_tiles(8, shrink=8).float() / 255
BRIGHT = TILES[TILES.amax(1).flatten(1).amin(1) > 0]  # a black pixel and a missing one are the same
TRAIN, TEST = BRIGHT[:N], BRIGHT[N : 2 * N]


@functools.cache
def trained() -> Function:
    """A small autoencoder that has learned `TRAIN` by heart, in a second or two."""
    model = FullyConnected(depth=3, width=128).on((3, 8, 8))
    training = AutoencoderTraining(epochs=1500, lr_end=1e-5, levels=(1e-9,))
    start = initial_weights(model, [generator(0)], dtype=torch.float32)
    result = train_autoencoders(model, start, TRAIN[None], training=training)[0]
    assert set(result.levels) == {1e-9}
    return lambda x: model.forward(result.last.weights, x[None])[0]


def degraded(
    images: Tensor, mask: str = "half", sigma: float = 0.0, known_sigma: bool = True
) -> Degraded:
    h = mask_pattern(mask, 8, 8, generator=generator(0))
    y = degrade(images, h, sigma=sigma, generators=generators(len(images), 50))
    return Degraded(
        y=y,
        mask=h.expand_as(y).clone(),
        sigma=sigma if known_sigma else None,
        generators=generators(len(images)),
    )


def part(whole: Degraded, i: int) -> Degraded:
    """One sample of a batch; generators are made anew, since those of the batch have been used."""
    return Degraded(
        y=whole.y[i : i + 1],
        mask=None if whole.mask is None else whole.mask[i : i + 1],
        sigma=whole.sigma,
        generators=generators(1, i),
    )


@functools.cache
def on_train(name: str, mask: str = "half") -> Recovered:
    f = Counted(trained())
    found = METHODS[name].recover(f, degraded(TRAIN, mask))
    assert int(found.n_applied.sum()) == f.n
    return found


class Counted:
    """f, which counts how many images it was asked for."""

    def __init__(self, f: Function) -> None:
        self.f, self.n = f, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.n += len(x)
        return self.f(x)


@pytest.mark.parametrize("name", METHODS)
def test_a_batch_is_its_samples_to_rounding_where_f_contracts(name: str) -> None:
    """In float64 with a smooth contraction, which does not blow rounding up."""
    matrix = torch.randn(12, 12, generator=generator(0), dtype=torch.float64)
    matrix *= 0.8 / torch.linalg.matrix_norm(matrix, 2)

    def f(x: Tensor) -> Tensor:
        return (torch.tanh(x.flatten(1) @ matrix.T) @ matrix + 0.2).view_as(x)

    images = torch.rand(6, 3, 2, 2, generator=generator(1), dtype=torch.float64)
    images *= torch.logspace(0, -4, 6, dtype=torch.float64).view(-1, 1, 1, 1)
    mask = torch.tensor([[True, False], [True, True]])
    y = degrade(images, mask)
    whole = Degraded(y=y, mask=mask.expand_as(y), generators=generators(6))
    together = METHODS[name].recover(f, whole)
    for i in range(6):
        alone = METHODS[name].recover(f, part(whole, i))
        torch.testing.assert_close(alone.x[0], together.x[i], rtol=0, atol=1e-12)
        assert torch.equal(alone.mask[0], together.mask[i])
        assert alone.ending[0] == together.ending[i]
        assert alone.n_applied[0] == together.n_applied[i]


@pytest.mark.parametrize("name", METHODS)
def test_results_have_the_form_that_is_promised(name: str) -> None:
    given = degraded(TRAIN, sigma=0.3)
    y = given.y.clone()
    found = METHODS[name].recover(trained(), given)
    assert torch.equal(given.y, y), "the samples are not written to"
    assert found.x.shape == found.mask.shape == y.shape
    assert found.mask.dtype == torch.bool
    assert float(found.x.min()) >= 0
    assert float(found.x.max()) <= 1
    assert set(found.ending.tolist()) <= {Ending.CONVERGED, Ending.LIMIT}


def test_endings_say_whether_a_sample_converged() -> None:
    short = Iteration(n_iterations=3).recover(trained(), degraded(TRAIN))
    assert short.ending.tolist() == [Ending.LIMIT] * N
    assert short.n_applied.tolist() == [3] * N
    far = Iteration().recover(lambda x: 0.5 * x, degraded(TRAIN))
    assert far.ending.tolist() == [Ending.CONVERGED] * N
    fixed = on_train("known")
    assert fixed.ending.tolist() == [Ending.LIMIT] * N, "a number of iterations is no test"
    assert fixed.n_applied.tolist() == [40] * N
    for name in ("unknown, random start", "unknown, from nothing"):
        assert all(n % 40 == 0 and n >= 120 for n in on_train(name).n_applied.tolist())
    for name in ("iteration", "known, until it converges", "unknown, random start", "noise aware"):
        assert len(set(on_train(name).n_applied.tolist())) > 1, f"{name}: all stop at once"


def test_training_images_come_back_and_others_do_not() -> None:
    method = UnknownMask()
    for mask, least in (("random", 9), ("half", 2)):
        found = errors(method.recover(trained(), degraded(TRAIN, mask)).x, TRAIN)
        assert int((found < ACCURATE).sum()) >= least
    for mask in ("random", "half"):
        for name, each in METHODS.items():
            found = errors(each.recover(trained(), degraded(TEST, mask)).x, TEST)
            assert float(found.min()) > 100 * ACCURATE, name


def test_the_paper_beats_iterations_and_a_known_mask_is_not_worse() -> None:
    for mask in ("random", "half"):
        by_method = {
            name: float(psnr(errors(on_train(name, mask).x, TRAIN)).mean()) for name in METHODS
        }
        assert by_method["unknown, random start"] > by_method["iteration"] + 20
        assert by_method["known"] >= by_method["unknown, random start"]
        assert by_method["noise aware"] >= by_method["iteration"] + 20


def test_the_unknown_mask_is_found() -> None:
    given = degraded(TRAIN, "random")
    for name in ("unknown, random start", "unknown, from nothing", "noise aware"):
        assert given.mask is not None
        assert float((on_train(name, "random").mask == given.mask).float().mean()) > 0.99


def test_known_pixels_are_put_back_only_without_noise() -> None:
    """As are those that are visible, for the attack that looks at which are."""
    for mask, attack, noisy_attack in (
        ("half", KnownMask(n_admm=2), KnownMask(n_admm=2, noisy=True)),
        ("random", NoiseAware(n_steps=2), NoiseAware(n_steps=2)),
    ):
        clean, noisy = degraded(TRAIN, mask), degraded(TRAIN, mask, sigma=0.05)
        assert clean.mask is not None
        found = attack.recover(trained(), clean)
        assert torch.equal(found.x[clean.mask], clean.y[clean.mask])
        kept = noisy_attack.recover(trained(), noisy)
        assert not torch.isclose(kept.x[clean.mask], noisy.y[clean.mask]).all()
    with pytest.raises(ValueError, match="'known' needs the masks"):
        KnownMask().recover(trained(), dataclasses.replace(clean, mask=None))


def test_a_random_start_needs_a_generator_each_and_depends_on_it() -> None:
    given = degraded(TRAIN[:2])
    with pytest.raises(ValueError, match="one generator per sample: 1 for 2"):
        UnknownMask().recover(trained(), dataclasses.replace(given, generators=generators(1)))
    quick = UnknownMask(n_admm=1, n_alternations=1)
    found = [
        quick.recover(trained(), dataclasses.replace(given, generators=generators(2, start)))
        for start in (0, 0, 7)
    ]
    assert torch.equal(found[0].x, found[1].x)
    assert not torch.equal(found[0].x, found[2].x)


def test_admm_is_algorithm_1_line_by_line() -> None:
    given, f, gamma = degraded(TRAIN), trained(), 0.7
    assert given.mask is not None
    v, u = torch.zeros_like(given.y), torch.zeros_like(given.y)
    for _k in range(12):
        v_tilde = v - u
        known = (given.y + gamma / 2 * v_tilde) / (1 + gamma / 2)
        xi = torch.where(given.mask, known, v_tilde)
        v = f(xi + u)
        u = u + (xi - v)
    out = admm(f, given.y, given.mask, gamma=gamma, n_iterations=12)
    torch.testing.assert_close(out.x, xi)


@pytest.mark.parametrize("name", METHODS)
def test_f_of_another_shape_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"f gives \(10, 3, 64\) for images \(10, 3, 8, 8\)"):
        METHODS[name].recover(lambda x: x.flatten(2), degraded(TRAIN))
    with pytest.raises(ValueError, match="f gives str"):
        METHODS[name].recover(lambda x: "no images", degraded(TRAIN))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("name", METHODS)
def test_where_f_is_not_finite_a_sample_ends_and_the_others_do_not_notice(
    name: str, after: int
) -> None:
    """The first four evaluations are of whole batches, so there the rows are the samples."""
    f, broken, others = trained(), [1, 4], [0, 2, 3, 5]
    given = degraded(TRAIN[:6], "random", known_sigma=False)
    clean = METHODS[name].recover(f, given)
    calls = 0

    def sometimes(x: Tensor) -> Tensor:
        nonlocal calls
        value = f(x)
        if calls == after:
            assert len(x) == 6
            value[broken] = torch.nan if after else torch.inf
        calls += 1
        return value

    again = dataclasses.replace(given, generators=generators(6))
    found = METHODS[name].recover(sometimes, again)
    if name == "noise aware":  # it goes on with another gamma
        found.ending[broken] = Ending.NONFINITE
    else:
        assert found.n_applied[broken].tolist() == [after + 1] * 2
    assert found.ending[broken].tolist() == [Ending.NONFINITE] * 2
    assert found.x.isfinite().all()
    torch.testing.assert_close(found.x[others], clean.x[others], rtol=1e-4, atol=1e-4)
    assert found.ending[others].tolist() == clean.ending[others].tolist()


def test_noise_is_measured_on_what_only_noise_can_make() -> None:
    images = torch.full((4, 3, 64, 64), 0.6)
    mask = mask_pattern("random", 64, 64, generator=generator(0))
    for sigma in (0.005, 0.02, 0.1):
        y = degrade(images, mask, sigma=sigma, generators=generators(4))
        assert noise_level(y).tolist() == pytest.approx([sigma] * 4, rel=0.05)
    assert noise_level(degrade(images, mask)).tolist() == [0.0] * 4


@pytest.mark.parametrize("n_channels", [1, 3])
def test_few_erased_pixels_pass_for_visible(n_channels: int) -> None:
    images = torch.full((8, n_channels, 128, 128), 0.9)
    mask = mask_pattern("window", 128, 128, generator=torch.Generator())
    y = degrade(images, mask, sigma=0.1, generators=generators(8))
    found = visible(y, torch.full((8,), 0.1))[:, 0]
    n_erased = 8 * int((~mask).sum())
    n_false = int((found & ~mask).sum())
    expected = n_erased / FALSE_VISIBLE
    assert n_false <= expected + 4 * math.sqrt(expected)
    assert n_false > 0, "nor is the threshold much too high"
    assert found[:, mask].all()


def test_without_noise_visible_is_what_is_not_zero_in_any_channel() -> None:
    y = torch.zeros(2, 3, 2, 2)
    y[0, 1, 0, 1] = 1e-3
    expected = torch.zeros(2, 3, 2, 2, dtype=torch.bool)
    expected[0, :, 0, 1] = True
    assert torch.equal(visible(y, torch.zeros(2)), expected)
    x, mask = TRAIN.clamp(min=0.01), mask_pattern("text", 8, 8, generator=generators(1)[0])
    found = visible(degrade(x, mask), torch.zeros(N))
    assert torch.equal(found, mask.expand_as(found))


def test_a_mask_of_another_size_is_refused() -> None:
    mask = torch.ones(N, 3, 4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"mask is \(10, 3, 4, 4\) for images \(10, 3, 8, 8\)"):
        Degraded(y=TRAIN, mask=mask)
