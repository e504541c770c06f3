"""Units of a study of split classifiers: train victims that share images, invert one, restore.

All defences of a source, cut and seed are trained as stacks of a few networks (`train_split`); the
images of a victim are inverted as one batch, by the paper's attack and by ours. Who has h can send
any images through it and invert them, for as many pairs as they like: a restorer trained on these
is given what the attack made of the images that are not known. What units give are arrays, of a
victim `weights/NAME` and numbers, of an inversion `ATTACK/NAME`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.inversion.feature_matching import GradientInversion, Inverted
from recon_core.attacks.inversion.run import KnownClassifier
from recon_core.attacks.inversion.strong_inversion import (
    StrongInversion,
    Whitening,
    errors_by_zeta,
    whiten,
)
from recon_core.precision import float32_arithmetic
from recon_core.restore import Examples, Fit
from recon_core.restore.examples import to_network
from recon_core.similarity import similarities, unit_ssim
from recon_core.threads import share_of
from recon_core.types import N_AUGMENT, Progress, no_progress, seeded_generator
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
from tasks.families.inversion.study.settings import Cell, Chain, InversionSource, Part
from tasks.study.products import NOTHING, Arrays, Folder, Job, hash_of, key_of

OWN_MAPS = {1: 6, 2: 16}
"""Cuts of LeNet5 whose outputs are PSIM's feature maps, and the number of maps."""
CHANCE = 9
"""Other images that each picture is compared with, for the score of unrelated ones."""
PAIRS_AT_ONCE = 64


@dataclass(frozen=True)
class VictimId:
    """A network by all that it depends on. `data`: the hash of its training and test images;
    `shape`: theirs."""

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
        """The network, cut at its own layer or at another."""
        return LeNet5(cut=cut or self.cut).on(self.shape, self.source.n_classes)

    def generators(self, n: int, purpose: str) -> list[torch.Generator]:
        """One generator per image, the same for every defence."""
        purpose = f"{purpose} {self.seed}"
        return [seeded_generator(self.root_seed, k, purpose) for k in range(n)]


def pictures(part: Part, device: torch.device | str) -> Float[Tensor, "n c h w"]:
    return torch.from_numpy(part.images).to(device).float() / 255


def stacked(weights: dict[str, Tensor], n: int, device: torch.device) -> dict[str, Tensor]:
    """The weights of one network, `n` times."""
    return {k: t.repeat(n, *[1] * (t.dim() - 1)).to(device) for k, t in weights.items()}


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """Victims of one source, cut and seed, trained as stacks."""

    root: str
    device: str
    victims: tuple[VictimId, ...]
    train: Part
    tests: Part

    def run(self, progress: Progress = no_progress) -> dict[str, Any]:
        """Train the victims that are not stored yet, and test them. Raises StoreFullError."""
        folder, started = Folder(Path(self.root)), time.perf_counter()
        missing = [victim for victim in self.victims if folder.product(victim.key) is None]
        if missing:
            first, n, device = missing[0], len(missing), torch.device(self.device)
            model = first.model()
            drawn = seeded_generator(first.root_seed, first.seed, "split start")
            start = initial_weights(model, [drawn], dtype=torch.float32)
            with float32_arithmetic("float32", device):
                found = train_split(
                    model,
                    stacked(start, n, device),
                    pictures(self.train, device),
                    torch.from_numpy(self.train.labels).to(device),
                    defences=[victim.defence for victim in missing],
                    training=first.source.training,
                    shuffle=lambda _stream, epoch: seeded_generator(
                        first.root_seed, first.seed, f"split minibatches {epoch}"
                    ),
                    progress=share_of(progress, 0.0, 0.95),
                )
                trained = {name: tensor.to(device) for name, tensor in found.weights.items()}
                tests = pictures(self.tests, device)
                tested = evaluate_split(model, trained, tests, torch.from_numpy(self.tests.labels))
                distances = separability(features_of(model, trained, tests))
            arrays = {f"weights/{name}": tensor for name, tensor in found.weights.items()} | {
                "train_accuracy": found.accuracy,
                "train_loss": found.loss,
                "diverged": found.diverged,
                "accuracy": tested.accuracy,
                "distance": distances.mean,
                "min_distance": distances.minimum,
            }
            seconds = round((time.perf_counter() - started) / n, 3)
            for k, victim in enumerate(missing):
                own = {name: t[k].cpu().numpy() for name, t in arrays.items()}
                folder.put(victim.key, own, {"seconds": seconds})
        return {"keys": [victim.key for victim in self.victims]}


