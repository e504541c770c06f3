"""What restorers learn from: a reconstruction as a picture, the image it came from, and labels.

A raw reconstruction is brought into range the way paper 001 does it (section 5.1): multiplied by
the largest r such that r x + mean stays in [0, 1]. Networks see [-1, 1].

`noise_examples` are the examples of pure noise of section 3: what an attack holds before its
first iteration, that is the mean of the run's images plus Gaussian noise, paired with one of the
images. The noise is normalised like any reconstruction, so its initial scale cancels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32, UInt8
from numpy.typing import NDArray
from torch import Tensor

from recon_core.matching import fit_to_range
from recon_core.types import N_AUGMENT


@dataclass(frozen=True, kw_only=True)
class Examples:
    """n training examples: condition and target in [-1, 1], augmentation labels of the target."""

    condition: Float32[Tensor, "n c h w"]
    target: Float32[Tensor, "n c h w"]
    augment: Float32[Tensor, "n 9"]

    def __len__(self) -> int:
        return len(self.target)

    def to(self, device: torch.device | str) -> Examples:
        """The same examples on another device."""
        return Examples(
            condition=self.condition.to(device),
            target=self.target.to(device),
            augment=self.augment.to(device),
        )


def make_examples(batch: Mapping[str, NDArray[np.generic]]) -> Examples:
    """The examples in a batch of the pair stream.

    Reads `reconstruction` (raw, float32), `mean_image` (float32 in [0, 1]), `target` (uint8) and
    `augment` (float32), n rows each.
    """
    missing = {"reconstruction", "mean_image", "target", "augment"} - batch.keys()
    if missing:
        raise ValueError(f"the batch lacks {sorted(missing)}; it has {sorted(batch)}")
    reconstruction = _floats(batch["reconstruction"])
    pictures = fit_to_range(reconstruction, _floats(batch["mean_image"]))
    return Examples(
        condition=to_network(pictures),
        target=to_network(_floats(batch["target"]) / 255),
        augment=_floats(batch["augment"]),
    )


def noise_examples(
    images: UInt8[Tensor, "pool c h w"],
    *,
    n_examples: int,
    n_averaged: int,
    generator: torch.Generator,
) -> Examples:
    """Examples whose condition says nothing about the target (001, section 3).

    Each averages `n_averaged` random images (001: 300, the size of a run), adds white noise and
    fits it to the range; its target is one of the averaged images. `generator` is a CPU one.
    """
    if len(images) == 0:
        raise ValueError("images is empty; noise examples average images of the training set")
    shape = images.shape[1:]
    rows = torch.randint(len(images), (n_examples, n_averaged), generator=generator)
    chosen = torch.randint(n_averaged, (n_examples, 1), generator=generator)
    noise = torch.randn(n_examples, *shape, generator=generator)
    pool = images.cpu()
    mean = torch.stack([pool[row].float().mean(dim=0) for row in rows]) if n_examples else noise
    target = pool[rows.gather(1, chosen)[:, 0]].float()
    return Examples(
        condition=to_network(fit_to_range(noise, mean / 255)),
        target=to_network(target / 255),
        augment=torch.zeros(n_examples, N_AUGMENT),
    )


def concatenate(first: Examples, second: Examples) -> Examples:
    """All examples of both, in this order."""
    return Examples(
        condition=torch.cat([first.condition, second.condition]),
        target=torch.cat([first.target, second.target]),
        augment=torch.cat([first.augment, second.augment]),
    )


def to_network(pictures: Float[Tensor, "*n c h w"]) -> Float[Tensor, "*n c h w"]:
    """[0, 1] to [-1, 1]."""
    return 2 * pictures - 1


def to_pictures(values: Float[Tensor, "*n c h w"]) -> Float[Tensor, "*n c h w"]:
    """[-1, 1] to [0, 1], clipped."""
    return ((values + 1) / 2).clamp(0, 1)


def _floats(array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
