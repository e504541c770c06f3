"""Training of R victims at once, on R different sets of images, each until it is done.

Image restoration paper, section 2: full batch, Adadelta with rate 1, 50,000 epochs. Haim et al.
2022 and the KKT paper: gradient descent, rate .01 (.5 with classes), 1e6 epochs, which is several
times cheaper in the span of the images (`backprop`). Weight decay adds weight_decay * theta to the
gradient of the *mean* loss, as torch does; the lambda_WD of KKT paper, eq. 13, is n times ours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from recon_core.cuda_graphs import repeated
from recon_core.optimisers import Optimiser, Stepper
from recon_core.strict import Count, Strict, Within
from recon_core.types import Progress, no_progress
from recon_core.victims.backprop import Backprop, Convolution, Dense, Inputs, SpanLayer, SpanSwitch
from recon_core.victims.losses import Loss
from recon_core.victims.network import Architecture, Parameters
from recon_core.victims.separability import FeatureDefence, MixCon, feature_defence

REPORTS = 50


@dataclass(frozen=True, kw_only=True)
class Training(Strict):
    """Length and rule of a training. Defaults: the image restoration paper, section 2.

    `batch_size`: None is the full batch; otherwise the images are shuffled every epoch. Every
    `stop_every` epochs a victim whose training loss is below `stop_loss` has finished, and one
    whose loss is above `diverged_above`, or not finite, has failed. `span`: train a dense first
    layer in the span of the images, exactly the same with fewer operations; "auto" does so where
    that is cheaper.
    """

    epochs: Count = 50_000
    optimiser: Optimiser = field(default_factory=Optimiser)
    loss: Loss = field(default_factory=Loss)
    batch_size: Count | None = None
    weight_decay: Annotated[float, Within("[0, inf)", fix="the KKT paper uses 1e-3")] = 0.0
    stop_loss: Annotated[float | None, Within("(0, inf)", fix="None: no limit")] = None
    stop_every: Count = 100
    diverged_above: Annotated[float | None, Within("(0, inf)", fix="None: no limit")] = None
    span: SpanSwitch = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.span is True and self.optimiser.rule != "gd":
            raise ValueError(
                f"span=True with optimiser.rule={self.optimiser.rule!r}, which moves every weight "
                "at its own rate; use rule='gd', or span=False"
            )


@dataclass(frozen=True)
class Trained:
    """R trained victims and how they ended. `margins` are y phi(x), or phi_y - max of the others.
    `loss` is that of the outputs alone, whatever a defence has added to it. `diverged`: it was not
    finite or above the limit. Such a victim keeps its last weights. `averages`: what the optimiser
    remembers of the first layer's gradients, weights (R, h, d) and biases (R, h), if anything."""

    parameters: Parameters
    loss: Float[Tensor, " r"]
    accuracy: Float[Tensor, " r"]
    margin_min: Float[Tensor, " r"]
    margins: Float[Tensor, "r n"]
    epochs_done: Int64[Tensor, " r"]
    diverged: Bool[Tensor, " r"]
    averages: tuple[Tensor, ...] = ()

    def tensors(self) -> dict[str, Tensor]:
        """As named tensors on the CPU, which safetensors can hold."""
        named = {f"parameters.{i}": t for i, t in enumerate(self.parameters.tensors())}
        named |= {f"averages.{i}": t for i, t in enumerate(self.averages)}
        named |= {name: t for name, t in vars(self).items() if isinstance(t, Tensor)}
        return {name: tensor.cpu().clone() for name, tensor in named.items()}

    @classmethod
    def from_tensors(
        cls, named: Mapping[str, Tensor], like: Parameters, device: torch.device
    ) -> Trained:
        """The inverse of `tensors`, for parameters of the structure of `like`, on a device."""
        moved = {name: tensor.to(device) for name, tensor in named.items()}
        n_tensors = len(like.tensors())
        parameters = like.like([moved.pop(f"parameters.{i}") for i in range(n_tensors)])
        names = [name for name in ("averages.0", "averages.1") if name in moved]
        averages = tuple(moved.pop(name) for name in names)
        return cls(parameters=parameters, averages=averages, **moved)