def victim_of(root: str, victim: VictimId, device: str, cut: int | None = None) -> KnownClassifier:
    """The trained network, cut at its own layer or at another. Raises ValueError if not stored."""
    found = Folder(Path(root)).product(victim.key)
    if found is None:
        raise ValueError(f"{victim.name} is not there; run the study again")
    arrays, model = found[0], victim.model(cut)
    weights = {
        name: torch.from_numpy(arrays[f"weights/{name}"][None].copy()).to(device)
        for name in model.tensor_shapes
    }
    loss, accuracy = (float(arrays[name]) for name in ("train_loss", "train_accuracy"))
    return KnownClassifier(model, weights, loss, accuracy, bool(arrays["diverged"]))


Attack = tuple[GradientInversion | StrongInversion, Whitening | None]


def run_attack(
    attack: Attack,
    victim: KnownClassifier,
    z: Float[Tensor, "n m"],
    x: Float[Tensor, "n c h w"],
    drawn: list[torch.Generator],
) -> Inverted:
    """Recover images of the shape of x from their features z."""
    (method, whitening), (c, h, w) = attack, x.shape[1:]
    more: Any = {"whitening": whitening} if isinstance(method, StrongInversion) else {}
    return method.invert(victim.h, z, shape=(c, h, w), generators=drawn, **more)


@dataclass(frozen=True, kw_only=True)
class InvertJob(Job):
    """Inversions of one victim by every attack; without arrays if the victim diverged.

    `inverted`: unseen images whose features the attacker has. `tuning`: public images with which it
    tunes. `maps`: the classifier whose features PSIM uses, or another source of feature maps as in
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
        """Arrays and seconds by attack, at the rate and zeta of least error on public images."""
        device = torch.device(self.device)
        victim = victim_of(self.root, self.victim, self.device)
        x = pictures(self.inverted, device)
        with float32_arithmetic("float32", device):
            z = victim.sent(x)
            if victim.diverged or not bool(z.isfinite().all()):
                return NOTHING, {"seconds": {}, "rate": None, "zeta": None}
            started = time.perf_counter()
            public, own = pictures(self.tuning, device), self.victim.source.attack
            sent, errors = victim.sent(public), []
            for rate in self.rates:
                drawn = self.victim.generators(len(public), "tuning rate")
                tried = (replace(own, lr=rate), None)
                found = run_attack(tried, victim, sent, public, drawn)
                errors.append(float((found.x.double() - public.double()).square().mean()))
            descent = replace(own, lr=self.rates[int(np.argmin(errors))])
            progress(0.3)
            strong, whitening = self.tuned(victim)
            seconds, maps = {"tuning": round(time.perf_counter() - started, 3)}, maps_of(self)
            progress(0.6)
            attacks: dict[str, Attack] = {
                "paper": (own, None),
                "tuned": (descent, None),
                "strong": (strong, whitening),
            }
            arrays: Arrays = {}
            for name, attack in attacks.items():
                started = time.perf_counter()
                found = run_attack(attack, victim, z, x, self.victim.generators(len(x), name))
                seconds[name] = round(time.perf_counter() - started, 3)
                effort = {"objective": found.objective, "n_steps": found.n_steps}
                scores = scored(found.x, x, maps) | {k: t.cpu().numpy() for k, t in effort.items()}
                arrays |= {f"{name}/{key}": value for key, value in scores.items()}
        return arrays, {"seconds": seconds, "rate": descent.lr, "zeta": strong.zeta}

    def tuned(self, victim: KnownClassifier) -> tuple[StrongInversion, Whitening]:
        """Our attack with the zeta of least error on public images, and the whitening of their
        features. Every zeta is tried with the attack's first start."""
        public = pictures(self.tuning, self.device)
        whitening, zetas = whiten(victim.sent(public)), sorted(self.zetas)
        errors = errors_by_zeta(
            replace(self.strong, starts=self.strong.starts[:1]),
            victim.h,
            public,
            zetas,
            generators=self.victim.generators(len(public), "tuning zeta"),
            whitening=whitening,
        )
        return replace(self.strong, zeta=zetas[int(errors.argmin())]), whitening


