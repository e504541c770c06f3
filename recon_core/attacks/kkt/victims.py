"""Trained victims of the `kkt` family, and what they learn: pictures less their mean.

An image is its picture in [0, 1], augmented, minus the mean of its training set (image restoration
paper, section 2; KKT paper, appendix A.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Float32, Int64, UInt8
from torch import Tensor

from recon_core.attacks.family_run import Learned
from recon_core.types import RunSpec
from recon_core.victims.feature_defence import Defence, tuples_of
from recon_core.victims.network import Architecture, Parameters
from recon_core.victims.training import Trained


@dataclass(frozen=True)
class KnownVictim:
    """One trained network; `mean` (c, h, w) in [0, 1] is what its images have subtracted."""

    architecture: Architecture
    trained: Trained
    mean: Float[Tensor, "c h w"]

    @classmethod
    def each_of(
        cls, architecture: Architecture, trained: Trained, mean: Float[Tensor, "r c h w"]
    ) -> list[KnownVictim]:
        """Networks that were trained together."""
        tensors = {name: t for name, t in vars(trained).items() if isinstance(t, Tensor)}
        found = []
        for i, own in enumerate(mean):
            rows = slice(i, i + 1)
            ended = {name: tensor[rows] for name, tensor in tensors.items()}
            one = replace(trained, parameters=trained.parameters.rows(rows), **ended)
            found.append(cls(architecture, one, own))
        return found

    def tensors(self) -> dict[str, Tensor]:
        return self.trained.tensors()

    def outputs(self, images: UInt8[Tensor, "k c h w"]) -> Float[Tensor, "k o"]:
        """phi(x) of other images, prepared as its own were."""
        weights = self.trained.parameters
        like = weights.weights[0]
        x = images.to(like.device, like.dtype) / 255 - self.mean.to(like)
        return self.architecture.forward(weights, x.flatten(1)[None]).output[0]

    def is_right(
        self, images: UInt8[Tensor, "k c h w"], labels: Int64[Tensor, " k"]
    ) -> Bool[Tensor, " k"]:
        """True for each image that is put into its class: by the sign of phi, or its largest
        output."""
        phi = self.outputs(images)
        found = (phi[:, 0] > 0).long() if phi.shape[1] == 1 else phi.argmax(1)
        return found.cpu() == labels

    def kernels(self) -> Float32[Tensor, "m c k k"] | None:
        """The kernels of the first layer; None without a convolution (KKT paper, figure 16)."""
        conv = self.architecture.network.conv
        if conv is None:
            return None
        channels = self.architecture.shape[0]
        flat = self.trained.parameters.weights[0][0].float().cpu()
        return flat.reshape(-1, channels, conv.kernel, conv.kernel)


def less_their_mean(
    learned: Sequence[Learned], device: torch.device, dtype: torch.dtype
) -> tuple[Float[Tensor, "r c h w"], Float[Tensor, "r n d"]]:
    """(mean images in float32, the inputs of R victims)."""
    unit = torch.stack([own.targets for own in learned]).to(device=device, dtype=dtype) / 255
    mean = unit.mean(dim=1, keepdim=True)
    return mean[:, 0].float(), (unit - mean).flatten(2)


def initial_weights(
    architecture: Architecture, specs: Sequence[RunSpec], like: Tensor
) -> Parameters:
    """Weights that the victims of R runs start from, with the dtype and on the device of `like`."""
    generators = [spec.victim_generator("victim") for spec in specs]
    return architecture.initial(generators, dtype=like.dtype).map(lambda t: t.to(like.device))


def check_labels(specs: Sequence[RunSpec], n_classes: int, defence: Defence | None = None) -> None:
    """Raises ValueError if labels are none of the classes, or too few for the defence."""
    for spec in specs:
        if not set(spec.labels) <= set(range(n_classes)):
            raise ValueError(
                f"run {spec.run} has labels {sorted(set(spec.labels))}; a victim of "
                f"n_classes={n_classes} needs labels from 0 to {n_classes - 1}"
            )
    if defence is not None:
        tuples_of(defence, torch.tensor([spec.labels for spec in specs]), n_classes)
