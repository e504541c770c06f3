"""What attacks brought back: ranked as an attacker could, and scored where the truth is known.

*Ranked.* Pictures that several attacks with different settings arrive at belong to the network and
not to the start (`recon_core.ranking`): candidates are grouped, groups are ordered by how many
attacks are in them, and each is shown by one candidate. After a single attack, groups are ordered
by how early their picture looked as it does at the end. No original is used.

*Scored.* With the training images at hand each takes its best match among all candidates, by SSIM,
and so do decoys, which no network saw: a count of good matches never stands without theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from recon_core.matching import fit_to_range, min_max
from recon_core.metrics import SSIMConvention, ssim_matrix, ssim_pairs
from recon_core.ncc import ncc_matrix
from recon_core.ranking import agreement, clusters, consistency, rank_runs
from tasks.attack import AttackJob, AttackRun, read_candidates
from tasks.attack_inputs import GREY, Pictures, Shape

GOOD = 0.4
"""SSIM above which a match is called good (Buzaglo et al. 2023)."""
SAME_PICTURE = 0.7
"""Correlation above which two candidates are one picture; of .6 to .9 it found most images among
the first twenty (six attacks with drawn settings on a victim of 20 CIFAR images)."""
MAX_RANKED = 6000
"""Candidates that are compared with each other: those of the attacks with the lowest residuals."""
MAX_PAIRS = 4_000_000
"""Pairs up to which SSIM is computed of all; beyond, of the nearest candidates by correlation."""
N_NEAREST = 20
MIN_WINDOW = 11


@dataclass(frozen=True)
class Ranked:
    """One picture, best supported first: a group of candidates and the one that stands for it.

    `n_attacks` of the ranked attacks have it, in `n_members` candidates. `agreement` is the mean
    correlation with its best match in each other attack, or, after a single attack, the
    consistency over its iterations. `label` is -1 or +1, a class, or None under regression.
    `nearest` and `ssim`: the training image most like it, if known.
    """

    attack: int
    candidate: int
    label: int | None
    n_attacks: int
    n_members: int
    agreement: float
    lam: float
    x: Float[Tensor, "c h w"]
    picture: Float[Tensor, "c h w"]
    nearest: int | None = None
    ssim: float | None = None


@dataclass(frozen=True)
class Matches:
    """Each given image's best match among all candidates; -1 and black where there is none."""

    ssim: Float[Tensor, " n"]
    attack: Int64[Tensor, " n"]
    candidate: Int64[Tensor, " n"]
    picture: Float[Tensor, "n c h w"]
    by_attack: dict[int, int]

    @property
    def n_good(self) -> int:
        return int((self.ssim > GOOD).sum())


@dataclass(frozen=True)
class Results:
    """Everything that is shown.

    `ranked` is the head of `n_pictures` different pictures, of which `n_agreed` came back in at
    least half of the `n_ranked_attacks` that were compared.
    """

    ranked: tuple[Ranked, ...]
    n_pictures: int
    n_agreed: int
    n_ranked_attacks: int
    truth: Matches | None
    decoys: Matches | None
    convention: SSIMConvention
    exhaustive: bool


def gather(
    job: AttackJob,
    runs: Sequence[AttackRun],
    *,
    shape: Shape,
    n_outputs: int,
    mean: Tensor | None,
    std: Tensor | None = None,
    truth: Pictures | None,
    decoys: Pictures | None,
) -> Results:
    """Rank and score what the attacks in `job.out` left at their last saved iteration.

    `std`: what the victim's inputs were divided by, (c, 1, 1) or None.
    """
    usable = [run for run in runs if run.ending == "ok"]
    last = _Candidates(job.out / "cache", usable, shape, 1.0 if std is None else std)
    convention: SSIMConvention = "gaussian11" if min(shape[1:]) >= MIN_WINDOW else "gaussian3"
    scoring = _Scoring(last, mean, convention)
    labels = _labels(job, n_outputs)
    ranked, n_compared = _rank(last, labels, mean) if usable else ([], 0)
    found = None if truth is None else scoring.matches(truth.images)
    lucky = None if decoys is None else scoring.matches(decoys.images)
    shown = ranked[: job.n_shown]
    if truth is not None and shown:
        pictures = torch.stack([r.picture for r in shown])
        best = ssim_matrix(pictures, truth.images, convention=convention).max(1)
        pairs = zip(shown, best.indices.tolist(), best.values.tolist(), strict=True)
        shown = [replace(r, nearest=row, ssim=score) for r, row, score in pairs]
    n_images = sum(len(p) for p in (truth, decoys) if p is not None)
    return Results(
        ranked=tuple(shown),
        n_pictures=len(ranked),
        n_agreed=sum(2 * r.n_attacks >= n_compared for r in ranked) if n_compared > 1 else 0,
        n_ranked_attacks=n_compared,
        truth=found,
        decoys=lucky,
        convention=convention,
        exhaustive=scoring.exhaustive(n_images),
    )


