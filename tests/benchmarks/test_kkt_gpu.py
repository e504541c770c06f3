"""The benchmarks for GPUs, with small sizes and a CPU in the place of one."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from benchmarks.gpu import agreement
from benchmarks.kkt import gpu as kkt_gpu
from benchmarks.record import Measurement
from recon_core.victims.network import Network

SMALL = {
    "GPU": torch.device("cpu"),
    "SHAPE": (3, 12, 12),
    "D": 3 * 12 * 12,
    "PAPER": Network(widths=(16, 16)),
    "SMALL": Network(widths=(8, 8)),
    "N_IMAGES": 4,
    "N_CANDIDATES": 6,
}


@pytest.fixture(scope="module")
def lines() -> Iterator[list[Measurement]]:
    """Every line of the benchmark. 110 epochs, 10 epochs, 50 iterations and the matching of a run
    take the seconds of a clock; what the first setting times is done, too."""
    clock, calls = itertools.cycle((1.1, 0.1, 0.5, 2.0)), itertools.count()

    def timed(action: Callable[[], object], _repeats: int) -> float:
        if next(calls) < 4:
            action()
        return next(clock)

    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # products this small only wait for a second one
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(kkt_gpu, name, value)
        patch.setattr(kkt_gpu, "median_seconds", timed)
        patch.setattr(kkt_gpu, "matmul_precision", lambda *_: contextlib.nullcontext())
        yield list(kkt_gpu.measure(quick=True))
    torch.set_num_threads(n_threads)


def test_parity_comes_first_and_a_run_is_its_epochs_iterations_and_matching(
    lines: list[Measurement],
) -> None:
    parity = [line.value for line in lines if line.unit == "relative difference"]
    assert [line.value for line in lines[:5]] == parity
    assert max(parity[0], parity[3], parity[4]) < 1e-12  # the same device here
    assert 1e-9 < parity[1] < 1e-4
    by_case = {line.case: line for line in lines}
    for n, kind in itertools.product((1, 4), ("float32", "TF32")):
        setting = f"R={n}, {kind}"
        seconds = by_case[f"seconds per run, {setting}"].value
        assert seconds == pytest.approx((500 + 119) / n + 2, rel=1e-3)
        projected = by_case[f"GPU hours of 150000 runs, projected, {setting}"]
        assert projected.value == pytest.approx(150_000 * seconds / 3600, rel=1e-3)
        assert projected.reference_value == 5600


def test_a_device_has_to_give_what_the_cpu_gives() -> None:
    lines = list(agreement.autoencoders(torch.device("cpu")))
    assert len(lines) == 2 * 2 * 3
    for line in lines:
        assert line.value < (1e-12 if "in float64" in line.case else 1e-4), line.case
    other = torch.device("cpu", 0)  # can be told from the reference
    assert next(agreement.instahide(other)).value < 1e-9
