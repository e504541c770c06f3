"""Numbers of an audit: how much V victims leak of a pool of n images, and how sure that is.

Every victim gives every image of the pool a score, of a picture or of membership. Its *members* are
what it was trained on; its *decoys*, the rest, show what scores are worth that nothing leaked into.
Victims differ, and images of one victim share its fate, so that intervals speak of the next victim:
they are unions of several, which makes them too wide rather than too narrow.

Membership inference: which images of a pool a victim was trained on, told by its confidence.

V victims share a pool of n images, of which each was trained on some. The loss attack (Yeom et al.
2018, "Privacy risk in machine learning") calls the images with the highest `confidence` members.
The likelihood ratio attack (Carlini et al. 2022, "Membership inference attacks from first
principles", section V: LiRA, online) sees that some images are easier than others: an image's
confidence is held against that of networks trained with it and that of networks trained without.

Here the victims are each other's shadow networks, so that none has to be trained for the attack
alone. Trained on complementary halves of the pool (`complementary_halves`), every image is in half
of them. Of such a pair, one is in where the other is out: with only the victim left out, the number
of shadows that have an image would tell whether the victim has it. So its complement is left out of
an image's means, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Float64, Shaped
from torch import Tensor

from recon_core.summary import N_BOOTSTRAP, TAILS, proportion_interval, t_interval, threshold_for
from recon_core.victims.losses import Kind, Loss

AT_ONCE = 1 << 22
"""Most numbers that a bootstrap holds at a time."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """A share in [0, 1] over victims: its mean, the mean's interval of 95 %, each victim's."""

    mean: float
    interval: tuple[float, float]
    each: tuple[float, ...]


def share_found(
    scores: Float64[np.ndarray, "v n"],
    member: Bool[np.ndarray, "v n"],
    *,
    rate: float,
    least: float | None = None,
) -> Share:
    """Share of its members that a victim gives away, averaged over victims: those that score above
    the lowest threshold that at most the share `rate`, in [0, 1), of all victims' decoys exceeds,
    and above `least`. Both strictly; a score of NaN or -inf is not found.

    The interval is the union of four: Student's over the victims' shares; the exact one over all
    images (Clopper and Pearson 1934), which knows that shares that are all 0 are not certain; the
    same over the fewer independent images that a spread between victims leaves (Korn and Graubard
    1998), as where a rare victim gives away much Student's is too short; and an expanded percentile
    bootstrap over victims (Hesterberg 2015) that draws the threshold anew. It cannot see what no
    victim shows: of a share of .02 that a rare victim gives away almost whole, twelve victims tell
    too little (simulated: 79 % of such intervals cover it). One victim has the exact one alone,
    which speaks of its images and not of the next victim. Raises ValueError for a rate out of
    range, without decoys, and for a victim without members.
    """
    scores = np.where(np.isnan(scores), -np.inf, scores)
    threshold = threshold_for(scores[~member], rate)
    found = share_of(scores > (threshold if least is None else max(threshold, least)), member)
    if len(scores) == 1:
        return found
    low, high = _bootstrap(scores, member, rate=rate, least=least)
    return replace(found, interval=(max(0.0, min(found.interval[0], low)),
                                    min(1.0, max(found.interval[1], high))))  # fmt: skip


def share_of(hits: Bool[np.ndarray, "v n"], member: Bool[np.ndarray, "v n"]) -> Share:
    """Share of its members that are hits, averaged over victims, with the intervals of
    `share_found` but for the bootstrap. Raises ValueError for a victim without members."""
    counts, n_hits = member.sum(axis=1), (hits & member).sum(axis=1)
    if not len(member) or not counts.all():
        raise ValueError(
            f"victims have {counts.tolist()} members; a share needs one or more victims, each with "
            "at least one member"
        )
    each = n_hits / counts
    intervals = [proportion_interval(int(n_hits.sum()), int(counts.sum()))]
    if len(each) > 1:
        intervals += [t_interval(each.tolist()), _effective_interval(each, int(counts.sum()))]
    low, high = (min(i[0] for i in intervals), max(i[1] for i in intervals))
    return Share(
        mean=float(each.mean()),
        interval=(max(0.0, low), min(1.0, high)),
        each=tuple(each.tolist()),
    )


def paired_difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Mean of a - b over victims that are the same, or have the same images, on both sides, and
    Student's interval of 95 %. Raises ValueError unless there are as many, two or more, all
    finite."""
    if len(a) != len(b) or len(a) < 2 or not np.isfinite([*a, *b]).all():
        raise ValueError(
            f"a has {len(a)} and b {len(b)} values; expected as many, two or more, all of them "
            "finite, for pairs of victims"
        )
    difference = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    return float(difference.mean()), t_interval(difference.tolist())


