"""Attacks of an audit, on one victim each.

`ssim` (pool,) is that of each image's best picture, and the pictures follow where they are kept.
`identified` (pool,) is true where that picture is nearer to its image than to any other of the pool
(`matching.identified`), `control` (pool,) the SSIM of the pool's mean image.

Members and decoys are treated alike: nothing that is scored is computed of members alone. So
pictures stand on the mean of the pool, and not on the mean of the members, which is nearer to them
than to decoys whatever the network gives away.
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

from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.inversion.strong_inversion import StrongInversion, whiten
from recon_core.attacks.kkt.attacks import Victim, attack_stack
from recon_core.attacks.kkt.settings import Attack
from recon_core.attacks.span.attack import SpanAttack
from recon_core.attacks.span.rows import SpanRows, weight_rows
from recon_core.matching import best_per_target, fit_to_range, identified, scaled_to_range
from recon_core.metrics import ssim_matrix, ssim_pairs
from recon_core.restore.precision import float32_arithmetic
from recon_core.threads import share_of
from recon_core.types import Progress, seeded_generator
from tasks.audit.autoencoders import recovered
from tasks.audit.images import Pictures
from tasks.audit.recipe import VictimRecipe
from tasks.audit.victims import (
    VictimsJob,
    first_layer,
    numbered,
    sent_features,
    shape_of,
    under,
    unit_pictures,
)
from tasks.families.weights.separators import given_separator
from tasks.study.products import Arrays, Job, key_of

AnyAttack = Attack | StrongInversion | NoiseAware
"""On a network's weights, on the features that it sends, or on an autoencoder."""


