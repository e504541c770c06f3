"""The training loop: schedules, averaging, exact resumption, and what happens on NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from recon_core.restore import CPU_RESTORERS, CPU_TRAININGS, PAPER_TRAININGS, RESTORERS
from recon_core.restore.edm import EDM
from recon_core.restore.examples import Examples
from recon_core.restore.fit import Fit, NonfiniteLossError, Training
from recon_core.restore.regression import BFDnCNN, RegressionUNet
from recon_core.restore.unet import UNET_SIZES

SHORT = Training(
    n_steps=6, batch_size=4, lr=1e-3, warmup_images=8, ema_halflife_images=20, ema_ramp=1.0
)
SMALL_RESTORERS = {
    "edm": EDM(size="tiny", resolution=16, n_steps=3),
    "bf_dncnn": BFDnCNN(depth=4, n_channels=8),
    "unet": RegressionUNet(size="tiny", resolution=16),
}


def examples(step: int, n: int = 4) -> Examples:
    generator = torch.Generator().manual_seed(100 + step)
    target = torch.rand(n, 3, 16, 16, generator=generator) * 2 - 1
    noise = torch.randn(n, 3, 16, 16, generator=generator)
    return Examples(
        condition=(target + 0.3 * noise).clamp(-1, 1), target=target, augment=torch.zeros(n, 9)
    )


def equal_states(first: Fit, second: Fit) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@dataclass(frozen=True)
class Parabola:
    """A "restorer" of one weight w, pulled to 1, with a loss that is NaN from some step on."""

    nan_from: int = 1_000_000

    def build(self, *, seed: int) -> nn.Module:
        net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(net.weight)
        net.register_buffer("calls", torch.zeros(()))
        return net

    def loss(self, net: nn.Module, batch: Examples, *, generator: torch.Generator) -> Tensor:
        net.calls += 1
        loss = (net.weight - 1).square().sum()
        return loss * torch.nan if net.calls > self.nan_from else loss


@pytest.mark.parametrize("kind", sorted(RESTORERS))
def test_a_stopped_fit_continues_bit_for_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(UNET_SIZES, "tiny", replace(UNET_SIZES["tiny"], dropout=0.2))
    restorer = SMALL_RESTORERS[kind]
    through = Fit(restorer, SHORT, device="cpu")
    losses = [through.update(examples(step)) for step in range(6)]
    assert through.done

    first = Fit(restorer, SHORT, device="cpu")
    early = [first.update(examples(step)) for step in range(3)]
    state = first.state_dict()
    torch.rand(7)  # whatever else draws from the global generator does not matter
    second = Fit(restorer, SHORT, device="cpu")
    second.load_state_dict(state)
    late = [second.update(examples(step)) for step in range(3, 6)]
    assert early + late == losses
    assert equal_states(through, second)


@pytest.mark.parametrize("kind", sorted(RESTORERS))
def test_training_lowers_the_loss(kind: str) -> None:
    restorer = SMALL_RESTORERS[kind]
    fit = Fit(restorer, replace(SHORT, n_steps=40, lr=1e-2), device="cpu")
    losses = [fit.update(examples(0)) for _ in range(40)]
    assert sum(losses[-5:]) < 0.85 * sum(losses[:5])


def test_a_saved_state_is_not_changed_by_further_training() -> None:
    fit = Fit(SMALL_RESTORERS["bf_dncnn"], SHORT, device="cpu")
    fit.update(examples(0))
    state = fit.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    fit.update(examples(1))
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_training_leaves_the_global_generator_alone() -> None:
    fit = Fit(SMALL_RESTORERS["edm"], SHORT, device="cpu")
    before = torch.get_rng_state()
    fit.update(examples(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loss_that_is_not_a_number_names_the_step() -> None:
    fit = Fit(Parabola(nan_from=3), replace(SHORT, n_steps=9), device="cpu")
    for _ in range(3):
        fit.update(examples(0))
    weight = fit.net.weight.clone()
    with pytest.raises(NonfiniteLossError, match=r"loss=nan in step 3 with learning rate") as info:
        fit.update(examples(0))
    assert info.value.step == 3
    assert torch.equal(fit.net.weight, weight)


def test_the_average_forgets_half_in_its_halflife() -> None:
    training = replace(
        SHORT, batch_size=8, ema_halflife_images=40, ema_ramp=1e9, n_steps=6, warmup_images=0
    )
    fit = Fit(Parabola(), training, device="cpu")
    fit.update(examples(0))
    with torch.no_grad():
        fit.ema.weight.fill_(1.0)
        fit.net.weight.fill_(0.0)
    for step in range(1, 6):  # 5 steps of 8 images are one halflife
        fit._average(training.ema_beta(step))
    assert fit.ema.weight.item() == pytest.approx(0.5)


def test_the_average_ramps_up() -> None:
    training = replace(SHORT, batch_size=10, ema_halflife_images=100, ema_ramp=0.05)
    assert training.ema_beta(0) == 0.0
    # After 400 images the halflife is .05 * 400 = 20 images, from 2000 images on it is 100.
    assert training.ema_beta(40) == pytest.approx(0.5 ** (10 / 20))
    assert training.ema_beta(200) == pytest.approx(0.5 ** (10 / 100))
    assert training.ema_beta(5000) == pytest.approx(0.5 ** (10 / 100))


def test_learning_rate_schedules() -> None:
    ramp = Training(batch_size=500, lr=1e-3, warmup_images=10_000)
    assert ramp.learning_rate(0) == pytest.approx(1e-3 * 500 / 10_000)
    assert ramp.learning_rate(9) == pytest.approx(0.5e-3)
    assert ramp.learning_rate(19) == ramp.learning_rate(10_000) == pytest.approx(1e-3)
    # Image restoration paper, section 4: halved after 25,000 batches and every 5,000 from there on.
    halving = Training(n_steps=40_000, batch_size=128, warmup_images=0, decay="halving")
    steps = (0, 24_999, 25_000, 29_999, 30_000, 39_999)
    factors = [halving.learning_rate(step) / 1e-3 for step in steps]
    assert factors == pytest.approx([1, 1, 0.5, 0.5, 0.25, 0.125])
    cosine = Training(n_steps=100, warmup_images=0, decay="cosine", lr=2.0)
    assert cosine.learning_rate(0) == 2.0
    assert cosine.learning_rate(50) == pytest.approx(1.0)
    assert 0 < cosine.learning_rate(99) < 1e-3


def test_every_kind_has_its_trainings() -> None:
    assert (
        PAPER_TRAININGS.keys() == CPU_TRAININGS.keys() == CPU_RESTORERS.keys() == RESTORERS.keys()
    )
    assert all(restorer.kind == kind for kind, restorer in CPU_RESTORERS.items())
    # The image restoration paper trains the diffusion model with EDM's settings, BF-DnCNN without
    # averaging.
    assert PAPER_TRAININGS["edm"].learning_rate(0) == pytest.approx(1e-3 * 512 / 10e6)
    assert PAPER_TRAININGS["bf_dncnn"].ema_beta(1000) == 0.0
    assert PAPER_TRAININGS["bf_dncnn"].learning_rate(39_999) == pytest.approx(1e-3 / 8)


def test_a_foreign_state_is_refused() -> None:
    fit = Fit(SMALL_RESTORERS["bf_dncnn"], SHORT, device="cpu")
    with pytest.raises(ValueError, match="no training state"):
        fit.load_state_dict({"weights": torch.zeros(1)})
