"""Minimise the KKT objective of Q attacks at once: the loop, its saves and stops, resuming.

An attack moves x and lam by first-order steps from its own start (image restoration paper, section
2: Adadelta with rate 1; Haim et al. and the KKT paper: gradient descent with momentum .9 and
separate rates). One that diverges, or that a rule calls hopeless, leaves the stack, which is
rebuilt without it. On a GPU a step is captured once as a CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from recon_core.attacks.kkt.objective import (
    STEEP,
    KKTAttack,
    Objective,
    Settings,
    relative_residual,
)
from recon_core.cuda_graphs import repeated
from recon_core.optimisers import Stepper
from recon_core.types import Progress, no_progress
from recon_core.victims.network import Architecture, Parameters

REPORTS = 50
CHECK_EVERY = 100
"""Iterations between two looks at the losses; a look costs as much as an iteration."""

Judge = Callable[[int, Float[Tensor, "k m d"], Int64[Tensor, " k"]], Bool[Tensor, " k"]]
"""judge(iteration, x, attacks): which of the running attacks are hopeless."""


STATE = ("running", "x", "lam", "saved", "last_x", "last_lam", "loss", "n_iterations")
"""What a solver goes on from, beside the number of iterations and its optimisers' moments. `x` and
`lam` are of the attacks in `running`, the rest of all Q."""


@dataclass(frozen=True)
class Attacked:
    """Every attack's candidates at the saved iterations, in attack units, and how it ended. What a
    stopped attack did not reach is NaN in `x`. `loss` is L at the last `lam`, `residual` the
    stationarity term over ||theta||^2, in float64; `residual_relu` is that with ReLU's own
    derivative."""

    x: Float[Tensor, "q s m d"]
    lam: Float[Tensor, "q m"]
    loss: Float[Tensor, " q"]
    residual: Float[Tensor, " q"]
    residual_relu: Float[Tensor, " q"]
    n_iterations: Int64[Tensor, " q"]

    def usable(self) -> Bool[Tensor, " q"]:
        """Attacks that went through to the last iteration and ended finite in float32."""
        x = self.x[:, -1].float().isfinite().flatten(1).all(1)
        return x & self.lam.isfinite().all(1)


def reconstruct(
    architecture: Architecture,
    parameters: Parameters,
    x: Float[Tensor, "q m d"],
    lam: Float[Tensor, "q m"],
    *,
    attack: KKTAttack,
    settings: Settings,
    judge: Judge | None = None,
    progress: Progress = no_progress,
    state: Mapping[str, Tensor] | None = None,
    on_state: Callable[[Solver], None] | None = None,
    state_every: int = 0,
) -> Attacked:
    """Minimise L from the starting point (x, lam) of every attack; nothing is modified in place.

    `parameters` are of Q victims, or of one that all Q attacks share. `judge` is asked at every
    check from iteration `attack.stop_after` on. `on_state` gets the solver every `state_every`
    iterations; with its `state()` as `state` and the same other arguments, the attack goes on from
    there and ends bit for bit as if it had not been interrupted. Raises ValueError for a start or a
    state of other attacks.
    """
    solver = Solver(architecture, parameters, attack, settings)
    solver.start(x, lam) if state is None else solver.resume(state)
    n = attack.n_iterations
    report_every = max(1, n // REPORTS)
    while solver.iteration < n and len(solver.running):
        events = [n, *(s for s in attack.save_at if s > solver.iteration)]
        for every in (CHECK_EVERY, report_every, state_every):
            if every:
                events.append((solver.iteration // every + 1) * every)
        solver.advance(min(events))
        if solver.iteration in attack.save_at:
            solver.save(attack.save_at.index(solver.iteration))
        if solver.iteration % CHECK_EVERY == 0 or solver.iteration == n:
            solver.check(judge)
        if solver.iteration % report_every == 0:
            progress(solver.iteration / n)
        if state_every and on_state is not None and solver.iteration % state_every == 0:
            on_state(solver)
    progress(1.0)
    return solver.finished()


class Solver:
    """The running attacks' tensors, and the output of all attacks so far; see `reconstruct`."""

    def __init__(
        self,
        architecture: Architecture,
        parameters: Parameters,
        attack: KKTAttack,
        settings: Settings,
    ) -> None:
        self.architecture, self.parameters = architecture, parameters
        self.attack, self.settings = attack, settings
        if parameters.n_runs not in (1, len(settings)):
            raise ValueError(
                f"settings of {len(settings)} attacks on {parameters.n_runs} victims; give every "
                "attack its victim, or all the same one"
            )
        self.theta_square = parameters.squared_norm().expand(len(settings))

    def start(self, x: Tensor, lam: Tensor) -> None:
        n_saved = len(self.attack.save_at)
        self._check_size("starting points", (len(x), n_saved, *x.shape[1:]))
        self.iteration = 0
        self.saved = x.new_full((len(x), n_saved, *x.shape[1:]), torch.nan)
        self.last_x, self.last_lam = x.clone(), lam.clone()
        self.loss = x.new_full((len(x),), torch.nan)
        self.n_iterations = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        running = torch.arange(len(x), device=x.device)
        self._run(running, x, lam, None)

    def resume(self, state: Mapping[str, Tensor]) -> None:
        missing = sorted({"iteration", *STATE} - set(state))
        if missing:
            raise ValueError(f"not the state of an attack: {', '.join(missing)} missing")
        self._check_size("a state", tuple(state["saved"].shape))
        self.iteration = int(state["iteration"])
        here = {name: t.to(self.theta_square.device, copy=True) for name, t in state.items()}
        self.saved, self.last_x, self.last_lam = (here[name] for name in STATE[3:6])
        self.loss, self.n_iterations = here["loss"], here["n_iterations"]
        moments = [
            [here[name] for name in sorted(here) if name.startswith(f"moments.{which}.")]
            for which in ("x", "lam")
        ]
        self._run(here["running"], here["x"], here["lam"], moments)

    def _check_size(self, what: str, size: tuple[int, ...]) -> None:
        n_saved, m = len(self.attack.save_at), self.attack.n_candidates
        needed = (len(self.settings), n_saved, m, self.architecture.d)
        if size != needed:
            raise ValueError(
                f"{what} of (attacks, saved iterations, candidates, numbers) {size} do not go with "
                f"settings of {needed}; use the attack and the settings that they were made with"
            )

    def state(self) -> dict[str, Tensor]:
        """As named tensors on the CPU."""
        named = {name: getattr(self, name) for name in STATE}
        named["iteration"] = torch.tensor(self.iteration)
        for which, stepper in zip(("x", "lam"), self.steppers, strict=True):
            named |= {f"moments.{which}.{i}": t for i, t in enumerate(stepper.tensors())}
        return {name: value.cpu().clone() for name, value in named.items()}

    def _run(
        self,
        running: Tensor,
        x: Tensor,
        lam: Tensor,
        moments: Sequence[Sequence[Tensor]] | None,
    ) -> None:
        self.running = running
        self.x, self.lam = (t.clone(memory_format=torch.contiguous_format) for t in (x, lam))
        settings = self.settings.rows(running.cpu())
        victims = self.parameters.rows(running) if self.parameters.n_runs > 1 else self.parameters
        optimiser = self.attack.optimiser
        self.steppers = (
            Stepper(optimiser, self.x, lr=settings.lr),
            Stepper(optimiser, self.lam, lr=settings.lam_lr),
        )
        if moments is not None:
            for stepper, tensors in zip(self.steppers, moments, strict=True):
                stepper.load(tensors)
        if len(running):
            self.objective = Objective(
                self.architecture, victims, attack=self.attack, settings=settings
            )

            def step() -> None:
                _, gradient_x, gradient_lam = self.objective(self.x, self.lam, with_value=False)
                self.steppers[0].step_(gradient_x)
                self.steppers[1].step_(gradient_lam)

            self.repeat = repeated(step, self.x.device)

    def advance(self, to: int) -> None:
        self.repeat(to - self.iteration)
        self.iteration = to

    def save(self, index: int) -> None:
        self.saved[self.running, index] = self.x

    def check(self, judge: Judge | None) -> None:
        """Note where the running attacks are, and go on without the hopeless ones."""
        value, _, _ = self.objective(self.x, self.lam)
        assert value is not None
        self.loss[self.running] = value
        self.last_x[self.running], self.last_lam[self.running] = self.x, self.lam
        self.n_iterations[self.running] = self.iteration
        hopeless = ~(value.isfinite() & self.x.isfinite().flatten(1).all(1))
        if self.iteration >= self.attack.stop_after:
            if self.attack.stop_above is not None:
                relative = value / self.theta_square[self.running]
                hopeless = hopeless | ~(relative <= self.attack.stop_above)
            if judge is not None:
                hopeless = hopeless | judge(self.iteration, self.x, self.running)
        if bool(hopeless.any()):  # what they have not reached stays NaN, as it started
            keep = (~hopeless).nonzero().squeeze(1)
            moments = tuple(stepper.rows(keep) for stepper in self.steppers)
            self._run(self.running[keep], self.x[keep], self.lam[keep], moments)

    def finished(self) -> Attacked:
        residual, residual_relu = (
            relative_residual(
                self.architecture,
                self.parameters,
                self.last_x.contiguous(),
                self.last_lam.contiguous(),
                attack=self.attack,
                settings=self.settings,
                alpha=alpha,
            )
            for alpha in (None, STEEP)
        )
        return Attacked(
            x=self.saved,
            lam=self.last_lam,
            loss=self.loss,
            residual=residual,
            residual_relu=residual_relu,
            n_iterations=self.n_iterations,
        )
