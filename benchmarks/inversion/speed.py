"""MixCon paper: a grid of defended victims beside one after another, and batched inversion.

    python -m benchmarks.inversion.speed [--quick] [--json FILE]

Training: the paper's grid of 8 x 7 (lambda, beta) of LeNet5, 400 images of 28x28 a step, beside a
torch.nn.Module with torch.optim.SGD and the same loss, one network after another, all threads on
each. Inversion: 100 images from the features at cut 2, with a number of steps that is the same for
all, beside the same method one image at a time. Loss: MixCon and its gradient beside the loop over
pairs of classes that eq. 1 writes. Weights are untrained and images noise: what a step costs does
not depend on them. Either side of a comparison has to give the same result, or nothing is timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.record import Measurement, batched, check_agreement, compared, main
from recon_core.attacks.inversion.feature_matching import GradientInversion
from recon_core.attacks.inversion.strong_inversion import StrongInversion
from recon_core.types import seeded_generator
from recon_core.victims.autoencoder import Shape, Weights
from recon_core.victims.separability import MixCon, mixcon
from recon_core.victims.split import LeNet5, initial_weights
from recon_core.victims.split_training import ClassBatches, SplitTraining, train_split


class PlainLeNet5(nn.Module):
    """LeNet5 in two halves, f = g(h(x)), cut after its second block; ValueError for another cut."""

    def __init__(self, network: LeNet5, shape: Shape, n_classes: int) -> None:
        super().__init__()
        if network.cut != 2:
            raise ValueError(f"{network} is not one that the reference has; cut it at 2")
        padding = 2 if shape[1:] == (28, 28) else 0
        rows, columns = (((side + 2 * padding - 4) // 2 - 4) // 2 for side in shape[1:])
        self.h = nn.Sequential(
            nn.Conv2d(shape[0], 6, 5, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.g = nn.Sequential(
            nn.Linear(16 * rows * columns, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, n_classes),
        )


class PlainMixCon:
    """MixCon paper, eq. 1, of one batch: the distances of all pairs from one product of matrices.

    In float64, which costs next to nothing here: float32 has no digits left at the paper's betas.
    """

    def __init__(self, defence: MixCon, n_classes: int) -> None:
        self.defence, self.n_classes = defence, n_classes
        self.pairs = torch.triu_indices(n_classes, n_classes, 1).unbind()

    def __call__(self, features: Tensor) -> Tensor:
        """Row i * k + c is image i of class c."""
        u = features.double()
        if self.defence.normalise:
            u = F.normalize(u, dim=1)
        u = u.unflatten(0, (-1, self.n_classes))
        gram = u @ u.mT
        norms = gram.diagonal(dim1=1, dim2=2)
        every = norms.unsqueeze(1) + norms.unsqueeze(2) - 2 * gram
        first, second = self.pairs
        dist = every[:, first, second].clamp(self.defence.eps, 1 / self.defence.eps)
        loss: Tensor = (dist + self.defence.beta / dist).mean()
        return loss.to(features.dtype)


def load(module: nn.Module, weights: Mapping[str, Tensor], network: int) -> None:
    """The tensors of one network of a stack, in the order of its layers."""
    for parameter, tensor in zip(module.parameters(), weights.values(), strict=True):
        parameter.data.copy_(tensor[network])


def plain_train(
    module: PlainLeNet5,
    batches: Sequence[Tensor],
    defence: MixCon,
    training: SplitTraining,
    *,
    channels_last: bool,
) -> None:
    """A step on each of the batches, in which row i * k + c is image i of class c."""
    if channels_last:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        batches = [x.contiguous(memory_format=torch.channels_last) for x in batches]
    optimiser = torch.optim.SGD(
        module.parameters(),
        lr=training.lr,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
    )
    last = module.g[-1]
    assert isinstance(last, nn.Linear)
    penalty = PlainMixCon(defence, last.out_features)
    for x in batches:
        labels = torch.arange(last.out_features).repeat(len(x) // last.out_features)
        features = module.h(x)
        loss = F.cross_entropy(module.g(features), labels) + defence.lam * penalty(features)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def literal_mixcon(features: Tensor, defence: MixCon) -> Tensor:
    """Eq. 1 as it is written, of one network's (p, k, m): a loop over ordered pairs of classes."""
    n_classes = features.shape[1]
    u = F.normalize(features, dim=2) if defence.normalise else features
    total = u.new_zeros(())
    for a, b in itertools.permutations(range(n_classes), 2):
        dist = (u[:, a] - u[:, b]).square().sum(1).clamp(defence.eps, 1 / defence.eps)
        total = total + (dist + defence.beta / dist).mean()
    return total / (n_classes * (n_classes - 1))


