"""The victims of a study, trained before any is attacked.

A study that compares attacks by their time needs parts whose seconds are those of the attack. So
all victims are trained first, on the workers, and kept where the parts look for them
(`tasks.victim_files`). A worker that cannot read that folder trains a victim again in its part.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from distributed import Client, as_completed

from recon_core.experiments import KKT
from recon_core.types import RunSpec
from storage.dataset import Dataset
from tasks.generate import VICTIMS, OnProgress
from tasks.part import cpu_threads, device_name, own_device, this_worker
from tasks.study import StudyPlan
from tasks.victim_files import kept_victims


@dataclass(frozen=True)
class VictimJob:
    """All that a worker needs for one victim; images are (n, c, h, w)."""

    experiment: KKT
    spec: RunSpec
    images: npt.NDArray[np.uint8]
    device: str
    threads: int
    victims: tuple[str, str]


def train_victim(job: VictimJob) -> None:
    """Trains and keeps a victim, unless it is there."""
    device = own_device(job.device, this_worker())
    with cpu_threads(job.threads):
        job.experiment.train_victim(
            job.spec,
            torch.from_numpy(job.images),
            device=torch.device(device),
            victims=kept_victims(job.victims, device_name(device)),
        )


def jobs_of(plan: StudyPlan, dataset: Dataset, device: str) -> list[VictimJob]:
    """The victims that are still to be attacked, those of many images first."""
    study = plan.study
    stored = {receipt.part for receipt in dataset.receipts}
    missing = {
        part * study.runs_per_part // study.n_attacks
        for part in range(plan.sampling.n_parts)
        if part not in stored
    }
    key = (str(Path(dataset.root) / VICTIMS), study.victims_fingerprint(plan.images))
    jobs = []
    for victim in sorted(missing):
        spec = plan.spec(victim * study.n_attacks)
        jobs.append(
            VictimJob(
                experiment=plan.cell(victim).experiment,
                spec=spec,
                images=plan.images.images[list(spec.image_ids)],
                device=device,
                threads=study.threads,
                victims=key,
            )
        )
    return sorted(jobs, key=lambda job: -len(job.images))


def train_victims(
    plan: StudyPlan, dataset: Dataset, client: Client, *, device: str, on_progress: OnProgress
) -> None:
    """Trains what is missing on the workers; raises what a training raises."""
    jobs = jobs_of(plan, dataset, device)
    futures = [client.submit(train_victim, job, pure=False) for job in jobs]
    try:
        for done, future in enumerate(as_completed(futures)):
            future.result()
            on_progress(done + 1, len(jobs), "")
    finally:
        for future in futures:
            future.cancel()
