"""A family in one file, as a package outside the tree would have it: each image's blurred copy.

The victim of a run is its images' mean, kept like a network; the attack is given a blurred copy of
each image, and adds what the blur took from the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional

from recon_core.attacks.family_run import Family, TrainedRun, run_result
from recon_core.augment import augment_images
from recon_core.types import Outcome, Progress, RunResult, RunSpec


@dataclass(frozen=True)
class Learned:
    targets: UInt8[Tensor, "n c h w"]
    augment: Float[Tensor, "n 9"]


@dataclass(frozen=True)
class MeanImage:
    mean: Float[Tensor, "c h w"]

    def tensors(self) -> dict[str, Tensor]:
        return {"mean": self.mean}


@dataclass(frozen=True, kw_only=True)
class Blurred(TrainedRun[Learned, MeanImage]):
    family: Literal["blurred"] = "blurred"
    side: int = 3
    attacker_knows: ClassVar[str] = "The attack is given a blurred copy of each picture."
    after_victims: ClassVar[tuple[str, ...]] = ("side",)

    def learn(self, spec: RunSpec, images: UInt8[Tensor, "n c h w"]) -> Learned:
        generator = spec.victim_generator("augment")
        return Learned(*augment_images(images, p=self.augment_p, generator=generator))

    def train_runs(
        self,
        specs: Sequence[RunSpec],
        learned: Sequence[Learned],
        device: torch.device,
        progress: Progress,
    ) -> list[MeanImage]:
        progress(1.0)
        return [MeanImage(own.targets.float().mean(0) / 255) for own in learned]

    def read_victim(
        self, learned: Learned, tensors: Mapping[str, Tensor], device: torch.device
    ) -> MeanImage:
        return MeanImage(tensors["mean"])

    def attack_runs(
        self,
        specs: Sequence[RunSpec],
        victims: Sequence[MeanImage],
        learned: Sequence[Learned],
        device: torch.device,
        progress: Progress,
    ) -> list[RunResult]:
        results = []
        for spec, victim, own in zip(specs, victims, learned, strict=True):
            known = torch.stack([victim.mean, self._blurred(victim.mean[None])[0]])
            x = self._blurred(own.targets.float() / 255) + known[0] - known[1]
            rows = torch.arange(len(x))
            pairs = self.own_pairs(x, own.targets, rows, torch.ones_like(rows))
            results.append(
                run_result(
                    spec,
                    Outcome.OK,
                    own.targets,
                    own.augment,
                    stats={"n_iterations": 1.0},
                    pairs=pairs,
                )
            )
        progress(1.0)
        return results

    def _blurred(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        return functional.avg_pool2d(x, self.side, stride=1, padding=self.side // 2)


def bytes_per_run(experiment: Blurred, n_images: int, shape: tuple[int, int, int]) -> int:
    c, h, w = shape
    return 16 * n_images * c * h * w


FAMILY = Family(Blurred, bytes_per_run)
