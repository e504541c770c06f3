"""Baselines that a trained restorer has to beat, by scikit-image: non-local means (Buades et al.
2005), total variation (Rudin et al. 1992, by Chambolle 2004) and BayesShrink (Chang et al. 2000).

All assume white Gaussian noise of strength `sigma`, in units of [0, 1]; None estimates it for each
picture, as the median absolute deviation of its finest wavelet coefficients (Donoho and Johnstone
1994), averaged over the channels.
"""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float32, Int64
from numpy.typing import NDArray
from torch import Tensor, nn

from recon_core.strict import Strict, Within
from recon_core.types import Progress, no_progress

Picture = NDArray[np.float64]
"""(h, w, 3) in [0, 1]."""
Generic = Literal["nlm", "tv", "wavelet"]
NO_NOISE = 1e-6
"""Estimates below this are roundings of 0."""


@dataclass(frozen=True, kw_only=True)
class Classical(Strict):
    """A classical denoiser with the `restore` of learned restorers.

    `nlm`: each pixel becomes a mean of pixels whose surroundings are alike: of patches of 5 pixels,
    at most 6 apart, with .8 sigma for a cut-off. `tv`: the picture u with the least |grad u| + (u -
    x)^2 / (2 sigma), in each channel. `wavelet`: coefficients shrunk by BayesShrink's threshold, in
    each channel.
    """

    kind: Generic
    sigma: Annotated[float | None, Within("(0, 1]", fix="None estimates it")] = None

    def denoised(self, picture: Picture, sigma: float) -> Any:
        """A picture without noise of strength `sigma`."""
        from skimage import restoration

        if self.kind == "nlm":
            return restoration.denoise_nl_means(
                picture, patch_size=5, patch_distance=6, h=0.8 * sigma, sigma=sigma,
                fast_mode=True, channel_axis=-1,
            )  # fmt: skip
        if self.kind == "tv":
            return restoration.denoise_tv_chambolle(  # type: ignore[no-untyped-call]
                picture, weight=sigma, max_num_iter=200, channel_axis=-1
            )
        need_wavelets()
        return restoration.denoise_wavelet(
            picture, sigma=sigma, wavelet="db2", method="BayesShrink", mode="soft",
            rescale_sigma=False, channel_axis=-1,
        )  # fmt: skip

    def restore(
        self,
        net: nn.Module,
        condition: Float32[Tensor, "n 3 h w"],
        *,
        n_samples: int,
        seeds: Int64[Tensor, " n"],
        progress: Progress = no_progress,
        batch_size: int = 256,
    ) -> Float32[Tensor, "1 n 3 h w"]:
        """The one denoised version of each picture, in [0, 1], from `condition` alone; one without
        noise stays as it is. Raises ImportError if PyWavelets is missing where it is needed."""
        del net, n_samples, seeds, batch_size
        restored = torch.empty_like(condition)
        pictures = condition.detach().cpu().double().numpy().transpose(0, 2, 3, 1)
        for row, given in enumerate(pictures):
            picture = np.ascontiguousarray(given)
            sigma = estimate_noise(picture) if self.sigma is None else self.sigma
            result = self.denoised(picture, sigma) if sigma > NO_NOISE else picture
            channels_first = np.ascontiguousarray(result.transpose(2, 0, 1), dtype=np.float32)
            restored[row] = torch.from_numpy(channels_first).clamp_(0, 1).to(condition.device)
            progress((row + 1) / len(pictures))
        return restored.unsqueeze(0)


GENERIC_RESTORERS = {kind: Classical(kind=kind) for kind in get_args(Generic)}


def estimate_noise(picture: Picture) -> float:
    """The strength of white noise in a picture; 0 for a channel whose finest coefficients are 0.
    Raises ImportError if PyWavelets is missing."""
    need_wavelets()
    from skimage.restoration import estimate_sigma

    with warnings.catch_warnings():
        # Of a channel without any detail scikit-image takes the median of nothing, which is NaN.
        warnings.simplefilter("ignore", RuntimeWarning)
        estimates = estimate_sigma(picture, channel_axis=-1)  # type: ignore[no-untyped-call]
    return float(np.mean(np.nan_to_num(estimates)))


def need_wavelets() -> None:
    """Raises ImportError, with the fix, if PyWavelets is missing."""
    if importlib.util.find_spec("pywt") is None:
        raise ImportError(
            "scikit-image needs PyWavelets to estimate the noise of a picture and to shrink its "
            "wavelet coefficients; install it with: pip install PyWavelets"
        )
