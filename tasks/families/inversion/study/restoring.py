"""The chain of the MixCon paper's attacker: a restorer that learns from the attack's pairs.

Who has h can send any images through it and invert them, for as many pairs as they like; a restorer
trained on these is given what the attack made of the images that are not known. Grey images are
repeated to three channels, which restorers have.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recon_core.precision import float32_arithmetic
from recon_core.restore import Examples, Fit
from recon_core.restore.examples import to_network
from recon_core.threads import share_of
from recon_core.types import N_AUGMENT, Progress, seeded_generator
from tasks.families.inversion.study.images import Part
from tasks.families.inversion.study.settings import Chain
from tasks.families.inversion.study.units import (
    InvertJob,
    Victim,
    maps_of,
    pictures,
    scored,
    tuned,
)
from tasks.study.products import NOTHING, Arrays, Job, hash_of, key_of

PAIRS_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class RestoreJob(Job):
    """Inverts public images, learns from the pairs, and restores what the strong attack gave.

    `inverting` is what was tried on the victim, `public` are the images of the pairs.
    """

    inverting: InvertJob
    chain: Chain
    public: Part

    @property
    def key(self) -> str:
        chain = asdict(self.chain)
        return key_of(["restored", self.inverting.key, chain, hash_of(self.public.images)])

    def make(self, progress: Progress) -> tuple[Arrays, dict[str, Any]]:
        """Arrays of the restored pictures; raises NonfiniteLossError if the training diverges."""
        started, inverting, device = time.perf_counter(), self.inverting, torch.device(self.device)
        given = self.folder.product(inverting.key)
        if given is None:
            raise ValueError(f"nothing is kept under {inverting.key[:32]}; run the study again")
        if "strong/picture" not in given[0]:
            return NOTHING, {"seconds": 0.0, "loss": None}
        with float32_arithmetic("float32", device):
            pairs = _pairs(self, share_of(progress, 0.0, 0.4))
            net, loss = _fitted(self, pairs, share_of(progress, 0.4, 0.95))
            found = torch.from_numpy(given[0]["strong/picture"]).to(device).float() / 255
            restored = _through(self.chain, net, found)
            arrays = scored(restored, pictures(inverting.inverted, device), maps_of(inverting))
        seconds = round(time.perf_counter() - started, 3)
        named = {f"restored/{name}": values for name, values in arrays.items()}
        return named, {"seconds": seconds, "loss": loss}


def _pairs(job: RestoreJob, progress: Progress) -> Examples:
    inverting, device = job.inverting, torch.device(job.device)
    victim = Victim.of(job.root, inverting.victim, job.device)
    attack, whitening = tuned(inverting, victim)
    x = pictures(job.public, device)
    drawn = inverting.victim.generators(len(x), "pairs")
    made = []
    for rows in torch.arange(len(x)).split(PAIRS_AT_ONCE):
        first, last = int(rows[0]), int(rows[-1]) + 1
        found = attack.invert(
            victim.h,
            victim.sent(x[first:last]),
            shape=(x.shape[1], x.shape[2], x.shape[3]),
            generators=drawn[first:last],
            whitening=whitening,
        )
        made.append(found.x)
        progress(last / len(x))
    return Examples(
        condition=_network(torch.cat(made)),
        target=_network(x),
        augment=torch.zeros(len(x), N_AUGMENT),
    )


def _fitted(job: RestoreJob, pairs: Examples, progress: Progress) -> tuple[nn.Module, float]:
    training = job.chain.training
    fit, loss = Fit(job.chain.restorer, training, device=job.device), float("nan")
    while not fit.done:
        drawn = seeded_generator(training.seed, fit.step, "chain batch")
        rows = torch.randint(len(pairs), (training.batch_size,), generator=drawn)
        batch = Examples(
            condition=pairs.condition[rows].to(job.device),
            target=pairs.target[rows].to(job.device),
            augment=pairs.augment[rows].to(job.device),
        )
        loss = fit.update(batch)
        progress(fit.step / training.n_steps)
    return fit.ema.eval(), loss


def _through(chain: Chain, net: nn.Module, found: Float[Tensor, "n c h w"]) -> Tensor:
    """Restored pictures, with as many channels as there were."""
    seeds = torch.arange(len(found))
    rgb = found.expand(-1, 3, -1, -1).contiguous()
    restored = chain.restorer.restore(net, rgb, n_samples=1, seeds=seeds)[0].clamp(0, 1)
    grey = found.shape[1] == 1
    return restored.mean(1, keepdim=True) if grey else restored


def _network(x: Float[Tensor, "n c h w"]) -> Tensor:
    """[0, 1] in any number of channels to three in [-1, 1], on the CPU."""
    return to_network(x.detach().cpu().expand(-1, 3, -1, -1)).contiguous()