def exchangeable_p(
    scores: Float64[np.ndarray, "v n"],
    member: Bool[np.ndarray, "v n"],
    *,
    n_draws: int = 999,
    generator: np.random.Generator,
) -> float:
    """The p-value, in (0, 1], of "members score no higher than decoys": if nothing leaks, members
    and decoys of a victim are exchangeable.

    The statistic is the difference of the mean ranks of members and decoys among the victim's
    images, averaged over victims; equal scores share their mean rank, NaN counts as -inf. It is
    compared with that of `n_draws` permutations within every victim, (1 + number at least as high)
    / (1 + n_draws), which is exact (Phipson and Smyth 2010) where every victim's members were drawn
    by themselves, and errs on the side of no leak where they are balanced by label or the
    complement of another's. It does not hold for victims with the same members. Raises ValueError
    for n_draws < 1 and for a victim without members or without decoys.
    """
    from scipy import stats  # half a second, which a front does without

    n_members, n_decoys = member.sum(axis=1), (~member).sum(axis=1)
    if n_draws < 1 or not len(scores) or not (n_members.all() and n_decoys.all()):
        raise ValueError(
            f"n_draws={n_draws}, {n_members.tolist()} members and {n_decoys.tolist()} decoys; "
            "expected at least one draw, and of both at least one for every victim"
        )
    ranks = stats.rankdata(np.where(np.isnan(scores), -np.inf, scores), axis=1)
    weights = np.where(member, 1 / n_members[:, None], -1 / n_decoys[:, None]) / len(scores)
    observed = float(np.sum(weights * ranks))
    least = observed - 1e-9 * scores.shape[1]  # rounding makes no permutation lower than its equal
    drawn = [float((weights * generator.permuted(ranks, axis=1)).sum()) for _ in range(n_draws)]
    n_as_high: int = sum(value >= least for value in drawn)
    return (1 + n_as_high) / (1 + n_draws)


def pareto_front(leak: Sequence[float], accuracy: Sequence[float]) -> list[bool]:
    """True for a point that none beats: no other leaks as little or less and is as accurate or
    more, one of them strictly. Points that are the same do not beat each other. Raises ValueError
    unless there are as many leaks as accuracies, all finite."""
    if len(leak) != len(accuracy) or not np.isfinite([*leak, *accuracy]).all():
        raise ValueError(
            f"{len(leak)} leaks and {len(accuracy)} accuracies; expected as many, all of them "
            "finite"
        )
    points = list(zip(leak, accuracy, strict=True))
    return [
        not any(
            other_leak <= own_leak
            and other_accuracy >= own_accuracy
            and (other_leak, other_accuracy) != (own_leak, own_accuracy)
            for other_leak, other_accuracy in points
        )
        for own_leak, own_accuracy in points
    ]


