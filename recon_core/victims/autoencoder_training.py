"""Training of R autoencoders at once to lower and lower losses, each kept where it passes a level.

    min over theta of 1/(n d) sum_i ||f(x_i) - x_i||^2

by Adam (autoencoder paper, appendix C, which names levels of the loss but no optimiser). The rate
is held for a share of the epochs and then falls exponentially: at a constant rate Adam's own steps
keep the loss above the last levels. The loss is summed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from recon_core.cuda_graphs import BatchSteps
from recon_core.optimisers import Optimiser, Stepper
from recon_core.strict import Count, Strict, Within
from recon_core.types import Progress, no_progress
from recon_core.victims.autoencoder import Model, Weights

LEVELS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
ROWS_AT_ONCE = 1024

Shuffle = Callable[[int, int], Int64[Tensor, " n"]]
"""`shuffle(run, epoch)`: the order of a run's images in an epoch."""


@dataclass(frozen=True, kw_only=True)
class AutoencoderTraining(Strict):
    """Settings of a training: its length, its rates, and the losses that are kept.

    The rate is `lr` for the share `hold` of the epochs, then falls exponentially to `lr_end`.
    `beta_2`: Adam's memory of squared gradients; with the usual .999 the loss of a U-Net leaps up
    when it is low. `levels`: mean squared errors, falling, looked at every `check_every` epochs; a
    victim that has reached the last one has finished. `batch_size`: None is the full batch.
    """

    epochs: Count = 50_000
    lr: float = 1e-3
    lr_end: float = 1e-6
    hold: Annotated[float, Within("[0, 1]", fix="it is a share of the epochs")] = 0.4
    beta_2: Annotated[float, Within("[0, 1)", fix="Adam's usual value is .999")] = 0.99
    batch_size: Count | None = None
    levels: tuple[float, ...] = LEVELS
    check_every: Count = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.lr) and 0 < self.lr_end <= self.lr):
            raise ValueError(
                f"lr={self.lr} must be positive and lr_end={self.lr_end} above 0 and at most lr"
            )
        falling = all(a > b for a, b in zip(self.levels, self.levels[1:], strict=False))
        if not self.levels or not falling or min(self.levels) <= 0:
            raise ValueError(
                f"levels={self.levels} must be positive losses, each below the one before, for "
                "example (1e-4, 1e-6, 1e-8)"
            )

    def rate(self, epoch: int) -> float:
        held = self.hold * self.epochs
        if epoch <= held:
            return self.lr
        fallen = (epoch - held) / (self.epochs - held)
        return float(self.lr * (self.lr_end / self.lr) ** fallen)


@dataclass(frozen=True)
class Checkpoint:
    """One network (R = 1), the loss that it was measured at, and after how many epochs."""

    weights: Weights
    loss: float
    epoch: int

    def named(self, start: str) -> dict[str, Tensor]:
        """As named tensors."""
        named = {f"{start}/weights/{name}": tensor for name, tensor in self.weights.items()}
        named[f"{start}/loss"] = torch.tensor(self.loss, dtype=torch.float64)
        return named | {f"{start}/epoch": torch.tensor(self.epoch)}

    @classmethod
    def of_named(cls, named: Mapping[str, Tensor], start: str) -> Checkpoint:
        """The inverse of `named`."""
        before = f"{start}/weights/"
        own = {n.removeprefix(before): t for n, t in named.items() if n.startswith(before)}
        return cls(own, float(named[f"{start}/loss"]), int(named[f"{start}/epoch"]))


@dataclass(frozen=True)
class Overfitted:
    """One trained autoencoder: a checkpoint per level that it reached, and where it ended.
    `diverged`: its loss was not finite at the end."""

    levels: dict[float, Checkpoint]
    last: Checkpoint
    diverged: bool


