"""Features, accuracy and loss of R split networks: those of torch's layers, in blocks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recon_core.victims.autoencoder import Weights
from recon_core.victims.split import SplitMLP, initial_weights
from recon_core.victims.split_evaluation import (
    IMAGES_AT_ONCE,
    NETWORKS_ON_CPU,
    check_fits,
    evaluate_split,
    features_of,
)
from tests.recon_core.victims.torch_split import torch_split

SHAPE = (1, 2, 3)
R, K, N = NETWORKS_ON_CPU + 2, 3, 36
MLP = SplitMLP(widths=(12, 8, 8), cut=2, init="torch")
MODEL = MLP.on(SHAPE, K)


def start() -> Weights:
    generators = [torch.Generator().manual_seed(i) for i in range(R)]
    return initial_weights(MODEL, generators, dtype=torch.float32)


def images(*lead: int) -> Tensor:
    return torch.rand(*lead, *SHAPE, generator=torch.Generator().manual_seed(7))


def test_evaluates_and_asks_in_blocks() -> None:
    n = IMAGES_AT_ONCE + 3
    x, labels = images(R, n), torch.arange(n) % K
    found, features = evaluate_split(MODEL, start(), x, labels), features_of(MODEL, start(), x)
    assert features.shape == (R, n, MODEL.n_features)
    for r in range(R):
        h, g, _leaves = torch_split(MLP, SHAPE, K, start(), r)
        with torch.no_grad():
            z = h(x[r])
            logits = g(z)
        torch.testing.assert_close(features[r], z)
        assert float(found.loss[r]) == pytest.approx(float(F.cross_entropy(logits, labels)))
        assert float(found.accuracy[r]) == int((logits.argmax(1) == labels).sum()) / n
    shared = features_of(MODEL, start(), x[0])
    torch.testing.assert_close(shared[0], features[0])
    assert not features.requires_grad


def test_other_shapes_are_refused() -> None:
    other = SplitMLP(widths=(12, 8, 9), cut=2).on(SHAPE, K)
    with pytest.raises(ValueError, match=r"weights of .* for a network of"):
        check_fits(other, start(), images(N))
    uneven = start() | {name: tensor[:2] for name, tensor in start().items()}
    uneven |= {name: start()[name] for name in list(uneven)[:1]}
    with pytest.raises(ValueError, match=rf"weights of \[2, {R}\] networks"):
        check_fits(MODEL, uneven, images(N))
    with pytest.raises(
        ValueError, match=rf"labels of \(35,\) for 36 images of each of {R} networks"
    ):
        check_fits(MODEL, start(), images(N), torch.arange(N - 1) % K)
    with pytest.raises(ValueError, match=r"images \(1, 2, 3\) for a network of"):
        check_fits(MODEL, start(), images(N)[0])
