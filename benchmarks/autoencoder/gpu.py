"""The autoencoder paper at its own size on one GPU: is it right, how fast is it, what comes back?

    python -m benchmarks.autoencoder.gpu --work FOLDER [--minutes M] [--data SOURCE] [--quick]
                                         [--json docs/results/benchmarks/autoencoder_gpu.json]

First, forward pass, training and recovery in float64 and float32 on the device have to agree with
float64 on the CPU, or nothing is timed. Then a training epoch and an evaluation of f are timed at
the paper's sizes, in float32 and TF32. (torch has no bfloat16 for float32 products on CUDA.) Then
victims are trained, each to all its levels, and the images of each level are recovered from all
masks as one batch. After `--minutes` it stops; the same command goes on from what FOLDER holds.
`--data`: images, tiny-imagenet:PATH for example; without, smooth noise. With --quick it works on a
CPU too, at sizes that show nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.record import Measurement, measured, median_seconds, parse_lines, said, seconds_of
from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.plug_and_play import Degraded, Iteration, KnownMask, Recovered, UnknownMask
from recon_core.degradation import MASKS, degrade, mask_pattern
from recon_core.precision import NetworkPrecision, float32_arithmetic
from recon_core.similarity import ACCURATE, errors
from recon_core.types import seeded_generator
from recon_core.victims.autoencoder import (
    Activation,
    Autoencoder,
    FullyConnected,
    Model,
    UNet,
    Weights,
    initial_weights,
)
from recon_core.victims.autoencoder_training import (
    AutoencoderTraining,
    Overfitted,
    train_autoencoders,
)
from storage.sources.load import load_images

_line = partial(measured, "autoencoder_gpu")


CPU = torch.device("cpu")
SEED = 42
PARITY = {"float64": 1e-9, "float32": 1e-3}
STATE_EVERY = 500
Method = Iteration | KnownMask | UnknownMask | NoiseAware


@dataclass(frozen=True, kw_only=True)
class Victim:
    """A network of the autoencoder paper, its images, and the constants that the attack on it has
    there."""

    name: str
    network: Autoencoder
    size: int
    n_images: int
    gamma: float
    training: AutoencoderTraining = field(default_factory=AutoencoderTraining)

    @property
    def model(self) -> Model:
        return self.network.on((3, self.size, self.size))

    @property
    def methods(self) -> tuple[Method, ...]:
        is_dense = isinstance(self.network, FullyConnected)
        return (
            UnknownMask(gamma=self.gamma, start="random" if is_dense else "nothing"),
            KnownMask(gamma=self.gamma),
            NoiseAware(),
            Iteration(),
        )


RUNS: tuple[tuple[bool, Activation, float], ...] = (
    *((True, "leaky_relu", 0.5), (False, "leaky_relu", 1.0)),
    *((True, "prelu", 0.1), (False, "prelu", 1.0), (False, "softplus", 1.0)),
)
"""Dense or a U-Net, activation, and the paper's gamma."""
PAPER = tuple(
    Victim(
        name=f"{'FC-10' if is_dense else 'U-Net'} {activation}",
        network=FullyConnected(activation=activation)
        if is_dense
        else UNet(skips=False, activation=activation),
        size=64 if is_dense else 32,
        n_images=600 if is_dense else 50,
        gamma=gamma,
    )
    for is_dense, activation, gamma in RUNS
)
SHORT = AutoencoderTraining(epochs=30, levels=(0.5, 1e-8))
TINY = tuple(
    Victim(name=name, network=network, size=8, n_images=4, gamma=gamma, training=SHORT)
    for name, network, gamma in (
        ("tiny FC", FullyConnected(depth=3, width=16), 0.5),
        ("tiny U-Net", UNet(channels=(4, 8), skips=False), 1.0),
    )
)


class TimeIsUpError(Exception):
    """The go is over; what there is has been kept."""


def parity(device: torch.device) -> Iterator[Measurement]:
    """Distance of the device from float64 on the CPU; SystemExit if far."""
    for victim in TINY:
        exact = computed(victim, CPU, torch.float64)
        for dtype in (torch.float64, torch.float32):
            found = computed(victim, device, dtype)
            kind = str(dtype).removeprefix("torch.")
            for what, a, b in zip(("forward", "training", "recovery"), found, exact, strict=True):
                difference = float((a.cpu().double() - b).norm() / b.norm())
                case = f"{victim.name}: {what} in {kind} against float64 on the CPU"
                yield _line(case, difference, "relative difference")
                if not difference < PARITY[kind]:
                    raise SystemExit(f"{case}: {difference:.2g}, more than {PARITY[kind]:g}")