def train_autoencoders(
    model: Model,
    weights: Weights,
    x: Float[Tensor, "r n c h w"],
    *,
    training: AutoencoderTraining,
    shuffle: Shuffle | None = None,
    progress: Progress = no_progress,
    state: Mapping[str, Tensor] | None = None,
    on_state: Callable[[dict[str, Tensor]], None] | None = None,
    state_every: int = 0,
) -> list[Overfitted]:
    """Train R networks on their own images in [0, 1]; one result each, in order.

    `shuffle` gives the minibatches. With `state_every`, `on_state` gets the state every so many
    epochs, as named tensors on the CPU; passed as `state`, with the same other arguments, training
    goes on from there bit for bit. Raises ValueError for arguments
    that do not fit together.
    """
    if x.shape[2:] != model.shape:
        raise ValueError(f"images of {tuple(x.shape[2:])} for a network of {model.shape}")
    n_networks = {len(tensor) for tensor in weights.values()}
    if n_networks != {len(x)}:
        raise ValueError(f"weights of {sorted(n_networks)} networks for the images of {len(x)}")
    if training.batch_size is not None and shuffle is None:
        raise ValueError(f"batch_size={training.batch_size} needs the order of the images; give it")
    course = _Course(model, weights, x, training, shuffle)
    if state is not None:
        course.load(state)
    while course.epoch < training.epochs and len(course.running):
        if course.epoch % training.check_every == 0:
            course.check()
            progress(course.epoch / training.epochs)
            if not len(course.running):
                break
        course.step()
        if state_every and on_state is not None and course.epoch % state_every == 0:
            on_state(course.state())
    progress(1.0)
    return course.results()


