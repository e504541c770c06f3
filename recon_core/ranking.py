"""Ranking of runs and candidates without the training images.

Runs are ranked by how well they solved the KKT condition, candidates by *agreement*: a picture that
other attacks on the same victim arrive at as well belongs to the victim and not to the start. With
a single attack, by *consistency* over its saved iterations. `clusters` shows every picture once.
None of it is from a paper, and it proves nothing: spurious stationary points come back from other
starts too. On two CIFAR-10 victims a good candidate ranked above a bad one with a chance of .82
between settings and .69 between starts with 20 training images, .66 and .54 with 100.

Give *raw* candidates x: pictures share the victim's mean image, and so agree whatever they show.
Scores are correlations (`ncc`), in [-1, 1], higher is more alike. A picture with a NaN or infinite
pixel has the score -1 and no cluster, and counts for nobody. Ties go to the lowest row. On CUDA
keep TF32 off, or lose four digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Float32, Int
from scipy import sparse
from torch import Tensor

from recon_core.matching import WORST_SCORE
from recon_core.metrics import unit_vectors

ROWS = 512

DIGITS = 5
"""Decimals of mean scores that decide an order; what differs later is rounding, so a tie."""


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """Groups of candidates that are one picture, the best supported first.

    `label` is each candidate's group, -1 for none. Per group: `representative`, the row of the
    candidate that every other member is like; how many different attacks and how many candidates
    its members are; and `cohesion`, the mean score of the others with the representative (-1 if
    it is alone).
    """

    label: Int[Tensor, " p"]
    representative: Int[Tensor, " g"]
    n_attacks: Int[Tensor, " g"]
    n_members: Int[Tensor, " g"]
    cohesion: Float[Tensor, " g"]


def rank_runs(residual: Float[Tensor, " r"]) -> Int[Tensor, " r"]:
    """Rows of the runs, best first: the lowest relative KKT residual among attacks with the same
    number of candidates; NaN and infinity last."""
    return residual.where(residual.isfinite(), torch.inf).argsort(stable=True)


def agreement(
    pictures: Float[Tensor, "p c h w"], attack: Int[Tensor, " p"]
) -> Float32[Tensor, " p"]:
    """Mean score of each candidate's best match in every other attack on the same victim.

    `attack` says which attack a candidate is from. Attacks without a finite picture do not count;
    -1 where there is no other. Time grows with p^2: p = 4,400 at 32x32 takes seconds.
    """
    _check(pictures, attack)
    if len(pictures) == 0:
        return pictures.new_zeros(0, dtype=torch.float32)
    names, own = attack.unique(return_inverse=True)
    match = torch.full((len(pictures), len(names)), -torch.inf, device=pictures.device)
    for rows, columns, values in _upper_blocks(pictures):
        usable = values.where(values.isfinite(), -torch.inf)
        match[rows].scatter_reduce_(1, own[columns].expand_as(usable), usable, "amax")
        match[columns].scatter_reduce_(1, own[rows].expand_as(usable.T), usable.T, "amax")
    match.scatter_(1, own[:, None], -torch.inf)
    offered = match.isfinite()
    mean = match.where(offered, 0.0).sum(dim=1) / offered.sum(dim=1)
    return mean.where(offered.any(dim=1), WORST_SCORE)


def consistency(saved: Float[Tensor, "s p c h w"]) -> Float32[Tensor, " p"]:
    """Each candidate's mean score between its last saved iteration and every earlier one.

    For a single attack, where `agreement` has nothing to compare with. Weak evidence: mixtures
    converge early too, and a candidate that never left its start is consistent. Raises ValueError
    for fewer than two saved iterations.
    """
    if len(saved) < 2:
        raise ValueError(
            f"{len(saved)} saved iteration(s) cannot be consistent; save at least two, "
            "e.g. save_at=(1400, 2400, 4100)"
        )
    last = unit_vectors(saved[-1])
    each = torch.stack([(unit_vectors(x) * last).sum(dim=1).float() for x in saved[:-1]])
    mean = each.mean(dim=0)
    return mean.where(mean.isfinite(), WORST_SCORE).clamp(-1.0, 1.0)


def clusters(
    pictures: Float[Tensor, "p c h w"],
    attack: Int[Tensor, " p"],
    *,
    threshold: float = 0.8,
) -> Clusters:
    """Groups of candidates whose score with the group's representative is at least `threshold`.

    Greedy: the candidate that most attacks agree with (then most candidates, then most closely)
    takes everything like it; the next one what is left. Groups are ordered by the number of
    attacks, of members, by cohesion, and by representative. A single attack has `attack` all 0.
    """
    _check(pictures, attack)
    if not 0 < threshold < 1:
        raise ValueError(f"threshold={threshold} must be between 0 and 1; .8 suits correlations")
    alike = _alike(pictures, threshold)
    names, of_attack = np.unique(attack.cpu().numpy(), return_inverse=True)
    finite = pictures.isfinite().flatten(1).all(dim=1).cpu().numpy()
    label = np.full(len(pictures), -1, np.int64)
    groups: list[tuple[int, int, float, int]] = []
    for seed in _by_support(alike, of_attack, len(names)):
        if label[seed] >= 0 or not finite[seed]:
            continue
        row = slice(alike.indptr[seed], alike.indptr[seed + 1])
        free = label[alike.indices[row]] < 0
        members = np.append(alike.indices[row][free], seed)
        label[members] = len(groups)
        cohesion = float(alike.data[row][free].mean()) if free.any() else WORST_SCORE
        groups.append((len(np.unique(of_attack[members])), len(members), cohesion, int(seed)))
    table = np.array(groups, np.float64).reshape(-1, 4)
    order = np.lexsort((table[:, 3], -table[:, 2].round(DIGITS), -table[:, 1], -table[:, 0]))
    place = np.full(len(groups) + 1, -1, np.int64)  # the last one is where label -1 points
    place[order] = np.arange(len(order))
    n_attacks, n_members, cohesions, seeds = torch.from_numpy(table[order].T).to(pictures.device)
    return Clusters(
        label=torch.from_numpy(place[label]).to(pictures.device),
        representative=seeds.long(),
        n_attacks=n_attacks.long(),
        n_members=n_members.long(),
        cohesion=cohesions.float(),
    )


def _upper_blocks(
    pictures: Float[Tensor, "p c h w"],
) -> Iterator[tuple[slice, slice, Float32[Tensor, "rows columns"]]]:
    """The scores of all pairs i <= j, in blocks of rows with all columns from the first row on."""
    directions = torch.cat([unit_vectors(b).float() for b in pictures.split(ROWS)])
    for start in range(0, len(pictures), ROWS):
        rows, columns = slice(start, start + ROWS), slice(start, None)
        yield rows, columns, (directions[rows] @ directions[columns].T).clamp(-1.0, 1.0)


def _alike(pictures: Float[Tensor, "p c h w"], threshold: float) -> sparse.csr_array:
    """The symmetric (p, p) matrix of scores that are at least `threshold`, without its diagonal."""
    first, second, scores = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0)]
    for rows, _, values in _upper_blocks(pictures):
        i, j = torch.triu(values >= threshold, diagonal=1).nonzero(as_tuple=True)
        first.append(i.cpu().numpy() + rows.start)
        second.append(j.cpu().numpy() + rows.start)
        scores.append(values[i, j].double().cpu().numpy())
    upper = (np.concatenate(first), np.concatenate(second))
    shape = (len(pictures), len(pictures))
    one_way = sparse.coo_array((np.concatenate(scores), upper), shape=shape).tocsr()
    return one_way + one_way.T


def _by_support(
    alike: sparse.csr_array, of_attack: npt.NDArray[np.int64], n_attacks: int
) -> npt.NDArray[np.int64]:
    """Rows by how many attacks have something like them, then how many candidates, how closely."""
    n = len(of_attack)
    member = sparse.csr_array((np.ones(n), (np.arange(n), of_attack)), shape=(n, n_attacks))
    reach = np.diff((member + alike @ member).tocsr().indptr)
    n_near = np.diff(alike.indptr)
    closeness = alike.sum(axis=1) / np.maximum(n_near, 1)
    return np.lexsort((-closeness.round(DIGITS), -n_near, -reach))


def _check(pictures: Tensor, attack: Tensor) -> None:
    if attack.shape != (len(pictures),):
        raise ValueError(
            f"attack has shape {tuple(attack.shape)} for {len(pictures)} pictures; "
            "say of each candidate which attack it is from"
        )
