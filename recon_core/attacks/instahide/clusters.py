"""Counts of private images that two encodings share, and groups of encodings where they are
uncertain.

The encodings of one private image are a group whose members look alike on average: grown from
pairs, then every encoding in the two groups that it is most like, until nothing changes. Groups
that hold together worst are looked for again; what explains the scores best is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int8, Int64
from torch import Tensor

from recon_core.attacks.instahide.mixing import Mixing

SAME_AT = 0.9
"""Share of pixels that one pair of private images must explain in two encodings to be in both."""


def posterior_mean(
    y: Float[Tensor, "m d"], c: Float[Tensor, "m d"], mixing: Mixing
) -> Float[Tensor, "m d"]:
    """t: what is to be expected of the private part s ~ N(0, tau^2), given y = |s + c|."""
    return y * torch.tanh(y * c / mixing.private_variance) - c


def overlaps(
    y: Float[Tensor, "m d"],
    mixing: Mixing,
    public_part: Float[Tensor, "m d"] | None = None,
) -> Float[Tensor, "m m"]:
    """0, on average, where two encodings have no private image in common, 1 where they have one.

    `public_part`: the weighted sum c of each encoding's public images, with which s = +-y - c has
    the posterior mean t = y tanh(y c / tau^2) - c and E[t_e t_f] = v_e v_f rho / tau^2, v = E[t^2],
    to first order in the correlation rho = (common images) / 2; two common images give 2. Without,
    squares are compared, corr(y_e^2, y_f^2) = rho^2, and two give 4. The diagonal means nothing.
    """
    d = y.shape[1]
    if public_part is None or mixing.k_pub == 0:
        squares = y.square() / mixing.variance - 1
        return squares @ squares.T * (mixing.variance**2 / (2 * d * mixing.wa**4))
    t = posterior_mean(y, public_part, mixing)
    t = t * (mixing.private_variance / mixing.wa / t.square().mean(1))[:, None]
    product: Tensor = t @ t.T
    return product / d


def common_images(
    y: Float[Tensor, "m d"],
    mixing: Mixing,
    public_part: Float[Tensor, "m d"] | None = None,
    scores: Float[Tensor, "m m"] | None = None,
) -> Int8[Tensor, "m m"]:
    """0, 1 or 2 common private images, 2 only where both can be the same two; diagonal 2.

    `scores`: what `overlaps` gave, if that is there already.
    """
    scores = overlaps(y, mixing, public_part) if scores is None else scores
    squared = public_part is None or mixing.k_pub == 0
    found = (scores > 0.5).to(torch.int8) + (scores > (2.5 if squared else 1.5)).to(torch.int8)
    if public_part is not None or mixing.k_pub == 0:
        c = torch.zeros_like(y) if public_part is None else public_part
        e, f = (found.triu(1) == 2).nonzero(as_tuple=True)
        for some in torch.arange(len(e), device=y.device).split(1024):
            i, j = e[some], f[some]
            wrong = ~same_private_part(y[i], c[i], y[j], c[j], mixing)
            found[i[wrong], j[wrong]] = found[j[wrong], i[wrong]] = 1
    return found.fill_diagonal_(2)


def same_private_part(
    y_e: Float[Tensor, "n d"],
    c_e: Float[Tensor, "n d"],
    y_f: Float[Tensor, "n d"],
    c_f: Float[Tensor, "n d"],
    mixing: Mixing,
) -> Bool[Tensor, " n"]:
    """True where one s explains y_e = |s + c_e| and y_f = |s + c_f| at nearly all pixels."""
    within = 6 * mixing.noise + 1e-4 * mixing.variance**0.5
    from_e = torch.stack([y_e - c_e, -y_e - c_e])
    from_f = torch.stack([y_f - c_f, -y_f - c_f])
    apart = (from_e[:, None] - from_f[None]).abs().amin((0, 1))
    same: Tensor = (apart < within).float().mean(1) > SAME_AT
    return same


N_TRIES = 30
"""Pairs that groups are grown from, for each image that is looked for."""
INSIDE = 0.5
"""The mean overlap to a group from which on an encoding belongs to it."""
N_ROUNDS = 50
"""Rounds of assigning, at most."""


@dataclass(frozen=True)
class Assigned:
    """`edges`: the two images of every encoding, by the group's number, ascending. `margin`: how
    much more alike an encoding is to its second group than to the third, in common images."""

    edges: Int64[Tensor, "m 2"]
    margin: Float[Tensor, " m"]
    n_found: int


def assign_uncertain(
    scores: Float[Tensor, "m m"],
    n: int,
    *,
    generator: torch.Generator,
    n_repairs: int = 12,
) -> Assigned:
    """Two of n images for every encoding. `scores`: 1 on average where one image is common, 0 where
    none is; `n_repairs`: how often the groups that hold together worst are looked for again, at
    most. Raises ValueError if fewer than three groups are found."""
    scores = scores.clone().fill_diagonal_(0.0).clamp_(max=2.0)
    none = torch.zeros((0, len(scores)), dtype=torch.bool, device=scores.device)
    groups = _grown(scores, n, none, generator)
    if len(groups) < 3:
        raise ValueError(
            f"{len(groups)} groups of encodings with a common image were found in {len(scores)}; "
            "the overlaps are too uncertain: more encodings or more pixels are needed"
        )
    best = now = _settled(scores, groups)
    most, same = _explained(scores, best), 0
    for _ in range(n_repairs):
        groups = torch.zeros((now.n_found, len(scores)), dtype=torch.bool, device=scores.device)
        groups.scatter_(0, now.edges.T, True)
        kept = _distinct(groups, scores, now.n_found - max(round(WEAK * now.n_found), 2))
        now = _settled(scores, _grown(scores, n, kept, generator))
        value = _explained(scores, now)
        same = same + 1 if value == most else 0
        if same == ENOUGH:
            break
        if value > most:
            best, most = now, value
    return best


ENOUGH = 2
"""Repairs that come back to the best that was found, after which no more are tried."""


def _explained(scores: Float[Tensor, "m m"], found: Assigned) -> float:
    """By how much the squared error of the scores falls if they are explained by A A^T."""
    a = scores.new_zeros(len(scores), found.n_found).scatter_(1, found.edges, 1.0)
    common = (a @ a.T).fill_diagonal_(0.0)
    return float((common * (2 * scores - common)).double().sum())


def _settled(scores: Float[Tensor, "m m"], groups: Bool[Tensor, "g m"]) -> Assigned:
    nearest = _nearest(scores, groups)
    for _ in range(N_ROUNDS):
        groups = torch.zeros_like(groups).scatter_(0, nearest.edges.T, True)
        before, nearest = nearest, _nearest(scores, groups)
        if torch.equal(before.edges, nearest.edges):
            break
    return nearest


WEAK = 0.05
"""Share of groups that have to prove themselves again."""


def _strength(groups: Bool[Tensor, "g m"], scores: Float[Tensor, "m m"]) -> Float[Tensor, " g"]:
    """How much alike members are, where size counts too: three encodings are alike by chance, and
    two images' groups together are not one."""
    inside = groups.to(scores)
    sizes = inside.sum(1)
    within = ((inside @ scores) * inside).sum(1)
    return within / (sizes.sqrt() * (sizes - 1)).clamp(min=1)


