"""The vocabulary of the core: what a run is told, and what it gives back.

A *run* trains one victim on one set of images and attacks it once; in a *sweep* several runs attack
the same victim. All randomness of a run comes from `RunSpec.generator`: on a CPU its result is the
same bit for bit whatever it is batched with, on a GPU at the same place in a stack of the same
size, elsewhere up to rounding.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64, UInt8
from torch import Tensor

N_AUGMENT = 9

Progress = Callable[[float], None]
"""Called with the fraction of a batch of runs that is done, from 0 to 1."""


def no_progress(_fraction: float) -> None:
    """A `Progress` that nobody listens to."""


class Outcome(enum.StrEnum):
    """End of a run. Numerical failure is a result, not an exception."""

    OK = "ok"
    UNFITTED = "unfitted"  # the victim did not learn its own training images
    NONFINITE = "nonfinite"  # the training or the attack diverged to NaN or infinity
    STOPPED = "stopped"  # a rule gave the attack up before its last iteration


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One planned run: which images, which labels, which random stream.

    `image_ids` and `labels` have one entry per training image; labels are class indices of the task
    that the victim learns (0 and 1 for a binary one), or of the source, if it learns none. Runs
    with the same `victim` attack the same network, so their images and labels are the same. Random
    numbers are those of `stream` for the attack and `victim_stream` for the victim, by default
    `run` and `victim`; runs of a study's cells share them.
    """

    run: int
    root_seed: int
    image_ids: tuple[int, ...]
    labels: tuple[int, ...]
    victim: int = -1
    stream: int | None = None
    victim_stream: int | None = None

    def __post_init__(self) -> None:
        if len(self.image_ids) != len(self.labels):
            raise ValueError(
                f"run {self.run} has {len(self.image_ids)} image_ids but {len(self.labels)} "
                "labels; give one label per image"
            )
        if self.victim < 0:
            object.__setattr__(self, "victim", self.run)

    def generator(self, purpose: str) -> torch.Generator:
        """A CPU generator that depends on (root_seed, stream, purpose) and on nothing else."""
        stream = self.run if self.stream is None else self.stream
        return seeded_generator(self.root_seed, stream, purpose)

    def victim_generator(self, purpose: str) -> torch.Generator:
        """The same for what makes the victim: all runs that attack it draw the same numbers."""
        stream = self.victim if self.victim_stream is None else self.victim_stream
        return seeded_generator(self.root_seed, stream, purpose)


@runtime_checkable
class Victims(Protocol):
    """Store of trained victims, so that the runs of a sweep need not train theirs again; it may
    forget."""

    def get(self, victim: int) -> Mapping[str, Tensor] | None:
        """The tensors of a victim that was put there; None if there is none."""
        ...

    def put(self, victim: int, tensors: Mapping[str, Tensor]) -> None:
        """Keeps a victim."""
        ...


def seeded_generator(root_seed: int, index: int, purpose: str) -> torch.Generator:
    """A CPU generator seeded by numpy's `SeedSequence((root_seed, index, a hash of purpose))`."""
    digest = hashlib.sha256(purpose.encode()).digest()
    sequence = np.random.SeedSequence((root_seed, index, int.from_bytes(digest[:4], "little")))
    low, high = sequence.generate_state(2, dtype=np.uint32)
    return torch.Generator().manual_seed(int(high) << 32 | int(low))


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """P pairs of a reconstruction and the training image it is matched to.

    `reconstruction` is the raw x of the attack: zero-mean units, arbitrary scale, or, where the
    run's mean image is 0, a picture; see `recon_core.matching.fit_to_range` for how it is shown.
    `target_row` indexes the run's targets. `candidate` and `iteration` say which x, and when it was
    saved.
    """

    reconstruction: Float32[Tensor, "p c h w"]
    target_row: Int64[Tensor, " p"]
    candidate: Int64[Tensor, " p"]
    iteration: Int64[Tensor, " p"]
    ssim_best: Float32[Tensor, " p"]
    ssim_second: Float32[Tensor, " p"]
    confident: Bool[Tensor, " p"]

    def __len__(self) -> int:
        return len(self.target_row)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Result of one run.

    `targets` are the images the victim was trained on, augmentation included, exactly as uint8;
    `mean_image` in [0, 1] is what was subtracted from them (0 everywhere: nothing),
    `margins` how far the victim puts each from its decision boundary (NaN where it has none).
    `stats` holds one float per name in `STATS` (NaN where a quantity does not apply).
    """

    spec: RunSpec
    outcome: Outcome
    targets: UInt8[Tensor, "n c h w"]
    augment: Float32[Tensor, "n 9"]
    mean_image: Float32[Tensor, "c h w"]
    margins: Float32[Tensor, " n"]
    pairs: Pairs
    stats: dict[str, float] = field(default_factory=dict)


STATS = (
    "train_loss",  # the victim's final training loss
    "train_accuracy",  # on its own training images, 0 to 1
    "margin_min",  # smallest y_i phi(x_i) over the training images
    "attack_loss",  # KKT objective at the last iteration, penalties included
    "kkt_residual",  # ||theta - sum lam_i y_i grad phi||^2 / ||theta||^2 at the last iteration
    "residual_relu",  # the same with ReLU's own derivative, which all settings of a sweep share
    "n_iterations",  # how far the attack got
    *("lr", "lam_lr", "sigma", "lam_min", "alpha"),  # its hyperparameters
)