@dataclass(frozen=True, kw_only=True)
class AttackJob(Job):
    """An attack on one of the victims whose product has `victims_key`, which learned what `learned`
    says of the pool; `keeps_pictures` of all images. `mask`: of what is left for an autoencoder.
    `mean_unknown`: nobody said what the network subtracts. It carries the pool alone: hundreds of
    them wait at once."""

    victims_key: str
    recipe: VictimRecipe
    pool: Pictures
    std: Float[Tensor, "c 1 1"] | float
    seed: int
    victim: int
    learned: npt.NDArray[np.bool_]
    attack: AnyAttack
    mask: str
    keeps_pictures: bool
    mean_unknown: bool = False

    @property
    def key(self) -> str:
        attack = asdict(self.attack) | (
            {"mask": self.mask} if isinstance(self.attack, NoiseAware) else {}
        )
        body = [self.victims_key, self.victim, attack, self.keeps_pictures, self.mean_unknown]
        return key_of(["audit attack on the pool's mean", *body])

    @classmethod
    def on(
        cls, job: VictimsJob, attack: AnyAttack, *, mask: str = "random", keeps_pictures: bool
    ) -> list[AttackJob]:
        """The attack on each of a cell's victims."""
        key, made = job.key, partial(cls, root=job.root, device=job.device, recipe=job.recipe)
        made = partial(made, pool=job.pool, std=job.std, seed=job.seed, victims_key=key)
        made = partial(made, attack=attack, mask=mask, keeps_pictures=keeps_pictures)
        made = partial(made, mean_unknown=job.given is not None and not job.given.mean_known)
        return [made(victim=victim, learned=own) for victim, own in enumerate(job.members)]

    def make(self, progress: Progress) -> tuple[Arrays, dict[str, Any]]:
        """Scores against the whole pool: members and decoys. Raises ValueError if the victim is not
        there."""
        started, device = time.perf_counter(), torch.device(self.device)
        made = self.folder.product(self.victims_key)
        if made is None:
            raise ValueError("the victims are not there; run the audit again")
        pool = unit_pictures(self.pool)
        with float32_arithmetic("float32", device):
            pictures, row, scores = self._pictures(made[0], pool, device, progress)
        member = torch.from_numpy(self.learned)
        mean = pool.mean(0).expand_as(pool)
        found: Arrays = {
            "ssim": _own(scores, row).numpy().astype(np.float32),
            "identified": identified(scores, row, member).numpy(),
            "control": ssim_pairs(mean, pool).clamp_min(0.0).numpy().astype(np.float32),
        }
        if self.keeps_pictures:
            found["pictures"] = _kept(pictures, row)
        seconds = round(time.perf_counter() - started, 3)
        return found, {"seconds": seconds, "n_pictures": len(pictures)}

    def _pictures(
        self,
        arrays: Arrays,
        pool: Float[Tensor, "n c h w"],
        device: torch.device,
        progress: Progress,
    ) -> tuple[Float[Tensor, "p c h w"], Tensor, Tensor]:
        """(pictures, each image's row in them or -1, SSIM of pictures with images)."""
        if isinstance(self.attack, NoiseAware):  # whose pictures are each of an image
            pictures = self._recovered(arrays, pool.to(device)).cpu()
            return pictures, torch.arange(len(pool)), ssim_matrix(pictures, pool)
        if isinstance(self.attack, StrongInversion):
            pictures = self._inverted(arrays, pool, device).cpu()
        else:
            x = self._candidates(arrays, device, share_of(progress, 0.0, 0.9))
            x = x.cpu().float().unflatten(1, shape_of(self.pool)) * self.std
            mean = torch.from_numpy(arrays["mean"][self.victim].copy())
            pictures = pictures_on(pool, x, mean, as_they_are=self.mean_unknown)
        pictures = pictures[pictures.isfinite().flatten(1).all(1)]
        return pictures, *best_matches(pictures, pool, mirrored=self.recipe.views > 1)

    def _recovered(
        self, arrays: Arrays, pool: Float[Tensor, "n c h w"]
    ) -> Float[Tensor, "n c h w"]:
        recipe = self.recipe.autoencoder
        assert recipe is not None
        assert isinstance(self.attack, NoiseAware)
        own = {n: torch.from_numpy(a[self.victim : self.victim + 1].copy()).to(pool.device)
               for n, a in arrays.items() if n.startswith("weights/")}  # fmt: skip
        generator = seeded_generator(self.seed, self.victim, "audit mask")
        return recovered(
            recipe, under(own, "weights/"), pool, mask=self.mask, method=self.attack,
            generator=generator,
        )  # fmt: skip

    def _inverted(
        self, arrays: Arrays, pool: Float[Tensor, "n c h w"], device: torch.device
    ) -> Float[Tensor, "m c h w"]:
        """Images with the features that clients send of what the victim learned. They are measured
        by their spread over all that are sent, which the server sees."""
        cut, architecture = self.recipe.cut, self.recipe.architecture(shape_of(self.pool))
        assert cut is not None
        assert isinstance(self.attack, StrongInversion)
        like = architecture.initial([torch.Generator()], dtype=torch.float32)
        parameters = like.like(_tensors(arrays, "weights", self.victim, device))
        own = pool[torch.from_numpy(self.learned)].to(device)
        if not bool(parameters.isfinite()):
            return own[:0]
        mean = torch.from_numpy(arrays["mean"][self.victim].copy()).to(device)
        std = self.std.to(device) if isinstance(self.std, Tensor) else self.std

        def h(x: Tensor) -> Tensor:
            return architecture.features(parameters, ((x - mean) / std).flatten(1)[None], cut)[0]

        drawn = seeded_generator(self.seed, self.victim, "audit sent members")
        with torch.no_grad():
            z = sent_features(h(own)[None], self.recipe, [drawn])[0]
        starts = [
            seeded_generator(self.seed, k, f"audit start {self.victim}") for k in range(len(z))
        ]
        return self.attack.invert(
            h, z, shape=shape_of(self.pool), generators=starts, whitening=whiten(z)
        ).x

    def _candidates(
        self, arrays: Arrays, device: torch.device, progress: Progress
    ) -> Float[Tensor, "m d"]:
        assert not isinstance(self.attack, StrongInversion | NoiseAware)
        span = self.attack if isinstance(self.attack, SpanAttack) else None
        architecture = self.recipe.architecture(shape_of(self.pool))
        like = architecture.initial([torch.Generator()], dtype=torch.float32)
        parameters = like.like(_tensors(arrays, "weights", self.victim, device))
        if not bool(parameters.isfinite()):
            return torch.empty(0, architecture.d)
        inputs = torch.empty(1, 0, architecture.d, device=device)
        taken: tuple[SpanRows, ...] = ()
        if span is not None and span.start == "known":
            start = first_layer(like).like(_tensors(arrays, "start", self.victim, device))
            taken = (weight_rows(parameters, start),)
        elif span is not None and span.source != "weights":
            rows, *begun = (t[0] for t in _tensors(arrays, "rows", self.victim, device))
            n_joined = len(rows) // self.recipe.victim.widths[0]
            taken = (SpanRows(rows, begun[0] if begun else None, span.source, n_joined),)
        victim = Victim(architecture, parameters, inputs, taken)
        drawn = seeded_generator(self.seed, self.victim, "audit attack")
        given = given_separator(span)
        separator = None if given is None else given[0].to(device)
        (left,) = attack_stack(self.attack, victim, [drawn], progress, separator=separator)
        return left.x[-1]


