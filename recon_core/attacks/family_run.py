"""Runs of any attack family: settings, batches and results."""

from __future__ import annotations

import math
import sys
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from itertools import accumulate, groupby
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor

from recon_core.attacks.candidate_matching import no_pairs, own_pairs
from recon_core.augment import augment_images
from recon_core.precision import float32_arithmetic
from recon_core.sampling import class_labels
from recon_core.strict import Share, Strict
from recon_core.threads import (
    AtOnce,
    Shares,
    one_after_another,
    share_of,
    side_by_side,
    stack_size,
)
from recon_core.types import (
    STATS,
    Outcome,
    Pairs,
    Progress,
    RunResult,
    RunSpec,
    Victims,
    no_progress,
)

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@runtime_checkable
class Keepable(Protocol):
    """A trained victim, which can be stored as tensors on the CPU."""

    def tensors(self) -> dict[str, Tensor]: ...


Own = TypeVar("Own")
Victim = TypeVar("Victim", bound=Keepable)


@dataclass(frozen=True)
class Learned:
    """Augmented training images of a victim, and their augmentation labels."""

    targets: UInt8[Tensor, "n c h w"]
    augment: Float[Tensor, "n 9"]

    @property
    def shape(self) -> tuple[int, int, int]:
        c, h, w = self.targets.shape[1:]
        return c, h, w


