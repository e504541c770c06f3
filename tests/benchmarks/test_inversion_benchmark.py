"""The benchmark of the MixCon paper, small: what it times is the same on both sides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.inversion import speed as inversion
from benchmarks.inversion import synthetic
from benchmarks.inversion.speed import PlainLeNet5, PlainMixCon, literal_mixcon, load
from benchmarks.results.page import RESULTS
from recon_core.types import seeded_generator
from recon_core.victims.separability import MixCon, mixcon
from recon_core.victims.split import LeNet5, initial_weights

DEFENCES = (MixCon(lam=1.0, beta=1e-2), MixCon(lam=0.1, beta=1e-4))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inversion, "SHAPE", (1, 16, 16))
    monkeypatch.setattr(inversion, "N_CLASSES", 3)
    monkeypatch.setattr(inversion, "PER_CLASS", 2)
    monkeypatch.setattr(inversion, "N_INVERTED", 4)
    monkeypatch.setattr(inversion, "LAMBDAS", (0.01, 1.0, 10.0))


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 16, 16)], ids=str)
def test_the_reference_is_the_same_network(shape: tuple[int, int, int]) -> None:
    model = LeNet5(cut=2).on(shape, 4)
    generators = [seeded_generator(0, run, "victim") for run in range(2)]
    weights = initial_weights(model, generators, dtype=torch.float64)
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


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("channels_last", [False, True])
def test_trainings_that_differ_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, channels_last: bool
) -> None:
    ours = inversion.train_split
    monkeypatch.setattr(
        inversion,
        "train_split",
        lambda *given, training, **named: ours(
            *given, training=replace(training, lr=0.0101), **named
        ),
    )
    with pytest.raises(ValueError, match=r"differ by .* of network 0, "):
        inversion.training(1, defences=DEFENCES, n_steps=1, channels_last=channels_last)


@pytest.mark.usefixtures("small")
def test_losses_that_differ_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inversion, "literal_mixcon", lambda h, d: 1.01 * literal_mixcon(h, d))
    with pytest.raises(ValueError, match=r"differ by 0\.0099 relative of losses"):
        inversion.loss(1, n_networks=2, n_features=5, per_call=1)


def test_the_synthetic_data_are_the_papers() -> None:
    """MixCon paper, section 4.2: N(0, I) and N(-1, I), 5 % of the training labels exchanged."""
    x, labels, noisy = synthetic.gaussians(torch.Generator().manual_seed(0), 4000, 4000)
    x = x.flatten(1)
    for label, mean in ((0, 0.0), (1, -1.0)):
        assert (x[labels == label].mean(0) - mean).abs().max() < 0.1
        assert (x[labels == label].var(0) - 1).abs().max() < 0.1
    assert int((labels != noisy)[:4000].sum()) == 200
    assert torch.equal(labels[4000:], noisy[4000:])


HARDER = {"distance": [1.0, 1.1], "se": [2.0, 2.1], "cs": [0.1, 0.12]}


@pytest.mark.parametrize(
    ("collapsed", "mixed", "worst"),
    [
        (0.5, HARDER | {"se worst": 0.4, "cs worst": 0.9}, "holds"),
        (0.8, {"distance": [3.0, 3.1], "se": [1.0, 1.1], "cs": [0.5, 0.52]}
         | {"se worst": 0.1, "cs worst": 0.99}, "does not hold"),
        (0.5, HARDER | {"se worst": 0.1, "cs worst": 0.9}, "undecided"),
    ],
)  # fmt: skip
def test_claims_of_synthetic_vectors_come_out_either_way(
    collapsed: float, mixed: dict[str, Any], worst: str
) -> None:
    plain = {"distance": [2.0, 2.1], "se": [1.5, 1.6], "cs": [0.2, 0.22]}
    plain |= {"se worst": 0.3, "cs worst": 0.95}
    numbers = {synthetic.PLAIN: plain, synthetic.MIXED: mixed, synthetic.COLLAPSED: {}}
    accuracy = {synthetic.PLAIN: 0.91, synthetic.MIXED: 0.88, synthetic.COLLAPSED: collapsed}
    cells = [
        {"name": name, "server": server, **own}
        | {"test_accuracy": [accuracy[name] + 0.01 * (server != "default")] * 2}
        for name, own in numbers.items()
        for server in synthetic.SERVERS
    ]
    about = {"command": synthetic.COMMAND, "seconds": 1.0, "hardware": {}}
    claims = synthetic.claims_of(about | {"cells": cells})
    others = "holds" if collapsed == 0.5 else "does not hold"
    assert [claim.outcome for claim in claims] == [
        *("holds", others, "holds", others, others, others, worst)
    ]
    assert all("rate 0.02 (theirs .1), torch's own start" in claim.ours for claim in claims)


def test_kept_claims_of_synthetic_vectors_are_those_of_their_record(tmp_path: Path) -> None:
    kept = RESULTS / "claims" / "mixcon.json"
    synthetic.main(["--check", "--json", str(kept)])
    changed = tmp_path / "changed.json"
    changed.write_text(kept.read_text().replace("93.4% to 90.0%", "93.4% to 99.0%"))
    with pytest.raises(SystemExit):
        synthetic.main(["--check", "--json", str(changed)])
