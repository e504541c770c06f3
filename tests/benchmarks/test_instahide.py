"""The benchmarks of InstaHide's attacks: both sides agree, and what is printed can be read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.instahide import gpu as instahide_gpu
from benchmarks.instahide import speed as instahide
from benchmarks.instahide.gram import N_IMAGES, Needed, enough, exact_gram, needed
from benchmarks.instahide.oracles import all_solutions
from benchmarks.instahide.speed import Gaussian
from benchmarks.record import RATIO_TOLERANCE, main, parse_lines
from recon_core.attacks.instahide.determined import Equations
from recon_core.attacks.instahide.mixing import Mixing
from recon_core.attacks.instahide.recover import Recovered

CPU = torch.device("cpu")
OTHER = torch.device("cpu", 0)
"""The CPU by another name, so that it can be told from the reference."""


def test_the_reference_of_signs_is_the_oracle() -> None:
    rng = np.random.default_rng(0)
    edges = instahide.edges_of(4, 8, seed=2)
    equations = Equations(edges, np.ones((8, 2)), 4)
    c = rng.standard_normal((8, 3))
    y = np.abs(equations.matrix @ rng.standard_normal((4, 3)) + c)
    found = instahide.all_signs(equations, y, c)
    for pixel in range(3):
        solutions = all_solutions(y[:, pixel], c[:, pixel], equations)
        assert any(np.allclose(found[:, pixel], z) for z in solutions)


def test_sides_that_differ_are_not_timed() -> None:
    with pytest.raises(ValueError, match="do not give the same graph"):
        instahide.check(False, "graph")


@pytest.mark.slow
def test_quick_measurements_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "instahide.json"
    main(instahide.measure, ["--quick", "--json", str(path)])
    measured = parse_lines(path.read_text(), name="instahide.json")
    assert {m.benchmark for m in measured} == {"instahide"}
    assert [m.reference is None for m in measured] == [False, False, True, False, True]
    assert "with 2 of 2 seeds, at least 20 of 20 images" in measured[-1].case


@pytest.mark.slow
def test_the_whole_of_it_runs_small_for_gpus() -> None:
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


def _all(lines: Iterator[object]) -> None:
    for _ in lines:
        pass


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
