"""Restoration or invention: of how many images does the best picture tell which one it shows?

    python -m benchmarks.restore.identification WORKSPACE... [--json FILE]

WORKSPACE is the folder of a job whose evaluation is finished. Of every method it reads the best
picture for each image and for each decoy (evaluation/cache) and compares it with all images of its
victim and all their decoys. *Identified* is the image (or decoy) that its best picture is nearer to
than to any other of them, by .05 of SSIM (image restoration paper, section 2); the *lead* is that
distance. `found` are images at a threshold that a share of the decoys exceeds. Counts among decoys
alone, in which no trained image competes, are higher: they stand beside them.

The control for invention is the picture that a method makes of the reconstruction of the next image
of the victim: a restorer that draws a plausible picture of anything scores there as well.

Ratios are sums over victims; their intervals resample victims, and take thresholds anew.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.evaluation.evaluated import PLAIN
from benchmarks.record import Claim, Measurement, decided_claims, measured, publish
from benchmarks.restore.in_span import MORE, WORSE, ratio
from benchmarks.span.speed import HIGH, LOW
from flows.generate import images_of
from flows.settings import read_recipe
from recon_core.matching import GAP, runner_up
from recon_core.metrics import ssim_matrix
from recon_core.summary import N_BOOTSTRAP, threshold_for
from storage.checkpoints import load_checkpoint
from storage.sources.load import ImageSet
from tasks.evaluation.pictures import OF_VICTIMS, run_file, victim_file
from tasks.evaluation.settings import BASELINES, PROJECTED
from tasks.page.formats import OURS
from tasks.study.statements import NotTestableError, Statement, Verdict
from tasks.workspace import Workspace

Values = npt.NDArray[np.float64]

RATES = (0.0, 0.01, 0.05)
_line = partial(measured, "restore_identification")


@dataclass(frozen=True)
class Scores:
    """Of one method, (victims, n) each: the SSIM of the best pictures of images and of decoys; how
    far it is above that with any other of them (`lead`), of decoys also among decoys alone; and the
    SSIM of images with the picture that was made of their neighbour's reconstruction."""

    ssim: Values
    decoy_ssim: Values
    lead: Values
    decoy_lead: Values
    lead_among_decoys: Values
    swapped: Values


def scores_by_method(
    workspace: Path, record: Mapping[str, Any], images: ImageSet
) -> dict[str, Scores]:
    """All methods of an evaluation. Raises ValueError for other images than it was made of, or
    several attacks on a victim, or if its cache was removed."""
    if images.content_hash != record["source"]["content_hash"]:
        raise ValueError(f"{images.name} has other images than {workspace}: its data changed")
    if record["dataset"]["attacks_per_victim"] != 1:
        raise ValueError(f"{workspace} has several attacks on a victim; this is for one")
    cache = workspace / "evaluation" / "cache"
    victims = np.array(record["targets"]["victim"])
    ids = [np.array(record[side]["image_id"]) for side in ("targets", "decoys")]
    found: dict[str, list[tuple[Values, ...]]] = {}
    for victim in np.unique(victims).tolist():
        rows = np.concatenate([of_side[victims == victim] for of_side in ids])
        wanted = torch.from_numpy(images.images[rows]).float() / 255
        for method in record["methods"]:
            stem = method.removesuffix(PROJECTED)
            for step in filter(None, (stem, stem.rpartition("_x")[0])):
                file = victim_file if step in OF_VICTIMS else run_file
                if (there := load_checkpoint(cache, file(victim, step))) is not None:
                    break
            else:
                raise ValueError(
                    f"{cache} has nothing of {method}, victim {victim}; evaluate again"
                )
            pictures = torch.from_numpy(there[0][f"{method}/picture"]).float() / 255
            found.setdefault(method, []).append(compared(pictures, wanted))
    return {
        method: Scores(*(np.stack(column) for column in zip(*of_victims, strict=True)))
        for method, of_victims in found.items()
    }


def compared(pictures: torch.Tensor, wanted: torch.Tensor) -> tuple[Values, ...]:
    """Columns of `Scores`, from the best pictures of a victim's images and then of its decoys."""
    n = len(wanted) // 2
    scores = ssim_matrix(pictures, wanted)
    rows, own = torch.arange(2 * n), scores.diagonal()
    lead = own - runner_up(scores, rows, torch.ones(2 * n, dtype=torch.bool))
    alone = own - runner_up(scores, rows, rows < n)
    swapped = scores[(rows[:n] + 1) % n, rows[:n]]
    columns = (own[:n], own[n:], lead[:n], lead[n:], alone[n:], swapped)
    return tuple(column.double().numpy() for column in columns)


