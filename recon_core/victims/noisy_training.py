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

from recon_core.optimisers import Stepper
from recon_core.strict import Strict, Within
from recon_core.types import Progress, no_progress
from recon_core.victims.losses import Loss
from recon_core.victims.network import Architecture, Parameters, Pass
from recon_core.victims.stack import inputs_of
from recon_core.victims.training import REPORTS, Trained, Training, check_victims

Masks = tuple[Tensor, ...]
"""Factors (R, n, width) of the units of every hidden layer: 0 or 1 / (1 - p); empty: all 1."""


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

    @property
    def is_off(self) -> bool:
        """True where no step is changed."""
        return not self.dropout and self.clip is None


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
    _check_privacy(training, noise)
    everyone = torch.arange(len(x), device=x.device)
    (inputs,) = inputs_of(architecture, x, None)
    values = [value.clone(memory_format=torch.contiguous_format) for value in parameters.tensors()]
    steppers = [training.optimiser.stepper(value) for value in values]
    rules = _Rules(architecture, training, noise, parameters)
    course = _Course(rules, _Stack(everyone, inputs, y, values, steppers, tuple(generators)))
    report_every = max(1, training.epochs // REPORTS)
    for epoch in range(1, training.epochs + 1):
        _run_epoch(rules, course.stack)
        looks = noise.clip is None and epoch % training.stop_every == 0
        if looks or epoch == training.epochs:
            course.look(epoch)
        if not len(course.stack.runs):
            break
        if epoch % report_every == 0:
            progress(epoch / training.epochs)
    progress(1.0)
    return course.trained()


def gradient_norms(
    architecture: Architecture,
    parameters: Parameters,
    x: Float[Tensor, "r n d"],
    y: Shaped[Tensor, "r n"],
    loss: Loss,
) -> Float[Tensor, "r n"]:
    """Norm of the gradient of every image's own loss over all parameters, without dropout: what
    `Noise.clip` is held against. Raises ValueError for labels that do not go with the loss."""
    loss.check(y, architecture.n_outputs)
    (inputs,) = inputs_of(architecture, x, None)
    passed = _forward(architecture, parameters, inputs, ())
    errors = _errors(architecture, parameters, passed, (), _own_gradients(loss, passed.output, y))
    return _squared_norms(architecture, passed, errors).sqrt()


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


@dataclass(frozen=True)
class _Rules:
    """All that is the same for every victim, in every step."""

    architecture: Architecture
    training: Training
    noise: Noise
    layout: Parameters


@dataclass(frozen=True)
class _Stack:
    """The victims that go on: their numbers, what their first layer reads, and what moves."""

    runs: Int64[Tensor, " k"]
    inputs: Tensor
    y: Shaped[Tensor, "k n"]
    values: list[Tensor]
    steppers: list[Stepper]
    generators: tuple[torch.Generator, ...]

    def averages(self, layout: Parameters) -> list[Tensor]:
        """What the optimiser remembers of the first layer's gradients, if anything."""
        if not self.steppers[0].optimiser.averages_gradients:
            return []
        first = self.steppers[: 1 + (layout.biases[0] is not None)]
        return [stepper.tensors()[0] for stepper in first]

    def without(self, ended: Bool[Tensor, " k"]) -> _Stack:
        keep = (~ended).nonzero().squeeze(1)
        values = [value[keep] for value in self.values]
        steppers = [
            old.optimiser.stepper(value, state=old.rows(keep))
            for old, value in zip(self.steppers, values, strict=True)
        ]
        generators = tuple(self.generators[place] for place in keep.tolist())
        return _Stack(
            self.runs[keep], self.inputs[keep], self.y[keep], values, steppers, generators
        )


class _Course:
    """The victims' way, and how each of them ended."""

    def __init__(self, rules: _Rules, stack: _Stack) -> None:
        self.rules, self.stack = rules, stack
        like, n_runs = stack.values[0], len(stack.runs)
        self.final = [v.clone() for v in (*stack.values, *stack.averages(rules.layout))]
        self.loss = like.new_full((n_runs,), torch.nan)
        self.margins = like.new_full(stack.y.shape, torch.nan)
        self.epochs_done = torch.zeros(n_runs, dtype=torch.int64, device=like.device)
        self.diverged = torch.zeros(n_runs, dtype=torch.bool, device=like.device)

    def look(self, epoch: int) -> None:
        """Notes where everyone is, and goes on without those who are done."""
        stack, training = self.stack, self.rules.training
        parameters = self.rules.layout.like(stack.values)
        phi = _forward(self.rules.architecture, parameters, stack.inputs, ()).output
        loss = training.loss.value(phi, stack.y)
        diverged = ~(loss.isfinite() & phi.isfinite().flatten(1).all(1))
        if training.diverged_above is not None:
            diverged |= loss > training.diverged_above
        self.loss[stack.runs] = loss
        self.margins[stack.runs] = training.loss.margins(phi, stack.y)
        self.epochs_done[stack.runs] = epoch
        self.diverged[stack.runs] = diverged
        now = (*stack.values, *stack.averages(self.rules.layout))
        for final, value in zip(self.final, now, strict=True):
            final[stack.runs] = value
        ended = diverged
        if training.stop_loss is not None:
            ended = ended | (loss < training.stop_loss)
        if bool(ended.any()):
            self.stack = stack.without(ended)

    def trained(self) -> Trained:
        return Trained.ended(
            self.rules.layout.like(self.final[: len(self.stack.values)]),
            averages=tuple(self.final[len(self.stack.values) :]),
            loss=self.loss,
            margins=self.margins,
            epochs_done=self.epochs_done,
            diverged=self.diverged,
        )


def _run_epoch(rules: _Rules, stack: _Stack) -> None:
    n = stack.y.shape[1]
    batch_size = min(rules.training.batch_size or n, n)
    for _ in range(math.ceil(n / batch_size)):
        inputs, y, meant = stack.inputs, stack.y, torch.ones_like(stack.y, dtype=torch.bool)
        if batch_size < n:
            index, taken = poisson_sample(n, batch_size / n, stack.generators)
            rows = torch.arange(len(index)).unsqueeze(1).to(y.device)
            index, meant = index.to(y.device), taken.to(y.device)
            inputs, y = inputs[rows, index], y[rows, index]
        sums = _summed_gradients(rules, stack, inputs, y, meant)
        decay = rules.training.weight_decay
        for value, gradient, stepper in zip(stack.values, sums, stack.steppers, strict=True):
            gradient.div_(batch_size)
            if decay:
                gradient.add_(value, alpha=decay)
            stepper.step_(gradient)


def _summed_gradients(
    rules: _Rules,
    stack: _Stack,
    inputs: Tensor,
    y: Shaped[Tensor, "k m"],
    meant: Bool[Tensor, "k m"],
) -> tuple[Tensor, ...]:
    """Sums over the images that are meant, clipped and with noise, of the gradients."""
    architecture, noise = rules.architecture, rules.noise
    parameters = rules.layout.like(stack.values)
    masks = _dropout(architecture, noise.dropout, meant, stack.generators, stack.values[0])
    passed = _forward(architecture, parameters, inputs, masks)
    gradient = _own_gradients(rules.training.loss, passed.output, y)
    gradient = gradient.masked_fill(~meant.unsqueeze(2), 0.0)
    errors = _errors(architecture, parameters, passed, masks, gradient)
    if noise.clip is not None:
        norms = _squared_norms(architecture, passed, errors).sqrt()
        factors = (noise.clip / norms).clamp_max(1.0).unsqueeze(2)
        errors = tuple(d * factors for d in errors)
    sums = _products(architecture, rules.layout, passed, errors).tensors()
    if noise.noise_multiplier and noise.clip is not None:
        _add_noise_(sums, noise.noise_multiplier * noise.clip, stack.generators)
    return sums


def _own_gradients(
    loss: Loss, phi: Float[Tensor, "r n c"], y: Shaped[Tensor, "r n"]
) -> Float[Tensor, "r n c"]:
    """Derivatives of every image's own loss; `Loss.gradient` has those of their mean."""
    return loss.gradient(phi, y) * phi.shape[1]


def _dropout(
    architecture: Architecture,
    share: float,
    meant: Bool[Tensor, "k m"],
    generators: Sequence[torch.Generator],
    like: Tensor,
) -> Masks:
    """Masks of a step, layer by layer, of the images that are meant; nothing without dropout."""
    if not share:
        return ()
    widths = [fan_in for fan_in, _fan_out in architecture.layer_sizes[1:]]
    masks = [torch.zeros(*meant.shape, width, dtype=torch.bool) for width in widths]
    for run, (n, generator) in enumerate(zip(meant.sum(1).tolist(), generators, strict=True)):
        for mask in masks:
            kept = torch.rand(n, mask.shape[2], generator=generator) >= share
            mask[run, :n] = kept
    return tuple(mask.to(like.device).to(like.dtype).div_(1 - share) for mask in masks)


def _add_noise_(
    sums: Sequence[Tensor], deviation: float, generators: Sequence[torch.Generator]
) -> None:
    """Normal noise on every victim's sums, tensor by tensor from its generator."""
    for total in sums:
        drawn = torch.empty(total.shape, dtype=torch.float32)
        for own, generator in zip(drawn, generators, strict=True):
            own.normal_(generator=generator)
        total.add_(drawn.to(total), alpha=deviation)


def _forward(
    architecture: Architecture, parameters: Parameters, inputs: Tensor, masks: Masks
) -> Pass:
    """`Architecture.forward` from what the first layer reads (pixels, or a convolution's patches),
    with masks on the hidden units."""
    read, pre, a = [], [], inputs
    convolves = architecture.network.conv is not None
    for layer, (w, b) in enumerate(zip(parameters.weights, parameters.biases, strict=True)):
        read.append(a)
        if layer == 0 and convolves:
            z = w.unsqueeze(1) @ a
            z = (z if b is None else z + b[:, None, :, None]).flatten(2)
        else:
            z = torch.bmm(a, w.mT) if b is None else torch.baddbmm(b.unsqueeze(1), a, w.mT)
        if layer < architecture.n_layers - 1:
            pre.append(z)
            a = architecture.activate(z)
            a = a * masks[layer] if masks else a
    return Pass(tuple(read), tuple(pre), z)


def _errors(
    architecture: Architecture,
    parameters: Parameters,
    passed: Pass,
    masks: Masks,
    output_gradient: Float[Tensor, "r n o"],
) -> tuple[Tensor, ...]:
    """Derivatives of every image's loss with respect to the outputs of every layer, before the
    activation: d_1 .. d_L, each (R, n, width)."""
    errors = [output_gradient]
    for layer in range(architecture.n_layers - 2, -1, -1):
        d = torch.bmm(errors[-1], parameters.weights[layer + 1])
        d = d.mul_(architecture.slope(passed.pre[layer]))
        errors.append(d.mul_(masks[layer]) if masks else d)
    return tuple(reversed(errors))


def _squared_norms(
    architecture: Architecture, passed: Pass, errors: Sequence[Tensor]
) -> Float[Tensor, "r n"]:
    """Squared norms of every image's gradient (Goodfellow 2015), over all parameters."""
    total = torch.zeros_like(errors[-1][..., 0])
    for layer, (a, d) in enumerate(zip(passed.inputs, errors, strict=True)):
        if layer == 0 and architecture.network.conv is not None:
            maps = d.unflatten(2, (-1, architecture.n_positions))
            total = total + _kernel_gradients(maps, a).square().sum((2, 3))
            if architecture.has_bias(0):
                total = total + maps.sum(3).square().sum(2)
        else:
            size = a.square().sum(2) + (1 if architecture.has_bias(layer) else 0)
            total = total + size * d.square().sum(2)
    return total


def _products(
    architecture: Architecture, layout: Parameters, passed: Pass, errors: Sequence[Tensor]
) -> Parameters:
    """Gradients of all parameters, summed over the images."""
    sums: list[Tensor] = []
    for layer, (a, d) in enumerate(zip(passed.inputs, errors, strict=True)):
        if layer == 0 and architecture.network.conv is not None:
            maps = d.unflatten(2, (-1, architecture.n_positions))
            sums.append(_kernel_gradients(maps, a).sum(1))
            sums += [maps.sum((1, 3))] if architecture.has_bias(0) else []
        else:
            sums.append(torch.bmm(d.mT, a))
            sums += [d.sum(1)] if architecture.has_bias(layer) else []
    return layout.like(sums)


def _kernel_gradients(
    maps: Float[Tensor, "r n c p"], patches: Float[Tensor, "r n k p"]
) -> Float[Tensor, "r n c k"]:
    """Every image's gradient of a convolution's kernels."""
    return torch.einsum("rncp,rnkp->rnck", maps, patches)


def _check_privacy(training: Training, noise: Noise) -> None:
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
