"""Units of a study of split classifiers: train victims that share images, and invert one of them.

All defences of a source, cut and seed are trained as stacks of a few networks (`train_split`); the
images of a victim are inverted as one batch, by the paper's attack and by ours. What units give
are arrays, of a victim `weights/NAME` and numbers, of an inversion `ATTACK/NAME`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.inversion.feature_matching import GradientInversion, Inverted
from recon_core.attacks.inversion.strong_inversion import (
    StrongInversion,
    Whitening,
    errors_by_zeta,
    whiten,
)
from recon_core.precision import float32_arithmetic
from recon_core.similarity import similarities, unit_ssim
from recon_core.threads import share_of
from recon_core.types import Progress, no_progress, seeded_generator
from recon_core.victims.autoencoder import Shape
from recon_core.victims.separability import separability
from recon_core.victims.split import (
    LeNet5,
    SplitModel,
    evaluate_split,
    features_of,
    initial_weights,
)
from recon_core.victims.split_training import Defence, train_split
from tasks.evaluation.perceptual import feature_maps
from tasks.families.inversion.study.images import Part
from tasks.families.inversion.study.settings import Cell, InversionSource
from tasks.study.products import NOTHING, Arrays, Folder, Job, hash_of, key_of

OWN_MAPS, OWN_CHANNELS = (1, 2), (6, 16)
"""Cuts of LeNet5 whose outputs are the feature maps of PSIM, and how many maps these are."""


@dataclass(frozen=True)
class VictimId:
    """A network: everything that it depends on. `data` is the hash of the images it is trained and
    tested on, `shape` theirs."""

    source: InversionSource
    cut: int
    defence: Defence
    seed: int
    data: str
    shape: Shape
    root_seed: int

    @property
    def key(self) -> str:
        defence = None if self.defence is None else asdict(self.defence)
        training = asdict(self.source.training)
        seeds = [self.seed, self.root_seed]
        return key_of(["split", self.cut, defence, training, self.data, seeds])

    @property
    def name(self) -> str:
        return f"{Cell(self.source.name, self.cut, self.defence).name}, seed {self.seed}"

    def model(self, cut: int | None = None) -> SplitModel:
        """The network, cut where it is or elsewhere."""
        return LeNet5(cut=cut or self.cut).on(self.shape, self.source.n_classes)

    def generators(self, n: int, purpose: str) -> list[torch.Generator]:
        """One per image; the same for every defence."""
        purpose = f"{purpose} {self.seed}"
        return [seeded_generator(self.root_seed, k, purpose) for k in range(n)]


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """Victims of one source, cut and seed, trained as stacks."""

    root: str
    device: str
    victims: tuple[VictimId, ...]
    train: Part
    tests: Part

    def run(self, progress: Progress = no_progress) -> dict[str, Any]:
        """Trains the victims that are not there yet, and tests them. Raises StoreFullError."""
        folder = Folder(Path(self.root))
        missing = [victim for victim in self.victims if folder.product(victim.key) is None]
        if missing:
            started = time.perf_counter()
            made = self._trained(missing, progress)
            seconds = round((time.perf_counter() - started) / len(missing), 3)
            for victim, arrays in zip(missing, made, strict=True):
                folder.put(victim.key, arrays, {"seconds": seconds})
        return {"keys": [victim.key for victim in self.victims]}

    def _trained(self, victims: Sequence[VictimId], progress: Progress) -> list[Arrays]:
        """Weights of each victim, and what they do on both sets of images."""
        first, n, device = victims[0], len(victims), torch.device(self.device)
        model = first.model()
        drawn = seeded_generator(first.root_seed, first.seed, "split start")
        start = initial_weights(model, [drawn], dtype=torch.float32)

        def shuffle(_stream: int, epoch: int) -> torch.Generator:
            return seeded_generator(first.root_seed, first.seed, f"split minibatches {epoch}")

        with float32_arithmetic("float32", device):
            found = train_split(
                model,
                {k: t.repeat(n, *[1] * (t.dim() - 1)).to(device) for k, t in start.items()},
                pictures(self.train, device),
                torch.from_numpy(self.train.labels).to(device),
                defences=[victim.defence for victim in victims],
                training=first.source.training,
                shuffle=shuffle,
                progress=share_of(progress, 0.0, 0.95),
            )
            trained = {name: tensor.to(device) for name, tensor in found.weights.items()}
            tests = pictures(self.tests, device)
            tested = evaluate_split(model, trained, tests, torch.from_numpy(self.tests.labels))
            apart = separability(features_of(model, trained, tests))
        whole = {f"weights/{name}": tensor for name, tensor in found.weights.items()} | {
            "train_accuracy": found.accuracy,
            "train_loss": found.loss,
            "diverged": found.diverged,
            "accuracy": tested.accuracy,
            "distance": apart.mean,
            "min_distance": apart.minimum,
        }
        return [{name: t[k].cpu().numpy() for name, t in whole.items()} for k in range(n)]


@dataclass(frozen=True, kw_only=True)
class InvertJob(Job):
    """Inversions of one victim by every attack. A victim that diverged sends nothing: there are no
    arrays of it.

    `inverted` are unseen images whose features the attacker has, `tuning` public images with which
    it tunes. `maps`: the classifier whose features are PSIM's, or another source of them as in
    `tasks.evaluation.perceptual`.
    """

    victim: VictimId
    inverted: Part
    tuning: Part
    strong: StrongInversion
    zetas: tuple[float, ...]
    rates: tuple[float, ...]
    maps: VictimId | str

    @property
    def key(self) -> str:
        data = [hash_of(p.images) for p in (self.inverted, self.tuning)]
        own = asdict(self.victim.source.attack)
        attacks = [own, self.rates, asdict(self.strong), self.zetas]
        maps = self.maps if isinstance(self.maps, str) else self.maps.key
        return key_of(["inverted", self.victim.key, data, attacks, maps])

    def make(self, progress: Progress) -> tuple[Arrays, dict[str, Any]]:
        """Arrays and seconds by attack, the rate and the zeta that were chosen."""
        device = torch.device(self.device)
        victim = Victim.of(self.root, self.victim, self.device)
        x = pictures(self.inverted, device)
        with float32_arithmetic("float32", device):
            z = victim.sent(x)
            if victim.diverged or not bool(z.isfinite().all()):
                return NOTHING, {"seconds": {}, "rate": None, "zeta": None}
            attacks: dict[str, Attack] = {"paper": (self.victim.source.attack, None)}
            started = time.perf_counter()
            descent = at_best_rate(self, victim)
            progress(0.3)
            strong, whitening = tuned(self, victim)
            attacks |= {"tuned": (descent, None), "strong": (strong, whitening)}
            tuning = time.perf_counter() - started
            progress(0.6)
            arrays: Arrays = {}
            seconds, maps = {"tuning": round(tuning, 3)}, maps_of(self)
            for name, attack in attacks.items():
                started = time.perf_counter()
                found = run_attack(attack, victim, z, x, self.victim.generators(len(x), name))
                seconds[name] = round(time.perf_counter() - started, 3)
                effort = {"objective": found.objective, "n_steps": found.n_steps}
                own = scored(found.x, x, maps) | {k: t.cpu().numpy() for k, t in effort.items()}
                arrays |= {f"{name}/{key}": value for key, value in own.items()}
        return arrays, {"seconds": seconds, "rate": descent.lr, "zeta": strong.zeta}


@dataclass(frozen=True)
class Victim:
    """A trained network as the server has it: h, and images in its range."""

    model: SplitModel
    weights: dict[str, Tensor]
    diverged: bool

    @classmethod
    def of(cls, root: str, victim: VictimId, device: str, cut: int | None = None) -> Victim:
        """The trained network, cut where it is or elsewhere. Raises ValueError if there is none."""
        found = Folder(Path(root)).product(victim.key)
        if found is None:
            raise ValueError(f"{victim.name} is not there; run the study again")
        arrays, model = found[0], victim.model(cut)
        weights = {
            name: torch.from_numpy(arrays[f"weights/{name}"][None].copy()).to(device)
            for name in model.tensor_shapes
        }
        return cls(model, weights, bool(arrays["diverged"]))

    def h(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n m"]:
        features: Tensor = self.model.features(self.weights, x.unsqueeze(0))[0]
        return features

    def sent(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n m"]:
        return features_of(self.model, self.weights, x)[0]


Attack = tuple[GradientInversion | StrongInversion, Whitening | None]


def run_attack(
    attack: Attack,
    victim: Victim,
    z: Float[Tensor, "n m"],
    x: Float[Tensor, "n c h w"],
    drawn: list[torch.Generator],
) -> Inverted:
    """Images of the shape of x whose features are z."""
    how, whitening = attack
    if isinstance(how, GradientInversion):
        return how.invert(victim.h, z, shape=_shape(x), generators=drawn)
    return how.invert(victim.h, z, shape=_shape(x), generators=drawn, whitening=whitening)


def at_best_rate(job: InvertJob, victim: Victim) -> GradientInversion:
    """The paper's attack at the rate of least error on public images."""
    public = pictures(job.tuning, torch.device(job.device))
    z, errors = victim.sent(public), []
    for rate in job.rates:
        attack = replace(job.victim.source.attack, lr=rate)
        drawn = job.victim.generators(len(public), "tuning rate")
        found = run_attack((attack, None), victim, z, public, drawn)
        errors.append(float((found.x.double() - public.double()).square().mean()))
    return replace(job.victim.source.attack, lr=job.rates[int(np.argmin(errors))])


