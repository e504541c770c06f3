"""Units of an audit: train the victims of a cell at once, and attack one of them.

Of a cell's victims `weights/K` are tensors (victims, ...) as they are released, `start/K` those of
the first layer that training began with; `confidence` (victims, pool) is how sure the released
network is of each image's label, `correct` (victims, tests) whether it is right. Of an attack
`ssim` (pool,) is that of each image's best picture, and the pictures follow where they are kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.kkt.attacks import Victim, attack_stack
from recon_core.attacks.kkt.settings import Attack, span_of
from recon_core.matching import best_per_target, fit_to_range
from recon_core.membership import confidence
from recon_core.metrics import ssim_matrix
from recon_core.restore.precision import float32_arithmetic
from recon_core.threads import share_of
from recon_core.types import Progress, seeded_generator
from recon_core.victims.network import Architecture, Parameters
from recon_core.victims.noisy_training import train_with_noise
from recon_core.victims.training import Trained, train
from tasks.audit.images import Members, Pictures
from tasks.audit.settings import VictimRecipe
from tasks.study.products import Arrays, Job, hash_of, key_of

ROWS = 2000
"""Pictures that are scored at once."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """A network that is there already: its tensors (1, ...), those of the first layer that training
    began with, if known, what was subtracted from its images (1, c, h, w), and what they were then
    divided by (c, 1, 1). `gradient`: those of a batch in the first layer, which are what is given
    away; its start is then the layer itself."""

    weights: tuple[npt.NDArray[np.float32], ...]
    start: tuple[npt.NDArray[np.float32], ...]
    mean: npt.NDArray[np.float32]
    std: npt.NDArray[np.float32]
    gradient: tuple[npt.NDArray[np.float32], ...] = ()


@dataclass(frozen=True, kw_only=True)
class VictimsJob(Job):
    """The victims of a cell, centred by the mean of their images; private ones by the tests'.

    `members` (victims, pool): what each learns of the pool, of which victims 2k and 2k + 1 have
    half each; `public`: what students learn; `given`: the one victim, which is not trained.
    """

    recipe: VictimRecipe
    pool: Pictures
    members: Members
    tests: Pictures
    public: Pictures | None
    noise_multiplier: float
    seed: int
    given: Given | None = None

    @property
    def key(self) -> str:
        images = [hash_of(p.images, p.labels) for p in (self.pool, self.tests)]
        public = None if self.public is None else hash_of(self.public.images, self.public.labels)
        recipe, members = asdict(self.recipe), hash_of(self.members)
        body = ["audit victims", recipe, images, public, members, self.noise, self.seed]
        if self.recipe.private is not None:
            body.append("centred by the tests' mean")
        if (given := self.given) is not None:
            tensors = (*given.weights, *given.start, *given.gradient)
            body.append(hash_of(*tensors, given.mean, given.std))
        return key_of(body)

    @property
    def noise(self) -> float:
        return round(self.noise_multiplier, 9)

    @property
    def architecture(self) -> Architecture:
        return self.recipe.architecture(shape_of(self.pool))

    def make(self, progress: Progress) -> tuple[Arrays, dict[str, Any]]:
        started, device = time.perf_counter(), torch.device(self.device)
        with float32_arithmetic("float32", device):
            made = self._made(device, progress) if self.given is None else self._read(device)
            given = made.parameters
            if self.given is None or not self.given.gradient:
                given = self.recipe.released.of(given, self._drawn("released weights"))
            found = self._asked(given, made.mean)
        arrays = {f"weights/{k}": t for k, t in enumerate(given.tensors())}
        arrays |= {f"start/{k}": t for k, t in enumerate(made.start)}
        arrays |= {"mean": made.mean, "diverged": made.diverged}
        named = {name: np.asarray(t.cpu()) for name, t in (arrays | found).items()}
        seconds = (time.perf_counter() - started) / len(self.members)
        return named, {"seconds": round(seconds, 3)}

    def _made(self, device: torch.device, progress: Progress) -> Made:
        """Networks that are trained, and students of them where these are given away."""
        role, first = "", share_of(progress, 0.0, 0.5 if self.recipe.distilled else 1.0)
        images, labels = self._learned()
        trained, mean = self._trained(images, labels, role, device, first)
        if self.recipe.distilled:
            role = "student "
            trained, mean = self._students(trained, mean, share_of(progress, 0.5, 1.0))
        start = first_layer(self._start(role, device)).tensors()
        return Made(trained.parameters, start, mean, trained.diverged)

    def _read(self, device: torch.device) -> Made:
        assert self.given is not None
        weights = [torch.from_numpy(a.copy()).to(device) for a in self.given.weights]
        start = tuple(torch.from_numpy(a.copy()).to(device) for a in self.given.start)
        like = self.architecture.initial([torch.Generator()], dtype=torch.float32)
        mean, diverged = torch.from_numpy(self.given.mean.copy()), torch.tensor([False])
        if gradient := [torch.from_numpy(a.copy()).to(device) for a in self.given.gradient]:
            given = self.recipe.released.of(
                first_layer(like).like(gradient), self._drawn("released weights")
            )
            start = tuple(weights[: len(gradient)])
            weights[: len(gradient)] = _stepped(start, given.tensors())
        return Made(like.like(weights), start, mean, diverged)

    @property
    def std(self) -> Float[Tensor, "c 1 1"] | float:
        """The divisor of images less their mean."""
        return 1.0 if self.given is None else torch.from_numpy(self.given.std.copy())

    def _learned(self) -> tuple[Float[Tensor, "r n c h w"], Tensor]:
        """Images that the victims learn, in all their views, and labels."""
        rows = [torch.from_numpy(np.flatnonzero(own)) for own in self.members]
        every = unit_pictures(self.pool)
        images = torch.stack([every[own] for own in rows])
        labels = torch.from_numpy(self.pool.labels)
        own_labels = torch.stack([labels[own] for own in rows])
        views = [images]
        for view in range(1, self.recipe.views):
            drawn = self._drawn(f"view {view}")
            moved = [
                _moved(own, self.recipe.moved, g) for own, g in zip(images, drawn, strict=True)
            ]
            views.append(torch.stack(moved))
        return torch.cat(views, 1), own_labels.repeat(1, self.recipe.views)

    def _trained(
        self,
        images: Float[Tensor, "r n c h w"],
        labels: Tensor,
        role: str,
        device: torch.device,
        progress: Progress,
    ) -> tuple[Trained, Float[Tensor, "r c h w"]]:
        recipe, mean = self.recipe, images.mean(1)
        if recipe.private is not None:  # which no mean of private images may enter
            mean = unit_pictures(self.tests).mean(0).expand_as(mean)
        x = (images - mean[:, None]).flatten(2).to(device)
        y = labels.to(device)
        y = y if recipe.n_outputs > 1 else y.to(x) * 2 - 1
        start, drawn = self._start(role, device), self._drawn(f"{role}minibatches")
        if recipe.is_noisy:
            noise = recipe.noise(self.noise_multiplier)
            trained = train_with_noise(
                self.architecture, start, x, y, training=recipe.training, noise=noise,
                generators=drawn, progress=progress,
            )  # fmt: skip
        else:
            trained = train(
                self.architecture, start, x, y, training=recipe.training, generators=drawn,
                progress=progress,
            )  # fmt: skip
        return trained, mean

    def _students(
        self, teachers: Trained, mean: Float[Tensor, "r c h w"], progress: Progress
    ) -> tuple[Trained, Float[Tensor, "r c h w"]]:
        """Networks that learn the teachers' answers on public images."""
        if self.public is None:
            raise ValueError("a student needs public images, and there are none")
        images = unit_pictures(self.public).expand(len(self.members), -1, -1, -1, -1)
        device = teachers.margins.device
        phi = self._outputs(teachers.parameters, images, mean)
        answers = (phi[..., 0] > 0).long() if phi.shape[2] == 1 else phi.argmax(2)
        return self._trained(images, answers.cpu(), "student ", device, progress)

    def _asked(self, given: Parameters, mean: Float[Tensor, "r c h w"]) -> dict[str, Tensor]:
        """Answers of the released networks about the pool and the tests."""
        recipe, n = self.recipe, len(self.members)
        found = {}
        for name, some in (("pool", self.pool), ("tests", self.tests)):
            phi = self._outputs(given, unit_pictures(some).expand(n, -1, -1, -1, -1), mean)
            labels = torch.from_numpy(some.labels).to(phi.device).expand(n, -1)
            y = labels if recipe.n_outputs > 1 else labels.to(phi) * 2 - 1
            if name == "pool":
                found["confidence"] = confidence(phi, y, recipe.training.loss.kind)
                found["margin"] = recipe.training.loss.margins(phi, y)
                learned = torch.from_numpy(self.members)
                right = (found["margin"].cpu() > 0) & learned
                found["train_accuracy"] = right.sum(1) / learned.sum(1)
            else:
                found["correct"] = recipe.training.loss.margins(phi, y) > 0
        return found

    def _outputs(
        self,
        parameters: Parameters,
        images: Float[Tensor, "r n c h w"],
        mean: Float[Tensor, "r c h w"],
    ) -> Float[Tensor, "r n o"]:
        like = parameters.weights[0]
        x = ((images - mean[:, None]) / self.std).flatten(2).to(like)
        return torch.cat(
            [self.architecture.forward(parameters, some).output for some in x.split(ROWS, 1)], 1
        )

    def _start(self, role: str, device: torch.device) -> Parameters:
        drawn = self._drawn(f"{role}victim")
        start = self.architecture.initial(drawn, dtype=torch.float32)
        return start.map(lambda t: t.to(device))

    def _drawn(self, purpose: str) -> list[torch.Generator]:
        """A generator of each victim, the same for all cells."""
        return [
            seeded_generator(self.seed, v, f"audit {purpose}") for v in range(len(self.members))
        ]


