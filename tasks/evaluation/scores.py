"""Score one attack after one step: `plain`, `plain_all` or a restorer, which gives one method or,
if generative, two, and where the victim's span is known as many whose pictures are projected on it.
Rows are the victim's targets and then its decoys; each has its best match among the run's pictures
by SSIM: its scores, where it came from (-1: there is none), and the picture as it is shown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from recon_core.matching import fit_to_range, runner_up
from recon_core.metrics import ssim_matrix
from recon_core.summary import BestMatches, best_matches
from recon_core.types import Progress, no_progress, seeded_generator
from storage.pairs.dataset import Dataset
from storage.sources.load import ImageSet
from tasks.dataset.pair_stream import in_rgb
from tasks.evaluation.record import SCORES, Arrays
from tasks.evaluation.settings import PROJECTED, Evaluation
from tasks.evaluation.victims import EvaluatedRun, Victim
from tasks.page.pictures import eight_bits
from tasks.restoring.restore import Restores, summarised

RESTORE_ROWS = 512  # pictures handed to a restorer at once; bounds the memory of its samples
N_UNLIKE = 8
"""Pictures of a run kept of those that resemble no target (image restoration paper, figure 4)."""
UNLIKE = "unlike"
"""Where the results of `plain` have them."""

Advance = Callable[[float], None]
LoadRestorer = Callable[[Path, str], tuple[Restores, nn.Module]]
Opened = tuple[Restores, nn.Module]
Project = Callable[[Tensor], Tensor]
"""Pictures (*n, c, h, w) to the nearest that one victim's weights allow."""


@dataclass(frozen=True)
class Candidates:
    """Raw reconstructions of a run on the device, its mean image, and which they are."""

    x: Tensor
    mean: Tensor
    candidate: npt.NDArray[np.int64]
    iteration: npt.NDArray[np.int64]

    def pictures(self) -> Tensor:
        """In [0, 1] (image restoration paper, section 5.1)."""
        return fit_to_range(self.x, self.mean)

    def seeds(self, run: int) -> Tensor:
        """One for the noise of each picture: it depends on (run, candidate, iteration) alone."""
        seeds = [
            seeded_generator(int(candidate), run, f"restore at {iteration}").initial_seed()
            for candidate, iteration in zip(self.candidate, self.iteration, strict=True)
        ]
        return torch.tensor([seed % (1 << 62) for seed in seeds], dtype=torch.int64)


@dataclass(frozen=True)
class Restored:
    """Answers of a method to n pictures, in [0, 1]; and of the mean of several samples their
    standard deviation in each pixel, averaged over channels, (n, h, w)."""

    images: Tensor
    spread: Tensor | None = None

    @classmethod
    def joined(cls, parts: Sequence[Restored]) -> Restored:
        spread = [part.spread for part in parts if part.spread is not None]
        images = torch.cat([part.images for part in parts])
        return cls(images, torch.cat(spread) if spread else None)


