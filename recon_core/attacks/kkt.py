"""The `kkt` family: train R binary MLPs, reconstruct their training images, match what came back.

One run: augment the planned images, subtract their mean, train the victim, minimise the KKT
objective from random candidates, and keep the candidates that can be matched with confidence
(paper 001, section 2; Haim et al. 2022). The objective itself is in `kkt_objective`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from recon_core.attacks.kkt_objective import Attacked, KKTAttack, reconstruct
from recon_core.augment import augment_images
from recon_core.matching import best_and_second, confident_candidates, fit_to_range
from recon_core.metrics import ssim_matrix
from recon_core.types import Outcome, Pairs, Progress, RunResult, RunSpec, no_progress
from recon_core.victims.mlp import MLP
from recon_core.victims.training import Trained, Training, train_binary

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class KKT:
    """Settings of a run. Defaults are the dataset generation of paper 001, section 2.

    `augment_p`: probability of each augmentation (Karras et al. 2022: 0.12). `keep`: pairs of
    confident candidates only, as the dataset has them, or of all candidates, as an evaluation
    needs them. A candidate is confident if at some saved iteration its SSIM to one training image
    is above `confident_ssim` and at least `confident_gap` above that to any other.
    """

    family: Literal["kkt"] = "kkt"
    augment_p: float = 0.12
    victim: MLP = field(default_factory=MLP)
    training: Training = field(default_factory=Training)
    attack: KKTAttack = field(default_factory=KKTAttack)
    keep: Literal["confident", "all"] = "confident"
    confident_ssim: float = 0.4
    confident_gap: float = 0.05
    dtype: Literal["float32", "float64"] = "float32"
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if not 0 <= self.augment_p <= 1:
            raise ValueError(f"augment_p={self.augment_p} is not a probability in [0, 1]")

    def run_batch(
        self,
        specs: Sequence[RunSpec],
        images: UInt8[Tensor, "r n c h w"],
        *,
        device: torch.device,
        progress: Progress = no_progress,
    ) -> list[RunResult]:
        """Train and attack R victims; one result per spec, in order.

        `images[i]` are the images of `specs[i]`, before augmentation; labels are 0 or 1. On a GPU
        the runs are one stack. On a CPU they go one after another: together their weights fall out
        of the cache, and alone a run is bit for bit the same whatever it is batched with (on a GPU
        to rounding; see `recon_core.types`). Raises ValueError if a spec has other labels or
        another number of images than the batch.
        """
        _check_batch(specs, images)
        n_stacked = stack_size(device, len(specs))
        results: list[RunResult] = []
        for first in range(0, len(specs), n_stacked):
            last = min(first + n_stacked, len(specs))
            share = _share(progress, first / len(specs), last / len(specs))
            results += self._run_stack(specs[first:last], images[first:last], device, share)
        return results

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
        trained = self._train(specs, (unit - mean).flatten(2), device, _share(progress, 0.0, 0.5))
        attacked = self._attack(specs, trained, unit[0, 0].numel(), _share(progress, 0.5, 1.0))
        return [
            self._result(
                spec, targets[i], augment[i], mean[i, 0].float(), _row(trained, attacked, i)
            )
            for i, spec in enumerate(specs)
        ]

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
        specs: Sequence[RunSpec],
        x: Float[Tensor, "r n d"],
        device: torch.device,
        progress: Progress,
    ) -> Trained:
        y = torch.tensor([spec.labels for spec in specs], dtype=x.dtype, device=device) * 2 - 1
        generators = [spec.generator("victim") for spec in specs]
        weights = self.victim.init(x.shape[-1], generators, dtype=x.dtype)
        weights = tuple(w.to(device) for w in weights)
        return train_binary(weights, x, y, training=self.training, progress=progress)

    def _attack(
        self, specs: Sequence[RunSpec], trained: Trained, d: int, progress: Progress
    ) -> Attacked:
        m = self.attack.n_candidates
        like = trained.weights[0]
        starts = []
        for spec in specs:
            generator = spec.generator("attack")
            x = torch.randn(m, d, generator=generator) * self.attack.sigma
            starts.append((x, torch.rand(m, generator=generator)))
        x = torch.stack([s[0] for s in starts]).to(like)
        lam = torch.stack([s[1] for s in starts]).to(like)
        return reconstruct(trained.weights, x, lam, attack=self.attack, progress=progress)

    def _result(
        self,
        spec: RunSpec,
        targets: UInt8[Tensor, "n c h w"],
        augment: Float[Tensor, "n 9"],
        mean: Float[Tensor, "c h w"],
        row: _RunTensors,
    ) -> RunResult:
        outcome = Outcome.OK if row.stats["train_accuracy"] == 1 else Outcome.UNFITTED
        if not (row.x.isfinite().all() and row.lam.isfinite().all() and row.weights_finite):
            outcome = Outcome.NONFINITE
        saved = row.x if outcome is not Outcome.NONFINITE else row.x[:, :0]
        pairs = self._pairs(saved.unflatten(-1, targets.shape[1:]), targets, mean)
        return RunResult(
            spec=spec,
            outcome=outcome,
            targets=targets,
            augment=augment,
            mean_image=mean.cpu(),
            pairs=pairs,
            stats=row.stats,
        )

    def _pairs(
        self,
        saved: Float[Tensor, "s m c h w"],
        targets: UInt8[Tensor, "n c h w"],
        mean: Float[Tensor, "c h w"],
    ) -> Pairs:
        """Match every saved candidate; rows ordered by candidate, then by iteration.

        The scores are computed where `saved` is; everything after them is small and on the CPU.
        """
        n_saved, n_candidates = saved.shape[:2]
        pictures = fit_to_range(saved.flatten(0, 1), mean)
        scores = ssim_matrix(pictures, targets.to(saved.device).float() / 255).cpu()
        scores = scores.unflatten(0, (n_saved, -1))
        rows, best, second = (
            v.unflatten(0, (n_saved, -1)) for v in best_and_second(scores.flatten(0, 1))
        )
        confident, target = confident_candidates(
            rows, best, second, threshold=self.confident_ssim, margin=self.confident_gap
        )
        keep = confident if self.keep == "confident" else torch.ones_like(confident)
        if self.keep == "all":
            target_rows, to_target, to_other = rows, best, second
        else:
            target_rows = target.expand(n_saved, n_candidates)
            to_target, to_other = _to_target_and_other(scores, target)
        candidate = torch.arange(n_candidates).expand(n_saved, n_candidates)
        iteration = torch.tensor(self.attack.save_at)[:, None].expand(n_saved, n_candidates)

        def kept(values: Tensor) -> Tensor:
            chosen = values.transpose(0, 1)[keep.to(values.device)]
            return chosen.flatten(0, 1).cpu().contiguous()

        return Pairs(
            reconstruction=kept(saved),
            target_row=kept(target_rows),
            candidate=kept(candidate),
            iteration=kept(iteration),
            ssim_best=kept(to_target),
            ssim_second=kept(to_other),
            confident=kept(confident.expand(n_saved, n_candidates)),
        )


def stack_size(device: torch.device, n_runs: int) -> int:
    """How many of `n_runs` runs are stacked on `device`: all, but on a CPU one."""
    return 1 if device.type == "cpu" else n_runs


@dataclass(frozen=True)
class _RunTensors:
    """One run's rows of a stack."""

    x: Float[Tensor, "s m d"]
    lam: Float[Tensor, " m"]
    weights_finite: bool
    stats: dict[str, float]