def scored(
    found: Float[Tensor, "n c h w"],
    x: Float[Tensor, "n c h w"],
    maps: Callable[[Tensor], list[Tensor]],
) -> Arrays:
    """Results of an attack: pictures (uint8), scores (n,), and `chance`, the mean SSIM of each
    picture to the images after its own."""
    recovered = found.clamp(0, 1)
    alike = similarities(recovered, x, recovered_maps=maps(recovered), original_maps=maps(x))
    assert alike.psim is not None
    others = [unit_ssim(recovered, x.roll(k, 0)) for k in range(1, min(len(x), CHANCE + 1))]
    arrays = {
        "picture": (recovered * 255).round().to(torch.uint8),
        "ssim": alike.ssim,
        "psnr": alike.psnr,
        "psim": alike.psim,
        "chance": torch.stack(others).mean(0),
    }
    return {name: values.cpu().numpy() for name, values in arrays.items()}


def maps_of(job: InvertJob) -> Callable[[Tensor], list[Tensor]]:
    """The layers of PSIM."""
    if isinstance(job.maps, str):
        return feature_maps(job.maps, job.device)
    victims = {cut: victim_of(job.root, job.maps, job.device, cut) for cut in OWN_MAPS}

    @torch.no_grad()
    def maps(x: Tensor) -> list[Tensor]:
        return [victims[cut].h(x).unflatten(1, (n, -1)) for cut, n in OWN_MAPS.items()]

    return maps


@dataclass(frozen=True, kw_only=True)
class RestoreJob(Job):
    """Invert public images, train a restorer on the pairs, and restore the strong attack's results.

    `inverting`: the attacks on the victim. `public`: the images of the pairs.
    """

    inverting: InvertJob
    chain: Chain
    public: Part

    @property
    def key(self) -> str:
        chain = asdict(self.chain)
        return key_of(["restored", self.inverting.key, chain, hash_of(self.public.images)])

    def make(self, progress: Progress) -> tuple[Arrays, dict[str, Any]]:
        """Arrays of the restored pictures. Raises NonfiniteLossError if the training diverges."""
        started, inverting, device = time.perf_counter(), self.inverting, torch.device(self.device)
        given = self.folder.product(inverting.key)
        if given is None:
            raise ValueError(f"nothing is kept under {inverting.key[:32]}; run the study again")
        if "strong/picture" not in given[0]:
            return NOTHING, {"seconds": 0.0, "loss": None}
        with float32_arithmetic("float32", device):
            pairs, training = self._pairs(share_of(progress, 0.0, 0.4)), self.chain.training
            fit, loss = Fit(self.chain.restorer, training, device=self.device), float("nan")
            while not fit.done:
                drawn = seeded_generator(training.seed, fit.step, "chain batch")
                rows = torch.randint(len(pairs), (training.batch_size,), generator=drawn)
                batch = {name: t[rows].to(self.device) for name, t in vars(pairs).items()}
                loss = fit.update(Examples(**batch))
                progress(0.4 + 0.55 * fit.step / training.n_steps)
            found = torch.from_numpy(given[0]["strong/picture"]).to(device).float() / 255
            rgb = found.expand(-1, 3, -1, -1).contiguous()
            restored = self.chain.restorer.restore(
                fit.ema.eval(), rgb, n_samples=1, seeds=torch.arange(len(found))
            )[0].clamp(0, 1)
            if found.shape[1] == 1:
                restored = restored.mean(1, keepdim=True)
            arrays = scored(restored, pictures(inverting.inverted, device), maps_of(inverting))
        seconds = round(time.perf_counter() - started, 3)
        named = {f"restored/{name}": values for name, values in arrays.items()}
        return named, {"seconds": seconds, "loss": loss}

    def _pairs(self, progress: Progress) -> Examples:
        """Public images and the strong attack's reconstructions, in the three channels of
        restorers."""
        inverting, x = self.inverting, pictures(self.public, self.device)
        victim = victim_of(self.root, inverting.victim, self.device)
        attack, drawn = inverting.tuned(victim), inverting.victim.generators(len(x), "pairs")
        made = []
        for first in range(0, len(x), PAIRS_AT_ONCE):
            some = slice(first, first + PAIRS_AT_ONCE)
            z = victim.sent(x[some])
            made.append(run_attack(attack, victim, z, x[some], drawn[some]).x)
            progress(min(1.0, some.stop / len(x)))
        condition, target = (
            to_network(images.detach().cpu().expand(-1, 3, -1, -1)).contiguous()
            for images in (torch.cat(made), x)
        )
        augment = torch.zeros(len(x), N_AUGMENT)
        return Examples(condition=condition, target=target, augment=augment)
