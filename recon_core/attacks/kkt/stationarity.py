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
"""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from recon_core.attacks.kkt.layers import Conv, Dense, Form, Surrogate, cheaper_form
from recon_core.victims.network import Architecture, Parameters


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
            best = cheaper_form(n_candidates, w.shape[2], w.shape[1]) if form == "auto" else form
            dense.append(partial(Dense, w, b, n_attacks, n_candidates, gram=best == "gram"))
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
