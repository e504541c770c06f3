"""Our inversion, beside the MixCon paper's: whitened features, Adam from several starts.

A defence that holds against one step size may only have spoilt the step size. The weight of the
regulariser is found on the attacker's own images (`errors_by_zeta`), never on the victim's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from recon_core.attacks.inversion.feature_matching import (
    Features,
    Inverted,
    check_features,
    descend,
    penalised,
)
from recon_core.optimisers import Optimiser
from recon_core.strict import Count, NonNegative, Positive, Strict

ZETAS = (0.0, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Weights to try; where the last is the best, try more."""


Start = Literal["zeros", "grey", "noise"]
Whitening = Float[Tensor, " m"]
"""1 over the spread of each of m features."""
SHRINKAGE = 0.5


def whiten(features: Float[Tensor, "n m"]) -> Whitening:
    """1 / sqrt((1 - SHRINKAGE) v + SHRINKAGE mean(v)), v the variances of m features.

    Features c h + b whiten to what h does, whatever c and b are. The shrinkage is what a feature
    that never moved is divided by; with little of it the features that are rarely active weigh most
    and the descent stalls (over a random layer of 40 ReLUs, .01 ended 100 times as far from some
    images as .5). Features that are all constant stay as they are. Raises ValueError for fewer than
    two images, or features that are not finite.
    """
    if len(features) < 2 or not bool(features.isfinite().all()):
        raise ValueError(
            f"features of {len(features)} public images; need at least two, all of them finite"
        )
    exact = features.detach().double()
    mean_variance = exact.var(0, correction=0).mean()
    if float(mean_variance) == 0:
        return torch.ones_like(features[0])
    exact = (exact - exact.mean(0)) / mean_variance.sqrt()
    variance = (1 - SHRINKAGE) * exact.square().mean(0) + SHRINKAGE
    return (variance * mean_variance).rsqrt().to(features.dtype)


@dataclass(frozen=True, kw_only=True)
class StrongInversion(Strict):
    """Adam with a cosine falling rate from several starts; the best end by the objective is kept.

        min over s of 1/m ||W (h(s) - z)||^2 + zeta / n TV(s),     s in [0, 1]

    for m features and n pixels, channels counted, with W the diagonal `Whitening` that is given
    (else the identity). Every step ends with the projection onto the range. The rate at step k of K
    is lr (1 + cos(pi k / K)) / 2 (Loshchilov and Hutter 2017, eq. 5, without its restarts).
    `starts`, all solved together: "zeros", "grey" (.5), "noise" (uniform in the range; drawn anew
    as often as it is named).
    """

    kind: Literal["strong"] = "strong"
    zeta: NonNegative = 0.1
    lr: Positive = 0.05
    n_steps: Count = 1000
    starts: tuple[Start, ...] = ("grey", "noise", "noise")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.starts:
            raise ValueError("starts is empty; give at least one")

    def invert(
        self,
        h: Features,
        z: Float[Tensor, "b m"],
        *,
        shape: tuple[int, int, int],
        generators: Sequence[torch.Generator] = (),
        whitening: Whitening | None = None,
    ) -> Inverted:
        """Images of `shape` (c, h, w) whose features are z, in the dtype and on the device of z. A
        start "noise" takes a CPU generator per image. Raises ValueError for features that are not
        finite or not as many as z or the whitening has."""
        return self._solve(h, z, self._starts(z, shape, generators), whitening)

    def _starts(
        self, z: Float[Tensor, "b m"], shape: tuple[int, ...], generators: Sequence[torch.Generator]
    ) -> Float[Tensor, "k b c h w"]:
        if "noise" in self.starts and len(generators) != len(z):
            raise ValueError(
                f"start='noise' needs one generator per image: {len(generators)} for {len(z)}"
            )
        images = []
        for start in self.starts:
            if start == "noise":
                drawn = [torch.rand(*shape, generator=g, dtype=torch.float64) for g in generators]
                images.append(torch.stack(drawn).to(z.device, z.dtype))
            else:
                images.append(z.new_full((len(z), *shape), 0.5 if start == "grey" else 0.0))
        return torch.stack(images)

    def _solve(
        self,
        h: Features,
        z: Float[Tensor, "b m"],
        starts: Float[Tensor, "k b c h w"],
        whitening: Whitening | None,
    ) -> Inverted:
        s, wanted = starts.flatten(0, 1), z.repeat(len(starts), 1)
        check_features(h, s, z)
        if whitening is not None and len(whitening) != z.shape[1]:
            raise ValueError(
                f"the whitening is of {len(whitening)} features and z has {z.shape[1]}; "
                "whiten features of the same cut"
            )

        def objective(x: Tensor) -> Tensor:
            difference = h(x).to(z.dtype) - wanted
            scaled = difference if whitening is None else difference * whitening.to(difference)
            return penalised(scaled.square().mean(1), self.zeta / x[0].numel(), x)

        found = descend(
            objective,
            s,
            optimiser=Optimiser(rule="adam", lr=self.lr),
            n_steps=self.n_steps,
            rate=lambda k: self.lr * (1 + math.cos(math.pi * k / self.n_steps)) / 2,
        )
        # of every image the start that ended lowest; finite objectives come first
        value = found.objective.view(len(starts), -1)
        best = value.nan_to_num(nan=math.inf).argmin(0)
        rows = best * len(z) + torch.arange(len(z), device=z.device)
        n_steps = found.n_steps.view(len(starts), -1).sum(0)
        return Inverted(found.x[rows], found.objective[rows], found.ending[rows], n_steps)


def errors_by_zeta(
    method: StrongInversion,
    h: Features,
    public: Float[Tensor, "n c h w"],
    zetas: Sequence[float] = ZETAS,
    *,
    generators: Sequence[torch.Generator] = (),
    whitening: Whitening | None = None,
) -> Float64[Tensor, " g"]:
    """The mean squared error of public images recovered from their features, for each zeta, from
    the same starts. Raises ValueError for no zetas, one that is negative, or no images."""
    if not len(zetas) or not len(public):
        raise ValueError(f"{len(zetas)} zetas and {len(public)} public images; need one of each")
    with torch.no_grad():
        z = h(public)
    starts = method._starts(z, public.shape[1:], generators)
    means = []
    for zeta in zetas:
        found = dataclasses.replace(method, zeta=zeta)._solve(h, z, starts, whitening)
        means.append((found.x.double() - public.double()).square().mean())
    return torch.stack(means)
