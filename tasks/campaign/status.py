"""Progress of a campaign, from its store alone: also while it runs, and from another machine.

Counts come from the receipts, times from when their files were written. The planned number of runs
is the one thing that a store does not say (its last phase may grow); it is in the job's recipe.
"""

from __future__ import annotations

import io
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from recon_core.balance import gini
from recon_core.sampling import Sampling
from storage.pairs.dataset import Dataset
from storage.pairs.receipts import RECEIPTS_FOLDER, Receipt, receipt_path
from tasks.campaign.state import (
    Control,
    Quarantined,
    quarantine_path,
    read_control,
    read_quarantine,
)
from tasks.workspace import Workspace

HOUR_SECONDS = 3600.0
WENT_WELL = ("ok", "stopped")
_SAMPLING_OF_SPLIT = {"train": "sampling", "heldout": "heldout"}


@dataclass(frozen=True, kw_only=True)
class PhaseStatus:
    """One phase of the plan: runs, and the pairs and the images that it brought back.

    `n_covered` counts the images of which the phase has a confident pair, `n_new` those of them of
    which no earlier part had one. `n_planned` is None where no recipe says it.
    """

    sampler: str
    n_runs: int
    n_planned: int | None
    n_pairs: int
    n_confident: int
    n_covered: int
    n_new: int

    def texts(self) -> tuple[str, ...]:
        """Sampler, runs, confident pairs, these per run, images covered, and the new ones."""
        planned = "" if self.n_planned is None else f" of {self.n_planned:,}"
        per_run = f"{self.n_confident / self.n_runs:,.1f}" if self.n_runs else ""
        confident, covered, new = (f"{n:,}" for n in (self.n_confident, self.n_covered, self.n_new))
        return self.sampler, f"{self.n_runs:,}{planned}", confident, per_run, covered, new


@dataclass(frozen=True)
class DeviceStatus:
    """Work of the workers on one kind of device: `pairs_per_hour` of one worker (or GPU)."""

    device: str
    n_runs: int
    n_pairs: int
    hours: float
    pairs_per_hour: float | None


@dataclass(frozen=True)
class CoverageCurve:
    """After each of some numbers of runs, parts in order: images trained on, images with a
    confident pair, and the Gini coefficient of these images' numbers of confident pairs."""

    n_runs: tuple[int, ...]
    n_trained: tuple[int, ...]
    n_covered: tuple[int, ...]
    gini: tuple[float, ...]
    pairs_per_run: tuple[float, ...]
    """Confident pairs per run since the point before."""


@dataclass(frozen=True, kw_only=True)
class CampaignStatus:
    """Progress of a campaign. Unknown numbers are None.

    `n_failed`: runs that are neither ok nor given up by a sweep. `runs_per_hour` is of the hour
    before the newest receipt, `remaining_s` what is left at that rate.
    """

    location: str
    control: Control
    n_runs: int
    n_planned: int | None
    outcomes: dict[str, int]
    n_failed: int
    n_parts: int
    n_parts_planned: int | None
    quarantined: tuple[Quarantined, ...]
    n_pairs: int
    n_confident: int
    n_images: int | None
    n_trained: int
    n_covered: int
    gini: float
    devices: tuple[DeviceStatus, ...]
    runs_per_hour: float | None
    remaining_s: float | None
    last_part_age_s: float | None
    phases: tuple[PhaseStatus, ...]

    @property
    def is_complete(self) -> bool:
        return self.n_planned is not None and self.n_runs >= self.n_planned

    def log_of(self, quarantined: Quarantined) -> str:
        """Path of the log of a part that was given up."""
        return f"{self.location}/{quarantine_path(quarantined.part)}"