SHAPE = (1, 28, 28)
N_CLASSES = 10
PER_CLASS = 40
N_INVERTED = 100
NETWORK = LeNet5(cut=2)
GRID = [
    MixCon(lam=lam, beta=beta)
    for lam in (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0)
    for beta in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
]
"""MixCon paper, section 4.3."""
AGREEING_STEPS = 3


def images(n: int) -> Tensor:
    """Noise."""
    return torch.rand(n, *SHAPE, generator=torch.Generator().manual_seed(0))


def weights_of(n_networks: int) -> Weights:
    """Untrained networks."""
    generators = [seeded_generator(0, run, "victim") for run in range(n_networks)]
    return initial_weights(NETWORK.on(SHAPE, N_CLASSES), generators, dtype=torch.float32)


def shuffle(stream: int, epoch: int) -> torch.Generator:
    """Every network has the same images in the same order."""
    return seeded_generator(0, 1000 * stream + epoch, "shuffle")


def training(
    repeats: int, *, defences: Sequence[MixCon], n_steps: int, channels_last: bool
) -> Measurement:
    """Seconds per step of one victim; every step shuffles the images of one batch."""
    model, weights = NETWORK.on(SHAPE, N_CLASSES), weights_of(len(defences))
    x = images(N_CLASSES * PER_CLASS)
    labels = torch.arange(len(x)) % N_CLASSES

    def together(settings: SplitTraining) -> Weights:
        return train_split(
            model, weights, x, labels, defences=defences, training=settings, shuffle=shuffle
        ).weights

    def separately(settings: SplitTraining) -> list[PlainLeNet5]:
        batches = ClassBatches(
            x=x,
            labels=labels,
            n_classes=N_CLASSES,
            per_class=settings.per_class,
            shuffle=shuffle,
            streams=(0,),
        )
        steps = [x[0] for epoch in range(settings.epochs) for x in batches.of_epoch(epoch)]
        modules = []
        for network, defence in enumerate(defences):
            module = PlainLeNet5(NETWORK, SHAPE, N_CLASSES)
            load(module, weights, network)
            plain_train(module, steps, defence, settings, channels_last=channels_last)
            modules.append(module)
        return modules

    few = SplitTraining(epochs=AGREEING_STEPS, per_class=PER_CLASS)
    plain = separately(few)
    check_moves(weights, together(few), plain)
    settings = SplitTraining(epochs=n_steps, per_class=PER_CLASS)
    layout = "channels last" if channels_last else "channels first"
    return compared(
        "inversion",
        f"training step of a victim, {len(defences)} (lambda, beta) of MixCon, LeNet5, "
        f"{len(x)} images of {'x'.join(map(str, SHAPE))} a step, {n_steps} steps and one "
        f"evaluation, float32, {torch.get_num_threads()} threads",
        ours=partial(together, settings),
        reference=f"torch.nn.Module, {layout}, and torch.optim.SGD, one network after another, "
        "without the evaluation",
        theirs=partial(separately, settings),
        repeats=repeats,
        per_call=len(defences) * n_steps,
    )