def train(
    architecture: Architecture,
    parameters: Parameters,
    x: Float[Tensor, "r n d"],
    y: Shaped[Tensor, "r n"],
    *,
    training: Training,
    generators: Sequence[torch.Generator] = (),
    progress: Progress = no_progress,
    graphs: bool = True,
    defence: MixCon | None = None,
    defence_layer: int | None = None,
) -> Trained:
    """Trained copies of R victims, on images `x` with labels `y` as `training.loss` wants them.

    `generators`, one per victim, on the CPU, draw the order of minibatches and are advanced.
    `graphs`: CUDA graphs, on a GPU. `defence`: on the hidden layer with that number from 1, by
    default the last. Raises ValueError for arguments that do not fit together.
    """
    check_victims(architecture, parameters, x)
    training.loss.check(y, architecture.n_outputs)
    added = feature_defence(architecture, y, defence, defence_layer, training.batch_size)
    stack = _Backpropagated(parameters, y, training, generators)
    stack.start(architecture, x, added, graphs=graphs)
    return train_stack(stack, progress, look_every=training.stop_every)


class Stack(ABC):
    """Victims that still train, by their numbers `runs`; they know nothing of each other.

    `values` are what is trained: weights and biases, or what stands for them.
    """

    def __init__(
        self,
        layout: Parameters,
        y: Shaped[Tensor, "r n"],
        training: Training,
        generators: Sequence[torch.Generator],
    ) -> None:
        self.layout, self.y, self.training = layout, y, training
        self.generators = list(generators)
        self.runs = torch.arange(len(y), device=y.device)
        self.train_copies(layout.tensors())

    def train_copies(self, values: Sequence[Tensor]) -> None:
        self.values = [v.clone(memory_format=torch.contiguous_format) for v in values]
        self.steppers = [Stepper(self.training.optimiser, value) for value in self.values]

    @abstractmethod
    def advance(self, n_epochs: int) -> None:
        """Train for that many epochs."""

    @abstractmethod
    def outputs(self) -> Float[Tensor, "k n c"]:
        """phi of all images."""

    def update(self, gradients: Sequence[Tensor]) -> None:
        """Take one step; the gradients are changed."""
        decay = self.training.weight_decay
        for value, gradient, stepper in zip(self.values, gradients, self.steppers, strict=True):
            if decay:
                gradient.add_(value, alpha=decay)
            stepper.step_(gradient)

    def weights(self) -> list[Tensor]:
        return self.values

    def averages(self) -> list[Tensor]:
        """What the optimiser remembers of the gradients of the first layer's weights (k, h, d) and
        biases (k, h); nothing where it averages none."""
        if not self.training.optimiser.averages_gradients:
            return []
        first = self.steppers[: 1 + (self.layout.biases[0] is not None)]
        return [stepper.tensors()[0] for stepper in first]

    def keep(self, rows: Int64[Tensor, " k"]) -> None:
        """Go on with these victims alone."""
        self.runs, self.y = self.runs[rows], self.y[rows]
        if self.generators:
            self.generators = [self.generators[row] for row in rows.tolist()]
        self.values = [value[rows] for value in self.values]
        self.steppers = [
            Stepper(old.optimiser, value, state=old.rows(rows))
            for old, value in zip(self.steppers, self.values, strict=True)
        ]