@dataclass(frozen=True)
class Made:
    """Victims before they are given away: the first layer's `start`, none where it is not known."""

    parameters: Parameters
    start: tuple[Tensor, ...]
    mean: Float[Tensor, "r c h w"]
    diverged: Tensor


@dataclass(frozen=True, kw_only=True)
class AttackJob(Job):
    """An attack on one of the victims whose product has `victims_key`; `keeps_pictures` of all
    images. It carries the pool alone: hundreds of them wait at once."""

    victims_key: str
    recipe: VictimRecipe
    pool: Pictures
    std: Float[Tensor, "c 1 1"] | float
    seed: int
    victim: int
    attack: Attack
    keeps_pictures: bool

    @property
    def key(self) -> str:
        attack = asdict(self.attack)
        return key_of(["audit attack", self.victims_key, self.victim, attack, self.keeps_pictures])

    @classmethod
    def on(cls, job: VictimsJob, attack: Attack, *, keeps_pictures: bool) -> list[AttackJob]:
        """The attack on each of a cell's victims."""
        key, made = job.key, partial(cls, root=job.root, device=job.device, recipe=job.recipe)
        made = partial(made, pool=job.pool, std=job.std, seed=job.seed, victims_key=key)
        made = partial(made, attack=attack, keeps_pictures=keeps_pictures)
        return [made(victim=victim) for victim in range(len(job.members))]

    def make(self, progress: Progress) -> tuple[Arrays, dict[str, Any]]:
        """Scores against the whole pool: members and decoys. Raises ValueError if the victim is not
        there."""
        started, device = time.perf_counter(), torch.device(self.device)
        made = self.folder.product(self.victims_key)
        if made is None:
            raise ValueError("the victims are not there; run the audit again")
        arrays, _about = made
        mean = torch.from_numpy(arrays["mean"][self.victim].copy())
        pool = unit_pictures(self.pool)
        with float32_arithmetic("float32", device):
            x = self._candidates(arrays, device, share_of(progress, 0.0, 0.9))
            x = x.cpu().float().unflatten(1, shape_of(self.pool))
            pictures = fit_to_range(x * self.std, mean)
            pictures = pictures[pictures.isfinite().flatten(1).all(1)]
            row, ssim = best_matches(pictures, pool, mirrored=self.recipe.views > 1)
        found: Arrays = {"ssim": ssim.numpy().astype(np.float32)}
        if self.keeps_pictures:
            found["pictures"] = _kept(pictures, row)
        seconds = round(time.perf_counter() - started, 3)
        return found, {"seconds": seconds, "n_pictures": len(pictures)}

    def _candidates(
        self, arrays: Arrays, device: torch.device, progress: Progress
    ) -> Float[Tensor, "m d"]:
        span, architecture = span_of(self.attack), self.recipe.architecture(shape_of(self.pool))
        like = architecture.initial([torch.Generator()], dtype=torch.float32)
        parameters = like.like(_tensors(arrays, "weights", self.victim, device))
        start = None
        if span is not None and span.start == "known":
            start = first_layer(like).like(_tensors(arrays, "start", self.victim, device))
        if not bool(parameters.isfinite()):
            return torch.empty(0, architecture.d)
        inputs = torch.empty(1, 0, architecture.d, device=device)
        victim = Victim(architecture, parameters, start, inputs)
        drawn = seeded_generator(self.seed, self.victim, "audit attack")
        (left,) = attack_stack(self.attack, victim, [drawn], progress)
        return left.x[-1]


