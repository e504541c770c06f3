"""The benchmark for GPUs, with a CPU in the place of one and small sizes: is its sum right?"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import pytest
import torch

from benchmarks.kkt import gpu as kkt_gpu
from benchmarks.record import Measurement
from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.attacks.kkt.run import KKT
from recon_core.victims.network import Network


@pytest.fixture(scope="module")
def lines() -> list[Measurement]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # products this small only wait for a second one
    try:
        return measured_small()
    finally:
        torch.set_num_threads(n_threads)


def measured_small() -> list[Measurement]:
    """Every line of the benchmark, at sizes that take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kkt_gpu, "GPU", torch.device("cpu"))
        patch.setattr(kkt_gpu, "SHAPE", (3, 12, 12))
        patch.setattr(kkt_gpu, "D", 3 * 12 * 12)
        patch.setattr(kkt_gpu, "PAPER", Network(widths=(16, 16)))
        patch.setattr(kkt_gpu, "SMALL", Network(widths=(8, 8)))
        patch.setattr(kkt_gpu, "N_IMAGES", 4)
        patch.setattr(kkt_gpu, "N_CANDIDATES", 6)
        patch.setattr(kkt_gpu, "median_seconds", timed)
        patch.setattr(kkt_gpu, "N_COMPLETE", 4)
        small = KKTAttack(n_candidates=6, save_at=(10, 20))
        patch.setattr(kkt_gpu, "COMPLETE", KKT(victim=Network(widths=(16, 16)), attack=small))
        patch.setattr(kkt_gpu, "MODES", kkt_gpu.MODES[:2])  # the third compiles a kernel
        for module in ("benchmarks.kkt.gpu", "recon_core.attacks.kkt.run"):
            patch.setattr(f"{module}.matmul_precision", lambda *_: contextlib.nullcontext())
        return list(kkt_gpu.measure(quick=True))


CLOCK = itertools.cycle((1.1, 0.1, 0.5, 2.0))
"""What the timings of one setting say: 110 epochs, 10 epochs, 50 iterations, one run's matching."""


calls = itertools.count()


def timed(action: Callable[[], object], _repeats: int) -> float:
    """The sums are under test, not this machine: what the first two settings time is done, and no
    clock is asked."""
    if next(calls) < 8:
        action()
    return next(CLOCK)


def of(lines: list[Measurement], words: str) -> dict[str, float]:
    found = {line.case: line.value for line in lines if words in line.case}
    assert found, words
    return found


def test_parity_comes_first_and_is_tight(lines: list[Measurement]) -> None:
    parity = [line.value for line in lines if line.unit == "relative difference"]
    assert [line.value for line in lines[: len(parity)]] == parity
    assert len(parity) == 5
    assert max(parity[0], parity[3], parity[4]) < 1e-12  # the same device here
    assert 1e-9 < parity[1] < 1e-4


def test_a_run_is_its_epochs_its_iterations_and_its_matching(lines: list[Measurement]) -> None:
    assert set(of(lines, "training epoch of all runs").values()) == {0.01}
    assert set(of(lines, "attack iteration of all runs").values()) == {0.01}
    for case, seconds in of(lines, "seconds per run").items():
        setting = case.removeprefix("seconds per run, ")
        n_runs = int(setting.split(",")[0].removeprefix("R="))
        assert seconds == pytest.approx((500 + 119) / n_runs + 2, rel=1e-3)
        (per_hour,) = of(lines, f"runs an hour, {setting}").values()
        assert per_hour == pytest.approx(3600 / seconds, rel=1e-3)
        projected = next(x for x in lines if "GPU hours" in x.case and x.case.endswith(setting))
        assert projected.value == pytest.approx(150_000 * seconds / 3600, rel=1e-3)
        assert projected.reference_value == 5600


def test_every_stack_precision_and_mode_is_measured(lines: list[Measurement]) -> None:
    settings = {case.removeprefix("seconds per run, ") for case in of(lines, "seconds per run")}
    assert settings == {
        f"R={n}, {kind}, {mode}"
        for n in (1, 4)
        for kind in ("float32", "TF32")
        for mode in ("plain launches", "CUDA graphs")
    }


def test_pairs_are_counted_in_both_precisions(lines: list[Measurement]) -> None:
    last = lines[-1]
    assert "confident candidates" in last.case
    assert last.value == last.reference_value  # nothing differs here
