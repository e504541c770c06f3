"""Similarity of two encodings, learned from public images alone.

Carlini et al. (2020, arXiv 2011.05315, section 4.1) show a network a pair of encodings at a time.
Here each encoding passes once. Where a smooth image crosses zero its absolute value has a crease.
Trained on mixtures of public images, whose signs are known, a U-Net on patches of 2 x 2 pixels
gives their high frequencies, whitened and of unit energy near every pixel, up to a sign for each
window of 4 to 32 pixels: it corrects the whitened |y| by a factor and a sum, and weighs it. Two
such fields are compared in windows: with G_v the inner product of two fields in window v and E the
mean square of a field,

    score = sum over v of w_v (sqrt(1 + (a_v G_v)^2) - 1) + l G_whole - e (E_1 + E_2) + b,

the log odds that the two share a private image, all learned by logistic regression on all pairs of
a batch, which is mixed from few private images, with `unfolding_loss` beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from recon_core.attacks.instahide.coherence import ImageShape
from recon_core.attacks.instahide.mixing import InstaHide, mixture
from recon_core.restore.examples import Examples
from recon_core.restore.fit import Fit, Training
from recon_core.strict import Count, Strict, Within
from recon_core.types import N_AUGMENT, Progress, no_progress, seeded_generator

PATCH = 2
GRID = 8
"""Sides of images must be multiples of this: patches, halved twice."""
FILTER = 7
"""Side of the whitening filter, in pixels."""
REGULAR = 0.1
"""Added to the power at each frequency, in shares of its mean."""
NEAR = 5
"""Side of the neighbourhood with unit energy, in pixels."""
FAINT = 0.05
"""Amplitude, in shares of the image's, below which a neighbourhood stays faint."""
CREASE = 0.05
"""Width around zero, in units of pixels in [-1, 1], that is shown to the network as a crease."""
LEAST = 0.05
"""Weight of a pixel, at least."""
BLOCK = 4
"""Side of the smallest window, in pixels."""
PASS, ROWS = 128, 32
"""Encodings that go through the network, and that are compared with all others, at a time."""
SHORT = Training(
    n_steps=1200,
    batch_size=64,
    lr=2e-3,
    warmup_images=3200,
    decay="cosine",
    ema_halflife_images=3200,
)
"""About ten minutes on one core."""


@dataclass(frozen=True)
class HiddenExamples(Examples):
    """Encodings as examples: `condition` is |s|, `target` s, in units of images in [-1, 1].
    `private`: the two private images of each, by their number in the batch."""

    private: Int64[Tensor, "n 2"] = field(kw_only=True)