def lines(name: str, found: Mapping[str, Scores], *, threshold: float) -> Iterator[Measurement]:
    """The measurements of a job called `name`; a mean below 0 counts as 0, a measurement being a
    size."""
    before = found[PLAIN]
    n_victims, n = before.ssim.shape
    of = f"of {n_victims * n}"
    for method, scores in found.items():
        line = partial(_line, f"{name}, {method}", repeats=n_victims)
        numbers: dict[str, Any] = {
            f"good {of}": (scores.ssim > threshold).sum(),
            f"good decoys {of}": (scores.decoy_ssim > threshold).sum(),
            f"good {of}, pictures of the next image": (scores.swapped > threshold).sum(),
            "mean SSIM": max(0.0, scores.ssim.mean()),
            "mean SSIM of decoys": max(0.0, scores.decoy_ssim.mean()),
            "mean SSIM, pictures of the next image": max(0.0, scores.swapped.mean()),
            f"identified {of}": (scores.lead >= GAP).sum(),
            f"identified decoys {of}": (scores.decoy_lead >= GAP).sum(),
            f"identified decoys {of}, among decoys alone": (scores.lead_among_decoys >= GAP).sum(),
        }
        for rate in RATES:
            for what in ("lead", "ssim"):
                count = _found(scores, np.arange(n_victims), what=what, rate=rate)
                numbers[f"found {of} by {what} at {rate:.0%} false positives"] = count
        numbers[f"share worse by {WORSE:g}"] = (scores.ssim < before.ssim - WORSE).mean()
        for unit, value in numbers.items():
            yield line(float(value), unit)
        if method != PLAIN:
            yield from _ratios(line, scores, before)


IDENTIFIED = "identified, over the attack alone"
FOUND = "found by lead at 1% false positives, over the attack alone"
BEFORE_ANY = "found by lead at 0% false positives, over the attack alone"
COMMAND = "python -m benchmarks.restore.identification"
Lines = Mapping[str, Mapping[str, float]]
"""Values by method and unit, of one job."""


def _best(found: Lines, *, projected: bool = False) -> str:
    """The trained restorer that identifies most images."""
    untrained = (*BASELINES, *OF_VICTIMS)
    names = [
        name
        for name in found
        if name.endswith(PROJECTED) == projected
        and not name.startswith(PLAIN)
        and name.removesuffix(PROJECTED) not in untrained
    ]
    if not names:
        raise NotTestableError("no trained restorer was evaluated" + projected * " in the span")
    return max(names, key=lambda name: _count(found, name, "identified"))


def _count(found: Lines, name: str, start: str) -> float:
    """The value whose unit is `start` of so many."""
    return next(v for unit, v in found[name].items() if re.fullmatch(rf"{start} of \d+", unit))


def _rises(found: Lines, unit: str, *, projected: bool = False) -> Verdict:
    name = _best(found, projected=projected)
    words, verdict = ratio(found[name], unit)
    counts = [
        [_count(found, m, f"identified{of}") for m in (PLAIN, name)] for of in ("", " decoys")
    ]
    (before, after), (lucky, luckier) = counts
    counted = f"identified {before:g} -> {after:g}, decoys {lucky:g} -> {luckier:g}"
    return f"{name}: {unit} {words}; {counted}", verdict


def _no_more_decoys(found: Lines, *, projected: bool) -> Verdict:
    name = _best(found, projected=projected)
    start = "identified decoys"
    before, after = (_count(found, method, start) for method in (PLAIN, name))
    return f"{name}: {before:g} -> {after:g} decoys identified", after <= before