def computed(victim: Victim, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """f(x), f(x) after 20 epochs, and what comes back from that f when the mask is known."""
    x = smooth_noise(victim).to(device, dtype)
    start = {name: t.to(device) for name, t in started(victim, dtype).items()}
    short = replace(victim.training, epochs=20, levels=(1e-30,))
    (trained,) = train_autoencoders(victim.model, start, x.unsqueeze(0), training=short)
    f = function(victim, trained.last.weights)
    y, mask = degraded(x)
    recovered = KnownMask(gamma=victim.gamma).recover(f, Degraded(y=y, mask=mask))
    return function(victim, start)(x), f(x), recovered.x


def paces(
    device: torch.device, victims: Sequence[Victim], repeats: int, n_epochs: int
) -> Iterator[Measurement]:
    """A training epoch and an evaluation of f on all degraded images of the first two victims."""
    precisions: tuple[NetworkPrecision, ...] = ("float32", "tf32")
    for victim in victims[:2]:
        images, weights = smooth_noise(victim).to(device), started(victim, torch.float32)
        train = partial(train_autoencoders, victim.model, weights, images.unsqueeze(0))
        settings = replace(victim.training, epochs=n_epochs, levels=(1e-30,))
        batch = images.repeat(len(MASKS), 1, 1, 1)
        f = function(victim, {name: t.to(device) for name, t in weights.items()})
        for precision in precisions:
            if precision == "tf32" and device.type != "cuda":
                continue
            with float32_arithmetic(precision, device):
                taken = median_seconds(partial(train, training=settings), repeats)
                case = f"training epoch, {victim.name}, {victim.n_images} images, {precision}"
                yield _line(case, taken / n_epochs, "s", repeats)
                taken = median_seconds(partial(f, batch), repeats)
                case = f"f of {len(batch)} images, {victim.name}, {precision}"
                yield _line(case, taken, "s", repeats)


class Go:
    """One go: victims are trained and their images recovered until the time is up."""

    def __init__(self, work: Path, device: torch.device, minutes: float, data: str | None) -> None:
        self.work, self.device, self.data = work, device, data
        self.ends = time.monotonic() + 60 * minutes
        self.work.mkdir(parents=True, exist_ok=True)

    def measure(self, victims: Sequence[Victim], *, quick: bool) -> Iterator[Measurement]:
        """Parity and pace, once per folder; losses and recoveries of each victim."""

        def first() -> Iterator[Measurement]:
            with float32_arithmetic("float32", self.device):
                yield from parity(self.device)
            yield from paces(self.device, victims, 2 if quick else 5, 3 if quick else 50)

        yield from self.kept("first", first)
        for victim in victims:
            images = self.images(victim)
            for level, checkpoint in self.trained(victim, images).levels.items():
                f, x = function(victim, checkpoint.weights), images.to(self.device)
                for method in victim.methods:
                    name = f"{victim.name}, train loss {level:g}, {method.kind}"
                    self.check_time(name)
                    yield from self.kept(name, partial(self.recovered, name, f, method, x))

    def recovered(
        self, name: str, f: Callable[[Tensor], Tensor], method: Method, x: Tensor
    ) -> list[Measurement]:
        with float32_arithmetic("float32", self.device):
            return [recovery(name, f, method, x)]

    def kept(self, name: str, make: Callable[[], Iterable[Measurement]]) -> list[Measurement]:
        """Measurements that are made once, and read by later goes."""
        file = self._file(name, ".json")
        if not file.is_file():
            lines = [f"{json.dumps(asdict(line))}\n" for line in make()]
            whole(file, lambda unfinished: unfinished.write_text("".join(lines)))
        return parse_lines(file.read_text(), name=str(file))

    def images(self, victim: Victim) -> Tensor:
        """The victim's images in [0, 1]."""
        if self.data is None:
            return smooth_noise(victim)
        found = load_images(self.data, split="train", size=victim.size)
        if len(found) < victim.n_images:
            raise SystemExit(f"{self.data} has {len(found)} images, not {victim.n_images}")
        order = torch.randperm(len(found), generator=seeded_generator(SEED, 0, "images"))
        rows = order[: victim.n_images].sort().values
        return torch.from_numpy(found.images[rows.numpy()]).float() / 255

    def trained(self, victim: Victim, images: Tensor) -> Overfitted:
        """The victim at its levels; TimeIsUpError with the state kept."""
        file = self._file(victim.name, ".pt")
        state = torch.load(file, map_location=CPU, weights_only=True) if file.is_file() else None

        def keep(state: dict[str, Tensor]) -> None:
            whole(file, partial(torch.save, state))
            self.check_time()

        with float32_arithmetic("float32", self.device):
            (trained,) = train_autoencoders(
                victim.model,
                {n: t.to(self.device) for n, t in started(victim, torch.float32).items()},
                images.unsqueeze(0).to(self.device),
                training=victim.training,
                state=state,
                on_state=keep,
                state_every=min(STATE_EVERY, max(1, victim.training.epochs // 3)),
            )
        last = trained.last
        print(f"{victim.name}: loss {last.loss:.2g}, epoch {last.epoch}", file=sys.stderr)
        return trained

    def check_time(self, name: str = "") -> None:
        """TimeIsUpError where it is, unless `name` was measured before."""
        if time.monotonic() > self.ends and not (name and self._file(name, ".json").is_file()):
            raise TimeIsUpError

    def _file(self, name: str, suffix: str) -> Path:
        words = "".join(c if c.isalnum() else "-" for c in name)
        return self.work / f"{words}{suffix}"


def recovery(name: str, f: Callable[[Tensor], Tensor], method: Method, x: Tensor) -> Measurement:
    """Seconds for all degraded images; the case says how many came back accurately, by mask."""
    y, mask = degraded(x)
    generators = tuple(seeded_generator(SEED, row, "start") for row in range(len(y)))
    found: list[Recovered] = []
    taken = seconds_of(
        lambda: found.append(method.recover(f, Degraded(y=y, mask=mask, generators=generators)))
    )
    accurate = errors(found[0].x, x.repeat(len(MASKS), 1, 1, 1)) < ACCURATE
    counts = accurate.view(len(MASKS), -1).sum(1).tolist()
    by_mask = ", ".join(f"{mask} {n}" for mask, n in zip(MASKS, counts, strict=True))
    case = f"recovery of {len(x)} x {len(MASKS)} images, {name}; accurate: {by_mask}"
    return _line(case, taken, "s")


def degraded(x: Tensor) -> tuple[Tensor, Tensor]:
    """All images by every mask, mask by mask, and the masks (b, c, h, w)."""
    patterns = torch.stack(
        [
            mask_pattern(name, *x.shape[2:], generator=seeded_generator(SEED, k, "mask"))
            for k, name in enumerate(MASKS)
        ]
    ).to(x.device)
    known = patterns.repeat_interleave(len(x), 0)
    y = degrade(x.repeat(len(MASKS), 1, 1, 1), known)
    return y, known.unsqueeze(1).expand_as(y)


def whole(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file all or nothing."""
    unfinished = file.with_suffix(".partial")
    write(unfinished)
    unfinished.replace(file)


def function(victim: Victim, weights: Weights) -> Callable[[Tensor], Tensor]:
    """f as an attack sees it."""

    @torch.no_grad()
    def f(x: Tensor) -> Tensor:
        return victim.model.forward(weights, x.unsqueeze(0))[0]

    return f


def started(victim: Victim, dtype: torch.dtype) -> Weights:
    return initial_weights(victim.model, [seeded_generator(SEED, 0, "victim")], dtype=dtype)


def smooth_noise(victim: Victim) -> Tensor:
    """Images without a source: 8x8 noise, enlarged."""
    small = torch.rand(victim.n_images, 3, 8, 8, generator=seeded_generator(SEED, 0, "images"))
    return torch.nn.functional.interpolate(small, size=(victim.size,) * 2, mode="bilinear")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0, also where the time was up before the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="what a next go continues from")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after so long")
    parser.add_argument("--data", help="tiny-imagenet:PATH, ...; default: smooth noise")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, also on a CPU")
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    options = parser.parse_args(argv)
    if not (options.quick or torch.cuda.is_available()):
        raise SystemExit(
            "benchmarks.autoencoder.gpu needs a CUDA device; --quick tries it on a CPU"
        )
    device = torch.device("cuda") if torch.cuda.is_available() else CPU
    go = Go(options.work, device, options.minutes, options.data)
    victims = TINY if options.quick else PAPER
    try:
        for _ in said(go.measure(victims, quick=options.quick), options.json):
            pass
    except TimeIsUpError:
        print("time is up; the same command goes on", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
