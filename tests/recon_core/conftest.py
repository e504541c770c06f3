"""Fixtures of the core's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch has one thread: bits can be compared, and tiny products do not wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """KKT attacks are checked every ten iterations instead of every hundred."""
    monkeypatch.setattr("recon_core.attacks.kkt.solver.CHECK_EVERY", 10)
