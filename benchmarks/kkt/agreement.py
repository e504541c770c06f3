"""Does the kkt engine do what the published algorithm does? Both attack the same victims.

    python -m benchmarks.kkt.agreement [--data folder:cifar10] [--quick] [--json FILE]

The reference is `benchmarks.kkt.reference`: plain double backpropagation. It trains the victims,
too, from the engine's initial weights; then both attack from the same x and lam.

* float64, 500 steps: the largest ||x_i - x'_i|| / ||x'_i|| over the candidates i and the saved
  steps (the first ten and every tenth) stays below 1e-6. With Adadelta at rate 1 the attack's own
  dynamics sometimes turn unstable: then any rounding grows until it fills the trajectory, in the
  reference as in the engine. So the reference runs a second time from a start one rounding away,
  and a trajectory is compared up to where it parts from itself; the case says where, and what
  follows. The gradients are compared at all saved steps, at the reference's own points.
* float32, to the end: how many training images come back with SSIM > .4 (best of all candidates at
  all saved iterations, `fit_to_range`, gaussian11). The totals over all victims may differ by 3 %.
  As many decoys, which no victim has seen, are counted in the same way.

The exit status is 1 where a limit is exceeded; the measurements are written all the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.kkt.reference import (
    Loss,
    Reconstruction,
    ReferenceAttack,
    ReferenceNet,
    balanced_signs,
    train,
)
from benchmarks.record import Measurement, measured, publish
from recon_core.attacks.kkt.objective import KKTAttack, Objective, settings_of, starting_points
from recon_core.attacks.kkt.solver import reconstruct
from recon_core.matching import fit_to_range
from recon_core.metrics import ssim_matrix
from recon_core.optimisers import Optimiser
from recon_core.sampling import History, Phase, Sampling, binary_labels, plan_part
from recon_core.types import RunSpec
from recon_core.victims.network import Conv, Network
from storage.sources.load import load_images

_line = partial(measured, "kkt agreement")

N_IMAGES = 20
ROOT_SEED = 0
LOSSES: dict[str, Loss] = {"binary": "bce", "multiclass": "ce", "regression": "mse"}
TRAJECTORY_LIMIT = 1e-6
GRADIENT_LIMIT = 1e-10
PARTED = 1e-9
"""Where the reference differs from itself by this much, its trajectory is rounding."""
COUNT_LIMIT = 0.03
GOOD = 0.4
REFERENCE = "double backpropagation and torch.optim"

GD = Optimiser(rule="gd", lr=0.05, momentum=0.9)
PLAIN = Network(widths=(200, 200))
PAPER = Network(widths=(1000, 1000))
HAIM = Network(widths=(200, 200), bias="first", init_rest="torch")
DEEP = Network(widths=(100, 100, 100), bias="all", activation="leaky_relu", init_std_first=None)
CONV = Network(widths=(100,), conv=Conv(), init_std_first=None)
SMOOTH = Network(widths=(200, 200), bias="first", activation="gelu", init_std_first=None)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network, how long it is trained by Adadelta, an attack on it, and on how many victims."""

    network: Network
    attack: KKTAttack
    epochs: int
    weight_decay: float = 0.0
    n_victims: int = 1

    def __str__(self) -> str:
        network, attack, rule = self.network, self.attack, self.attack.optimiser
        conv = f"conv {network.conv.kernel}x{network.conv.channels}, " if network.conv else ""
        widths = "-".join(str(width) for width in network.widths)
        momentum = f" with momentum {rule.momentum:g}" if rule.momentum else ""
        return (
            f"{conv}widths {widths}, {network.activation}, bias {network.bias}; "
            f"{attack.condition}, {rule.rule}{momentum}, {attack.n_candidates} candidates"
        )


