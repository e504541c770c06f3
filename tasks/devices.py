"""What a process computes on: its device and its cores; to ask costs no import of a cluster's."""

from __future__ import annotations

import os
from typing import Literal

import torch

Device = Literal["auto", "cpu", "cuda"]


def resolve_device(device: Device, *, elsewhere: bool = False) -> str:
    """`cuda` or `cpu`; ValueError if CUDA is asked for and not there.

    `elsewhere`: the workers run on other machines, so what this one has does not matter.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not elsewhere and not torch.cuda.is_available():
        raise ValueError("device='cuda' but torch sees no CUDA device; use --device cpu or auto")
    return device


def usable_cores() -> int:
    """The cores this process may use, which in a container can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
