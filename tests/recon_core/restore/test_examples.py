"""Examples: the batch of the stream, and the examples of pure noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recon_core.matching import fit_to_range
from recon_core.restore.examples import Examples, make_examples, noise_examples, to_pictures


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
    """Also at the ends of the range, for any factor, and where nothing or nothing finite is."""
    rng = np.random.default_rng(1)
    batch = stream_batch(200)
    x, mean = batch["reconstruction"] * 1e3, batch["mean_image"]
    x[:20] *= 1e-4
    x[20:40, :, 2:4] = 0
    x[40] = 0
    x[41:44] = np.abs(x[41:44])
    x[44:47] = -np.abs(x[44:47])
    x[47, 1, 2, 3] = np.nan
    x[48, 1, 2, 3] = np.inf
    mean[50:60][rng.random(mean[50:60].shape) < 0.05] = 0
    mean[60:70][rng.random(mean[60:70].shape) < 0.05] = 1
    mean[70] = 0
    mean[71] = 1
    if dtype == "f4":
        x[80:90] *= 1e-33
        x[90:100] *= 1e33
    batch["reconstruction"] = x.astype(dtype)
    expected = fit_to_range(torch.from_numpy(batch["reconstruction"]).float(), torch.tensor(mean))
    examples = make_examples(batch)
    assert torch.allclose(examples.condition, 2 * expected - 1, atol=2e-6, equal_nan=True)
    assert not examples.condition[47:49].isfinite().any()
    torch.testing.assert_close(examples.condition[40], torch.tensor(2 * mean[40] - 1))


def test_a_batch_without_a_column_is_refused_by_name() -> None:
    batch = stream_batch(2)
    del batch["mean_image"]
    with pytest.raises(ValueError, match=r"lacks \['mean_image'\]"):
        make_examples(batch)


def test_noise_examples_average_their_own_target() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (50, 3, 8, 8), dtype=torch.uint8, generator=generator)
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


def test_noise_examples_say_little_about_the_target() -> None:
    images = torch.cat(
        [torch.zeros(20, 3, 8, 8, dtype=torch.uint8), torch.full((20, 3, 8, 8), 255).byte()]
    )
    examples = noise_examples(
        images, n_examples=200, n_averaged=300, generator=torch.Generator().manual_seed(1)
    )
    # The mean of 300 is close to grey whatever the target is, and noise touches the range's end.
    mean = examples.condition.mean(dim=(1, 2, 3))
    assert mean.abs().max() < 0.2
    assert torch.allclose(examples.condition.abs().amax(dim=(1, 2, 3)), torch.ones(200), atol=1e-5)
    assert 0.3 < (examples.target[:, 0, 0, 0] > 0).float().mean() < 0.7


def test_noise_examples_may_share_an_average() -> None:
    images = torch.arange(0, 250, 5, dtype=torch.uint8)[:, None, None, None].expand(50, 3, 8, 8)

    def grey(n_sharing: int) -> torch.Tensor:
        examples = noise_examples(
            images.contiguous(),
            n_examples=22,
            n_averaged=5,
            generator=torch.Generator().manual_seed(1),
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