class Victims:
    """Runs of N_IMAGES pictures of a source, half of them of each binary label."""

    def __init__(self, data: str, n_victims: int) -> None:
        self.source = load_images(data, split="train")
        self.decoys = load_images(data, split="heldout")
        labels, _task = binary_labels(self.source.labels, self.source.class_names)
        sampling = Sampling(
            images_per_run=N_IMAGES, phases=(Phase(n_runs=n_victims),), runs_per_part=n_victims
        )
        nothing = History.empty(len(labels))
        self.specs = plan_part(sampling, 0, labels=labels, history=nothing, root_seed=ROOT_SEED)

    def images(self, spec: RunSpec, dtype: torch.dtype) -> Tensor:
        """(n, 3, h, w) in [0, 1]."""
        return torch.from_numpy(self.source.images[np.array(spec.image_ids)]).to(dtype) / 255

    def unseen(self, spec: RunSpec) -> Tensor:
        """As many pictures of the other split."""
        rng = np.random.default_rng(np.random.SeedSequence((ROOT_SEED, 2, spec.run)))
        rows = rng.choice(len(self.decoys), size=len(spec.image_ids), replace=False)
        return torch.from_numpy(self.decoys.images[rows]).float() / 255


class Duel:
    """One victim, trained by the reference, and both attacks on it from the same start."""

    def __init__(self, victims: Victims, spec: RunSpec, case: Case, dtype: torch.dtype) -> None:
        images = victims.images(spec, dtype)
        condition, network = case.attack.condition, case.network
        n_outputs = len(victims.source.class_names) if condition == "multiclass" else 1
        c, h, w = images.shape[1:]
        if condition == "multiclass":
            target = torch.from_numpy(victims.source.labels[np.array(spec.image_ids)])
        else:  # 0 or 1, or -1 or +1
            target = torch.tensor(spec.labels, dtype=dtype)
            target = target if condition == "binary" else target * 2 - 1
        self.attack, self.architecture = case.attack, network.on((c, h, w), n_outputs)
        initial = self.architecture.initial([spec.generator("victim")], dtype=dtype)
        self.net = ReferenceNet(
            (c, h, w),
            network.widths,
            n_outputs,
            conv=(network.conv.kernel, network.conv.channels) if network.conv else None,
            bias=network.bias,
            activation=network.activation,
            leak=network.leak,
        ).load(self.architecture.to_state_dict(initial))
        train(
            self.net,
            (images - images.mean(0)).flatten(1),
            target,
            loss=LOSSES[condition],
            optimiser="adadelta",
            lr=1.0,
            weight_decay=case.weight_decay,
            epochs=case.epochs,
        )
        state = {name: tensor.detach() for name, tensor in self.net.state_dict().items()}
        self.parameters = self.architecture.from_state_dict(state)
        generators = [spec.generator("attack")]
        self.settings = settings_of(self.attack, generators)
        start = starting_points(self.attack, self.settings, self.architecture.d, generators)
        self.x, self.lam = (tensor.to(dtype) for tensor in start)

    def ours(self) -> Tensor:
        """The engine's x (s, m, d)."""
        return reconstruct(
            self.architecture, self.parameters, self.x, self.lam, attack=self.attack,
            settings=self.settings,
        ).x[0]  # fmt: skip

    def reference(self, shift: float = 0.0) -> Reconstruction:
        """The reference's attack before its first step, from (1 + shift) times the start."""
        attack, rule = self.attack, self.attack.optimiser
        plain = ReferenceAttack(
            condition=attack.condition,
            alpha=attack.alpha,
            lam_min=attack.lam_min,
            lam_scale=attack.lam_scale,
            optimiser="adadelta" if rule.rule == "adadelta" else "sgd",
            lr=rule.lr,
            lam_lr=attack.lam_lr,
            momentum=rule.momentum,
            lean=True,
        )
        y = attack.classes(self.architecture.n_outputs, self.x.device)
        if attack.condition == "binary":
            y = balanced_signs(attack.n_candidates, self.x.dtype)
        return Reconstruction(self.net, self.x[0] * (1 + shift), self.lam[0], y, plain)


