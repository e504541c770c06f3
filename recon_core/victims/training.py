"""Training of R victims at once, on R different sets of images, each until it is done.

Image restoration paper, section 2: full batch, Adadelta with rate 1, 50,000 epochs. Haim et al.
2022 and the KKT paper: gradient descent, rate .01 (.5 with classes), 1e6 epochs, which `Span` makes
several times cheaper. Weight decay adds weight_decay * theta to the gradient of the *mean* loss, as
torch does; the lambda_WD of KKT paper, eq. 13, is n times ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from recon_core.cuda_graphs import repeated
from recon_core.optimisers import Optimiser
from recon_core.strict import Count, Strict, Within
from recon_core.types import Progress, no_progress
from recon_core.victims.backprop import Inputs, Span, SpanSwitch, uses_span
from recon_core.victims.losses import Loss
from recon_core.victims.network import Architecture, Parameters
from recon_core.victims.separability import MixCon, feature_defence
from recon_core.victims.stack import Problem, Stack

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
    generators: Sequence[torch.Generator] | None = None,
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
    in_span = uses_span(training.span, architecture, training.optimiser, x.shape[1])
    span = Span(parameters.weights[0], x) if in_span else None
    inputs: Inputs = (x.contiguous(),)
    if span is not None:
        inputs = span.inputs()
    elif architecture.network.conv is not None:
        inputs = (architecture.patches(x.contiguous()),)
    problem = Problem(
        architecture=architecture,
        layout=parameters,
        inputs=inputs,
        y=y,
        span=span,
        loss=training.loss,
        optimiser=training.optimiser,
        weight_decay=training.weight_decay,
        batch_size=min(training.batch_size or x.shape[1], x.shape[1]),
        defence=feature_defence(architecture, y, defence, defence_layer, training.batch_size),
    )
    course = _Course(problem, x, training, generators or (), graphs=graphs)
    report_every = max(1, training.epochs // REPORTS)
    while course.epoch < training.epochs and len(course.stack.runs):
        next_look, next_report = (
            (course.epoch // every + 1) * every for every in (training.stop_every, report_every)
        )
        course.advance(min(training.epochs, next_look, next_report))
        if course.epoch % training.stop_every == 0 or course.epoch == training.epochs:
            course.look()
        if course.epoch % report_every == 0:
            progress(course.epoch / training.epochs)
    progress(1.0)
    return course.trained()


class Looks:
    """Loss and margins of every victim when it was last looked at, and whether it diverged."""

    def __init__(self, training: Training, x: Float[Tensor, "r n d"]) -> None:
        self.training = training
        self.loss = x.new_full((len(x),), torch.nan)
        self.margins = x.new_full(x.shape[:2], torch.nan)
        self.epochs_done = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        self.diverged = torch.zeros(len(x), dtype=torch.bool, device=x.device)

    def at(
        self,
        runs: Int64[Tensor, " k"],
        phi: Float[Tensor, "k n c"],
        y: Shaped[Tensor, "k n"],
        epoch: int,
    ) -> Bool[Tensor, " k"]:
        """Notes the outputs of these victims after an epoch; those that are done."""
        training = self.training
        loss = training.loss.value(phi, y)
        diverged = ~(loss.isfinite() & phi.isfinite().flatten(1).all(1))
        if training.diverged_above is not None:
            diverged |= loss > training.diverged_above
        self.loss[runs], self.margins[runs] = loss, training.loss.margins(phi, y)
        self.epochs_done[runs], self.diverged[runs] = epoch, diverged
        return diverged if training.stop_loss is None else diverged | (loss < training.stop_loss)

    def trained(self, parameters: Parameters, averages: tuple[Tensor, ...]) -> Trained:
        return Trained(
            parameters=parameters,
            loss=self.loss,
            accuracy=(self.margins > 0).to(self.margins.dtype).mean(1),
            margin_min=self.margins.amin(1),
            margins=self.margins,
            epochs_done=self.epochs_done,
            diverged=self.diverged,
            averages=averages,
        )


class _Course:
    def __init__(
        self,
        problem: Problem,
        x: Float[Tensor, "r n d"],
        training: Training,
        generators: Sequence[torch.Generator],
        *,
        graphs: bool,
    ) -> None:
        self.problem, self.training, self.graphs = problem, training, graphs
        if problem.shuffled and len(generators) != len(x):
            raise ValueError(
                f"batch_size={training.batch_size} needs a generator for each of {len(x)} "
                f"victims, to shuffle their images with; got {len(generators)}"
            )
        self.generators, self.epoch, self.looks = generators, 0, Looks(training, x)
        self.ended: dict[int, tuple[Tensor, ...]] = {}
        everyone = torch.arange(len(x), device=x.device)
        self._go_on(Stack(problem, everyone, problem.start(problem.layout), None))

    def _go_on(self, stack: Stack) -> None:
        self.stack = stack
        self.repeat = repeated(stack.epoch, stack.y.device, graphs=self.graphs)

    def advance(self, to: int) -> None:
        if self.problem.shuffled:
            running = [self.generators[run] for run in self.stack.runs.tolist()]
            for _ in range(self.epoch, to):
                self.stack.shuffle(running)
                self.repeat(1)
        else:
            self.repeat(to - self.epoch)
        self.epoch = to

    def look(self) -> None:
        stack = self.stack
        ended = self.looks.at(stack.runs, stack.outputs(), stack.y, self.epoch)
        if bool(ended.any()):
            for place in ended.nonzero().squeeze(1).tolist():
                own = (*stack.values, *stack.averages())
                self.ended[int(stack.runs[place])] = tuple(v[place].clone() for v in own)
            self._go_on(stack.without(ended))

    def trained(self) -> Trained:
        values = []
        for i, running in enumerate((*self.stack.values, *self.stack.averages())):
            value = running.new_empty(len(self.looks.loss), *running.shape[1:])
            value[self.stack.runs] = running
            for run, ended in self.ended.items():
                value[run] = ended[i]
            values.append(value)
        n_values = len(self.stack.values)
        parameters = self.problem.parameters(values[:n_values])
        return self.looks.trained(parameters, tuple(values[n_values:]))


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
