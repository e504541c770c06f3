"""The layers of a network under attack: their products with the weights and with their residual.

`stationarity` says what M, N and the two forms are. A dense layer of i inputs and o outputs costs,
beside its products with the weights, 3 m i o multiply-adds in direct form and 2 m^2 (i + o) in Gram
form. A convolution's kernel is small and its gradient sums over many positions: always direct.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.victims.network import Architecture, Network, Parameters, gelu_curvature, gelu_slope

Form = Literal["auto", "gram", "direct"]


def cheaper_form(n_candidates: int, fan_in: int, fan_out: int) -> Literal["gram", "direct"]:
    gram = 2 * n_candidates * (fan_in + fan_out)
    return "gram" if gram < 3 * fan_in * fan_out else "direct"


class Dense:
    """A dense layer of Q attacks; `weight` is (Q, o, i), or (1, o, i) shared by all."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, n_attacks: int, m: int, *, gram: bool
    ) -> None:
        self.weight, self.bias, self.gram = weight, bias, gram
        self.shared = len(weight) == 1 < n_attacks
        self.n_out, n_in = weight.shape[1], weight.shape[2]
        new = weight.new_empty
        self.u = new(n_attacks, m, self.n_out)
        self.m = new(n_attacks, m, self.n_out)
        self.pushed = new(n_attacks, m, self.n_out)
        self.scaled = new(n_attacks, m, self.n_out)
        if gram:
            self.theta_square = Parameters((weight,), (bias,)).squared_norm().to(weight.dtype)
            self.gram_a, self.gram_d = new(n_attacks, m, m), new(n_attacks, m, m)
        else:
            self.residual = new(n_attacks, self.n_out, n_in)
            self.residual_b = new(n_attacks, self.n_out)

    def forward(self, a: Float[Tensor, "q m i"]) -> None:
        """u = a W^T + b."""
        self._times(a, self.weight.mT, self.u)
        if self.bias is not None:
            self.u.add_(self.bias.unsqueeze(1))

    def down(self, v: Float[Tensor, "q m o"], out: Float[Tensor, "q m i"]) -> None:
        """out = v W."""
        self._times(v, self.weight, out)

    def up(self, v: Float[Tensor, "q m i"]) -> None:
        """pushed = v W^T."""
        self._times(v, self.weight.mT, self.pushed)

    def explicit(self, a: Tensor, d: Tensor, c: Float[Tensor, "q m"]) -> None:
        """M, and what N needs later: the Gram matrix of d, or the residual."""
        if self.gram:
            torch.bmm(a, a.mT, out=self.gram_a)
            if self.bias is not None:
                self.gram_a.add_(1.0)
            self.gram_a.mul_(c.unsqueeze(1))
            torch.baddbmm(self.u, self.gram_a, d, alpha=-1.0, out=self.m)
            torch.bmm(d, d.mT, out=self.gram_d)
            self.gram_d.mul_(c.unsqueeze(1)).mul_(c.unsqueeze(2))
            return
        torch.mul(d, c.unsqueeze(-1), out=self.scaled)
        torch.baddbmm(self.weight, self.scaled.mT, a, alpha=-1.0, out=self.residual)
        torch.bmm(a, self.residual.mT, out=self.m)
        if self.bias is not None:
            torch.sum(self.scaled, 1, out=self.residual_b)
            torch.sub(self.bias, self.residual_b, out=self.residual_b)
            self.m.add_(self.residual_b.unsqueeze(1))

    def residual_square(self, d: Tensor, c: Tensor, d_dot_m: Tensor) -> Float[Tensor, " q"]:
        """||R||^2 + ||r||^2, with `d_dot_m` = <d_i, M_i>."""
        if self.gram:  # ||theta||^2 - 2 c.t + c^T K c with t_i = <d_i, u_i> and K c = t - d_dot_m
            return self.theta_square - (c * ((d * self.u).sum(-1) + d_dot_m)).sum(-1)
        total: Tensor = self.residual.square().flatten(1).sum(1)
        return total if self.bias is None else total + self.residual_b.square().sum(1)

    def adjoint_input(
        self,
        adjoint_u: Tensor | None,
        a: Tensor,
        d: Tensor,
        c: Tensor,
        out: Tensor,
        *,
        scale: float = 1.0,
        keep: float = 0.0,
    ) -> None:
        """out = keep out + scale (adjoint_u W - C N); `adjoint_u` is None for 0, and is changed."""
        if not self.gram:
            torch.mul(d, c.unsqueeze(-1), out=self.scaled)
            torch.baddbmm(out, self.scaled, self.residual, beta=keep, alpha=-scale, out=out)
            if adjoint_u is not None:
                self._times(adjoint_u, self.weight, out, keep=1.0, scale=scale)
            return
        if adjoint_u is None:
            adjoint_u = torch.mul(d, c.unsqueeze(-1), out=self.scaled).neg_()
        else:
            adjoint_u.addcmul_(d, c.unsqueeze(-1), value=-1.0)
        self._times(adjoint_u, self.weight, out, keep=keep, scale=scale)
        torch.baddbmm(out, self.gram_d, a, beta=1.0, alpha=scale, out=out)

    def _times(
        self, v: Tensor, w: Tensor, out: Tensor, *, keep: float = 0.0, scale: float = 1.0
    ) -> None:
        """out = keep out + scale v w; with shared weights all attacks are rows of one product."""
        if self.shared:
            v, out = v.flatten(0, 1).unsqueeze(0), out.view(1, -1, out.shape[2])
        if keep == 0.0 and scale == 1.0:
            torch.bmm(v, w, out=out)
        else:
            torch.baddbmm(out, v, w, beta=keep, alpha=scale, out=out)


