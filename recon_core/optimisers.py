"""First-order optimisers over stacked runs, updated in place without allocating.

A tensor here has a leading run dimension; the rules are elementwise, so R stacked runs move as R
separate ones would, each at its own rate. Updates go through slices that stay in a CPU's cache, and
read nothing back, so that a CUDA graph can hold them.

Adadelta (Zeiler 2012, algorithm 1) averages g^2 and the squares of its own steps. Here both are
kept with eps inside and divided by 1 - rho, S for the gradients and D for the steps, so

    S' = rho S + g^2 + eps,    T = D / S',    theta' = theta - lr sqrt(T) g,
    D' = rho D + T g^2 + eps = eps + rho T (S' + g^2 / rho),

which is seven passes over memory where the textbook's order has ten. Starting both at
eps / (1 - rho) is starting torch's averages at 0. Weight decay is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.optim.adam import adam

from recon_core.strict import Strict, Within

SLICE = 3 << 16
"""Most elements updated at once on a CPU: six float32 streams of them are 4.5 MiB. In shorter
slices the 3 us that torch takes to start a kernel count (one core with 1 MiB of L2: 3.1 million
elements in 9.8, 7.7, 5.9 and 5.6 ms with slices of 2^14, 2^15, 2^17 and 3 * 2^16)."""

Rule = Literal["adadelta", "gd", "adam"]
USUAL_EPS = {"adadelta": 1e-6, "adam": 1e-8, "gd": 0.0}


@dataclass(frozen=True, kw_only=True)
class Optimiser(Strict):
    """An update rule and its constants; those of other rules have no effect.

    `adadelta`: torch's constants rho = 0.9 and eps = 1e-6 (image restoration paper, section 2, uses
    it with lr = 1 for victims and attack alike). `gd`: gradient descent with momentum, as torch's
    SGD without dampening (Haim et al. use 0 for victims, 0.9 for the attack). `adam`: Kingma and Ba
    2015, as torch's. `eps`: None is the rule's usual value, 1e-6 for adadelta and 1e-8 for adam.
    """

    rule: Rule = "adadelta"
    lr: Annotated[float, Within("(0, inf)", fix="Adadelta's usual rate is 1")] = 1.0
    momentum: Annotated[float, Within("[0, 1)")] = 0.0
    rho: Annotated[float, Within("(0, 1)", fix="Adadelta's usual value is 0.9")] = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    eps: Annotated[float | None, Within("(0, inf)", fix="None is the rule's usual value")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} are not two numbers in [0, 1); Adam's: .9, .999")
        if self.rule != "gd" and self.momentum:
            raise ValueError(
                f"momentum={self.momentum} has no meaning for {self.rule}; use rule='gd' or "
                "momentum=0"
            )

    @property
    def averages_gradients(self) -> bool:
        """True if the first tensor of its state is an average of gradients, or a sum."""
        return self.rule == "adam" or (self.rule == "gd" and self.momentum > 0)

    @property
    def epsilon(self) -> float:
        return USUAL_EPS[self.rule] if self.eps is None else self.eps

    def state(self, parameter: Tensor) -> tuple[Tensor, ...]:
        """The averages of a parameter that has not moved; all with its leading run dimension.
        Adam's third is the number of steps so far, (R,)."""
        if self.rule == "adadelta":
            start = self.epsilon / (1 - self.rho)
            return tuple(torch.full_like(parameter, start) for _ in range(2))
        if self.rule == "gd":
            return (torch.zeros_like(parameter),) if self.momentum else ()
        n_steps = torch.zeros(len(parameter), dtype=torch.int64, device=parameter.device)
        return (torch.zeros_like(parameter), torch.zeros_like(parameter), n_steps)


