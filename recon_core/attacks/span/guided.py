"""The search with a separator: rotations, likelihood steps, and the best of several searches.

The separator gives g = E[b m | y], the interference in a source y = a x + b m. A mixture of
hundreds is Gaussian noise in its metric, so by Tweedie's formula (Efron 2011) g / b^2 is
-grad log p of the density p of images in as much noise. Hence

    psi_i = g_i / (g_i^T y_i / d),    G_ij = psi_i^T y_j / d - delta_ij

is the relative gradient of the likelihood of sources y = W z, each in its own noise, at the scale
where its diagonal is nothing. Rows of W are orthogonal at first, as images nearly are, and W moves
as in Picard-O, with E psi'_i = E psi_i^2, Stein's identity for Gaussian noise. Then W is free
(`separation.freed`), and at last every source loses what the network finds of others in it.

Two images of one person may also separate into their sum and difference, which the network cannot
tell from faces. Biases can: the last coordinate of every image is 1, so that of a difference is 0,
or another size than beside it. Such sources are rotated in pairs while that lowers the cost. Of 100
faces 68 to 75 are identified, 54 to 60 without these turns.

Hundreds of images that are far from orthogonal, such as digits, have many near-optima, each with
other images right. For pictures like those that the network learned from, sources without
interference are nearly always right (51 of 53 digits). So searches go on while there is more
interference than in single pictures, and the cleanest sources of all are kept: of 300 digits, the
start known, 214 to 223 are identified (56 to 59 of 300 decoys among themselves).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from recon_core.attacks.span.separation import (
    MOMENTUM,
    Descent,
    Report,
    Scored,
    bounded,
    cayley,
    freed,
    orthogonal,
    rotation_start,
)
from recon_core.attacks.span.separator import Separator

LEAST_CURVATURE = 0.3
LEAST_SHARE = 1e-3  # of interference, that psi is divided by
CLEAN_EVERY = 10
FALLEN, PATIENCE = 0.99, 20
LOW, SHORT_PATIENCE, HIGH, LONG_PATIENCE = 0.03, 6, 0.1, 60
"""Rotations end after `PATIENCE` steps without a fall of the interference by a hundredth; sooner if
it is less than `LOW` of the sources' energy, later if it is more than `HIGH`."""
N_FREE = 60  # most likelihood steps
N_LAST, LAST_SETTLED, RIDGE = 10, 0.98, 1e-4
"""Most final steps, the factor by which interference must fall in each of them, and what is added
to the squares of sources there."""
N_SEARCHES, LATER, WAITED = 20, (50, 25), 2
"""Most searches; the rotations and likelihood steps of all but the first; and how many searches may
find no further clean source."""
CLEAN, ALONE = 0.02, 2.0
"""Share of interference below which a source is clean; and the multiple of the mean share in single
pictures below which searches end."""
N_TURNS, PARTNERS, ODD = 5, 8, 3.0
TURNS = [(math.cos(a), math.sin(a)) for a in (math.pi / 8, math.pi / 4, 3 * math.pi / 8)]
SIZED, LEAST_GAIN, SMALLEST_ONE = 0.01, 1e-3, 0.05
"""Rounds of turns; partners of a source, those with most energy in the same places; standard
deviations from which a source's size is odd. Then the weight of sizes beside interference, the
least gain of a turn, and the least last coordinate of a source."""
NEW = 0.1  # share of a source's energy that must lie outside the span of those before it


