"""Finding each image's best match among all pictures of all methods, beside a loop over pairs.

    python -m benchmarks.evaluation.speed [--quick] [--json FILE]

The size is that of the image restoration paper, section 5.1: an attack's 1,000 candidates at 4
saved iterations, as 5 methods show them, with 500 training images: 10 million scores of SSIM. Ours
is what `tasks.evaluation.evaluate` does: all scores, the best match of each image, HaarPSI and the
other scores of that match. The loop computes SSIM alone, on a random sample of the pairs, and is
multiplied up. Then one score of SSIM alone, as matrix products and in the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from skimage.metrics import structural_similarity
from torch import Tensor

from benchmarks.record import Measurement, compared, main
from recon_core.metrics import ssim_matrix
from recon_core.summary import BestMatches, best_matches

AGREEMENT = 1e-5


@dataclass(frozen=True, kw_only=True)
class Size:
    """`n_sampled` pairs are scored in a loop."""

    n_candidates: int
    n_iterations: int
    n_methods: int
    n_images: int
    n_sampled: int
    repeats: int

    @property
    def n_pictures(self) -> int:
        """Scores of one method."""
        return self.n_candidates * self.n_iterations

    @property
    def n_pairs(self) -> int:
        return self.n_methods * self.n_pictures * self.n_images

    def __str__(self) -> str:
        return (
            f"{self.n_candidates} candidates x {self.n_iterations} iterations x {self.n_methods} "
            f"methods with {self.n_images} images of 3x32x32"
        )


FULL = Size(n_candidates=1000, n_iterations=4, n_methods=5, n_images=500, n_sampled=2000, repeats=3)
QUICK = Size(n_candidates=60, n_iterations=2, n_methods=2, n_images=40, n_sampled=200, repeats=2)


@dataclass(frozen=True)
class Pictures:
    """The images, and per method all pictures; in [0, 1]."""

    images: Tensor
    methods: list[Tensor]


def made_up(size: Size) -> Pictures:
    """Smooth images; a third of the pictures resemble one, the others are noise over the mean."""
    draw = torch.Generator().manual_seed(0)
    coarse = torch.rand(size.n_images, 3, 8, 8, generator=draw)
    images = torch.nn.functional.interpolate(coarse, (32, 32), mode="bicubic").clamp(0, 1)
    mean = images.mean(dim=0)
    shown = images[torch.randint(size.n_images, (size.n_pictures,), generator=draw)] - mean
    shown[torch.rand(size.n_pictures, generator=draw) > 1 / 3] = 0
    methods = []
    for number in range(size.n_methods):
        noise = torch.randn(shown.shape, generator=draw) * (0.2 - 0.03 * number)
        methods.append((mean + shown + noise).clamp(0, 1))
    return Pictures(images, methods)


def exhaustive(given: Pictures) -> list[BestMatches]:
    """Every method's best match of every image among all its pictures."""
    return [best_matches(pictures, given.images) for pictures in given.methods]


def sampled_pairs(size: Size) -> list[tuple[int, int, int]]:
    """Random (method, picture, image)."""
    draw = torch.Generator().manual_seed(1)
    limits = (size.n_methods, size.n_pictures, size.n_images)
    columns = [torch.randint(limit, (size.n_sampled,), generator=draw) for limit in limits]
    return [(int(m), int(p), int(i)) for m, p, i in zip(*columns, strict=True)]


def looped(given: Pictures, pairs: list[tuple[int, int, int]]) -> list[float]:
    """SSIM of the pairs by scikit-image, one after the other."""
    how = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False,
           "data_range": 1, "channel_axis": 0}  # fmt: skip
    return [
        float(structural_similarity(  # type: ignore[no-untyped-call]
            given.methods[method][picture].numpy(), given.images[image].numpy(), **how
        ))
        for method, picture, image in pairs
    ]  # fmt: skip


def check_agreement(given: Pictures, pairs: list[tuple[int, int, int]]) -> None:
    """Raises ValueError if the scores of the sample differ."""
    theirs = torch.tensor(looped(given, pairs))
    all_scores = [ssim_matrix(pictures, given.images) for pictures in given.methods]
    ours = torch.stack([all_scores[method][picture, image] for method, picture, image in pairs])
    difference = float((ours - theirs).abs().max())
    if not difference < AGREEMENT:
        raise ValueError(
            f"our scores and scikit-image's differ by {difference:.2g}, more than {AGREEMENT}; "
            "nothing was timed"
        )


def matches(size: Size) -> Measurement:
    """Seconds to find and score the best matches of all methods."""
    given, pairs = made_up(size), sampled_pairs(size)
    check_agreement(given, pairs)
    timing = compared(
        "evaluate",
        f"best matches of {size}: SSIM of all pairs, HaarPSI and more of the matches",
        ours=lambda: exhaustive(given),
        reference=f"skimage.metrics.structural_similarity in a loop over {size.n_pairs} pairs, "
        f"SSIM alone: measured on {size.n_sampled} random pairs and multiplied up",
        theirs=lambda: looped(given, pairs),
        repeats=size.repeats,
        per_call=size.n_pairs,
        reference_per_call=size.n_sampled,
    )
    assert timing.reference_value is not None
    value, reference_value = (
        float(f"{seconds * size.n_pairs:.4g}") for seconds in (timing.value, timing.reference_value)
    )
    return replace(timing, value=value, reference_value=reference_value)


def one_score(size: Size) -> Measurement:
    """Seconds per score of SSIM alone."""
    given, pairs = made_up(size), sampled_pairs(size)
    check_agreement(given, pairs)
    return compared(
        "ssim",
        f"one score among {size.n_pictures} x {size.n_images} pairs of 3x32x32, Gaussian 11x11",
        ours=lambda: ssim_matrix(given.methods[0], given.images),
        per_call=size.n_pairs,
        reference=f"skimage.metrics.structural_similarity in a loop, over {len(pairs)} of the "
        "pairs",
        theirs=lambda: looped(given, pairs),
        reference_per_call=len(pairs),
        repeats=size.repeats,
    )


def measure(quick: bool) -> Iterator[Measurement]:
    """Seconds to find and score best matches, and per score of SSIM."""
    size = QUICK if quick else FULL
    yield matches(size)
    n = {"n_candidates": 560, "n_images": 40} if quick else {"n_candidates": 4400, "n_images": 300}
    yield one_score(replace(size, n_iterations=1, n_methods=1, n_sampled=400, **n))


if __name__ == "__main__":
    main(measure)