@dataclass(frozen=True, kw_only=True)
class FamilyRun(Strict, ABC):
    """Settings common to runs of every family; each family adds its own.

    `augment_p`: probability of each augmentation (Karras et al. 2022). `keep`: whether pairs of
    confident reconstructions are kept, as in a dataset, or all pairs, as an evaluation needs. A
    reconstruction is confident if its SSIM to its image is above `confident_ssim` and exceeds that
    to any other image of the run by at least `confident_gap`. `after_victims` names the settings
    that do not affect how victims are trained.
    """

    family: str
    augment_p: Share = 0.0
    keep: Literal["confident", "all"] = "confident"
    confident_ssim: float = 0.4
    confident_gap: float = 0.05
    task: ClassVar[str] = "images of any class"
    attacker_knows: ClassVar[str] = "The attack never sees the training pictures."
    after_victims: ClassVar[tuple[str, ...]] = ()

    @property
    def n_labels(self) -> int | None:
        """Number of labels among which a run's images are balanced; None: labels are ignored."""
        return None

    @property
    def saved_iterations(self) -> tuple[int, ...]:
        """Iterations of the attack at which pairs are saved, if set; 0 is before the first."""
        return ()

    @property
    def at_once(self) -> AtOnce:
        """How the jobs of a batch share the machine."""
        return side_by_side

    def labels_of(
        self, labels: npt.NDArray[np.int64], names: tuple[str, ...]
    ) -> tuple[npt.NDArray[np.int64], str]:
        """(label per image, the task in words), from the source's classes and their names. Images
        that victims are not trained on have label -1."""
        if self.n_labels is None:
            return labels.astype(np.int64), self.task
        return class_labels(labels, names, self.n_labels)

    def check_sweep(self, attacks_per_victim: int) -> None:
        """Raises ValueError if one victim cannot be attacked by this number of runs."""
        del attacks_per_victim

    def check_images(self, n_images: int) -> None:
        """Raises ValueError if a run cannot have this number of images."""
        del n_images

    def check_batch(self, specs: Sequence[RunSpec], images: UInt8[Tensor, "r n c h w"]) -> None:
        """Raises ValueError if the runs cannot form one batch."""
        if len(specs) != len(images):
            raise ValueError(f"{len(specs)} specs came with images of {len(images)} runs")
        for spec in specs:
            if len(spec.image_ids) != images.shape[1]:
                raise ValueError(
                    f"run {spec.run} plans {len(spec.image_ids)} images, the batch has "
                    f"{images.shape[1]}; runs of one batch must have equally many"
                )

    def arithmetic(self, device: torch.device) -> AbstractContextManager[None]:
        """Precision of products and convolutions: full float32."""
        return float32_arithmetic("float32", device)

    @classmethod
    def wanted_rows(cls, settings: Mapping[str, Any], spec: RunSpec) -> Int64[Tensor, " k"]:
        """Rows of the run's images that the attack targets; `settings` as in a store's manifest."""
        del settings
        return torch.arange(len(spec.image_ids))

    def run_batch(
        self,
        specs: Sequence[RunSpec],
        images: UInt8[Tensor, "r n c h w"],
        *,
        device: torch.device,
        progress: Progress = no_progress,
        victims: Victims | None = None,
    ) -> list[RunResult]:
        """Train and attack R victims; one result per spec, in order.

        `images[i]` are the images of `specs[i]`, before augmentation. On a GPU the runs form one
        stack; results do not depend on the others in it, up to rounding. On a CPU a run is bit for
        bit the same in any batch if torch has one thread; with more, runs go side by side, each on
        one thread. Consecutive specs with the same victim attack one network, which is read from
        `victims` if stored there, and stored once trained.
        """
        self.check_batch(specs, images)
        sweeps = [len(list(group)) for _, group in groupby(specs, key=lambda spec: spec.victim)]
        is_alone = len(sweeps) == len(specs) and victims is None
        size = stack_size(device, len(specs))
        sizes = [size] * (len(specs) // size) if is_alone else sweeps
        shares = Shares(progress, [n / len(specs) for n in sizes])
        run = self.run_stack if is_alone else partial(self.run_sweep, victims)
        jobs = [
            partial(run, specs[end - n : end], images[end - n : end], device, shares.of(k))
            for k, (n, end) in enumerate(zip(sizes, accumulate(sizes), strict=True))
        ]
        at_once = self.at_once if is_alone else one_after_another
        with self.arithmetic(device):
            return [result for results in at_once(jobs, device) for result in results]

    def train_victim(
        self,
        spec: RunSpec,
        images: UInt8[Tensor, "n c h w"],
        *,
        device: torch.device,
        victims: Victims | None = None,
    ) -> Any:
        """The victim of a run, where the family trains one; None here."""
        del spec, images, device, victims

    @abstractmethod
    def run_stack(
        self,
        specs: Sequence[RunSpec],
        images: UInt8[Tensor, "r n c h w"],
        device: torch.device,
        progress: Progress,
    ) -> list[RunResult]:
        """Runs with a victim of their own."""

    def run_sweep(
        self,
        victims: Victims | None,
        specs: Sequence[RunSpec],
        images: UInt8[Tensor, "r n c h w"],
        device: torch.device,
        progress: Progress,
    ) -> list[RunResult]:
        """Runs that attack one victim; by default it is made again in each, which is cheap."""
        del victims
        return self.run_stack(specs, images, device, progress)

    def augmented(self, spec: RunSpec, images: UInt8[Tensor, "n c h w"]) -> Learned:
        generator = spec.victim_generator("augment")
        return Learned(*augment_images(images, p=self.augment_p, generator=generator))

    def own_pairs(
        self,
        x: Float[Tensor, "b c h w"],
        targets: UInt8[Tensor, "n c h w"],
        target_row: Int64[Tensor, " b"],
        iterations: Int64[Tensor, " b"],
    ) -> Pairs:
        """Pairs of pictures in [0, 1], each reconstructed from knowledge of one image."""
        return own_pairs(
            x,
            targets,
            target_row,
            iterations=iterations,
            keep=self.keep,
            threshold=self.confident_ssim,
            gap=self.confident_gap,
        )


@dataclass(frozen=True, kw_only=True)
class TrainedRun(FamilyRun, Generic[Own, Victim]):
    """A family whose runs train a victim on their images and attack it."""

    @abstractmethod
    def learn(self, spec: RunSpec, images: UInt8[Tensor, "n c h w"]) -> Own:
        """Training images of a victim."""

    @abstractmethod
    def train_runs(
        self,
        specs: Sequence[RunSpec],
        learned: Sequence[Own],
        device: torch.device,
        progress: Progress,
    ) -> list[Victim]:
        """The victims of R runs, trained together."""

    @abstractmethod
    def read_victim(
        self, learned: Own, tensors: Mapping[str, Tensor], device: torch.device
    ) -> Victim:
        """The victim stored as these tensors."""

    def sweep_size(self, device: torch.device) -> int:
        """Number of attacks of a sweep in one stack: one on a CPU, otherwise all."""
        return 1 if device.type == "cpu" else sys.maxsize

    @abstractmethod
    def attack_runs(
        self,
        specs: Sequence[RunSpec],
        victims: Sequence[Victim],
        learned: Sequence[Own],
        device: torch.device,
        progress: Progress,
    ) -> list[RunResult]:
        """The results of R runs on their victims."""

    def train_victim(
        self,
        spec: RunSpec,
        images: UInt8[Tensor, "n c h w"],
        *,
        device: torch.device,
        victims: Victims | None = None,
    ) -> Victim:
        """Train the victim of a sweep as `run_batch` would, or read it from `victims`."""
        self.check_batch([spec], images[None])
        with self.arithmetic(device):
            return self._shared(spec, self.learn(spec, images), device, victims, no_progress)

    def run_stack(
        self,
        specs: Sequence[RunSpec],
        images: UInt8[Tensor, "r n c h w"],
        device: torch.device,
        progress: Progress,
    ) -> list[RunResult]:
        learned = [self.learn(spec, own) for spec, own in zip(specs, images, strict=True)]
        trained = self.train_runs(specs, learned, device, share_of(progress, 0.0, 0.5))
        return self.attack_runs(specs, trained, learned, device, share_of(progress, 0.5, 1.0))

    def run_sweep(
        self,
        victims: Victims | None,
        specs: Sequence[RunSpec],
        images: UInt8[Tensor, "r n c h w"],
        device: torch.device,
        progress: Progress,
    ) -> list[RunResult]:
        self.check_sweep(attacks_per_victim=2)
        learned, half = self.learn(specs[0], images[0]), share_of(progress, 0.0, 0.5)
        victim = self._shared(specs[0], learned, device, victims, half)

        def attack(stack: Sequence[RunSpec], part: Progress) -> list[RunResult]:
            n = len(stack)
            return self.attack_runs(stack, [victim] * n, [learned] * n, device, part)

        size = self.sweep_size(device)
        stacks = [specs[first : first + size] for first in range(0, len(specs), size)]
        rest = share_of(progress, 0.5, 1.0)
        shares = Shares(rest, [len(stack) / len(specs) for stack in stacks])
        jobs = [partial(attack, stack, shares.of(k)) for k, stack in enumerate(stacks)]
        return [result for results in self.at_once(jobs, device) for result in results]

    def _shared(
        self,
        spec: RunSpec,
        learned: Own,
        device: torch.device,
        victims: Victims | None,
        progress: Progress,
    ) -> Victim:
        known = None if victims is None else victims.get(spec.victim)
        if known is not None:
            progress(1.0)
            return self.read_victim(learned, known, device)
        (trained,) = self.train_runs([spec], [learned], device, progress)
        if victims is not None:
            victims.put(spec.victim, trained.tensors())
        return trained


def run_result(
    spec: RunSpec,
    outcome: Outcome,
    targets: UInt8[Tensor, "n c h w"],
    augment: Float[Tensor, "n 9"],
    *,
    stats: Mapping[str, float],
    pairs: Pairs | None = None,
    mean_image: Float[Tensor, "c h w"] | None = None,
    margins: Float32[Tensor, " n"] | None = None,
) -> RunResult:
    """The result of a run. Missing statistics and margins are NaN; a missing `mean_image` is 0,
    for reconstructions that are pictures in [0, 1]."""
    shape = targets.shape[1:]
    return RunResult(
        spec=spec,
        outcome=outcome,
        targets=targets,
        augment=augment,
        mean_image=torch.zeros(shape) if mean_image is None else mean_image,
        margins=torch.full((len(targets),), math.nan) if margins is None else margins,
        pairs=no_pairs(shape) if pairs is None else pairs,
        stats=dict.fromkeys(STATS, math.nan) | dict(stats),
    )


GROUP = "palimpsest.families"


@dataclass(frozen=True)
class Family:
    """The settings class of a family's runs, and a function that bounds the bytes of device memory
    of a run, by its settings, number of images and their shape (c, h, w)."""

    experiment: type[FamilyRun]
    bytes_per_run: Callable[[Any, int, tuple[int, int, int]], int]

    @property
    def name(self) -> str:
        """The tag: the only value of `family`."""
        (tag,) = typing.get_args(typing.get_type_hints(self.experiment)["family"])
        return str(tag)


def registered(*own: Family) -> dict[str, Family]:
    """Families by name: `own`, whose first is the default of settings, then those of installed
    packages. Raises ValueError if an entry point is no `Family` or repeats a name."""
    families = {family.name: family for family in own}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        family = point.load()
        if not isinstance(family, Family) or family.name in families:
            why = "is no Family" if not isinstance(family, Family) else "has another family's name"
            raise ValueError(
                f"entry point {point.name} = {point.value} of {GROUP} {why}; mend or uninstall "
                "the package that publishes it"
            )
        families[family.name] = family
    return families
