"""Which private images are in which encoding: sections 3.1 and 3.3 of the InstaHide paper.

`overlaps` measures how many private images two encodings share. Private images are vertices and
encodings edges, so that these numbers are the Gram matrix of a graph, which is found from its line
graph (the InstaHide paper: by Whitney's theorem). Encodings with two common images are merged. The
neighbours of an edge uv are then two cliques, the other edges at u and those at v; once the star of
edges at u is known, so is that at the other end w of each: N(uw) without the star of u. With
labelled edges the triangle and K(1, 3), and the labelled roots of K(1, 3) with one edge more, K4
without an edge, and K4, are two each.

Where overlaps are uncertain (`assign_uncertain`), the encodings of one private image are a group
whose members look alike on average: grown from pairs, then every encoding in the two groups that it
is most like, until nothing changes. The weakest groups are looked for again, and what explains the
scores best is kept.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int8, Int64, Integer
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from recon_core.attacks.instahide.mixing import Mixing

Edges = Int64[np.ndarray, "m 2"]
"""The two vertices of every edge, the smaller first."""
SAME_AT = 0.9
"""Share of pixels that one pair of private images must explain in two encodings to be in both."""
DOUBTFUL = 0.1
"""How near to one half a score is that may stand for the other number of common images."""
MOST_DOUBTFUL = 12
"""With more of those, overlaps are too uncertain to be changed one by one."""
N_TRIES = 30
"""Rounds in which missing groups are grown, at most."""
FEWEST_SEEDS = 16
INSIDE = 0.5
"""The mean overlap to a group from which on an encoding belongs to it."""
N_ROUNDS = 50
"""Rounds of assigning, at most."""
WEAK = 0.05
"""Share of groups that are looked for again in a repair."""
N_REPAIRS = 12
"""How often the weakest groups are looked for again, at most."""
ENOUGH = 2
"""Repairs that come back to the best value, after which no more are tried."""


def posterior_mean(
    y: Float[Tensor, "m d"], c: Float[Tensor, "m d"], mixing: Mixing
) -> Float[Tensor, "m d"]:
    """t, the posterior mean of the private part s ~ N(0, tau^2) given y = |s + c|."""
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
    public_part: Float[Tensor, "m d"],
    scores: Float[Tensor, "m m"] | None = None,
) -> Int8[Tensor, "m m"]:
    """0, 1 or 2 common private images; diagonal 2.

    Two encodings only have 2 if one private part s explains both y = |s + c| at nearly all pixels.
    `scores`: the result of `overlaps`, if it is known.
    """
    scores = overlaps(y, mixing, public_part) if scores is None else scores
    two = 1.5 if mixing.k_pub else 2.5
    found = (scores > 0.5).to(torch.int8) + (scores > two).to(torch.int8)
    within = 6 * mixing.noise + 1e-4 * mixing.variance**0.5
    for pairs in (found.triu(1) == 2).nonzero().split(1024):
        one, other = (torch.stack([y[k] - public_part[k], -y[k] - public_part[k]]) for k in pairs.T)
        apart = (one[:, None] - other[None]).abs().amin((0, 1))
        i, j = pairs[(apart < within).float().mean(1) <= SAME_AT].T
        found[i, j] = found[j, i] = 1
    return found.fill_diagonal_(2)


@dataclass(frozen=True)
class Component:
    """A connected part of the graph: its encodings (rows), and every way to assign images to them,
    numbered from 0 within the component. Assignments that differ only in these numbers count once.
    """

    rows: Int64[np.ndarray, " k"]
    roots: tuple[Edges, ...]

    def n_images(self, root: int = 0) -> int:
        return int(self.roots[root].max()) + 1


class NotALineGraphError(ValueError):
    """No assignment of two images to every encoding has these numbers of common images."""


def assign(shared: Integer[np.ndarray, "m m"]) -> list[Component]:
    """All assignments of two images to every encoding with `shared` images in common, 0, 1 or 2.

    Components in the order of their first encoding; the assignments of the whole are all choices of
    one root for each. Raises NotALineGraphError if there is no assignment.
    """
    a = shared.astype(np.int8)
    np.fill_diagonal(a, 2)  # an encoding shares both its images with itself
    member = connected(*np.nonzero(a == 2), n=len(a))  # whose pair of images each encoding has
    first = np.unique(member, return_index=True)[1]
    unlike = np.flatnonzero((a != a[first][member]).any(1))
    if len(unlike):
        i = int(unlike[0])
        raise NotALineGraphError(
            f"encodings {first[member[i]]} and {i} seem to mix the same two images, but do not "
            "share equally many with every other encoding"
        )
    simple: Bool[np.ndarray, "k k"] = a[np.ix_(first, first)] == 1
    part = connected(*np.nonzero(simple), n=len(simple))
    components = []
    for k in range(int(part.max()) + 1):
        mine = np.flatnonzero(part == k)
        roots = tuple(_roots(simple if len(mine) == len(part) else simple[np.ix_(mine, mine)]))
        if not roots:
            some = ", ".join(map(str, first[mine][:5])) + (", ..." if len(mine) > 5 else "")
            raise NotALineGraphError(
                f"the encodings {some} are no line graph: no assignment of two images to each has "
                "these overlaps. The Gram matrix has errors; use the noise-tolerant assignment"
            )
        position = np.full(len(first), -1)
        position[mine] = np.arange(len(mine))
        rows = np.flatnonzero(part[member] == k)
        components.append(Component(rows, tuple(r[position[member[rows]]] for r in roots)))
    return sorted(components, key=lambda c: int(c.rows[0]))


def assign_nearly(common: Int8[Tensor, "m m"], scores: Float[Tensor, "m m"]) -> list[Component]:
    """`assign`, also with one or two of the overlaps changed that nearly were something else."""
    shared = np.asarray(common.cpu())
    try:
        return assign(shared)
    except NotALineGraphError as error:
        refused = error
    above = np.triu(np.asarray((scores - 0.5).abs().cpu()), 1)
    rows, columns = np.nonzero((above < DOUBTFUL) & np.triu(shared < 2, 1))
    order = above[rows, columns].argsort()[: MOST_DOUBTFUL + 1]
    if len(order) <= MOST_DOUBTFUL:
        for changed in itertools.chain(
            itertools.combinations(order, 1), itertools.combinations(order, 2)
        ):
            at = rows[list(changed)], columns[list(changed)]
            other = shared.copy()
            other[at] = other[at[::-1]] = 1 - shared[at]
            with contextlib.suppress(NotALineGraphError):
                return assign(other)
    raise refused


def gram(edges: Integer[np.ndarray, "m 2"]) -> Int64[np.ndarray, "m m"]:
    """The number of common vertices of each two edges, 2 on the diagonal (section 3.3)."""
    incidence = incidence_of(edges).astype(np.float32)
    return (incidence @ incidence.T).astype(np.int64)  # small whole numbers, exact


def incidence_of(
    edges: Integer[np.ndarray, "m 2"], n: int | None = None
) -> Int64[np.ndarray, "m n"]:
    """W_priv of the InstaHide paper, definition 2.7: 1 where the encoding has the image."""
    found = np.zeros((len(edges), int(edges.max(initial=-1)) + 1 if n is None else n), np.int64)
    np.put_along_axis(found, edges, 1, axis=1)
    return found


def canonical(edges: Integer[np.ndarray, "m 2"]) -> Edges:
    """The same with vertices numbered by the edges that they have, compared in order: equal for two
    assignments that differ only in the images' numbers."""
    columns = incidence_of(edges).T
    columns = columns[columns.any(1)]
    order = np.lexsort(-columns.T[::-1])
    return np.sort(np.nonzero(columns[order].T)[1].reshape(-1, 2), axis=1)


