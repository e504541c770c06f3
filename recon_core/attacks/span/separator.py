"""A separator: a network that tells an image from the other images mixed into it, learned from
public pictures of the same kind (`learning`), with the metric in which it sees them.

A separated picture is y = a x + b m: an image x (the target) and a mixture m of other training
images (the interference). Everything here is in the metric of the public pictures' second moments
C: vectors are C^{-1/2} y, of squared norm d. The network estimates the interference,
g = E[b m | y], for any a and b. `guided` has the search that uses it.

What images share does not tell them apart, so pictures are seen less the public mean
(`Card.centred`) or, where black pixels are informative, as they are. The first layer's biases allow
this whatever was subtracted from inputs (`inputs`). An unknown start, or rounding, is white noise
in the pictures, whose variance `Metric.noisy` adds to C; a network that also saw its level found
less.
"""

from __future__ import annotations

import copy
import json
import math
import pkgutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from recon_core.attacks.span.separation import cosines
from recon_core.restore.unet import UNET_SIZES, CompactUNet, UNet
from recon_core.strict import Count, Natural, NonNegative, Positive, Strict

Shape = tuple[int, int, int]

SHIPPED = ("cifar", "digits")
SMALLEST, LARGEST = 16, 64
"""Sides of pictures that separators are made for."""
STEEPEST = 4.0
"""Factor from the mean of the network's last channel to the logit of the interference's share."""
DETAIL = (0.0, 0.03, 0.06, 0.12)
"""Levels of white noise, in shares of the pictures' deviation, that `Separator.fitted` tries."""
AT_ONCE, AT_ONCE_ON_GPU = 64, 1024
"""Most pictures in one call of the network."""


@dataclass(frozen=True, kw_only=True)
class Card(Strict):
    """Facts of a separator, stored in its file beside its numbers.

    `widths` and `patch` are those of a `CompactUNet`; without widths it is a `UNet` of size
    "small". `centred`: pictures are seen less their mean. `mirrored`, `shifted` (pixels): how
    pictures were varied. `source`, `n_pictures`, `sha256`: what it learned from. Measured on
    held-out pictures: `alone`, the share of interference that it finds in single ones; `spread`,
    the standard deviation of the logarithm of their size in the metric; and `separated`, rows of
    (number mixed, identified by it, identified by plain filters).
    """

    shape: Shape
    widths: tuple[int, ...]
    patch: Count
    centred: bool
    mirrored: bool
    shifted: Natural
    floor: Positive
    source: str
    n_pictures: Count
    sha256: str
    n_steps: Natural
    alone: NonNegative
    spread: Positive
    separated: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        c, *sides = self.shape
        if c not in (1, 3) or not all(SMALLEST <= side <= LARGEST for side in sides):
            raise ValueError(
                f"shape={self.shape}: separators are for pictures in grey or colour from "
                f"{SMALLEST}x{SMALLEST} to {LARGEST}x{LARGEST} pixels"
            )

    def beats_filters(self, n: int) -> bool:
        """True if it identified more pictures than plain filters, at the number nearest to n."""
        nearest = min(self.separated, key=lambda row: abs(row[0] - n), default=(n, 0, 0))
        return nearest[1] > nearest[2]

    def uses_bfloat16(self, device: str) -> bool:
        """True if bfloat16 is faster: on a GPU, and for a large network on a CPU that has it."""
        large = not self.widths
        return device == "cuda" or (large and torch.cpu._is_avx512_bf16_supported())


