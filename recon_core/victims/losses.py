"""The losses that victims are trained with: value, gradient in the outputs, and margins.

All are means over the n images, and all stay exact where |phi| is large: the attack lives off what
is left of the gradient when a victim has long fitted its images. bce: image restoration paper,
section 2; ce: KKT paper, section 4; the others, for regression: KKT paper, section 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from recon_core.strict import Strict, Within

Kind = Literal["bce", "ce", "mse", "power", "huber"]


@dataclass(frozen=True, kw_only=True)
class Loss(Strict):
    """Settings of a loss. `bce` (with logits), `mse`, `power`, `huber`: one output, y in {-1, +1},
    float (R, n). `ce`: C outputs, y the classes, integers (R, n). `power`: p of |phi - y|^p.
    `delta`: where Huber's loss turns from square to linear, as torch's."""

    kind: Kind = "bce"
    power: Annotated[float, Within("(1, inf)", fix="the KKT paper uses 2.5")] = 2.5
    delta: Annotated[float, Within("(0, inf)", fix="torch's default is 1")] = 1.0

    def check(self, y: Shaped[Tensor, "r n"], n_outputs: int) -> None:
        """ValueError if these labels or that number of outputs do not go with the loss."""
        if (self.kind == "ce") != (n_outputs > 1):
            raise ValueError(
                f"loss {self.kind!r} on {n_outputs} outputs; 'ce' needs one per class, 2 or more, "
                "the others exactly 1"
            )
        if self.kind == "ce":
            if y.is_floating_point() or bool(((y < 0) | (y >= n_outputs)).any()):
                raise ValueError(
                    f"labels are {_some(y)} ({y.dtype}); 'ce' needs integer classes from 0 to "
                    f"{n_outputs - 1}"
                )
        elif not y.is_floating_point() or bool((y.abs() != 1).any()):
            raise ValueError(
                f"labels are {_some(y)} ({y.dtype}); {self.kind!r} needs -1 and +1 as floating "
                "point numbers, for example 2 * classes - 1"
            )

    def value(self, phi: Float[Tensor, "r n c"], y: Shaped[Tensor, "r n"]) -> Float[Tensor, " r"]:
        """Every run's mean over its images."""
        if self.kind == "bce":
            return -F.logsigmoid(y * phi.squeeze(2)).mean(1)
        if self.kind == "ce":
            others = _without(phi, y, -math.inf).logsumexp(2)
            return -F.logsigmoid(_own(phi, y) - others).mean(1)
        error = phi.squeeze(2) - y
        if self.kind == "mse":
            return error.square().mean(1)
        if self.kind == "power":
            return error.abs().pow(self.power).mean(1)
        inside = error.abs().clamp_max(self.delta)
        return (inside * (error.abs() - inside / 2)).mean(1)

    def gradient(
        self, phi: Float[Tensor, "r n c"], y: Shaped[Tensor, "r n"]
    ) -> Float[Tensor, "r n c"]:
        """The derivative of the mean with respect to every output."""
        n = phi.shape[1]
        if self.kind == "ce":
            # The own class gets minus the sum of the others: p_y - 1 would lose it to rounding.
            p = _without(torch.softmax(phi, 2), y, 0.0)
            return p.scatter(2, y.unsqueeze(2), -p.sum(2, keepdim=True)).div_(n)
        target = y.unsqueeze(2)
        if self.kind == "bce":
            return torch.sigmoid(-target * phi).mul_(target).div_(-n)
        error = phi - target
        if self.kind == "mse":
            return error.mul_(2 / n)
        if self.kind == "power":
            return error.abs().pow_(self.power - 1).mul_(error.sign_()).mul_(self.power / n)
        return error.clamp_(-self.delta, self.delta).div_(n)

    def margins(
        self, phi: Float[Tensor, "r n c"], y: Shaped[Tensor, "r n"]
    ) -> Float[Tensor, "r n"]:
        """y phi(x), or with classes phi_y - max over the others: above 0 is right."""
        if self.kind == "ce":
            return _own(phi, y) - _without(phi, y, -math.inf).amax(2)
        return y * phi.squeeze(2)


def _own(phi: Float[Tensor, "r n c"], y: Shaped[Tensor, "r n"]) -> Float[Tensor, "r n"]:
    return phi.gather(2, y.unsqueeze(2)).squeeze(2)


def _without(
    phi: Float[Tensor, "r n c"], y: Shaped[Tensor, "r n"], value: float
) -> Float[Tensor, "r n c"]:
    return phi.scatter(2, y.unsqueeze(2), value)


def _some(y: Tensor) -> str:
    values = y.unique().tolist()
    return f"{values[:8]}" + (" and more" if len(values) > 8 else "")
