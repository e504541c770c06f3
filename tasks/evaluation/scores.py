"""Score one attack after one step: `plain`, `plain_all` or a restorer, which gives one method or,
if generative, two, and where the victim's span is known as many whose pictures are projected on it.
Rows are the victim's targets and then its decoys; each has its best match among the run's pictures
by SSIM: its scores, where it came from (-1: there is none), and the picture as it is shown.

The span of a victim's first layer, in which its training images lie, is told from the weights as
the attacker is given them; the images' own projections (`oracle`) are about the most that agrees
with them. A victim is read where its campaign kept it, else trained again from its seed, which the
margins in the store have to confirm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from recon_core.attacks.kkt.run import KnownVictim
from recon_core.attacks.span.attack import InSpan
from recon_core.attacks.span.subspace import NoSpanError
from recon_core.experiments import KKT, Experiment
from recon_core.matching import fit_to_range, runner_up
from recon_core.metrics import ssim_matrix
from recon_core.summary import BestMatches, best_matches
from recon_core.types import Progress, RunSpec, no_progress, seeded_generator
from storage.object_store import LocalPlace
from storage.pairs.dataset import Dataset
from storage.sources.load import ImageSet
from tasks.campaign.plan import VICTIMS, VictimsOfStore, victims_key
from tasks.cluster.jobs import cpu_threads
from tasks.dataset.pair_stream import in_rgb
from tasks.evaluation.record import ORIGIN, SCORES, Arrays, rounded
from tasks.evaluation.settings import ORACLE, PROJECTED, WITHOUT_SPAN, Evaluation, check_span
from tasks.evaluation.victims import EvaluatedRun, Victim, attacks_per_victim
from tasks.page.pictures import eight_bits
from tasks.restoring.restore import Restores, summarised

RESTORE_ROWS = 512  # pictures handed to a restorer at once; bounds the memory of its samples
N_UNLIKE = 8
"""Pictures of a run kept of those that resemble no target (image restoration paper, figure 4)."""
UNLIKE = "unlike"
"""Where the results of `plain` have them."""

Advance = Callable[[float], None]
Iterations = str | tuple[int, ...]
LoadRestorer = Callable[[Path, str], tuple[Restores, nn.Module]]
Opened = tuple[Restores, nn.Module]
Project = Callable[[Tensor], Tensor]
"""Pictures (*n, c, h, w) to the nearest that one victim's weights allow."""
SPAN = "span"
MARGINS_AGREE = 1e-3
"""Largest difference of a margin, relative to the largest margin, at which a victim that was
trained again is the one that was attacked: other stacks on a GPU round differently."""


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


Further = tuple[Dataset, Mapping[int, EvaluatedRun]]
"""The store of another attack on the same victims, and its runs by number."""


