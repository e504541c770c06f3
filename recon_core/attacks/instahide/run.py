"""The `instahide` family: encode private images, and recover them (InstaHide paper).

Of a run's images `n_public` are known to everybody. Pixels are 2x - 1 when they are mixed, and back
in [0, 1] in pairs; what comes back is paired with the private image that it is most like.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from torch.nn import functional

from recon_core.attacks.family_run import FamilyRun, Learned, run_result
from recon_core.attacks.instahide.mixing import InstaHide, Mixing, Scheme
from recon_core.attacks.instahide.practical import Practical, recover_practically
from recon_core.attacks.instahide.recover import Recovered
from recon_core.tagged import Tagged
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
        needed = n_private + round(self.attack.components.spare * n_private) + 1
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
        if side < max(self.attack.windows.side, SSIM_SIDE):
            raise ValueError(
                f"images of {side} pixels are too small: windows have "
                f"{self.attack.windows.side}, SSIM {SSIM_SIDE}"
            )

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
        own = self.augmented(spec, images)
        targets = own.targets
        private, public = two_sets(spec, self.n_public)
        pixels = (targets.flatten(1).float() * (2 / 255) - 1).to(device)
        y, labels = self._encoded(spec, pixels, private, public)
        found: Recovered | None = None
        try:
            found = recover_practically(
                y,
                own.shape,
                mixing=self.scheme,
                public=pixels[public.to(device)],
                n_private=len(private),
                labels=labels if self.use_labels else None,
                generator=spec.generator("attack"),
                how=self.attack,
                progress=progress,
            )
        except np.linalg.LinAlgError:
            found = None  # scores without structure: no eigenvectors were found
        progress(1.0)
        return self._result(spec, own, private, found)

    def _encoded(
        self,
        spec: RunSpec,
        pixels: Float[Tensor, "n d"],
        private: Int64[Tensor, " a"],
        public: Int64[Tensor, " b"],
    ) -> tuple[Float[Tensor, "m d"], Float[Tensor, "m n_classes"]]:
        drawn = spec.victim_generator("encodings")
        own, others = pixels.cpu()[private], pixels.cpu()[public]
        classes = torch.tensor(spec.labels)
        labels = functional.one_hot(classes - classes.min()).float()[private]
        if isinstance(self.scheme, InstaHide):
            made = self.scheme.encode(own, others, generator=drawn, labels=labels)
        else:
            made = self.scheme.encode(own, others, self.n_encodings, generator=drawn, labels=labels)
        assert made.labels is not None
        return made.y.to(pixels), made.labels.to(pixels)

    def _result(
        self,
        spec: RunSpec,
        own: Learned,
        private: Int64[Tensor, " a"],
        found: Recovered | None,
    ) -> RunResult:
        stats, pairs, outcome, targets = {}, None, Outcome.UNFITTED, own.targets
        if found is not None and bool(found.images.isfinite().all()):
            outcome = Outcome.OK
            x = ((found.images.cpu().float() + 1) / 2).reshape(-1, *targets.shape[1:])
            stats = {
                "train_accuracy": float(found.explained.mean()),
                "n_iterations": float(len(found.explained)),
            }
            truth = targets[private].float() / 255
            n_rounds = torch.full((len(x),), self.attack.refinement.n_rounds)
            pairs = self.own_pairs(x, targets, private[nearest(x, truth)], n_rounds)
        elif found is not None:
            outcome = Outcome.NONFINITE
        return run_result(spec, outcome, targets, own.augment, stats=stats, pairs=pairs)


def two_sets(spec: RunSpec, n_public: int) -> tuple[Int64[Tensor, " a"], Int64[Tensor, " b"]]:
    """(rows of private images, rows of public ones), both rising, by the victim's generator."""
    order = torch.randperm(len(spec.image_ids), generator=spec.victim_generator("public"))
    return order[n_public:].sort().values, order[:n_public].sort().values


def nearest(x: Float[Tensor, "n c h w"], truth: Float[Tensor, "n c h w"]) -> Int64[Tensor, " n"]:
    """The true image that each found one is: together nearest, by squared distance."""
    apart = torch.cdist(x.flatten(1), truth.flatten(1)).square()
    from scipy.optimize import linear_sum_assignment

    return torch.from_numpy(linear_sum_assignment(apart.numpy())[1])


PER_WINDOW, PER_SCORE, PER_FITTED, PER_ATOM, PER_PIXEL = 5.0, 4.0, 9.0, 3.0, 3.0
FLOAT = 4


def instahide_bytes(
    experiment: InstaHideRecovery, n_images: int, shape: tuple[int, int, int]
) -> int:
    """Bytes of device memory that a run takes at most; `shape` is (c, h, w).

    From counting live float32 tensors. With m encodings and q public images of d pixels, n private
    ones, and w windows of p whitened differences each (w p is 2 d without overlap): 5 w p (m + q)
    and 4 m^2 for windows and scores, or 9 d m and 3 q^2 for the fit; beside them 3 d (m + q + n).
    Runs of a batch go one after another.
    """
    d, windows = math.prod(shape), experiment.attack.windows
    n_private = max(n_images - experiment.n_public, 2)
    m, q = experiment.n_made(n_private), experiment.n_public
    n_windows = math.prod(max(windows.n_along(side), 1) for side in shape[1:])
    differences = n_windows * 2 * shape[0] * windows.side**2
    first = PER_WINDOW * differences * (m + q) + PER_SCORE * m * m
    second = PER_FITTED * d * m + PER_ATOM * q * q + 2.0 * m * m
    return int(FLOAT * (max(first, second) + PER_PIXEL * d * (m + q + n_private)))
