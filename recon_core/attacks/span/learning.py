"""Learning a separator: the metric of public pictures, mixtures of them, and the network.

Mixtures are drawn anew in every step: a target of either sign and hundreds of other pictures, all
shifted and mirrored, with coefficients from even to very uneven; the interference has a hundredth
of the energy up to all but a twenty-fifth. The loss is the mean square of the error over a^2 b^2,
the error of a Gaussian model of images.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recon_core.attacks.span.separation import cosines
from recon_core.attacks.span.separator import Card, Metric, Separator, build_network, in_blocks
from recon_core.optimisers import MuonAndAdamW

LOWEST, HIGHEST = 0.1, 5.0  # bounds of b / a, even in its logarithm
UNEVEN = 1.5  # largest deviation of the logarithm of a coefficient
FEWEST, MOST = 200, 400  # pictures in a mixture
SMALLEST = 1e-12  # least energy: that of a constant picture is 0 in the metric
RATE, WARM = 2e-3, 50
LARGEST_BLOCK, RANK = 2048, 512
"""Most cosines of a metric with all second moments; a larger one has variances and this many
factors."""
ASYMMETRY = 0.13
"""Share of second moments between cosines of even and odd horizontal order from which mirror images
look different: .16 to .17 for digits, .10 for faces of 20 people, .00 for CIFAR-10."""


def is_mirrored(pictures: Float[Tensor, "n c h w"]) -> bool:
    """True if mirror images of the pictures look like more of them (digits and letters do not)."""
    waves = cosines(pictures - pictures.mean(0)).double()
    parts = [waves[..., i::2].flatten(1) / len(waves) ** 0.5 for i in (0, 1)]
    even, odd = (part @ part.mT for part in parts)
    noise = float(even.trace() * odd.trace()) / len(waves)  # of independent pictures
    return float((even * odd).sum()) - noise < ASYMMETRY * float(even.norm() * odd.norm())


def metric_of(pictures: Float[Tensor, "n c h w"], *, floor: float, mirrored: bool) -> Metric:
    """The metric of pictures as they are seen, with variances of at least `floor` of their mean."""
    c, h, w = pictures.shape[1:]
    shape, n_blocks = (c, h, w), 2 if mirrored and w % 2 == 0 else 1
    parts = in_blocks(pictures, n_blocks).double()
    low, size = floor * float(parts.square().mean()), parts.shape[2]
    if size <= LARGEST_BLOCK:
        values, vectors = torch.linalg.eigh(parts.mT @ parts / len(pictures))
        values = (values / low - 1).clamp_min(0)
        own = parts.new_full((n_blocks, size), low).float()
        return Metric(shape, own, vectors.float(), values.float())
    variances = parts.square().mean(1).clamp_min(low)
    scaled = parts / variances.sqrt()[:, None] / len(pictures) ** 0.5
    _, values, axes = torch.svd_lowrank(scaled, q=min(RANK, len(pictures), size), niter=4)
    factors = axes * (values.square() - 1).clamp_min(0).sqrt()[:, None]
    factors = factors * variances.sqrt()[:, :, None]
    own = (variances - factors.square().sum(2)).clamp_min(low)
    return Metric.of(shape, own.float(), factors.float())


class Mixtures:
    """Mixtures of public pictures in [0, 1] (n, c, h, w), drawn by a generator on their device."""

    def __init__(self, pictures: Float[Tensor, "n c h w"], card: Card, *, seed: int = 0) -> None:
        mean = pictures.mean(0)
        self.mean = ((mean + mean.flip(-1)) / 2 if card.mirrored else mean).flatten()
        self.origin = self.mean if card.centred else torch.zeros_like(self.mean)
        self.pictures = pictures.flatten(1)
        self.maps = _maps(card).to(pictures.device)
        seen = torch.cat([(self.pictures - self.origin)[:, columns] for columns in self.maps])
        seen = seen.unflatten(1, card.shape)
        self.metric = metric_of(seen, floor=card.floor, mirrored=card.mirrored)
        self.generator = torch.Generator(pictures.device).manual_seed(seed)

    def draw(self, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(y, y as pictures, b m, a b) of n mixtures of energy 1."""
        n_others = FEWEST + int(self._index(MOST - FEWEST, 1))
        rows = self._index(len(self.pictures), n + n_others)
        maps = self.maps[self._index(len(self.maps), n + n_others)]
        seen = self.pictures[rows].gather(1, maps) - self.origin
        targets, others = seen.split([n, n_others])
        spread = UNEVEN * self._even(n)
        sizes = (spread * self._normal(n, n_others)).exp() * self._normal(n, n_others)
        mixed = sizes @ others
        whitened = self.metric.whitened(torch.cat([targets, mixed]))
        scale = whitened.square().mean(1, keepdim=True).clamp_min(SMALLEST).rsqrt()
        ratio = LOWEST * (HIGHEST / LOWEST) ** self._even(n)
        a = (1 + ratio.square()).rsqrt()
        sign = 2.0 * (self._even(n) < 0.5) - 1
        weight = torch.cat([sign * a, ratio * a]) * scale
        target, interference = (weight * whitened).split(n)
        shown = sum((weight * torch.cat([targets, mixed])).split(n), torch.zeros(()).to(target))
        y = target + interference
        size = y.square().mean(1, keepdim=True).clamp_min(SMALLEST).rsqrt()
        return y * size, shown, interference * size, ratio * a.square()

    def _index(self, n: int, size: int) -> Tensor:
        return torch.randint(n, (size,), generator=self.generator, device=self.pictures.device)

    def _even(self, n: int) -> Tensor:
        return torch.rand(n, 1, generator=self.generator, device=self.pictures.device)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.pictures.device)


