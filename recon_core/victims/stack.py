"""The victims that are still training: their tensors, and what an epoch does to them.

`Problem` is what does not change during training; `Stack` the part of it that goes on, in memory of
its own. What is trained, the *values*, are a victim's weights and biases; or, in the span of the
images (`Span`), the first layer's coordinates in place of its weights, and its scale at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from recon_core.optimisers import Optimiser
from recon_core.victims.backprop import (
    Backprop,
    Convolution,
    Dense,
    FirstLayer,
    Inputs,
    Span,
    SpanLayer,
)
from recon_core.victims.losses import Loss
from recon_core.victims.network import Architecture, Parameters
from recon_core.victims.separability import FeatureDefence


@dataclass(frozen=True)
class Problem:
    """R victims' images, in the form in which the first layer reads them, labels and rules."""

    architecture: Architecture
    layout: Parameters
    inputs: Inputs
    y: Shaped[Tensor, "r n"]
    span: Span | None
    loss: Loss
    optimiser: Optimiser
    weight_decay: float
    batch_size: int
    defence: FeatureDefence | None

    @property
    def n_images(self) -> int:
        return self.y.shape[1]

    @property
    def shuffled(self) -> bool:
        return self.batch_size < self.n_images

    def start(self, parameters: Parameters) -> tuple[Tensor, ...]:
        if self.span is None:
            return parameters.tensors()
        coordinates, scale = self.span.start()
        return (coordinates, *parameters.tensors()[1:], scale)

    def parameters(self, values: Sequence[Tensor]) -> Parameters:
        if self.span is None:
            return self.layout.like(values)
        coordinates, *others, scale = values
        return self.layout.like([self.span.layer(coordinates, scale), *others])


class Stack:
    """Some of the victims of a problem, which train at once and know nothing of each other."""

    def __init__(
        self,
        problem: Problem,
        runs: Int[Tensor, " k"],
        values: Sequence[Tensor],
        averages: Sequence[Sequence[Tensor]] | None,
    ) -> None:
        """`values` and `averages`, of these runs only, are copied; no averages: from the start."""
        self.problem, self.runs = problem, runs
        self.values = tuple(v.clone(memory_format=torch.contiguous_format) for v in values)
        self.gradients = tuple(torch.zeros_like(value) for value in self.values)
        make = problem.optimiser.stepper
        self.steppers = [make(value) for value in self.values]
        for stepper, tensors in zip(self.steppers, averages or (), strict=averages is not None):
            stepper.load(tensors)
        everyone = len(runs) == len(problem.y)
        self.inputs, self.y, self.defence = problem.inputs, problem.y, problem.defence
        if not everyone:
            self.inputs = tuple(tensor[runs] for tensor in problem.inputs)
            self.y = problem.y[runs]
            self.defence = problem.defence and problem.defence.of_runs(runs)
        self.order = torch.arange(self.y.numel(), device=self.y.device).view_as(self.y)
        size, n = problem.batch_size, problem.n_images
        self.batches = [slice(first, min(first + size, n)) for first in range(0, n, size)]
        self.passes = {batch.stop - batch.start: self._pass(batch) for batch in self.batches}

    def _pass(self, batch: slice) -> tuple[Backprop, Inputs, Tensor]:
        problem, n = self.problem, batch.stop - batch.start
        n_weights = len(problem.layout.tensors())
        parameters = problem.layout.like(self.values[:n_weights])
        gradients = problem.layout.like(self.gradients[:n_weights])
        first: FirstLayer
        if problem.span is not None:
            first = SpanLayer(parameters, gradients, self.values[-1])
        elif problem.architecture.network.conv is None:
            first = Dense(parameters, gradients, 0)
        else:
            first = Convolution(parameters, gradients)
        backprop = Backprop(
            problem.architecture, first, parameters, gradients, n, defence=self.defence
        )
        if not problem.shuffled:
            return backprop, self.inputs, self.y
        buffers = [t.new_empty(len(t), n, *t.shape[2:]) for t in (*self.inputs, self.y)]
        return backprop, tuple(buffers[:-1]), buffers[-1]

    def shuffle(self, generators: Sequence[torch.Generator]) -> None:
        """A new order of the images, each victim's from its own generator."""
        n = self.problem.n_images
        order = torch.stack([torch.randperm(n, generator=g) for g in generators])
        self.order.copy_(order + n * torch.arange(len(order)).unsqueeze(1))

    def epoch(self) -> None:
        """Once through the images, an update after every batch."""
        for batch in self.batches:
            backprop, inputs, y = self.passes[batch.stop - batch.start]
            images = None
            if self.problem.shuffled:
                images = self.order[:, batch].flatten()
                sources = (*self.inputs, self.y)
                for source, target in zip(sources, (*inputs, y), strict=True):
                    torch.index_select(source.flatten(0, 1), 0, images, out=target.flatten(0, 1))
            phi = backprop.forward(inputs)
            backprop.backward(inputs, self.problem.loss.gradient(phi, y), images)
            if self.problem.span is not None:
                self.gradients[-1].zero_()
            moved = zip(self.values, self.gradients, self.steppers, strict=True)
            for value, gradient, stepper in moved:
                if self.problem.weight_decay:
                    gradient.add_(value, alpha=self.problem.weight_decay)
                stepper.step_(gradient)

    def averages(self) -> tuple[Tensor, ...]:
        """What the optimiser remembers of the gradients of the first layer's weights (k, h, d) and
        biases (k, h); nothing where it averages none."""
        if not self.problem.optimiser.averages_gradients:
            return ()
        with_bias = self.problem.layout.biases[0] is not None
        kept = [stepper.tensors()[0] for stepper in self.steppers]
        if self.problem.span is not None:
            kept[0] = self.problem.span.rows(self.runs).layer(kept[0], kept[-1])
        return tuple(kept[: 1 + with_bias])

    def outputs(self) -> Float[Tensor, "k n c"]:
        outputs = []
        for batch in self.batches:
            inputs = tuple(tensor[:, batch] for tensor in self.inputs)
            outputs.append(self.passes[batch.stop - batch.start][0].forward(inputs).clone())
        return torch.cat(outputs, 1)

    def without(self, ended: Bool[Tensor, " k"]) -> Stack:
        keep = (~ended).nonzero().squeeze(1)
        return Stack(
            self.problem,
            self.runs[keep],
            [value[keep] for value in self.values],
            [stepper.rows(keep) for stepper in self.steppers],
        )
