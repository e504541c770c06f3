"""Device of a process: its device and its cores; to ask costs no import of a cluster's."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Literal

import torch

from storage.files import machine_memory

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


def cpu_name() -> str:
    """The processor's name, as Linux has it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        match = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if match:
            return match[1].strip()
    return platform.processor() or platform.machine()


def check_memory(n_bytes: float, what: str, fix: str) -> None:
    """Raise ValueError if `what` takes more memory than this machine has; ends with `fix`."""
    if n_bytes > machine_memory():
        raise ValueError(
            f"{what} would take {n_bytes / 1e9:,.0f} GB, and this machine has "
            f"{machine_memory() / 1e9:,.0f}; {fix}"
        )


def use_threads(threads: int | None) -> None:
    """Set torch's threads on a CPU, unless None. ValueError for fewer than one."""
    if threads is None:
        return
    if threads < 1:
        raise ValueError(f"threads={threads} must be at least 1")
    torch.set_num_threads(threads)
