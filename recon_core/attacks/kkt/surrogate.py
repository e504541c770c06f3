"""The derivative of the activation that the attack works with, and the derivative of that.

Haim et al. 2022 keep ReLU in the forward pass and use sigma(alpha z), the derivative of a softplus,
wherever a derivative is taken. (KKT paper, appendix B, writes alpha sigma(z); the code has
sigma(alpha z).) With an infinite alpha s is ReLU's own derivative, 0 at 0, and s' is undefined.

    ReLU:        s = sigma(alpha z)                    s' = alpha sigma (1 - sigma)
    leaky ReLU:  s = p + (1 - p) sigma(alpha z)        s' = (1 - p) alpha sigma (1 - sigma), ours
    GELU:        s = GELU'(z)                          s' = GELU''(z), whatever alpha is
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.victims.network import Network, gelu_curvature, gelu_slope


class Surrogate:
    """f, s = f' and s' = f'' of Q attacks; `alpha` (Q,) may differ from attack to attack."""

    def __init__(self, network: Network, alpha: Float[Tensor, " q"]) -> None:
        self.network = network
        # One number where it is the same for all: elementwise kernels are faster with a scalar.
        same = len(alpha) == 1 or bool((alpha == alpha[0]).all())
        self.alpha: float | Tensor = float(alpha[0]) if same else alpha[:, None, None]
        self.rise = 1.0 - network.leak if network.activation == "leaky_relu" else 1.0

    def activate_(self, z: Float[Tensor, "q m o"], out: Float[Tensor, "q m o"]) -> None:
        if self.network.activation == "relu":
            torch.clamp_min(z, 0.0, out=out)
        elif self.network.activation == "leaky_relu":
            torch.ops.aten.leaky_relu.out(z, self.network.leak, out=out)
        else:
            torch.ops.aten.gelu.out(z, out=out)

    def slope_(self, z: Float[Tensor, "q m o"], out: Float[Tensor, "q m o"]) -> None:
        if self.network.activation == "gelu":
            out.copy_(gelu_slope(z))
            return
        if isinstance(self.alpha, float) and math.isinf(self.alpha):
            out.copy_(z > 0)
        else:
            torch.mul(z, self.alpha, out=out).sigmoid_()
        if self.rise < 1:
            out.mul_(self.rise).add_(1.0 - self.rise)

    def times_curvature_(
        self, v: Float[Tensor, "q m o"], z: Float[Tensor, "q m o"], slope: Float[Tensor, "q m o"]
    ) -> None:
        """v *= s'(z), given `slope` = s(z)."""
        if self.network.activation == "gelu":
            v.mul_(gelu_curvature(z))
        elif self.rise < 1:
            # sigma = (s - p) / (1 - p), so s' = alpha (s - p) (1 - s) / (1 - p).
            v.mul_(slope - (1.0 - self.rise)).mul_(1.0 - slope).mul_(self.alpha).mul_(1 / self.rise)
        else:
            v.mul_(slope)
            v.addcmul_(v, slope, value=-1.0)
            v.mul_(self.alpha)
