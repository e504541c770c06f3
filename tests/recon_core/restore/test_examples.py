"""Examples: the batch of the stream, and the examples of pure noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recon_core.restore.examples import concatenate, make_examples, noise_examples, to_pictures


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
    # The largest r with r x + mean in [0, 1]: every picture touches one end of the range.
    assert torch.allclose(examples.condition.abs().amax(dim=(1, 2, 3)), torch.ones(4), atol=1e-5)
    direction = (examples.condition + 1) / 2 - torch.from_numpy(batch["mean_image"])
    ratio = direction / torch.from_numpy(batch["reconstruction"])
    assert torch.allclose(ratio, ratio[:, :1, :1, :1].expand_as(ratio), rtol=1e-2)
    assert torch.equal(
        (to_pictures(examples.target) * 255).round().to(torch.uint8),
        torch.from_numpy(batch["target"]),
    )
    assert torch.equal(examples.augment, torch.from_numpy(batch["augment"]))


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


def test_no_noise_examples_of_no_images() -> None:
    images = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    assert len(noise_examples(images, n_examples=0, n_averaged=3, generator=generator)) == 0
    with pytest.raises(ValueError, match="images is empty"):
        noise_examples(images[:0], n_examples=1, n_averaged=3, generator=generator)


def test_concatenation_keeps_the_order() -> None:
    first, second = make_examples(stream_batch(2)), make_examples(stream_batch(3))
    both = concatenate(first, second)
    assert torch.equal(both.target[:2], first.target)
    assert torch.equal(both.condition[2:], second.condition)
