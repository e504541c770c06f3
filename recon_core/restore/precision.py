"""Precision of a restorer's network while it is trained: "float32" is the reference, "tf32" rounds
factors to 10 bits of mantissa on CUDA, "bf16" runs the network, and nothing else, under autocast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from recon_core.precision import matmul_precision

NetworkPrecision = Literal["float32", "tf32", "bf16"]


def require_precision(precision: NetworkPrecision, device: torch.device) -> None:
    """Raises ValueError where `device` has no such arithmetic and would go on in float32."""
    if precision == "tf32" and device.type != "cuda":
        raise ValueError(
            f"precision='tf32' needs a CUDA device and this is {device.type}; use 'float32' or "
            "'bf16'"
        )


@contextmanager
def float32_arithmetic(precision: NetworkPrecision, device: torch.device) -> Iterator[None]:
    """Float32 products and convolutions as `precision` says, inside the block only; the switches
    are the whole process's."""
    chosen: Literal["ieee", "tf32"] = "tf32" if precision == "tf32" else "ieee"
    with matmul_precision(chosen, device):
        before = _convolutions()
        _set_convolutions(chosen)
        try:
            yield
        finally:
            _set_convolutions(before)


def _convolutions() -> str:
    cudnn: Any = torch.backends.cudnn
    if hasattr(cudnn, "conv"):
        return str(cudnn.conv.fp32_precision)
    return "tf32" if cudnn.allow_tf32 else "ieee"


def _set_convolutions(value: str) -> None:
    cudnn: Any = torch.backends.cudnn
    if hasattr(cudnn, "conv"):
        cudnn.conv.fp32_precision = value
    else:  # torch before 2.9
        cudnn.allow_tf32 = value == "tf32"


class InBF16(nn.Module):
    """`net` under bfloat16 autocast, its answer in float32."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            answer: Tensor = self.net(x, *others)
        return answer.float()
