"""Learns the network that tells an image from its guests (`sources="network"`), and writes it into
the package.

    python -m benchmarks.span.guests --images folder:cifar10 [--steps 13230] [--device cuda]
        [--out FILE]

Mixtures are drawn anew in every step: a host, mirrored or not, of either sign, and 400 other
images, with coefficients from even to such that few are strong, in shares of the energy from a
hundredth to all but a twenty-fifth. The loss is the mean square of the error over a^2 b^2, what a
Gaussian model of images leaves. All images are of the train split, which the victims of the
measured results never saw. Five minutes of an H200; on two cores a network that means nothing.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from recon_core.attacks.span import guests
from recon_core.attacks.span.guests import build_network, covariances, guests_of, in_blocks, roots
from recon_core.cuda_graphs import repeated
from storage.sources.load import load_images

LOWEST, HIGHEST = 0.1, 5.0
"""Bounds of b / a, even in its logarithm."""
UNEVEN = 1.5
"""Largest deviation of the logarithm of a guest's coefficient."""
STEPS, RATE, WARM, DECAY = 13_230, 1e-3, 300, 1e-3
TOLD = (0.2, 0.35, 0.7, 1.2, 2.0, 4.0)
TOLD_EVERY = 30.0


@dataclass(frozen=True)
class Mixtures:
    """Whitened images (n, d), and the matrix that undoes it."""

    images: Float[Tensor, "n d"]
    colour: Float[Tensor, "d d"]
    mirror: Tensor

    @staticmethod
    def of(pictures: Float[Tensor, "n d"], covariance: Float[Tensor, "2 h h"]) -> Mixtures:
        white, colour = (roots(covariance, power).to(pictures) for power in (-0.5, 0.5))
        d = pictures.shape[1]
        columns = torch.arange(d, device=pictures.device).view(guests.SHAPE)
        return Mixtures(
            torch.cat([in_blocks(some, white) for some in pictures.split(5000)]).half(),
            in_blocks(torch.eye(d).to(pictures), colour),
            columns.flip(-1).flatten(),
        )

    def draw(self, n: int, n_guests: int) -> tuple[Tensor, Tensor, Tensor]:
        """(y, b m, a b) of n mixtures of energy 1, by torch's own generator."""
        like, device = self.colour, self.colour.device
        rows = torch.randint(len(self.images), (n + n_guests,), device=device)
        drawn = self.images[rows].to(like)
        hosts, others = drawn[:n], drawn[n:]
        mirrored = torch.rand(n, 1, device=device) < 0.5
        hosts = unit(torch.where(mirrored, hosts[:, self.mirror], hosts))
        spread = UNEVEN * torch.rand(n, 1, device=device)
        sizes = (spread * torch.randn(n, n_guests, device=device)).exp()
        mixed = unit((torch.randn(n, n_guests, device=device) * sizes) @ others)
        ratio = LOWEST * (HIGHEST / LOWEST) ** torch.rand(n, 1, device=device)
        sign = 2.0 * torch.randint(0, 2, (n, 1), device=device) - 1
        a = (1 + ratio.square()).rsqrt()
        b = ratio * a
        y = sign * a * hosts + b * mixed
        size = y.square().mean(1, keepdim=True).rsqrt()
        return y * size, b * mixed * size, a * b


