"""Score what came back of every victim: the attack alone and after each restorer, beside decoys.

The protocol of paper 001, section 5.1.1, with two additions. Every number has its twin measured on
as many *decoys*: images of the same source that no run of the store was trained on, scored against
the same pictures. And a run that diverged counts: its images score 0.

Methods: `plain` (the attack's pictures at the iterations that the restorers see), `plain_all` (at
all saved iterations), the classical denoisers of `baselines`, and per restorer either `<name>` (one
deterministic answer) or `<name>_x1` and `<name>_x<n>` (one sample; the mean of n, which is 001's
guard against hallucinations, with how far the n samples disagree).

`out/` gets evaluation.json (docs/evaluation.md), pictures.npz, and cache/ with one checkpoint per
run and method, so that a killed evaluation goes on where it was, and one with another restorer
reuses the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from recon_core.matching import fit_to_range
from recon_core.summary import best_matches
from recon_core.types import seeded_generator
from storage.dataset import Dataset
from storage.layout import OUTCOMES
from storage.sources import ImageSet
from tasks.evaluation_record import (
    VERSION,
    Arrays,
    EvaluatedRun,
    cached,
    fingerprint_of,
    joined,
    make_record,
    read_finished,
    weights_digest,
    write_record,
)
from tasks.restore import Restores, open_restorer, summarised
from tasks.train import load_restorer

RESTORE_ROWS = 512  # pictures handed to a restorer at once; bounds the memory of its samples

Progress = Callable[[int, int, str], None]
LoadRestorer = Callable[[Path, str], tuple[Restores, nn.Module]]
Baseline = Literal["nlm", "tv", "wavelet"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)
"""Restorers that learned nothing (`recon_core.restore.generic`), at their default settings."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is scored. Defaults are paper 001's, section 5.

    `good_threshold`: an SSIM above it is a good reconstruction (Buzaglo et al. 2023).
    `restore_iterations`: which saved iterations restorers see, "all" or "last" or some by number.
    001 restores all of them; the last one alone costs a fraction. `baselines`: the classical
    denoisers that are scored too. `n_samples`: of a diffusion model, averaged. `grid_rows`: images
    kept as pictures for the report, of targets and of decoys.
    """

    good_threshold: float = 0.4
    restore_iterations: Literal["last", "all"] | tuple[int, ...] = "last"
    baselines: tuple[Baseline, ...] = BASELINES
    n_samples: int = 20
    decoy_seed: int = 0
    grid_rows: int = 24
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if not -1 <= self.good_threshold <= 1:
            raise ValueError(f"good_threshold={self.good_threshold}; SSIM lies in [-1, 1]")
        if self.restore_iterations not in ("last", "all") and (
            isinstance(self.restore_iterations, str) or not self.restore_iterations
        ):
            raise ValueError(
                f"restore_iterations={self.restore_iterations!r}; expected 'last', 'all' or saved "
                "iterations like [800, 1400]"
            )
        unknown = [name for name in self.baselines if name not in BASELINES]
        if unknown or len(set(self.baselines)) < len(self.baselines):
            raise ValueError(
                f"baselines={self.baselines!r}; expected some of {list(BASELINES)}, each "
                "at most once"
            )
        if self.n_samples < 1 or self.grid_rows < 0:
            raise ValueError(
                f"n_samples={self.n_samples} must be at least 1 and grid_rows={self.grid_rows} "
                "at least 0"
            )


def evaluate(
    config: Evaluation,
    *,
    dataset: Dataset,
    heldout: ImageSet,
    restorers: Mapping[str, Path],
    out: Path,
    device: str,
    on_progress: Progress = lambda _done, _total, _message: None,
    load: LoadRestorer | None = None,
) -> dict[str, Any]:
    """Scores every run of `dataset` and returns what it writes to `out/evaluation.json`.

    `dataset` was generated from `heldout` with every candidate kept. `restorers` maps the names
    that methods get to the files of trained restorers; `load` reads one (`tasks.train`'s by
    default). Finished work with the same inputs is returned, unfinished work is continued.
    `on_progress(done, total, message)` counts hundredths of a (run, step).

    Raises:
        ValueError: the store has no run, was made from other images than `heldout`, or too few
            images are left over for decoys; or a restorer's name cannot be a method's.
    """
    _check_names(restorers)
    baselines = {str(name): open_restorer(name) for name in config.baselines}
    digests = {name: opened.fingerprint for name, opened in baselines.items()}
    digests |= {name: weights_digest(path) for name, path in restorers.items()}
    inputs = [dataset.content_hash, heldout.content_hash]
    fingerprint = fingerprint_of(VERSION, asdict(config), inputs, digests)
    finished = read_finished(out, fingerprint)
    if finished is not None:
        return finished
    runs = _runs(config, dataset, heldout)
    steps = ["plain", *(["plain_all"] if config.restore_iterations != "all" else []), *digests]
    bench = _Bench(config, dataset, heldout, restorers, device, load or _load_restorer)
    bench.loaded.update({name: (b.restorer, b.net) for name, b in baselines.items()})
    total = len(runs) * len(steps) * 100
    parts: dict[str, list[Arrays]] = {}
    seconds = dict.fromkeys(steps, 0.0)
    for i, (run, step) in enumerate((run, step) for run in runs for step in steps):
        message = f"run {run.number}: {step}"

        def advance(fraction: float, i: int = i, message: str = message) -> None:
            on_progress(100 * i + int(100 * fraction), total, message)

        advance(0.0)
        key = fingerprint_of(VERSION, inputs, config.decoy_seed, *bench.settings_of(step, digests))
        results, spent = cached(
            out / "cache",
            f"run_{run.number:08d}.{step}",
            key,
            partial(bench.score, run, step, advance),
        )
        seconds[step] += spent
        for method, arrays in results.items():
            parts.setdefault(method, []).append(arrays)
    on_progress(total, total, "writing")
    methods = joined(parts, runs)
    record = make_record(
        asdict(config), dataset=dataset, heldout=heldout, runs=runs, methods=methods
    )
    record |= {"fingerprint": fingerprint, "restorers": digests, "seconds": seconds}
    return write_record(out, record, runs=runs, heldout=heldout, methods=methods)


def _runs(config: Evaluation, dataset: Dataset, heldout: ImageSet) -> list[EvaluatedRun]:
    """All runs in the order of the store, with their decoys."""
    sources = {receipt.source_hash for receipt in dataset.receipts}
    if not dataset.n_runs:
        raise ValueError(f"{dataset.root} has no run to evaluate; generate some first")
    if sources != {heldout.content_hash}:
        raise ValueError(
            f"{dataset.root} was generated from images with hash {sorted(sources)}, but "
            f"{heldout.name!r} ({heldout.split}) has {heldout.content_hash}; give the same source"
        )
    pool = _decoy_pool(dataset, heldout)
    runs = []
    for receipt in dataset.receipts:
        run_rows = dataset.read(receipt.part, ["runs/run", "runs/outcome"])
        target_rows = dataset.read(
            receipt.part, ["targets/image", "targets/image_id", "targets/run_row"]
        )
        pairs = dataset.read(receipt.part, ["pairs/run_row"])
        for row, number in enumerate(run_rows["runs/run"].tolist()):
            mine = target_rows["targets/run_row"] == row
            n_targets = int(mine.sum())
            if n_targets > len(pool):
                raise ValueError(
                    f"run {number} has {n_targets} images but only {len(pool)} of the "
                    f"{len(heldout.images)} images of {heldout.name!r} ({heldout.split}) were "
                    "never trained on; use fewer runs, fewer images per run or a larger source"
                )
            generator = seeded_generator(config.decoy_seed, number, "decoys")
            chosen = torch.randperm(len(pool), generator=generator)[:n_targets].numpy()
            runs.append(
                EvaluatedRun(
                    number=number,
                    part=receipt.part,
                    row=row,
                    outcome=OUTCOMES[run_rows["runs/outcome"][row]],
                    n_pairs=int((pairs["pairs/run_row"] == row).sum()),
                    image_ids=target_rows["targets/image_id"][mine].astype(np.int64),
                    targets=target_rows["targets/image"][mine],
                    decoy_ids=pool[chosen],
                )
            )
    return runs


def _decoy_pool(dataset: Dataset, heldout: ImageSet) -> npt.NDArray[np.int64]:
    """Ids of the images that no run was trained on, nor on an identical copy of them."""
    used = np.unique(dataset.column("targets/image_id"))
    seen = {heldout.images[image_id].tobytes() for image_id in used}
    return np.array(
        [i for i, image in enumerate(heldout.images) if image.tobytes() not in seen], np.int64
    )


@dataclass(frozen=True)
class _Bench:
    """Everything that scoring one (run, step) needs beside the two."""

    config: Evaluation
    dataset: Dataset
    heldout: ImageSet
    restorers: Mapping[str, Path]
    device: str
    load: LoadRestorer
    loaded: dict[str, tuple[Restores, nn.Module]] = field(default_factory=dict)

    def settings_of(self, step: str, digests: Mapping[str, str]) -> tuple[Any, ...]:
        """What, beside the data, the results of `step` depend on."""
        if step == "plain_all":
            return ("all",)
        settings = (self.config.restore_iterations,)
        return (*settings, digests[step], self.config.n_samples) if step in digests else settings

    def score(
        self, run: EvaluatedRun, step: str, advance: Callable[[float], None]
    ) -> dict[str, Arrays]:
        """Per method of `step`: best scores and pictures of the run's targets, then its decoys."""
        which = "all" if step == "plain_all" else self.config.restore_iterations
        pictures, seeds = _pictures(self.dataset, run, which, self.device)
        methods = {step: _Pictures(pictures)}
        if step in self.restorers and step not in self.loaded:
            self.loaded[step] = self.load(self.restorers[step], self.device)
        if step in self.loaded:
            samples = _restored(
                *self.loaded[step],
                pictures,
                seeds=seeds,
                n_samples=self.config.n_samples,
                advance=advance,
            )
            methods = {f"{step}{suffix}": value for suffix, value in samples.items()}
        images = np.concatenate([run.targets, self.heldout.images[run.decoy_ids]])
        wanted = torch.from_numpy(images).to(self.device).float() / 255
        return {name: _best(candidates, wanted) for name, candidates in methods.items()}


