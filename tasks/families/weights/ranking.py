"""The pictures that attacks brought back, in the order in which an attacker would look at them.

Pictures that several attacks with different settings arrive at belong to the network and not to the
start (`recon_core.ranking`): candidates are grouped, groups are ordered by how many attacks are in
them, after a single attack by how early their picture looked as it does at the end. The span
attack's pictures are ordered by how far its sources can be trusted, and by how many attacks found
them. No original is used; where originals are known, `judged` says how well the order does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from recon_core.criteria import images_found, rank_correlation
from recon_core.matching import fit_to_range, scaled_to_range
from recon_core.metrics import SSIMConvention, ssim_matrix
from recon_core.ranking import agreement, clusters, consistency, rank_runs
from tasks.attack_file.comparison import MAX_PAIRS
from tasks.attack_file.pictures import Shape
from tasks.families.weights.cache import AttackRun, Candidates, read_candidates
from tasks.families.weights.inputs import GREY

GOOD = 0.4
"""SSIM above which a match is called good (Buzaglo et al. 2023)."""
SAME_PICTURE = 0.7
"""Correlation above which two candidates are one picture; of .6 to .9 it found most images among
the first twenty (six attacks with drawn settings on a victim of 20 CIFAR images)."""
MAX_RANKED = 6000
"""Candidates that are compared with each other: those of the attacks with the lowest residuals."""
FALSE_SHARES = (0.0, 0.01, 0.05)
"""Shares of false pictures at which the images in the head of a ranking are counted."""


@dataclass(frozen=True)
class Ranked:
    """One picture, best supported first: a group of candidates and the one that stands for it.

    `n_attacks` of the ranked attacks have it, in `n_members` candidates. `agreement` is the mean
    correlation with its best match in each other attack, or, after a single attack, the
    consistency over its iterations, or the trust in a source of the span attack. `label` is -1 or
    +1, a class, or None under regression. `nearest` and `ssim`: the training image most like it, if
    known; `as_negative`: the SSIM of its negative, where that is more like one.
    """

    attack: int
    candidate: int
    label: int | None
    n_attacks: int
    n_members: int
    agreement: float
    lam: float | None
    x: Float[Tensor, "c h w"]
    picture: Float[Tensor, "c h w"]
    nearest: int | None = None
    ssim: float | None = None
    as_negative: float | None = None


@dataclass(frozen=True)
class Found:
    """Quality of the ranking, as the training images tell it. `spearman`: between the order and the
    best SSIM with any of them. `n_false` of all pictures are like none. `n_found`: training images
    at each of `FALSE_SHARES` (`recon_core.criteria.images_found`)."""

    spearman: float | None
    n_false: int
    n_found: tuple[int, ...]


def to_pictures(x: Float[Tensor, "p c h w"], mean: Tensor | None) -> Float[Tensor, "p c h w"]:
    """Raw candidates as pictures in [0, 1]: as far from the mean as they can go (image restoration
    paper, section 5.1), grey where it is unknown; where nothing was subtracted in training,
    as bright as they can be."""
    if mean is None:
        return fit_to_range(x, torch.full(x.shape[1:], GREY, dtype=x.dtype))
    if not bool(mean.any()):
        return scaled_to_range(x)
    return fit_to_range(x, mean)


class SavedCandidates:
    """The attacks' candidates at the last saved iteration, one attack in memory at a time.

    With `signs`, each is followed, m rows below, by its negative.
    """

    def __init__(
        self,
        cache: Path,
        runs: Sequence[AttackRun],
        shape: Shape,
        std: Tensor | float,
        *,
        signs: bool,
    ) -> None:
        self.cache, self.runs, self.shape, self.std = cache, runs, shape, std
        self.signs = signs

    def saved(self, number: int) -> tuple[Float[Tensor, "s m c h w"], Candidates]:
        """x at every saved iteration, times std and so in units of pictures, in float32, and all
        that was saved."""
        found = read_candidates(self.cache, number)
        return found.x.float().unflatten(-1, self.shape) * self.std, found

    def __iter__(self) -> Iterator[tuple[int, Float[Tensor, "m c h w"]]]:
        for run in self.runs:
            x = self.saved(run.number)[0][-1]
            yield run.number, torch.cat([x, -x]) if self.signs else x


def rank(
    last: SavedCandidates, labels: Sequence[int] | None, mean: Tensor | None
) -> tuple[list[Ranked], int]:
    """All different pictures by support, and the number of attacks compared."""
    residuals = [run.residual if run.residual is not None else torch.inf for run in last.runs]
    order = [last.runs[i].number for i in rank_runs(torch.tensor(residuals)).tolist()]
    n_candidates = last.saved(order[0])[0].shape[1]
    chosen = order[: max(1, MAX_RANKED // n_candidates)]
    read = [last.saved(number) for number in chosen]
    x = torch.cat([saved[-1] for saved, _found in read])
    lam = torch.cat([_numbers(found.lam) for _saved, found in read])
    attack = torch.tensor(chosen).repeat_interleave(n_candidates)
    groups = clusters(x, attack, threshold=SAME_PICTURE)
    rows = groups.representative
    place = torch.arange(len(rows))
    if len(chosen) > 1:
        support = agreement(x, attack)
    else:
        saved = read[0][0]
        support = consistency(saved) if len(saved) > 1 else groups.cohesion.new_zeros(len(x))
        place = support[rows].argsort(descending=True, stable=True)
    label = None if labels is None else torch.tensor(labels).repeat(len(chosen))
    counts = groups.n_attacks, groups.n_members
    ranked = _listed(
        place, rows, x=x, mean=mean, attack=attack, label=label, counts=counts, support=support,
        lam=lam,
    )  # fmt: skip
    return ranked, len(chosen)


def rank_sources(last: SavedCandidates, mean: Tensor | None) -> tuple[list[Ranked], int]:
    """The span attack's pictures by trust and by the share of attacks that found them."""
    read = [(run.number, *last.saved(run.number)) for run in last.runs]
    n_candidates = read[0][1].shape[1]
    read = read[: max(1, MAX_RANKED // n_candidates)]
    x = torch.cat([saved[-1] for _number, saved, _found in read])
    trust = torch.cat([_numbers(found.trust) for _number, _saved, found in read])
    label = torch.cat([_numbers(found.label) for _number, _saved, found in read])
    attack = torch.tensor([number for number, _saved, _found in read])
    attack = attack.repeat_interleave(n_candidates)
    rows, support = torch.arange(len(x)), trust
    n_attacks = n_members = torch.ones(len(x), dtype=torch.int64)
    if len(read) > 1:
        groups, support = clusters(x, attack, threshold=SAME_PICTURE), agreement(x, attack)
        rows, n_attacks, n_members = groups.representative, groups.n_attacks, groups.n_members
    place = (trust[rows] + n_attacks / len(read)).argsort(descending=True, stable=True)
    counts = n_attacks, n_members
    ranked = _listed(
        place, rows, x=x, mean=mean, attack=attack, label=label, counts=counts, support=support,
        lam=None,
    )  # fmt: skip
    return ranked, len(read)


def _listed(
    place: Int64[Tensor, " p"],
    rows: Int64[Tensor, " p"],
    *,
    x: Float[Tensor, "m c h w"],
    mean: Tensor | None,
    attack: Int64[Tensor, " m"],
    label: Tensor | None,
    counts: tuple[Tensor, Tensor],
    support: Float[Tensor, " m"],
    lam: Tensor | None,
) -> list[Ranked]:
    """Groups in the order of `place`; `rows`: the candidate that stands for each, `counts`: their
    attacks and candidates."""
    pictures, n_candidates = to_pictures(x[rows], mean), int((attack == attack[0]).sum())
    ranked = []
    for i, row in zip(place.tolist(), rows[place].tolist(), strict=True):
        one = Ranked(
            attack=int(attack[row]), candidate=row % n_candidates,
            label=None if label is None else int(label[row]), n_attacks=int(counts[0][i]),
            n_members=int(counts[1][i]), agreement=float(support[row]),
            lam=None if lam is None else float(lam[row]), x=x[row], picture=pictures[i],
        )  # fmt: skip
        ranked.append(one)
    return ranked


def judged(
    ranked: Sequence[Ranked],
    n_shown: int,
    images: Float[Tensor, "n c h w"],
    mean: Tensor | None,
    convention: SSIMConvention,
    *,
    signs: bool,
) -> tuple[list[Ranked], Found | None]:
    """Pictures that are shown, each with its nearest training image, and the order's quality."""
    whole = (1 + signs) * len(ranked) * len(images) <= MAX_PAIRS
    compared = ranked if whole else ranked[:n_shown]
    pictures = torch.stack([r.picture for r in compared])
    scores = ssim_matrix(pictures, images, convention=convention).nan_to_num(nan=-1.0)
    either = scores
    if signs:
        negatives = to_pictures(-torch.stack([r.x for r in compared]), mean)
        turned = ssim_matrix(negatives, images, convention=convention).nan_to_num(nan=-1.0)
        either = torch.maximum(scores, turned)
    best, most = scores.max(1).values, either.max(1)
    shown = [
        replace(
            r,
            nearest=int(most.indices[i]),
            ssim=float(best[i]),
            as_negative=float(most.values[i]) if most.values[i] > best[i] else None,
        )
        for i, r in enumerate(compared[:n_shown])
    ]
    if not whole:
        return shown, None
    order = -np.arange(len(ranked), dtype=np.float64)
    by_order = rank_correlation(order, most.values.double().numpy())
    n_found = images_found(either.numpy(), good=GOOD, false_shares=FALSE_SHARES)
    return shown, Found(by_order["spearman"], int((most.values <= GOOD).sum()), n_found)


def _numbers(saved: Tensor | None) -> Tensor:
    """Numbers that this kind of attack saves with its candidates."""
    assert saved is not None
    return saved.float() if saved.is_floating_point() else saved
