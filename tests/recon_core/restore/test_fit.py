"""Training: schedules, averaging, exact resumption, NaN, micro-batches and precisions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recon_core.augment import mirrored_labels
from recon_core.precision import float32_arithmetic
from recon_core.restore.edm import EDM
from recon_core.restore.examples import Examples
from recon_core.restore.fit import Fit, InBF16, NonfiniteLossError, Ranks, Training
from recon_core.restore.regression import BFDnCNN, RegressionUNet
from recon_core.restore.unet import UNET_SIZES
from tests.recon_core.drawing import refuses

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


@pytest.mark.parametrize("changed", [{}, {"precision": "bf16", "accumulate": 3}], ids=str)
@pytest.mark.parametrize("kind", sorted(SMALL_RESTORERS))
def test_a_stopped_fit_continues_bit_for_bit(
    kind: str, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(UNET_SIZES, "tiny", replace(UNET_SIZES["tiny"], dropout=0.2))
    restorer, training = SMALL_RESTORERS[kind], replace(SHORT, **changed)
    through = Fit(restorer, training, device="cpu")
    losses = [through.update(examples(step)) for step in range(6)]
    assert through.done

    first = Fit(restorer, training, device="cpu")
    early = [first.update(examples(step)) for step in range(3)]
    state = first.state_dict()
    torch.rand(7)  # whatever else draws from the global generator does not matter
    second = Fit(restorer, training, device="cpu")
    second.load_state_dict(state)
    assert early + [second.update(examples(step)) for step in range(3, 6)] == losses
    a, b = through.state_dict(), second.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", sorted(SMALL_RESTORERS))
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


def test_a_foreign_state_is_refused() -> None:
    fit = Fit(SMALL_RESTORERS["bf_dncnn"], SHORT, device="cpu")
    refuses("no training state", fit.load_state_dict, {"weights": torch.zeros(1)})


EDM_TINY = EDM(size="tiny", resolution=16)
BF_TINY = BFDnCNN(depth=4, n_channels=8)
TRAINING = Training(n_steps=8, batch_size=6, lr=1e-3, warmup_images=0, ema_halflife_images=20)
BF16_TOLERANCE = 1e-3
"""Of the loss in each of the first steps; 4e-5 was seen, and bfloat16 itself rounds to 4e-3."""


def gradient(fit: Fit, batch: Examples) -> Tensor:
    fit._gradient(batch, lr=0.0)
    grads = [weights.grad.flatten() for weights in fit.net.parameters()]
    return torch.cat(grads)


class OneOfTwo(Ranks):
    """A rank of two with a third of the batch, or the rest of it."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def place(self, n: int) -> tuple[int, int]:
        return 2 * self.rank, 6


def test_mirrored_training_flips_half_of_the_pairs_and_their_labels() -> None:
    batch = examples(0, n=400)
    labels = torch.randn(400, 9, generator=torch.Generator().manual_seed(1))
    batch = replace(batch, augment=labels)
    plain, mirror = TRAINING, replace(TRAINING, mirror=True, batch_size=400)
    seen: list[Examples] = []

    class Looking(EDM):
        def loss(self, net: nn.Module, batch: Examples, **how: Any) -> Tensor:
            seen.append(batch)
            return next(net.parameters()).square().sum()

    looking = Looking(size="tiny", resolution=16)
    fit = Fit(looking, mirror, device="cpu")
    for _step in range(2):
        fit.update(batch)
    Fit(looking, plain, device="cpu").update(batch)
    one_step, next_step, untouched = seen
    torch.testing.assert_close(untouched.target, batch.target)
    flipped = (one_step.target != batch.target).flatten(1).any(dim=1)
    assert 150 < int(flipped.sum()) < 250
    assert not torch.equal(flipped, (next_step.target != batch.target).flatten(1).any(dim=1))
    for name in ("condition", "target"):
        ours, given = getattr(one_step, name), getattr(batch, name)
        torch.testing.assert_close(ours[flipped], given[flipped].flip(-1))
        torch.testing.assert_close(ours[~flipped], given[~flipped])
    torch.testing.assert_close(one_step.augment[flipped], mirrored_labels(labels[flipped]))
    torch.testing.assert_close(one_step.augment[~flipped], labels[~flipped])


