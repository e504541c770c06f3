"""The `instahide` family: encode private images, and recover them (InstaHide paper).

Of a run's images `n_public` are known to everybody. Pixels are 2x - 1 when they are mixed, and back
in [0, 1] in pairs; what comes back is paired with the private image that it is most like.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor
from torch.nn import functional

from recon_core.attacks.family_run import FamilyRun, run_result
from recon_core.attacks.instahide.carlini import SPARE
from recon_core.attacks.instahide.coherence import SIDE
from recon_core.attacks.instahide.mixing import Encodings, InstaHide, Mixing, Scheme
from recon_core.attacks.instahide.natural_fit import Practical
from recon_core.attacks.instahide.practical import recover_practically
from recon_core.strict import Tagged
from recon_core.threads import Shares
from recon_core.types import Outcome, Progress, RunResult, RunSpec

SSIM_SIDE = 11


@dataclass(frozen=True, kw_only=True)
class InstaHideRecovery(FamilyRun):
    """Settings of a run. `n_public`: of the run's images those that the attack knows. `n_encodings`
    of a `theory` scheme; `instahide` makes n_epochs of each private image. `use_labels`: the attack
    has the mixed labels, as it has in the challenge. `keep`: an image is paired with the private
    one that it is nearest to.

    A run is `unfitted` if the attack found no groups of encodings. Statistics: `train_accuracy` is
    the share of encodings that are explained, `n_iterations` the number of encodings.
    """

    family: Literal["instahide"] = "instahide"
    n_public: int = 100
    scheme: Annotated[Scheme, Tagged("kind")] = field(
        default_factory=lambda: InstaHide(k_pub=2, n_epochs=30)
    )
    n_encodings: int = 0
    use_labels: bool = True
    attack: Practical = field(default_factory=Practical)
    task: ClassVar[str] = "images of any class, mixed"
    attacker_knows: ClassVar[str] = (
        "The attack is given mixtures of private and public pictures in which the sign of every"
        " pixel is hidden, the scheme, the public pictures and the mixed labels. It finds out "
        "which pictures are in which mixture and solves for the private ones."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_public < max(self.scheme.k_pub, 1):
            raise ValueError(
                f"n_public={self.n_public} must be at least 1 and scheme.k_pub="
                f"{self.scheme.k_pub}, the public images of an encoding"
            )
        if isinstance(self.scheme, Mixing) != bool(self.n_encodings) or self.n_encodings < 0:
            raise ValueError(
                f"n_encodings={self.n_encodings}: a theory scheme needs it, and instahide has "
                "scheme.n_epochs instead (leave it 0)"
            )

    def check_sweep(self, attacks_per_victim: int) -> None:
        """Raises ValueError for several attacks on one victim: they would differ in nothing but
        the order in which images are found."""
        if attacks_per_victim > 1:
            raise ValueError(
                f"attacks_per_victim={attacks_per_victim}, but attacks on the same encodings give "
                "the same images; set it to 1"
            )

    def check_images(self, n_images: int) -> None:
        n_private = n_images - self.n_public
        if n_private < 3:
            raise ValueError(
                f"{n_images} images of a run less n_public={self.n_public} leave "
                f"{max(n_private, 0)} private ones; encodings mix 2, so that 3 can be told apart"
            )
        m = self.n_made(n_private)
        needed = n_private + round(SPARE * n_private) + 1
        if m < needed:
            raise ValueError(
                f"{m} encodings of {n_private} private images are too few to be told apart; set "
                f"scheme.n_epochs or n_encodings so that there are {needed} or more"
            )

    def n_made(self, n_private: int) -> int:
        if isinstance(self.scheme, InstaHide):
            return self.scheme.n_epochs * n_private
        return self.n_encodings

    def check_batch(self, specs: Sequence[RunSpec], images: UInt8[Tensor, "r n c h w"]) -> None:
        super().check_batch(specs, images)
        self.check_images(images.shape[1])
        side = min(images.shape[3:])
        if side < SSIM_SIDE:
            raise ValueError(f"images of {side} pixels are too small: SSIM needs {SSIM_SIDE}")

    def arithmetic(self, device: torch.device) -> AbstractContextManager[None]:
        del device
        return nullcontext()

    @classmethod
    def wanted_rows(cls, settings: Mapping[str, Any], spec: RunSpec) -> Int64[Tensor, " k"]:
        return two_sets(spec, int(settings["n_public"]))[0]

    def run_stack(
        self,
        specs: Sequence[RunSpec],
        images: UInt8[Tensor, "r n c h w"],
        device: torch.device,
        progress: Progress,
    ) -> list[RunResult]:
        shares = Shares(progress, [1 / len(specs)] * len(specs))
        return [
            self._run(spec, own, device, shares.of(k))
            for k, (spec, own) in enumerate(zip(specs, images, strict=True))
        ]

    def _run(
        self,
        spec: RunSpec,
        images: UInt8[Tensor, "n c h w"],
        device: torch.device,
        progress: Progress,
    ) -> RunResult:
        from scipy.optimize import linear_sum_assignment

        own = self.augmented(spec, images)
        targets = own.targets
        private, public = two_sets(spec, self.n_public)
        pixels = targets.flatten(1).float() * (2 / 255) - 1
        classes = torch.tensor(spec.labels)
        encode: Callable[..., Encodings] = self.scheme.encode
        if isinstance(self.scheme, Mixing):
            encode = partial(self.scheme.encode, m=self.n_encodings)
        made = encode(
            pixels[private],
            pixels[public],
            generator=spec.victim_generator("encodings"),
            labels=functional.one_hot(classes - classes.min()).float()[private],
        )
        assert made.labels is not None
        try:
            found = recover_practically(
                made.y.to(device),
                own.shape,
                mixing=self.scheme,
                public=pixels[public].to(device),
                n_private=len(private),
                labels=made.labels.to(device) if self.use_labels else None,
                generator=spec.generator("attack"),
                how=self.attack,
                progress=progress,
            )
        except np.linalg.LinAlgError:  # scores without structure: no eigenvectors were found
            progress(1.0)
            return run_result(spec, Outcome.UNFITTED, targets, own.augment, stats={}, pairs=None)
        progress(1.0)
        if not bool(found.images.isfinite().all()):
            return run_result(spec, Outcome.NONFINITE, targets, own.augment, stats={}, pairs=None)
        x = ((found.images.cpu().float() + 1) / 2).reshape(-1, *targets.shape[1:])
        truth = targets[private].float() / 255
        apart = torch.cdist(x.flatten(1), truth.flatten(1)).square()
        nearest = torch.from_numpy(linear_sum_assignment(apart.numpy())[1])
        stats = {
            "train_accuracy": float(found.explained.mean()),
            "n_iterations": float(len(found.explained)),
        }
        n_rounds = torch.full((len(x),), self.attack.n_rounds)
        pairs = self.own_pairs(x, targets, private[nearest], n_rounds)
        return run_result(spec, Outcome.OK, targets, own.augment, stats=stats, pairs=pairs)


def two_sets(spec: RunSpec, n_public: int) -> tuple[Int64[Tensor, " a"], Int64[Tensor, " b"]]:
    """(rows of private images, rows of public ones), both rising, by the victim's generator."""
    order = torch.randperm(len(spec.image_ids), generator=spec.victim_generator("public"))
    return order[n_public:].sort().values, order[:n_public].sort().values


def instahide_bytes(
    experiment: InstaHideRecovery, n_images: int, shape: tuple[int, int, int]
) -> int:
    """Bytes of device memory that a run takes at most; `shape` is (c, h, w).

    From counting live float32 tensors. With m encodings and q public images of d pixels, n private
    ones, and w windows of p whitened differences each (w p is 2 d without overlap): 5 w p (m + q)
    and 4 m^2 for windows and scores, or 9 d m and 3 q^2 for the fit; beside them 3 d (m + q + n).
    Runs of a batch go one after another.
    """
    d = math.prod(shape)
    n_private = max(n_images - experiment.n_public, 2)
    m, q = experiment.n_made(n_private), experiment.n_public
    differences = 2 * shape[0] * math.prod(max(side // SIDE, 1) * SIDE for side in shape[1:])
    first = 5 * differences * (m + q) + 4 * m * m
    second = 9 * d * m + 3 * q * q + 2 * m * m
    return 4 * (max(first, second) + 3 * d * (m + q + n_private))
