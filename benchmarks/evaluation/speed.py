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
from dataclasses import replace

import torch
from skimage.metrics import structural_similarity
from torch import Tensor

from benchmarks.record import Measurement, compared, main
from recon_core.metrics import ssim_matrix
from recon_core.summary import best_matches

AGREEMENT = 1e-5


def made_up(n_methods: int, n_pictures: int, n_images: int) -> tuple[Tensor, list[Tensor]]:
    """(images, pictures by every method): smooth images; a third of the pictures resemble one, the
    others are noise over the mean."""
    draw = torch.Generator().manual_seed(0)
    coarse = torch.rand(n_images, 3, 8, 8, generator=draw)
    images = torch.nn.functional.interpolate(coarse, (32, 32), mode="bicubic").clamp(0, 1)
    mean = images.mean(dim=0)
    shown = images[torch.randint(n_images, (n_pictures,), generator=draw)] - mean
    shown[torch.rand(n_pictures, generator=draw) > 1 / 3] = 0
    noises = (torch.randn(shown.shape, generator=draw) * (0.2 - 0.03 * k) for k in range(n_methods))
    return images, [(mean + shown + noise).clamp(0, 1) for noise in noises]


class Loop:
    """SSIM by scikit-image of random (method, picture, image), one pair after the other. Raises
    ValueError if our scores of these pairs differ."""

    def __init__(self, images: Tensor, methods: list[Tensor], n_sampled: int) -> None:
        self.images, self.methods = images, methods
        draw = torch.Generator().manual_seed(1)
        limits = (len(methods), len(methods[0]), len(images))
        columns = [torch.randint(limit, (n_sampled,), generator=draw) for limit in limits]
        self.pairs = torch.stack(columns, 1).tolist()
        scores = [ssim_matrix(pictures, images) for pictures in methods]
        ours = torch.stack([scores[m][p, i] for m, p, i in self.pairs])
        difference = float((ours - torch.tensor(self())).abs().max())
        if not difference < AGREEMENT:
            raise ValueError(f"our scores and scikit-image's differ by {difference:.2g}; not timed")

    def __call__(self) -> list[float]:
        how = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False,
               "data_range": 1, "channel_axis": 0}  # fmt: skip
        return [
            float(structural_similarity(  # type: ignore[no-untyped-call]
                self.methods[method][picture].numpy(), self.images[image].numpy(), **how
            ))
            for method, picture, image in self.pairs
        ]  # fmt: skip


def measure(quick: bool) -> Iterator[Measurement]:
    """Seconds to find and score best matches of all methods, and per score of SSIM alone."""
    n, n_saved, n_methods, n_images = (60, 2, 2, 40) if quick else (1000, 4, 5, 500)
    images, methods = made_up(n_methods, n * n_saved, n_images)
    loop = Loop(images, methods, 200 if quick else 2000)
    n_pairs = n_methods * n * n_saved * n_images
    repeats = 2 if quick else 3
    each = compared(
        "evaluate",
        f"best matches of {n} candidates x {n_saved} iterations x {n_methods} methods with "
        f"{n_images} images of 3x32x32: SSIM of all pairs, HaarPSI and more of the matches",
        ours=lambda: [best_matches(pictures, images) for pictures in methods],
        reference=f"skimage.metrics.structural_similarity in a loop over {n_pairs} pairs, "
        f"SSIM alone: measured on {len(loop.pairs)} random pairs and multiplied up",
        theirs=loop,
        repeats=repeats,
        per_call=n_pairs,
        reference_per_call=len(loop.pairs),
    )
    assert each.reference_value is not None
    value, theirs = (float(f"{s * n_pairs:.4g}") for s in (each.value, each.reference_value))
    yield replace(each, value=value, reference_value=theirs)
    n, n_images = (560, 40) if quick else (4400, 300)
    images, methods = made_up(1, n, n_images)
    loop = Loop(images, methods, 400)
    yield compared(
        "ssim",
        f"one score among {n} x {n_images} pairs of 3x32x32, Gaussian 11x11",
        ours=lambda: ssim_matrix(methods[0], images),
        per_call=n * n_images,
        reference=f"skimage.metrics.structural_similarity in a loop, over {len(loop.pairs)} of the "
        "pairs",
        theirs=loop,
        reference_per_call=len(loop.pairs),
        repeats=repeats,
    )


if __name__ == "__main__":
    main(measure)
