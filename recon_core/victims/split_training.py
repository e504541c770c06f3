"""Train R split networks at once, each with its own defence or none, on class-balanced batches.

    min over theta of mean_i CE(g(h(x_i)), y_i) + lambda L(h(x_1), ..., h(x_n))   (MixCon paper,
    section 3.2)

by SGD with the same p images of every class in a batch, where L is MixCon (MixCon paper, eq. 1) or
UniCon (MixCon paper, D.1). A grid of (lambda, beta) is one stack: its networks see the same images
in the same order, so that they differ in nothing but the defence; and a network of lambda = 0 is,
bit for bit, one that has none.

Where the MixCon paper says little: an epoch is as long as its smallest class (footnote 6; see
`ClassBatches`), and cross-entropy is the mean over a batch, where eq. 2 has the sum over the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from recon_core.cuda_graphs import BatchSteps
from recon_core.optimisers import Optimiser, Stepper
from recon_core.strict import Count, Strict, Within
from recon_core.threads import side_by_side
from recon_core.types import Progress, no_progress
from recon_core.victims.autoencoder import Weights
from recon_core.victims.separability import MixCon, UniCon, mixcon, unicon
from recon_core.victims.split import (
    NETWORKS_ON_CPU,
    SplitModel,
    check_fits,
    cross_entropies,
    evaluate_split,
)

Defence = MixCon | UniCon | None
"""What is added to a network's cross-entropy; None: nothing (the MixCon paper calls it vanilla)."""


@dataclass(frozen=True, kw_only=True)
class SplitTraining(Strict):
    """SGD as in the MixCon paper, section 4.3: no momentum, no weight decay, a constant rate.
    `per_class`: images of each class in a batch. The paper's synthetic data have `lr` .1."""

    epochs: Count = 20
    lr: Annotated[float, Within("(0, inf)", fix="the MixCon paper has .01")] = 0.01
    per_class: Count = 40
    momentum: Annotated[float, Within("[0, 1)", fix="the MixCon paper has 0")] = 0.0
    weight_decay: Annotated[float, Within("[0, inf)", fix="the MixCon paper has 0")] = 0.0


@dataclass(frozen=True)
class TrainedSplit:
    """R trained networks.

    `loss` (cross-entropy alone) and `accuracy` are of `weights` on all training images. `diverged`:
    weights or loss ceased to be finite; such a network has the weights of the end of the last epoch
    before that, `epochs_done`. `losses` and `penalties`: means of cross-entropy and of the
    defence's own loss, not yet times lambda, while an epoch went on; NaN without a defence.
    """

    weights: Weights
    loss: Float64[Tensor, " r"]
    accuracy: Float64[Tensor, " r"]
    diverged: Bool[Tensor, " r"]
    epochs_done: Int64[Tensor, " r"]
    losses: Float64[Tensor, "r e"]
    penalties: Float64[Tensor, "r e"]


def train_split(
    model: SplitModel,
    weights: Mapping[str, Tensor],
    x: Float[Tensor, "n c h w"] | Float[Tensor, "r n c h w"],
    labels: Int64[Tensor, " n"] | Int64[Tensor, "r n"],
    *,
    defences: Sequence[Defence],
    training: SplitTraining,
    shuffle: Shuffle,
    streams: Sequence[int] | None = None,
    progress: Progress = no_progress,
) -> TrainedSplit:
    """Train R networks on the same images or each on its own; labels are classes from 0.

    `defences`: one per network. `streams`: whose order each network's images have, as `shuffle` is
    asked for it; None: all have that of stream 0. Networks that share images, labels and stream get
    one batch. On a CPU parts of `NETWORKS_ON_CPU` go side by side, one thread each, and are bit for
    bit what they are one after another; elsewhere all networks take a step together. Raises
    ValueError for arguments that do not fit together.
    """
    n_networks = check_fits(model, weights, x, labels)
    batches = ClassBatches(
        x=x,
        labels=labels,
        n_classes=model.n_classes,
        per_class=training.per_class,
        shuffle=shuffle,
        streams=(0,) * n_networks if streams is None else tuple(streams),
    )
    if len(defences) != n_networks:
        raise ValueError(
            f"{len(defences)} defences for {n_networks} networks; give one each, None for none"
        )
    if batches.n_networks != n_networks:
        raise ValueError(
            f"{batches.n_networks} streams for {n_networks} networks; give one each, or None"
        )
    if batches.last == 1 and any(isinstance(d, UniCon) and d.lam for d in defences):
        raise ValueError(
            f"UniCon compares images of a class, but with per_class={batches.per_class} and "
            f"{batches.smallest} images in the smallest class the last batch of an epoch has 1 of "
            "each; choose another per_class"
        )
    course = _Course(model, weights, batches, defences, training)
    while course.epoch < training.epochs and not bool(course.diverged.all()):
        course.run_epoch(progress)
    progress(1.0)
    return course.trained(labels)


