"""The benchmark of paper 004's steps: both sides agree, and what it prints can be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import instahide
from benchmarks.instahide_oracles import all_solutions
from benchmarks.record import main, parse_lines
from recon_core.attacks.instahide.determined import Equations


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