def cases(quick: bool) -> list[Case]:
    """Every kind of network and condition at d = 3072, n = 20; small and short ones if `quick`."""
    save_at = (*range(1, 11), *range(20, (50 if quick else 500) + 1, 10))
    attack = KKTAttack(n_candidates=10 if quick else 40, save_at=save_at)
    classes = replace(attack, condition="multiclass")
    momentum = replace(attack, optimiser=GD, lam_lr=1e-3, alpha=100.0, lam_min=0.1)
    regression = replace(attack, condition="regression", alpha=10.0)
    unscaled = replace(classes, lam_scale="none", lam_min=0.01)
    epochs = 100 if quick else 300
    found = [
        Case(network=PLAIN, attack=attack, epochs=epochs, n_victims=1 if quick else 4),
        Case(network=HAIM, attack=momentum, epochs=epochs),
        Case(network=PLAIN, attack=classes, epochs=epochs),
        Case(network=DEEP, attack=regression, epochs=epochs, weight_decay=1e-3),
        Case(network=SMOOTH, attack=unscaled, epochs=epochs),
    ]
    if quick:
        return found
    few, many = replace(attack, n_candidates=20), replace(attack, n_candidates=100)
    return [
        *found,
        Case(network=CONV, attack=few, epochs=epochs, weight_decay=1e-3),
        Case(network=PAPER, attack=many, epochs=epochs),
    ]


def trajectory(duel: Duel, case: str) -> tuple[Measurement, float]:
    """(our candidates against the reference's, the largest difference of gradients), in float64."""
    steps = duel.attack.save_at
    theirs, of_gradients = followed(duel)
    moved = float(((theirs[-1] - duel.x[0]).norm(dim=1) / duel.x[0].norm(dim=1)).median())
    if not moved > 1:
        raise ValueError(f"{case}: candidates moved by {moved:.2g} only; agreement means nothing")
    eps = torch.finfo(theirs.dtype).eps
    itself = apart(duel.reference(shift=eps).run(steps), theirs)
    found = apart(duel.ours(), theirs)
    parted = (itself > PARTED).nonzero()
    until = int(parted[0]) if len(parted) else len(steps)
    note = f"the reference, started one rounding away, differs from itself by {itself[-1]:.0e}"
    if until < len(steps):
        note = (
            f"up to step {steps[until - 1]}; then the reference, started one rounding away, parts "
            f"from itself, by {itself[-1]:.0e} at the end; the engine from it by {found[-1]:.0e}"
        )
    value = max(float(found[:until].max()), eps)
    say(f"float64: {case}: {value:.2g}; gradients {of_gradients:.2g}; {note}")
    return _line(
        f"float64, {steps[-1]} steps: {case} ({note})",
        value,
        unit="largest relative difference of x",
        reference="limit",
        reference_value=TRAJECTORY_LIMIT,
    ), of_gradients


def followed(duel: Duel) -> tuple[Tensor, float]:
    """(the reference's x (s, m, d), the largest difference of gradients along its way).

    Relative to the gradient's norm, of x and of lam, at the points that the saved steps start from.
    """
    run = duel.reference()
    objective = Objective(
        duel.architecture, duel.parameters, attack=duel.attack, settings=duel.settings
    )
    saved, differences = [], [0.0]
    for step in range(1, duel.attack.n_iterations + 1):
        at = run.x.detach().clone()[None], run.lam.detach().clone()[None]
        run.step()
        if step in duel.attack.save_at:
            saved.append(run.x.detach().clone())
            _, *ours = objective(*at, with_value=False)
            for mine, theirs in zip(ours, (run.x.grad, run.lam.grad), strict=True):
                assert theirs is not None
                differences.append(float((mine[0] - theirs).norm() / theirs.norm()))
    return torch.stack(saved), max(differences)


def apart(x: Tensor, other: Tensor) -> Tensor:
    """(s,) the largest ||x_i - other_i|| / ||other_i|| over the candidates, at every saved step."""
    distance: Tensor = (x - other).norm(dim=2) / other.norm(dim=2)
    return distance.amax(1)


