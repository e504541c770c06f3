"""Examples: of the stream, of pure noise, of mixtures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from recon_core.matching import fit_to_range
from recon_core.restore.examples import (
    STRENGTH_SPREAD,
    WHITE,
    Examples,
    _weights,
    interleaved,
    make_examples,
    mixture_examples,
    noise_examples,
    to_pictures,
)
from tests.recon_core.drawing import generator, refuses


def stream_batch(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "reconstruction": rng.normal(0, 1e-3, (n, 3, 8, 8)).astype(np.float32),
        "mean_image": rng.uniform(0.3, 0.7, (n, 3, 8, 8)).astype(np.float32),
        "target": rng.integers(0, 256, (n, 3, 8, 8), dtype=np.uint8),
        "augment": rng.normal(size=(n, 9)).astype(np.float32),
        "image_id": np.arange(n),
    }


def test_a_batch_becomes_pictures_in_network_range() -> None:
    batch = stream_batch(4)
    examples = make_examples(batch)
    assert len(examples) == 4
    # The largest r with all but one value of r x + mean in [0, 1]: that one is clipped.
    assert torch.allclose(examples.condition.abs().amax(dim=(1, 2, 3)), torch.ones(4), atol=1e-5)
    direction = (examples.condition + 1) / 2 - torch.from_numpy(batch["mean_image"])
    ratio = (direction / torch.from_numpy(batch["reconstruction"])).flatten(1)
    usual = ratio.median(dim=1, keepdim=True).values
    is_less = ratio < usual * (1 - 1e-4)
    assert is_less.sum(dim=1).tolist() == [1] * 4
    assert (examples.condition.flatten(1)[is_less].abs() == 1).all()
    assert torch.allclose(ratio[~is_less].view(4, -1), usual.expand(4, 191), rtol=1e-2)
    assert torch.equal(
        (to_pictures(examples.target) * 255).round().to(torch.uint8),
        torch.from_numpy(batch["target"]),
    )
    assert torch.equal(examples.augment, torch.from_numpy(batch["augment"]))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_conditions_are_those_of_fit_to_range(dtype: str) -> None:
    batch = stream_batch(200)
    batch["reconstruction"] = (batch["reconstruction"] * 1e3).astype(dtype)
    batch["reconstruction"][47, 1, 2, 3] = np.nan
    x, mean = (torch.from_numpy(batch[name]) for name in ("reconstruction", "mean_image"))
    condition = make_examples(batch).condition
    torch.testing.assert_close(condition, 2 * fit_to_range(x.float(), mean) - 1, equal_nan=True)
    assert not condition[47].isfinite().any()


def test_a_batch_without_a_column_is_refused_by_name() -> None:
    batch = stream_batch(2)
    del batch["mean_image"]
    refuses(r"lacks \['mean_image'\]", make_examples, batch)


def test_noise_examples_average_their_own_target() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(60, 196, (50, 3, 8, 8), dtype=torch.uint8, generator=generator)
    examples = noise_examples(
        images, n_examples=40, n_averaged=1, generator=torch.Generator().manual_seed(1)
    )
    # Averaging one image: the mean is the target, so what is left is noise fitted to the range.
    noise = examples.condition - examples.target
    assert (examples.condition.abs() <= 1).all()
    assert (examples.augment == 0).all()
    correlation = torch.corrcoef(torch.stack([noise.flatten(), examples.target.flatten()]))[0, 1]
    assert abs(correlation) < 0.1
    targets = {tuple(t.flatten().tolist()) for t in examples.target}
    assert len(targets) > 15  # drawn from the whole pool


def test_noise_examples_may_share_an_average() -> None:
    images = torch.arange(0, 250, 5, dtype=torch.uint8)[:, None, None, None].expand(50, 3, 8, 8)

    def grey(n_sharing: int) -> torch.Tensor:
        examples = noise_examples(
            images.contiguous(),
            n_examples=22,
            n_averaged=5,
            generator=generator(1),
            n_sharing=n_sharing,
        )
        assert len(examples) == 22
        assert len(examples.target[:, 0, 0, 0].unique()) > 10
        assert len(examples.condition.flatten(1).unique(dim=0)) == 22
        return examples.condition.mean(dim=(1, 2, 3))

    # Averages of five greys differ by 0.25, and noise moves the mean of a picture by 0.02.
    means = grey(4).split(4)
    assert all(group.std() < 0.08 for group in means)
    assert torch.stack([group.mean() for group in means]).std() > 0.1
    assert grey(1)[:4].std() > 0.1


def test_no_noise_examples_of_no_images() -> None:
    images = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    assert len(noise_examples(images, n_examples=0, n_averaged=3, generator=generator)) == 0
    with pytest.raises(ValueError, match="images is empty"):
        noise_examples(images[:0], n_examples=1, n_averaged=3, generator=generator)


def test_a_mirrored_example_is_flipped_on_both_sides_and_others_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    condition, target = torch.rand(2, 2, 3, 4, 5, generator=generator)
    examples = Examples(condition=condition, target=target, augment=torch.zeros(2, 9))
    mirrored = examples.mirrored(torch.tensor([True, False]))
    for before, after in ((condition, mirrored.condition), (target, mirrored.target)):
        assert torch.equal(after[0], before[0].flip(-1))
        assert torch.equal(after[1], before[1])
    assert mirrored.augment[:, 0].tolist() == [1.0, 0.0]


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


def test_nothing_to_mix_is_refused() -> None:
    refuses("n_mixed=1 of 40 images", made, 3, n_mixed=1)
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


def test_the_other_images_weights_have_heavy_tails_and_a_norm_that_varies() -> None:
    n, n_mixed, strength = 4000, 40, 1.3
    own = torch.randint(n_mixed, (n,), generator=generator(1))
    weights = _weights(n, n_mixed, own, strength, generator(0))
    rows = torch.arange(n)
    assert torch.equal(weights[rows, own], torch.ones(n))
    weights[rows, own] = 0
    norm = weights.norm(dim=1)
    assert norm.median().item() == pytest.approx(strength, rel=0.03)
    assert norm.log().std().item() == pytest.approx(STRENGTH_SPREAD, rel=0.05)
    # The largest of 39 normal numbers has on average 12 % of their energy, of Student's t more.
    share = (weights.abs().amax(dim=1) / norm).square().mean().item()
    assert share > 0.2
