"""Attack InstaHide encodings from files.

A method is one entry of `METHODS`: its title, its steps with the progress at which each ends, and a
function that returns a `Recovered`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from recon_core.attacks.instahide.carlini import recover_as_carlini
from recon_core.attacks.instahide.graph import NotALineGraphError
from recon_core.attacks.instahide.mixing import InstaHide
from recon_core.attacks.instahide.practical import Practical, recover_practically
from recon_core.attacks.instahide.recover import Recovered, recover
from recon_core.attacks.instahide.similarity_network import SimilarityNetwork
from recon_core.threads import share_of
from recon_core.types import Progress, no_progress, seeded_generator
from tasks.families.instahide.encode import read_similarity
from tasks.families.instahide.inputs import LEVELS, SEMIDEFINITE, InstaHideJob, PreparedChallenge
from tasks.families.instahide.results import Scored, scored

Run = Callable[[InstaHideJob, PreparedChallenge, str, Progress], Recovered]


@dataclass(frozen=True)
class Method:
    """`steps`: by name, the progress at which each ends."""

    title: str
    run: Run
    steps: tuple[tuple[str, float], ...]


def attack_all(
    job: InstaHideJob, prepared: PreparedChallenge, *, device: str, progress: Progress = no_progress
) -> list[Scored]:
    """Every method, with its scores where the truth is known.

    A ValueError of one method alone is raised; of several it is that method's result.
    """
    done = []
    n = len(prepared.methods)
    for k, name in enumerate(prepared.methods):
        method = METHODS[name]
        clock = _Clock(method.steps, share_of(progress, k / n, (k + 1) / n))
        try:
            found = method.run(job, prepared, device, clock)
        except ValueError as error:
            if n == 1:
                raise
            done.append(Scored(name, method.title, None, clock.seconds(), failure=str(error)))
            continue
        done.append(scored(name, method.title, found, prepared, clock.seconds()))
    progress(1.0)
    return done


class _Clock:
    """Seconds of each step, by the progress that is reported."""

    def __init__(self, steps: tuple[tuple[str, float], ...], progress: Progress) -> None:
        self._steps, self._progress = steps, progress
        self._seconds = dict.fromkeys((name for name, _end in steps), 0.0)
        self._last, self._step = time.perf_counter(), steps[0][0]

    def __call__(self, share: float) -> None:
        unfinished = (name for name, end in self._steps if share <= end + 1e-9)
        self._step = next(unfinished, self._steps[-1][0])
        self.seconds()
        self._progress(share)

    def seconds(self) -> dict[str, float]:
        now = time.perf_counter()
        self._seconds[self._step] += now - self._last
        self._last = now
        return self._seconds


def _exact(
    job: InstaHideJob,
    prepared: PreparedChallenge,
    device: str,
    progress: Progress,
    *,
    semidefinite: bool = False,
) -> Recovered:
    if isinstance(prepared.scheme, InstaHide):
        raise ValueError(
            "the exact attack is on the model of the InstaHide paper, whose weights are equal; "
            "this scheme is instahide: use --method practical"
        )
    y, public, _labels = _tensors(prepared, device)
    try:
        return recover(
            y, prepared.scheme, public=public, n_private=prepared.n_private,
            generator=seeded_generator(job.seed, 0, "attack"), semidefinite=semidefinite,
            progress=progress,
        )  # fmt: skip
    except NotALineGraphError as error:
        raise ValueError(
            f"{error}. For that, say how many private images there are, with --n-private; or give "
            "images with more pixels; or, if these are photographs, use --method practical"
        ) from error


def _practical(
    job: InstaHideJob, prepared: PreparedChallenge, device: str, progress: Progress
) -> Recovered:
    if prepared.n_private is None:
        raise ValueError("say how many private images there are, with --n-private")
    y, public, labels = _tensors(prepared, device)
    if public is None and prepared.scheme.k_pub:
        raise ValueError(
            "the practical attack needs the public images of encodings; give --public, or use "
            "--method carlini"
        )
    how, units = Practical(), prepared.units
    refinement = replace(how.refinement, n_levels=units.n_levels, low=units.low, high=units.high)
    if job.n_rounds is not None:
        refinement = replace(refinement, n_rounds=job.n_rounds)
    return recover_practically(
        y, prepared.challenge.shape, mixing=prepared.scheme, public=public,
        n_private=prepared.n_private, labels=labels,
        generator=seeded_generator(job.seed, 0, "attack"), how=replace(how, refinement=refinement),
        progress=progress,
    )  # fmt: skip


def _carlini(
    job: InstaHideJob, prepared: PreparedChallenge, device: str, progress: Progress
) -> Recovered:
    if prepared.n_private is None:
        raise ValueError("say how many private images there are, with --n-private")
    if prepared.units.kind != LEVELS.kind:
        raise ValueError(
            f"--method carlini is for pictures from -1 to 1; these pixels are "
            f"{prepared.units.kind}: use --method exact"
        )
    y, public, labels = _tensors(prepared, device)
    shape, scheme = prepared.challenge.shape, prepared.scheme
    if job.similarity is not None:
        network = read_similarity(job.similarity).to(device)
    elif public is not None:
        how = SimilarityNetwork(scheme=scheme if isinstance(scheme, InstaHide) else InstaHide())
        first = share_of(progress, 0.0, 0.5)
        pool = public.cpu().float().reshape(-1, *shape)
        network = how.train(pool, progress=first, device=device)
    else:
        raise ValueError("give --similarity, a network, or public images to train one on")
    return recover_as_carlini(
        y, shape, n_private=prepared.n_private, mixing=scheme, labels=labels, scores=network,
        generator=seeded_generator(job.seed, 0, "attack"), progress=share_of(progress, 0.5, 1.0),
    )  # fmt: skip


EXACT_STEPS = (("public images", 0.3), ("overlaps", 0.4), ("graph and signs", 1.0))
METHODS: dict[str, Method] = {
    "exact": Method("exact (InstaHide paper)", _exact, EXACT_STEPS),
    "practical": Method(
        "practical (photographs)",
        _practical,
        (("public images", 0.2), ("overlaps", 0.25), ("groups", 0.3), ("images", 1.0)),
    ),
    "carlini": Method(
        "learned similarity (Carlini et al.)",
        _carlini,
        (("similarity", 0.55), ("groups", 0.65), ("images", 1.0)),
    ),
    SEMIDEFINITE: Method(
        "exact, public images by the paper's semidefinite program",
        partial(_exact, semidefinite=True),
        EXACT_STEPS,
    ),
}


def _tensors(
    prepared: PreparedChallenge, device: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    challenge = prepared.challenge
    y = torch.from_numpy(challenge.encodings).flatten(1).to(device)
    public, labels = challenge.public, challenge.labels
    return (
        y,
        None if public is None else torch.from_numpy(public).flatten(1).to(device),
        None if labels is None else torch.from_numpy(labels.astype(np.float32)).to(device),
    )