@dataclass(frozen=True)
class Bench:
    """Everything that scoring needs beside the run and the step. `digests`: of the restorers that
    are steps; `further`: other attacks, which are steps, too; `project`: that of the victim, if
    methods have twins inside its span."""

    config: Evaluation
    dataset: Dataset
    heldout: ImageSet
    restorers: Mapping[str, Path]
    device: str
    load: LoadRestorer
    digests: Mapping[str, str] = field(default_factory=dict)
    further: Mapping[str, Further] = field(default_factory=dict)
    loaded: dict[str, Opened] = field(default_factory=dict)
    project: Project | None = None

    def iterations(self, step: str) -> Iterations:
        """The saved iterations that `step` sees: the last of a further attack, if not all."""
        which = self.config.restore_iterations
        if step in self.further:
            return "all" if which == "all" else "last"
        return "all" if step == "plain_all" else which

    def settings_of(self, step: str) -> tuple[Any, ...]:
        """Settings that the results of `step` depend on, beside the data."""
        which, config = self.iterations(step), self.config
        if step in self.further:
            return self.further[step][0].content_hash, which
        if step == "plain_all":
            return (which,)
        restored = (self.digests[step], config.n_samples) if step in self.digests else ()
        return (which, *(("projected", config.rounds) if config.span else ()), *restored)

    def restore(
        self, step: str, pictures: Tensor, seeds: Tensor, advance: Advance = lambda _done: None
    ) -> dict[str, Restored]:
        """By method, what the restorer of `step` makes of `pictures`: the one answer, or the first
        sample and the mean of all; and the same of samples that were projected, one answer after
        so many rounds. Grey pictures go in three times, and come back as the mean of what was made
        of them."""
        if step in self.restorers and step not in self.loaded:
            self.loaded[step] = self.load(self.restorers[step], self.device)
        restorer, net = self.loaded[step]
        answers: dict[str, list[tuple[Tensor, Tensor | None]]] = defaultdict(list)
        n_pictures = max(1, len(pictures))
        for start in range(0, n_pictures, RESTORE_ROWS):
            part = slice(start, start + RESTORE_ROWS)

            def progress(fraction: float, start: int = start) -> None:
                advance(min(1.0, (start + fraction * min(RESTORE_ROWS, n_pictures)) / n_pictures))

            def restored(given: Tensor, progress: Progress, part: slice = part) -> Tensor:
                samples = restorer.restore(
                    net, in_rgb(given), n_samples=self.config.n_samples, seeds=seeds[part],
                    progress=progress,
                )  # fmt: skip
                return samples.mean(2, keepdim=True) if given.shape[1] == 1 else samples

            samples = restored(pictures[part], progress)
            one, twins = "" if len(samples) == 1 else "_x1", {"": samples}
            if self.project is not None:
                inside = self.project(samples)
                for _ in range(0 if one else self.config.rounds - 1):
                    inside = self.project(restored(inside[0].clamp(0, 1), no_progress))
                twins[PROJECTED] = inside
            for suffix, own in twins.items():
                answers[f"{step}{one}{suffix}"].append((own[0].clamp(0, 1), None))
            for suffix, own in twins.items() if one else ():
                answers[f"{step}_x{len(own)}{suffix}"].append(summarised(own))
        joined = {}
        for name, parts in answers.items():
            spreads = [spread for _images, spread in parts if spread is not None]
            images = torch.cat([images for images, _spread in parts])
            joined[name] = Restored(images, torch.cat(spreads) if spreads else None)
        return joined

    def wanted(self, victim: Victim) -> Tensor:
        """The victim's targets, then its decoys, in [0, 1] on the device."""
        images = np.concatenate([victim.targets, self.heldout.images[victim.decoy_ids]])
        return torch.from_numpy(images).to(self.device).float() / 255

    def score(
        self, victim: Victim, run: EvaluatedRun, step: str, advance: Advance
    ) -> dict[str, Arrays]:
        """Per method of `step` the best match of each row; of `plain` also what is like none."""
        dataset = self.dataset
        if step in self.further:
            dataset, runs = self.further[step]
            run = runs[run.number]
        found = read_candidates(dataset, run, self.iterations(step), self.device)
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
            best = best_matches(made.images, wanted, scores=scores)
            results[name] = arrays_of(best, made.images, wanted, scores) | _origin(found, best.row)
            if made.spread is not None:
                known = best.row >= 0
                spread = torch.full(known.shape, torch.nan, dtype=torch.float64)
                spread[known.cpu()] = made.spread.mean(dim=(1, 2)).double()[best.row[known]].cpu()
                results[name]["disagreement"] = spread.numpy()
            if name == "plain":
                results[UNLIKE] = _unlike(found, scores[:, : len(victim)])
        return results


def read_candidates(
    dataset: Dataset, run: EvaluatedRun, which: Iterations, device: str
) -> Candidates:
    """The run's reconstructions at the chosen iterations, in the order of the store.

    Raises ValueError if nothing was saved at one of them.
    """
    index = dataset.read(run.part, ["pairs/run_row", "pairs/iteration", "pairs/candidate"])
    mine = np.flatnonzero(index["pairs/run_row"] == run.row)
    if which == "last" and len(mine):
        candidate, iteration = index["pairs/candidate"][mine], index["pairs/iteration"][mine]
        latest = np.zeros(int(candidate.max()) + 1, iteration.dtype)
        np.maximum.at(latest, candidate, iteration)
        mine = mine[iteration == latest[candidate]]
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


def nowhere(n: int) -> Arrays:
    """The origin of pictures of no single candidate."""
    return {name: np.full(n, -1) for name in ORIGIN}


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
    dataset, first = bench.dataset, victim.runs[0]
    read = dataset.read(first.part, ["targets/run_row", "targets/label"])
    spec = RunSpec(
        run=first.number,
        victim=victim.number,
        root_seed=int(dataset.manifest["campaign"]["root_seed"]),
        image_ids=tuple(victim.image_ids.tolist()),
        labels=tuple(read["targets/label"][read["targets/run_row"] == first.row].tolist()),
    )
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
    return {
        SPAN: {"directions": directions.cpu().numpy(), "mean": mean.cpu().numpy()},
        ORACLE: arrays_of(best, own, wanted) | nowhere(len(wanted)),
    }


def projection_on(span: Arrays) -> Project:
    """Pictures to the nearest in a span; as they are where there is none."""
    directions, mean = (torch.from_numpy(span[name].copy()) for name in ("directions", "mean"))
    return InSpan(directions, mean).nearest if len(directions) else lambda pictures: pictures


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
    device, own = torch.device(bench.device), victim.margins
    with cpu_threads(int(dataset.manifest["campaign"]["threads"])):
        network = experiment.train_victim(spec, images, device=device, victims=kept)
    margins = network.trained.margins[0].double().cpu().numpy()
    most = MARGINS_AGREE * np.nanmax(np.abs(own), initial=0.0)
    if not np.allclose(margins, own, rtol=0, atol=most, equal_nan=True):
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
