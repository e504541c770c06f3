"""The restorers' benchmark for GPUs, on a CPU and at sizes that mean nothing: is its sum right?"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.record import RATIO_TOLERANCE, Measurement, parse_lines
from benchmarks.restore import gpu as restore_gpu
from recon_core.restore import Restorer

ROOT = Path(__file__).parents[2]
needs_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU the benchmark would run at the paper's size"
)


@pytest.fixture(scope="module")
def lines() -> list[Measurement]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(restore_gpu, "DEVICE", torch.device("cpu"))
            patch.setattr(restore_gpu, "median_seconds", timed)
            return list(restore_gpu.measure(quick=True))
    finally:
        torch.set_num_threads(n_threads)


def timed(action: Callable[[], object], _repeats: int) -> float:
    """The action is done, but no clock is asked: the sums are under test, not this machine."""
    action()
    return 0.5


def test_parity_comes_first_and_is_tight(lines: list[Measurement]) -> None:
    parity = [line for line in lines if line.unit == "relative difference"]
    assert lines[: len(parity)] == parity
    for kind in ("edm", "bf_dncnn"):
        for what in ("output", "gradients"):
            exact, _same_here, rounded = (
                next(x.value for x in parity if x.case.startswith(f"{kind}: {what} in {precision}"))
                for precision in ("float32", "TF32", "bfloat16")
            )
            assert 1e-9 < exact < 1e-4
            assert 1e-4 < rounded < 0.5


def test_rates_and_hours_follow_from_the_seconds(lines: list[Measurement]) -> None:
    trained = [line for line in lines if line.case.startswith("training")]
    # Two steps of 4 images in .5 s.
    assert {line.value for line in trained} == {16.0}
    hours = {line.case.split(",")[-3].strip(): line.value for line in lines if line.unit == "h"}
    assert hours["edm"] == pytest.approx(400_000 * 512 / 16 / 3600, rel=RATIO_TOLERANCE)
    assert hours["bf_dncnn"] == pytest.approx(40_000 * 128 / 16 / 3600, rel=RATIO_TOLERANCE)
    sampled = {
        line.case.split(", ")[3]: line.value for line in lines if line.case.startswith("sampling")
    }
    # Four images in .5 s, of an EDM three of five evaluations.
    assert sampled == {"edm": pytest.approx(8 * 3 / 5), "bf_dncnn": 8.0}


def test_every_precision_and_mode_is_measured(lines: list[Measurement]) -> None:
    trained = {line.case for line in lines if line.case.startswith("training")}
    expected = {
        f"training, batches of 4, edm, {kind}, {mode}"
        for kind, mode in itertools.product(
            ("float32", "TF32", "bfloat16"), ("Fit", "plain launches", "CUDA graph")
        )
    }
    assert expected <= trained
    assert "training, batches of 4, bf_dncnn, float32, Fit" in trained


def test_what_fails_is_left_out_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise RuntimeError("no compiler\nfor many reasons")

    assert list(restore_gpu.or_why_not("this", lambda: (fails() for _ in range(1)))) == []
    assert capsys.readouterr().err == "this is left out: no compiler\n"


@pytest.mark.parametrize("what", ["output", "gradients"])
def test_a_device_that_computes_wrongly_is_not_timed(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = restore_gpu.output_and_gradients

    def wrong(restorer: Restorer, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        found = honest(restorer, device, dtype)
        if dtype == torch.float32:
            found[what] = 1.01 * found[what]
        return found

    monkeypatch.setattr(restore_gpu, "output_and_gradients", wrong)
    with pytest.raises(SystemExit, match=f"{what} in float32 differ by"):
        list(restore_gpu.parity(restore_gpu.QUICK["bf_dncnn"]))


def test_a_step_moves_the_weights_where_adam_moves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore_gpu, "DEVICE", torch.device("cpu"))
    restorer = restore_gpu.QUICK["edm"]
    batch = restore_gpu.example_batch(4, 16)
    net, plain = (restorer.build(seed=0).train() for _ in range(2))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        restore_gpu.training_step(restorer, net, batch)()
        torch.manual_seed(0)
        restorer.loss(plain, batch, generator=torch.default_generator).backward()
    torch.optim.Adam(plain.parameters(), lr=1e-4).step()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.slow
@needs_cpu
def test_two_processes_scale_a_training(tmp_path: Path) -> None:
    file = tmp_path / "scaling.json"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "benchmarks.restore.scaling", "--quick", "--json", str(file)),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = parse_lines(file.read_text(), name="scaling.json")
    seconds = {line.case: line for line in found if line.unit == "s"}
    case = "training, per image, edm, float32, batches of 4, 2 processes with DDP"
    assert case in seconds
    for line, efficiency, hours in zip(found[::3], found[1::3], found[2::3], strict=True):
        assert line.ratio is not None
        assert efficiency.value == pytest.approx(100 * line.ratio / 2, rel=RATIO_TOLERANCE)
        steps, of = (400_000, 512) if "edm" in line.case else (40_000, 128)
        assert hours.value == pytest.approx(steps * of * line.value / 3600, rel=RATIO_TOLERANCE)
    assert done.stdout.count('"unit": "s"') == len(seconds)  # one process prints
