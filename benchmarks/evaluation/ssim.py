"""All-pairs SSIM as matrix products against a loop over scikit-image, same convention."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from skimage.metrics import structural_similarity
from torch import Tensor

from benchmarks.record import Measurement, compared, main
from recon_core.metrics import ssim_matrix

AGREEMENT = 1e-5
N_LOOPED = 400
"""Pairs that the loop is timed on; its time per pair does not depend on how many there are."""


def skimage_loop(a: Tensor, b: Tensor, n_pairs: int) -> list[float]:
    """SSIM of the first `n_pairs` pairs, b running fastest."""
    channels_last = [t.permute(0, 2, 3, 1).contiguous().numpy() for t in (a, b)]
    pairs = itertools.islice(itertools.product(*channels_last), n_pairs)
    return [
        float(
            structural_similarity(  # type: ignore[no-untyped-call]
                x,
                y,
                gaussian_weights=True,
                sigma=1.5,
                use_sample_covariance=False,
                data_range=1,
                channel_axis=-1,
            )
        )
        for x, y in pairs
    ]


def all_pairs(n_pictures: int, n_images: int, repeats: int) -> Measurement:
    """Seconds per score among `n_pictures` reconstructions and `n_images` training images."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(n_images, 3, 32, 32, generator=generator)
    source = images[torch.randint(n_images, (n_pictures,), generator=generator)]
    noise = torch.randn(source.shape, generator=generator) * 0.2
    pictures = (source + noise).clamp(0, 1)
    looped = torch.tensor(skimage_loop(pictures, images, N_LOOPED))
    difference = float((ssim_matrix(pictures, images).flatten()[:N_LOOPED] - looped).abs().max())
    if not difference < AGREEMENT:
        raise ValueError(f"the scores differ by {difference:.2g}, more than {AGREEMENT}")
    return compared(
        "ssim",
        f"one score among {n_pictures} x {n_images} pairs of 3x32x32, Gaussian 11x11",
        ours=lambda: ssim_matrix(pictures, images),
        per_call=n_pictures * n_images,
        reference=f"skimage.metrics.structural_similarity in a loop, over {N_LOOPED} of the pairs",
        theirs=lambda: skimage_loop(pictures, images, N_LOOPED),
        reference_per_call=N_LOOPED,
        repeats=repeats,
    )


def measure(quick: bool) -> Iterator[Measurement]:
    """Seconds per SSIM score."""
    sizes = ((560, 40), (1000, 100)) if quick else ((560, 40), (4400, 300))
    for n_pictures, n_images in sizes:
        yield all_pairs(n_pictures, n_images, repeats=2 if quick else 5)


if __name__ == "__main__":
    main(measure)