def unit(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Rows of mean square 1."""
    scaled: Tensor = x * x.square().mean(1, keepdim=True).rsqrt()
    return scaled


def learn(
    mixtures: Mixtures, *, n_steps: int, batch: int, n_guests: int, seed: int = 0
) -> nn.Module:
    """The network's averaged weights after so many steps."""
    device = mixtures.colour.device
    cuda = device.type == "cuda"
    torch.manual_seed(seed)
    net = build_network(torch.Generator().manual_seed(seed)).to(device)
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    averaged: nn.Module = copy.deepcopy(net).requires_grad_(False)
    rate, kept, last = (torch.zeros((), device=device) for _ in range(3))
    parameters = list(net.parameters())
    adam = torch.optim.AdamW(
        parameters,
        lr=rate if cuda else RATE,
        betas=(0.9, 0.99),
        weight_decay=DECAY,
        fused=cuda,
        capturable=cuda,
    )

    def step() -> None:
        adam.zero_grad(set_to_none=False)
        y, wanted, scale = mixtures.draw(batch, n_guests)
        with torch.autocast(device.type, torch.bfloat16):
            answer = guests_of(net, y, y @ mixtures.colour)
        loss = ((answer - wanted) / scale).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()
        with torch.no_grad():
            for old, new in zip(averaged.parameters(), parameters, strict=True):
                old.lerp_(new, kept)
            last.copy_(loss)

    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    repeat, began, told = repeated(step, device), time.perf_counter(), 0.0
    for n in range(n_steps):
        turn = (1 + math.cos(math.pi * n / n_steps)) / 2
        rate.fill_(RATE * min(1.0, (n + 1) / WARM) * turn)
        if not cuda:
            adam.param_groups[0]["lr"] = float(rate)
        kept.fill_(1 - min(0.999, n / (n + 10)))
        repeat(1)
        if (spent := time.perf_counter() - began) > told:
            print(f"{n + 1} of {n_steps} steps, {spent:.0f} s, loss {float(last):.4f}", flush=True)
            told = spent + TOLD_EVERY
    return averaged


@torch.no_grad()
def losses(net: nn.Module, mixtures: Mixtures) -> dict[float, float]:
    """Losses on even mixtures of images, half of which are hosts, by b / a; 1 is a Gaussian's."""
    n = min(500, len(mixtures.images) // 2)
    drawn = mixtures.images.to(mixtures.colour)
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randn(n, len(drawn) - n, generator=generator).to(drawn)
    hosts, mixed = unit(drawn[:n]), unit(sizes @ drawn[n:])
    found = {}
    for ratio in TOLD:
        a = 1 / math.sqrt(1 + ratio**2)
        y = a * hosts + ratio * a * mixed
        size = y.square().mean(1, keepdim=True).rsqrt()
        with torch.autocast(y.device.type, torch.bfloat16, enabled=y.is_cuda):
            answer = guests_of(net, y * size, (y * size) @ mixtures.colour)
        error = (answer - ratio * a * mixed * size) / (ratio * a**2)
        found[ratio] = float(error.square().mean())
    return found


def _of(images: Tensor, mean: Tensor, device: torch.device) -> Float[Tensor, "n d"]:
    return (images.to(device).float() / 255 - mean).flatten(1)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", required=True, help="folder:PATH, cifar10:PATH, ...")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--out", type=Path, help="default: where the package has it")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks.span.guests needs a CUDA device; --device cpu tries it on a CPU"
        )
    seen, others = (
        torch.from_numpy(load_images(options.images, split=split).images)
        for split in ("train", "heldout")
    )
    mean = seen.to(device).float().mean(0) / 255
    parts = [_of(some, mean, device) for some in seen.split(5000)]
    covariance = sum(
        (covariances(part) * (len(part) / len(seen)) for part in parts),
        torch.zeros((), dtype=torch.float64, device=device),
    )
    mixtures = Mixtures.of(torch.cat(parts), covariance)
    net = learn(mixtures, n_steps=options.steps, batch=options.batch, n_guests=400)
    for ratio, loss in losses(
        net, Mixtures.of(_of(others[:2000], mean, device), covariance)
    ).items():
        print(f"b / a {ratio}: {loss:.4f}", flush=True)
    out = options.out or Path(guests.__file__).with_name("guest_model.npz")
    with out.open("wb") as file:
        np.savez_compressed(file, **guests.packed(net, covariance.cpu()))  # type: ignore[arg-type]
    print(f"{out.name}: {out.stat().st_size / 2**20:.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
