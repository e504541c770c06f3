"""Feature maps of images for PSIM, numbers of which compare for one network only; a specification
says which: `own`, the classifier that is attacked, which only the caller has, or `vgg16:PATH`, the
state dict of torchvision's `vgg16`, with maps after relu1_2, 2_2, 3_3, 4_3 and 5_3, as LPIPS takes
them (Zhang et al. 2018). Nothing is downloaded, and nothing in the file is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from recon_core.torchvision_compat import import_torchvision
from storage.weights import WeightFile, WeightsError, read_weights

MapsOf = Callable[[Tensor], list[Tensor]]
"""From images (n, c, h, w) in [0, 1] to maps, layer by layer, each (n, channels, rows, columns)."""

OWN = "own"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet, by which images in [0, 1] are normalised for torchvision's weights."""
LPIPS_LAYERS = ("3", "8", "15", "22", "29")  # relu1_2, 2_2, 3_3, 4_3, 5_3 of torchvision's VGG16
MIN_SIDE = 32
"""Smaller images are enlarged to this: five layers and four poolings leave 2x2 positions of it."""
ROWS_AT_ONCE = 64


def feature_maps(spec: str, device: str) -> MapsOf:
    """Function that gives the float32 maps of images in [0, 1] by `vgg16:PATH`, on `device`,
    without gradients. Grey images are repeated to three channels, and images with a side below 32
    are enlarged (bilinear).

    Raises ValueError for another specification, `own` included, WeightsError for a file that cannot
    be read or is not of torchvision's vgg16.
    """
    kind, _colon, path = spec.partition(":")
    if kind != "vgg16" or not path:
        raise ValueError(
            f"perceptual={spec!r} names no network to read; give {OWN} for the classifier's own "
            "layers, or vgg16:PATH with the state dict of torchvision's vgg16"
        )
    layers = _vgg16(read_weights(Path(path).expanduser())).to(device)
    mean, std = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (MEAN, STD))

    @torch.no_grad()
    def maps_of(images: Float[Tensor, "n c h w"]) -> list[Tensor]:
        height, width = images.shape[-2:]
        scale = max(1.0, MIN_SIDE / min(height, width))
        size = (round(height * scale), round(width * scale))
        parts = []
        for some in images.to(device, torch.float32).split(ROWS_AT_ONCE):
            large = F.interpolate(some, size=size, mode="bilinear") if scale > 1 else some
            a, maps = (large.expand(-1, 3, -1, -1) - mean) / std, []
            for name, layer in layers.named_children():
                a = layer(a)
                if name in LPIPS_LAYERS:
                    maps.append(a)
            parts.append(maps)
        return [torch.cat(layer) for layer in zip(*parts, strict=True)]

    return maps_of


def _vgg16(file: WeightFile) -> nn.Sequential:
    """The convolutions of VGG16 up to relu5_3, with the file's weights."""
    with torch.device("meta"):  # no memory, and no draw from the global generator
        features: nn.Sequential = import_torchvision().models.vgg16(weights=None).features[:-1]
    for layer in features:
        if isinstance(layer, nn.ReLU):  # in place it would change the map of a caller's images
            layer.inplace = False
    state = {}
    for name, wanted in features.state_dict().items():
        found = file.tensors.get(f"features.{name}")
        if found is None or found.shape != tuple(wanted.shape):
            what = "is missing" if found is None else f"has shape {found.shape}"
            raise WeightsError(
                f"features.{name} {what} in {file.path}, expected {tuple(wanted.shape)}; give the "
                "state dict of torchvision's vgg16: torch.save(net.state_dict(), 'vgg16.pt')"
            )
        state[name] = torch.from_numpy(found).float()
    features.load_state_dict(state, assign=True)
    return features.eval().requires_grad_(False)
