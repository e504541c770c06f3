"""The kkt engine against plain implementations: one attack step, one training epoch.

The references are written from the paper, in the way it suggests itself: a network per run, ReLU
with a replaced derivative as an autograd Function, the objective differentiated twice, and
`torch.optim.Adadelta`. Both sides use the same threads, dtype and starting point, and have to
agree before they are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.record import Measurement, compared, main
from recon_core.attacks.kkt_objective import KKTAttack, candidate_labels, objective_and_gradients
from recon_core.optimisers import Optimiser
from recon_core.types import seeded_generator
from recon_core.victims.mlp import MLP, Weights
from recon_core.victims.training import Training, train_binary

D = 3072
AGREEMENT = 1e-3


@dataclass(frozen=True, kw_only=True)
class Case:
    """R victims D-width-width-1 trained on n images and attacked with m candidates each."""

    width: int
    n_runs: int
    n_images: int
    n_candidates: int

    def __str__(self) -> str:
        runs = f"{self.n_runs} runs" if self.n_runs > 1 else "1 run"
        return f"{D}-{self.width}-{self.width}-1, {runs}"


PAPER = Case(width=1000, n_runs=1, n_images=300, n_candidates=400)
SMALL = Case(width=200, n_runs=16, n_images=20, n_candidates=40)


class SurrogateReLU(torch.autograd.Function):
    """ReLU forwards, sigma(alpha z) backwards (Haim et al. 2022)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, alpha: float) -> Tensor:
        ctx.save_for_backward(z)
        ctx.alpha = alpha
        return torch.relu(z)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (z,) = ctx.saved_tensors
        return grad_outputs[0] * torch.sigmoid(ctx.alpha * z), None


class PlainAttack:
    """One run: double backpropagation through the definition of the objective."""

    def __init__(self, theta: list[Tensor], x: Tensor, lam: Tensor, attack: KKTAttack) -> None:
        self.theta = [w.clone().requires_grad_() for w in theta]
        self.x, self.lam = x.clone().requires_grad_(), lam.clone().requires_grad_()
        self.y = candidate_labels(len(lam), lam)
        self.attack = attack
        self.optimiser = torch.optim.Adadelta([self.x, self.lam], lr=1.0)

    def step(self) -> Tensor:
        """One iteration; returns the loss before it."""
        self.optimiser.zero_grad()
        a = self.x
        for w in self.theta[:-1]:
            a = SurrogateReLU.apply(a @ w.T, self.attack.alpha)  # type: ignore[no-untyped-call]
        phi = (a @ self.theta[-1].T).squeeze(-1)
        weighted = (self.lam * self.y * phi).sum() * self.attack.c_per_lam
        sums = torch.autograd.grad(weighted, self.theta, create_graph=True)
        loss = torch.stack(
            [(w.detach() - g).square().sum() for w, g in zip(self.theta, sums, strict=True)]
        ).sum()
        loss = loss + (self.x - 1).relu().square().sum() + (-1 - self.x).relu().square().sum()
        loss = loss + 5 * (self.attack.lam_min - self.lam).relu().square().sum()
        self.x.grad, self.lam.grad = torch.autograd.grad(loss, (self.x, self.lam))
        self.optimiser.step()
        return loss.detach()


class StackedAttack:
    """R runs at once: the core's closed-form gradients and in-place Adadelta."""

    def __init__(self, weights: Weights, x: Tensor, lam: Tensor, attack: KKTAttack) -> None:
        self.weights, self.x, self.lam, self.attack = weights, x.clone(), lam.clone(), attack
        self.theta_square = torch.stack([w.square().sum((-1, -2)) for w in weights]).sum(0)
        self.rule = attack.optimiser
        self.state_x, self.state_lam = self.rule.state(self.x), self.rule.state(self.lam)

    def step(self) -> Tensor:
        """One iteration of every run; returns their losses before it."""
        loss, gradient_x, gradient_lam = objective_and_gradients(
            self.weights, self.x, self.lam, attack=self.attack, theta_square=self.theta_square
        )
        self.rule.step_(self.x, gradient_x, self.state_x)
        self.rule.step_(self.lam, gradient_lam, self.state_lam)
        return loss


