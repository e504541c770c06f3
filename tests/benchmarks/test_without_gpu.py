"""Benchmarks of a GPU, where there is none: each says so before it measures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.autoencoder import gpu as autoencoder_gpu
from benchmarks.instahide import gpu as instahide_gpu
from benchmarks.kkt import gpu as kkt_gpu


@pytest.mark.parametrize(
    "run",
    [
        lambda: autoencoder_gpu.main(["--work", "nowhere"]),
        lambda: instahide_gpu.device_of(quick=False),
        lambda: next(kkt_gpu.measure(quick=True)),
    ],
)
def test_a_benchmark_of_a_gpu_needs_one(
    run: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        run()
