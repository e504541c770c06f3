"""What beta is for: without it MixCon's features collapse."""

from __future__ import annotations

import pytest
import torch

from recon_core.victims.separability import MixCon
from recon_core.victims.split import SplitMLP, initial_weights
from recon_core.victims.split_evaluation import evaluate_split, features_of
from recon_core.victims.split_training import SplitTraining, train_split

pytestmark = pytest.mark.usefixtures("one_thread")


def shuffle(stream: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * stream + epoch)


def test_without_beta_features_collapse_and_with_it_they_stay_apart() -> None:
    """MixCon paper, section 4.2, figure 2 and table 1, on its synthetic data; with torch's own
    start, a rate of .02 and a larger eps, since at the paper's start and rate of .1 all ReLUs of
    the two features
    soon give 0, of a network without defence too."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(1000) % 2
    x = (torch.randn(1000, 10, generator=generator) - labels.unsqueeze(1)).view(1000, 1, 1, 10)
    model = SplitMLP(init="torch").on((1, 1, 10), 2)
    pairs = ((0.1, 0.01), (1.0, 0.01), (1.0, 0.0))
    mixcons = [MixCon(lam=lam, beta=beta, eps=1e-2, normalise=False) for lam, beta in pairs]
    weights = initial_weights(model, [generator], dtype=torch.float32)
    weights = {name: tensor[[0] * 4] for name, tensor in weights.items()}
    found = train_split(
        model, weights, x[:800], labels[:800], defences=[None, *mixcons],
        training=SplitTraining(lr=0.02), shuffle=shuffle,
    )  # fmt: skip
    features = features_of(model, found.weights, x[:800])
    vanilla, mild, strong, collapsed = [float(torch.pdist(z).square().mean()) for z in features]
    assert vanilla > 2
    assert 0.1 < mild < 1
    assert 0.03 < strong < 1
    assert collapsed < 1e-2
    accuracy = evaluate_split(model, found.weights, x[800:], labels[800:]).accuracy.tolist()
    assert min(accuracy[:2]) > 0.85
    assert accuracy[3] < 0.65