class _Course:
    def __init__(
        self,
        model: Model,
        weights: Weights,
        x: Tensor,
        training: AutoencoderTraining,
        shuffle: Shuffle | None,
    ) -> None:
        self.model, self.training, self.shuffle = model, training, shuffle
        self.rule = Optimiser(rule="adam", lr=training.lr, betas=(0.9, training.beta_2))
        self.all_x = x
        self.epoch = 0
        self.saved: dict[str, Checkpoint] = {}  # levels/RUN/NUMBER, ended/RUN, diverged/RUN
        self._build(list(range(len(x))), {name: t.to(x).clone() for name, t in weights.items()}, {})

    def _build(
        self, running: list[int], weights: Weights, averages: Mapping[str, Sequence[Tensor]]
    ) -> None:
        self.running = running
        self.x = self.all_x[running]
        self.steps = BatchSteps(self._move, fixed=self.x)
        self.weights = {n: t.contiguous().requires_grad_() for n, t in weights.items()}
        self.steppers: dict[str, Stepper] = {}
        for name, tensor in self.weights.items():
            flat = tensor.detach().view(len(running), -1)
            self.steppers[name] = Stepper(self.rule, flat, state=averages.get(name))

    def step(self) -> None:
        rate = self.training.rate(self.epoch)
        for stepper in self.steppers.values():
            stepper.set_rate(rate)
        size, batches = self.training.batch_size, [self.x]
        if size is not None and self.shuffle is not None:
            order = torch.stack([self.shuffle(run, self.epoch) for run in self.running])
            rows = torch.arange(len(self.running)).unsqueeze(1)
            batches = [self.x[rows, part] for part in order.split(size, dim=1)]
        for x in batches:
            self.steps(x)
        self.epoch += 1

    def _move(self, x: Tensor) -> None:
        loss = (self.model.forward(self.weights, x) - x).square().flatten(1).mean(1).sum()
        gradients = torch.autograd.grad(loss, list(self.weights.values()))
        for stepper, gradient in zip(self.steppers.values(), gradients, strict=True):
            stepper.step_(gradient.reshape(len(self.running), -1))

    @torch.no_grad()
    def losses(self) -> Float64[Tensor, " k"]:
        total = torch.zeros(len(self.running), dtype=torch.float64, device=self.x.device)
        for x in self.x.split(ROWS_AT_ONCE, dim=1):
            error = self.model.forward(self.weights, x) - x
            total += error.double().square().flatten(1).sum(1)
        return total / self.x[0].numel()

    def check(self) -> None:
        """Keep what has passed a level; end what has passed the last, or diverged."""
        goes_on = []
        for row, (run, loss) in enumerate(zip(self.running, self.losses().tolist(), strict=True)):
            passed = [f"levels/{run}/{i}" for i, x in enumerate(self.training.levels) if loss <= x]
            passed = [where for where in passed if where not in self.saved]
            if not math.isfinite(loss):
                passed = [f"diverged/{run}"]
            elif loss <= self.training.levels[-1]:
                passed.append(f"ended/{run}")
            else:
                goes_on.append(row)
            if passed:
                self.saved |= dict.fromkeys(passed, self._checkpoint(row, loss))
        if not goes_on:
            self.running = []
        elif len(goes_on) < len(self.running):
            index = torch.tensor(goes_on, dtype=torch.int64, device=self.x.device)
            self._build(
                [self.running[row] for row in goes_on],
                {name: t.detach()[index] for name, t in self.weights.items()},
                {name: stepper.rows(index) for name, stepper in self.steppers.items()},
            )

    def _checkpoint(self, row: int, loss: float) -> Checkpoint:
        weights = {name: t.detach()[row : row + 1].clone() for name, t in self.weights.items()}
        return Checkpoint(weights, loss, self.epoch)

    def results(self) -> list[Overfitted]:
        if self.running:
            self.check()
        if self.running:
            losses = self.losses().tolist()
            for row, (run, loss) in enumerate(zip(self.running, losses, strict=True)):
                self.saved[f"ended/{run}"] = self._checkpoint(row, loss)
        results = []
        for run in range(len(self.all_x)):
            found = {
                level: self.saved[f"levels/{run}/{i}"]
                for i, level in enumerate(self.training.levels)
                if f"levels/{run}/{i}" in self.saved
            }
            lost = self.saved.get(f"diverged/{run}")
            last = self.saved[f"ended/{run}"] if lost is None else lost
            results.append(Overfitted(found, last, lost is not None))
        return results

    def state(self) -> dict[str, Tensor]:
        named = {"epoch": torch.tensor(self.epoch), "running": torch.tensor(self.running)}
        for name, tensor in self.weights.items():
            named[f"weights/{name}"] = tensor.detach()
            for i, average in enumerate(self.steppers[name].tensors()):
                named[f"averages/{i}/{name}"] = average
        for where, checkpoint in self.saved.items():
            named |= checkpoint.named(where)
        return {name: tensor.cpu().clone() for name, tensor in named.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        shapes = {f"weights/{name}": t.shape[1:] for name, t in self.weights.items()}
        for name, stepper in self.steppers.items():
            numbered = enumerate(stepper.tensors())
            shapes |= {f"averages/{i}/{name}": t.shape[1:] for i, t in numbered}
        bad = [n for n in shapes if n not in state or state[n].shape[1:] != shapes[n]]
        bad += [name for name in ("epoch", "running") if name not in state]
        if bad or int(state["running"].max()) >= len(self.all_x):
            raise ValueError(
                f"not the state of this training: {bad[:3] or 'some of its runs'} missing or of "
                "another shape; resume with the settings and the runs that it was saved with"
            )
        here = {name: t.to(self.x.device).clone() for name, t in state.items()}
        weights = {name: here[f"weights/{name}"] for name in self.weights}
        averages = {
            name: [here[f"averages/{i}/{name}"] for i in range(len(stepper.tensors()))]
            for name, stepper in self.steppers.items()
        }
        self._build(state["running"].tolist(), weights, averages)
        self.epoch = int(state["epoch"])
        places = [name.removesuffix("/loss") for name in here if name.endswith("/loss")]
        self.saved = {where: Checkpoint.of_named(here, where) for where in places}
