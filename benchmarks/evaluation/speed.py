"""Finding each image's best match among all pictures of all methods, beside a loop over pairs.

    python -m benchmarks.evaluation.speed [--quick] [--json FILE]

The size is that of the image restoration paper, section 5.1: an attack's 1,000 candidates at 4
saved iterations, as 5 methods show them, with 500 training images: 10 million scores of SSIM. Ours
is what `tasks.evaluation.evaluate` does: all scores, the best match of each image, HaarPSI and the
other scores of that match. The loop computes SSIM alone, on a random sample of the pairs, and is
multiplied up. The paper avoids it (footnote 3): a cheap distance finds one image for each picture,
and only these pairs are scored. That search is measured too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from skimage.metrics import structural_similarity
from torch import Tensor

from benchmarks.record import Measurement, compared, main
from recon_core.matching import ssim_of_nearest
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
    """The images, and per method all pictures; in [0, 1]. `mean` is the mean image."""

    images: Tensor
    methods: list[Tensor]
    mean: Tensor


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
    return Pictures(images, methods, mean)


def exhaustive(given: Pictures) -> list[BestMatches]:
    """Every method's best match of every image among all its pictures."""
    return [best_matches(pictures, given.images) for pictures in given.methods]


def fast(given: Pictures) -> list[BestMatches]:
    """The same, where each picture may match one image: the nearest by ncc2."""
    return [
        best_matches(
            pictures,
            given.images,
            scores=ssim_of_nearest(pictures, given.images, mean=given.mean),
        )
        for pictures in given.methods
    ]


def sampled_pairs(size: Size) -> list[tuple[int, int, int]]:
    """Random (method, picture, image)."""
    draw = torch.Generator().manual_seed(1)
    limits = (size.n_methods, size.n_pictures, size.n_images)
    columns = [torch.randint(limit, (size.n_sampled,), generator=draw) for limit in limits]
    return [(int(m), int(p), int(i)) for m, p, i in zip(*columns, strict=True)]


def looped(given: Pictures, pairs: list[tuple[int, int, int]]) -> list[float]:
    """SSIM of the pairs by scikit-image, one after the other."""
    return [
        float(
            structural_similarity(  # type: ignore[no-untyped-call]
                given.methods[method][picture].permute(1, 2, 0).numpy(),
                given.images[image].permute(1, 2, 0).numpy(),
                gaussian_weights=True,
                sigma=1.5,
                use_sample_covariance=False,
                data_range=1,
                channel_axis=-1,
            )
        )
        for method, picture, image in pairs
    ]


def check_agreement(given: Pictures, pairs: list[tuple[int, int, int]]) -> None:
    """Raises ValueError if the scores of the sample, or those of the fast search, differ."""
    theirs = torch.tensor(looped(given, pairs))
    all_scores = [ssim_matrix(pictures, given.images) for pictures in given.methods]
    ours = torch.stack([all_scores[method][picture, image] for method, picture, image in pairs])
    differences = {"scikit-image's": float((ours - theirs).abs().max())}
    for pictures, scores in zip(given.methods, all_scores, strict=True):
        some = ssim_of_nearest(pictures, given.images, mean=given.mean)
        where = some.isfinite()
        differences["the fast search's"] = max(
            differences.get("the fast search's", 0.0),
            float((some[where] - scores[where]).abs().max()),
        )
    for whose, difference in differences.items():
        if not difference < AGREEMENT:
            raise ValueError(
                f"our scores and {whose} differ by {difference:.2g}, more than {AGREEMENT}; "
                "nothing was timed"
            )


def measure(quick: bool) -> Iterator[Measurement]:
    """Seconds to find and score the best matches of all methods."""
    size = QUICK if quick else FULL
    given, pairs = made_up(size), sampled_pairs(size)
    check_agreement(given, pairs)
    n_pictures = size.n_methods * size.n_pictures
    every_pair = _scaled(
        f"best matches of {size}: SSIM of all pairs, HaarPSI and more of the matches",
        lambda: exhaustive(given),
        lambda: looped(given, pairs),
        size,
        n_scores=size.n_pairs,
    )
    yield every_pair
    one_each = _scaled(
        f"the same by the fast search: ncc2 of all pairs, SSIM of {n_pictures} pairs",
        lambda: fast(given),
        lambda: looped(given, pairs),
        size,
        n_scores=n_pictures,
    )
    yield one_each
    yield replace(
        one_each,
        case="the fast search beside that of all pairs",
        reference="SSIM of all pairs, ours, measured before",
        reference_value=every_pair.value,
        ratio=float(f"{every_pair.value / one_each.value:.4g}"),
    )


def _scaled(
    case: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    size: Size,
    *,
    n_scores: int,
) -> Measurement:
    """Seconds of `ours` beside those that the loop needs for `n_scores` scores."""
    timing = compared(
        "evaluate",
        case,
        ours=ours,
        reference=f"skimage.metrics.structural_similarity in a loop over {n_scores} pairs, SSIM "
        f"alone: measured on {size.n_sampled} random pairs and multiplied up",
        theirs=theirs,
        repeats=size.repeats,
        per_call=n_scores,
        reference_per_call=size.n_sampled,
    )
    assert timing.reference_value is not None
    value, reference_value = (
        float(f"{seconds * n_scores:.4g}") for seconds in (timing.value, timing.reference_value)
    )
    return replace(timing, value=value, reference_value=reference_value)


if __name__ == "__main__":
    main(measure)