def connected(
    first: Integer[np.ndarray, " k"], second: Integer[np.ndarray, " k"], *, n: int
) -> Int64[np.ndarray, " n"]:
    """The connected component of each of n vertices, by the ends of k edges."""
    graph = coo_array((np.ones(len(first), np.int8), (first, second)), shape=(n, n))
    return np.asarray(connected_components(graph, directed=False)[1], np.int64)


def _roots(adjacent: Bool[np.ndarray, "k k"]) -> list[Edges]:
    """The roots of a connected simple line graph; none if it is not one."""
    k = len(adjacent)
    n_near = adjacent.sum(1)
    if int(n_near.min()) == k - 1:  # all edges share a vertex, or three of them are a triangle
        star = np.stack([np.zeros(k, np.int64), np.arange(1, k + 1)], 1)
        return [star, np.array([[0, 1], [0, 2], [1, 2]])] if k == 3 else [star]
    seed, parts = _seed(adjacent, n_near)
    found: dict[bytes, Edges] = {}
    # one of two cliques, for every way to divide the parts; the other way round is the same graph
    for swaps in itertools.product((0, 1), repeat=len(parts) - 1) if parts else ():
        clique = np.concatenate([p[s] for p, s in zip(parts, (0, *swaps), strict=True)])
        edges = _followed(adjacent, seed, np.union1d(clique, [seed]))
        if edges is None or not (edges[:, 0] < edges[:, 1]).all():
            continue
        incidence = incidence_of(edges).astype(np.float32)
        if np.array_equal(incidence @ incidence.T == 1, adjacent):
            edges = canonical(edges)
            found[edges.tobytes()] = edges
    return list(found.values())


