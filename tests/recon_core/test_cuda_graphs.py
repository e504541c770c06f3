"""n steps are n steps: as calls, and with warm-ups, a capture and replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from recon_core import cuda_graphs
from recon_core.cuda_graphs import WARM_UPS, repeated

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Stream:
    def wait_stream(self, _other: Stream) -> None:
        pass


class PretendedCuda:
    """`torch.cuda` as far as a capture needs it: what is recorded is done at every replay."""

    Stream = Stream
    current_stream = Stream

    def __init__(self) -> None:
        self.recording = False
        self.n_replays = 0

    def CUDAGraph(self) -> PretendedCuda:
        return self

    def replay(self) -> None:
        self.n_replays += 1

    @contextmanager
    def graph(self, _graph: PretendedCuda) -> Iterator[None]:
        self.recording = True
        yield
        self.recording = False

    @contextmanager
    def stream(self, _stream: Stream) -> Iterator[None]:
        yield

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        assert device == CUDA
        yield


def test_on_a_cpu_steps_are_calls() -> None:
    calls: list[int] = []
    repeat = repeated(lambda: calls.append(1), CPU)
    repeat(3)
    repeat(0)
    repeat(2)
    assert len(calls) == 5


@pytest.mark.parametrize("amounts", [(1, 1), (WARM_UPS,), (WARM_UPS + 1,), (2, 7, 0, 1), (20,)])
def test_warm_ups_and_replays_add_up(
    amounts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = PretendedCuda()
    monkeypatch.setattr(cuda_graphs.torch, "cuda", cuda)
    calls: list[bool] = []
    repeat = repeated(lambda: calls.append(cuda.recording), CUDA)
    for n in amounts:
        repeat(n)
    n_steps = sum(amounts)
    assert calls.count(False) == min(n_steps, WARM_UPS)
    assert calls.count(True) == int(n_steps > WARM_UPS), "recorded once, if at all"
    assert cuda.n_replays == max(0, n_steps - WARM_UPS)


def test_graphs_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cuda_graphs.torch, "cuda")
    calls: list[int] = []
    repeated(lambda: calls.append(1), CUDA, graphs=False)(10)
    assert len(calls) == 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    counter = torch.zeros((), device="cuda")
    repeat = repeated(lambda: counter.mul_(2).add_(1), CUDA)
    for n in (1, 5, 4):
        repeat(n)
    assert float(counter) == 2**10 - 1
