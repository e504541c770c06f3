"""Small studies of recovery for the tests: random pictures, networks that train in a second."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flows.families.autoencoder.study import tiny
from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.plug_and_play import Iteration, KnownMask, UnknownMask
from recon_core.victims.autoencoder import FullyConnected
from recon_core.victims.autoencoder_training import AutoencoderTraining
from storage.sources.load import ImageSet, Split
from tasks.cluster.jobs import cpu_threads
from tasks.families.autoencoder.study.plan import RecoveryPlan
from tasks.families.autoencoder.study.settings import (
    Methods,
    RecoveryStudy,
    RecoveryVictim,
    Sources,
)
from tasks.study.executor import Outcome, Unit

SIDE = 8
TRAINING = AutoencoderTraining(epochs=200, lr=1e-2, lr_end=1e-3, levels=(0.1, 0.03), check_every=5)


def pictures(split: Split, n: int = 24) -> ImageSet:
    """Random pictures of three classes."""
    rng = np.random.default_rng(0 if split == "train" else 1)
    return ImageSet(
        name="random",
        split=split,
        images=rng.integers(0, 256, (n, 3, SIDE, SIDE), dtype=np.uint8),
        labels=np.arange(n) % 3,
        class_names=("a", "b", "c"),
    )


def small_victim(name: str = "fc-a", n_images: int = 4, **changed: Any) -> RecoveryVictim:
    made = RecoveryVictim(
        name=name,
        title=f"dense {name}",
        network=FullyConnected(depth=3, width=32),
        training=TRAINING,
        n_images=n_images,
        gamma=0.5,
        start="random",
    )
    return replace(made, **changed)


def small_study(**changed: Any) -> RecoveryStudy:
    """Two victims, two masks, the methods that ask a victim."""
    methods = Methods(
        iteration=Iteration(n_iterations=5),
        unknown=UnknownMask(n_admm=3, n_alternations=2),
        known=KnownMask(n_admm=5),
        noise_aware=NoiseAware(fills=(0.5,), gammas=(), n_steps=3, n_release=2),
        ddnm=None,
        biharmonic=False,
    )
    made = RecoveryStudy(
        preset="tiny",
        data="photos",
        size=SIDE,
        victims=(small_victim(), small_victim("fc-b", n_images=6)),
        masks=("random", "window"),
        methods=methods,
        inpainter=tiny().inpainter,
        n_shown=2,
    )
    return replace(made, **changed)


def sources(study: RecoveryStudy, n: int = 24) -> Sources:
    sets = {split: pictures(split, n) for split in ("train", "heldout")}
    return Sources(study, {(study.data, study.size): sets})


def planned(study: RecoveryStudy, root: Path, **changed: Any) -> RecoveryPlan:
    return RecoveryPlan(study, sources(study), root, device="cpu", **changed)


def run_here(plan: RecoveryPlan) -> Outcome:
    """Every unit in this process, one after the other."""
    done: dict[str, dict[str, Any]] = {}
    waiting: list[Unit] = plan.first_units()
    while waiting:
        unit = waiting.pop(0)
        with cpu_threads(plan.study.threads):
            done[unit.name] = unit.run(unit.job, lambda _fraction: None)
        waiting += plan.more_units(unit, done[unit.name])
    return Outcome(done, {})