def attack_step(case: Case, repeats: int) -> Measurement:
    """One iteration of all runs of a case."""
    generator = torch.Generator().manual_seed(0)
    attack = KKTAttack(n_candidates=case.n_candidates)
    weights = victims(case, init_std_first=0.02)
    x = torch.randn(case.n_runs, case.n_candidates, D, generator=generator) * 0.05
    lam = torch.rand(case.n_runs, case.n_candidates, generator=generator)
    stacked = StackedAttack(weights, x, lam, attack)
    plain = [
        PlainAttack([w[run] for w in weights], x[run], lam[run], attack)
        for run in range(case.n_runs)
    ]
    for _ in range(3):
        check_agreement(stacked.step(), torch.stack([run.step() for run in plain]))
    return compared(
        "kkt",
        f"attack step, {case}, {case.n_candidates} candidates each, float32",
        ours=stacked.step,
        reference="double backpropagation and torch.optim.Adadelta, run by run",
        theirs=lambda: [run.step() for run in plain],
        repeats=repeats,
    )


def training_epoch(case: Case, repeats: int, n_epochs: int) -> Measurement:
    """One epoch of all victims of a case."""
    generator = torch.Generator().manual_seed(0)
    weights = victims(case, init_std_first=1e-4)
    x = torch.rand(case.n_runs, case.n_images, D, generator=generator) - 0.5
    y = torch.tensor([-1.0, 1.0]).repeat(case.n_images // 2).expand(case.n_runs, -1).contiguous()
    training = Training(epochs=n_epochs, optimiser=Optimiser())
    ours = partial(train_binary, weights, x, y, training=training)

    def theirs() -> Tensor:
        return torch.stack(
            [plain_training([w[i] for w in weights], x[i], y[i], n_epochs) for i in range(len(x))]
        )

    check_agreement(ours().loss, theirs())
    return compared(
        "kkt",
        f"training epoch, {case}, {case.n_images} images each, float32",
        ours=ours,
        reference="autograd and torch.optim.Adadelta(foreach=True), victim by victim",
        theirs=theirs,
        repeats=repeats,
        per_call=n_epochs,
    )


def plain_training(theta: list[Tensor], x: Tensor, y: Tensor, n_epochs: int) -> Tensor:
    """The training loss of one victim after `n_epochs` with torch's own parts."""
    layers: list[nn.Module] = []
    for w in theta:
        linear = nn.Linear(w.shape[1], w.shape[0], bias=False)
        linear.weight = nn.Parameter(w.clone())
        layers += [linear, nn.ReLU()]
    net = nn.Sequential(*layers[:-1])
    loss_of: Callable[[Tensor, Tensor], Tensor] = nn.BCEWithLogitsLoss()
    optimiser = torch.optim.Adadelta(net.parameters(), lr=1.0, foreach=True)
    target = (y + 1) / 2
    for _ in range(n_epochs):
        optimiser.zero_grad()
        loss_of(net(x).squeeze(-1), target).backward()
        optimiser.step()
    with torch.no_grad():
        return loss_of(net(x).squeeze(-1), target)


def victims(case: Case, *, init_std_first: float) -> Weights:
    mlp = MLP(widths=(case.width, case.width), init_std_first=init_std_first)
    generators = [seeded_generator(0, run, "victim") for run in range(case.n_runs)]
    return mlp.init(D, generators, dtype=torch.float32)


def check_agreement(ours: Tensor, theirs: Tensor) -> None:
    """Raises ValueError if the two sides do not compute the same thing."""
    difference = float(((ours - theirs).abs() / theirs.abs()).max())
    if not difference < AGREEMENT:
        raise ValueError(
            f"losses differ by {difference:.2g} relative, more than {AGREEMENT}: not comparable"
        )


def measure(quick: bool) -> Iterator[Measurement]:
    """Seconds per attack step and per training epoch."""
    repeats = 3 if quick else 15
    for case in (SMALL, PAPER):
        yield attack_step(case, repeats)
    for case, n_epochs in ((SMALL, 10), (PAPER, 5)):
        yield training_epoch(case, repeats, n_epochs)


if __name__ == "__main__":
    main(measure)