@torch.no_grad()
def separated(
    separator: Separator,
    z: Float[Tensor, "r k d"],
    generators: Sequence[torch.Generator],
    n_iterations: int,
    report: Report = lambda _n: None,
    *,
    ones: Float[Tensor, "r k"] | None = None,
) -> Descent:
    """Find matrices at which the sources of pictures `z`, white in the metric, have the least
    interference; their sparsity is minus its share. The first search has at most `n_iterations`
    rotations. `ones`: the last coordinates of `z`, which biases make 1 for every image."""
    k = z.shape[1]
    if ones is not None:
        ones = ones * (k**0.5 / ones.norm(dim=1, keepdim=True).clamp_min(1e-30))
    seen = separator.metric.whitened(z.flatten(0, 1)).view_as(z)
    search = _Search(separator, z, seen, ones, report)
    start = torch.stack([rotation_start(k, g) for g in generators]).to(z)
    w = search.freed(search.rotated(start, n_iterations), N_FREE)
    settled = search.n < n_iterations
    w = search.turned(w)
    shares = search.shares(w)
    enough = k * ALONE * max(separator.card.alone, LEAST_SHARE)
    n_clean = (shares < CLEAN).sum(1)
    # without a clean source the network is the limit, and with other detail shares say less
    waited = torch.where((n_clean > 0) & (not separator.noise), 0, WAITED)
    for number in range(1, N_SEARCHES):
        going = (shares.sum(1) > enough) & (waited < WAITED)
        if not bool(going.any()):
            break
        limit = CLEAN if number % 2 else -torch.inf  # every other search has a random start
        starts = [joined(own[share < limit], g)
                  for own, share, g in zip(w, shares, generators, strict=True)]  # fmt: skip
        new = search.freed(search.rotated(orthogonal(torch.stack(starts)), LATER[0]), LATER[1])
        both, found = torch.cat([w, new], 1), torch.cat([shares, search.shares(new)], 1)
        order = found.argsort(dim=1, stable=True)
        pairs = zip(both, order, generators, strict=True)
        tried = search.freed(torch.stack([joined(own[o], g) for own, o, g in pairs]), LATER[1])
        found = search.shares(tried)
        found_clean = (found < CLEAN).sum(1)
        waited = torch.where(found_clean > n_clean, 0, waited + 1)
        take = going & (found_clean >= n_clean)
        n_clean = torch.where(take, found_clean, n_clean)
        w = torch.where(take[:, None, None], tried, w)
        shares = torch.where(take[:, None], found, shares)
    w = search.cleaned(w)
    return Descent(w, -search.shares(w), search.n, settled)


def joined(rows: Float[Tensor, "m k"], generator: torch.Generator) -> Float[Tensor, "k k"]:
    """The rows that differ enough from those before them (`NEW`), completed by random ones."""
    k = rows.shape[1]
    basis, kept = rows.new_zeros(0, k), [rows[:0]]
    for row in rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-30):
        rest = row - (basis @ row) @ basis
        rest = rest - (basis @ rest) @ basis  # twice is enough
        size = float(rest.square().sum())
        if size >= NEW and len(basis) < k:
            basis = torch.cat([basis, (rest / size**0.5)[None]])
            kept.append(row[None])
    drawn = torch.randn(k - len(basis), k, generator=generator, dtype=torch.float64).to(rows)
    outside = drawn - (drawn @ basis.mT) @ basis
    return torch.cat([*kept, torch.linalg.qr(outside.mT).Q.mT])


