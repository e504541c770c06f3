"""The span of a victim's first layer, in which its training images lie: restorers' answers put back
there, and `oracle`, the images' own projections, about the most that agrees with the weights.

Both are told from the weights as the attacker is given them. A victim is read where its campaign
kept it, else trained again from its seed, which the margins in the store have to confirm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError

from recon_core.attacks.kkt.results import KnownVictim
from recon_core.attacks.span.restoration import InSpan
from recon_core.attacks.span.subspace import NoSpanError
from recon_core.experiments import KKT, Experiment
from recon_core.summary import best_matches
from recon_core.types import RunSpec
from storage.object_store import LocalPlace
from storage.pairs.dataset import Dataset
from tasks.campaign.part import cpu_threads
from tasks.campaign.plan import victims_key
from tasks.campaign.victim_files import VICTIMS, VictimsOfStore
from tasks.evaluation.record import ORIGIN, Arrays, rounded
from tasks.evaluation.scores import Bench, Project, arrays_of
from tasks.evaluation.settings import ORACLE, WITHOUT_SPAN, check_span
from tasks.evaluation.victims import Victim, attacks_per_victim

SPAN = "span"
MARGINS_AGREE = 1e-3
"""Largest difference of a margin, beside the largest, at which a victim that was trained again is
the one that was attacked: other stacks on a GPU round differently."""


def experiment_of(dataset: Dataset) -> KKT:
    """The settings of a store's victims; ValueError if they are not known or have no span."""
    try:
        stored = dataset.manifest["campaign"]["experiment"]
        experiment = TypeAdapter(Experiment).validate_python(stored)
    except (KeyError, ValidationError) as error:
        raise ValueError(
            f"evaluation.span: {dataset.root} does not say how its victims were trained; "
            f"{WITHOUT_SPAN}"
        ) from error
    check_span(experiment)
    assert isinstance(experiment, KKT)
    return experiment


def find_span(bench: Bench, experiment: KKT, victim: Victim) -> dict[str, Arrays]:
    """`span`: the directions of a victim's first layer, none where nothing stands out of noise, and
    its mean; `oracle`: its images' own projections as a method's pictures, for targets and decoys.

    Raises ValueError if a victim that was trained again is not the one that was attacked.
    """
    spec = _spec_of(bench.dataset, victim)
    network = _network(bench, experiment, victim, spec)
    mean = network.mean.float()
    try:
        directions = experiment.allowed_by(network, spec).directions.float()
    except NoSpanError:
        directions = mean.new_zeros(0, mean.numel())
    wanted = bench.wanted(victim)
    own = InSpan(directions, mean).nearest(wanted[: len(victim)]).clamp(0, 1)
    own = own[: len(victim) if len(directions) else 0]
    best = best_matches(own, wanted)
    nowhere = {name: np.full(len(wanted), -1) for name in ORIGIN}
    return {
        SPAN: {"directions": directions.cpu().numpy(), "mean": mean.cpu().numpy()},
        ORACLE: arrays_of(best, own, wanted) | nowhere,
    }


def projection_on(span: Arrays) -> Project:
    """Pictures to the nearest in a span; as they are where there is none."""
    directions, mean = (torch.from_numpy(span[name].copy()) for name in ("directions", "mean"))
    return InSpan(directions, mean).nearest if len(directions) else lambda pictures: pictures


def _spec_of(dataset: Dataset, victim: Victim) -> RunSpec:
    """The first run on a victim, as it was planned."""
    first = victim.runs[0]
    found = dataset.read(first.part, ["targets/run_row", "targets/label"])
    labels = found["targets/label"][found["targets/run_row"] == first.row]
    return RunSpec(
        run=first.number,
        victim=victim.number,
        root_seed=int(dataset.manifest["campaign"]["root_seed"]),
        image_ids=tuple(victim.image_ids.tolist()),
        labels=tuple(labels.tolist()),
    )


def _network(bench: Bench, experiment: KKT, victim: Victim, spec: RunSpec) -> KnownVictim:
    """The victim that was attacked, kept or trained again."""
    dataset, kept = bench.dataset, None
    if isinstance(dataset.place, LocalPlace):
        n_attacks = attacks_per_victim(dataset)
        receipts = {
            run // n_attacks: receipt
            for receipt in reversed(dataset.receipts)
            for run in range(receipt.run_first, receipt.run_first + receipt.n_runs)
        }
        folder = Path(dataset.root) / VICTIMS
        kept = VictimsOfStore(folder, victims_key(dataset.manifest), receipts)
    images = torch.from_numpy(bench.heldout.images[victim.image_ids])
    with cpu_threads(int(dataset.manifest["campaign"]["threads"])):
        network = experiment.train_victim(
            spec, images, device=torch.device(bench.device), victims=kept
        )
    margins = network.trained.margins[0].double().cpu().numpy()
    largest = np.nanmax(np.abs(victim.margins), initial=0.0)
    if not np.allclose(
        margins, victim.margins, rtol=0, atol=MARGINS_AGREE * largest, equal_nan=True
    ):
        raise ValueError(
            f"evaluation.span: victim {victim.number} of {dataset.root} is not kept, and trained "
            "again it is another one, as other code or another device makes it; evaluate where it "
            f"was made, or {WITHOUT_SPAN}"
        )
    return network


def describe_span(
    methods: Mapping[str, Mapping[str, Any]], n_directions: Sequence[int]
) -> dict[str, Any]:
    """The record's `span`: directions of every victim, and by method the share of the way from the
    attack's mean SSIM to the oracle's; null where the oracle's is not above."""
    mean = {name: method["targets"]["summary"]["mean_ssim"] for name, method in methods.items()}
    before, bound = mean["plain"], mean[ORACLE]
    others = [name for name in mean if name not in ("plain", ORACLE)]
    is_room = before is not None and bound > before
    closed = {n: (mean[n] - before) / (bound - before) if is_room else None for n in others}
    return {
        "n_directions": list(n_directions),
        "n_without": sum(n == 0 for n in n_directions),
        "headroom_closed": rounded(closed),
    }
