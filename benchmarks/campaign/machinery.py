"""Cost of a campaign beside its runs: 150,000 runs that do nothing, planned, handed out, stored.

Everything is real but the runs: a flow (recorded, if `PREFECT_API_URL` names a server), with the
task, the progress and the tables of `generate`; the coordinator and local Dask processes; parts
that are written and published by `write_part`, their receipts returned and, for the least-seen
phase, read back into the plan. A run trains on 300 of 50,000 images as in the image restoration
paper, but comes back at once with two targets and one pair of 8 x 8 pixels. Two thirds of the runs
are uniform, one third least-seen, 50 a part.

A campaign runs in a process of its own, whose peak memory is the kernel's. The local cluster's
scheduler lives in it, so its memory is included; the images of the source are, too. Prefect's
server is another process. `--runs` sets the sizes; images of 32 x 32 pixels travel with each part,
which then carries 46 MB, as real ones do.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.record import Measurement, in_new_process, measured, process_memory, publish
from flows.generate import make_pairs, publish_store
from recon_core.attacks.family_run import FamilyRun
from recon_core.sampling import Phase, Sampling
from recon_core.types import (
    N_AUGMENT,
    STATS,
    Outcome,
    Pairs,
    Progress,
    RunResult,
    RunSpec,
    Victims,
    no_progress,
)
from storage.pairs.dataset import Dataset
from storage.sources.load import ImageSet
from tasks.campaign.plan import Campaign, Plan, open_store
from tasks.cluster.workers import Workers
from tasks.orchestration import flow

_line = partial(measured, "campaign_machinery", reference="the goal: at most")


SIZES = (10_000, 50_000, 150_000)
QUICK_SIZES = (40, 80)
RUNS_PER_PART = 50
IMAGES_PER_RUN, N_IMAGES, POOL_SIZE = 300, 50_000, 4000
PIXELS, PICTURE = 8, 32
TIME_GOAL_S, MEMORY_GOAL_GIB = 900.0, 1.0


@dataclass(frozen=True, kw_only=True)
class NoOp(FamilyRun):
    """An experiment that does nothing: two targets and one confident pair a run."""

    family: Literal["noop"] = "noop"

    @property
    def n_labels(self) -> int:
        return 2

    def run_batch(
        self,
        specs: Sequence[RunSpec],
        images: Tensor,
        *,
        device: torch.device,
        progress: Progress = no_progress,
        victims: Victims | None = None,
    ) -> list[RunResult]:
        """The results that stand for the runs, at once; the same for the same specs."""
        del images, device, victims  # nothing is computed
        progress(1.0)
        results = []
        for spec in specs:
            first = (spec.image_ids[0] + spec.run) % 251
            picture = torch.full((1, 3, PIXELS, PIXELS), float(first))
            pairs = Pairs(
                reconstruction=picture,
                target_row=torch.zeros(1, dtype=torch.int64),
                candidate=torch.zeros(1, dtype=torch.int64),
                iteration=torch.ones(1, dtype=torch.int64),
                ssim_best=torch.full((1,), 0.5),
                ssim_second=torch.full((1,), 0.1),
                confident=torch.ones(1, dtype=torch.bool),
            )
            result = RunResult(
                spec=replace(spec, image_ids=spec.image_ids[:2], labels=spec.labels[:2]),
                outcome=Outcome.OK,
                targets=picture.to(torch.uint8).repeat(2, 1, 1, 1),
                augment=torch.zeros(2, N_AUGMENT),
                mean_image=picture[0] / 255,
                pairs=pairs,
                margins=torch.zeros(2),
                stats=dict.fromkeys(STATS, 0.0),
            )
            results.append(result)
        return results

    def run_stack(
        self, specs: Sequence[RunSpec], images: Tensor, device: torch.device, progress: Progress
    ) -> list[RunResult]:
        """The same results."""
        return self.run_batch(specs, images, device=device, progress=progress)


def no_op_campaign(n_runs: int, *, images_per_run: int = IMAGES_PER_RUN) -> Campaign:
    """A campaign of `n_runs` runs that do nothing, a third of them least-seen."""
    runs_per_part = min(RUNS_PER_PART, max(1, n_runs // 20))
    n_parts = -(-n_runs // runs_per_part)
    n_later = n_parts // 3
    return Campaign(
        experiment=NoOp(),
        sampling=Sampling(
            images_per_run=images_per_run,
            phases=(
                Phase(n_runs=(n_parts - n_later) * runs_per_part),
                Phase(sampler="least_seen", n_runs=n_later * runs_per_part, pool_size=POOL_SIZE),
            ),
            runs_per_part=runs_per_part,
        ),
    )


def made_up_images(n_images: int, pixels: int) -> ImageSet:
    """Pictures of noise, of two classes."""
    rng = np.random.default_rng(0)
    return ImageSet(
        name="noise",
        split="train",
        images=rng.integers(0, 256, (n_images, 3, pixels, pixels), dtype=np.uint8),
        labels=np.arange(n_images) % 2,
        class_names=("a", "b"),
    )


def run_here(folder: Path, n_runs: int, n_workers: int, n_images: int) -> dict[str, Any]:
    """Runs a campaign in this process; its times and memory."""
    images = made_up_images(n_images, PICTURE)
    campaign = no_op_campaign(n_runs, images_per_run=min(IMAGES_PER_RUN, n_images // 4))
    before_gib = process_memory("VmHWM") / 1024
    over, peaks = threading.Event(), list[tuple[float, float]]()

    def sample() -> None:
        while not over.wait(0.1):
            peaks.append((time.time(), process_memory("VmHWM") / 1024))

    thread = threading.Thread(target=sample, daemon=True)
    started = time.time()
    thread.start()
    plan, workers = Plan(campaign, images), Workers(n_workers=n_workers, device="cpu")

    @flow(name="campaign of nothing", validate_parameters=False)
    def generate() -> Dataset:  # what `flows.generate` does after it has read its images
        dataset = open_store(folder / "pairs", campaign, images)
        dataset = make_pairs(plan, dataset, workers, "cpu", "Generate nothing")
        publish_store(dataset, plan, "train", folder)
        return dataset

    dataset = generate()
    seconds = time.time() - started
    over.set()
    thread.join()
    receipts = (folder / "pairs" / "receipts").glob("part-*.json")
    written = sorted(path.stat().st_mtime - started for path in receipts)
    halfway_s = written[len(written) // 2]
    if dataset.n_runs != campaign.sampling.n_runs:
        raise ValueError(f"{dataset.n_runs} runs are stored, {campaign.sampling.n_runs} planned")
    return {
        "n_runs": dataset.n_runs,
        "n_parts": len(dataset.receipts),
        "seconds": seconds,
        "to_first_part_s": written[0],
        "first_half_s": halfway_s,
        "before_gib": before_gib,
        "halfway_gib": max(gib for at, gib in peaks if at <= started + halfway_s),
        "peak_gib": process_memory("VmHWM") / 1024,
        "content_hash": dataset.content_hash,
    }


def measure(
    sizes: Sequence[int], *, n_workers: int = 2, n_images: int = N_IMAGES
) -> Iterator[Measurement]:
    """Seconds and peak memory of campaigns of no-op runs."""
    for n_runs in sizes:
        with tempfile.TemporaryDirectory(prefix="palimpsest-machinery-") as folder:
            facts = in_new_process(run_here, Path(folder), n_runs, n_workers, n_images)
        what = (
            f"{facts['n_runs']} runs that do nothing, {facts['n_parts']} parts, {n_workers} "
            f"workers, images of {PICTURE} x {PICTURE} pixels"
        )
        seconds, first_s = facts["seconds"], facts["first_half_s"]
        goal_s = TIME_GOAL_S if n_runs == SIZES[-1] else None
        yield _line(f"time of {what}", seconds, "s", reference_value=goal_s)
        yield _line(f"time per part of {what}", 1000 * seconds / facts["n_parts"], "ms")
        peak = f"peak memory of the coordinator, scheduler included, {what}"
        yield _line(peak, facts["peak_gib"], "GiB", reference_value=MEMORY_GOAL_GIB)
        yield _line(f"of which before the first part, {what}", facts["before_gib"], "GiB")
        yield _line(f"of which after half of the parts, {what}", facts["halfway_gib"], "GiB")
        before_s = facts["to_first_part_s"]
        started = "of the time before the first part (flow, server, workers)"
        yield _line(f"{started}, {what}", before_s, "s")
        halves = (seconds - first_s) / (first_s - before_s)
        yield _line(f"second half's time over the first's, {what}", halves, "ratio")


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line per measurement, and writes them to --json."""
    parser = argparse.ArgumentParser(description=measure.__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny campaigns")
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    parser.add_argument("--runs", help="sizes, with commas between them")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--images", type=int, help="how many images the source has")
    options = parser.parse_args(argv)
    n_images = options.images or (400 if options.quick else N_IMAGES)
    sizes: Sequence[int] = QUICK_SIZES if options.quick else SIZES
    if options.runs:
        sizes = [int(text) for text in options.runs.split(",")]
    publish(measure(sizes, n_workers=options.workers, n_images=n_images), options.json)


if __name__ == "__main__":
    # Workers must find the experiment's class by its module's name, not in __main__.
    importlib.import_module("benchmarks.campaign.machinery").main()