@dataclass(frozen=True)
class _Pictures:
    """What a method makes of the n pictures of a run, in [0, 1]; and of the mean of several samples
    how far these disagree: their standard deviation, averaged over pixels and channels, (n,)."""

    images: Tensor
    disagreement: Tensor | None = None


def _best(candidates: _Pictures, wanted: Tensor) -> Arrays:
    """Scores and pictures (black where there is none) of the best match of each wanted image."""
    best = best_matches(candidates.images, wanted)
    found = best.row >= 0
    shown = torch.zeros_like(wanted)
    shown[found] = candidates.images[best.row[found]]
    arrays = {
        "ssim": best.ssim.double().cpu().numpy(),
        "haarpsi": best.haarpsi.double().cpu().numpy(),
        "picture": (shown * 255).round().to(torch.uint8).cpu().numpy(),
    }
    if candidates.disagreement is not None:
        spread = torch.full(found.shape, torch.nan, dtype=torch.float64)
        spread[found.cpu()] = candidates.disagreement[best.row[found]].double().cpu()
        arrays["disagreement"] = spread.numpy()
    return arrays


def _pictures(
    dataset: Dataset, run: EvaluatedRun, which: str | tuple[int, ...], device: str
) -> tuple[Tensor, Tensor]:
    """(pictures in [0, 1], one seed each) of the run's candidates at the chosen iterations."""
    index = dataset.read(run.part, ["pairs/run_row", "pairs/iteration", "pairs/candidate"])
    mine = np.flatnonzero(index["pairs/run_row"] == run.row)
    if which != "all" and len(mine):
        iteration = index["pairs/iteration"][mine]
        wanted = (iteration.max(),) if which == "last" else which
        missing = sorted(set(wanted) - set(iteration.tolist()))
        if missing:
            raise ValueError(
                f"restore_iterations={which!r}: run {run.number} has nothing of {missing}; it was "
                f"saved at {sorted(set(iteration.tolist()))}"
            )
        mine = mine[np.isin(iteration, wanted)]
    mean = torch.from_numpy(dataset.read(run.part, ["runs/mean_image"])["runs/mean_image"][run.row])
    if not len(mine):
        return torch.zeros(0, *mean.shape, device=device), torch.zeros(0, dtype=torch.int64)
    rows = slice(int(mine[0]), int(mine[-1]) + 1)
    x = dataset.read(run.part, ["pairs/reconstruction"], rows)["pairs/reconstruction"]
    raw = torch.from_numpy(x[mine - mine[0]]).to(device)
    seeds = [
        seeded_generator(int(candidate), run.number, f"restore at {iteration}").initial_seed()
        for candidate, iteration in zip(
            index["pairs/candidate"][mine], index["pairs/iteration"][mine], strict=True
        )
    ]
    bounded = torch.tensor([seed % (1 << 62) for seed in seeds], dtype=torch.int64)
    return fit_to_range(raw, mean.to(device)), bounded