class Stepper:
    """Moves one contiguous parameter (R, ...) in place; owns its state and scratch memory. `lr`:
    every run's own rate."""

    def __init__(
        self,
        optimiser: Optimiser,
        parameter: Tensor,
        *,
        lr: Float[Tensor, " r"] | None = None,
        state: Sequence[Tensor] | None = None,
    ) -> None:
        self.optimiser = optimiser
        self._state = optimiser.state(parameter) if state is None else tuple(state)
        self._lr: Tensor | float = optimiser.lr
        if lr is not None:  # one that all runs share is a pass less over memory
            shared = len(lr) and bool((lr == lr[0]).all())
            self._lr = float(lr[0]) if shared else lr.to(parameter).unsqueeze(1)
        self._rate: Tensor | float = self._lr
        self._eps = torch.tensor(optimiser.epsilon, dtype=parameter.dtype, device=parameter.device)
        if optimiser.rule == "adam":
            lr_here = torch.as_tensor(self._lr, dtype=torch.float64, device=parameter.device)
            self._lr = lr_here.clone()
            self._rate, self._eps = (parameter.new_empty(len(parameter), 1) for _ in range(2))
        self._is_one_on_cpu = len(parameter) == 1 and parameter.device.type == "cpu"
        self._parameter = parameter
        by_run = isinstance(self._rate, Tensor) and self._rate.dim() > 0
        n_rows = len(parameter) if by_run else 1
        self._shape = (n_rows, parameter.numel() // max(1, n_rows))
        pieces = self._cut(parameter.view(self._shape))
        averages = [self._cut(average.view(self._shape)) for average in self._state[:2]]

        def of_pieces(x: Tensor | float) -> list[Any]:
            """What is (R, 1), along with its rows; a single number for every piece."""
            if isinstance(x, Tensor) and x.dim():
                return self._cut(x.expand(self._shape))
            return [x] * len(pieces)

        rates, eps = of_pieces(self._rate), of_pieces(self._eps)
        largest = max(piece.numel() for piece in pieces)
        scratch = [parameter.new_empty(largest) for _ in range(2)]
        self._parts = [
            _Part(
                parameter=piece,
                averages=tuple(average[i] for average in averages),
                scratch=tuple(s[: piece.numel()].view_as(piece) for s in scratch),
                rate=rates[i],
                eps=eps[i],
            )
            for i, piece in enumerate(pieces)
        ]
        self._gradient: Tensor | None = None
        self._gradients: list[Tensor] = []

    def tensors(self) -> tuple[Tensor, ...]:
        return self._state

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Goes on from this state; ValueError if it is that of another rule or parameter."""
        shapes = [tuple(tensor.shape) for tensor in tensors]
        expected = [tuple(tensor.shape) for tensor in self._state]
        if shapes != expected:
            raise ValueError(
                f"the state has tensors {shapes}, {self.optimiser.rule} needs {expected} here; "
                "resume with the settings and the runs that it was saved with"
            )
        for mine, theirs in zip(self._state, tensors, strict=True):
            mine.copy_(theirs)

    def rows(self, index: Int[Tensor, " k"]) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self._state)

    def set_rate(self, lr: float) -> None:
        """Another rate, the same for all runs; of Adam alone, which reads it at every step, in a
        CUDA graph too."""
        if self.optimiser.rule != "adam":
            raise ValueError(
                f"the rate of rule={self.optimiser.rule!r} is fixed; only Adam's moves"
            )
        assert isinstance(self._lr, Tensor)
        self._lr.fill_(lr)

    def step_(self, gradient: Tensor) -> None:
        """Move the parameter by a gradient of its shape."""
        if self.optimiser.rule == "adam" and self._is_one_on_cpu:
            self._torchs_adam(gradient)
            return
        if gradient is not self._gradient:
            self._gradients = self._cut(gradient.reshape(self._shape))
            self._gradient = gradient if gradient.is_contiguous() else None
        if self.optimiser.rule == "adam":
            self._count()
        for part, g in zip(self._parts, self._gradients, strict=True):
            _MOVES[self.optimiser.rule](self.optimiser, part, g)

    def _torchs_adam(self, gradient: Tensor) -> None:
        m, v, n_steps = self._state
        beta_1, beta_2 = self.optimiser.betas
        adam(
            [self._parameter],
            [gradient.contiguous()],
            [m],
            [v],
            max_exp_avg_sqs=[],
            state_steps=[n_steps.float().squeeze(0)],
            fused=True,
            amsgrad=False,
            beta1=beta_1,
            beta2=beta_2,
            lr=float(self._lr),
            weight_decay=0.0,
            eps=self.optimiser.epsilon,
            maximize=False,
        )
        n_steps.add_(1)

    def _count(self) -> None:
        """Adam's corrections for the averages' start at 0, one per run, without leaving the GPU."""
        n_steps = self._state[2].add_(1).double().unsqueeze(1)
        beta_1, beta_2 = self.optimiser.betas
        correction = (1 - beta_2**n_steps).sqrt()
        assert isinstance(self._rate, Tensor)
        self._rate.copy_(self._lr * correction / (1 - beta_1**n_steps))
        self._eps.copy_(self.optimiser.epsilon * correction)

    def _cut(self, tensor: Tensor) -> list[Tensor]:
        rows, columns = self._shape
        length = SLICE if tensor.device.type == "cpu" else max(1, rows * columns)
        n_slices = max(1, -(-columns // length))
        groups = tensor.split(max(1, length // max(1, columns)))
        return [part for group in groups for part in group.split(-(-columns // n_slices), dim=1)]


@dataclass(frozen=True)
class _Part:
    parameter: Tensor
    averages: tuple[Tensor, ...]
    scratch: tuple[Tensor, ...]
    rate: Tensor | float
    eps: Tensor


def _adadelta_(optimiser: Optimiser, part: _Part, g: Tensor) -> None:
    rho, (s, d), (t, u) = optimiser.rho, part.averages, part.scratch
    torch.addcmul(part.eps, g, g, out=t)
    torch.add(t, s, alpha=rho, out=s)
    torch.div(s, d, out=t)  # 1 / T: its inverse square root costs less than a square root
    torch.addcmul(s, g, g, value=1 / rho, out=u)
    torch.addcdiv(part.eps, u, t, value=rho, out=d)
    t.rsqrt_()
    if isinstance(part.rate, Tensor):
        part.parameter.addcmul_(torch.mul(g, part.rate, out=u), t, value=-1)
    else:
        part.parameter.addcmul_(g, t, value=-part.rate)


def _gd_(optimiser: Optimiser, part: _Part, g: Tensor) -> None:
    for velocity in part.averages:
        g = torch.add(g, velocity, alpha=optimiser.momentum, out=velocity)
    if isinstance(part.rate, Tensor):
        part.parameter.addcmul_(g, part.rate, value=-1)
    else:
        part.parameter.add_(g, alpha=-part.rate)


def _adam_(optimiser: Optimiser, part: _Part, g: Tensor) -> None:
    (m, v), (t, u), (beta_1, beta_2) = part.averages, part.scratch, optimiser.betas
    m.lerp_(g, 1 - beta_1)
    v.mul_(beta_2).addcmul_(g, g, value=1 - beta_2)
    torch.sqrt(v, out=t).add_(part.eps)
    part.parameter.addcdiv_(torch.mul(m, part.rate, out=u), t, value=-1)


_MOVES: dict[str, Callable[[Optimiser, _Part, Tensor], None]] = {
    "adadelta": _adadelta_,
    "gd": _gd_,
    "adam": _adam_,
}


VISIBLE = 8
"""Channels up to which they are taken for those of pictures."""


class MuonAndAdamW:
    """An optimiser of a network of convolutions that are in channels_last: Muon (Jordan 2024) for
    hidden layers, each a matrix with a row for every output, and AdamW for the rest, which are
    layers that see or answer pictures, biases and norms. Both take the same rate.

    Raises ValueError for a hidden convolution in another layout: its matrix would be a copy, which
    moves while the weights stand still.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.hidden = [p for p in parameters if p.ndim > 1 and min(p.shape[:2]) > VISIBLE]
        known = set(map(id, self.hidden))
        self.matrices = [nn.Parameter(_as_matrix(p.detach())) for p in self.hidden]
        if any(
            m.data_ptr() != p.data_ptr() for m, p in zip(self.matrices, self.hidden, strict=True)
        ):
            raise ValueError(
                "a convolution is not in channels_last; convert the network with "
                "net.to(memory_format=torch.channels_last)"
            )
        rest = [p for p in parameters if id(p) not in known]
        self.parts = (
            torch.optim.AdamW(rest, betas=(0.9, 0.99), weight_decay=1e-3),
            torch.optim.Muon(self.matrices, adjust_lr_fn="match_rms_adamw"),
        )

    def step(self, lr: float) -> None:
        """Take one step at a rate, along the gradients that the parameters have."""
        for matrix, weights in zip(self.matrices, self.hidden, strict=True):
            assert weights.grad is not None
            matrix.grad = _as_matrix(weights.grad)
        for part in self.parts:
            part.param_groups[0]["lr"] = lr
            part.step()


def _as_matrix(weights: Tensor) -> Tensor:
    """A view of weights, if they are in channels_last."""
    return weights.movedim(1, -1).flatten(1)
