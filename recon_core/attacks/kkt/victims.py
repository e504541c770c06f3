"""The victims of the `kkt` family: the images they learn, their training, and those that are kept.

An image is its picture in [0, 1], augmented, minus the mean of its training set (image restoration
paper, section 2; KKT paper, appendix A.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32, Int64, UInt8
from torch import Tensor

from recon_core.attacks.kkt.results import Learned
from recon_core.attacks.kkt.settings import KKTSettings
from recon_core.attacks.run_sharing import kept_or_trained
from recon_core.augment import augment_images
from recon_core.types import Progress, RunSpec, Victims
from recon_core.victims.feature_defence import Defence, tuples_of
from recon_core.victims.network import Architecture, Parameters
from recon_core.victims.training import Trained, train

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class KnownVictim:
    """One trained network; `mean` (c, h, w) in [0, 1] is what its images have subtracted."""

    architecture: Architecture
    trained: Trained
    mean: Float[Tensor, "c h w"]

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


def learn(
    experiment: KKTSettings,
    specs: Sequence[RunSpec],
    images: UInt8[Tensor, "r n c h w"],
    device: torch.device,
) -> Learned:
    """Training images of the victims of R runs."""
    targets, augment = _augmented(experiment, specs, images)
    unit = targets.to(device=device, dtype=DTYPES[experiment.dtype]) / 255
    mean = unit.mean(dim=1, keepdim=True)
    return Learned(targets, augment, mean[:, 0].float(), (unit - mean).flatten(2))


def train_victims(
    experiment: KKTSettings,
    architecture: Architecture,
    specs: Sequence[RunSpec],
    x: Float[Tensor, "r n d"],
    progress: Progress,
) -> Trained:
    """The victims of R runs, trained at once."""
    labels = torch.tensor([spec.labels for spec in specs], device=x.device)
    y = labels if experiment.n_outputs > 1 else labels.to(x.dtype) * 2 - 1
    parameters = initial_weights(architecture, specs, x)
    order = [spec.victim_generator("minibatches") for spec in specs]
    return train(
        architecture,
        parameters,
        x,
        y,
        training=experiment.training,
        generators=order,
        progress=progress,
        defence=experiment.defence,
        defence_layer=experiment.defence_layer,
    )


def initial_weights(
    architecture: Architecture, specs: Sequence[RunSpec], like: Tensor
) -> Parameters:
    """Weights that the victims of R runs start from, with the dtype and on the device of `like`."""
    generators = [spec.victim_generator("victim") for spec in specs]
    return architecture.initial(generators, dtype=like.dtype).map(lambda t: t.to(like.device))


def shared_victim(
    experiment: KKTSettings,
    architecture: Architecture,
    spec: RunSpec,
    inputs: Float[Tensor, "1 n d"],
    *,
    victims: Victims | None,
    progress: Progress,
) -> Trained:
    """The victim of a sweep, trained or as it was kept."""

    def read(known: Mapping[str, Tensor]) -> Trained:
        like = architecture.initial([spec.victim_generator("victim")], dtype=inputs.dtype)
        return Trained.from_tensors(known, like, inputs.device)

    return kept_or_trained(
        spec,
        victims,
        read=read,
        train=lambda: train_victims(experiment, architecture, [spec], inputs, progress),
        progress=progress,
    )


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


def _augmented(
    experiment: KKTSettings, specs: Sequence[RunSpec], images: UInt8[Tensor, "r n c h w"]
) -> tuple[UInt8[Tensor, "r n c h w"], Float[Tensor, "r n 9"]]:
    pairs = [
        augment_images(batch, p=experiment.augment_p, generator=spec.victim_generator("augment"))
        for spec, batch in zip(specs, images, strict=True)
    ]
    return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])