def _effective_interval(each: Float64[np.ndarray, " v"], n: int) -> tuple[float, float]:
    """Exact interval with the number of independent images whose share would be as uncertain as
    that of these victims, for few victims smaller by a ratio of squared Student quantiles (Korn and
    Graubard 1998); at most n."""
    from scipy import stats  # half a second, which a front does without

    share, error = float(each.mean()), float(stats.sem(each))
    if error > 0:
        quantile, of_few = stats.t.ppf(TAILS[1], [n - 1, len(each) - 1])
        n = min(n, share * (1 - share) / error**2 * (quantile / of_few) ** 2)
    hits = share * n
    low = stats.beta.ppf(TAILS[0], hits, n - hits + 1) if hits > 0 else 0.0
    high = stats.beta.ppf(TAILS[1], hits + 1, n - hits) if hits < n else 1.0
    return float(low), float(high)


def _bootstrap(
    scores: Float64[np.ndarray, "v n"],
    member: Bool[np.ndarray, "v n"],
    *,
    rate: float,
    least: float | None,
) -> tuple[float, float]:
    """Interval of the mean share over victims that are drawn again, with their decoys: percentiles
    so far out that of normal means they are Student's interval, which plain ones fall short of with
    few victims.

    Every threshold is the score of a decoy, so that shares are looked up: decoys are sorted, the
    highest first, and a decoy of a victim that is drawn k times counts k times.
    """
    from scipy import stats  # half a second, which a front does without

    owner, _column = np.nonzero(~member)
    order = np.argsort(-scores[~member], kind="stable")
    owner, bars = owner[order], scores[~member][order]
    if least is not None:
        bars = np.maximum(bars, least)
    members = [np.sort(own[chosen]) for own, chosen in zip(scores, member, strict=True)]
    shares = np.stack([1 - np.searchsorted(own, bars, side="right") / len(own) for own in members])
    rng, n_victims = np.random.default_rng(0), len(scores)
    drawn = rng.integers(n_victims, size=(N_BOOTSTRAP, n_victims))
    times = np.stack([(drawn == victim).sum(axis=1) for victim in range(n_victims)], axis=1)
    rows = max(1, AT_ONCE // len(bars))
    means = []
    for part in np.split(times, range(rows, N_BOOTSTRAP, rows)):
        # The threshold of a draw, as `threshold_for` has it: the first decoy with more than the
        # share `rate` of the decoys drawn at it or above.
        up_to = np.cumsum(part[:, owner], axis=1)
        n_allowed = np.floor(rate * up_to[:, -1:] + 1e-9)
        thresholds = (up_to > n_allowed).argmax(axis=1)
        means.append((part * shares[:, thresholds].T).sum(axis=1) / n_victims)
    student = stats.t.ppf(TAILS[1], n_victims - 1) * np.sqrt(n_victims / (n_victims - 1))
    tail = stats.norm.sf(student)
    low, high = np.quantile(np.concatenate(means), (tail, 1 - tail))
    return float(low), float(high)


LEAST_VARIANCE = 1e-12
"""Variance of confidences that are all the same."""


def confidence(
    phi: Float[Tensor, "r n c"], y: Shaped[Tensor, "r n"], kind: Kind
) -> Float[Tensor, "r n"]:
    """Confidence of R victims in the labels of their n images (Carlini et al. 2022, section IV-C).

    With probabilities it is log(p / (1 - p)) of the label's, from the outputs `phi`, which do not
    round to 0 or 1: y phi for "bce", phi_y - log(sum over the others of exp(phi)) for "ce", any
    real number. The losses of regression have none, and the confidence is -(phi - y)^2, at most 0,
    which is ours. Labels are those of `losses.Loss`; raises ValueError for others.
    """
    Loss(kind=kind).check(y, phi.shape[2])
    if kind == "bce":
        return y * phi.squeeze(2)
    if kind == "ce":
        own = y.unsqueeze(2)
        others = phi.scatter(2, own, -torch.inf).logsumexp(2)
        return phi.gather(2, own).squeeze(2) - others
    return -(phi.squeeze(2) - y).square()


def likelihood_ratio(
    confidence: Float[Tensor, "v n"], member: Bool[Tensor, "v n"]
) -> Float64[Tensor, "v n"]:
    """log N(c; mu_in, s_in^2) - log N(c; mu_out, s_out^2) of every victim's confidence c in every
    image: higher is more of a member.

    Means are over other victims that have the image (in) and that do not (out), without the victim
    and, if there is one, the victim with exactly the other images. Variances, about those of their
    own side's means, are shared by all images, as Carlini et al. advise for few shadows, and leave
    out the victim alone; one that no image has two values for is that of the other side, or 1.

    A victim with a confidence that is not finite has diverged: it is nobody's shadow, and its own
    scores are -inf, as are those of images that for lack of it have no shadow on a side. Raises
    ValueError if, diverged or not, an image has no other victim in or none out.
    """
    for victim in range(len(member)):
        others = _others(member, victim)
        lonely = ~((others & member).any(0) & (others & ~member).any(0))
        if bool(lonely.any()):
            raise ValueError(
                f"of {len(member)} victims, with victim {victim} and its complement left out, "
                f"image {int(lonely.nonzero()[0])} is in none or in all of the others; use at "
                "least 4 victims in complementary pairs"
            )
    finite = confidence.isfinite().all(1)
    c = confidence.double().masked_fill(~finite.unsqueeze(1), 0.0)
    scores = torch.full_like(c, -torch.inf)
    for victim in finite.nonzero().squeeze(1).tolist():
        shadows = _others(member, victim) & finite.unsqueeze(1)
        everyone = finite.unsqueeze(1).repeat(1, member.shape[1])
        everyone[victim] = False
        variances: list[float | None] = []
        for chosen in (everyone & member, everyone & ~member):
            freedom = int((chosen.sum(0) - 1).clamp_min(0).sum())
            squares = torch.where(chosen, (c - _mean(c, chosen)).square(), 0.0)
            variances.append(float(squares.sum()) / freedom if freedom else None)
        known = [variance for variance in variances if variance is not None] or [1.0]
        logs = []
        for side, variance in zip((member, ~member), variances, strict=True):
            spread = max(LEAST_VARIANCE, known[0] if variance is None else variance)
            distance = c[victim] - _mean(c, shadows & side)
            logs.append(-(distance.square() / spread + float(np.log(spread))) / 2)
        scores[victim] = (logs[0] - logs[1]).nan_to_num(nan=-torch.inf)
    return scores


def complementary_halves(
    labels: npt.NDArray[np.int64], n_victims: int, generator: torch.Generator
) -> Bool[Tensor, "v n"]:
    """Images that each of `n_victims` is trained on, by pairs of victims: a random half of the
    images of every label, drawn from `generator` on the CPU, for victim 2k, the other half for
    2k + 1. `labels`: (n,). Raises ValueError for an odd number of victims or of a label's
    images."""
    if n_victims < 2 or n_victims % 2:
        raise ValueError(
            f"n_victims={n_victims} must be even and at least 2, as victims come in pairs with "
            "complementary halves of the images"
        )
    values, counts = np.unique(labels, return_counts=True)
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        if count % 2:
            raise ValueError(
                f"label {value} has {count} images, which cannot be halved; leave out or add one"
            )
    member = torch.zeros(n_victims, len(labels), dtype=torch.bool)
    for victim in range(0, n_victims, 2):
        for value in values.tolist():
            rows = torch.from_numpy(np.flatnonzero(labels == value))
            order = torch.randperm(len(rows), generator=generator)
            member[victim, rows[order[: len(rows) // 2]]] = True
        member[victim + 1] = ~member[victim]
    return member


def _others(member: Bool[Tensor, "v n"], victim: int) -> Bool[Tensor, "v n"]:
    """True in the rows of all but a victim and its complements."""
    rows = (member != ~member[victim]).any(1)
    rows[victim] = False
    return rows.unsqueeze(1).expand_as(member)


def _mean(c: Float64[Tensor, "v n"], chosen: Bool[Tensor, "v n"]) -> Float64[Tensor, " n"]:
    """Each image's mean over the victims chosen for it; NaN without any."""
    return torch.where(chosen, c, 0.0).sum(0) / chosen.sum(0)