def best_matches(
    pictures: Float[Tensor, "p c h w"], pool: Float[Tensor, "n c h w"], *, mirrored: bool
) -> tuple[Tensor, Tensor]:
    """(row, SSIM) of each image's best picture, -1 and 0 where there is none; mirrored pictures
    follow the others where a victim has learned such."""
    if mirrored:
        pictures = torch.cat([pictures, pictures.flip(3)])
    if not len(pictures):
        return torch.full((len(pool),), -1), torch.zeros(len(pool))
    row, ssim = best_per_target(ssim_matrix(pictures, pool))
    return row, ssim.clamp_min(0.0)


def first_layer(parameters: Parameters) -> Parameters:
    """The first layer alone."""
    return Parameters(parameters.weights[:1], parameters.biases[:1])


def _stepped(weights: Sequence[Tensor], gradient: Sequence[Tensor]) -> list[Tensor]:
    """Weights after a step along a gradient that is as large as they are: a start and an end whose
    difference is the gradient to float32, however small it was."""
    sizes = [torch.cat([t.flatten() for t in some]).norm() for some in (weights, gradient)]
    scale = sizes[0] / sizes[1].clamp_min(torch.finfo(torch.float32).tiny)
    return [w + scale * g for w, g in zip(weights, gradient, strict=True)]


