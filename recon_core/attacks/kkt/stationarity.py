"""|| theta - sum_i c_i grad phi(theta; x_i) ||^2 and its gradients, in closed form, for Q attacks.

Layer l maps a_l to u_l = W_l a_l + b_l, and d_l is the derivative of phi with respect to u_l. With
the layer's residual R_l = W_l - sum_i c_i d_l a_l^T (and r_l = b_l - sum_i c_i d_l), all that
gradients need of it is

    M_l = A_l R_l^T + r_l = U_l - (A_l A_l^T + 1) (C D_l)         (one row per candidate)
    N_l = D_l R_l         = D_l W_l - (D_l D_l^T) (C A_l)

where the 1 is there if the layer has a bias, and C scales row i by c_i. The left sides are the
*direct form*, the right sides the *Gram form*: only m x m matrices, R_l is never formed. In float32
the Gram form's *value* is a difference of terms of the size of ||theta||^2. Then, for half the
value,

    d/dc_i = - sum_l <d_l, M_l>_i,       d/dd_l = -C M_l,       d/da_l = -C N_l,

and one sweep up, through d_l = (d_{l+1} W_{l+1}) * f'(u_l), and one down, through a_{l+1} = f(u_l),
give the gradient in x. Nothing is allocated after construction (GELU's and leaky ReLU's temporaries
apart), so that an iteration can be captured in a CUDA graph.

A dense layer of i inputs and o outputs costs, beside its products with the weights, 3 m i o
multiply-adds in direct form and 2 m^2 (i + o) in Gram form. A convolution's kernel is small and its
gradient sums over many positions: always direct.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from recon_core.victims.network import Architecture, Network, Parameters, gelu_curvature, gelu_slope

Form = Literal["auto", "gram", "direct"]


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


class Stationarity:
    """The stationarity term of Q attacks, each on a victim of its own or all on one.

    `parameters` are of Q victims, or of one: then the candidates of all attacks are rows of one
    matrix product. `alpha` (Q,) is the surrogate's steepness. `classes` (m,) are the
    candidates' classes for a network with several outputs; without them phi is the one output. The
    tensors that a call returns are overwritten by the next call. Raises ValueError for a number of
    outputs, attacks or classes that does not fit.
    """

    def __init__(
        self,
        architecture: Architecture,
        parameters: Parameters,
        *,
        n_candidates: int,
        alpha: Float[Tensor, " q"],
        classes: Int[Tensor, " m"] | None = None,
        form: Form = "auto",
    ) -> None:
        n_attacks, n_layers = len(alpha), architecture.n_layers
        if parameters.n_runs not in (1, n_attacks):
            raise ValueError(
                f"{n_attacks} attacks on {parameters.n_runs} victims; give every attack its "
                "victim, or all the same one"
            )
        if (architecture.n_outputs > 1) != (classes is not None):
            raise ValueError(
                f"a network with n_outputs={architecture.n_outputs} was given "
                f"{'no ' if classes is None else ''}classes; the margin phi_y - max phi_j needs "
                "classes and two outputs or more, a single output none"
            )
        if classes is not None and (n_classes := classes.shape[-1]) != n_candidates:
            raise ValueError(f"{n_classes} classes for {n_candidates} candidates; give one each")
        like = parameters.weights[0]
        self.surrogate = Surrogate(architecture.network, alpha)
        self.theta_square = parameters.squared_norm().to(like.dtype)
        self.top = n_layers - 1
        dense = []
        for w, b in zip(parameters.weights, parameters.biases, strict=True):
            (_, n_out, n_in), gram = w.shape, form == "gram"
            if form == "auto":
                gram = 2 * n_candidates * (n_in + n_out) < 3 * n_in * n_out
            dense.append(partial(Dense, w, b, n_attacks, n_candidates, gram=gram))
        self.upper = [make() for make in dense[1:]]  # upper[l] is layer l + 1
        first: Dense | Conv
        if architecture.network.conv is None:
            first = dense[0]()
        else:
            w, b = parameters.weights[0], parameters.biases[0]
            first = Conv(architecture, w, b, n_attacks, n_candidates)
        self.layers: list[Dense | Conv] = [first, *self.upper]

        def rows(width: int) -> Tensor:
            return like.new_empty(n_attacks, n_candidates, width)

        hidden = [layer.n_out for layer in self.layers[:-1]]
        self.a = [rows(width) for width in hidden]  # a[l] is the input of layer l + 1
        self.slope = [rows(width) for width in hidden]
        self.back = [rows(width) for width in hidden]  # back[l] = d_{l+1} W_{l+1}
        self.adjoint = [rows(width) for width in hidden]
        self.d = [rows(width) for width in (*hidden, architecture.n_outputs)]
        scratch = rows(max(layer.n_out for layer in self.layers)).view(-1)
        self.products = [  # one piece of memory as a contiguous (Q, m, fan out) for every layer
            scratch[: n_attacks * n_candidates * size].view(n_attacks, n_candidates, size)
            for size in (layer.n_out for layer in self.layers)
        ]
        self.margin = _Margin(self.d[-1], classes)
        self.gradient_x = rows(architecture.d)
        self.gradient_c = like.new_empty(n_attacks, n_candidates)
        self.row = torch.empty_like(self.gradient_c)
        self.minus_c = torch.empty_like(self.gradient_c)

    def __call__(
        self,
        x: Float[Tensor, "q m d"],
        c: Float[Tensor, "q m"],
        *,
        excess: Float[Tensor, "q m d"] | None = None,
        with_value: bool = True,
    ) -> tuple[Float[Tensor, " q"] | None, Float[Tensor, "q m d"], Float[Tensor, "q m"]]:
        """(value, d/dx, d/dc) of the stationarity term; the value only if asked for.

        If `excess` is given it becomes d/dx + 2 excess, in place, and is returned as d/dx: so the
        penalty's gradient costs no pass over memory.
        """
        inputs = [x, *self.a]
        for index, layer in enumerate(self.layers):  # forward: u_l, a_l and f'
            layer.forward(inputs[index])
            if index < self.top:
                self.surrogate.slope_(layer.u, self.slope[index])
                self.surrogate.activate_(layer.u, self.a[index])
        self.margin.select_(self.layers[-1].u)
        for index in range(self.top - 1, -1, -1):  # backward: d_l
            self.upper[index].down(self.d[index + 1], self.back[index])
            torch.mul(self.back[index], self.slope[index], out=self.d[index])
        value = torch.zeros_like(c[:, 0]) if with_value else None
        self.gradient_c.zero_()
        for index, layer in enumerate(self.layers):  # M_l, and from it d/dc and the value
            layer.explicit(inputs[index], self.d[index], c)
            torch.mul(self.d[index], layer.m, out=self.products[index])
            torch.sum(self.products[index], -1, out=self.row)
            self.gradient_c.add_(self.row)
            if value is not None:
                value = value + layer.residual_square(self.d[index], c, self.row)
        self._sweep_up(c)
        gradient_x = self._sweep_down(x, c, excess)
        return value, gradient_x, self.gradient_c.mul_(-2.0)

    def _sweep_up(self, c: Tensor) -> None:
        """Adjoints of d_l from the first layer up; leaves those of u_l that come through f''."""
        torch.neg(c, out=self.minus_c)
        for index in range(self.top):
            layer, adjoint, through_w = (
                self.layers[index],
                self.adjoint[index],
                self.products[index],
            )
            torch.mul(layer.m, self.minus_c.unsqueeze(-1), out=adjoint)
            if index > 0:
                adjoint.add_(self.upper[index - 1].pushed)
            torch.mul(adjoint, self.slope[index], out=through_w)
            if index + 1 < self.top:
                self.upper[index].up(through_w)
            adjoint.mul_(self.back[index])
            self.surrogate.times_curvature_(adjoint, layer.u, self.slope[index])

    def _sweep_down(self, x: Tensor, c: Tensor, excess: Tensor | None) -> Tensor:
        """Adjoints of u_l and a_l from the last layer down to x, whose factor 2 comes in here."""
        for index in range(self.top, 0, -1):
            layer, adjoint_a = self.layers[index], self.back[index - 1]
            incoming = self.adjoint[index] if index < self.top else None
            layer.adjoint_input(incoming, self.a[index - 1], self.d[index], c, adjoint_a)
            self.adjoint[index - 1].addcmul_(adjoint_a, self.slope[index - 1])
        gradient = self.gradient_x if excess is None else excess
        self.layers[0].adjoint_input(
            self.adjoint[0],
            x,
            self.d[0],
            c,
            gradient,
            scale=2.0,
            keep=0.0 if excess is None else 2.0,
        )
        return gradient


class _Margin:
    """The derivative of phi_i with respect to the outputs: 1, or e_{y_i} - e_{j_i}."""

    def __init__(self, d: Float[Tensor, "q m o"], classes: Int[Tensor, " m"] | None) -> None:
        self.d, self.classes = d, classes
        d.fill_(1.0)
        if classes is not None:
            self.index = classes.expand(len(d), -1).unsqueeze(2)
            self.others = torch.empty_like(d)
            self.rival = torch.empty_like(self.index)
            self.best = torch.empty_like(d[..., :1])

    def select_(self, output: Float[Tensor, "q m o"]) -> None:
        """Set d for these outputs; the maximum is hard, ties go to the lowest class."""
        if self.classes is None:
            return
        self.others.copy_(output).scatter_(2, self.index, -torch.inf)
        torch.max(self.others, 2, keepdim=True, out=(self.best, self.rival))
        self.d.zero_().scatter_(2, self.index, 1.0).scatter_(2, self.rival, -1.0)
