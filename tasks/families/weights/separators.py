"""Separators of one's own: learned from public pictures, tried on others, written and read.

Held-out pictures never enter the learning. As it goes on, and at its end, their spans are taken
apart: n pictures in a span that is known exactly, by the network and by plain filters. The card in
the file says how many were identified, nearer to their picture than to any other by .05 in SSIM.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from recon_core.attacks.span.learning import Mixtures, is_mirrored, learn
from recon_core.attacks.span.search import SpanAttack, searched
from recon_core.attacks.span.separator import (
    SHIPPED,
    Card,
    Separator,
    metadata_of,
    packed,
    unpacked,
)
from recon_core.matching import best_per_target, fit_to_range, identified
from recon_core.metrics import ssim_matrix
from recon_core.strict import Count, Natural, Positive, Strict
from recon_core.types import seeded_generator
from storage.errors import SourceError
from storage.files import write_file
from storage.weights import WeightsError, check_weights_file
from tasks.attack_file.pictures import Shape, read_source

if TYPE_CHECKING:  # it loads Prefect, which reading a file need not
    from tasks.progress import Advance

NUMBERS = (50, 100, 200, 400)
"""Pictures that are separated to try a separator."""
FEWEST, FEWEST_HELD = 100, 20
"""Pictures to learn from, and held out, without which nothing is learned."""
FEW = 2000
"""Pictures up to which each is shifted by two pixels at most."""
TRIALS = 4
"""Times that a separator is tried while it learns."""
WARM, TIMED = 3, 8
"""Steps before and within the measurement of a step's time."""
STEPS = 1500
SIDES = 4
"""Multiple that the large network's sides must be of."""
LARGE_AREA = 2048
"""Pixels from which on a network works on patches of 2x2."""
WIDTHS, WIDER, LONG = (16, 32, 48), (32, 64, 96), 30.0  # minutes from which on WIDER learns more
FLOORS = {1: 1e-2, 3: 1e-3}
"""Least variance of a direction, by channels: colours vary less."""


@dataclass(frozen=True, kw_only=True)
class SeparatorJob(Strict):
    """Everything about a separator but where it is computed.

    `data`: a source of pictures, whose held-out ones it is tried on. `minutes`: of learning, unless
    `n_steps` are given; from `LONG` on the network is wider. `large`: of three million parameters,
    learning on a GPU from 512 mixtures in a step, not 96. `floor`, `centred`, `mirrored`,
    `shifted`: see `Card`; by default told from the pictures.
    """

    data: str
    shape: Shape
    minutes: Positive = 5.0
    n_steps: Count | None = None
    large: bool = False
    floor: Positive | None = None
    centred: bool = True
    mirrored: bool | None = None
    shifted: Natural | None = None
    seed: Natural = 0
    skip_corrupt: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.large and (self.shape[1] != self.shape[2] or self.shape[1] % SIDES):
            raise ValueError(
                f"large=True with shape={self.shape}: the large network is for squares with sides "
                f"that are multiples of {SIDES}"
            )


def train_separator(job: SeparatorJob, out: Path, *, device: str, advance: Advance) -> Card:
    """Learns a separator, tries it and writes it to `out`; the card it has.

    Raises SourceError for pictures that cannot be read, ValueError for too few of them or a shape
    that separators are not for.
    """
    seen, held = (
        read_source(job.data, split, job.shape, skip_corrupt=job.skip_corrupt).images
        for split in ("train", "heldout")
    )
    if len(seen) < FEWEST or len(held) < FEWEST_HELD:
        raise SourceError(
            f"{job.data} has {len(seen)} pictures to learn from and {len(held)} held out; a "
            f"separator needs {FEWEST} and {FEWEST_HELD}, and is better with thousands"
        )
    numbers = [n for n in NUMBERS if n <= len(held)] or [len(held)]
    card = _card(job, seen)
    mixtures = Mixtures(seen.to(device), card, seed=job.seed)
    if job.n_steps is None:
        times: list[float] = []  # of steps whose outcome is thrown away
        learn(
            mixtures,
            replace(card, n_steps=WARM + TIMED),
            batch=_batch(card, device),
            report=lambda *_facts: times.append(time.perf_counter()),
        )
        seconds = (times[-1] - times[WARM - 1]) / TIMED
        card = replace(card, n_steps=max(TIMED, round(60 * job.minutes / seconds)))
    tries = {round(card.n_steps * (i + 1) / TRIALS) for i in range(TRIALS - 1)}
    note = "not tried yet"

    def report(step: int, loss: float, separator: Separator) -> None:
        nonlocal note
        if step in tries:
            n = numbers[0]
            note = f"tells {_identified(held, n, separator)} of {n} held-out pictures"
        advance(step, card.n_steps, f"loss {loss:.3f}, {note}")

    learned = learn(mixtures, card, batch=_batch(card, device), seed=job.seed, report=report)
    learned = learned.to(torch.device("cpu"))
    rows = []
    for n in numbers:
        ours = _identified(held, n, learned.to(torch.device(device)))
        rows.append((n, ours, _identified(held, n, None)))
        advance(card.n_steps, card.n_steps, f"tells {ours} of {n} held-out pictures")
    seen_held = (held.flatten(1) - learned.mean) if card.centred else held.flatten(1)
    alone, spread = learned.alone_and_spread(seen_held)
    card = replace(card, alone=alone, spread=spread, separated=tuple(rows))
    learned = replace(learned, card=card)
    write_file(out, save(*packed(learned)))
    return learned.card


