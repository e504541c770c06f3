"""The restorers' benchmark at tiny sizes: is the reference the same network, are lines what they
say they are?"""

from __future__ import annotations

import pytest
import torch

from benchmarks import record
from benchmarks.restore import speed as restore
from benchmarks.restore.speed import Case, check_sides, example_batch, fits
from recon_core.restore import BFDnCNN
from recon_core.restore.edm import EDM
from recon_core.restore.unet import UNET_SIZES, UNetSize

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
    monkeypatch.setattr(record, "AGREEMENT", 2e-5)
    check_sides(case)


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
    with pytest.raises(ValueError, match=r"differ by 0\.0099 relative of losses"):
        check_sides(CASES[2])