Rows = Int64[np.ndarray, " _"]
Parts = list[tuple[Rows, Rows]]


def _seed(adjacent: Bool[np.ndarray, "k k"], n_near: Int64[np.ndarray, " k"]) -> tuple[int, Parts]:
    """An edge whose neighbours fall into two cliques in the fewest ways, and the pieces that do."""
    best: tuple[int, Parts] | None = None
    for edge in np.argsort(n_near, kind="stable").tolist():
        near = np.flatnonzero(adjacent[edge])
        apart = ~adjacent[np.ix_(near, near)]
        np.fill_diagonal(apart, False)
        if not apart.any():
            continue  # all its neighbours are at one end, or it is in a triangle of its own
        parts = _two_coloured(apart, near)
        if parts is None or len(parts) > 2:
            return edge, []  # no two cliques: not a line graph
        if len(parts) == 1:
            return edge, parts
        best = best or (edge, parts)
    assert best is not None  # else the graph is complete
    return best


def _two_coloured(apart: Bool[np.ndarray, "k k"], names: Int64[np.ndarray, " k"]) -> Parts | None:
    """The components of a bipartite graph, each with its two sides; None if it is not bipartite."""
    part = connected(*np.nonzero(apart), n=len(apart))
    parts: Parts = []
    for k in range(int(part.max()) + 1):
        mine = np.flatnonzero(part == k)
        side = np.full(len(apart), -1)
        side[mine[0]], front, colour = 0, mine[:1], 0
        while len(front):
            colour = 1 - colour
            reached = np.flatnonzero(apart[front].any(0))
            if (side[reached] == 1 - colour).any():
                return None
            front = reached[side[reached] < 0]
            side[front] = colour
        parts.append((names[side == 0], names[side == 1]))
    return parts


def _followed(
    adjacent: Bool[np.ndarray, "k k"], seed: int, star: Int64[np.ndarray, " s"]
) -> Edges | None:
    """Two vertices of every edge, from the edges at one end of one of them; None if that fails."""
    ends, n_stars = np.full((len(adjacent), 2), -1, np.int64), np.zeros(len(adjacent), np.int64)
    other = np.setdiff1d(np.flatnonzero(adjacent[seed]), star)
    stars = [star, np.append(other, seed)]
    n_stars[star] += 1
    n_stars[stars[1]] += 1
    vertex = 0
    while vertex < len(stars):
        star = stars[vertex]
        ends[star, np.where(ends[star, 0] < 0, 0, 1)] = vertex
        inside = np.zeros(len(adjacent), bool)
        inside[star] = True
        for edge in star.tolist():
            if n_stars[edge] == 1:
                beyond = adjacent[edge] & ~inside
                beyond[edge] = True
                if (n_stars[beyond] > 1).any():
                    return None
                n_stars[beyond] += 1
                stars.append(np.flatnonzero(beyond))
        vertex += 1
    return np.sort(ends, axis=1) if (n_stars == 2).all() else None