def _maps(card: Card) -> Tensor:
    """Columns of flat pictures for every shift, edges repeated, and mirrored if that is allowed."""
    c, h, w = card.shape
    columns, moves = torch.arange(c * h * w).view(c, h, w), range(-card.shifted, card.shifted + 1)
    maps = []
    for down, right in itertools.product(moves, moves):
        rows = (torch.arange(h) + down).clamp(0, h - 1)
        moved = columns[:, rows][..., (torch.arange(w) + right).clamp(0, w - 1)]
        maps += [moved.flatten(), moved.flip(-1).flatten()] if card.mirrored else [moved.flatten()]
    return torch.stack(maps)


def learn(
    mixtures: Mixtures,
    card: Card,
    *,
    batch: int = 96,
    seed: int = 0,
    report: Callable[[int, float, Separator], None] = lambda _step, _loss, _separator: None,
) -> Separator:
    """Learn a separator of averaged weights in `card.n_steps` steps with a cosine schedule.

    `report` is called after every step with its number, its loss and the separator so far.
    """
    device = mixtures.pictures.device
    net = build_network(card)
    net.initialise(torch.Generator().manual_seed(seed))
    net = net.to(device)
    averaged, parameters = copy.deepcopy(net).requires_grad_(False).eval(), list(net.parameters())
    learned = Separator(card, averaged, mixtures.metric, mixtures.mean)
    optimiser = MuonAndAdamW(parameters)
    for n in range(card.n_steps):
        turn = (1 + math.cos(math.pi * n / card.n_steps)) / 2
        y, shown, wanted, scale = mixtures.draw(batch)
        with torch.autocast(device.type, torch.bfloat16, enabled=card.uses_bfloat16(device.type)):
            answer = learned.answer(net, y, shown)
        loss = ((answer - wanted) / scale).square().mean()
        net.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step(RATE * min(1.0, (n + 1) / WARM) * turn)
        kept = min(0.99, n / (n + 10))
        for old, new in zip(averaged.parameters(), parameters, strict=True):
            old.lerp_(new.detach(), 1 - kept)
        report(n + 1, float(loss.detach()), learned)
    return learned
