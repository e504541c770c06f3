"""The `kkt` family: train victims, reconstruct their training images, match what came back.

One run: augment the planned images, subtract their mean, train the victim, minimise the KKT
objective from random candidates, once or with many drawn hyperparameters, and keep the candidates
that can be matched (001, section 2; 002; Haim et al. 2022). The objective is in `kkt_objective`.

How runs share a machine: on a GPU they are one stack, every product a batched one. On a CPU a run
is alone with its caches: as many go at once as torch has threads, each on one of them, which is
twice as fast on two cores as giving every product both.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from recon_core.attacks.kkt_objective import KKTAttack, settings_of, starting_points
from recon_core.attacks.kkt_solver import Attacked, Judge, reconstruct
from recon_core.attacks.pairing import no_pairs, pairs_of
from recon_core.augment import augment_images
from recon_core.ncc import ncc_matrix
from recon_core.precision import Precision, matmul_precision
from recon_core.threads import side_by_side
from recon_core.types import Outcome, Pairs, Progress, RunResult, RunSpec, no_progress
from recon_core.victims.network import Architecture, Network, Parameters
from recon_core.victims.training import Trained, Training, train

DTYPES = {"float32": torch.float32, "float64": torch.float64}
N_BEST = 10
"""Distances that the authors' stopping rule averages."""
ROWS_AT_ONCE = 1 << 14
"""Candidates of one stack of attacks on the same victim; bounds memory, 200 MB per buffer."""