def _card(job: SeparatorJob, seen: Float[Tensor, "n c h w"]) -> Card:
    mirrored = is_mirrored(seen[:FEW]) if job.mirrored is None else job.mirrored
    is_wide = job.shape[1] * job.shape[2] >= LARGE_AREA
    return Card(
        shape=job.shape,
        widths=() if job.large else WIDER if is_wide or job.minutes >= LONG else WIDTHS,
        patch=2 if is_wide else 1,
        centred=job.centred,
        mirrored=mirrored,
        shifted=2 * (len(seen) <= FEW) if job.shifted is None else job.shifted,
        floor=job.floor or FLOORS[job.shape[0]],
        source=job.data.rpartition("/")[2] or job.data,
        n_pictures=len(seen),
        sha256=hashlib.sha256((255 * seen).round().to(torch.uint8).numpy().tobytes()).hexdigest(),
        n_steps=job.n_steps or STEPS,
        alone=0.0,
        spread=1.0,
    )


def _batch(card: Card, device: str) -> int:
    """Mixtures in a step."""
    return 512 if device.startswith("cuda") and not card.widths else 96


def _identified(held: Float[Tensor, "n c h w"], n: int, separator: Separator | None) -> int:
    """Pictures that are identified of n in a span that is known exactly, by plain filters without
    a separator."""
    x, device = held[:n], "cpu" if separator is None else separator.mean.device
    mean = x.mean(0) if separator is None else separator.mean.cpu().view_as(x[0])
    attack = SpanAttack(sources="network" if separator else "independent", overcomplete=1.0)
    seen = x if separator is not None and not separator.card.centred else x - mean
    directions = torch.linalg.qr(seen.flatten(1).double().mT).Q.mT.float().to(device)
    generator, pictures = seeded_generator(0, n, "attack"), directions.unflatten(1, x.shape[1:])
    found = (searched(attack, pictures[None], separator, [generator]).w[0] @ directions).cpu()
    signed = torch.cat([found, -found]).unflatten(1, x.shape[1:])
    if separator is not None and not separator.card.centred:
        signed = signed - signed.mean((2, 3), keepdim=True)
    scores = ssim_matrix(fit_to_range(signed, mean), x)
    row, _best = best_per_target(scores)
    return int(identified(scores, row, torch.ones(n, dtype=torch.bool)).sum())


def given_separator(attack: object) -> tuple[Separator, str] | None:
    """The separator of a span attack that names a file, and its hash; None for others."""
    if not isinstance(attack, SpanAttack) or attack.separator in ("auto", *SHIPPED):
        return None
    return read_separator(Path(attack.separator))


def read_separator(path: Path) -> tuple[Separator, str]:
    """(the separator in a file, "sha256:..." of the file). Raises WeightsError with the option's
    name for a file that is none, is damaged, or has other numbers than its card says."""
    try:
        check_weights_file(path)
        content = path.read_bytes()
        separator = unpacked(load(content), metadata_of(content))
    except WeightsError as error:
        raise WeightsError(str(error).replace("--weights", "--separator")) from error
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        why = str(error).strip().splitlines()[0]
        raise WeightsError(
            f"{path} cannot be used as --separator: {why}; give a file that `palimpsest train "
            "separator` wrote, whole"
        ) from error
    return separator, f"sha256:{hashlib.sha256(content).hexdigest()}"
