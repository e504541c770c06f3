"""The first dense layer behind a frozen network: the span attack brings features back, no images.

    python -m benchmarks.span.features --images folder:cifar10 [--quick] [--json FILE]

Images go through a fixed convolution with random weights and a ReLU, and 200-200 neurons are
trained on what comes out, by gradient descent from a small start. The dense layer's weights span
these features; taken apart they are compared with the true ones by the size of the correlation over
all of a map's values, beside the features of as many images that were in no training. A feature
is back if that is above .9. What image a feature belongs to is another attack's question
(docs/inversion-study.md).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from benchmarks.record import Measurement, measured
from benchmarks.span.speed import drawn, main
from flows.papers import gradient_descent
from recon_core.attacks.span.attack import SpanAttack, separate
from recon_core.attacks.span.rows import weight_rows
from recon_core.types import seeded_generator
from recon_core.victims.network import Network
from recon_core.victims.training import Training, train
from storage.sources.load import ImageSet

_line = partial(measured, "span_features")
BACK = 0.9
USUAL_STD = 0.25
"""Of a feature's values, as large as those of images."""
ATTACK = SpanAttack(sources="independent")


def measure(images: ImageSet, *, quick: bool, seed: int) -> Iterator[Measurement]:
    """Features of a convolution, with the start of the dense layers not known and known."""
    n, epochs = (20, 300) if quick else (100, 3000)
    seen, others = drawn(images, n, seed)
    features, decoys = frozen(seen, others, seed=seed)
    network = Network(widths=(2 * n, 2 * n), init_std_first=1e-4)
    dense = network.on((features.shape[1], features.shape[2], features.shape[3]), 1)
    begun = dense.initial([seeded_generator(seed, 0, "dense")], dtype=torch.float32)
    rule = Training(epochs=epochs, optimiser=gradient_descent(0.2), span="auto")
    y = torch.tensor([1.0, -1.0]).repeat_interleave(n // 2)
    trained = train(dense, begun, features.flatten(1)[None], y[None], training=rule).parameters
    for start in ("unknown", "known"):
        known = start == "known"
        attack = replace(ATTACK, start="known" if known else "unknown")
        generators = [seeded_generator(seed, 0, "attack")]
        clock = time.perf_counter()
        rows = [weight_rows(trained, begun if known else None)]
        (found,) = separate(attack, dense, trained, generators, rows=rows)
        seconds = time.perf_counter() - clock
        case = f"{n} maps of {tuple(features.shape[1:])}, {start} start"
        best, lucky = (likeness(found.sources.x, of.flatten(1)) for of in (features, decoys))
        yield _line(case, float((best > BACK).sum()), f"features of {n}")
        yield _line(case, float((lucky > BACK).sum()), f"other images' features of {n}")
        yield _line(case, float(best.median()), "median correlation")
        yield _line(case, float(lucky.median()), "median correlation with other images' features")
        yield _line(case, seconds, "s")


def frozen(
    seen: Float[Tensor, "n c h w"], others: Float[Tensor, "n c h w"], *, seed: int
) -> tuple[Float[Tensor, "n f i j"], Float[Tensor, "n f i j"]]:
    """Features of images by a random convolution of 5x5 with stride 2 and a ReLU, less the mean of
    the features of `seen`."""
    weight = torch.randn(16, 3, 5, 5, generator=seeded_generator(seed, 0, "frozen")) / 75**0.5
    maps = [functional.conv2d(x - seen.mean(0), weight, stride=2).relu() for x in (seen, others)]
    scale = USUAL_STD / maps[0].flatten(1).std()
    centred = [(m - maps[0].mean(0)) * scale for m in maps]
    return centred[0], centred[1]


def likeness(found: Float[Tensor, "k d"], true: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """The largest size of a correlation of each true row with any that was found."""
    a, b = (functional.normalize(x - x.mean(1, keepdim=True), dim=1) for x in (found, true))
    return (a @ b.mT).abs().amax(0)


if __name__ == "__main__":
    main(measure, __doc__)
