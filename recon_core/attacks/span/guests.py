"""A network that knows the other images in a picture, as the score of a separation.

A separated picture is y = a x + b m, an image x (the host) and a mixture m of other training images
(its guests). Everything here is in the metric of the images' covariance C: of vectors C^{-1/2} y,
of square d. The network gives the guests' part, g = E[b m | y], for any a and b; a mixture of
hundreds is Gaussian noise in this metric, so by Tweedie's formula (Efron 2011) g / b^2 is -grad log
p of the density p of images in as much noise. Hence

    psi_i = g_i / (g_i^T y_i / d),    G_ij = psi_i^T y_j / d

is the relative gradient of the likelihood of sources y = W z, each in its own noise, at the scale
where its diagonal is 1. Rows of W are orthogonal, as images nearly are, and W moves as in Picard-O
(`separation`), with E psi'_i = E psi_i^2, Stein's identity for Gaussian noise. Images are not quite
orthogonal, so at last every source is left by what the network finds of the others in it.

The metric is that of a JPEG copy of CIFAR-10: covariances of cosines, which mirroring leaves as
they are, so that horizontal cosines of even and odd order know nothing of each other.
"""

from __future__ import annotations

import io
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from recon_core.attacks.span.features import cosines
from recon_core.attacks.span.lbfgs import Descent, Report, unheard
from recon_core.attacks.span.separation import cayley, orthogonal
from recon_core.restore.unet import UNET_SIZES, UNet, UNetSizeName

SHAPE = (3, 32, 32)
SIZE: UNetSizeName = "small"
FLOOR = 1e-4
"""Share of the mean variance that every direction of images is given at least."""
STEEPEST = 4.0
"""Factor from the network's mean of its last channel to the logit of the guests' share."""
MOMENTUM = 0.7
LEAST_CURVATURE = 0.3
LONGEST = 0.5
"""Root mean square length, over rows, of the largest step."""
LEAST_SHARE = 1e-3
"""Share of guests at least, where psi is taken of them."""
CLEAN_EVERY = 10
PATIENCE, FALLEN = 20, 0.99
"""Steps after which rotations end, unless the guests' share has fallen by a hundredth in them."""
N_FREED, RIDGE = 10, 1e-4
"""Steps in which every source loses what the network finds of the others in it, whatever becomes of
their products, and what is added to the squares of sources for that."""
AT_ONCE, AT_ONCE_ON_GPU = 64, 1024
"""Pictures that the network sees at once."""
OPERATIONS = 600_000_000
"""Of the network for one picture, nearly."""


