"""Precision of float32 matrix products.

"ieee" is float32 throughout. "tf32" rounds the factors to 10 bits of mantissa (NVIDIA GPUs from the
A100 on; CPUs with AMX for float16) and "bf16" to 7 (CPUs with AVX512-BF16 or AMX). Sums are kept in
float32; other dtypes are not touched. A restorer's network is trained in "float32", in "tf32" on
CUDA, convolutions included, or in "bf16": the network, and nothing else, under autocast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

Precision = Literal["ieee", "tf32", "bf16"]
NetworkPrecision = Literal["float32", "tf32", "bf16"]
LEGACY = {"ieee": "highest", "tf32": "high", "bf16": "medium"}
PROBE = 128


@contextmanager
def matmul_precision(precision: Precision, device: torch.device | None = None) -> Iterator[None]:
    """Float32 products at this precision inside the block; the whole process's setting, which comes
    back. Raises ValueError where the device (None: CUDA if there is one, else the CPU) would
    silently go on in float32."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    before = _read()
    try:
        _choose("ieee", device)
        if precision != "ieee":
            exact = _probe(device)
            if not (precision == "bf16" and device.type == "cuda"):
                _choose(precision, device)
            if torch.equal(_probe(device), exact):
                raise ValueError(
                    f"precision={precision!r} is not to be had for float32 products on this "
                    f"{device.type} device; use 'ieee' or another device"
                )
        yield
    finally:
        _write(before)


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
    chosen: Precision = "tf32" if precision == "tf32" else "ieee"
    cudnn: Any = torch.backends.cudnn
    with matmul_precision(chosen, device):
        new = hasattr(cudnn, "conv")  # from torch 2.9 on
        place, name = (cudnn.conv, "fp32_precision") if new else (cudnn, "allow_tf32")
        before = getattr(place, name)
        setattr(place, name, chosen if new else chosen == "tf32")
        try:
            yield
        finally:
            setattr(place, name, before)


def _probe(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(PROBE, PROBE, generator=generator).to(device)
    return a @ a


def _choose(precision: Precision, device: torch.device) -> None:
    by_device = tuple(precision if kind == device.type else "ieee" for kind in ("cuda", "cpu"))
    _write(by_device if _switches() else (LEGACY[precision],))


def _switches() -> tuple[Any, ...]:
    """Those of CUDA and of the CPU; none before torch 2.9, which has one for both."""
    mkldnn: Any = torch.backends.mkldnn
    return (torch.backends.cuda.matmul, mkldnn.matmul) if hasattr(mkldnn, "matmul") else ()


def _read() -> tuple[str, ...]:
    found = tuple(switch.fp32_precision for switch in _switches())
    return found or (torch.get_float32_matmul_precision(),)


def _write(values: tuple[str, ...]) -> None:
    for switch, value in zip(_switches(), values, strict=False):
        switch.fp32_precision = value
    if not _switches():
        torch.set_float32_matmul_precision(values[0])
