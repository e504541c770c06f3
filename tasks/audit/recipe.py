"""Recipes of victims: the network, how it is trained, and what of it is given away; and the noise
of private training, by the accountants of Opacus (Mironov 2017; Gopi et al. 2021)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
import numpy.typing as npt

from recon_core.attacks.kkt.objective import Condition
from recon_core.optimisers import Optimiser
from recon_core.sampling import binary_labels, class_labels
from recon_core.strict import Count, Natural, Positive, Strict, Tagged, Within
from recon_core.victims.autoencoder import Autoencoder, FullyConnected
from recon_core.victims.autoencoder_training import AutoencoderTraining
from recon_core.victims.network import Architecture, Network, Released, Shape
from recon_core.victims.noisy_training import Noise
from recon_core.victims.separability import MixCon, check_full_batch, hidden_layer
from recon_core.victims.training import Training


@dataclass(frozen=True, kw_only=True)
class Private(Strict):
    """DP-SGD (Abadi et al. 2016): training that is (epsilon, delta)-differentially private in its
    images. `clip`: the bound on the norm of an image's gradient. The noise is what `epochs` of the
    training need for epsilon, by Opacus' accountant."""

    epsilon: Positive
    delta: Annotated[float, Within("(0, 1)", fix="less than one over the number of images")] = 1e-5
    clip: Positive = 1.0


@dataclass(frozen=True, kw_only=True)
class AutoencoderRecipe(Strict):
    """An autoencoder in place of a classifier, trained until its loss is the last of the training's
    levels, or its epochs are over."""

    network: Annotated[Autoencoder, Tagged("kind")] = field(
        default_factory=lambda: FullyConnected(depth=4, width=128)
    )
    training: AutoencoderTraining = field(
        default_factory=lambda: AutoencoderTraining(epochs=3000, levels=(1e-4,))
    )