@dataclass(frozen=True, kw_only=True)
class KKT:
    """Settings of a run. Defaults are the dataset generation of paper 001, section 2.

    `augment_p`: probability of each augmentation (Karras et al. 2022: 0.12). `n_classes`: what the
    victim tells apart; 2 is one output with labels 0 and 1, unless it is trained with the loss
    "ce", which has an output per class. `n_attacks`: how often a victim is attacked, each time from
    its own start and, with `attack.search`, with its own hyperparameters; candidates are numbered
    attack after attack. `keep`: pairs of confident candidates only, as the dataset has them, or of
    all candidates, as an evaluation needs them. A candidate is confident if at some saved iteration
    its SSIM to one training image is above `confident_ssim` and at least `confident_gap` above that
    to any other. `precision`: of float32 matrix products.
    """

    family: Literal["kkt"] = "kkt"
    augment_p: float = 0.12
    n_classes: int = 2
    victim: Network = field(default_factory=Network)
    training: Training = field(default_factory=Training)
    attack: KKTAttack = field(default_factory=KKTAttack)
    n_attacks: int = 1
    keep: Literal["confident", "all"] = "confident"
    confident_ssim: float = 0.4
    confident_gap: float = 0.05
    dtype: Literal["float32", "float64"] = "float32"
    precision: Precision = "ieee"
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if not 0 <= self.augment_p <= 1:
            raise ValueError(f"augment_p={self.augment_p} is not a probability in [0, 1]")
        if self.n_attacks < 1:
            raise ValueError(f"n_attacks={self.n_attacks} must be at least 1")
        loss, condition = self.training.loss.kind, self.attack.condition
        if self.n_classes < 2 or (self.n_classes > 2 and loss != "ce"):
            raise ValueError(
                f"n_classes={self.n_classes} with training.loss.kind={loss!r}; more than two "
                "classes need 'ce', two are the least"
            )
        if (loss == "ce") != (condition == "multiclass"):
            raise ValueError(
                f"training.loss.kind={loss!r} with attack.condition={condition!r}; a victim that "
                "is trained with 'ce' has an output per class and needs 'multiclass', others must "
                "not have it"
            )

    @property
    def n_outputs(self) -> int:
        return self.n_classes if self.training.loss.kind == "ce" else 1

    def run_batch(
        self,
        specs: Sequence[RunSpec],
        images: UInt8[Tensor, "r n c h w"],
        *,
        device: torch.device,
        progress: Progress = no_progress,
    ) -> list[RunResult]:
        """Train and attack R victims; one result per spec, in order.

        `images[i]` are the images of `specs[i]`, before augmentation; labels are classes from 0. On
        a GPU the runs are one stack, equal to rounding whatever it holds. On a CPU a run is bit for
        bit the same whatever it is batched with, given that torch has one thread; with more, runs
        of a batch go side by side on one thread each. Raises ValueError if a spec has other labels
        or another number of images than the batch.
        """
        _check_batch(specs, images, self.n_classes)
        n_stacked = stack_size(device, len(specs))
        stacks = [
            slice(first, min(first + n_stacked, len(specs)))
            for first in range(0, len(specs), n_stacked)
        ]
        shares = _Shares(progress, [(s.stop - s.start) / len(specs) for s in stacks])
        jobs = [
            partial(self._run_stack, specs[s], images[s], device, shares.of(i))
            for i, s in enumerate(stacks)
        ]
        with matmul_precision("ieee", device):  # whatever was set, and for the scores in any case
            if self.precision == "ieee":
                stacked = side_by_side(jobs, device)
            else:  # a setting of the whole process: no run may end it under another
                stacked = [job() for job in jobs]
        return [result for results in stacked for result in results]

    def _run_stack(
        self,
        specs: Sequence[RunSpec],
        images: UInt8[Tensor, "r n c h w"],
        device: torch.device,
        progress: Progress,
    ) -> list[RunResult]:
        targets, augment = self._augmented(specs, images)
        unit = targets.to(device=device, dtype=DTYPES[self.dtype]) / 255
        mean = unit.mean(dim=1, keepdim=True)
        inputs = (unit - mean).flatten(2)
        c, h, w = targets.shape[2:]
        architecture = self.victim.on((c, h, w), self.n_outputs)
        with matmul_precision(self.precision, device):  # not of the scores below
            trained = self._train(architecture, specs, inputs, _share(progress, 0.0, 0.5))
            victims = trained.parameters
            attacked = self._attack(
                architecture, specs, victims, inputs, _share(progress, 0.5, 1.0)
            )
        finite = victims.isfinite().tolist()
        results = []
        for i, spec in enumerate(specs):
            rows = slice(i * self.n_attacks, (i + 1) * self.n_attacks)
            stats = {
                "train_loss": float(trained.loss[i]),
                "train_accuracy": float(trained.accuracy[i]),
                "margin_min": float(trained.margin_min[i]),
                **_best(attacked, rows),
            }
            outcome = Outcome.OK if stats["train_accuracy"] == 1 else Outcome.UNFITTED
            usable = attacked.usable(rows)
            if not (finite[i] and bool(usable.any())):
                outcome = Outcome.NONFINITE
            results.append(
                RunResult(
                    spec=spec,
                    outcome=outcome,
                    targets=targets[i],
                    augment=augment[i],
                    mean_image=mean[i, 0].float().cpu(),
                    pairs=no_pairs((c, h, w))
                    if outcome is Outcome.NONFINITE
                    else self._pairs(attacked.x[rows], usable, targets[i], mean[i, 0].float()),
                    stats=stats,
                )
            )
        return results

    def _augmented(
        self, specs: Sequence[RunSpec], images: UInt8[Tensor, "r n c h w"]
    ) -> tuple[UInt8[Tensor, "r n c h w"], Float[Tensor, "r n 9"]]:
        pairs = [
            augment_images(batch, p=self.augment_p, generator=spec.generator("augment"))
            for spec, batch in zip(specs, images, strict=True)
        ]
        return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])

    def _train(
        self,
        architecture: Architecture,
        specs: Sequence[RunSpec],
        x: Float[Tensor, "r n d"],
        progress: Progress,
    ) -> Trained:
        labels = torch.tensor([spec.labels for spec in specs], device=x.device)
        y = labels if self.n_outputs > 1 else labels.to(x.dtype) * 2 - 1
        generators = [spec.generator("victim") for spec in specs]
        parameters = architecture.initial(generators, dtype=x.dtype).map(lambda t: t.to(x.device))
        order = [spec.generator("minibatches") for spec in specs]
        return train(
            architecture,
            parameters,
            x,
            y,
            training=self.training,
            generators=order,
            progress=progress,
        )

    def _attack(
        self,
        architecture: Architecture,
        specs: Sequence[RunSpec],
        victims: Parameters,
        inputs: Float[Tensor, "r n d"],
        progress: Progress,
    ) -> Attacked:
        """Every run's attacks, run after run: all runs at once, or one run's attacks at a time."""
        if self.n_attacks == 1:
            generators = [spec.generator("attack") for spec in specs]
            return self._attack_stack(architecture, victims, generators, inputs, progress)
        at_once = max(1, ROWS_AT_ONCE // self.attack.n_candidates)
        pieces = []
        for i, spec in enumerate(specs):
            victim = slice(i, i + 1)
            for first in range(0, self.n_attacks, at_once):
                last = min(first + at_once, self.n_attacks)
                done = [(i + k / self.n_attacks) / len(specs) for k in (first, last)]
                pieces.append(
                    self._attack_stack(
                        architecture,
                        victims.rows(victim),
                        [spec.generator(f"attack {k}") for k in range(first, last)],
                        inputs[victim],
                        _share(progress, *done),
                    )
                )
        return Attacked.joined(pieces)

    def _attack_stack(
        self,
        architecture: Architecture,
        victims: Parameters,
        generators: Sequence[torch.Generator],
        inputs: Float[Tensor, "r n d"],
        progress: Progress,
    ) -> Attacked:
        settings = settings_of(self.attack, generators)
        x, lam = starting_points(self.attack, settings, architecture.d, generators)
        return reconstruct(
            architecture,
            victims,
            x.to(inputs),
            lam.to(inputs),
            attack=self.attack,
            settings=settings,
            judge=self._judge(architecture, inputs),
            progress=progress,
        )

    def _judge(self, architecture: Architecture, inputs: Float[Tensor, "r n d"]) -> Judge | None:
        """The authors' rule: hopeless if the best matched images are far (`ncc_stop_above`)."""
        limit = self.attack.ncc_stop_above
        if limit is None:
            return None

        def judge(_iteration: int, x: Tensor, attacks: Int64[Tensor, " k"]) -> Bool[Tensor, " k"]:
            hopeless = []
            for candidates, attack in zip(x, attacks.tolist(), strict=True):
                truth = inputs[attack if len(inputs) > 1 else 0].unflatten(1, architecture.shape)
                distance = ncc_matrix(candidates.unflatten(1, architecture.shape), truth)
                nearest = distance.amin(0).sort().values[:N_BEST].mean() * architecture.d
                hopeless.append(bool(nearest > limit))
            return torch.tensor(hopeless, device=x.device)

        return judge

    def _pairs(
        self,
        x: Float[Tensor, "q s m d"],
        usable: Bool[Tensor, " q"],
        targets: UInt8[Tensor, "n c h w"],
        mean: Float[Tensor, "c h w"],
    ) -> Pairs:
        """Pairs of the attacks that went through; a candidate's number counts from attack 0."""
        numbers = torch.arange(x.shape[0] * x.shape[2]).view(x.shape[0], x.shape[2])
        saved = x[usable].transpose(0, 1).flatten(1, 2).float().unflatten(-1, targets.shape[1:])
        pairs = pairs_of(
            saved,
            targets,
            mean,
            iterations=self.attack.save_at,
            keep=self.keep,
            threshold=self.confident_ssim,
            gap=self.confident_gap,
        )
        number = numbers[usable.cpu()].flatten()
        return replace(pairs, candidate=number[pairs.candidate])


def stack_size(device: torch.device, n_runs: int) -> int:
    """How many of `n_runs` runs are stacked on `device`: all, but on a CPU one."""
    return 1 if device.type == "cpu" else n_runs


def _best(attacked: Attacked, rows: slice) -> dict[str, float]:
    """Loss and residual of the attack with the smallest residual; NaN if all diverged."""
    residual = attacked.residual[rows]
    best = int(residual.nan_to_num(nan=torch.inf).argmin())
    return {
        "attack_loss": float(attacked.loss[rows][best]),
        "kkt_residual": float(residual[best]),
    }


class _Shares:
    """Progress of jobs that go side by side, each with its share of the whole."""

    def __init__(self, progress: Progress, shares: Sequence[float]) -> None:
        self.progress, self.shares = progress, shares
        self.done = [0.0] * len(shares)
        self.lock = threading.Lock()

    def of(self, job: int) -> Progress:
        """The callback of one job."""

        def report(fraction: float) -> None:
            with self.lock:
                self.done[job] = fraction
                whole = all(done == 1.0 for done in self.done)
                total = sum(d * share for d, share in zip(self.done, self.shares, strict=True))
                self.progress(1.0 if whole else total)

        return report


def _share(progress: Progress, low: float, high: float) -> Progress:
    """A progress callback for the part of the work between two fractions."""
    return lambda fraction: progress(low + (high - low) * fraction)


def _check_batch(
    specs: Sequence[RunSpec], images: UInt8[Tensor, "r n c h w"], n_classes: int
) -> None:
    if len(specs) != len(images):
        raise ValueError(f"{len(specs)} specs came with images of {len(images)} runs")
    for spec in specs:
        if len(spec.labels) != images.shape[1]:
            raise ValueError(
                f"run {spec.run} plans {len(spec.labels)} images, the batch has {images.shape[1]}; "
                "runs of one batch must have equally many"
            )
        if not set(spec.labels) <= set(range(n_classes)):
            raise ValueError(
                f"run {spec.run} has labels {sorted(set(spec.labels))}; a victim of "
                f"n_classes={n_classes} needs labels from 0 to {n_classes - 1}"
            )