Penalty = tuple[Int64[Tensor, " k"], Float[Tensor, " k"], Callable[[Tensor], Tensor]]
"""Rows of the networks that have a loss on their features, their lambdas, and the loss."""


class _Part:
    def __init__(
        self,
        networks: slice,
        weights: Mapping[str, Tensor],
        averages: Mapping[str, tuple[Tensor, ...]],
        rule: Optimiser,
        defences: Sequence[Defence],
    ) -> None:
        self.networks = networks
        # `data` has a version counter of its own: otherwise autograd would take the steps of other
        # parts, which go on at the same time, for changes of these weights.
        self.weights = {n: t[networks].data.requires_grad_() for n, t in weights.items()}
        self.steppers = [
            Stepper(
                rule,
                t.view(len(t), -1)[networks],
                state=[average[networks] for average in averages[n]],
            )
            for n, t in weights.items()
        ]
        self.penalties = _penalties(defences[networks], next(iter(weights.values())))

    def move(self, model: SplitModel, x: Tensor, sums: Tensor, weight_decay: float) -> None:
        """One step on a batch (of one network, if all share it); its losses are added to `sums`."""
        part = x if len(x) == 1 else x[self.networks]
        k = model.n_classes
        features = model.features(self.weights, part)
        logits = model.classify(self.weights, features)
        truth = torch.arange(k, device=x.device).repeat(logits.shape[1] // k)
        loss = cross_entropies(logits, truth.expand(len(logits), -1)).mean(1)
        sums[0, self.networks] += loss.detach() * part.shape[1]
        total = loss.sum()
        for rows, lam, penalty in self.penalties:
            h = features.unflatten(1, (-1, k))
            if len(rows) < len(h):  # the others are not in the graph of its gradient
                h = h.index_select(0, rows)
            values = penalty(h)  # not yet times lambda
            total = total + (lam * values).sum()
            sums[1, self.networks].index_add_(0, rows, values.detach().double() * part.shape[1])
        gradients = torch.autograd.grad(total, list(self.weights.values()))
        for stepper, weight, g in zip(self.steppers, self.weights.values(), gradients, strict=True):
            decayed = g.add(weight.detach(), alpha=weight_decay) if weight_decay else g
            stepper.step_(decayed.reshape(len(decayed), -1))


class _Course:
    def __init__(
        self,
        model: SplitModel,
        weights: Mapping[str, Tensor],
        batches: ClassBatches,
        defences: Sequence[Defence],
        training: SplitTraining,
    ) -> None:
        self.model, self.batches, self.training = model, batches, training
        self.epoch = 0
        x, n = batches.x, batches.n_networks
        self.weights = {name: t.to(x).clone().contiguous() for name, t in weights.items()}
        self.kept = {name: t.clone() for name, t in self.weights.items()}
        rule = Optimiser(rule="gd", lr=training.lr, momentum=training.momentum)
        averages = {name: rule.state(t.flatten(1)) for name, t in self.weights.items()}
        self.diverged = torch.zeros(n, dtype=torch.bool, device=x.device)
        self.epochs_done = torch.zeros(n, dtype=torch.int64, device=x.device)
        self.sums = torch.zeros(2, n, dtype=torch.float64, device=x.device)
        self.history = torch.full((training.epochs, 2, n), torch.nan).to(self.sums)
        undefended = [defence is None or not defence.lam for defence in defences]
        self.undefended = torch.tensor(undefended, device=x.device)
        at_once = NETWORKS_ON_CPU if x.device.type == "cpu" else n
        self.parts = [
            _Part(slice(start, start + at_once), self.weights, averages, rule, defences)
            for start in range(0, n, at_once)
        ]
        self.steps = BatchSteps(self._move)

    def run_epoch(self, progress: Progress) -> None:
        self.sums.zero_()
        n_batches = self.batches.n_batches
        for i, x in enumerate(self.batches.of_epoch(self.epoch)):
            progress((self.epoch + i / n_batches) / self.training.epochs)
            self.steps(x)
        self.history[self.epoch] = self.sums / (self.batches.smallest * self.model.n_classes)
        self.history[self.epoch, 1, self.undefended] = torch.nan
        self.epoch += 1
        self.diverged |= ~self.sums[0].isfinite()
        for tensor in self.weights.values():
            self.diverged |= ~tensor.flatten(1).isfinite().all(1)
        for name, tensor in self.weights.items():
            lost = self.diverged.view(-1, *[1] * (tensor.dim() - 1))
            self.kept[name] = torch.where(lost, self.kept[name], tensor)
        self.epochs_done += ~self.diverged

    def _move(self, x: Tensor) -> None:
        decay = self.training.weight_decay
        side_by_side(
            [partial(part.move, self.model, x, self.sums, decay) for part in self.parts], x.device
        )

    def trained(self, labels: Tensor) -> TrainedSplit:
        found = evaluate_split(self.model, self.kept, self.batches.x, labels)
        losses, penalties = self.history[: self.epoch].permute(1, 2, 0)
        return TrainedSplit(
            weights=self.kept,
            loss=found.loss,
            accuracy=found.accuracy,
            diverged=self.diverged,
            epochs_done=self.epochs_done,
            losses=losses,
            penalties=penalties,
        )


def _penalties(defences: Sequence[Defence], like: Tensor) -> list[Penalty]:
    """One for the networks that differ in lambda and beta alone; none for lambda = 0."""
    groups: dict[tuple[str, bool, float], dict[int, MixCon | UniCon]] = {}
    for row, defence in enumerate(defences):
        if defence is not None and defence.lam:
            eps = defence.eps if isinstance(defence, MixCon) else 0.0
            groups.setdefault((defence.kind, defence.normalise, eps), {})[row] = defence
    penalties: list[Penalty] = []
    for (_kind, normalise, eps), members in groups.items():
        rows = torch.tensor(list(members), device=like.device)
        lam = torch.tensor([d.lam for d in members.values()], dtype=torch.float64).to(like)
        loss = partial(unicon, normalise=normalise)
        betas = [d.beta for d in members.values() if isinstance(d, MixCon)]
        if betas:
            beta = torch.tensor(betas, dtype=torch.float64).to(like)
            loss = partial(mixcon, beta=beta, normalise=normalise, eps=eps)
        penalties.append((rows, lam, loss))
    return penalties


Shuffle = Callable[[int, int], torch.Generator]
"""`shuffle(stream, epoch)`: the CPU generator that an epoch's orders are drawn from, class after
class. It must give the same numbers whenever it is asked for the same."""


@dataclass(frozen=True, kw_only=True)
class ClassBatches:
    """Class-balanced batches (r, p * k, c, h, w), where row i * k + c is image i of class c; r = 1
    if all networks see the same images in the same order.

    An epoch shuffles every class on its own and takes as many images of each as the smallest class
    has, `per_class` at a time; the last batch may be smaller. `x` and `labels` are of all networks,
    or have a leading dimension of networks; `streams` says whose order each network's images have.
    """

    x: Float[Tensor, "n c h w"] | Float[Tensor, "r n c h w"]
    labels: Int64[Tensor, " n"] | Int64[Tensor, "r n"]
    n_classes: int
    per_class: int
    shuffle: Shuffle
    streams: Sequence[int]

    def __post_init__(self) -> None:
        for row, members in enumerate(self.members):
            sizes = [len(images) for images in members]
            c, size = min(enumerate(sizes), key=lambda pair: pair[1])
            if size < self.per_class:
                raise ValueError(
                    f"class {c} has {size} images, a batch {self.per_class} of each of the "
                    f"{self.n_classes} classes; give more images of it, or a smaller per_class"
                )
            if size != self.smallest:
                raise ValueError(
                    f"the smallest class of network {row} has {size} images, that of network 0 "
                    f"{self.smallest}; train them one after the other"
                )

    @cached_property
    def members(self) -> list[list[Tensor]]:
        labels = self.labels.cpu() if self.labels.dim() == 2 else self.labels.cpu().unsqueeze(0)
        return [[(row == c).nonzero()[:, 0] for c in range(self.n_classes)] for row in labels]

    @property
    def smallest(self) -> int:
        """Images of the smallest class."""
        return min(len(images) for images in self.members[0])

    @property
    def n_networks(self) -> int:
        return len(self.streams)

    @property
    def n_batches(self) -> int:
        return -(-self.smallest // self.per_class)

    @property
    def last(self) -> int:
        """Images of each class in the last batch of an epoch."""
        return self.smallest - self.per_class * (self.n_batches - 1)

    def of_epoch(self, epoch: int) -> Iterator[Tensor]:
        keys = list(zip(self.streams, range(self.n_networks), strict=True))
        if len(self.members) == 1:
            keys = [(stream, 0) for stream in self.streams]
        orders = {}
        for stream, row in dict.fromkeys(keys):
            generator = self.shuffle(stream, epoch)
            drawn = [
                images[torch.randperm(len(images), generator=generator)]
                for images in self.members[row]
            ]
            chosen = [images[: self.smallest] for images in drawn]
            orders[stream, row] = torch.stack(chosen, dim=1)
        if len(orders) == 1:
            keys = keys[:1]
        order = torch.stack([orders[key] for key in keys]).to(self.x.device)
        networks = torch.arange(self.n_networks, device=self.x.device).unsqueeze(1)
        for part in order.split(self.per_class, dim=1):
            images = part.flatten(1)
            rows = images if self.x.dim() == 4 else (networks, images)
            yield self.x[rows]
