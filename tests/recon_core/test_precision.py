"""Precisions come back or are refused; steps as CUDA graphs; the core only computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import MagicMock

import pytest
import torch

from recon_core import cuda_graphs, precision
from recon_core.cuda_graphs import WARM_UPS, repeated
from recon_core.precision import Precision, matmul_precision
from tests.recon_core.drawing import generator

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = precision._read()
    yield
    precision._write(before)


@pytest.fixture
def _obedient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose products change with the setting."""
    numbers = iter(range(100))
    monkeypatch.setattr(precision, "_probe", lambda device: torch.tensor(next(numbers)))


@pytest.mark.usefixtures("_obedient")
@pytest.mark.parametrize("outside", ["ieee", "tf32"])
@pytest.mark.parametrize("inside", ["ieee", "tf32", "bf16"])
def test_sets_and_restores(inside: Precision, outside: str) -> None:
    precision._write((outside, outside))
    with matmul_precision(inside, CPU):
        assert precision._read() == ("ieee", inside)
    assert precision._read() == (outside, outside)


@pytest.mark.usefixtures("_obedient")
def test_restores_after_an_error() -> None:
    before = precision._read()
    with pytest.raises(KeyError), matmul_precision("tf32", CPU):
        raise KeyError
    assert precision._read() == before


@pytest.mark.usefixtures("_obedient")
def test_blocks_may_be_nested() -> None:
    with matmul_precision("tf32", CPU):
        with matmul_precision("ieee", CPU):
            assert precision._read() == ("ieee", "ieee")
        assert precision._read() == ("ieee", "tf32")


def test_refuses_what_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CPU without such instructions, which computes in float32 and says nothing."""
    monkeypatch.setattr(precision, "_probe", lambda device: torch.ones(1))
    before = precision._read()
    for wanted in ("tf32", "bf16"):
        block = matmul_precision(wanted, CPU)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"precision='{wanted}' is not to be had.*cpu"), block:
            pass
        assert precision._read() == before


@pytest.mark.parametrize("wanted", ["tf32", "bf16"])
def test_here_it_is_either_refused_or_seen(wanted: Precision) -> None:
    a = torch.randn(200, 200, generator=generator(1))
    exact = (a.double() @ a.double()).float()
    error = None
    with contextlib.suppress(ValueError), matmul_precision(wanted, CPU):
        error = float((a @ a - exact).abs().max() / exact.abs().max())
    assert error is None or 1e-5 < error < 1e-1


def test_exact_products_by_default() -> None:
    a = torch.randn(200, 200, generator=generator(1))
    exact = (a.double() @ a.double()).float()
    with matmul_precision("ieee"):
        assert float((a @ a - exact).abs().max() / exact.abs().max()) < 1e-6


@pytest.mark.usefixtures("_obedient")
def test_older_torch_has_one_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_switches", tuple)
    precision._write(("highest",))
    for wanted, name in (("tf32", "high"), ("bf16", "medium"), ("ieee", "highest")):
        with matmul_precision(wanted, CPU):  # type: ignore[arg-type]
            assert torch.get_float32_matmul_precision() == name
        assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    device = torch.device("cuda")
    block = matmul_precision("bf16", device)
    with pytest.raises(ValueError, match=r"'bf16' is not to be had.*cuda"), block:
        pass
    if torch.cuda.get_device_capability(device)[0] >= 8:
        a = torch.randn(200, 200, generator=generator(1)).to(device)
        exact = (a.double() @ a.double()).float()
        with matmul_precision("tf32", device):
            error = float((a @ a - exact).abs().max() / exact.abs().max())
        assert 1e-5 < error < 1e-2


CUDA = torch.device("cuda")


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
    """With a `torch.cuda` that records and replays nothing."""
    cuda, calls = MagicMock(), list[bool]()
    monkeypatch.setattr(cuda_graphs.torch, "cuda", cuda)
    opened, closed = cuda.graph.return_value.__enter__, cuda.graph.return_value.__exit__
    closed.return_value = False
    repeat = repeated(lambda: calls.append(opened.call_count > closed.call_count), CUDA)
    for n in amounts:
        repeat(n)
    n_steps = sum(amounts)
    assert calls.count(False) == min(n_steps, WARM_UPS)
    assert calls.count(True) == int(n_steps > WARM_UPS), "recorded once, if at all"
    assert cuda.CUDAGraph.return_value.replay.call_count == max(0, n_steps - WARM_UPS)
    assert {call.args for call in cuda.device.call_args_list} == {(CUDA,)}


def test_graphs_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cuda_graphs.torch, "cuda")
    calls: list[int] = []
    repeated(lambda: calls.append(1), CUDA, graphs=False)(10)
    assert len(calls) == 10


@pytest.mark.gpu
def test_a_graph_on_a_gpu() -> None:
    counter = torch.zeros((), device="cuda")
    repeat = repeated(lambda: counter.mul_(2).add_(1), CUDA)
    for n in (1, 5, 4):
        repeat(n)
    assert float(counter) == 2**10 - 1
