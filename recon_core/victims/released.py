"""Weights of a trained victim that an attacker is given: as they are, rounded, or with noise, which
comes first. Every tensor is, but for the weights that training started from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from recon_core.strict import Strict
from recon_core.victims.network import Parameters

INT8_MAX = 127


@dataclass(frozen=True, kw_only=True)
class Released(Strict):
    """Handover of a victim's weights.

    `precision`: "full" is that of the training; "float16" rounds to half precision; "int8" rounds
    the weights of every neuron to 255 steps between minus and plus their largest size, as torch's
    per-channel quantisation does, and a layer's biases likewise. `noise`: the standard deviation of
    normal noise on every weight, in units of the root mean square of its tensor.
    """

    precision: Literal["full", "float16", "int8"] = "full"
    noise: float = 0.0

    def __post_init__(self) -> None:
        self._within("[0, inf)", "noise", fix="0.01 is 1 % of a weight's usual size")

    def of(self, parameters: Parameters, generators: Sequence[torch.Generator]) -> Parameters:
        """The weights of R victims as they are given away; noise from a generator of each victim,
        on the CPU, which is advanced. The weights themselves where nothing is changed."""
        given = parameters
        if self.noise:
            given = given.map(lambda tensor: self._noisy(tensor, generators))
        if self.precision == "float16":
            given = given.map(lambda tensor: tensor.half().to(tensor))
        elif self.precision == "int8":
            given = given.map(_in_steps)
        return given

    def _noisy(self, tensor: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        size = tensor.flatten(1).square().mean(1).sqrt()
        drawn = torch.stack([torch.randn(tensor.shape[1:], generator=g) for g in generators])
        return tensor + self.noise * size.view(-1, *[1] * (tensor.dim() - 1)) * drawn.to(tensor)


def _in_steps(tensor: Tensor) -> Tensor:
    """The last dimension in whole steps of its largest size over 127; 0 stays 0."""
    step = tensor.abs().amax(-1, keepdim=True) / INT8_MAX
    return torch.where(step > 0, (tensor / step).round() * step, tensor)
