"""First-order optimisers over stacked runs, updated in place.

A tensor here has a leading run dimension; both update rules are elementwise, so R stacked runs move
exactly as R separate ones would. They exist beside `torch.optim` because the rates may differ from
run to run and because large tensors are updated in cache-sized slices: on a CPU the update of a
victim's first layer is bound by memory traffic, and slicing keeps the five streams of Adadelta
(weight, gradient, two averages, step) in the cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

SLICE = 1 << 17
"""Elements updated at once on a CPU: five float32 streams of this length are 2.5 MiB."""

Rule = Literal["adadelta", "gd"]


@dataclass(frozen=True, kw_only=True)
class Optimiser:
    """An update rule and its constants.

    `adadelta`: Zeiler 2012, with torch's constants rho = 0.9 and eps = 1e-6 (paper 001, section 2,
    uses it with lr = 1 for victims and attack alike). `gd`: gradient descent with momentum, as
    torch's SGD without dampening (Haim et al. use 0 for victims, 0.9 for the attack).
    """

    rule: Rule = "adadelta"
    lr: float = 1.0
    momentum: float = 0.0
    rho: float = 0.9
    eps: float = 1e-6
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr={self.lr} is not a positive number; Adadelta's usual rate is 1")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum} is outside [0, 1)")
        if not 0 <= self.rho < 1:
            raise ValueError(f"rho={self.rho} is outside [0, 1); Adadelta's usual value is 0.9")
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise ValueError(f"eps={self.eps} is not a positive number; the usual value is 1e-6")
        if self.rule == "adadelta" and self.momentum:
            raise ValueError(
                f"momentum={self.momentum} has no meaning for adadelta; use rule='gd' or momentum=0"
            )

    def state(self, parameter: Tensor) -> tuple[Tensor, ...]:
        """Zeroed moving averages for `parameter`."""
        n_averages = 2 if self.rule == "adadelta" else int(self.momentum > 0)
        return tuple(torch.zeros_like(parameter) for _ in range(n_averages))

    def step_(self, parameter: Tensor, gradient: Tensor, state: tuple[Tensor, ...]) -> None:
        """Move `parameter` and `state` in place; all contiguous and of the same shape."""
        flat = (parameter.view(-1), gradient.reshape(-1), *(s.view(-1) for s in state))
        length = SLICE if parameter.device.type == "cpu" else flat[0].numel()
        for parts in zip(*(tensor.split(length) for tensor in flat), strict=True):
            p, g, *averages = parts
            if self.rule == "adadelta":
                self._adadelta_(p, g, *averages)
            elif averages:
                averages[0].mul_(self.momentum).add_(g)
                p.add_(averages[0], alpha=-self.lr)
            else:
                p.add_(g, alpha=-self.lr)

    def _adadelta_(self, p: Tensor, g: Tensor, square_avg: Tensor, delta_avg: Tensor) -> None:
        square_avg.mul_(self.rho).addcmul_(g, g, value=1 - self.rho)
        delta = torch.add(delta_avg, self.eps)
        delta.div_(torch.add(square_avg, self.eps)).sqrt_().mul_(g)
        delta_avg.mul_(self.rho).addcmul_(delta, delta, value=1 - self.rho)
        p.add_(delta, alpha=-self.lr)
