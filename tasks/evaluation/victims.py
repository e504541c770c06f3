"""Subjects of an evaluation: the victims of a store, the attacks on each, and the decoys beside
them. Runs v S to v S + S - 1 are the attacks on victim v, where S is the campaign's
`attacks_per_victim`, 1 where a store does not say."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from recon_core.experiments import FAMILIES
from recon_core.types import RunSpec, seeded_generator
from storage.pairs.dataset import Dataset
from storage.pairs.layout import OUTCOMES, mixed
from storage.sources.load import ImageSet
from tasks.campaign.plan import Plan

CRITERIA = ("kkt_residual", "residual_relu", "attack_loss")
SETTINGS = ("lr", "lam_lr", "sigma", "lam_min", "alpha")
FACTS = ("n_iterations", *CRITERIA, *SETTINGS)
"""Columns of runs that the record shows; null where a value does not apply."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedRun:
    """One attack: where it is in the store and what the store says of it."""

    number: int
    part: int
    row: int
    outcome: str
    n_pairs: int
    facts: dict[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Victim:
    """One trained network: the attacks on it, its images, and as many that it never saw. Of
    `instahide` a run's encodings are the victim, and its private images are its images. `margins`
    are y phi(x), NaN for families that have none."""

    number: int
    runs: tuple[EvaluatedRun, ...]
    image_ids: npt.NDArray[np.int64]
    targets: npt.NDArray[np.uint8]
    margins: npt.NDArray[np.float64]
    decoy_ids: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.image_ids)


Attack = tuple[EvaluatedRun, npt.NDArray[np.int64]]
"""A run, and the ids of the images that its victim was trained on."""


def attacks_per_victim(dataset: Dataset) -> int:
    """S of the campaign that made `dataset`; 1 if its manifest does not say."""
    campaign = dataset.manifest.get("campaign", {})  # a mixture has none
    return int(campaign.get("sampling", {}).get("attacks_per_victim", 1))


def find_victims(dataset: Dataset, heldout: ImageSet, *, decoy_seed: int) -> list[Victim]:
    """All victims by number, with their decoys, which (`decoy_seed`, victim) decides. Raises
    ValueError if the store has no run or was made from other images than `heldout`, if attacks on
    one victim have different images, or if too few images are left over for decoys."""
    sources = {receipt.source_hash for receipt in dataset.receipts}
    if not dataset.n_runs:
        raise ValueError(f"{dataset.root} has no run to evaluate; generate some first")
    if len(mixed(dataset.manifest)) > 1:
        raise ValueError(
            f"{dataset.root} mixes pairs of several experiments, whose runs have the same numbers; "
            "evaluate the stores that it was made from"
        )
    if sources != {heldout.content_hash}:
        raise ValueError(
            f"{dataset.root} was generated from images with hash {sorted(sources)}, but "
            f"{heldout.name!r} ({heldout.split}) has {heldout.content_hash}; give the same source"
        )
    pool = _decoy_pool(heldout, np.unique(dataset.column("targets/image_id")))
    n_attacks = attacks_per_victim(dataset)
    attacks: dict[int, list[Attack]] = defaultdict(list)
    for receipt in dataset.receipts:
        for attack in _attacks_of_part(dataset, receipt.part):
            attacks[attack[0].number // n_attacks].append(attack)
    victims = []
    for number in sorted(attacks):
        victim = _victim(dataset, number, sorted(attacks[number], key=lambda made: made[0].number))
        _check_pool(victim.runs[0].number, len(victim), len(pool), heldout)
        generator = seeded_generator(decoy_seed, number, "decoys")
        chosen = torch.randperm(len(pool), generator=generator)[: len(victim)].numpy()
        victims.append(replace(victim, decoy_ids=pool[chosen]))
    return victims


def check_decoys(plan: Plan) -> None:
    """Raises ValueError if the planned runs leave too few images for decoys, unless which images
    they take depends on what came back before."""
    sampling = plan.sampling
    if any(sampling.needs_counts(k) for k in range(sampling.n_rounds)):
        return
    specs = [spec for part in range(sampling.n_parts) for spec in plan.part(part).specs]
    pool = _decoy_pool(plan.images, np.unique([i for spec in specs for i in spec.image_ids]))
    _check_pool(0, sampling.images_per_run, len(pool), plan.images)


def _check_pool(run: int, n_images: int, n_left: int, heldout: ImageSet) -> None:
    if n_images > n_left:
        raise ValueError(
            f"run {run} has {n_images} images but only {n_left} of the {len(heldout.images)} "
            f"images of {heldout.name!r} ({heldout.split}) were never trained on; use fewer runs, "
            "fewer images per run or a larger source"
        )


def _attacks_of_part(dataset: Dataset, part: int) -> list[Attack]:
    runs = dataset.read(part, ["runs/run", "runs/outcome", *(f"runs/{name}" for name in FACTS)])
    targets = dataset.read(part, ["targets/image_id", "targets/run_row"])
    pairs = dataset.read(part, ["pairs/run_row"])["pairs/run_row"]
    n_pairs = np.bincount(pairs, minlength=len(runs["runs/run"]))
    found = []
    for row, number in enumerate(runs["runs/run"].tolist()):
        facts = {name: float(runs[f"runs/{name}"][row]) for name in FACTS}
        run = EvaluatedRun(
            number=int(number),
            part=part,
            row=row,
            outcome=OUTCOMES[runs["runs/outcome"][row]],
            n_pairs=int(n_pairs[row]),
            facts={name: x if math.isfinite(x) else None for name, x in facts.items()},
        )
        ids = targets["targets/image_id"][targets["targets/run_row"] == row]
        found.append((run, ids.astype(np.int64)))
    return found


def _victim(dataset: Dataset, number: int, attacks: Sequence[Attack]) -> Victim:
    """A victim of its attacks in order, still without decoys."""
    first, image_ids = attacks[0]
    for run, ids in attacks:
        if not np.array_equal(ids, image_ids):
            raise ValueError(
                f"runs {first.number} and {run.number} attack victim {number} but have different "
                "images; the store's attacks_per_victim is not what it was generated with"
            )
    owner = dataset.read(first.part, ["targets/run_row"])["targets/run_row"]
    rows = np.flatnonzero(owner == first.row)
    span = slice(int(rows[0]), int(rows[-1]) + 1) if len(rows) else slice(0, 0)
    read = dataset.read(first.part, ["targets/image", "targets/margin"], span)
    wanted = np.arange(len(image_ids))  # those that the family's attack is after
    campaign = dataset.manifest["campaign"]
    experiment = campaign.get("experiment", {})  # the store of a study has one for each cell
    family = FAMILIES.get(experiment.get("family", ""))
    if family is not None:
        everyone, seed = tuple(image_ids.tolist()), int(campaign["root_seed"])
        spec = RunSpec(run=number, root_seed=seed, image_ids=everyone, labels=(0,) * len(everyone))
        wanted = np.asarray(family.experiment.wanted_rows(experiment, spec))
    mine = (rows - span.start)[wanted]
    return Victim(
        number=number,
        runs=tuple(run for run, _ids in attacks),
        image_ids=image_ids[wanted],
        targets=read["targets/image"][mine],
        margins=read["targets/margin"][mine].astype(np.float64),
        decoy_ids=np.empty(0, np.int64),
    )


def _decoy_pool(heldout: ImageSet, used: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Ids of the images that are none of those `used` in training, nor an identical copy."""
    seen = {heldout.images[image_id].tobytes() for image_id in used}
    return np.array(
        [i for i, image in enumerate(heldout.images) if image.tobytes() not in seen], np.int64
    )