def _row(trained: Trained, attacked: Attacked, i: int) -> _RunTensors:
    return _RunTensors(
        x=attacked.x[i].float(),
        lam=attacked.lam[i],
        weights_finite=all(bool(w[i].isfinite().all()) for w in trained.weights),
        stats={
            "train_loss": float(trained.loss[i]),
            "train_accuracy": float(trained.accuracy[i]),
            "margin_min": float(trained.margin_min[i]),
            "attack_loss": float(attacked.loss[i]),
            "kkt_residual": float(attacked.residual[i]),
        },
    )


def _to_target_and_other(
    scores: Float[Tensor, "s m n"], target: Int64[Tensor, " m"]
) -> tuple[Float[Tensor, "s m"], Float[Tensor, "s m"]]:
    """SSIM to the candidate's target, and the highest to any other image (-1 if there is none)."""
    index = target[None, :, None].expand(*scores.shape[:2], 1)
    others = scores.scatter(2, index, -1.0)
    return scores.gather(2, index).squeeze(2), others.amax(dim=2)


def _check_batch(specs: Sequence[RunSpec], images: UInt8[Tensor, "r n c h w"]) -> None:
    if len(specs) != len(images):
        raise ValueError(f"{len(specs)} specs came with images of {len(images)} runs")
    for spec in specs:
        if len(spec.labels) != images.shape[1]:
            raise ValueError(
                f"run {spec.run} plans {len(spec.labels)} images, the batch has {images.shape[1]}; "
                "runs of one batch must have equally many"
            )
        if not set(spec.labels) <= {0, 1}:
            raise ValueError(
                f"run {spec.run} has labels {sorted(set(spec.labels))}; a binary victim needs "
                "labels 0 and 1"
            )


def _share(progress: Progress, low: float, high: float) -> Progress:
    """A progress callback for the part of the work between two fractions."""
    return lambda fraction: progress(low + (high - low) * fraction)
