"""Pixels that the Gram step needs: counted on encodings, and judged by how they grow."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.instahide import Gaussian
from benchmarks.instahide_gram import N_IMAGES, Needed, enough, exact_gram, needed
from recon_core.attacks.instahide.mixing import Mixing


def grown(power: float, log: float, lacking: bool = False) -> bool | None:
    """The verdict where pixels grow as k^power, and with m by `log` times what log(m) does."""
    by_m = {m: Needed((100 * math.log(2 * m) ** log,), 1.0) for m in (25, 400)}
    by_k = {k: Needed((float(k**power),), 1.0) for k in (2, 4)}
    if lacking:
        by_k[6] = Needed((math.inf,), 0.5)
    return enough(by_m, by_k).holds


def test_each_outcome_of_the_rule() -> None:
    assert grown(4.0, 1.0) is True
    assert grown(5.0, 1.0) is False
    assert grown(4.0, 3.0) is False
    assert grown(4.0, 1.0, lacking=True) is None


def test_the_true_gram_matrix_counts_common_images() -> None:
    e = Gaussian.drawn(Mixing.as_a_whole(2), n=N_IMAGES, p=N_IMAGES, m=12, d=8).encodings
    found = exact_gram(e)
    for i in range(12):
        for j in range(12):
            common = (e.private[i, :, None] == e.private[j]).sum()
            assert found[i, j] == common + (e.public[i, :, None] == e.public[j]).sum()
    assert torch.equal(found.diagonal(), torch.full((12,), 4.0, dtype=torch.float64))


def test_pixels_are_those_from_which_on_all_is_right() -> None:
    found = needed(6, 2, 2)
    assert all(100 < pixels <= 16_000 for pixels in found.pixels)
    assert found.right == pytest.approx(1, abs=0.2)