class Conv:
    """A convolution as the first layer: a dense one on patches, summed over its positions, so that
    its gradient is sum_p d_p patch_p^T. Direct form only. Interface as `Dense`, without the
    products that only layers above another need."""

    def __init__(
        self,
        architecture: Architecture,
        weight: Tensor,
        bias: Tensor | None,
        n_attacks: int,
        m: int,
    ) -> None:
        self.architecture, self.weight, self.bias = architecture, weight, bias
        self.n_out = weight.shape[1] * architecture.n_positions
        self.u = weight.new_empty(n_attacks, m, self.n_out)
        self.m, self.scaled, self.pushed = (torch.empty_like(self.u) for _ in range(3))
        self.residual = weight.new_empty(n_attacks, *weight.shape[1:])

    def forward(self, a: Float[Tensor, "q m d"]) -> None:
        """u = W patches + b, channel by channel."""
        self.patches = self.architecture.patches(a)
        torch.matmul(self.weight.unsqueeze(1), self.patches, out=self._maps(self.u))
        if self.bias is not None:
            self._maps(self.u).add_(self.bias[:, None, :, None])

    def explicit(self, _a: Tensor, d: Tensor, c: Float[Tensor, "q m"]) -> None:
        """M from the residual; the patches stand for `a`."""
        torch.mul(d, c.unsqueeze(-1), out=self.scaled)
        maps = self._maps(self.scaled)
        torch.sub(self.weight, torch.matmul(maps, self.patches.mT).sum(1), out=self.residual)
        torch.matmul(self.residual.unsqueeze(1), self.patches, out=self._maps(self.m))
        if self.bias is not None:
            self.residual_b = self.bias - maps.sum((1, 3))
            self._maps(self.m).add_(self.residual_b[:, None, :, None])

    def residual_square(self, _d: Tensor, _c: Tensor, _d_dot_m: Tensor) -> Float[Tensor, " q"]:
        total: Tensor = self.residual.square().flatten(1).sum(1)
        return total if self.bias is None else total + self.residual_b.square().sum(1)

    def adjoint_input(
        self,
        adjoint_u: Tensor | None,
        _a: Tensor,
        _d: Tensor,
        _c: Tensor,
        out: Tensor,
        *,
        scale: float = 1.0,
        keep: float = 0.0,
    ) -> None:
        """out = keep out + scale (W^T adjoint_u - C N), folded back into images."""
        assert adjoint_u is not None  # a convolution is never the last layer
        patches = torch.matmul(self.weight.mT.unsqueeze(1), self._maps(adjoint_u))
        patches -= torch.matmul(self.residual.mT.unsqueeze(1), self._maps(self.scaled))
        images = self.architecture.fold(patches)
        if keep == 0.0:
            torch.mul(images, scale, out=out)
        else:
            out.mul_(keep).add_(images, alpha=scale)

    def _maps(self, rows: Tensor) -> Float[Tensor, "q m o p"]:
        return rows.view(*rows.shape[:2], self.weight.shape[1], -1)


class Surrogate:
    """f, s = f' and s' = f'' of Q attacks; `alpha` (Q,) may differ from attack to attack.

    Haim et al. 2022 keep ReLU in the forward pass and use sigma(alpha z), the derivative of a
    softplus, wherever a derivative is taken. (KKT paper, appendix B, writes alpha sigma(z); the
    code has sigma(alpha z).) With an infinite alpha s is ReLU's own derivative, 0 at 0, and s' is
    undefined.

        ReLU:        s = sigma(alpha z)                    s' = alpha sigma (1 - sigma)
        leaky ReLU:  s = p + (1 - p) sigma(alpha z)        s' = (1 - p) alpha sigma (1 - sigma)
        GELU:        s = GELU'(z)                          s' = GELU''(z), whatever alpha is
    """

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