def reconstructions(victims: Victims, case: Case) -> Iterator[Measurement]:
    """Training images and decoys that come back, ours and the reference's, in float32."""
    scores: dict[str, list[Tensor]] = {"targets": [], "decoys": []}
    for i, spec in enumerate(victims.specs, start=1):
        images = victims.images(spec, torch.float32)
        duel = Duel(victims, spec, case, torch.float32)
        both = (duel.ours(), duel.reference().run(case.attack.save_at))
        for name, truth in (("targets", images), ("decoys", victims.unseen(spec))):
            best = [
                ssim_matrix(
                    fit_to_range(x.flatten(0, 1).unflatten(1, images.shape[1:]), images.mean(0)),
                    truth,
                ).amax(0)
                for x in both
            ]
            scores[name].append(torch.stack(best))
        say(f"float32: {i} of {len(victims.specs)} victims")
    found = {name: torch.cat(best, dim=1) for name, best in scores.items()}
    n = found["targets"].shape[1]
    (ours, theirs), lucky = ((best > GOOD).sum(1).tolist() for best in found.values())
    what = f"{case}, {len(victims.specs)} victims of {victims.source.name}"
    if not ours or not theirs:
        raise ValueError(
            f"{what}: {ours} images came back, from the reference {theirs}; there is nothing to "
            "compare: use more victims, or images of another source"
        )
    decoys = f"good decoys {lucky[0]} of {n}, the reference's {lucky[1]}"
    rows = [(f"training images of {n}; {decoys}", f"images with SSIM > {GOOD:g}", ours, theirs)]
    for name, best_scores in found.items():
        mine, other = best_scores.double().mean(dim=1).tolist()
        rows.append((f"mean best SSIM of {n} {name}", "SSIM", mine, other))
    for case_, unit, a, b in rows:
        yield _line(
            f"float32: {what}: {case_}", a, unit=unit, reference=REFERENCE, reference_value=b
        )


def exceeded(found: Measurement) -> str | None:
    """Fault of a measurement, or None."""
    expected = found.reference_value or 0.0
    if found.reference == "limit" and not found.value <= expected:
        return f"{found.case}: {found.value:.3g} is above {expected:g}"
    apart_by = abs(found.value - expected)
    if found.unit.startswith("images") and apart_by > COUNT_LIMIT * expected:
        return f"{found.case}: {found.value:g} against {expected:g}, over {COUNT_LIMIT:.0%} apart"
    return None


def measure(quick: bool, data: str, n_victims: int, parts: Sequence[str]) -> Iterator[Measurement]:
    """All comparisons of `parts`, one after another."""
    victims = Victims(data, max(n_victims, 4))
    if "float64" in parts:
        of_gradients = []
        for case in cases(quick):
            for i, spec in enumerate(victims.specs[: case.n_victims]):
                name = f"{case}, victim {i} of {victims.source.name}"
                found, largest = trajectory(Duel(victims, spec, case, torch.float64), name)
                of_gradients.append(largest)
                yield found
        yield _line(
            f"float64: gradients in x and lam along the {len(of_gradients)} trajectories above",
            max(*of_gradients, torch.finfo(torch.float64).eps),
            unit="largest relative difference",
            reference="limit",
            reference_value=GRADIENT_LIMIT,
        )
    if "float32" in parts:
        save_at = (50, 100, 200) if quick else (100, 200, 300, 500, 800, 1400, 2000)
        attack = KKTAttack(n_candidates=2 * N_IMAGES, save_at=save_at)
        case = Case(network=PLAIN, attack=attack, epochs=500 if quick else 3000)
        victims.specs = victims.specs[:n_victims]
        yield from reconstructions(victims, case)


def say(text: str) -> None:
    """Progress, beside the measurements."""
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps, 2 victims")
    parser.add_argument("--data", default="photos", help="folder:PATH, ...; default: photographs")
    parser.add_argument("--victims", type=int, help="victims compared in float32 (20; quick 2)")
    parser.add_argument("--only", choices=("float64", "float32"), help="one of the comparisons")
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    options = parser.parse_args(argv)
    n_victims = options.victims or (2 if options.quick else 20)
    parts = (options.only,) if options.only else ("float64", "float32")
    found = publish(measure(options.quick, options.data, n_victims, parts), options.json)
    wrong = [problem for problem in map(exceeded, found) if problem]
    for problem in wrong:
        say(f"does not agree: {problem}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
