"""MixCon paper, section 4.2: two Gaussian classes, features in the plane, and what is lost by them.

    y = argmax softmax(W4 s(W3 s(W2 s(W1 x + b1) + b2) + b3) + b4),   cut after W2's layer

One unit has every setting and server of one seed. The data and the starts are of the seed, the same
for all settings. The inversion is of the tests' features (table 2), for the default server.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from recon_core.recovery_scores import errors
from recon_core.similarity import cosine_similarity
from recon_core.types import Progress, seeded_generator
from recon_core.victims.autoencoder import Weights
from recon_core.victims.separability import separability
from recon_core.victims.split import SplitModel, evaluate_split, features_of, initial_weights
from recon_core.victims.split_training import TrainedSplit, train_split
from tasks.families.inversion.study.settings import Synthetic
from tasks.study.products import Arrays, Job, key_of

DEFAULT = "default"
"""The server whose features are kept and inverted."""


@dataclass(frozen=True, kw_only=True)
class SyntheticJob(Job):
    """All settings and servers for one seed."""

    synthetic: Synthetic
    seed: int
    root_seed: int

    @property
    def key(self) -> str:
        return key_of(["synthetic", asdict(self.synthetic), self.seed, self.root_seed])

    def make(self, progress: Progress) -> tuple[Arrays, dict[str, Any]]:
        """Trains every setting with every server."""
        started, own = time.perf_counter(), self.synthetic
        drawn = seeded_generator(self.root_seed, self.seed, "gaussians")
        x, labels, noisy = gaussians(own, drawn)
        tests, truth = x[own.n_train :], labels[own.n_train :]
        arrays: Arrays = {"labels": truth.numpy()}
        for k, server in enumerate(own.servers):
            model = own.network(server).on((1, 1, own.dimension), 2)
            start, found = _trained(self, model, x[: own.n_train], noisy[: own.n_train])
            tested = evaluate_split(model, found.weights, tests, truth)
            features = features_of(model, found.weights, tests)
            apart = separability(features, normalise=False)
            arrays |= {
                f"{server}/train_accuracy": found.accuracy.numpy(),
                f"{server}/accuracy": tested.accuracy.numpy(),
                f"{server}/distance": apart.mean.numpy(),
                f"{server}/min_distance": apart.minimum.numpy(),
                f"{server}/diverged": found.diverged.numpy(),
            }
            if server == DEFAULT:
                arrays["features/start"] = features_of(model, start, tests).numpy()
                arrays["features/end"] = features.numpy()
                arrays |= _inverted(self, model, found.weights, tests, features)
            progress((k + 1) / len(own.servers))
        return arrays, {"seconds": round(time.perf_counter() - started, 3)}


def gaussians(
    own: Synthetic, generator: torch.Generator
) -> tuple[Float[Tensor, "n 1 1 d"], Int64[Tensor, " n"], Int64[Tensor, " n"]]:
    """(vectors as images, classes, classes of which some are flipped); class 0 is N(0, I), class 1
    N(-1, I), in turn."""
    n = own.n_train + own.n_tests
    labels = torch.arange(n) % 2
    x = torch.randn(n, own.dimension, generator=generator) - labels.unsqueeze(1)
    flipped = torch.randperm(own.n_train, generator=generator)[: round(own.flipped * own.n_train)]
    noisy = labels.clone()
    noisy[flipped] = 1 - noisy[flipped]
    return x.view(n, 1, 1, -1), labels, noisy


def _trained(
    job: SyntheticJob, model: SplitModel, x: Tensor, labels: Tensor
) -> tuple[Weights, TrainedSplit]:
    own, n = job.synthetic, len(job.synthetic.settings)
    drawn = seeded_generator(job.root_seed, job.seed, "synthetic start")
    one = initial_weights(model, [drawn], dtype=torch.float32)
    start = {name: tensor.repeat(n, *[1] * (tensor.dim() - 1)) for name, tensor in one.items()}
    found = train_split(
        model,
        start,
        x,
        labels,
        defences=[own.defence(setting) for setting in own.settings],
        training=own.training,
        shuffle=lambda _stream, epoch: seeded_generator(
            job.root_seed, job.seed, f"synthetic minibatches {epoch}"
        ),
    )
    return start, found


def _inverted(
    job: SyntheticJob, model: SplitModel, weights: Weights, x: Tensor, features: Tensor
) -> Arrays:
    arrays: Arrays = {}
    shape = (1, 1, job.synthetic.dimension)
    for k in range(len(job.synthetic.settings)):
        own = {name: tensor[k : k + 1] for name, tensor in weights.items()}

        def h(s: Tensor, own: Weights = own) -> Tensor:
            features: Tensor = model.features(own, s.unsqueeze(0))[0]
            return features

        if not bool(features[k].isfinite().all()):
            continue
        drawn = [
            seeded_generator(job.root_seed, i, f"synthetic start {job.seed}") for i in range(len(x))
        ]
        found = job.synthetic.attack.invert(h, features[k], shape=shape, generators=drawn).x
        arrays[f"inverted {k}/se"] = errors(found, x).numpy()
        arrays[f"inverted {k}/cs"] = cosine_similarity(found, x).numpy()
    if not arrays:
        arrays["inverted/none"] = np.zeros(0, np.float32)
    return arrays