@dataclass(frozen=True)
class GuestModel:
    """`net` sees a picture and the same in the metric, `white` (2, d/2, d/2) is C^{-1/2} of the
    cosines of even and of odd horizontal order."""

    net: nn.Module
    white: Float[Tensor, "2 h h"]

    def whitened(self, pictures: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """C^{-1/2} x of pictures."""
        return in_blocks(pictures, self.white)

    def guests(
        self, whitened: Float[Tensor, "n d"], pictures: Float[Tensor, "n d"]
    ) -> Float[Tensor, "n d"]:
        """Guests in the metric, of pictures of energy 1 there (`whitened`); bfloat16 on a GPU."""
        cuda = whitened.device.type == "cuda"
        n, found = AT_ONCE_ON_GPU if cuda else AT_ONCE, []
        for seen, shown in zip(whitened.split(n), pictures.split(n), strict=True):
            with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
                found.append(guests_of(self.net, seen.float(), shown.float()))
        return torch.cat(found).to(whitened)


def guests_of(
    net: nn.Module, whitened: Float[Tensor, "n d"], pictures: Float[Tensor, "n d"]
) -> Float[Tensor, "n d"]:
    """E[b m | y] by the network, which corrects the share b^2 of y by b sqrt(1 - b^2) times its
    answer: what is left if all it knows is the share b^2, which it tells in a channel of its own.
    """
    size = pictures.square().mean(1, keepdim=True).clamp_min(1e-30).rsqrt()
    both = torch.stack([pictures * size, whitened], 1).reshape(-1, 2 * SHAPE[0], *SHAPE[1:])
    said = net(both, whitened.new_zeros(len(both)), whitened.new_zeros(len(both), 0)).float()
    share = (STEEPEST * said[:, -1].mean((1, 2))).sigmoid()[:, None]
    answer: Tensor = share * whitened + (share * (1 - share)).sqrt() * said[:, :-1].flatten(1)
    return answer


def build_network(generator: torch.Generator) -> nn.Module:
    """The untrained network."""
    c, side = SHAPE[0], SHAPE[1]
    net = UNet(UNET_SIZES[SIZE], in_channels=2 * c, out_channels=c + 1, n_labels=0, resolution=side)
    net.initialise(generator)
    return net


def in_blocks(
    pictures: Float[Tensor, "n d"], blocks: Float[Tensor, "2 h h"]
) -> Float[Tensor, "n d"]:
    """Pictures whose cosines are multiplied with a matrix for each parity of horizontal order."""
    waves = cosines(pictures.unflatten(1, SHAPE))
    parts = [waves[..., i::2].flatten(1) @ blocks[i].to(waves) for i in (0, 1)]
    half = (*SHAPE[:2], SHAPE[2] // 2)
    joined = torch.stack([part.unflatten(1, half) for part in parts], -1).flatten(-2)
    multiplied: Tensor = cosines(joined, inverse=True).flatten(1)
    return multiplied


def covariances(pictures: Float[Tensor, "n d"]) -> Float[Tensor, "2 h h"]:
    """Mean products of the cosines of even, and of odd horizontal order, of centred pictures."""
    waves = cosines(pictures.unflatten(1, SHAPE)).double()
    parts = [waves[..., i::2].flatten(1) for i in (0, 1)]
    return torch.stack([part.mT @ part / len(part) for part in parts])


def roots(covariance: Float[Tensor, "2 h h"], power: float) -> Float[Tensor, "2 h h"]:
    """C^power, symmetric, with variances of `FLOOR` of their mean at least."""
    values, vectors = torch.linalg.eigh(covariance.double())
    values = values.clamp_min(FLOOR * float(values.mean()))
    root: Tensor = (vectors * values[:, None] ** power) @ vectors.mT
    return root.float()


def packed(net: nn.Module, covariance: Float[Tensor, "2 h h"]) -> dict[str, np.ndarray]:
    """The model as arrays, in half precision; the metric as deviations and correlations."""
    spread = covariance.diagonal(dim1=1, dim2=2).sqrt()
    correlation = covariance / spread[:, :, None] / spread[:, None, :]
    upper = torch.triu_indices(*covariance.shape[1:])
    arrays = {f"net.{name}": t.detach().half() for name, t in net.state_dict().items()}
    arrays["spread"] = spread.float()
    arrays["correlation"] = correlation[:, upper[0], upper[1]].half()
    return {name: t.cpu().numpy() for name, t in arrays.items()}


def unpacked(arrays: Mapping[str, np.ndarray]) -> GuestModel:
    """The model that `packed` wrote."""
    told = {name: torch.from_numpy(array.astype(np.float32)) for name, array in arrays.items()}
    spread = told.pop("spread").double()
    upper = torch.triu_indices(spread.shape[1], spread.shape[1])
    half = torch.zeros(2, spread.shape[1], spread.shape[1], dtype=torch.float64)
    half[:, upper[0], upper[1]] = told.pop("correlation").double()
    covariance = (half + half.triu(1).mT) * spread[:, :, None] * spread[:, None, :]
    net = build_network(torch.Generator().manual_seed(0))
    net.load_state_dict({name.removeprefix("net."): t for name, t in told.items()})
    net.eval().requires_grad_(False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return GuestModel(net, roots(covariance, -0.5))


@cache
def shipped_guests(device: torch.device) -> GuestModel:
    """The model that comes with the package, of the training images of a JPEG copy of CIFAR-10:
    32x32 in colour, by `python -m benchmarks.span.guests`."""
    packaged = pkgutil.get_data(__name__, "guest_model.npz")  # part of the code, as this
    assert packaged is not None
    with np.load(io.BytesIO(packaged), allow_pickle=False) as arrays:
        model = unpacked(dict(arrays))
    return GuestModel(model.net.to(device), model.white.to(device))


@torch.no_grad()
def apart(
    model: GuestModel,
    z: Float[Tensor, "r k d"],
    start: Float[Tensor, "r k k"],
    *,
    n_iterations: int,
    report: Report = unheard,
) -> Descent:
    """The matrices at which no source of pictures `z`, white in the metric, has others for guests:
    at most `n_iterations` steps of rotations, ended once the guests' share, which is the objective,
    falls no more, and `N_FREED` in which rows need not be orthogonal."""
    seen = model.whitened(z.flatten(0, 1)).view_as(z)
    w, moved = start, torch.zeros_like(start)
    least, since, n = z.new_full((len(z),), torch.inf), z.new_zeros(len(z)), 0
    while n < n_iterations and bool((since < PATIENCE).any()):
        y, guests = _guests(model, z, seen, w)
        share = (guests * y).mean(2)
        psi = guests / share.clamp_min(LEAST_SHARE)[:, :, None]
        g = torch.bmm(psi, y.mT) / z.shape[2]
        curve = psi.square().mean(2)
        bent = (curve[:, :, None] + curve[:, None, :] - 2).clamp_min(LEAST_CURVATURE)
        moved = MOMENTUM * moved - (g - g.mT) / bent
        length = moved.square().sum(2).mean(1).sqrt()
        moved = moved * (LONGEST / length.clamp_min(LONGEST))[:, None, None]
        w = cayley(moved) @ w
        if n % CLEAN_EVERY == CLEAN_EVERY - 1:
            w = orthogonal(w)
        total = share.sum(1)
        since = torch.where(total < FALLEN * least, 0, since + 1)
        least = torch.minimum(least, total)
        n += 1
        report(n)
    for i in range(N_FREED):
        w = w / (w @ seen).square().mean(2, keepdim=True).sqrt().clamp_min(1e-30)
        y, guests = _guests(model, z, seen, w)
        square = torch.bmm(y, y.mT) / z.shape[2] + RIDGE * torch.eye(w.shape[1]).to(w)
        taken = torch.linalg.solve(square, torch.bmm(y, guests.mT) / z.shape[2]).mT
        taken.diagonal(dim1=1, dim2=2).zero_()
        w = w - taken @ w
        report(n + i + 1)
    return Descent(w, w @ z, least, n + N_FREED, n < n_iterations)


def _guests(
    model: GuestModel,
    z: Float[Tensor, "r k d"],
    seen: Float[Tensor, "r k d"],
    w: Float[Tensor, "r k k"],
) -> tuple[Float[Tensor, "r k d"], Float[Tensor, "r k d"]]:
    """(sources in the metric, their guests there)."""
    y = w @ seen
    size = y.square().mean(2, keepdim=True).sqrt().clamp_min(1e-30)
    pictures = (w @ z).flatten(0, 1)
    return y, model.guests((y / size).flatten(0, 1), pictures).view_as(y) * size
