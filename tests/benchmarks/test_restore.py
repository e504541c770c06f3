"""The restorers' benchmark at tiny sizes: is the reference the same network, are lines what they
say they are?"""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

from benchmarks.record import Measurement
from benchmarks.restore import parts as restore_parts
from benchmarks.restore import speed as restore
from benchmarks.restore.speed import Case, Sizes, agreement, check_agreement, example_batch, fits
from benchmarks.store import sample as store_sample
from recon_core.restore import BFDnCNN
from recon_core.restore.edm import EDM
from recon_core.restore.unet import UNET_SIZES, UNetSize
from tests.benchmarks.pages import build_page
from tests.benchmarks.test_record import MEASUREMENT

TINY = Sizes(
    cases=(
        Case(restorer=EDM(size="tiny"), batch=2, n_sampled=2),
        Case(restorer=BFDnCNN(depth=3, n_channels=4), batch=2, n_sampled=2),
    ),
    repeats=1,
    edm_steps=2,
    n_waits=2,
    n_noise_images=40,
    compiled=False,
    store=store_sample.Sizes(n_parts=2, n_runs=3, n_images=20, n_pairs=110),
)
ATTENDING = UNetSize(
    n_channels=8, channel_mult=(1, 2), n_blocks=2, attention_at=(8,), dropout=0.0, patch=1
)
CASES = (
    Case(restorer=EDM(size="tiny", resolution=16), batch=2, n_sampled=2),
    Case(restorer=EDM(size="small", resolution=16), batch=2, n_sampled=2),
    Case(restorer=BFDnCNN(depth=4, n_channels=8), batch=2, n_sampled=2),
    Case(restorer=BFDnCNN(depth=4, n_channels=8, patch=2), batch=2, n_sampled=2),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_computes_what_we_do(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(UNET_SIZES, "tiny", ATTENDING)
    found = agreement(case)
    assert found.keys() == {"losses", "gradients", "restorations"}
    assert all(difference < 2e-5 for difference in found.values()), found


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_both_trainings_go_the_same_way(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(UNET_SIZES, "tiny", ATTENDING)
    ours, theirs = fits(case)
    for step in range(3):
        batch = example_batch(4, case.side, seed=step)
        seed = ours._seed("noise")
        assert theirs.update(batch, seed) == pytest.approx(ours.update(batch), rel=1e-4)
    for first, second in ((ours.net, theirs.net), (ours.ema, theirs.ema)):
        expected = second.state_dict()
        for name, value in first.state_dict().items():
            assert torch.allclose(value, expected[name], rtol=1e-3, atol=1e-6), name


def test_nothing_is_timed_where_the_sides_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = restore.reference_loss
    monkeypatch.setattr(restore, "reference_loss", lambda *given: 1.01 * honest(*given))
    with pytest.raises(ValueError, match=r"losses of the two sides differ by 0\.0099"):
        check_agreement(CASES[2])


@pytest.fixture(scope="module")
def lines() -> list[Measurement]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(restore, "QUICK", TINY)
            patch.setattr(restore, "_in_new_process", memory_here)
            return list(restore.measure(quick=True))
    finally:
        torch.set_num_threads(n_threads)


def memory_here(side: str, what: str, case: Case) -> float:
    """Does the work without a process of its own, and says that ours takes half."""
    restore._work(side, what, case)
    return 5.0 if side == "ours" else 10.0


def test_every_claim_has_its_line(lines: list[Measurement]) -> None:
    of_each = {"s": 9, "img/s": 2, "MiB": 2, "%": 1}
    units = [line.unit for line in lines]
    assert {unit: units.count(unit) for unit in of_each} == {u: 2 * n for u, n in of_each.items()}
    for words in ("training, per image", "sampling, per image", "peak memory of training"):
        found = [line for line in lines if line.case.startswith(words)]
        assert len(found) == 2
        assert all(line.ratio is not None for line in found)
    memory = [line.ratio for line in lines if line.unit == "MiB"]
    assert memory == [2.0] * 4
    shares = [line.value for line in lines if line.unit == "%"]
    assert all(0 < share < 100 for share in shares)
    text = "\n".join(json.dumps(asdict(line)) for line in lines)
    assert "training, per image, EDM tiny" in build_page({"benchmarks/restore.json": text})


def test_sampling_is_scaled_to_all_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = replace(MEASUREMENT, value=3.0, reference_value=6.0, ratio=2.0)
    monkeypatch.setattr(restore, "compared", lambda *_a, **kw: replace(timed, case=_a[1]))
    seconds, rate = restore.sampling(TINY.cases[0], TINY)
    # Two sampler steps are three evaluations of the network; the paper's 18 are 35.
    assert (seconds.value, seconds.reference_value) == pytest.approx((35.0, 70.0))
    assert rate.value == pytest.approx(1 / 35, rel=1e-3)
    assert "35 evaluations of the network, 3 of which are timed" in seconds.case


@pytest.mark.slow
@pytest.mark.parametrize(("side", "least_mib"), [("ours", 20), ("theirs", 20)])
def test_memory_is_what_the_work_adds(side: str, least_mib: float) -> None:
    # Sixteen layers keep two maps or more of 4 x 64 x 32 x 32 floats for backward, 1 MiB each.
    case = Case(restorer=BFDnCNN(depth=18, n_channels=64), batch=4, n_sampled=1)
    assert least_mib < restore._in_new_process(side, "training", case) < 500


def test_without_a_compiler_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(restore_parts.shutil, "which", lambda _name: None)
    found = list(restore_parts.parts(BFDnCNN(depth=3, n_channels=4), 1, 1))
    assert not any("torch.compile" in line.case for line in found)
    assert "torch.compile is left out: there is no C++ compiler" in capsys.readouterr().err
