"""The victims of a study, trained before any is attacked: so a part's seconds are those of its
attack.

They are kept where the parts look for them (`tasks.campaign.victim_files`); a worker that cannot
read that folder trains a victim again. Cells that differ only in what comes after have the same
victims.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from distributed import Client, as_completed

from recon_core.experiments import Experiment
from recon_core.types import RunSpec
from storage.pairs.dataset import Dataset
from tasks.campaign.generate import OnProgress
from tasks.campaign.part import cpu_threads, device_name, own_device, this_worker
from tasks.campaign.plan import sha256_of, without_attack
from tasks.campaign.victim_files import VICTIMS, kept_victims
from tasks.families.weights.study.settings import StudyPlan


@dataclass(frozen=True)
class VictimJob:
    """A victim's training; images are (n, c, h, w). `numbers`: those under which
    the study has it."""

    experiment: Experiment
    spec: RunSpec
    numbers: tuple[int, ...]
    images: npt.NDArray[np.uint8]
    device: str
    threads: int
    victims: tuple[str, str]


def train_victim(job: VictimJob) -> None:
    """Trains a victim, unless it is there, and keeps it under each of its numbers."""
    device = own_device(job.device, this_worker())
    kept = kept_victims(job.victims, device_name(device))
    assert kept is not None
    with cpu_threads(job.threads):
        job.experiment.train_victim(
            job.spec, torch.from_numpy(job.images), device=torch.device(device), victims=kept
        )
    trained = kept.get(job.spec.victim)
    for number in job.numbers:
        if trained is not None and kept.get(number) is None:
            kept.put(number, trained)


def jobs_of(plan: StudyPlan, dataset: Dataset, device: str) -> list[VictimJob]:
    """The victims that are still to be attacked, those of many images first."""
    study = plan.study
    stored = {receipt.part for receipt in dataset.receipts}
    missing = {
        part * study.runs_per_part // study.n_attacks
        for part in range(plan.sampling.n_parts)
        if part not in stored
    }
    same: dict[str, list[int]] = {}
    for victim in sorted(missing):
        same.setdefault(_made_from(plan, victim), []).append(victim)
    key = (str(Path(dataset.root) / VICTIMS), study.victims_fingerprint(plan.images))
    jobs = []
    for first, *others in same.values():
        spec = plan.spec(first * study.n_attacks)
        jobs.append(
            VictimJob(
                experiment=plan.cell(first).experiment,
                spec=spec,
                numbers=(first, *others),
                images=plan.images.images[list(spec.image_ids)],
                device=device,
                threads=study.threads,
                victims=key,
            )
        )
    return sorted(jobs, key=lambda job: -len(job.images))


def _made_from(plan: StudyPlan, victim: int) -> str:
    spec = plan.spec(victim * plan.study.n_attacks)
    experiment = asdict(plan.cell(victim).experiment)
    without_attack(experiment)
    return sha256_of([experiment, spec.image_ids, spec.labels, spec.victim_stream])


def train_victims(
    plan: StudyPlan, dataset: Dataset, client: Client, *, device: str, on_progress: OnProgress
) -> None:
    """Trains what is missing on the workers; raises what a training raises."""
    jobs = jobs_of(plan, dataset, device)
    with client.as_current():
        futures = [client.submit(train_victim, job, pure=False) for job in jobs]
        try:
            for done, future in enumerate(as_completed(futures)):
                future.result()
                on_progress(done + 1, len(jobs), "")
        finally:
            for future in futures:
                future.cancel()