@dataclass(frozen=True, kw_only=True)
class VictimRecipe(Strict):
    """A network and how it is trained and given away. Defaults are what people train: torch's
    layers as they start, by SGD in batches of 16.

    `n_images`: None takes as many as the source has for it, up to `Audit.most_images`. `n_classes`:
    2 is one output and classes set against each other in two halves; more need
    `training.loss.kind` "ce".
    `views`: every image is learned in so many views, itself and others mirrored and moved by up to
    `moved` pixels. `dropout`, `private`: noise in training. `distilled`: what is given away is a
    student, which learned the network's answers on public images and nothing else. `released`: in
    which precision, or with how much noise, weights are given away. `checkpoint`: weights that are
    given away as they were trained come with the optimiser's state, as checkpoints of training do.
    `cut`: clients compute the network up to its hidden layer of that number, from 1, and send what
    comes out of it; `released` is then about these features. `mixcon`: a loss on them, or without a
    cut on the last hidden layer's (MixCon paper, eq. 1). `autoencoder`: what is trained in place
    of `victim`; its price is variance that it explains of images it never saw.
    """

    n_images: Annotated[int | None, Within("[2, inf)")] = None
    n_classes: Annotated[int, Within("[2, inf)")] = 2
    victim: Network = field(
        default_factory=lambda: Network(
            widths=(200, 200), bias="all", init_std_first=None, init_rest="torch"
        )
    )
    training: Training = field(
        default_factory=lambda: Training(
            epochs=600, batch_size=16, optimiser=Optimiser(rule="gd", lr=0.1), span="auto"
        )
    )
    views: Count = 1
    moved: Natural = 4
    dropout: Annotated[float, Within("[0, 1)")] = 0.0
    private: Private | None = None
    distilled: bool = False
    released: Released = field(default_factory=Released)
    checkpoint: bool = True
    cut: int | None = None
    mixcon: MixCon | None = None
    autoencoder: AutoencoderRecipe | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        ce = self.training.loss.kind == "ce"
        if self.n_classes > 2 and not ce:
            raise ValueError(
                f"n_classes={self.n_classes} with training.loss.kind={self.training.loss.kind!r}; "
                "more than two classes need 'ce'"
            )
        if self.n_images is not None and self.n_images % self.n_classes:
            raise ValueError(
                f"n_images={self.n_images} is not a multiple of n_classes={self.n_classes}; a "
                "victim learns equally many of each"
            )
        if self.cut is not None:
            _ = hidden_layer(self.victim, self.cut, "cut")
        if self.mixcon is not None:
            check_full_batch(self.training.batch_size)
            if self.is_noisy:
                raise ValueError("mixcon with dropout or private, which know no such loss; use one")
        if self.autoencoder is not None:
            asked = {"cut", "mixcon", "private"} & {n for n, v in vars(self).items() if v}
            asked |= {name for name in ("dropout", "distilled") if getattr(self, name)}
            if asked:
                raise ValueError(
                    f"{', '.join(sorted(asked))} with an autoencoder; these are of classifiers: "
                    "leave them out"
                )

    @property
    def n_outputs(self) -> int:
        return self.n_classes if self.training.loss.kind == "ce" else 1

    @property
    def condition(self) -> Condition:
        """The KKT condition of the loss."""
        kind = self.training.loss.kind
        return "multiclass" if kind == "ce" else "binary" if kind == "bce" else "regression"

    @property
    def is_noisy(self) -> bool:
        return self.private is not None or self.dropout > 0

    @property
    def as_trained(self) -> VictimRecipe:
        """The recipe up to the end of training, without how its networks are published."""
        cut = None if self.mixcon is None else self.cut
        return replace(self, released=Released(), distilled=False, cut=cut, checkpoint=True)

    @property
    def gives_all(self) -> bool:
        """True where weights are given away as they were trained."""
        exact = self.released == Released() or self.cut is not None
        return exact and not self.distilled

    @property
    def gives_state(self) -> bool:
        """True where the optimiser's state is given away beside the weights."""
        return self.checkpoint and self.released == Released() and self.cut is None

    def architecture(self, shape: Shape) -> Architecture:
        return self.victim.on(shape, self.n_outputs)

    def labels_of(
        self, labels: npt.NDArray[np.int64], names: Sequence[str]
    ) -> tuple[npt.NDArray[np.int64], str]:
        """(label of each image, or -1 if it has none here; the task in words)."""
        if self.n_outputs == 1:
            return binary_labels(labels, names)
        return class_labels(labels, names, self.n_classes)

    def noise(self, noise_multiplier: float) -> Noise:
        clip = None if self.private is None else self.private.clip
        return Noise(dropout=self.dropout, clip=clip, noise_multiplier=noise_multiplier)


def noise_multiplier_of(recipe: VictimRecipe, n_images: int) -> float:
    """The noise, in units of the clip, with which a recipe's training on `n_images` is private; 0
    without `recipe.private`. A step takes images at the rate that `train_with_noise` draws them,
    and "rdp", Renyi's, bounds epsilon for any number of steps, the whole batch included. Raises
    ValueError if no noise is enough, and for views, each of which is clipped by itself."""
    if recipe.private is None:
        return 0.0
    if recipe.views > 1:
        raise ValueError(
            f"private with views={recipe.views}: every view is clipped by itself, so that an image "
            "counts several times and epsilon would be more than is said; set views to 1"
        )
    size = min(recipe.training.batch_size or n_images, n_images)
    n_steps = recipe.training.epochs * math.ceil(n_images / size)
    epsilon, delta = recipe.private.epsilon, recipe.private.delta
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its search for the best order
        from opacus.accountants.utils import get_noise_multiplier

        try:
            found = get_noise_multiplier(
                target_epsilon=epsilon, target_delta=delta, sample_rate=size / n_images,
                steps=n_steps, accountant="rdp",
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(
                f"no noise makes {n_steps:,} steps private with epsilon={epsilon:g}, "
                f"delta={delta:g} ({error}); train in fewer epochs, or allow a larger epsilon"
            ) from error
    return float(found)