def campaign_status(
    dataset: Dataset, *, n_runs_last_phase: int | None = None, now: float | None = None
) -> CampaignStatus:
    """Progress of the campaign of `dataset`.

    `n_runs_last_phase` is what the recipe plans, by default what the manifest says (of a study).
    Raises StorageError if its control or quarantine files are not what they should be.
    """
    receipts = dataset.receipts
    now = time.time() if now is None else now
    if n_runs_last_phase is None:
        n_runs_last_phase = last_phase_of(dataset.manifest.get("campaign"), "train")
    sampling = stored_sampling(dataset.manifest, n_runs_last_phase)
    planned = sampling if n_runs_last_phase is not None else None
    n_planned = None if planned is None else max(planned.n_runs, dataset.n_runs)
    outcomes = runs_by_outcome(receipts)
    counts = dataset.image_counts()[1]
    done = {receipt.part for receipt in receipts}
    given_up = [q for q in read_quarantine(dataset.place) if q.part not in done]
    files = {info.name: info.modified for info in dataset.place.files(RECEIPTS_FOLDER)}
    paths = {receipt.part: receipt_path(receipt.part) for receipt in receipts}
    times = {part: files[path] for part, path in paths.items() if path in files}
    rate = runs_per_hour(receipts, times)
    left = None if n_planned is None else n_planned - dataset.n_runs
    devices = []
    for device in sorted({receipt.device for receipt in receipts}):
        there = [receipt for receipt in receipts if receipt.device == device]
        hours = sum(receipt.seconds for receipt in there) / HOUR_SECONDS
        n_pairs = sum(receipt.n_pairs for receipt in there)
        pace = round(n_pairs / hours, 1) if hours else None
        n_runs = sum(receipt.n_runs for receipt in there)
        devices.append(DeviceStatus(device, n_runs, n_pairs, round(hours, 4), pace))
    return CampaignStatus(
        location=dataset.root,
        control=read_control(dataset.place),
        n_runs=dataset.n_runs,
        n_planned=n_planned,
        outcomes=outcomes,
        n_failed=sum(n for name, n in outcomes.items() if name not in WENT_WELL),
        n_parts=len(receipts),
        n_parts_planned=None if planned is None else max(planned.n_parts, len(receipts)),
        quarantined=tuple(given_up),
        n_pairs=dataset.n_pairs,
        n_confident=int(counts.sum()),
        n_images=dataset.manifest.get("source", {}).get("n"),
        n_trained=len(counts),
        n_covered=int((counts > 0).sum()),
        gini=round(gini(counts[counts > 0].astype(float)), 4),
        devices=tuple(devices),
        runs_per_hour=rate,
        remaining_s=None if left is None or not rate else left / rate * HOUR_SECONDS,
        last_part_age_s=max(0.0, now - max(times.values())) if times else None,
        phases=_phases(dataset, sampling, is_planned=planned is not None) if sampling else (),
    )


def runs_by_outcome(receipts: Iterable[Receipt]) -> dict[str, int]:
    """Numbers of runs by outcome."""
    counts: Counter[str] = Counter()
    for receipt in receipts:
        counts.update(receipt.outcomes)
    return dict(counts)


def stored_sampling(manifest: Mapping[str, Any], n_runs_last_phase: int | None) -> Sampling | None:
    """The sampling that a store's manifest describes, but for the length of the last phase, of
    which None makes one part; None if it is no campaign's. ValueError for a length that cannot be.
    """
    settings = manifest.get("campaign", {}).get("sampling")
    if not settings:
        return None
    *earlier, last = settings["phases"]
    length = settings["runs_per_part"] if n_runs_last_phase is None else n_runs_last_phase
    phases = [*earlier, {**last, "n_runs": length}]
    return TypeAdapter(Sampling).validate_python({**settings, "phases": phases})


def find_recipe(store: str) -> dict[str, Any] | None:
    """The recipe of the job whose folder, or whose store's folder, `store` is; None without one."""
    if "://" in store or store.startswith("s3:/"):
        return None
    folder = Path(store)
    is_of_job = folder.name == "pairs" or folder.name.partition("-")[0] == "heldout"
    above = [folder.absolute().parent] if is_of_job else []
    for job in (folder, *above):
        if (found := Workspace(job).settings()) is not None:
            return found
    return None


def last_phase_of(settings: Mapping[str, Any] | None, split: str) -> int | None:
    """Number of runs in the last phase of the campaign of `split` by a recipe or a manifest."""
    sampling = (settings or {}).get(_SAMPLING_OF_SPLIT[split]) or {}
    n_runs: int | None = (sampling.get("phases") or [{}])[-1].get("n_runs")
    return n_runs


def runs_per_hour(receipts: Sequence[Receipt], times: Mapping[int, float]) -> float | None:
    """Runs per hour in the hour before the newest receipt, or since the first part was started;
    None without receipts. `times`: when the receipts of the parts were written, in seconds."""
    timed = [(times[r.part], r) for r in receipts if r.part in times]
    if not timed:
        return None
    newest = max(at for at, _receipt in timed)
    began = min(at - receipt.seconds for at, receipt in timed)
    first = max(began, newest - HOUR_SECONDS)
    recent = sum(receipt.n_runs for at, receipt in timed if at > newest - HOUR_SECONDS)
    return recent * HOUR_SECONDS / (newest - first) if newest > first else None


def phases_curve(status: CampaignStatus, receipts: Sequence[Receipt]) -> CoverageCurve:
    """The coverage curve of a campaign, which bends where a phase begins."""
    ends = np.cumsum([phase.n_runs for phase in status.phases], dtype=int)
    parts = ends // (receipts[0].n_runs if receipts else 1)
    return coverage_curve(receipts, also=(parts - 1).tolist())


