"""Membership inference: which images of a pool a victim was trained on, told by its confidence.

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

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Float64, Shaped
from torch import Tensor

from recon_core.victims.losses import Kind, Loss

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
    _check(member)
    finite = confidence.isfinite().all(1)
    c = confidence.double().masked_fill(~finite.unsqueeze(1), 0.0)
    scores = torch.full_like(c, -torch.inf)
    for victim in finite.nonzero().squeeze(1).tolist():
        shadows = _others(member, victim) & finite.unsqueeze(1)
        everyone = finite.unsqueeze(1).repeat(1, member.shape[1])
        everyone[victim] = False
        variances = [_variance(c, everyone & side) for side in (member, ~member)]
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


def _check(member: Bool[Tensor, "v n"]) -> None:
    for victim in range(len(member)):
        others = _others(member, victim)
        lonely = ~((others & member).any(0) & (others & ~member).any(0))
        if bool(lonely.any()):
            raise ValueError(
                f"of {len(member)} victims, with victim {victim} and its complement left out, "
                f"image {int(lonely.nonzero()[0])} is in none or in all of the others; use at "
                "least 4 victims in complementary pairs"
            )


def _others(member: Bool[Tensor, "v n"], victim: int) -> Bool[Tensor, "v n"]:
    """True in the rows of all but a victim and its complements."""
    rows = (member != ~member[victim]).any(1)
    rows[victim] = False
    return rows.unsqueeze(1).expand_as(member)


def _mean(c: Float64[Tensor, "v n"], chosen: Bool[Tensor, "v n"]) -> Float64[Tensor, " n"]:
    """Each image's mean over the victims chosen for it; NaN without any."""
    return torch.where(chosen, c, 0.0).sum(0) / chosen.sum(0)


def _variance(c: Float64[Tensor, "v n"], chosen: Bool[Tensor, "v n"]) -> float | None:
    """The variance about each image's own mean, over all images; None if none has two values."""
    freedom = int((chosen.sum(0) - 1).clamp_min(0).sum())
    if not freedom:
        return None
    squares = (c - _mean(c, chosen)).square()
    return float(torch.where(chosen, squares, 0.0).sum()) / freedom
