"""Repetition of one step; on a GPU, as one CUDA graph, whose kernels are launched together.

What is captured works on the same memory every time: a step has to write its results in place, must
not look at them (`.item()`), and takes what changes from one replay to the next from tensors that
the caller overwrites.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

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


class BatchSteps:
    """`step` of one batch (R, n, ...) after another. Each is copied to a buffer from which steps of
    its size always read; `fixed` is read where it is."""

    def __init__(self, step: Callable[[Tensor], None], *, fixed: Tensor | None = None) -> None:
        self.step, self.fixed = step, fixed
        self.known: dict[int, tuple[Tensor, Repeat]] = {}

    def __call__(self, batch: Tensor) -> None:
        size = batch.shape[1]
        if size not in self.known:
            buffer = batch if batch is self.fixed else torch.empty_like(batch)
            repeat = repeated(partial(self.step, buffer), batch.device)
            self.known[size] = buffer, repeat
        buffer, repeat = self.known[size]
        if buffer is not batch:
            buffer.copy_(batch)
        repeat(1)


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
                    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
                    stream.wait_stream(current)
                    with torch.cuda.stream(stream):
                        self.step()
                    current.wait_stream(stream)
                    self.n_warm_ups += 1
                    continue
                if self.graph is None:
                    self.graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(self.graph):
                        self.step()
                self.graph.replay()