def _restored(
    restorer: Restores,
    net: nn.Module,
    pictures: Tensor,
    *,
    seeds: Tensor,
    n_samples: int,
    advance: Callable[[float], None],
) -> dict[str, _Pictures]:
    """By the suffix of the method: the one answer, or the first sample and the mean of all."""
    first, mean, spread = [], [], []
    n_given, n_pictures = 1, max(1, len(pictures))
    for start in range(0, n_pictures, RESTORE_ROWS):
        part = slice(start, start + RESTORE_ROWS)

        def progress(fraction: float, start: int = start) -> None:
            advance(min(1.0, (start + fraction * min(RESTORE_ROWS, n_pictures)) / n_pictures))

        samples = restorer.restore(
            net, pictures[part], n_samples=n_samples, seeds=seeds[part], progress=progress
        )
        n_given = len(samples)
        first.append(samples[0])
        average, disagreement = summarised(samples)
        mean.append(average)
        spread.append(disagreement.mean(dim=(1, 2)))
    if n_given == 1:
        return {"": _Pictures(torch.cat(first))}
    return {
        "_x1": _Pictures(torch.cat(first)),
        f"_x{n_given}": _Pictures(torch.cat(mean), torch.cat(spread)),
    }


def _check_names(restorers: Mapping[str, Path]) -> None:
    for name in restorers:
        reserved = name.startswith("plain") or name in BASELINES
        if not re.fullmatch("[a-z0-9_]+", name) or reserved:
            raise ValueError(
                f"restorer name {name!r} cannot name a method; use lower-case letters, digits and "
                f"'_', not a name that starts with 'plain' and none of {list(BASELINES)}"
            )


def _load_restorer(path: Path, device: str) -> tuple[Restores, nn.Module]:
    return load_restorer(path, device=device)