def check_moves(
    start: Mapping[str, Tensor], ours: Mapping[str, Tensor], theirs: Sequence[PlainLeNet5]
) -> None:
    """Raises ValueError if a network has not moved as its counterpart: weights are compared by how
    far they came, so that a training that does nothing does not pass."""
    for network, module in enumerate(theirs):
        ends = zip(start.items(), module.parameters(), strict=True)
        plain = [(p.detach() - t[network]).flatten() for (_, t), p in ends]
        stacked = [(ours[name][network] - t[network]).flatten() for name, t in start.items()]
        check_agreement(torch.cat(stacked), torch.cat(plain), f"network {network}")


def inversion(
    method: GradientInversion | StrongInversion, repeats: int, *, one_in: int
) -> Measurement:
    """Seconds per image."""
    model, weights = NETWORK.on(SHAPE, N_CLASSES), weights_of(1)

    def h(x: Tensor) -> Tensor:
        return model.features(weights, x.unsqueeze(0))[0]

    with torch.no_grad():
        z = h(images(N_INVERTED))

    def inverted(rows: range) -> tuple[Tensor, Tensor]:
        generators = [seeded_generator(0, row, "start") for row in rows]
        found = method.invert(h, z[list(rows)], shape=SHAPE, generators=generators)
        return found.x, found.n_steps

    return batched(
        "inversion",
        lambda n_steps: (
            f"an image by {type(method).__name__}, LeNet5 at cut {NETWORK.cut}, {N_INVERTED} "
            f"images of {'x'.join(map(str, SHAPE))}, {n_steps} steps each, float32, "
            f"{torch.get_num_threads()} threads"
        ),
        inverted,
        n=N_INVERTED,
        one_in=one_in,
        n_checked=3,
        repeats=repeats,
    )


def loss(repeats: int, *, n_networks: int, n_features: int, per_call: int) -> Measurement:
    """Seconds per loss of one network, with its gradient."""
    defence = MixCon()
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(n_networks, PER_CLASS, N_CLASSES, n_features, generator=generator).relu()
    h.requires_grad_()
    beta = torch.full((n_networks,), defence.beta)

    def ours() -> tuple[Tensor, Tensor]:
        values = mixcon(h, beta, normalise=defence.normalise, eps=defence.eps)
        return values.detach(), torch.autograd.grad(values.sum(), h)[0]

    def theirs() -> tuple[Tensor, Tensor]:
        values = torch.stack([literal_mixcon(one, defence) for one in h])
        return values.detach(), torch.autograd.grad(values.sum(), h)[0]

    for one, other, what in zip(ours(), theirs(), ("losses", "gradients"), strict=True):
        check_agreement(one, other, what)
    return compared(
        "inversion",
        f"MixCon loss and gradient of a network, {n_networks} networks, {PER_CLASS} images of "
        f"{N_CLASSES} classes, {n_features} features, float32, {torch.get_num_threads()} threads",
        ours=lambda: [ours() for _ in range(per_call)],
        reference="a loop over ordered pairs of classes, vectorised over images",
        theirs=lambda: [theirs() for _ in range(per_call)],
        repeats=repeats,
        per_call=per_call * n_networks,
    )


def measure(quick: bool) -> Iterator[Measurement]:
    """Seconds per step of a victim, per inverted image and per loss."""
    repeats = 2 if quick else 5
    defences = GRID[::8] if quick else GRID
    for channels_last in (False, True):
        yield training(
            repeats, defences=defences, n_steps=2 if quick else 10, channels_last=channels_last
        )
    one_in = N_INVERTED // 2 if quick else 10
    n_steps = 5 if quick else 100
    for method in (GradientInversion(n_steps=n_steps), StrongInversion(n_steps=n_steps)):
        yield inversion(method, repeats, one_in=one_in)
    for n_networks in (1, 8):
        yield loss(repeats, n_networks=n_networks, n_features=400, per_call=1 if quick else 10)


if __name__ == "__main__":
    main(measure)