def _nearest(scores: Float[Tensor, "m m"], groups: Bool[Tensor, "g m"]) -> Assigned:
    alike = _alike(scores, groups).topk(3, dim=1)
    margin: Tensor = alike.values[:, 1] - alike.values[:, 2]
    return Assigned(alike.indices[:, :2].sort(1).values, margin, len(groups))


def _alike(scores: Float[Tensor, "m m"], groups: Bool[Tensor, "g m"]) -> Float[Tensor, "m g"]:
    inside = groups.to(scores)
    others = inside.sum(1) - inside.T
    return scores @ inside.T / others.clamp(min=1)


def _grown(
    scores: Float[Tensor, "m m"],
    n: int,
    found: Bool[Tensor, "k m"],
    generator: torch.Generator,
) -> Bool[Tensor, "g m"]:
    """Groups beside those that are found, grown from pairs until there are n; first from encodings
    that are not in two. What found groups have in common is taken away."""
    m = len(scores)
    size = max(2 * m // n, 2)
    for _ in range(N_TRIES):
        n_seeds = min(max(2 * (n - len(found)), FEWEST_SEEDS), m)
        members = (found & (INSIDE < _alike(scores, found).T)).to(scores)
        left = (scores - members.T @ members).fill_diagonal_(0.0)
        order = torch.rand(m, generator=generator).to(scores.device) + (members.sum(0) > 1)
        seeds = order.topk(n_seeds, largest=False).indices
        grown = _grow(left, seeds, size, generator)
        found = torch.cat([found, _distinct(grown, left, n - len(found))])
        if len(found) == n:
            break
    return found


FEWEST_SEEDS = 16


def _grow(
    scores: Float[Tensor, "m m"],
    seeds: Int64[Tensor, " s"],
    size: int,
    generator: torch.Generator,
) -> Bool[Tensor, "g m"]:
    likely = scores[seeds].topk(size, dim=1).indices
    drawn = torch.randint(0, size, (len(seeds), 1), generator=generator).to(seeds.device)
    partner = likely.gather(1, drawn)[:, 0]
    both = scores[seeds] + scores[partner]
    both[torch.arange(len(seeds)), seeds] = both[torch.arange(len(seeds)), partner] = torch.inf
    groups = torch.zeros_like(both, dtype=torch.bool)
    groups.scatter_(1, both.topk(max(size // 2, 3), dim=1).indices, True)
    for _ in range(N_ROUNDS):
        again = INSIDE < _alike(scores, groups).T
        if torch.equal(again, groups):
            break
        groups = again
    return groups[groups.sum(1) > 2]


def _distinct(
    groups: Bool[Tensor, "g m"], scores: Float[Tensor, "m m"], n: int
) -> Bool[Tensor, "k m"]:
    """At most n groups, the strongest first, none of which has more than half of another one, or is
    had by it so."""
    inside = groups.to(scores)
    sizes = inside.sum(1)
    common = inside @ inside.T
    overlap = common / torch.minimum(sizes[:, None], sizes).clamp(min=1)
    kept: list[int] = []
    for k in _strength(groups, scores).argsort(descending=True, stable=True).tolist():
        if len(kept) < n and not any(overlap[k, j] > 0.5 for j in kept):
            kept.append(k)
    return groups[kept]
