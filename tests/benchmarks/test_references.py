"""References that products are held to or timed against: they compute the same, by small networks.

The reference of the KKT attack has a file of its own."""

from __future__ import annotations

import pytest
import torch

from benchmarks import record
from benchmarks.autoencoder import speed as autoencoder
from benchmarks.inversion.speed import PlainLeNet5, PlainMixCon, literal_mixcon, load
from benchmarks.kkt.agreement import GD, Case, Duel, Victims, exceeded, trajectory
from benchmarks.kkt.reference import ReferenceAttack, ReferenceNet, objective
from benchmarks.restore import speed as restore
from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.restore import BFDnCNN
from recon_core.restore.edm import EDM
from recon_core.restore.unet import UNET_SIZES, UNetSize
from recon_core.types import seeded_generator
from recon_core.victims import autoencoder as autoencoders
from recon_core.victims import split
from recon_core.victims.autoencoder import FullyConnected, UNet
from recon_core.victims.network import Conv, Network
from recon_core.victims.separability import MixCon, mixcon
from recon_core.victims.split import LeNet5


@pytest.mark.parametrize(
    "network",
    [
        FullyConnected(depth=4, width=16),
        UNet(channels=(4, 8, 6), convolutions=1, skips=False),
        UNet(channels=(8, 8, 4), convolutions=2, skips=False),
        UNet(channels=(5,), skips=False),
    ],
    ids=str,
)
def test_the_plain_autoencoder_is_the_same_network(network: FullyConnected | UNet) -> None:
    model = network.on((3, 8, 8))
    weights = autoencoders.initial_weights(
        model, [seeded_generator(0, 0, "victim")], dtype=torch.float64
    )
    module = autoencoder.plain_module(network, (3, 8, 8)).double()
    autoencoder.load(module, weights)
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(module(x), model.forward(weights, x.unsqueeze(0))[0])


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 16, 16)], ids=str)
def test_the_plain_split_network_is_the_same(shape: tuple[int, int, int]) -> None:
    model = LeNet5(cut=2).on(shape, 4)
    generators = [seeded_generator(0, run, "victim") for run in range(2)]
    weights = split.initial_weights(model, generators, dtype=torch.float64)
    module = PlainLeNet5(LeNet5(cut=2), shape, 4).double()
    load(module, weights, 1)
    x = torch.rand(2, *shape, dtype=torch.float64)
    with torch.no_grad():
        h = model.features(weights, x.unsqueeze(0))
        torch.testing.assert_close(module.h(x), h[1])
        torch.testing.assert_close(module.g(module.h(x)), model.classify(weights, h)[1])


@pytest.mark.parametrize("normalise", [True, False])
def test_the_references_have_the_same_loss(normalise: bool) -> None:
    defence = MixCon(beta=0.3, eps=0.2, normalise=normalise)  # some distances are cut off
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(5, 4, 6, generator=generator, dtype=torch.float64)
    beta = torch.tensor([defence.beta], dtype=torch.float64)
    ours = mixcon(h.unsqueeze(0), beta, normalise=normalise, eps=defence.eps)[0]
    torch.testing.assert_close(PlainMixCon(defence, 4)(h.flatten(0, 1)), ours)
    torch.testing.assert_close(literal_mixcon(h, defence), ours)


@pytest.fixture(scope="module")
def victims() -> Victims:
    return Victims("photos", 2)


def small(network: Network, **attack: object) -> Case:
    settings = {"n_candidates": 8, "save_at": (1, 2, 20)} | attack
    return Case(network=network, attack=KKTAttack(**settings), epochs=10)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "case",
    [
        small(Network(widths=(9, 7))),
        small(Network(widths=(9,), conv=Conv(kernel=5, channels=2), bias="first"), alpha=5.0),
        small(Network(widths=(9,), bias="all"), condition="multiclass", lam_scale="none"),
        small(Network(widths=(9,), activation="leaky_relu"), condition="regression"),
        small(Network(widths=(9,), activation="gelu"), optimiser=GD, lam_lr=1e-3),
    ],
    ids=str,
)
def test_the_engine_walks_as_the_reference_does(victims: Victims, case: Case) -> None:
    found, of_gradients = trajectory(
        Duel(victims, victims.specs[1], case, torch.float64), str(case)
    )
    assert exceeded(found) is None
    assert found.value < 1e-11
    assert of_gradients < 1e-11


def test_one_multiplier_for_the_nearest_class_is_equation_12() -> None:
    twelve, eight = (
        ReferenceAttack(condition=condition, lam_min=0.0)
        for condition in ("multiclass", "every class")
    )
    torch.manual_seed(0)
    net = ReferenceNet((1, 2, 3), (5,), 4, bias="first").double()
    x, lam = torch.randn(6, 6).double(), torch.rand(6).double()
    y = torch.tensor([0, 1, 2, 3, 0, 1])
    rival = net(x).scatter(1, y[:, None], -torch.inf).argmax(1)
    every = torch.zeros(6, 4).double().scatter(1, rival[:, None], lam[:, None])
    expected = objective(net, x, lam, y, twelve)
    torch.testing.assert_close(objective(net, x, every, y, eight), expected)
    own = every.scatter(1, y[:, None], 7.0)
    torch.testing.assert_close(objective(net, x, own, y, eight), expected)
    assert objective(net, x, every + 0.1, y, eight) != expected


ATTENDING = UNetSize(
    n_channels=8, channel_mult=(1, 2), n_blocks=2, attention_at=(8,), dropout=0.0, patch=1
)
CASES = (
    restore.Case(restorer=EDM(size="tiny", resolution=16), batch=2, n_sampled=2),
    restore.Case(restorer=EDM(size="small", resolution=16), batch=2, n_sampled=2),
    restore.Case(restorer=BFDnCNN(depth=4, n_channels=8), batch=2, n_sampled=2),
    restore.Case(restorer=BFDnCNN(depth=4, n_channels=8, patch=2), batch=2, n_sampled=2),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_computes_what_we_do(
    case: restore.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(UNET_SIZES, "tiny", ATTENDING)
    monkeypatch.setattr(record, "AGREEMENT", 2e-5)
    restore.check_sides(case)


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_both_trainings_go_the_same_way(
    case: restore.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(UNET_SIZES, "tiny", ATTENDING)
    ours, theirs = restore.fits(case)
    for step in range(3):
        batch = restore.example_batch(4, case.side, seed=step)
        seed = ours._seed("noise")
        assert theirs.update(batch, seed) == pytest.approx(ours.update(batch), rel=1e-4)
    for first, second in ((ours.net, theirs.net), (ours.ema, theirs.ema)):
        expected = second.state_dict()
        for name, value in first.state_dict().items():
            assert torch.allclose(value, expected[name], rtol=1e-3, atol=1e-6), name
