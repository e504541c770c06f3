"""Weights as they are given away: rounded, or with noise, whatever they are batched with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from recon_core.types import seeded_generator
from recon_core.victims.network import Network, Parameters, Released
from tests.recon_core.small_runs import QUICK_ALL, run

ARCHITECTURE = Network(widths=(40, 30), bias="all").on((3, 8, 8), 1)


def generators(n: int, first: int = 0) -> list[torch.Generator]:
    return [seeded_generator(0, first + k, "weights") for k in range(n)]


def trained(n_runs: int = 2) -> Parameters:
    """Biases too are of many sizes."""
    parameters = ARCHITECTURE.initial(generators(n_runs, 100), dtype=torch.float32)
    noise = seeded_generator(1, 0, "training")
    return parameters.map(lambda t: t + 0.01 * torch.randn(t.shape, generator=noise))


def every(parameters: Parameters) -> list[torch.Tensor]:
    return list(parameters.tensors())


def test_rounding_is_torchs() -> None:
    """To half precision, or every neuron by itself to int8, where one that is zero stays zero."""
    parameters = trained()
    assert Released().of(parameters, generators(2)) is parameters
    half, int8 = (
        every(Released(precision=how).of(parameters, generators(2))) for how in ("float16", "int8")
    )
    for tensor, halved, rounded in zip(every(parameters), half, int8, strict=True):
        assert torch.equal(halved, tensor.half().float())
        assert not torch.equal(halved, tensor)
        rows, found = tensor.flatten(0, -2), rounded.flatten(0, -2)
        steps = rows.abs().amax(1) / 127
        places = torch.zeros(len(rows), dtype=torch.int32)
        quantised = torch.fake_quantize_per_channel_affine(rows, steps, places, 0, -128, 127)
        torch.testing.assert_close(found, quantised, rtol=1e-5, atol=1e-9)
        assert bool(((found - rows).abs() <= steps[:, None] * 0.5001).all())
        assert not torch.equal(found, rows) or rows.shape[1] == 1
    nothing = Released(precision="int8").of(parameters.map(torch.zeros_like), generators(2))
    assert all(bool((tensor == 0).all()) for tensor in every(nothing))


def test_noise_is_in_units_of_each_victims_own_weights() -> None:
    parameters = trained()
    larger = parameters.map(lambda t: t * torch.tensor([1.0, 50.0]).view(2, *[1] * (t.dim() - 1)))
    given = Released(noise=0.2).of(larger, generators(2))
    for tensor, noisy in zip(larger.weights[:2], given.weights[:2], strict=True):
        for k in range(2):
            size = tensor[k].square().mean().sqrt()
            noise = (noisy - tensor)[k]
            assert float(noise.square().mean().sqrt() / size) == pytest.approx(0.2, rel=0.05)
            assert abs(float(noise.mean() / size)) < 0.02


def test_a_victims_noise_is_its_own_whatever_it_is_batched_with() -> None:
    parameters, rule = trained(3), Released(noise=0.1, precision="float16")
    together = rule.of(parameters, generators(3))
    assert all(torch.equal(t, t.half().float()) for t in every(together)), "noise, then rounding"
    for k in range(3):
        alone = rule.of(parameters.rows(slice(k, k + 1)), generators(1, k))
        for one, other in zip(every(together), every(alone), strict=True):
            assert torch.equal(one[k : k + 1], other)
    first, second = (together.weights[0][k] - parameters.weights[0][k] for k in (0, 1))
    assert not torch.equal(first, second)


def test_what_a_run_says_of_its_victim_is_of_the_victim_as_it_was_trained() -> None:
    for plain, noisy in zip(
        run(QUICK_ALL), run(replace(QUICK_ALL, released=Released(noise=0.5))), strict=True
    ):
        assert torch.equal(plain.margins, noisy.margins)
        assert plain.stats["train_loss"] == noisy.stats["train_loss"]
        assert not torch.equal(plain.pairs.reconstruction, noisy.pairs.reconstruction)
