"""Mixtures: what they are made of, how strong, and that real reconstructions are such."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recon_core.restore.examples import (
    STRENGTH_SPREAD,
    WHITE,
    Examples,
    _weights,
    interleaved,
    mixture_examples,
    to_pictures,
)
from tests.recon_core.small_runs import ALL, N, images, run, specs


def pool(n: int = 40, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, 3, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (12, 12), mode="bilinear", align_corners=True)
    return (smooth * 255).round().to(torch.uint8)


def made(n: int, seed: int = 1, **changed: object) -> Examples:
    settings = {"n_mixed": 10, "strength": 1.5, "n_sharing": 5} | changed
    generator = torch.Generator().manual_seed(seed)
    return mixture_examples(pool(), n_examples=n, generator=generator, **settings)  # type: ignore[arg-type]


def test_targets_are_images_and_conditions_fill_the_range() -> None:
    examples = made(23)
    assert len(examples) == 23
    assert (examples.augment == 0).all()
    assert (examples.condition.abs() <= 1).all()
    assert torch.allclose(examples.condition.abs().amax(dim=(1, 2, 3)), torch.ones(23), atol=1e-5)
    known = {tuple(image.flatten().tolist()) for image in pool()}
    pictures = (to_pictures(examples.target) * 255).round().to(torch.uint8)
    assert {tuple(picture.flatten().tolist()) for picture in pictures} <= known
    assert len(examples.condition.flatten(1).unique(dim=0)) == 23


def test_a_mixture_lies_in_the_span_of_few_images_but_for_the_white_noise() -> None:
    # The images of one group and their mean span 6 dimensions; all 15 examples are in them.
    examples = made(15, n_mixed=6, n_sharing=15)
    condition = examples.condition.flatten(1).double()
    centred = condition - condition.mean(dim=0)
    energy = torch.linalg.svdvals(centred).square()
    outside = float(energy[6:].sum() / energy.sum())
    assert 0.1 * WHITE**2 < outside < 3 * WHITE**2


@pytest.mark.parametrize("strength", [0.05, 4.0])
def test_the_weaker_the_others_the_nearer_the_condition_to_the_target(strength: float) -> None:
    examples = made(60, strength=strength, n_mixed=8)
    x, t = (values.flatten(1) for values in (examples.condition, examples.target))
    x, t = (values - values.mean(dim=1, keepdim=True) for values in (x, t))
    likeness = torch.cosine_similarity(x, t).median()
    assert likeness > 0.95 if strength < 1 else likeness < 0.5


def test_mixtures_depend_on_the_generator_alone() -> None:
    assert torch.equal(made(7).condition, made(7).condition)
    assert not torch.equal(made(7).condition, made(7, seed=2).condition)


def test_nothing_to_mix_is_refused() -> None:
    with pytest.raises(ValueError, match="n_mixed=1 of 40 images"):
        made(3, n_mixed=1)
    with pytest.raises(ValueError, match="n_mixed=4 of 0 images"):
        mixture_examples(
            pool()[:0], n_examples=1, n_mixed=4, strength=1.0, generator=torch.Generator()
        )


def test_interleaved_examples_keep_their_order() -> None:
    first, second = made(3), made(2, seed=5)
    mask = torch.tensor([True, False, True, False, True])
    both = interleaved((mask, first), (~mask, second))
    for name in ("condition", "target", "augment"):
        whole = getattr(both, name)
        torch.testing.assert_close(whole[mask], getattr(first, name))
        torch.testing.assert_close(whole[~mask], getattr(second, name))


def test_what_an_attack_gives_is_a_mixture_of_the_runs_images() -> None:
    for spec, result in zip(specs(), run(ALL), strict=True):
        pictures = images([spec])[0].flatten(1).double() / 255
        centred = pictures - pictures.mean(dim=0)
        x = result.pairs.reconstruction.flatten(1).double()
        inside = torch.linalg.lstsq(centred.T, x.T).solution.T @ centred
        explained = inside.square().sum(dim=1) / x.square().sum(dim=1)
        assert explained.median() > 0.95
        # Seven dimensions of 768 explain a hundredth of what is not a mixture.
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).double()
        by_chance = torch.linalg.lstsq(centred.T, noise.T).solution.T @ centred
        assert by_chance.square().sum() < 2 * (N - 1) / x.shape[1] * noise.square().sum()


def test_the_other_images_weights_have_heavy_tails_and_a_norm_that_varies() -> None:
    n, n_mixed, strength = 4000, 40, 1.3
    own = torch.randint(n_mixed, (n,), generator=torch.Generator().manual_seed(1))
    weights = _weights(n, n_mixed, own, strength, torch.Generator().manual_seed(0))
    rows = torch.arange(n)
    assert torch.equal(weights[rows, own], torch.ones(n))
    weights[rows, own] = 0
    norm = weights.norm(dim=1)
    assert norm.median().item() == pytest.approx(strength, rel=0.03)
    assert norm.log().std().item() == pytest.approx(STRENGTH_SPREAD, rel=0.05)
    # The largest of 39 normal numbers has on average 12 % of their energy, of Student's t more.
    share = (weights.abs().amax(dim=1) / norm).square().mean().item()
    assert share > 0.2
