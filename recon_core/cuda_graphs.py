"""Run the same step again and again; on a GPU, as one CUDA graph.

A step of many small kernels spends its time on launching them. Captured once, they are launched
together. What is captured works on the same memory every time: a step has to write its results in
place, must not look at them (`.item()`), and takes what changes from one replay to the next from
tensors that the caller overwrites.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WARM_UPS = 3
"""Steps before the capture: in the first ones libraries set themselves up, which no graph holds."""

Repeat = Callable[[int], None]


def repeated(step: Callable[[], None], device: torch.device, *, graphs: bool = True) -> Repeat:
    """`repeat(n)` does n steps: replays of a graph on CUDA if `graphs`, plain calls elsewhere."""
    if graphs and device.type == "cuda":
        return _Captured(step, device)

    def plain(n: int) -> None:
        for _ in range(n):
            step()

    return plain


class _Captured:
    """The first `WARM_UPS` steps are calls, on a stream of their own; then the step is recorded."""

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        self.step, self.device = step, device
        self.n_warm_ups = 0
        self.graph: Any = None  # torch.cuda.CUDAGraph, once captured

    def __call__(self, n: int) -> None:
        with torch.cuda.device(self.device):
            for _ in range(n):
                if self.n_warm_ups < WARM_UPS:
                    self._warm_up()
                    continue
                if self.graph is None:
                    self._capture()
                self.graph.replay()

    def _warm_up(self) -> None:
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.step()
        current.wait_stream(stream)
        self.n_warm_ups += 1

    def _capture(self) -> None:
        """Records one step without doing it."""
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()
