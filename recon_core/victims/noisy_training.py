"""Training of R victims whose every step is random: with dropout, and with private gradients.

DP-SGD (Abadi et al. 2016, "Deep learning with differential privacy", algorithm 1) draws each image
into a step with the same probability, scales each image's gradient to a norm of at most C, and adds
normal noise of standard deviation sigma C to their sum:

    g = (sum_i g_i min(1, C / ||g_i||) + sigma C N(0, 1)) / B,    B the expected size of a batch.

The norms need no gradient of a single image in a dense layer (Goodfellow 2015, "Efficient
per-example gradient computations"): with a the input of a layer and d the derivative of an image's
loss with respect to its output, the gradients d a^T of the weights and d of the biases have squared
norms |d|^2 |a|^2 and |d|^2. A convolution's kernel is small, and its gradients are made. As the
layers' gradients are linear in d, the sum of the scaled gradients is the gradient for scaled d.

Dropout (Srivastava et al. 2014) leaves each hidden unit out of a step with probability p and
divides the others by 1 - p, for every image anew; a unit of a convolution is one channel at one
position. The trained network is used whole.

Departures: numbers are floating point, so that the noise does not withstand an attack on its last
bits (Mironov 2012), and an image whose gradient overflows is not bounded but ends its victim; a
full batch has B = n, so n counts as public.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from recon_core.strict import Strict, Within
from recon_core.types import Progress, no_progress
from recon_core.victims.network import Architecture, Parameters, Pass
from recon_core.victims.training import Stack, Trained, Training, check_victims, train_stack


@dataclass(frozen=True, kw_only=True)
class Noise(Strict):
    """Randomness of every step of a training. Defaults: none.

    `dropout`: the share of hidden units left out of a step, in [0, 1). `clip`: the largest norm C
    of an image's gradient over all parameters, above 0; None leaves gradients as they are.
    `noise_multiplier`: sigma, the standard deviation of the normal noise on the sum of the clipped
    gradients in units of `clip`, at least 0; above 0 it needs `clip`.
    """

    dropout: Annotated[float, Within("[0, 1)", fix="0.5 leaves out half of the hidden units")] = 0.0
    clip: Annotated[float | None, Within("(0, inf)", fix="None does not clip")] = None
    noise_multiplier: Annotated[float, Within("[0, inf)", fix="0 adds no noise")] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_multiplier and self.clip is None:
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier} with clip=None; the noise is in units "
                "of clip, so set it, or noise_multiplier=0"
            )


def train_with_noise(
    architecture: Architecture,
    parameters: Parameters,
    x: Float[Tensor, "r n d"],
    y: Shaped[Tensor, "r n"],
    *,
    training: Training,
    noise: Noise,
    generators: Sequence[torch.Generator],
    progress: Progress = no_progress,
) -> Trained:
    """Trained copies of R victims, on images `x` with labels `y` as `training.loss` wants them.

    With `training.batch_size`, each of the ceil(n / batch_size) steps of an epoch takes every image
    with probability batch_size / n, whatever the noise is (`train` shuffles instead), and divides
    the sum of the gradients by batch_size. Weight decay comes after the noise, as it depends on no
    image. Loss, accuracy and margins of the result are those of the whole network, without dropout.

    `generators`, one per victim, on the CPU, draw images, then masks, then noise, and are advanced:
    but for rounding a victim does not depend on those beside it. With `noise.clip` nobody stops
    before the last epoch, even if its weights are not finite. Raises ValueError for arguments that
    do not fit together, for `training.span=True`, which these steps do not have, and for a rule of
    stopping with `noise.clip`: the training loss would tell of the images past the noise.
    """
    check_victims(architecture, parameters, x)
    if len(generators) != len(x):
        raise ValueError(
            f"{len(generators)} generators for {len(x)} victims; give each its own, to draw its "
            "images, masks and noise from"
        )
    training.loss.check(y, architecture.n_outputs)
    if training.span is True:
        raise ValueError(
            "span=True, but steps with noise are not made in the span of the images; use "
            "span=False or 'auto'"
        )
    for name in ("stop_loss", "diverged_above"):
        if noise.clip is not None and getattr(training, name) is not None:
            raise ValueError(
                f"{name}={getattr(training, name)} with clip={noise.clip}: an end that depends on "
                f"the training loss spends privacy that nobody counts; use {name}=None"
            )
    return train_stack(
        _Noisy(
            architecture, parameters, x, y, training=training, noise=noise, generators=generators
        ),
        progress,
        look_every=training.epochs if noise.clip is not None else training.stop_every,
    )


def poisson_sample(
    n: int, probability: float, generators: Sequence[torch.Generator]
) -> tuple[Int64[Tensor, "r m"], Bool[Tensor, "r m"]]:
    """Images of a step, each of `n` with the same probability, drawn by every victim's own
    generator on the CPU: their rows, in order, and which of the m are meant. m is the most that a
    victim drew, at least 1; what a victim lacks is filled up with row 0."""
    taken = [torch.rand(n, generator=g) < probability for g in generators]
    rows = [drawn.nonzero().squeeze(1) for drawn in taken]
    m = max(1, *map(len, rows))
    index = torch.zeros(len(rows), m, dtype=torch.int64)
    meant = torch.zeros(len(rows), m, dtype=torch.bool)
    for run, row in enumerate(rows):
        index[run, : len(row)] = row
        meant[run, : len(row)] = True
    return index, meant


class _Noisy(Stack):
    def __init__(
        self,
        architecture: Architecture,
        parameters: Parameters,
        x: Float[Tensor, "r n d"],
        y: Shaped[Tensor, "r n"],
        *,
        training: Training,
        noise: Noise,
        generators: Sequence[torch.Generator],
    ) -> None:
        super().__init__(parameters, y, training, generators)
        self.architecture, self.noise, self.x = architecture, noise, x

    def outputs(self) -> Float[Tensor, "k n c"]:
        return self.architecture.forward(self.layout.like(self.values), self.x).output

    def keep(self, rows: Int64[Tensor, " k"]) -> None:
        super().keep(rows)
        self.x = self.x[rows]

    def advance(self, n_epochs: int) -> None:
        n = self.y.shape[1]
        batch_size = min(self.training.batch_size or n, n)
        for _ in range(n_epochs * math.ceil(n / batch_size)):
            x, y, meant = self.x, self.y, torch.ones_like(self.y, dtype=torch.bool)
            if batch_size < n:
                index, taken = poisson_sample(n, batch_size / n, self.generators)
                rows = torch.arange(len(index)).unsqueeze(1).to(y.device)
                index, meant = index.to(y.device), taken.to(y.device)
                x, y = x[rows, index], y[rows, index]
            sums = self._summed_gradients(x, y, meant)
            self.update([total.div_(batch_size) for total in sums])

    def _summed_gradients(
        self, x: Float[Tensor, "k m d"], y: Shaped[Tensor, "k m"], meant: Bool[Tensor, "k m"]
    ) -> tuple[Tensor, ...]:
        """Sums over the images that are meant, clipped and with noise, of the gradients."""
        architecture, noise = self.architecture, self.noise
        parameters = self.layout.like(self.values)
        masks = self._dropout(meant)
        passed = architecture.forward(parameters, x, masks)
        # `Loss.gradient` has the derivatives of the mean over m images
        gradient = self.training.loss.gradient(passed.output, y) * y.shape[1]
        gradient = gradient.masked_fill(~meant.unsqueeze(2), 0.0)
        errors = architecture.errors(parameters, passed, gradient, masks)
        if noise.clip is not None:
            norms = squared_norms(architecture, passed, errors).sqrt()
            factors = (noise.clip / norms).clamp_max(1.0).unsqueeze(2)
            errors = tuple(d * factors for d in errors)
        sums = architecture.summed(passed, errors).tensors()
        if noise.noise_multiplier and noise.clip is not None:
            for total in sums:  # every victim's own, tensor by tensor from its generator
                drawn = torch.empty(total.shape, dtype=torch.float32)
                for own, generator in zip(drawn, self.generators, strict=True):
                    own.normal_(generator=generator)
                total.add_(drawn.to(total), alpha=noise.noise_multiplier * noise.clip)
        return sums

    def _dropout(self, meant: Bool[Tensor, "k m"]) -> tuple[Tensor, ...]:
        """Factors (k, m, width) of the units of every hidden layer, 0 or 1 / (1 - p), for the
        images that are meant; nothing without dropout."""
        share, like = self.noise.dropout, self.values[0]
        if not share:
            return ()
        widths = [fan_in for fan_in, _fan_out in self.architecture.layer_sizes[1:]]
        masks = [torch.zeros(*meant.shape, width, dtype=torch.bool) for width in widths]
        counts = meant.sum(1).tolist()
        for run, (n, generator) in enumerate(zip(counts, self.generators, strict=True)):
            for mask in masks:
                mask[run, :n] = torch.rand(n, mask.shape[2], generator=generator) >= share
        return tuple(mask.to(like.device).to(like.dtype).div_(1 - share) for mask in masks)


def squared_norms(
    architecture: Architecture, passed: Pass, errors: Sequence[Tensor]
) -> Float[Tensor, "r n"]:
    """Squared norms of every image's gradient (Goodfellow 2015), over all parameters, from
    `Architecture.errors`."""
    total = torch.zeros_like(errors[-1][..., 0])
    for layer, (a, d) in enumerate(zip(passed.inputs, errors, strict=True)):
        if layer == 0 and architecture.network.conv is not None:
            maps = d.unflatten(2, (-1, architecture.n_positions))
            kernels = torch.einsum("rncp,rnkp->rnck", maps, a)
            total = total + kernels.square().sum((2, 3))
            if architecture.has_bias(0):
                total = total + maps.sum(3).square().sum(2)
        else:
            size = a.square().sum(2) + (1 if architecture.has_bias(layer) else 0)
            total = total + size * d.square().sum(2)
    return total