@dataclass
class _Search:
    """A search on one stack of victims: their pictures, also in the metric, and its iterations."""

    separator: Separator
    z: Float[Tensor, "r k d"]
    seen: Float[Tensor, "r k d"]
    ones: Float[Tensor, "r k"] | None
    report: Report
    n: int = 0

    def interference(
        self, w: Float[Tensor, "r m k"], *, exact: bool = True
    ) -> tuple[Float[Tensor, "r m d"], Float[Tensor, "r m d"]]:
        """(sources in the metric, their interference there)."""
        y, flat = w @ self.seen, (w @ self.z).flatten(0, 1)
        size = y.square().mean(2, keepdim=True).sqrt().clamp_min(1e-30)
        found = self.separator.interference((y / size).flatten(0, 1), flat, exact=exact)
        return y, found.view_as(y) * size

    def shares(self, w: Float[Tensor, "r m k"]) -> Float[Tensor, "r m"]:
        """The share of interference in every source."""
        y, found = self.interference(w)
        return (found * y).mean(2) / y.square().mean(2).clamp_min(1e-30)

    def rotated(self, w: Float[Tensor, "r k k"], most: int) -> Float[Tensor, "r k k"]:
        """W after rotations, at most `most`, until the interference stops falling."""
        (r, k), moved = w.shape[:2], torch.zeros_like(w)
        least, since = w.new_full((r,), torch.inf), w.new_zeros(r)
        for n in range(most):
            y, share, psi = self._psi(w)
            g = torch.bmm(psi, y.mT) / y.shape[2]
            curve = psi.square().mean(2)
            bent = (curve[:, :, None] + curve[:, None, :] - 2).clamp_min(LEAST_CURVATURE)
            moved = bounded(MOMENTUM * moved - (g - g.mT) / bent)
            w = cayley(moved) @ w
            if n % CLEAN_EVERY == CLEAN_EVERY - 1:
                w = orthogonal(w)
            total = share.sum(1)
            since = torch.where(total < FALLEN * least, 0, since + 1)
            least = torch.minimum(least, total)
            patience = torch.where(least > HIGH * k, LONG_PATIENCE, PATIENCE)
            patience = torch.where(least < LOW * k, SHORT_PATIENCE, patience)
            self._done()
            if not bool((since < patience).any()):
                break
        return w

    def freed(self, w: Float[Tensor, "r k k"], most: int) -> Float[Tensor, "r k k"]:
        """W after likelihood steps, at most `most`."""
        return freed(w, self.score, most)[0]

    def turned(self, w: Float[Tensor, "r k k"]) -> Float[Tensor, "r k k"]:
        """W after turns of pairs of sources, each round followed by likelihood steps."""
        for _ in range(N_TURNS if self.ones is not None else 0):
            unit = self._unit(w)
            w = torch.stack([self._turned(v, own) for v, own in enumerate(unit)])
            if torch.equal(w, unit):
                break
            w = self.freed(w, LATER[1])
        return w

    def _turned(self, v: int, w: Float[Tensor, "k k"]) -> Float[Tensor, "k k"]:
        """The sources of one victim, with sources of odd size turned with others where that lowers
        the cost of the pair; each source is in one pair at most."""
        energy = nn.functional.normalize((w @ self.seen[v]).square() - 1, dim=1)
        alike = (energy @ energy.mT).fill_diagonal_(-1)
        partners = alike.topk(min(PARTNERS, len(w) - 1), dim=1).indices
        cost, odd = self._cost(v, w)
        i = (odd > ODD).nonzero().expand(-1, partners.shape[1]).flatten()
        j = partners[odd > ODD].flatten()
        if not len(i):
            return w
        a, b = w[i], w[j]
        tried = torch.stack([torch.stack([c * a + s * b, c * b - s * a]) for c, s in TURNS])
        after = self._cost(v, tried.flatten(0, 2))[0].view(tried.shape[:3]).sum(1)
        gain, turn = (cost[i] + cost[j] - after).max(0)
        w, left = w.clone(), set(range(len(w)))
        for p in gain.argsort(descending=True).tolist():
            pair = {int(i[p]), int(j[p])}
            if gain[p] > LEAST_GAIN and pair <= left:
                w[i[p]], w[j[p]] = tried[turn[p], :, p]
                left -= pair
        return w

    def _cost(
        self, v: int, w: Float[Tensor, "n k"]
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """(cost of one victim's sources, oddness of their sizes in standard deviations)."""
        assert self.ones is not None
        own = replace(self, z=self.z[v : v + 1], seen=self.seen[v : v + 1])
        size = (w @ self.seen[v]).square().mean(1).sqrt().clamp_min(1e-30)
        one = ((w @ self.ones[v]).abs() / size).clamp_min(SMALLEST_ONE)
        odd = one.log().abs() / self.separator.card.spread
        return own.shares(w[None])[0] + SIZED * (odd / 2).square().log1p(), odd

    def score(self, w: Float[Tensor, "r k k"]) -> Scored:
        """The sources' score, with E psi'_i = E psi_i^2, Stein's identity for Gaussian noise."""
        w = self._unit(w)
        y, share, psi = self._psi(w)
        self._done()
        return Scored(w, y, psi, psi.square().mean(2), share.sum(1))

    def _psi(
        self, w: Float[Tensor, "r k k"]
    ) -> tuple[Float[Tensor, "r k d"], Float[Tensor, "r k"], Float[Tensor, "r k d"]]:
        y, found = self.interference(w, exact=False)
        share = (found * y).mean(2)
        return y, share, found / share.clamp_min(LEAST_SHARE)[:, :, None]

    def cleaned(self, w: Float[Tensor, "r k k"]) -> Float[Tensor, "r k k"]:
        """W after what the network finds of other sources was subtracted from every source."""
        left, eye = w.new_full((len(w),), torch.inf), torch.eye(w.shape[1]).to(w)
        for _ in range(N_LAST):
            w = self._unit(w)
            y, found = self.interference(w)
            square = torch.bmm(y, y.mT) / y.shape[2] + RIDGE * eye
            taken = torch.linalg.solve(square, torch.bmm(y, found.mT) / y.shape[2]).mT
            taken.diagonal(dim1=1, dim2=2).zero_()
            w = w - taken @ w
            before, left = left, (found * y).mean((1, 2)) * w.shape[1]
            self._done()
            if bool((left > LAST_SETTLED * before).all()):
                break
        return w

    def _unit(self, w: Float[Tensor, "r k k"]) -> Float[Tensor, "r k k"]:
        size = (w @ self.seen).square().mean(2, keepdim=True).sqrt()
        return w / size.clamp_min(1e-30)

    def _done(self) -> None:
        self.n += 1
        self.report(self.n)