@dataclass(frozen=True)
class Bench:
    """Everything that scoring needs beside the run and the step. `project`: that of the victim, if
    methods have twins inside its span."""

    config: Evaluation
    dataset: Dataset
    heldout: ImageSet
    restorers: Mapping[str, Path]
    device: str
    load: LoadRestorer
    loaded: dict[str, Opened] = field(default_factory=dict)
    project: Project | None = None

    def settings_of(self, step: str, digests: Mapping[str, str]) -> tuple[Any, ...]:
        """Settings that the results of `step` depend on, beside the data."""
        if step == "plain_all":
            return ("all",)
        settings: tuple[Any, ...] = (self.config.restore_iterations,)
        settings += ("projected", self.config.rounds) if self.config.span else ()
        return (*settings, digests[step], self.config.n_samples) if step in digests else settings

    def restore(
        self, step: str, pictures: Tensor, seeds: Tensor, advance: Advance = lambda _done: None
    ) -> dict[str, Restored]:
        """By method, what the restorer of `step` makes of `pictures`."""
        if step in self.restorers and step not in self.loaded:
            self.loaded[step] = self.load(self.restorers[step], self.device)
        made = _restored(
            *self.loaded[step],
            pictures,
            seeds=seeds,
            n_samples=self.config.n_samples,
            rounds=self.config.rounds,
            advance=advance,
            project=self.project,
        )
        return {f"{step}{suffix}": value for suffix, value in made.items()}

    def wanted(self, victim: Victim) -> Tensor:
        """The victim's targets, then its decoys, in [0, 1] on the device."""
        images = np.concatenate([victim.targets, self.heldout.images[victim.decoy_ids]])
        return torch.from_numpy(images).to(self.device).float() / 255

    def score(
        self, victim: Victim, run: EvaluatedRun, step: str, advance: Advance
    ) -> dict[str, Arrays]:
        """Per method of `step` the best match of each row; of `plain` also what is like none."""
        which = "all" if step == "plain_all" else self.config.restore_iterations
        found = read_candidates(self.dataset, run, which, self.device)
        pictures = found.pictures()
        methods = {step: Restored(pictures)}
        if step in self.restorers or step in self.loaded:
            methods = self.restore(step, pictures, found.seeds(run.number), advance)
        elif step == "plain" and self.project is not None:
            methods[f"{step}{PROJECTED}"] = Restored(self.project(pictures).clamp(0, 1))
        wanted = self.wanted(victim)
        results: dict[str, Arrays] = {}
        for name, made in methods.items():
            scores = ssim_matrix(made.images, wanted)
            results[name] = _best(made, wanted, found, scores)
            if name == "plain":
                results[UNLIKE] = _unlike(found, scores[:, : len(victim)])
        return results


def read_candidates(
    dataset: Dataset, run: EvaluatedRun, which: str | tuple[int, ...], device: str
) -> Candidates:
    """The run's reconstructions at the chosen iterations, in the order of the store.

    Raises ValueError if nothing was saved at one of them.
    """
    index = dataset.read(run.part, ["pairs/run_row", "pairs/iteration", "pairs/candidate"])
    mine = np.flatnonzero(index["pairs/run_row"] == run.row)
    if which == "last" and len(mine):
        mine = mine[_is_last(index["pairs/candidate"][mine], index["pairs/iteration"][mine])]
    elif which != "all" and len(mine):
        iteration = index["pairs/iteration"][mine]
        wanted = which if isinstance(which, tuple) else ()
        missing = sorted(set(wanted) - set(iteration.tolist()))
        if missing:
            raise ValueError(
                f"restore_iterations={which!r}: run {run.number} has nothing of {missing}; it was "
                f"saved at {sorted(set(iteration.tolist()))}"
            )
        mine = mine[np.isin(iteration, wanted)]
    means = dataset.read(run.part, ["runs/mean_image"], slice(run.row, run.row + 1))
    mean = torch.from_numpy(means["runs/mean_image"][0]).to(device)
    x = torch.zeros(0, *mean.shape, device=device)
    if len(mine):
        rows = slice(int(mine[0]), int(mine[-1]) + 1)
        read = dataset.read(run.part, ["pairs/reconstruction"], rows)["pairs/reconstruction"]
        x = torch.from_numpy(read[mine - mine[0]]).to(device)
    return Candidates(
        x=x,
        mean=mean,
        candidate=index["pairs/candidate"][mine].astype(np.int64),
        iteration=index["pairs/iteration"][mine].astype(np.int64),
    )


def _is_last(
    candidate: npt.NDArray[np.integer[Any]], iteration: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.bool_]:
    """Which rows are their candidate's last saved iteration."""
    latest = np.zeros(int(candidate.max()) + 1, iteration.dtype)
    np.maximum.at(latest, candidate, iteration)
    return np.asarray(iteration == latest[candidate])


