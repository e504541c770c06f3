"""Train R victims at once, on R different sets of images, each until it is done.

The victims share nothing but the launch of their kernels: every product is a batched one. A victim
ends after `epochs`, when its loss is low enough, or when it has diverged; the stack is then rebuilt
without it, so that it costs nothing from there on.

Image restoration paper, section 2: full batch, Adadelta with rate 1, 50,000 epochs. Haim et al.
2022 and the KKT paper: gradient descent, rate .01 (.5 with classes), 1e6 epochs, which `span` makes
several times cheaper; the KKT paper trains its largest model on minibatches. Weight decay adds
weight_decay * theta to the gradient of the *mean* loss, as torch does; KKT paper, eq. 13, has it
beside the *sum*, so that its lambda_WD is n times ours. A defence adds lam L of a hidden layer's
features to the mean loss (`feature_defence`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from recon_core.cuda_graphs import repeated
from recon_core.optimisers import Optimiser
from recon_core.types import Progress, no_progress
from recon_core.victims.feature_defence import Defence, FeatureDefence, feature_defence
from recon_core.victims.losses import Loss
from recon_core.victims.network import Architecture, Parameters
from recon_core.victims.span import Span, SpanSwitch, uses_span
from recon_core.victims.stack import Problem, Stack, inputs_of
from recon_core.victims.training_state import TrainingState

REPORTS = 50
"""How often `train` reports its progress."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Length and rule of a training. Defaults: the image restoration paper, section 2.

    `batch_size`: None is the full batch; otherwise the images are shuffled every epoch, and the
    last batch may be smaller. `stop_loss`: a victim whose training loss is below it has finished;
    `diverged_above`: one whose loss is above it has failed, as has any that is not finite. Both are
    looked at every `stop_every` epochs. `span`: train a dense first layer in the span of the
    images, exactly the same with fewer operations; "auto" does so where that is cheaper.
    """

    epochs: int = 50_000
    optimiser: Optimiser = field(default_factory=Optimiser)
    loss: Loss = field(default_factory=Loss)
    batch_size: int | None = None
    weight_decay: float = 0.0
    stop_loss: float | None = None
    stop_every: int = 100
    diverged_above: float | None = None
    span: SpanSwitch = False
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        for name in ("epochs", "stop_every", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ValueError(f"weight_decay={self.weight_decay} must be 0 or more; 002 uses 1e-3")
        for name in ("stop_loss", "diverged_above"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value} must be a positive number, or None")
        if self.span is True and self.optimiser.rule != "gd":
            raise ValueError(
                f"span=True with optimiser.rule={self.optimiser.rule!r}, which moves every weight "
                "at its own rate; use rule='gd', or span=False"
            )


@dataclass(frozen=True)
class Trained:
    """R trained victims and how they ended. `margins` are y phi(x), or phi_y - max of the others.

    `loss` is that of the outputs alone, whatever a defence has added to it. `diverged`: it was not
    finite or above the limit. Such a victim keeps its last weights.
    """

    parameters: Parameters
    loss: Float[Tensor, " r"]
    accuracy: Float[Tensor, " r"]
    margin_min: Float[Tensor, " r"]
    margins: Float[Tensor, "r n"]
    epochs_done: Int64[Tensor, " r"]
    diverged: Bool[Tensor, " r"]

    def tensors(self) -> dict[str, Tensor]:
        """As named tensors on the CPU, which safetensors can hold."""
        named = {f"parameters.{i}": t for i, t in enumerate(self.parameters.tensors())}
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
        return cls(parameters=parameters, **moved)


def train(
    architecture: Architecture,
    parameters: Parameters,
    x: Float[Tensor, "r n d"],
    y: Shaped[Tensor, "r n"],
    *,
    training: Training,
    generators: Sequence[torch.Generator] | None = None,
    progress: Progress = no_progress,
    state: TrainingState | None = None,
    on_state: Callable[[TrainingState], None] | None = None,
    state_every: int = 0,
    graphs: bool = True,
    fused: bool = False,
    defence: Defence | None = None,
    defence_layer: int | None = None,
) -> Trained:
    """Trained copies of R victims, on images `x` with labels `y` as `training.loss` wants them.

    `generators`, one per victim, on the CPU, draw the order of minibatches and are advanced. With
    `state_every`, `on_state` gets the state every so many epochs; passed as `state`, with the same
    other arguments, training goes on from there and ends bit for bit as if it had never stopped
    (`parameters` and `generators` then only say what there is). A larger `training.epochs` prolongs
    it. `graphs`: CUDA graphs, on a GPU. `fused`: see `Optimiser.stepper`. `defence`: on the hidden
    layer with that number from 1, by default the last; lam = 0 is, bit for bit, none. Raises
    ValueError for arguments that do not fit together.
    """
    _check(architecture, parameters, x, y, training)
    guard = feature_defence(architecture, y, defence, defence_layer, training.batch_size)
    course = _Course(
        architecture, parameters, x, y, training, graphs=graphs, fused=fused, defence=guard
    )
    course.start(generators) if state is None else course.resume(state)
    report_every = max(1, training.epochs // REPORTS)
    while course.epoch < training.epochs and len(course.stack.runs):
        events = [training.epochs]
        for every in (training.stop_every, report_every, state_every):
            if every:
                events.append((course.epoch // every + 1) * every)
        course.advance(min(events))
        if course.epoch % training.stop_every == 0 or course.epoch == training.epochs:
            course.look()
        if course.epoch % report_every == 0:
            progress(course.epoch / training.epochs)
        if state_every and on_state is not None and course.epoch % state_every == 0:
            on_state(course.state())
    progress(1.0)
    return course.trained()


class _Course:
    """A training under way: the stack of the running victims, and how all of them stand."""

    def __init__(
        self,
        architecture: Architecture,
        parameters: Parameters,
        x: Float[Tensor, "r n d"],
        y: Shaped[Tensor, "r n"],
        training: Training,
        *,
        graphs: bool,
        fused: bool,
        defence: FeatureDefence | None,
    ) -> None:
        self.architecture, self.layout, self.x, self.y = architecture, parameters, x, y
        self.training, self.graphs, self.fused = training, graphs, fused
        self.defence = defence

    def start(self, generators: Sequence[torch.Generator] | None) -> None:
        """Start from the weights as they are."""
        self.problem = self._problem(self.layout.weights[0])
        n_runs, n_generators = len(self.x), len(generators or ())
        if self.problem.shuffled and n_generators != n_runs:
            raise ValueError(
                f"batch_size={self.training.batch_size} needs a generator for each of {n_runs} "
                f"victims, to shuffle their images with; got {n_generators}"
            )
        self.generators = list(generators or ()) if self.problem.shuffled else []
        self.epoch = 0
        self.loss = self.x.new_full((n_runs,), torch.nan)
        self.margins = self.x.new_full(self.x.shape[:2], torch.nan)
        self.epochs_done = torch.zeros(n_runs, dtype=torch.int64, device=self.x.device)
        self.diverged = torch.zeros(n_runs, dtype=torch.bool, device=self.x.device)
        self.ended: dict[int, tuple[Tensor, ...]] = {}
        everyone = torch.arange(n_runs, device=self.x.device)
        self._go_on(Stack(self.problem, everyone, self.problem.start(self.layout), None))

    def resume(self, state: TrainingState) -> None:
        """Go on from a state."""
        start = self.layout.weights[0] if state.span_start is None else state.span_start
        self.problem = self._problem(start)
        state.check_fits(self.problem.start(self.layout), self.y, self.problem.shuffled)
        self.generators = state.restored_generators()
        self.epoch = state.epoch
        self.loss, self.margins = state.loss.clone(), state.margins.clone()
        self.epochs_done, self.diverged = state.epochs_done.clone(), state.diverged.clone()
        ended = set(range(len(self.x))) - set(state.running.tolist())
        self.ended = {run: tuple(value[run] for value in state.values) for run in ended}
        values = [value[state.running] for value in state.values]
        self._go_on(Stack(self.problem, state.running, values, state.averages))

    def _problem(self, first_weights: Tensor) -> Problem:
        """What does not change during training; the first layer's weights are those before it."""
        training, n = self.training, self.x.shape[1]
        in_span = uses_span(training.span, self.architecture, training.optimiser, n)
        span = Span(first_weights, self.x) if in_span else None
        return Problem(
            architecture=self.architecture,
            layout=self.layout,
            inputs=inputs_of(self.architecture, self.x, span),
            y=self.y,
            span=span,
            loss=training.loss,
            optimiser=training.optimiser,
            weight_decay=training.weight_decay,
            batch_size=min(training.batch_size or n, n),
            fused=self.fused,
            defence=self.defence,
        )

    def _go_on(self, stack: Stack) -> None:
        self.stack = stack
        self.repeat = repeated(stack.epoch, self.x.device, graphs=self.graphs)

    def advance(self, to: int) -> None:
        """Epochs until `to` are done."""
        if self.problem.shuffled:
            running = [self.generators[run] for run in self.stack.runs.tolist()]
            for _ in range(self.epoch, to):
                self.stack.shuffle(running)
                self.repeat(1)
        else:
            self.repeat(to - self.epoch)
        self.epoch = to

    def look(self) -> None:
        """Note how the running victims stand, and go on without those that have ended."""
        stack, limit = self.stack, self.training.diverged_above
        phi = stack.outputs()
        loss = self.training.loss.value(phi, stack.y)
        diverged = ~(loss.isfinite() & phi.isfinite().flatten(1).all(1))
        if limit is not None:
            diverged |= loss > limit
        self.loss[stack.runs] = loss
        self.margins[stack.runs] = self.training.loss.margins(phi, stack.y)
        self.epochs_done[stack.runs] = self.epoch
        self.diverged[stack.runs] = diverged
        ended = diverged
        if self.training.stop_loss is not None:
            ended = ended | (loss < self.training.stop_loss)
        if bool(ended.any()):
            for place in ended.nonzero().squeeze(1).tolist():
                self.ended[int(stack.runs[place])] = tuple(v[place].clone() for v in stack.values)
            self._go_on(stack.without(ended))

    def _values(self) -> tuple[Tensor, ...]:
        """Of all victims, wherever they are; a copy."""
        every = []
        for i, running in enumerate(self.stack.values):
            value = running.new_empty(len(self.x), *running.shape[1:])
            value[self.stack.runs] = running
            for run, values in self.ended.items():
                value[run] = values[i]
            every.append(value)
        return tuple(every)

    def state(self) -> TrainingState:
        """A copy of everything."""
        n_runs = len(self.x)
        states = [generator.get_state() for generator in self.generators]
        span = self.problem.span
        return TrainingState(
            epoch=self.epoch,
            running=self.stack.runs.clone(),
            values=self._values(),
            averages=self.stack.averages(),
            loss=self.loss.clone(),
            margins=self.margins.clone(),
            epochs_done=self.epochs_done.clone(),
            diverged=self.diverged.clone(),
            generators=torch.stack(states) if states else torch.empty(n_runs, 0, dtype=torch.uint8),
            span_start=None if span is None else span.weight.clone(),
        )

    def trained(self) -> Trained:
        return Trained(
            parameters=self.problem.parameters(self._values()),
            loss=self.loss,
            accuracy=(self.margins > 0).to(self.margins.dtype).mean(1),
            margin_min=self.margins.amin(1),
            margins=self.margins,
            epochs_done=self.epochs_done,
            diverged=self.diverged,
        )


def _check(
    architecture: Architecture,
    parameters: Parameters,
    x: Float[Tensor, "r n d"],
    y: Shaped[Tensor, "r n"],
    training: Training,
) -> None:
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
    training.loss.check(y, architecture.n_outputs)