@pytest.mark.parametrize("mirror", [False, True])
def test_micro_batches_and_ranks_have_the_gradient_of_the_whole_batch(mirror: bool) -> None:
    """Mirrored, they flip the same pairs."""
    training, batch = replace(TRAINING, mirror=mirror, seed=1), examples(0, 6)
    whole = gradient(Fit(EDM_TINY, training, device="cpu"), batch)
    other = gradient(Fit(EDM_TINY, replace(training, mirror=not mirror), device="cpu"), batch)
    assert (whole - other).norm() > 1e-3
    for accumulate in (4, 6):
        parts = Fit(EDM_TINY, replace(training, accumulate=accumulate), device="cpu")
        torch.testing.assert_close(gradient(parts, batch), whole, rtol=1e-4, atol=1e-5)
    shares = [
        gradient(Fit(EDM_TINY, training, device="cpu", ranks=OneOfTwo(rank)), batch.rows(*rows))
        for rank, rows in enumerate(((0, 2), (2, 6)))
    ]
    torch.testing.assert_close((shares[0] + shares[1]) / 2, whole, rtol=1e-4, atol=1e-5)


def test_a_batch_may_be_smaller_than_the_micro_batches_are_many() -> None:
    fit = Fit(EDM_TINY, replace(TRAINING, accumulate=5), device="cpu")
    whole = Fit(EDM_TINY, TRAINING, device="cpu")
    assert fit.update(examples(0, n=3)) == pytest.approx(whole.update(examples(0, n=3)))


@pytest.mark.parametrize("loss_terms", ["mse", "mse+ssim"])
def test_the_losses_of_bf_dncnn_add_up(loss_terms: str) -> None:
    restorer = replace(BF_TINY, loss_terms=loss_terms)
    net = restorer.build(seed=0).eval()  # with the statistics fixed
    batch, generator = examples(0, 6), torch.Generator()
    whole = restorer.loss(net, batch, generator=generator)
    shares = [
        restorer.loss(net, batch.rows(*rows), generator=generator, first=rows[0], total=6)
        for rows in ((0, 2), (2, 6))
    ]
    torch.testing.assert_close(sum(shares), whole)


@pytest.mark.parametrize("restorer", [EDM_TINY, BF_TINY], ids=["edm", "bf_dncnn"])
def test_bf16_follows_float32(restorer: EDM | BFDnCNN) -> None:
    reference = Fit(restorer, TRAINING, device="cpu")
    rounded = Fit(restorer, replace(TRAINING, precision="bf16"), device="cpu")
    different = False
    for step in range(8):
        exact, near = reference.update(examples(step, 6)), rounded.update(examples(step, 6))
        assert near == pytest.approx(exact, rel=BF16_TOLERANCE)
        different |= near != exact
    assert different  # bfloat16 was at work
    kept = [*rounded.state_dict().values()]
    assert all(value.dtype in (torch.float32, torch.int64) for value in kept)


def test_only_the_network_computes_in_bf16() -> None:
    seen: list[torch.dtype] = []
    net = torch.nn.Conv2d(3, 3, 1)
    net.register_forward_hook(lambda _net, _inputs, output: seen.append(output.dtype))
    answer = InBF16(net)(torch.rand(1, 3, 4, 4))
    assert seen == [torch.bfloat16]
    assert answer.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_the_u_nets_norms_stay_in_float32() -> None:
    """As CUDA's autocast has them: in bfloat16 they are slow on CPUs, and no more exact for it."""
    seen: dict[type, set[torch.dtype]] = {torch.nn.Conv2d: set(), torch.nn.GroupNorm: set()}
    net = RegressionUNet(size="tiny").build(seed=0)
    for module in net.modules():
        for kind, dtypes in seen.items():
            if isinstance(module, kind):
                module.register_forward_hook(lambda _m, _i, out, to=dtypes: to.add(out.dtype))
    InBF16(net)(torch.rand(1, 3, 32, 32))
    assert seen == {torch.nn.Conv2d: {torch.bfloat16}, torch.nn.GroupNorm: {torch.float32}}


def test_tf32_is_refused_where_there_is_none() -> None:
    refuses("precision='tf32'", Fit, EDM_TINY, replace(TRAINING, precision="tf32"), device="cpu")


def test_convolutions_are_exact_inside_and_as_before_after() -> None:
    convolutions = torch.backends.cudnn.conv
    before = convolutions.fp32_precision
    with float32_arithmetic("float32", torch.device("cpu")):
        assert convolutions.fp32_precision == "ieee"
    assert convolutions.fp32_precision == before


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_precisions_follow_float32_on_a_gpu(precision: str) -> None:
    reference = Fit(EDM_TINY, TRAINING, device="cuda")
    rounded = Fit(EDM_TINY, replace(TRAINING, precision=precision), device="cuda")
    for step in range(8):
        exact, near = reference.update(examples(step, 6)), rounded.update(examples(step, 6))
        assert near == pytest.approx(exact, rel=BF16_TOLERANCE)