@dataclass(frozen=True)
class Metric:
    """Second moments C = R (I + A diag(values) A^T) R, R = diag(own)^{1/2}, of pictures' cosines.

    `own` (b, m), `axes` A (b, m, r), orthonormal, and `values` (b, r) are of b = 1 block of all m =
    d cosines, or of b = 2 blocks, of even and of odd horizontal order, which mirroring keeps apart.
    """

    shape: Shape
    own: Float[Tensor, "b m"]
    axes: Float[Tensor, "b m r"]
    values: Float[Tensor, "b r"]

    @classmethod
    def of(cls, shape: Shape, own: Float[Tensor, "b m"], factors: Float[Tensor, "b m r"]) -> Metric:
        """The metric of C = diag(own) + F F^T."""
        scaled = factors.double() / own.double().sqrt()[:, :, None]
        values, vectors = torch.linalg.eigh(scaled.mT @ scaled)
        values = values.clamp_min(1e-9)
        axes = scaled @ (vectors / values.sqrt()[:, None])
        return cls(shape, own, axes.to(own), values.to(own))

    @property
    def factors(self) -> Float[Tensor, "b m r"]:
        """F of C = diag(own) + F F^T."""
        return self.own.sqrt()[:, :, None] * self.axes * self.values.sqrt()[:, None]

    @cached_property
    def variance(self) -> float:
        """The mean variance of a pixel."""
        return float((self.own + self.factors.square().sum(2)).mean())

    def noisy(self, noise: float) -> Metric:
        """The metric of pictures in white noise of `noise` times their deviation."""
        if not noise:
            return self
        own = self.own + noise**2 * self.variance
        if bool((self.own == self.own[:, :1]).all()):  # the axes stay the same
            return Metric(self.shape, own, self.axes, self.values * self.own[:, :1] / own[:, :1])
        return Metric.of(self.shape, own, self.factors)

    def misfit(self, pictures: Float[Tensor, "k d"]) -> float:
        """Minus twice the Gaussian log-likelihood of the pictures' span, up to a constant."""
        white = self.whitened(pictures).double()
        volume = float(self.own.double().log().sum() + self.values.double().log1p().sum())
        return len(self.own.flatten()) * float((white @ white.mT).logdet()) + len(white) * volume

    def whitened(self, pictures: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """C^{-1/2} x of pictures x, up to a rotation."""
        parts = in_blocks(pictures.unflatten(1, self.shape), len(self.own))
        parts = parts * self.own.rsqrt()[:, None]
        shrunk = ((1 + self.values).rsqrt() - 1)[:, None]
        parts = parts + ((parts @ self.axes) * shrunk) @ self.axes.mT
        waves = parts.unflatten(2, (*self.shape[:2], -1)).permute(1, 2, 3, 4, 0)
        return cosines(waves.flatten(3), inverse=True).flatten(1)


def in_blocks(pictures: Float[Tensor, "n c h w"], n_blocks: int) -> Float[Tensor, "b n m"]:
    """The cosines of pictures, in one block or in two, of even and of odd horizontal order."""
    waves = cosines(pictures)
    return torch.stack([waves[..., i::n_blocks].flatten(1) for i in range(n_blocks)])


def build_network(card: Card) -> CompactUNet | UNet:
    """The untrained network, from torch's global generator."""
    c, side = card.shape[0], card.shape[1]
    net: CompactUNet | UNet
    if card.widths:
        net = CompactUNet(2 * c, c + 1, card.widths, card.patch)
    else:
        net = UNet(UNET_SIZES["small"], in_channels=2 * c, out_channels=c + 1, n_labels=0,
                   resolution=side)  # fmt: skip
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True)
class Separator:
    """A network (`build_network`) with its metric at a level of `noise`, and the `mean` of the
    public pictures, in [0, 1]."""

    card: Card
    network: nn.Module
    metric: Metric
    mean: Float[Tensor, " d"]
    noise: float = 0.0

    def at(self, noise: float) -> Separator:
        """This separator, of level 0, for pictures in white noise of this share of their
        deviation."""
        return replace(self, noise=noise, metric=self.metric.noisy(noise))

    def fitted(self, pictures: Float[Tensor, "k d"]) -> Separator:
        """The separator at the noise level at which the span of pictures is likeliest: pictures
        unlike those it learned from have detail where these, such as JPEGs, have none."""
        return min((self.at(level) for level in DETAIL), key=lambda s: s.metric.misfit(pictures))

    def to(self, device: torch.device) -> Separator:
        """The separator on a device."""
        if self.mean.device == device:
            return self
        m, network = self.metric, copy.deepcopy(self.network).to(device)
        metric = Metric(m.shape, *(t.to(device) for t in (m.own, m.axes, m.values)))
        return replace(self, network=network, metric=metric, mean=self.mean.to(device))

    @cached_property
    def operations(self) -> int:
        """Floating-point operations of the network for one picture."""
        with FlopCounterMode(display=False) as counted, torch.no_grad():
            self.answer(self.network, *self.mean.new_zeros(2, 1, len(self.mean)))
        return int(counted.get_total_flops())

    def interference(
        self, whitened: Float[Tensor, "n d"], pictures: Float[Tensor, "n d"], *, exact: bool = True
    ) -> Float[Tensor, "n d"]:
        """The interference in the metric, of pictures of energy 1 there (`whitened`); computed in
        bfloat16 on a GPU and, unless `exact`, by a large network on a CPU that has it."""
        device, found = whitened.device.type, []
        half = self.card.uses_bfloat16(device) and not (exact and device == "cpu")
        n = AT_ONCE_ON_GPU if device == "cuda" else AT_ONCE
        for seen, shown in zip(whitened.split(n), pictures.split(n), strict=True):
            with torch.autocast(device, torch.bfloat16, enabled=half):
                found.append(self.answer(self.network, seen.float(), shown.float()))
        return torch.cat(found).to(whitened)

    @torch.no_grad()
    def alone_and_spread(self, pictures: Float[Tensor, "n d"]) -> tuple[float, float]:
        """`Card.alone` and `Card.spread`, of held-out pictures as the network sees them."""
        white = self.metric.whitened(pictures)
        spread = float(white.norm(dim=1).clamp_min(1e-6).log().std())
        white = white / white.square().mean(1, keepdim=True).sqrt()
        return max(0.0, float((self.interference(white, pictures) * white).mean())), spread

    def answer(
        self, net: nn.Module, whitened: Float[Tensor, "n d"], pictures: Float[Tensor, "n d"]
    ) -> Float[Tensor, "n d"]:
        """E[b m | y] = b^2 y + b sqrt(1 - b^2) times the network's answer. The share b^2, which has
        an output channel of its own, is all that a Gaussian model of images would use."""
        size = pictures.square().mean(1, keepdim=True).clamp_min(1e-30).rsqrt()
        sign = torch.ones_like(size)
        if not self.card.centred:  # pictures on black are positive, so one sign is enough
            sign = torch.where(pictures.sum(1, keepdim=True) < 0, -sign, sign)
        whitened = whitened * sign
        both = torch.stack([pictures * (size * sign), whitened], 1)
        both = both.reshape(-1, 2 * self.card.shape[0], *self.card.shape[1:])
        both = both.contiguous(memory_format=torch.channels_last)
        told: Tensor = net(both, both.new_zeros(len(both)), both.new_zeros(len(both), 0)).float()
        share = (STEEPEST * told[:, -1].mean((1, 2))).sigmoid()[:, None]
        answer = share * whitened + (share * (1 - share)).sqrt() * told[:, :-1].flatten(1)
        return answer * sign