def pictures_on(
    pool: Float[Tensor, "n c h w"],
    x: Float[Tensor, "p c h w"],
    mean: Float[Tensor, "c h w"],
    *,
    as_they_are: bool = False,
) -> Float[Tensor, "q c h w"]:
    """Pictures of candidates x for scores against a pool.

    Args:
        pool: Members and decoys.
        x: Candidates in the victim's input space, at an arbitrary scale.
        mean: The image that the victim subtracts. One value per channel is taken as it is, and 0
            means that nothing was subtracted; any other image may hold what members look like, so
            that pictures stand on the mean of the pool instead.
        as_they_are: Add the candidates as if nothing had been subtracted.
    """
    flat = bool((mean == mean[:, :1, :1]).all())
    if flat and not bool(mean.any()):
        return scaled_to_range(x)
    pictures = fit_to_range(x, mean if flat else pool.mean(0))
    return torch.cat([pictures, scaled_to_range(x)]) if as_they_are else pictures


def best_matches(
    pictures: Float[Tensor, "p c h w"], pool: Float[Tensor, "n c h w"], *, mirrored: bool
) -> tuple[Tensor, Float[Tensor, "q n"]]:
    """(row of each image's best picture, -1 where there is none; SSIM of every picture with every
    image); mirrored pictures follow the others where a victim has learned such."""
    if mirrored:
        pictures = torch.cat([pictures, pictures.flip(3)])
    if not len(pictures):
        return torch.full((len(pool),), -1), torch.zeros(0, len(pool))
    scores = ssim_matrix(pictures, pool)
    return best_per_target(scores)[0], scores


def _own(scores: Float[Tensor, "q n"], row: Tensor) -> Float[Tensor, " n"]:
    """The SSIM of each image with its own picture, at least 0; 0 without one."""
    if not len(scores):
        return torch.zeros(len(row))
    own = scores[row.clamp_min(0), torch.arange(len(row))]
    return own.where(row >= 0, 0.0).clamp_min(0.0)


def _tensors(arrays: Arrays, name: str, victim: int, device: torch.device) -> Sequence[Tensor]:
    found = numbered(arrays, name)
    return [torch.from_numpy(a[victim : victim + 1].copy()).to(device) for a in found]


def _kept(pictures: Float[Tensor, "p c h w"], row: Tensor) -> npt.NDArray[np.uint8]:
    """The best picture of each image, uint8; black where there is none."""
    if not len(pictures):
        return np.zeros((len(row), 0), np.uint8)
    every = torch.cat([pictures, pictures.flip(3)])
    kept = every[row.clamp_min(0)] * (row >= 0)[:, None, None, None]
    return np.asarray((kept * 255).round().to(torch.uint8))