_of_ours = partial(
    Statement[Lines],
    where=f"{OURS}; beside section 5.1.1",
    theirs="not claimed; no decoy was scored",
)
STATEMENTS: tuple[Statement[Lines], ...] = (
    _of_ours(
        claim="The best trained restorer's pictures tell apart more of the training images than "
        "the attack's",
        rule=MORE.format("identified images, after over before,"),
        check=partial(_rises, unit=IDENTIFIED),
    ),
    _of_ours(
        claim="... at equal false positives, too",
        rule=MORE.format("images whose lead 1 % of the decoys exceed, after over before,"),
        check=partial(_rises, unit=FOUND),
    ),
    _of_ours(
        claim="... without telling more decoys apart",
        rule="as many decoys are identified as before, or fewer",
        check=partial(_no_more_decoys, projected=False),
    ),
    _of_ours(
        claim="Put back into the victim's span, restored pictures tell apart more of the training "
        "images than the attack's at equal false positives",
        rule=MORE.format("images whose lead 1 % of the decoys exceed, after over before,"),
        check=partial(_rises, unit=FOUND, projected=True),
    ),
    _of_ours(
        claim="... before the first decoy (in the span)",
        rule=MORE.format("images whose lead no decoy reaches, after over before,"),
        check=partial(_rises, unit=BEFORE_ANY, projected=True),
    ),
    _of_ours(
        claim="... without telling more decoys apart (in the span)",
        rule="as many decoys are identified as before, or fewer",
        check=partial(_no_more_decoys, projected=True),
    ),
)


def identification_claims(measurements: Sequence[Measurement], *, name: str) -> Iterator[Claim]:
    """Questions of ours on every job in a file of this benchmark; `name` stands before our
    numbers. Raises ValueError if nothing was measured."""
    jobs: dict[str, dict[str, dict[str, float]]] = {}
    for m in measurements:
        job, _comma, method = m.case.rpartition(", ")
        jobs.setdefault(job, {}).setdefault(method, {})[m.unit] = m.value
    if not jobs:
        raise ValueError(f"{name} has no measurement; run {COMMAND} WORKSPACE")
    for job, found in jobs.items():
        yield from decided_claims(
            STATEMENTS,
            found,
            name=f"{name}: {job}, ",
            command=f"{COMMAND} {job}",
            seconds=None,
            machine=measurements[0].hardware,
        )


def _ratios(line: partial[Measurement], scores: Scores, before: Scores) -> Iterator[Measurement]:
    """Counts over those of the attack alone, with intervals over victims."""
    n = len(scores.ssim)
    drawn = np.random.default_rng(0).integers(n, size=(N_BOOTSTRAP, n))
    counts: dict[str, Callable[[Scores, npt.NDArray[np.int64]], float]] = {
        "identified": lambda scores, rows: float((scores.lead[rows] >= GAP).sum())
    }
    for what, rate in (("lead", 0.0), ("lead", 0.01), ("ssim", 0.01)):
        unit = f"found by {what} at {rate:.0%} false positives"
        counts[unit] = partial(_found, what=what, rate=rate)
    for unit, count in counts.items():
        under = max(count(before, np.arange(n)), 1.0)
        ratios = [count(scores, rows) / max(count(before, rows), 1.0) for rows in drawn]
        yield line(count(scores, np.arange(n)) / under, f"{unit}, over the attack alone")
        for end, tail in ((LOW, 0.025), (HIGH, 0.975)):
            value = float(np.quantile(ratios, tail))
            yield line(value, f"{unit}, over the attack alone, {end}")


def _found(scores: Scores, rows: npt.NDArray[np.int64], *, what: str, rate: float) -> float:
    """Images of the victims in `rows` above the threshold that at most `rate` of their decoys
    exceed."""
    ours, theirs = (getattr(scores, name)[rows] for name in (what, f"decoy_{what}"))
    return float((ours > threshold_for(theirs.ravel(), rate)).sum())


def measure(workspaces: Sequence[Path]) -> Iterator[Measurement]:
    """The measurements of finished jobs."""
    for workspace in workspaces:
        recipe = read_recipe(Workspace(workspace))
        if recipe is None:
            raise SystemExit(f"{workspace} is no job's folder: it has no recipe.json")
        record = json.loads((workspace / "evaluation" / "evaluation.json").read_text())
        found = scores_by_method(workspace, record, images_of(recipe, "heldout", workspace))
        threshold = float(record["settings"]["good_threshold"])
        yield from lines(workspace.name, found, threshold=threshold)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workspaces", type=Path, nargs="+", metavar="WORKSPACE")
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    options = parser.parse_args(argv)
    publish(measure(options.workspaces), options.json)


if __name__ == "__main__":
    main()
