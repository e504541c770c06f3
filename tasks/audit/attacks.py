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
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.inversion.strong_inversion import StrongInversion, whiten
from recon_core.attacks.kkt.attacks import Attack, Victim, attack_stack
from recon_core.attacks.plug_and_play import Degraded
from recon_core.attacks.span.attack import SpanAttack
from recon_core.attacks.span.rows import SpanRows, weight_rows
from recon_core.degradation import degrade, mask_pattern
from recon_core.matching import best_per_target, fit_to_range, identified, scaled_to_range
from recon_core.metrics import ssim_matrix, ssim_pairs
from recon_core.precision import float32_arithmetic
from recon_core.threads import share_of
from recon_core.types import Progress, seeded_generator
from recon_core.victims.network import Architecture, Parameters
from tasks.audit.victims import (
    ROWS,
    VictimsJob,
    first_layer,
    numbered,
    on,
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
    """An attack on one of the victims `of` a job, whose product has `victims_key`; it
    `keeps_pictures` of all images. `mask`: of what is left for an autoencoder."""

    victims_key: str
    of: VictimsJob
    victim: int
    attack: AnyAttack
    mask: str
    keeps_pictures: bool

    @property
    def key(self) -> str:
        attack = asdict(self.attack) | (
            {"mask": self.mask} if isinstance(self.attack, NoiseAware) else {}
        )
        body = [self.victims_key, self.victim, attack, self.keeps_pictures]
        return key_of(["audit attack", *body])

    @classmethod
    def on(
        cls, job: VictimsJob, attack: AnyAttack, *, mask: str = "random", keeps_pictures: bool
    ) -> list[AttackJob]:
        """The attack on each of a cell's victims. Of their job it carries the pool alone: hundreds
        of attacks wait at once."""
        tests = job.tests.some(np.zeros(0, np.int64))
        given = None if job.given is None else replace(job.given, arrays={})
        light, key = replace(job, tests=tests, public=None, given=given), job.key
        return [
            cls(
                root=job.root, device=job.device, victims_key=key, of=light, victim=victim,
                attack=attack, mask=mask, keeps_pictures=keeps_pictures,
            )
            for victim in range(len(job.members))
        ]  # fmt: skip

    @property
    def learned(self) -> Tensor:
        """The images of the pool that the victim learned."""
        return torch.from_numpy(self.of.members[self.victim])

    def drawn(self, purpose: str) -> torch.Generator:
        return seeded_generator(self.of.seed, self.victim, f"audit {purpose}")

    def make(self, progress: Progress) -> tuple[Arrays, dict[str, Any]]:
        """Scores against the whole pool. Raises ValueError if the victims are missing."""
        made = self.folder.product(self.victims_key)
        if made is None:
            raise ValueError("the victims are not there; run the audit again")
        return self.scored(made[0], progress)

    def scored(self, victims: Arrays, progress: Progress) -> tuple[Arrays, dict[str, Any]]:
        """Scores of members and decoys, of victims with these arrays, and the seconds it took."""
        started, device = time.perf_counter(), torch.device(self.device)
        pool = unit_pictures(self.of.pool)
        with float32_arithmetic("float32", device):
            pictures, row, scores = self._pictures(victims, pool, device, progress)
        here, n = row >= 0, len(pictures)
        own = torch.zeros(len(row))
        if len(scores):
            own = scores[row.clamp_min(0), torch.arange(len(row))].where(here, 0.0).clamp_min(0.0)
        mean = pool.mean(0).expand_as(pool)
        found: Arrays = {
            "ssim": own.numpy().astype(np.float32),
            "identified": identified(scores, row, self.learned).numpy(),
            "control": ssim_pairs(mean, pool).clamp_min(0.0).numpy().astype(np.float32),
        }
        if self.keeps_pictures and not n:
            found["pictures"] = np.zeros((len(row), 0), np.uint8)
        elif self.keeps_pictures:  # mirrored pictures follow the others; black where there is none
            kept = torch.cat([pictures, pictures.flip(3)])[row.clamp_min(0)]
            kept = kept * here[:, None, None, None]
            found["pictures"] = np.asarray((kept * 255).round().to(torch.uint8))
        return found, {"seconds": round(time.perf_counter() - started, 3), "n_pictures": n}

    def _pictures(
        self,
        arrays: Arrays,
        pool: Float[Tensor, "n c h w"],
        device: torch.device,
        progress: Progress,
    ) -> tuple[Float[Tensor, "p c h w"], Tensor, Tensor]:
        """(pictures, each image's row in them or -1, SSIM of pictures with images)."""
        if isinstance(self.attack, NoiseAware):  # whose pictures are each of an image
            pictures = self._recovered(arrays, pool.to(device), self.attack).cpu()
            return pictures, torch.arange(len(pool)), ssim_matrix(pictures, pool)
        if isinstance(self.attack, StrongInversion):
            pictures = self._inverted(arrays, pool, device, self.attack).cpu()
        else:
            x = self._candidates(arrays, device, self.attack, share_of(progress, 0.0, 0.9))
            x = x.cpu().float().unflatten(1, self.of.shape) * self.of.std
            mean, given = on("cpu", arrays["mean"][self.victim]), self.of.given
            unknown = given is not None and not given.mean_known
            pictures = pictures_on(pool, x, mean, as_they_are=unknown)
        pictures = pictures[pictures.isfinite().flatten(1).all(1)]
        return pictures, *best_matches(pictures, pool, mirrored=self.of.recipe.views > 1)

    def _tensors(self, arrays: Arrays, name: str, device: torch.device) -> list[Tensor]:
        """The victim's tensors NAME/0, NAME/1, ..."""
        one = slice(self.victim, self.victim + 1)
        return [on(device, a[one]) for a in numbered(arrays, name)]

    def _parameters(self, arrays: Arrays, device: torch.device) -> tuple[Architecture, Parameters]:
        like = self.of.architecture.initial([torch.Generator()], dtype=torch.float32)
        return self.of.architecture, like.like(self._tensors(arrays, "weights", device))

    def _recovered(
        self, arrays: Arrays, pool: Float[Tensor, "n c h w"], method: NoiseAware
    ) -> Float[Tensor, "n c h w"]:
        """Every picture of the pool, recovered from what the mask leaves of it (autoencoder paper,
        section 3)."""
        assert self.of.recipe.autoencoder is not None
        one = slice(self.victim, self.victim + 1)
        model = self.of.recipe.autoencoder.network.on(shape_of(pool))
        weights = {n: on(pool.device, a[one]) for n, a in under(arrays, "weights/").items()}

        def f(x: Tensor) -> Tensor:
            return torch.cat([model.forward(weights, part[None])[0] for part in x.split(ROWS)])

        generator, side = self.drawn("mask"), pool.shape[2:]
        kept = mask_pattern(self.mask, *side, generator=generator).to(pool.device)
        with torch.no_grad():
            return method.recover(f, Degraded(y=degrade(pool, kept), sigma=0.0)).x

    def _inverted(
        self,
        arrays: Arrays,
        pool: Float[Tensor, "n c h w"],
        device: torch.device,
        attack: StrongInversion,
    ) -> Float[Tensor, "m c h w"]:
        """Invert the features that clients send of the victim's training images. Distances are in
        units of the features' spread over all that are sent, which the server sees."""
        cut, (architecture, parameters) = self.of.recipe.cut, self._parameters(arrays, device)
        assert cut is not None
        own = pool[self.learned].to(device)
        if not bool(parameters.isfinite()):
            return own[:0]
        mean, std = on(device, arrays["mean"][self.victim]), self.of.std
        std = std.to(device) if isinstance(std, Tensor) else std

        def h(x: Tensor) -> Tensor:
            return architecture.features(parameters, ((x - mean) / std).flatten(1)[None], cut)[0]

        with torch.no_grad():
            z = sent_features(h(own)[None], self.of.recipe, [self.drawn("sent members")])[0]
        purpose = f"audit start {self.victim}"
        starts = [seeded_generator(self.of.seed, k, purpose) for k in range(len(z))]
        return attack.invert(h, z, shape=self.of.shape, generators=starts, whitening=whiten(z)).x

    def _candidates(
        self, arrays: Arrays, device: torch.device, attack: Attack, progress: Progress
    ) -> Float[Tensor, "m d"]:
        """Candidates of a KKT or span attack for training images, in the victim's input space."""
        architecture, parameters = self._parameters(arrays, device)
        if not bool(parameters.isfinite()):
            return torch.empty(0, architecture.d)
        taken: tuple[SpanRows, ...] = ()
        if isinstance(attack, SpanAttack) and attack.start == "known":
            start = first_layer(parameters).like(self._tensors(arrays, "start", device))
            taken = (weight_rows(parameters, start),)
        elif isinstance(attack, SpanAttack) and attack.source != "weights":
            rows, *begun = (t[0] for t in self._tensors(arrays, "rows", device))
            n_joined = len(rows) // self.of.recipe.victim.widths[0]
            taken = (SpanRows(rows, begun[0] if begun else None, attack.source, n_joined),)
        inputs = torch.empty(1, 0, architecture.d, device=device)
        victim = Victim(architecture, parameters, inputs, taken)
        given = given_separator(attack)
        separator = None if given is None else given[0].to(device)
        (output,) = attack_stack(
            attack, victim, [self.drawn("attack")], progress, separator=separator
        )
        return output.x[-1]


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