def assign_uncertain(
    scores: Float[Tensor, "m m"],
    n: int,
    *,
    generator: torch.Generator,
) -> Int64[Tensor, "m 2"]:
    """The two of n images of every encoding, ascending. `scores`: 1 on average where one image is
    common, 0 where none is. Raises ValueError if fewer than three groups are found."""
    scores = scores.clone().fill_diagonal_(0.0).clamp_(max=2.0)
    none = torch.zeros((0, len(scores)), dtype=torch.bool, device=scores.device)
    groups = _grown(scores, n, none, generator)
    if len(groups) < 3:
        raise ValueError(
            f"{len(groups)} groups of encodings with a common image were found in {len(scores)}; "
            "the overlaps are too uncertain: more encodings or more pixels are needed"
        )
    best = now = _settled(scores, groups)
    most, same = _explained(scores, best, len(groups)), 0
    for _ in range(N_REPAIRS):
        groups = torch.zeros((len(groups), len(scores)), dtype=torch.bool, device=scores.device)
        groups.scatter_(0, now.T, True)
        kept = _distinct(groups, scores, len(groups) - max(round(WEAK * len(groups)), 2))
        groups = _grown(scores, n, kept, generator)
        now = _settled(scores, groups)
        value = _explained(scores, now, len(groups))
        same = same + 1 if value == most else 0
        if same == ENOUGH:
            break
        if value > most:
            best, most = now, value
    return best


def _explained(scores: Float[Tensor, "m m"], edges: Int64[Tensor, "m 2"], n: int) -> float:
    """By how much the squared error of the scores falls if they are explained by A A^T."""
    a = scores.new_zeros(len(scores), n).scatter_(1, edges, 1.0)
    common = (a @ a.T).fill_diagonal_(0.0)
    return float((common * (2 * scores - common)).double().sum())


def _settled(scores: Float[Tensor, "m m"], groups: Bool[Tensor, "g m"]) -> Int64[Tensor, "m 2"]:
    """Each encoding in the two groups that it is most like, again and again until none moves."""
    before = None
    for _ in range(N_ROUNDS + 1):
        edges = _alike(scores, groups).topk(2, dim=1).indices.sort(1).values
        if before is not None and torch.equal(before, edges):
            break
        before = edges
        groups = torch.zeros_like(groups).scatter_(0, edges.T, True)
    return edges


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
    """The groups `found` and others, grown from pairs until there are n; first from encodings that
    are not in two. Overlaps that groups already explain are taken away."""
    m = len(scores)
    size = max(2 * m // n, 2)
    for _ in range(N_TRIES):
        n_seeds = min(max(2 * (n - len(found)), FEWEST_SEEDS), m)
        members = (found & (INSIDE < _alike(scores, found).T)).to(scores)
        left = (scores - members.T @ members).fill_diagonal_(0.0)
        order = torch.rand(m, generator=generator).to(scores.device) + (members.sum(0) > 1)
        seeds = order.topk(n_seeds, largest=False).indices
        likely = left[seeds].topk(size, dim=1).indices
        drawn = torch.randint(0, size, (n_seeds, 1), generator=generator).to(seeds.device)
        partner = likely.gather(1, drawn)[:, 0]
        both, rows = left[seeds] + left[partner], torch.arange(n_seeds)
        both[rows, seeds] = both[rows, partner] = torch.inf
        groups = torch.zeros_like(both, dtype=torch.bool)
        groups.scatter_(1, both.topk(max(size // 2, 3), dim=1).indices, True)
        for _ in range(N_ROUNDS):
            again = INSIDE < _alike(left, groups).T
            if torch.equal(again, groups):
                break
            groups = again
        groups = groups[groups.sum(1) > 2]
        found = torch.cat([found, _distinct(groups, left, n - len(found))])
        if len(found) == n:
            break
    return found


def _distinct(
    groups: Bool[Tensor, "g m"], scores: Float[Tensor, "m m"], n: int
) -> Bool[Tensor, "k m"]:
    """At most n groups, the strongest first, no two of which share more than half of the smaller.

    In a group's strength size counts too: three encodings are alike by chance, and the groups of
    two images together are not one.
    """
    inside = groups.to(scores)
    sizes = inside.sum(1)
    within = ((inside @ scores) * inside).sum(1)
    strength = within / (sizes.sqrt() * (sizes - 1)).clamp(min=1)
    common = inside @ inside.T
    overlap = common / torch.minimum(sizes[:, None], sizes).clamp(min=1)
    kept: list[int] = []
    for k in strength.argsort(descending=True, stable=True).tolist():
        if len(kept) < n and not any(overlap[k, j] > 0.5 for j in kept):
            kept.append(k)
    return groups[kept]