@dataclass(frozen=True, kw_only=True)
class SimilarityNetwork(Strict):
    """Settings. `width`, `deep_width`: channels of the U-Net. `n_private`: private images that a
    batch is mixed from. `n_calibration`: mixtures that the whitening is computed from. `scheme`:
    how encodings are made. `shape` of images (c, h, w), which `train` takes from those it is given.
    """

    width: Count = 64
    deep_width: Count = 96
    n_private: Annotated[int, Within("[4, inf)", fix="of fewer, all pairs share an image")] = 24
    n_calibration: Count = 1000
    scheme: InstaHide = field(default_factory=InstaHide)
    training: Training = SHORT
    shape: ImageShape = (3, 32, 32)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.training.mirror or self.training.accumulate > 1:
            raise ValueError(
                "training.mirror mirrors each encoding for itself and training.accumulate tears "
                "pairs apart; use mirror=False (images are mirrored before mixing) and accumulate=1"
            )
        if self.training.batch_size < 2:
            raise ValueError(f"batch_size={self.training.batch_size} has no pairs; use 2 or more")

    def drawn(
        self, images: Float[Tensor, "p c h w"], n: int, generator: torch.Generator
    ) -> HiddenExamples:
        """n encodings of images of which `n_private` are private and the others public. Raises
        ValueError if there are too few images."""
        if len(images) < self.n_private + self.scheme.k_pub:
            raise ValueError(
                f"{len(images)} images are too few: a batch takes {self.n_private} as private ones "
                f"and {self.scheme.k_pub} others"
            )
        order = torch.randperm(len(images), generator=generator)
        n_public = n * self.scheme.k_pub
        chosen = images[order[: self.n_private + n_public]].float()
        flip = torch.rand(len(chosen), generator=generator) < 0.5
        flat = chosen.where(~flip[:, None, None, None], chosen.flip(-1)).flatten(1)
        own, others = flat[: self.n_private], flat[self.n_private :]
        scheme = replace(self.scheme, n_epochs=-(-n // self.n_private))
        mixed = scheme.encode(own, others, generator=generator)
        rows = torch.randperm(len(mixed.y), generator=generator)[:n]
        pairs = mixed.private[rows]
        signed = mixture(own, pairs, mixed.private_weights[rows])
        signed += mixture(others, mixed.public[rows], mixed.public_weights[rows])
        target = signed.reshape(n, *images.shape[1:])
        return HiddenExamples(
            condition=target.abs(),
            target=target,
            augment=torch.zeros(n, N_AUGMENT),
            private=pairs,
        )

    def train(
        self,
        images: Float[Tensor, "p c h w"],
        *,
        progress: Progress = no_progress,
        device: torch.device | str = "cpu",
    ) -> Similarity:
        """The averaged network after the training, on public `images` in [-1, 1]. Raises
        NonfiniteLossError if it diverges, ValueError for images that do not fit."""
        c, h, w = images.shape[1:]
        fit = Fit(replace(self, shape=(c, h, w)), self.training, device=device)
        draw = seeded_generator(self.training.seed, 0, "similarity calibration")
        signed = self.drawn(images, self.n_calibration, draw).target.to(device)
        for net in (fit.net, fit.ema):
            assert isinstance(net, Similarity)
            net.unfold.whitening.copy_(whitening_filter(signed))
            net.typical.copy_(images.mean(0))
        while not fit.done:
            draw = seeded_generator(self.training.seed, fit.step, "similarity batch")
            fit.update(self.drawn(images, self.training.batch_size, draw))
            progress(fit.step / self.training.n_steps)
        assert isinstance(fit.ema, Similarity)
        return fit.ema.eval()

    def build(self, *, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return Similarity(self.shape, self.width, self.deep_width)

    def loss(
        self,
        net: nn.Module,
        batch: Examples,
        *,
        generator: torch.Generator,
        first: int = 0,
        total: int | None = None,
    ) -> Tensor:
        """Mean over all pairs of the batch. A rank's pairs are those among its own examples."""
        del generator, first
        assert isinstance(batch, HiddenExamples)
        share = 1.0 if total is None else len(batch) / total
        logits, fields, target = net(batch.condition, batch.target)
        i, j = torch.triu_indices(len(batch), len(batch), 1, device=logits.device)
        truth = shared_images(batch.private)[i, j].clamp(max=1).to(logits)
        loss = F.binary_cross_entropy_with_logits(logits[i, j], truth)
        return share * (loss + unfolding_loss(fields, target, BLOCK))


class Similarity(nn.Module):
    """The network and the kernel, for images of one shape (c, h, w). `typical`: the mean of the
    training images, which tells pictures from their negatives."""

    typical: Tensor

    def __init__(self, shape: tuple[int, int, int], width: int, deep_width: int) -> None:
        """Raises ValueError for sides that are no multiples of 8."""
        super().__init__()
        c, h, w = shape
        if h % GRID or w % GRID or not h or not w:
            raise ValueError(
                f"images of {h} x {w} pixels: sides must be multiples of {GRID}; pad or resize them"
            )
        self.shape, self.widths = shape, (width, deep_width)
        self.register_buffer("typical", torch.zeros(shape))
        self.unfold = Unfolder(c, width, deep_width)
        counts = [math.prod(s.shape) for s in windows(torch.zeros(h // BLOCK, w // BLOCK))]
        sides = [BLOCK * 2**k for k in range(len(counts) - 1)]
        n_values = [c * side**2 for side in sides] + [c * h * w]
        self.inner = nn.ParameterList(
            [torch.full((k,), n**-0.5) for k, n in zip(counts, n_values, strict=True)]
        )
        self.outer = nn.ParameterList([torch.full((k,), 2 / (k + 5)) for k in counts])
        self.linear, self.energy = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        self.bias = nn.Parameter(torch.tensor(-4.0))

    def forward(
        self, y: Float[Tensor, "n c h w"], signed: Float[Tensor, "n c h w"]
    ) -> tuple[Float[Tensor, "n n"], Float[Tensor, "n c h w"], Float[Tensor, "n c h w"]]:
        """Log odds of all pairs, their fields, and the fields that signs would give."""
        fields = self.unfold(y)
        blocks = self.blocks(fields)
        return self.compared(blocks, blocks), fields, of_unit_energy(self.unfold.whitened(signed))

    def blocks(self, fields: Float[Tensor, "n c h w"]) -> Float[Tensor, "gh gw n p"]:
        c, h, w = self.shape
        cut = fields.reshape(-1, c, h // BLOCK, BLOCK, w // BLOCK, BLOCK)
        return cut.permute(2, 4, 0, 1, 3, 5).flatten(3)

    def compared(
        self, one: Float[Tensor, "gh gw n p"], other: Float[Tensor, "gh gw k p"]
    ) -> Float[Tensor, "n k"]:
        """Log odds that encodings of `one` and `other` share a private image."""
        products = windows(one @ other.mT)
        energy = one.square().mean((0, 1, 3))[:, None] + other.square().mean((0, 1, 3))
        total = self.bias + self.linear * products[-1][0, 0] - self.energy * energy
        for a, w, product in zip(self.inner, self.outer, products, strict=True):
            flat = product.flatten(0, 1)
            bent = (flat.square() * a.square()[:, None, None] + 1).sqrt()
            total = total + torch.tensordot(w, bent, 1) - w.sum()
        return total

    @torch.no_grad()
    def scores(
        self, y: Float[Tensor, "m d"], *, progress: Progress = no_progress
    ) -> Float32[Tensor, "m m"]:
        """Log odds of all pairs of encodings, of pixels in units of images in [-1, 1]; symmetric,
        and nothing on the diagonal. Signs are ignored. ROWS are compared with all others at a
        time. Raises ValueError for encodings of another size."""
        c, h, w = self.shape
        m = len(y)
        if y.shape[1] != c * h * w:
            raise ValueError(
                f"encodings have {y.shape[1]} pixels, the network is for {c} x {h} x {w}"
            )
        device = self.bias.device
        images = y.abs().float().to(device).reshape(m, c, h, w)
        fields = torch.cat([self.unfold(part) for part in images.split(PASS)])
        blocks = self.blocks(fields).contiguous()
        found = torch.zeros(m, m, device=device)
        for start in range(0, m, ROWS):
            stop = min(start + ROWS, m)
            part = self.compared(blocks[:, :, start:stop], blocks[:, :, start:])
            found[start:stop, start:] = part
            found[start:, start:stop] = part.T
            progress(stop / m)
        return found.triu() + found.triu(1).T  # blocks of the diagonal are so up to rounding only


def shared_images(private: Int64[Tensor, "m 2"]) -> Int64[Tensor, "m m"]:
    same = private[:, None, :, None] == private[None, :, None, :]
    return same.sum((2, 3))


def save(network: Similarity) -> bytes:
    state = {name: value.contiguous() for name, value in network.state_dict().items()}
    return bytes(save_tensors(state | {"shape": torch.tensor(network.shape)}))


def load(data: bytes) -> Similarity:
    """The network that `save` wrote. Raises ValueError for tensors of something else."""
    state = load_tensors(data)
    needed = {"shape", "typical", "unfold.patches.weight", "unfold.bottom.0.first.weight"}
    if missing := needed - state.keys():
        raise ValueError(
            f"these are not the weights of a similarity: {sorted(missing)} are missing"
        )
    c, h, w = state.pop("shape").tolist()
    widths = [len(state[f"unfold.{name}.weight"]) for name in ("patches", "bottom.0.first")]
    network = Similarity((c, h, w), *widths)
    network.load_state_dict(state)
    return network.eval()


class Unfolder(nn.Module):
    """Absolute values (n, c, h, w) of mixtures of images in [-1, 1] to fields of that shape."""

    whitening: Tensor

    def __init__(self, n_channels: int, width: int, deep_width: int) -> None:
        super().__init__()
        self.n_channels = n_channels
        c, a, b = n_channels, width, deep_width
        self.register_buffer("whitening", torch.zeros(c, c, FILTER, FILTER))
        self.patches = nn.Conv2d(3 * c, a, 2 * PATCH, stride=PATCH, padding=PATCH // 2)
        self.down = nn.ModuleList([_Residual(a), _conv(a, b), _Residual(b), _conv(b, b)])
        self.bottom = nn.ModuleList([_Residual(b), _Residual(b)])
        self.up = nn.ModuleList([_Residual(b), nn.Conv2d(b, a, 1), _Residual(a)])
        self.correction = _conv(a, (2 * c + 1) * PATCH**2)
        nn.init.zeros_(self.correction.weight)
        assert self.correction.bias is not None
        nn.init.zeros_(self.correction.bias)

    def forward(self, y: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        c, white = self.n_channels, self.whitened(y)
        seen = torch.cat([4 * y - 1, (-y / CREASE).exp(), white], 1)
        seen = seen.contiguous(memory_format=torch.channels_last)  # half again as fast on a CPU
        fine = self.down[0](F.relu(self.patches(seen)))
        coarse = self.down[2](F.relu(self.down[1](F.avg_pool2d(fine, 2))))
        coarsest = self.bottom[0](F.relu(self.down[3](F.avg_pool2d(coarse, 2))))
        deep = F.interpolate(self.bottom[1](coarsest), scale_factor=2)
        coarse = self.up[0](coarse + deep)
        fine = self.up[2](fine + F.interpolate(self.up[1](coarse), scale_factor=2))
        change = F.pixel_shuffle(self.correction(F.relu(fine)), PATCH)
        factor, added, weight = change.split([c, c, 1], 1)
        field: Tensor = of_unit_energy(white * (1 + factor) + added)
        weighed: Tensor = field * (1 + weight).clamp(min=LEAST)
        return weighed

    def whitened(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        edge = FILTER // 2
        return F.conv2d(F.pad(x, (edge,) * 4, mode="replicate"), self.whitening)


class _Residual(nn.Module):
    """x plus two convolutions of it."""

    def __init__(self, n_channels: int) -> None:
        super().__init__()
        self.first, self.second = _conv(n_channels, n_channels), _conv(n_channels, n_channels)

    def forward(self, x: Float[Tensor, "n k h w"]) -> Float[Tensor, "n k h w"]:
        change: Tensor = self.second(F.relu(self.first(F.relu(x))))
        return x + change


def _conv(n_in: int, n_out: int) -> nn.Conv2d:
    return nn.Conv2d(n_in, n_out, 3, padding=1)


def of_unit_energy(field: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
    edge = NEAR // 2
    energy = field.square().mean(1, keepdim=True)
    around = F.avg_pool2d(F.pad(energy, (edge,) * 4, mode="replicate"), NEAR, 1)
    whole = energy.mean((1, 2, 3), keepdim=True)
    return field * (around + FAINT**2 * whole + 1e-12).rsqrt()


def whitening_filter(signed: Float[Tensor, "n c h w"]) -> Float32[Tensor, "c c k k"]:
    """The filter, (channels out, channels in, FILTER, FILTER), that makes images' power equal at
    all frequencies and channels uncorrelated; without the mean, and with outputs of variance 1."""
    height, width = signed.shape[2:]
    n_channels, edge = signed.shape[1], FILTER // 2
    transform = torch.fft.fft2(signed.float() - signed.float().mean((0, 2, 3), keepdim=True))
    power = torch.einsum("nihw,njhw->hwij", transform, transform.conj()) / len(signed)
    power[0, 0] = power[1, 0] + power[0, 1]
    levels, axes = torch.linalg.eigh(power)
    scale = (levels.clamp(min=0.0) + REGULAR * levels.mean()).rsqrt().to(axes.dtype)
    inverse = (axes * scale[..., None, :]) @ axes.mH
    response = torch.fft.fftshift(torch.fft.ifft2(inverse.permute(2, 3, 0, 1)).real, dim=(2, 3))
    rows = slice(height // 2 - edge, height // 2 + edge + 1)
    columns = slice(width // 2 - edge, width // 2 + edge + 1)
    kernel = response[:, :, rows, columns].flip(2, 3)
    kernel = kernel - kernel.mean((2, 3), keepdim=True)
    spread = F.conv2d(signed.float(), kernel.contiguous()).std()
    if not float(spread) > 0:
        raise ValueError(f"{len(signed)} images of {n_channels} channels have no contrast")
    white: Tensor = kernel / spread
    return white


def windows(blocks: Float[Tensor, "gh gw *s"]) -> list[Float[Tensor, "a b *s"]]:
    """Sums over all windows of 1, 2, 4, ... blocks a side, the last of them the whole."""
    sums, side = [blocks], 1
    while 2 * side <= min(blocks.shape[:2]):
        last = sums[-1]
        rows = last[:-side] + last[side:]
        sums.append(rows[:, :-side] + rows[:, side:])
        side *= 2
    if sums[-1].shape[:2] != (1, 1):
        sums.append(blocks.sum((0, 1), keepdim=True))
    return sums


def unfolding_loss(
    field: Float[Tensor, "n c h w"], target: Float[Tensor, "n c h w"], block: int
) -> Float[Tensor, ""]:
    """Squared error of the field up to a sign per window, mean over windows' sizes, less the
    target's own square: f^2 - 2 |f t|, summed in windows, per pixel. -1 is perfect."""
    n, _c, h, w = field.shape

    def summed(x: Float[Tensor, "n c h w"]) -> Float[Tensor, "gh gw n"]:
        return (
            x.mean(1).reshape(n, h // block, block, w // block, block).sum((2, 4)).permute(1, 2, 0)
        )

    products, squares = windows(summed(field * target)), windows(summed(field.square()))
    losses = []
    for k, (product, square) in enumerate(zip(products, squares, strict=True)):
        n_pixels = h * w if k + 1 == len(products) else (block * 2**k) ** 2
        losses.append((square - 2 * product.abs()).mean() / n_pixels)
    return torch.stack(losses).mean()