def arrays_of(
    best: BestMatches, pictures: Tensor, wanted: Tensor, scores: Tensor | None = None
) -> Arrays:
    """Scores and pictures (black where there is none) as they are kept. `wanted`: the images, the
    victim's targets and as many decoys; `scores`: the SSIMs of all pictures with them, if known."""
    found = best.row >= 0
    shown = pictures.new_zeros((len(found), *pictures.shape[1:]))
    shown[found] = pictures[best.row[found]]
    place = best.row
    if scores is None:
        used, place = place.clamp_min(0).unique(return_inverse=True)
        scores = ssim_matrix(pictures[used[: len(pictures)]], wanted)
    member = torch.arange(len(wanted), device=wanted.device) < len(wanted) // 2
    second = runner_up(scores, place, member)
    lead = (best.ssim - second).where(found, 0.0)
    columns = {name: getattr(best, name) for name in SCORES if name != "lead"} | {"lead": lead}
    return {
        **{name: values.double().cpu().numpy() for name, values in columns.items()},
        "picture": eight_bits(shown),
    }


def _best(made: Restored, wanted: Tensor, found: Candidates, scores: Tensor) -> Arrays:
    best = best_matches(made.images, wanted, scores=scores)
    arrays = arrays_of(best, made.images, wanted, scores) | _origin(found, best.row)
    if made.spread is not None:
        known = best.row >= 0
        spread = torch.full(known.shape, torch.nan, dtype=torch.float64)
        mean = made.spread.mean(dim=(1, 2)).double()
        spread[known.cpu()] = mean[best.row[known]].cpu()
        arrays["disagreement"] = spread.numpy()
    return arrays


def _unlike(found: Candidates, scores: Tensor) -> Arrays:
    """The pictures whose best score with any target is lowest, and the target that has it."""
    usable = scores.where(scores.isfinite(), -torch.inf)
    if usable.numel() == 0:
        usable = usable.new_zeros((0, 1))
    best, closest = usable.max(dim=1)
    order = best.where(best.isfinite(), torch.inf).argsort(stable=True)
    chosen = order[best[order].isfinite()][:N_UNLIKE]
    return {
        "ssim": best[chosen].double().cpu().numpy(),
        "closest": closest[chosen].cpu().numpy(),
        **_origin(found, chosen),
    }


def _origin(found: Candidates, row: Tensor) -> Arrays:
    """Which candidate and iteration each `row` of the pictures is, -1 for none."""
    rows = row.cpu().numpy()
    return {
        name: np.where(rows >= 0, np.append(values, -1)[rows], -1)
        for name, values in (("candidate", found.candidate), ("iteration", found.iteration))
    }


def _restored(
    restorer: Restores,
    net: nn.Module,
    pictures: Tensor,
    *,
    seeds: Tensor,
    n_samples: int,
    rounds: int,
    advance: Advance,
    project: Project | None,
) -> dict[str, Restored]:
    """By the suffix of the method: the one answer, or the first sample and the mean of all; and the
    same of samples that were projected, one answer after so many rounds. Grey pictures go in three
    times, and come back as the mean of what was made of them."""
    answers: dict[str, list[Restored]] = defaultdict(list)
    n_pictures = max(1, len(pictures))
    for start in range(0, n_pictures, RESTORE_ROWS):
        part = slice(start, start + RESTORE_ROWS)

        def progress(fraction: float, start: int = start) -> None:
            advance(min(1.0, (start + fraction * min(RESTORE_ROWS, n_pictures)) / n_pictures))

        def restored(given: Tensor, progress: Progress, part: slice = part) -> Tensor:
            samples = restorer.restore(
                net, in_rgb(given), n_samples=n_samples, seeds=seeds[part], progress=progress
            )
            return samples.mean(2, keepdim=True) if given.shape[1] == 1 else samples

        samples = restored(pictures[part], progress)
        one, twins = "" if len(samples) == 1 else "_x1", {"": samples}
        if project is not None:
            inside = project(samples)
            for _ in range(0 if one else rounds - 1):
                inside = project(restored(inside[0].clamp(0, 1), no_progress))
            twins[PROJECTED] = inside
        for suffix, own in twins.items():
            answers[f"{one}{suffix}"].append(Restored(own[0].clamp(0, 1)))
        for suffix, own in twins.items() if one else ():
            answers[f"_x{len(own)}{suffix}"].append(Restored(*summarised(own)))
    return {suffix: Restored.joined(parts) for suffix, parts in answers.items()}
