"""One victim and both attacks on it: what `kkt_agreement` compares.

A victim is trained by the reference, from the engine's initial weights, on pictures of a source;
then the engine and the reference start from the same x and lam.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

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
from recon_core.attacks.kkt.objective import KKTAttack, Objective, settings_of, starting_points
from recon_core.attacks.kkt.solver import reconstruct
from recon_core.sampling import History, Phase, Sampling, binary_labels, plan_part
from recon_core.types import RunSpec
from recon_core.victims.network import Network
from storage.sources.load import ImageSet, load_images

N_IMAGES = 20
ROOT_SEED = 0
LOSSES: dict[str, Loss] = {"binary": "bce", "multiclass": "ce", "regression": "mse"}


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
        return _unit(self.source, np.array(spec.image_ids), dtype)

    def unseen(self, spec: RunSpec) -> Tensor:
        """As many pictures of the other split."""
        rng = np.random.default_rng(np.random.SeedSequence((ROOT_SEED, 2, spec.run)))
        rows = rng.choice(len(self.decoys), size=len(spec.image_ids), replace=False)
        return _unit(self.decoys, rows, torch.float32)

    def target(self, spec: RunSpec, condition: str, dtype: torch.dtype) -> Tensor:
        """Labels that the victim is trained on: 0 or 1, a class, or -1 or +1."""
        if condition == "multiclass":
            return torch.from_numpy(self.source.labels[np.array(spec.image_ids)])
        label = torch.tensor(spec.labels, dtype=dtype)
        return label if condition == "binary" else label * 2 - 1


class Duel:
    """One victim, trained by the reference, and both attacks on it from the same start."""

    def __init__(self, victims: Victims, spec: RunSpec, case: Case, dtype: torch.dtype) -> None:
        images = victims.images(spec, dtype)
        condition, network = case.attack.condition, case.network
        n_outputs = len(victims.source.class_names) if condition == "multiclass" else 1
        c, h, w = images.shape[1:]
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
            victims.target(spec, condition, dtype),
            loss=LOSSES[condition],
            optimiser="adadelta",
            lr=1.0,
            weight_decay=case.weight_decay,
            batches=itertools.repeat(slice(None), case.epochs),
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
            self.architecture,
            self.parameters,
            self.x,
            self.lam,
            attack=self.attack,
            settings=self.settings,
        ).x[0]

    def objective(self) -> Objective:
        """The engine's objective on this victim."""
        return Objective(
            self.architecture, self.parameters, attack=self.attack, settings=self.settings
        )

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


def _unit(source: ImageSet, rows: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(source.images[rows]).to(dtype) / 255