def coverage_curve(
    receipts: Sequence[Receipt], *, n_points: int = 200, also: Iterable[int] = ()
) -> CoverageCurve:
    """Coverage and balance against runs, parts in order, at about `n_points` evenly spread parts
    and at the part indices in `also`."""
    ids = (receipt.image_table().image_ids for receipt in receipts)
    n_images = max((int(some[-1]) + 1 for some in ids if len(some)), default=0)
    counts = np.full(n_images, -1, np.int64)  # of a trained image 0 or more
    spread = np.linspace(0, len(receipts) - 1, min(n_points, len(receipts))).round().astype(int)
    chosen = {*spread.tolist(), *(k for k in also if 0 <= k < len(receipts))}
    rows: list[tuple[int, int, int, float, float]] = []
    n_runs = n_confident = runs_before = confident_before = 0
    for k, receipt in enumerate(receipts):
        table = receipt.image_table()
        counts[table.image_ids] = np.maximum(counts[table.image_ids], 0) + table.n_pairs
        n_confident += int(table.n_pairs.sum())
        n_runs += receipt.n_runs
        if k not in chosen:
            continue
        covered = counts[counts > 0]
        per_run = (n_confident - confident_before) / max(1, n_runs - runs_before)
        unequal = gini(covered.astype(float))
        rows.append((n_runs, int((counts >= 0).sum()), len(covered), unequal, per_run))
        runs_before, confident_before = n_runs, n_confident
    return CoverageCurve(*(zip(*rows, strict=True) if rows else ((),) * 5))


def _phases(dataset: Dataset, sampling: Sampling, *, is_planned: bool) -> tuple[PhaseStatus, ...]:
    """Status of each phase; parts beyond the plan belong to the last, which may have grown."""
    ends = np.cumsum([phase.n_runs for phase in sampling.phases]) // sampling.runs_per_part
    first, before = 0, np.zeros(0, np.int64)
    rows: list[PhaseStatus] = []
    for phase, end in zip(sampling.phases, ends.tolist(), strict=True):
        is_last = len(rows) == len(ends) - 1
        parts = (receipt.part for receipt in dataset.receipts)
        mine = dataset.subset(p for p in parts if first <= p and (is_last or p < end))
        ids, counts = mine.image_counts()
        covered = ids[counts > 0]
        rows.append(
            PhaseStatus(
                sampler=phase.sampler,
                n_runs=mine.n_runs,
                n_planned=phase.n_runs if is_planned or not is_last else None,
                n_pairs=mine.n_pairs,
                n_confident=int(counts.sum()),
                n_covered=len(covered),
                n_new=len(np.setdiff1d(covered, before)),
            )
        )
        first, before = end, np.union1d(before, covered)
    return tuple(rows)


SIZE_INCHES = (8.0, 6.0)
DOTS_PER_INCH = 120
_TRAINED, _COVERED, _GINI, _PHASE = "#9aa5b1", "#1f6f8b", "#b5541c", "#c9ced6"


def coverage_picture(status: CampaignStatus, receipts: Sequence[Receipt], title: str) -> bytes:
    """A PNG of a campaign's coverage: the images of the split are a dashed line, phases that have
    begun have their names. Raises ValueError without parts."""
    curve, n_images = phases_curve(status, receipts), status.n_images
    if not curve.n_runs:
        raise ValueError("the store has no part yet, so there is nothing to plot; generate first")
    starts = [0, *itertools.accumulate(phase.n_runs for phase in status.phases)]
    phases = [
        (first, phase.sampler)
        for k, (first, phase) in enumerate(zip(starts, status.phases, strict=False))
        if first <= status.n_runs and (phase.n_runs or not k)
    ]
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    small: Any = {"textcoords": "offset points", "va": "top", "color": "#667079", "fontsize": 9}
    marker = "o" if len(curve.n_runs) == 1 else None
    above.plot(curve.n_runs, curve.n_trained, color=_TRAINED, marker=marker, label="trained on")
    label = f"with a confident pair: {curve.n_covered[-1]:,}"
    bold: Any = {"marker": marker, "linewidth": 2}
    above.plot(curve.n_runs, curve.n_covered, color=_COVERED, label=label, **bold)
    if n_images is not None:
        above.axhline(n_images, color=_TRAINED, linestyle="--", linewidth=1)
        above.annotate(
            f"{n_images:,} images of the split", (0.99, n_images), (0, -4),
            xycoords=("axes fraction", "data"), ha="right", **small,
        )  # fmt: skip
    above.set_ylabel("images")
    above.set_ylim(0, 1.08 * max(n_images or 0, *curve.n_trained))
    above.set_title(title, loc="left", fontsize=10)
    above.legend(loc="lower right", frameon=False, fontsize=9)
    below.plot(curve.n_runs, curve.gini, color=_GINI, **bold)
    below.set_ylim(0, 1)
    below.set_ylabel("Gini coefficient of\ntheir confident pairs", fontsize=9)
    below.set_xlabel("runs")
    for axes in (above, below):
        axes.set_xlim(0, curve.n_runs[-1] * 1.02)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.spines[["top", "right"]].set_visible(False)
        for first_run, _name in phases[1:]:
            axes.axvline(first_run, color=_PHASE, linewidth=1, zorder=0)
    above.yaxis.set_major_formatter("{x:,.0f}")
    for first_run, name in phases:
        below.annotate(name, (first_run, 0.97), (4, 0), **small)
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()