METADATA, NETWORK = "palimpsest-separator", "network."


def packed(separator: Separator) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a safetensors file. The network and the metric's factors, or, if these
    are many, their products, are in half precision."""
    metric = separator.metric
    factors = metric.factors.double()
    spread = (metric.own + factors.square().sum(2)).sqrt()
    scaled = factors / spread[:, :, None]
    tensors = {"mean": separator.mean, "own": metric.own, "spread": spread.float()}
    if 2 * scaled.shape[2] > (m := scaled.shape[1]):
        upper = torch.triu_indices(m, m)
        tensors["products"] = (scaled @ scaled.mT)[:, upper[0], upper[1]].half()
    else:
        tensors["factors"] = scaled.half()
    tensors |= {NETWORK + name: t.half() for name, t in separator.network.state_dict().items()}
    metadata = {METADATA: json.dumps(asdict(separator.card))}
    return {name: t.detach().cpu().contiguous() for name, t in tensors.items()}, metadata


def unpacked(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Separator:
    """The separator that `packed` wrote. Raises ValueError for anything else."""
    if METADATA not in metadata:
        raise ValueError("it is no separator, such as `palimpsest train separator` writes")
    try:
        card = _card(json.loads(metadata[METADATA]))
        wide = {name: t.float() for name, t in tensors.items()}
        if not all(bool(t.isfinite().all()) for t in wide.values()):
            raise ValueError("some numbers are not finite")
        network, known = build_network(card), {"mean", "own", "spread", "factors", "products"}
        state = {name: t for name, t in wide.items() if name.startswith(NETWORK)}
        network.load_state_dict({name.removeprefix(NETWORK): t for name, t in state.items()})
        network.eval().requires_grad_(False)
        if strangers := wide.keys() - known - state.keys():
            raise ValueError(f"{min(strangers)} is of no part of it")
        return Separator(card, network, _metric(card.shape, wide), wide["mean"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        why = str(error).strip().splitlines()[0]
        raise ValueError(f"its card and its numbers do not agree: {why}") from error


def _metric(shape: Shape, tensors: Mapping[str, Tensor]) -> Metric:
    mean, own, spread = (tensors[name] for name in ("mean", "own", "spread"))
    if own.numel() != len(mean) or own.numel() != math.prod(shape):
        raise ValueError(f"a metric of {own.numel()} numbers for pictures of {shape}")
    if "factors" in tensors:
        return Metric.of(shape, own, tensors["factors"] * spread[:, :, None])
    m = own.shape[1]
    upper = torch.triu_indices(m, m)
    half = torch.zeros(len(own), m, m, dtype=torch.float64)
    half[:, upper[0], upper[1]] = tensors["products"].double()
    products = (half + half.triu(1).mT) * spread[:, :, None] * spread[:, None, :]
    values, vectors = torch.linalg.eigh(products)
    return Metric(shape, own, vectors.float(), (values.clamp_min(0) / own).float())


def _card(read: Any) -> Card:
    lists = {name: tuple(read[name]) for name in ("shape", "widths")}
    rows = tuple((int(n), int(ours), int(theirs)) for n, ours, theirs in read["separated"])
    if unknown := set(read) - {field.name for field in fields(Card)}:
        raise ValueError(f"unknown entries {sorted(unknown)}")
    return Card(**read | lists | {"separated": rows})


@cache
def shipped_separator(name: str) -> Separator:
    """A separator that comes with the package: "cifar", learned from a JPEG copy of CIFAR-10's
    training images, or "digits", from MNIST's test images 0 to 7,999. Raises ValueError for another
    name."""
    from safetensors.torch import load

    if name not in SHIPPED:
        raise ValueError(
            f"separator={name!r}: the package has {' and '.join(SHIPPED)}; a file of one's own is "
            "for `palimpsest attack weights` and `palimpsest audit`"
        )
    content = pkgutil.get_data(__name__, f"separator_{name}.safetensors")
    assert content is not None
    return unpacked(load(content), metadata_of(content))


def metadata_of(content: bytes) -> dict[str, str]:
    """The metadata in the head of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    found: dict[str, str] = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    return found