def train_stack(stack: Stack, progress: Progress, *, look_every: int) -> Trained:
    """Train victims until each is done, which is looked at every so many epochs and at the end."""
    training, y, layout = stack.training, stack.y, stack.layout
    loss = layout.weights[0].new_full((len(y),), torch.nan)
    margins = layout.weights[0].new_full(y.shape, torch.nan)
    epochs_done, diverged = torch.zeros_like(stack.runs), torch.zeros_like(stack.runs).bool()
    final = [torch.empty_like(t) for t in (*stack.weights(), *stack.averages())]
    epoch, report_every = 0, max(1, training.epochs // REPORTS)
    while epoch < training.epochs and len(stack.runs):
        looks, reports = ((epoch // every + 1) * every for every in (look_every, report_every))
        to = min(training.epochs, looks, reports)
        stack.advance(to - epoch)
        epoch, is_last = to, to == training.epochs
        if epoch % look_every == 0 or is_last:
            runs, phi = stack.runs, stack.outputs()
            value = training.loss.value(phi, stack.y)
            lost = ~(value.isfinite() & phi.isfinite().flatten(1).all(1))
            if training.diverged_above is not None:
                lost |= value > training.diverged_above
            loss[runs], margins[runs] = value, training.loss.margins(phi, stack.y)
            epochs_done[runs], diverged[runs] = epoch, lost
            ended = lost if training.stop_loss is None else lost | (value < training.stop_loss)
            ended = torch.ones_like(ended) if is_last else ended
            if bool(ended.any()):
                for every, own in zip(final, (*stack.weights(), *stack.averages()), strict=True):
                    every[runs[ended]] = own[ended]
                if not is_last:
                    stack.keep((~ended).nonzero().squeeze(1))
        if epoch % report_every == 0:
            progress(epoch / training.epochs)
    progress(1.0)
    n_tensors = len(layout.tensors())
    return Trained(
        parameters=layout.like(final[:n_tensors]),
        loss=loss,
        accuracy=(margins > 0).to(margins.dtype).mean(1),
        margin_min=margins.amin(1),
        margins=margins,
        epochs_done=epochs_done,
        diverged=diverged,
        averages=tuple(final[n_tensors:]),
    )


class _Backpropagated(Stack):
    """Victims that train by `Backprop`. In the span of the images (`backprop`), the values are the
    first layer's coordinates in place of its weights, and its scale at the end; `span` has W_0 and
    the images."""

    def start(
        self,
        architecture: Architecture,
        x: Float[Tensor, "r n d"],
        defence: FeatureDefence | None,
        *,
        graphs: bool,
    ) -> None:
        training, n = self.training, x.shape[1]
        self.architecture, self.defence, self.graphs = architecture, defence, graphs
        self.batch_size = min(training.batch_size or n, n)
        self.shuffled = self.batch_size < n
        if self.shuffled and len(self.generators) != len(x):
            raise ValueError(
                f"batch_size={training.batch_size} needs a generator for each of {len(x)} "
                f"victims, to shuffle their images with; got {len(self.generators)}"
            )
        conv, is_gd = architecture.network.conv, training.optimiser.rule == "gd"
        if training.span is True and conv is not None:
            raise ValueError(
                "span=True cannot be done: the first layer is a convolution, whose kernel is "
                "smaller than the images; use span=False"
            )
        self.span: tuple[Tensor, ...] = ()
        self.inputs: Inputs = (x.contiguous(),)
        if training.span is True or (
            training.span == "auto" and is_gd and conv is None and n < architecture.d
        ):
            start, wide = self.layout.weights[0], x.double()
            self.span = (start, x)
            products = (wide @ wide.mT, wide @ start.double().mT)  # summed in float64
            self.inputs = tuple(product.to(x.dtype) for product in products)
            coordinates, scale = x.new_zeros(len(x), n, start.shape[1]), x.new_ones(len(x), 1)
            self.train_copies([coordinates, *self.layout.tensors()[1:], scale])
        elif conv is not None:
            self.inputs = (architecture.patches(x.contiguous()),)
        self._build()

    def _build(self) -> None:
        self.gradients = [torch.zeros_like(value) for value in self.values]
        self.order = torch.arange(self.y.numel(), device=self.y.device).view_as(self.y)
        size, n = self.batch_size, self.y.shape[1]
        self.batches = [slice(first, min(first + size, n)) for first in range(0, n, size)]
        self.passes = {batch.stop - batch.start: self._pass(batch) for batch in self.batches}
        self.repeat = repeated(self._epoch, self.y.device, graphs=self.graphs)

    def _pass(self, batch: slice) -> tuple[Backprop, Inputs, Tensor]:
        n, n_weights = batch.stop - batch.start, len(self.layout.tensors())
        parameters = self.layout.like(self.values[:n_weights])
        gradients = self.layout.like(self.gradients[:n_weights])
        first: Dense | Convolution | SpanLayer
        if self.span:
            first = SpanLayer(parameters, gradients, self.values[-1])
        elif self.architecture.network.conv is None:
            first = Dense(parameters, gradients, 0)
        else:
            first = Convolution(parameters, gradients)
        backprop = Backprop(
            self.architecture, first, parameters, gradients, n, defence=self.defence
        )
        if not self.shuffled:
            return backprop, self.inputs, self.y
        buffers = [t.new_empty(len(t), n, *t.shape[2:]) for t in (*self.inputs, self.y)]
        return backprop, tuple(buffers[:-1]), buffers[-1]

    def advance(self, n_epochs: int) -> None:
        if not self.shuffled:
            self.repeat(n_epochs)
            return
        n = self.y.shape[1]
        for _ in range(n_epochs):
            order = torch.stack([torch.randperm(n, generator=g) for g in self.generators])
            self.order.copy_(order + n * torch.arange(len(order)).unsqueeze(1))
            self.repeat(1)

    def _epoch(self) -> None:
        """Once through the images, an update after every batch."""
        for batch in self.batches:
            backprop, inputs, y = self.passes[batch.stop - batch.start]
            images = None
            if self.shuffled:
                images = self.order[:, batch].flatten()
                sources = (*self.inputs, self.y)
                for source, target in zip(sources, (*inputs, y), strict=True):
                    torch.index_select(source.flatten(0, 1), 0, images, out=target.flatten(0, 1))
            phi = backprop.forward(inputs)
            backprop.backward(inputs, self.training.loss.gradient(phi, y), images)
            if self.span:
                self.gradients[-1].zero_()
            self.update(self.gradients)

    def outputs(self) -> Float[Tensor, "k n c"]:
        outputs = []
        for batch in self.batches:
            inputs = tuple(tensor[:, batch] for tensor in self.inputs)
            outputs.append(self.passes[batch.stop - batch.start][0].forward(inputs).clone())
        return torch.cat(outputs, 1)

    def weights(self) -> list[Tensor]:
        if not self.span:
            return self.values
        coordinates, *others, scale = self.values
        return [self._first_layer(coordinates, scale), *others]

    def averages(self) -> list[Tensor]:
        kept = super().averages()
        if kept and self.span:
            kept[0] = self._first_layer(kept[0], self.steppers[-1].tensors()[0])
        return kept

    def _first_layer(self, coordinates: Tensor, scale: Tensor) -> Float[Tensor, "k h d"]:
        start, x = self.span
        return torch.baddbmm(start * scale.unsqueeze(2), coordinates.mT, x)

    def keep(self, rows: Int64[Tensor, " k"]) -> None:
        super().keep(rows)
        self.inputs, self.span = (tuple(t[rows] for t in some) for some in (self.inputs, self.span))
        self.defence = self.defence and self.defence.of_runs(rows)
        self._build()


def first_gradient(
    architecture: Architecture,
    parameters: Parameters,
    x: Float[Tensor, "r n d"],
    y: Shaped[Tensor, "r n"],
    loss: Loss,
) -> Parameters:
    """Gradients of the loss of all images in the first layer alone, of R networks."""
    passed = architecture.forward(parameters, x)
    flow = loss.gradient(passed.output, y)
    whole = architecture.backward(parameters, passed, flow)
    return Parameters(whole.weights[:1], whole.biases[:1])


def check_victims(
    architecture: Architecture, parameters: Parameters, x: Float[Tensor, "r n d"]
) -> None:
    """Raises ValueError for images that are not as many victims' or not of their inputs, and for
    tensors of several kinds."""
    if parameters.n_runs != len(x) or x.shape[2] != architecture.d:
        raise ValueError(
            f"{parameters.n_runs} victims of {architecture.d} inputs came with images of shape "
            f"{tuple(x.shape)}; expected (victims, images, inputs)"
        )
    kinds = {(tensor.dtype, tensor.device) for tensor in (*parameters.tensors(), x)}
    if len(kinds) > 1:
        raise ValueError(
            f"weights and images are {sorted(map(str, kinds))}; make them all the same"
        )
