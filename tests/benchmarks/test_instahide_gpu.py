"""The benchmark of InstaHide's attacks for GPUs, with a CPU in the place of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from benchmarks import instahide_gpu
from benchmarks.instahide import Gaussian
from benchmarks.record import RATIO_TOLERANCE
from recon_core.attacks.instahide.recover import Recovered

CPU = torch.device("cpu")
OTHER = torch.device("cpu", 0)
"""The CPU by another name, so that it can be told from the reference."""


def test_the_whole_of_it_runs_small() -> None:
    lines = list(instahide_gpu.measure(quick=True))
    checks = [line for line in lines if line.unit == "largest difference"]
    assert len(checks) == 5
    assert all(line.value < instahide_gpu.PARITY for line in checks)
    timed = [line for line in lines if line.unit == "s"]
    assert len(timed) == 3
    for line in timed:
        assert line.ratio == pytest.approx(line.reference_value / line.value, rel=RATIO_TOLERANCE)
    assert "images exact, 0 falsely called so" in timed[-1].case


@pytest.mark.parametrize("what", ["pixels", "statuses"])
def test_what_computes_something_else_is_not_timed(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = instahide_gpu.recovered

    def wrong(case: Gaussian, device: torch.device) -> Recovered:
        found = right(case, device)
        if device == CPU:
            return found
        if what == "pixels":
            return replace(found, images=found.images + 1e-6)
        return replace(found, status=found.status[::-1][:-1])

    monkeypatch.setattr(instahide_gpu, "recovered", wrong)
    with pytest.raises(SystemExit, match=r"differ from the CPU|statuses than on the CPU"):
        _all(instahide_gpu.parity(OTHER))


def test_images_that_do_not_come_back_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gaussian, "n_exact", lambda *_given: 9)
    with pytest.raises(SystemExit, match="not all images came back on cpu:0"):
        _all(instahide_gpu.exact(OTHER, quick=True))


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device; --quick"):
        instahide_gpu.device_of(quick=False)


def _all(lines: Iterator[object]) -> None:
    for _ in lines:
        pass