def unit_pictures(some: Pictures) -> Float[Tensor, "n c h w"]:
    return torch.from_numpy(some.images).float() / 255


def shape_of(some: Pictures) -> tuple[int, int, int]:
    c, h, w = some.images.shape[1:]
    return c, h, w


def _moved(
    images: Float[Tensor, "n c h w"], most: int, generator: torch.Generator
) -> Float[Tensor, "n c h w"]:
    """Every image mirrored or not, and moved by up to `most` pixels each way, borders repeated."""
    flipped = torch.rand(len(images), generator=generator) < 0.5
    moves = torch.randint(-most, most + 1, (len(images), 2), generator=generator)
    h, w = images.shape[2:]
    rows = (torch.arange(h)[None] + moves[:, :1]).clamp(0, h - 1)
    columns = (torch.arange(w)[None] + moves[:, 1:]).clamp(0, w - 1)
    seen = torch.where(flipped[:, None, None, None], images.flip(3), images)
    at = torch.arange(len(images))[:, None, None]
    return seen.permute(0, 2, 3, 1)[at, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _tensors(arrays: Arrays, name: str, victim: int, device: torch.device) -> Sequence[Tensor]:
    n = sum(key.startswith(f"{name}/") for key in arrays)
    return [
        torch.from_numpy(arrays[f"{name}/{k}"][victim : victim + 1].copy()).to(device)
        for k in range(n)
    ]


def _kept(pictures: Float[Tensor, "p c h w"], row: Tensor) -> npt.NDArray[np.uint8]:
    """The best picture of each image, uint8; black where there is none."""
    if not len(pictures):
        return np.zeros((len(row), 0), np.uint8)
    every = torch.cat([pictures, pictures.flip(3)])
    kept = every[row.clamp_min(0)] * (row >= 0)[:, None, None, None]
    return np.asarray((kept * 255).round().to(torch.uint8))