def to_pictures(x: Float[Tensor, "p c h w"], mean: Tensor | None) -> Float[Tensor, "p c h w"]:
    """Raw candidates as pictures in [0, 1].

    As far from the mean as they can go (001, section 5.1), grey where it is unknown; where nothing
    was subtracted in training, stretched to the whole range.
    """
    if mean is None:
        return fit_to_range(x, torch.full(x.shape[1:], GREY, dtype=x.dtype))
    if not bool(mean.any()):
        return min_max(x, mean)
    return fit_to_range(x, mean)


class _Candidates:
    """The attacks' candidates at the last saved iteration, one attack in memory at a time."""

    def __init__(
        self, cache: Path, runs: Sequence[AttackRun], shape: Shape, std: Tensor | float
    ) -> None:
        self.cache, self.runs, self.shape, self.std = cache, runs, shape, std

    def saved(self, number: int) -> tuple[Float[Tensor, "s m c h w"], Float[Tensor, " m"]]:
        """x at every saved iteration, times std and so in units of pictures, and lam at the end,
        in float32."""
        x, lam = read_candidates(self.cache, number)
        return x.float().unflatten(-1, self.shape) * self.std, lam.float()

    def __iter__(self) -> Iterator[tuple[int, Float[Tensor, "m c h w"]]]:
        for run in self.runs:
            yield run.number, self.saved(run.number)[0][-1]