def tuned(job: InvertJob, victim: Victim) -> tuple[StrongInversion, Whitening]:
    """Our attack with the zeta of least error on public images, and the spread of their features.

    Every zeta is tried with the attack's first start.
    """
    public = pictures(job.tuning, torch.device(job.device))
    whitening = whiten(victim.sent(public))
    zetas = sorted(job.zetas)
    errors = errors_by_zeta(
        replace(job.strong, starts=job.strong.starts[:1]),
        victim.h,
        public,
        zetas,
        generators=job.victim.generators(len(public), "tuning zeta"),
        whitening=whitening,
    )
    return replace(job.strong, zeta=zetas[int(errors.argmin())]), whitening


def scored(
    found: Float[Tensor, "n c h w"],
    x: Float[Tensor, "n c h w"],
    maps: Callable[[Tensor], list[Tensor]],
) -> Arrays:
    """Results of an attack: pictures (uint8), scores (n,), and `chance`, how alike unrelated images
    are: the mean SSIM of each picture to the next images instead of its own."""
    recovered = found.clamp(0, 1)
    alike = similarities(recovered, x, recovered_maps=maps(recovered), original_maps=maps(x))
    assert alike.psim is not None
    others = [unit_ssim(recovered, x.roll(k, 0)) for k in range(1, min(len(x), CHANCE + 1))]
    unrelated = torch.stack(others).mean(0) if others else torch.full((len(x),), torch.nan)
    arrays = {
        "picture": (recovered * 255).round().to(torch.uint8),
        "ssim": alike.ssim,
        "psnr": alike.psnr,
        "psim": alike.psim,
        "chance": unrelated,
    }
    return {name: values.cpu().numpy() for name, values in arrays.items()}


CHANCE = 9
"""Other images that each picture is compared with, for what unrelated ones score."""


def maps_of(job: InvertJob) -> Callable[[Tensor], list[Tensor]]:
    """The layers of PSIM."""
    if isinstance(job.maps, str):
        return feature_maps(job.maps, job.device)
    classifiers = [
        (Victim.of(job.root, job.maps, job.device, cut), channels)
        for cut, channels in zip(OWN_MAPS, OWN_CHANNELS, strict=True)
    ]

    @torch.no_grad()
    def maps(x: Tensor) -> list[Tensor]:
        return [victim.h(x).unflatten(1, (channels, -1)) for victim, channels in classifiers]

    return maps


def pictures(part: Part, device: torch.device) -> Float[Tensor, "n c h w"]:
    return torch.from_numpy(part.images).to(device).float() / 255


def _shape(x: Tensor) -> tuple[int, int, int]:
    c, h, w = x.shape[1:]
    return c, h, w