def _rank(
    last: _Candidates, labels: Sequence[int] | None, mean: Tensor | None
) -> tuple[list[Ranked], int]:
    """All different pictures by support, and the number of attacks compared."""
    residuals = [run.residual if run.residual is not None else torch.inf for run in last.runs]
    order = [last.runs[i].number for i in rank_runs(torch.tensor(residuals)).tolist()]
    n_candidates = len(last.saved(order[0])[1])
    chosen = order[: max(1, MAX_RANKED // n_candidates)]
    read = [last.saved(number) for number in chosen]
    x = torch.cat([saved[-1] for saved, _lam in read])
    lam = torch.cat([lam for _saved, lam in read])
    attack = torch.tensor(chosen).repeat_interleave(n_candidates)
    groups = clusters(x, attack, threshold=SAME_PICTURE)
    rows = groups.representative
    if len(chosen) > 1:
        support = agreement(x, attack)
        place = list(range(len(rows)))
    else:
        saved = read[0][0]
        support = consistency(saved) if len(saved) > 1 else groups.cohesion.new_zeros(len(x))
        place = support[rows].argsort(descending=True, stable=True).tolist()
    pictures = to_pictures(x[rows], mean)
    return (
        [
            Ranked(
                attack=int(attack[rows[i]]),
                candidate=int(rows[i]) % n_candidates,
                label=None if labels is None else labels[int(rows[i]) % n_candidates],
                n_attacks=int(groups.n_attacks[i]),
                n_members=int(groups.n_members[i]),
                agreement=float(support[rows[i]]),
                lam=float(lam[rows[i]]),
                x=x[rows[i]],
                picture=pictures[i],
            )
            for i in place
        ],
        len(chosen),
    )


def _labels(job: AttackJob, n_outputs: int) -> list[int] | None:
    """What the candidates were given as labels."""
    if job.attack.condition == "regression":
        return None
    classes = job.attack.classes(n_outputs, torch.device("cpu"))
    labels = job.attack.signs(torch.zeros(())) if classes is None else classes
    return [int(label) for label in labels]


class _Scoring:
    """Best matches of given images among all candidates, attack after attack."""

    def __init__(self, last: _Candidates, mean: Tensor | None, convention: SSIMConvention) -> None:
        self.last, self.mean, self.convention = last, mean, convention
        self.n_candidates = sum(len(x) for _number, x in last)

    def exhaustive(self, n_images: int) -> bool:
        """Whether every candidate is compared with every image by SSIM."""
        return self.n_candidates * n_images <= MAX_PAIRS

    def matches(self, images: Float[Tensor, "n c h w"]) -> Matches:
        """The candidate with the highest SSIM for each image."""
        n = len(images)
        best = torch.full((n,), -1.0)
        attack, candidate = torch.full((n,), -1), torch.full((n,), -1)
        picture = torch.zeros_like(images)
        by_attack = {}
        for number, x in self.last:
            pictures = to_pictures(x, self.mean)
            score, row = self._best(pictures, images)
            by_attack[number] = int((score > GOOD).sum())
            better = score > best
            best = torch.where(better, score, best)
            attack[better], candidate[better] = number, row[better]
            picture[better] = pictures[row[better]]
        return Matches(best, attack, candidate, picture, by_attack)

    def _best(
        self, pictures: Float[Tensor, "m c h w"], images: Float[Tensor, "n c h w"]
    ) -> tuple[Float[Tensor, " n"], Int64[Tensor, " n"]]:
        """(score, row) of each image's best picture; a score that is not finite counts as -1."""
        if self.exhaustive(len(images)):
            scores = ssim_matrix(pictures, images, convention=self.convention)
            best = scores.nan_to_num(nan=-1.0).max(0)
            return best.values, best.indices
        near = ncc_matrix(pictures, images).nan_to_num(nan=torch.inf)
        rows = near.topk(min(N_NEAREST, len(pictures)), dim=0, largest=False).indices
        each = torch.stack(
            [ssim_pairs(pictures[row], images, convention=self.convention) for row in rows]
        )
        best = each.nan_to_num(nan=-1.0).max(0)
        return best.values, rows.gather(0, best.indices[None]).squeeze(0)


def record_of(results: Results, truth: Pictures | None, decoys: Pictures | None) -> dict[str, Any]:
    """The results as JSON: ranking and scores, without the pictures."""
    record: dict[str, Any] = {
        "ranking": {
            "n_attacks_compared": results.n_ranked_attacks,
            "n_pictures": results.n_pictures,
            "n_agreed": results.n_agreed,
            "same_picture_above": SAME_PICTURE,
            "pictures": [
                {
                    "rank": rank,
                    "attack": r.attack,
                    "candidate": r.candidate,
                    "label": r.label,
                    "n_attacks": r.n_attacks,
                    "n_candidates": r.n_members,
                    "agreement": round(r.agreement, 6),
                    "lam": round(r.lam, 6),
                    "nearest_image": r.nearest,
                    "ssim": None if r.ssim is None else round(r.ssim, 6),
                }
                for rank, r in enumerate(results.ranked, start=1)
            ],
        },
        "scores": {"images": None, "decoys": None},
    }
    for name, found, given in (
        ("images", results.truth, truth),
        ("decoys", results.decoys, decoys),
    ):
        if found is not None and given is not None:
            record["scores"][name] = {
                "source": given.source,
                "n": len(given),
                "n_good": found.n_good,
                "mean_ssim": round(float(found.ssim.mean()), 6),
                "ssim": [round(value, 6) for value in found.ssim.tolist()],
                "attack": found.attack.tolist(),
                "candidate": found.candidate.tolist(),
            }
    record["conventions"] = {
        "good": f"SSIM above {GOOD}",
        "SSIM": "Wang et al. 2004, window 11x11, sigma 1.5"
        if results.convention == "gaussian11"
        else "window 3x3, as images are smaller than 11x11",
        "match": "each image's best candidate of all attacks, at the last saved iteration"
        + ("" if results.exhaustive else f", of the {N_NEAREST} nearest by correlation per attack"),
        "picture": "a raw candidate, as far from the mean image as [0, 1] allows",
    }
    return record
