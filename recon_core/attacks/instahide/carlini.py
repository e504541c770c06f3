"""The attack of Carlini et al. (2020, arXiv 2011.05315): private images, public ones unknown.

A learned similarity of encodings (`similarity_network`) gives scores; encodings are grouped by
independent components, in place of the paper's grown clusters; an assignment gives two images of
its classes to every encoding; and images come by gradient descent on

    sum over encodings and pixels of (|A X| - y)^2

inside the box of their pixels, where row i of A holds the two weights of encoding i. The part of
its public images is noise. The descent is Adam's with a rate that falls to zero. Ours:

- `spread`: with the noise's standard deviation s, y is |N(A X, s^2)|, and what is minimised is (A
X)^2 + y^2 - 2 s^2 log cosh(y A X / s^2). With s = 0 it is the paper's loss.
- A spectral start (Candes, Li and Soltanolkotabi 2015): the leading eigenvector of A^T diag(y^2 -
mean) A.
- Nothing fixes the sign of a pixel position (of all images there at once): `in_one_sign` chooses.
Where the shape of images is known they are then blurred and the start of another descent, in which
total variation counts.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float32, Int64
from scipy.linalg import eigh
from scipy.sparse import coo_array, vstack
from scipy.sparse.linalg import eigsh
from torch import Tensor

from recon_core.attacks.instahide.coherence import ImageShape, centred
from recon_core.attacks.instahide.mixing import InstaHide, Mixing, Scheme
from recon_core.attacks.instahide.recover import Recovered, Status
from recon_core.attacks.instahide.similarity_network import Similarity
from recon_core.optimisers import Optimiser, Stepper
from recon_core.threads import share_of
from recon_core.types import Progress, no_progress

PIXEL_SD = 0.46
"""Standard deviation of CIFAR-10's pixels in [-1, 1]."""
PRESENT = 1e-6
"""Share of a mixed label from which on a class is in it."""
SPARE = 0.1
"""Components beyond the private images', in shares of their number, for what else scores hold; the
most peaked are kept."""
CORE = 0.5
"""The load from which on an encoding is taken to have an image, in shares of that of its best."""
BEST = 0.9
"""Quantile of the loads above 0 of the encodings that an image has, which counts as its best."""
DENSE = 1500
"""Encodings from which on eigenvectors are found by iteration."""
N_ARCS, SLACK = 20, 0.05
"""Images that are tried for each encoding, its best, and how much more than its share of encodings
an image may have, in shares of it."""
N_ROUNDS, STILL = 300, 1e-6
"""Of independent component analysis, at most, and the movement below which it has converged."""
FORBIDDEN = 1e2
"""Cost of a class that the encoding does not have, in standard deviations of affinities."""
COLUMNS = 128
"""Pixels that go through the equations together: 5,000 encodings of them stay in a CPU's cache."""
RATE, N_POWER = 0.05, 20
"""Adam's first rate, in units of pixels, and the power iterations of the spectral start."""
ROUNDED = 1e-2
"""Differences below this are squared rather than taken absolutely, so that descent can settle."""
REACH = 2
"""Positions up to this far apart, in rows and columns, are compared to put them in one sign."""


def recover_as_carlini(
    y: Float[Tensor, "m d"],
    shape: ImageShape,
    *,
    n_private: int,
    mixing: Scheme | None = None,
    labels: Float[Tensor, "m n_classes"] | None = None,
    scores: Float[Tensor, "m m"] | Similarity,
    typical: Float[Tensor, " d"] | None = None,
    generator: torch.Generator,
    progress: Progress = no_progress,
) -> Recovered:
    """Private images, every one ESTIMATED, or UNSOLVED if no encoding was assigned to it.

    `y`: encodings in units of images in [-1, 1]; signs are ignored. `mixing`: their scheme, which
    gives weights and the spread of public images; by default InstaHide's. `scores`: of all pairs,
    larger where an image is common, or the network that gives them. `typical`: a mean picture, by
    default the network's; without one the sign of all images together is not known. Raises
    ValueError for encodings that are not finite.
    """
    mixing = mixing or InstaHide()
    if not bool(y.isfinite().all()):
        raise ValueError("encodings have pixels that are not finite")
    if isinstance(scores, Similarity):
        typical = scores.typical.flatten()
        scores = scores.scores(y, progress=share_of(progress, 0.0, 0.1))
    progress(0.1)
    alike = alike_by_labels(scores, labels)
    core = (independent_groups(alike, n_private, generator=generator) > 0).to(alike)
    edges, classes = edges_of_groups(alike, core, labels)
    weights = private_weights(edges, labels, classes, mixing)
    progress(0.3)
    found = descend(
        y, edges, weights, n_private, generator=generator, shape=shape, n_steps=60,
        total_variation=0.3, spread=unknown_part(mixing), progress=share_of(progress, 0.3, 1.0),
    )  # fmt: skip
    given = ~found.isnan().any(1)
    images = found.double()
    if typical is not None and float((images.nanmean(0) * typical.to(images)).sum()) < 0:
        images = -images
    return Recovered(
        images=images,
        status=tuple(Status.ESTIMATED if ok else Status.UNSOLVED for ok in given.tolist()),
        edges=np.asarray(edges.cpu()),
        weights=np.asarray(weights.double().cpu()),
        public=None,
        explained=np.zeros(len(y), bool),
        scores=scores,
        common=((core @ core.T).clamp(max=2)).to(torch.int8),
        labels=None if classes is None else np.asarray(classes.cpu()),
    )


def unknown_part(mixing: Scheme) -> float:
    """The standard deviation of what public photographs in [-1, 1] add to an encoding's pixel.

    Coefficients that are uniform on a simplex have a mean square of 2 / (k (k + 1)).
    """
    k = 2 + mixing.k_pub
    square = mixing.wb**2 if isinstance(mixing, Mixing) else 2 / (k * (k + 1))
    return PIXEL_SD * math.sqrt(mixing.k_pub * square)


def alike_by_labels(
    scores: Float[Tensor, "m m"], labels: Float[Tensor, "m n_classes"] | None
) -> Float[Tensor, "m m"]:
    """Centred scores; with labels only those of encodings that have a class in common."""
    alike = centred(scores.float().clone())
    if labels is None:
        return alike
    has = (labels > PRESENT).float()
    return centred(alike * (has @ has.T > 0))


def edges_of_groups(
    alike: Float[Tensor, "m m"],
    core: Float[Tensor, "m n"],
    labels: Float[Tensor, "m n_classes"] | None,
) -> tuple[Int64[Tensor, "m 2"], Int64[Tensor, " n"] | None]:
    """The two images of each encoding, from groups of encodings that surely have each image (1 in
    `core`), and the classes of the images."""
    affinity = alike @ core / (core.sum(0) - core).clamp(min=1)
    if labels is None:
        return assigned(affinity), None
    classes = common_classes(core, labels > PRESENT)
    return assigned(affinity, (labels > PRESENT)[:, classes]), classes


def private_weights(
    edges: Int64[Tensor, "m 2"],
    labels: Float[Tensor, "m n_classes"] | None,
    classes: Int64[Tensor, " n"] | None,
    mixing: Scheme,
) -> Float32[Tensor, "m 2"]:
    """Weights of the two images of each encoding: its label's parts at their classes, half each
    where both are of one class; without labels the mean of all weights. The model of the InstaHide
    paper fixes them."""
    if isinstance(mixing, Mixing):
        return torch.full(edges.shape, mixing.wa, device=edges.device)
    if labels is None or classes is None:
        return torch.full(edges.shape, 1 / (2 + mixing.k_pub), device=edges.device)
    kind = classes[edges.clamp(min=0)]
    share = labels.float().gather(1, kind)
    same = kind[:, :1] == kind[:, 1:]
    return torch.where(same, share / 2, share)


def independent_groups(
    scores: Float[Tensor, "m m"],
    n: int,
    *,
    generator: torch.Generator,
) -> Float[Tensor, "m n"]:
    """Loads of m encodings on n images: above 0 where an encoding is taken to have the image, 1 at
    its best.

    A score of common images is a noisy A A^T, where A (m, n) holds the private weights, two in a
    row. Its n leading eigenvectors span A's columns, and A is the rotation of them with the most
    zeros: independent component analysis (Hyvarinen 1999: fixed point, symmetric) by the third
    moment, which is above 0 for a column that is mostly 0. The fourth would be that of normal
    numbers where a fifth of a column is not 0. `scores`: centred, larger where more is common.
    Raises ValueError for too few encodings.
    """
    m = len(scores)
    wanted = n + round(SPARE * n)
    if wanted >= m:
        raise ValueError(f"{m} encodings are too few for the components of {n} images")
    matrix = np.asarray(scores.double().cpu())
    if m < DENSE:
        vectors = eigh(matrix, subset_by_index=(m - wanted, m - 1))[1]
    else:
        first = np.asarray(torch.rand(m, generator=generator, dtype=torch.float64))
        again = np.random.default_rng(0)  # for restarts within a space that is used up
        vectors = eigsh(matrix, k=wanted, which="LA", v0=first, rng=again)[1]
    white = vectors * m**0.5
    drawn = torch.randn(wanted, wanted, generator=generator, dtype=torch.float64)
    rotation = np.linalg.qr(np.asarray(drawn))[0]
    for _ in range(N_ROUNDS):
        u, _, vt = np.linalg.svd(white.T @ (white @ rotation) ** 2 / m)
        before, rotation = rotation, u @ vt
        if np.abs((rotation * before).sum(0)).min() > 1 - STILL:
            break
    found = white @ rotation
    found = found * np.sign((found**3).sum(0))  # long tails above 0
    peaks = (found**3).mean(0)
    loads = found[:, np.sort(np.argsort(-peaks, kind="stable")[:n])]
    n_own = max(2 * m // n, 2)
    best = np.sort(loads, axis=0)[-max(round((1 - BEST) * n_own), 1)]
    loads = loads / np.maximum(best, 1e-9)
    return torch.from_numpy(np.where(loads > CORE, loads, 0.0)).to(scores)


def assigned(
    affinity: Float[Tensor, "m n"], allowed: Bool[Tensor, "m n"] | None = None
) -> Int64[Tensor, "m 2"]:
    """Two images for each encoding, no image having more than its share; -1 where there are none.

    The flow with the largest total of affinities (Carlini et al. 2020): a linear program with whole
    numbers for answers, as its constraints are those of a network. `allowed`: images that an
    encoding may have; others come last. Raises ValueError for fewer than two images.
    """
    from scipy.optimize import linprog

    m, n = affinity.shape
    if n < 2:
        raise ValueError(f"{n} images: an encoding has two of them")
    worth = affinity.double().cpu()
    worth = (worth - worth.mean()) / worth.std().clamp(min=1e-30)
    if allowed is not None:
        worth = worth - FORBIDDEN * (~allowed.cpu())
    best = worth.topk(min(N_ARCS, n), dim=1)
    images, gains = np.asarray(best.indices), np.asarray(best.values)
    capacity = float(np.ceil(2 * m / n * (1 + SLACK) - 1e-9))
    arcs, ones = np.arange(images.size), np.ones(images.size)
    per_row = coo_array((ones, (arcs // images.shape[1], arcs)), shape=(m, images.size))
    per_image = coo_array((ones, (images.ravel(), arcs)), shape=(n, images.size))
    answer = linprog(
        -(gains.ravel() + 2 * FORBIDDEN),  # an encoding without images is worst of all
        A_ub=vstack([per_row, per_image]).tocsr(),
        b_ub=np.concatenate([np.full(m, 2.0), np.full(n, capacity)]),
        bounds=(0, 1),
        method="highs-ds",
    )
    if answer.x is None:
        raise ValueError(f"no assignment of {m} encodings to {n} images: {answer.message}")
    taken = (answer.x > 0.5).reshape(images.shape)
    edges = np.full((m, 2), -1, np.int64)
    full = taken.sum(1) == 2
    edges[full] = images[taken & full[:, None]].reshape(-1, 2)
    return torch.from_numpy(np.sort(edges, axis=1)).to(affinity.device)


def common_classes(
    loads: Float[Tensor, "m n"], has: Bool[Tensor, "m n_classes"]
) -> Int64[Tensor, " n"]:
    """The class of each image: the one that most of its encodings have."""
    return (loads.T @ has.to(loads)).argmax(1)


def descend(
    y: Float[Tensor, "m d"],
    edges: Int64[Tensor, "m 2"],
    weights: Float[Tensor, "m 2"],
    n: int,
    *,
    generator: torch.Generator,
    shape: ImageShape | None = None,
    n_steps: int = 200,
    total_variation: float = 0.0,
    spread: float = 0.0,
    progress: Progress = no_progress,
) -> Float32[Tensor, "n d"]:
    """n images in [-1, 1] from their encodings, NaN where no encoding has the image.

    `edges`: the two images of each encoding, -1 if unknown; such encodings are left out. `weights`:
    theirs. `shape`: of an image; with it there is a second descent. `total_variation`: its weight,
    of the sum of absolute differences of neighbours, in the second. `spread`: standard deviation of
    the unknown part. Raises ValueError for edges that are no images.
    """
    if bool((edges >= n).any()) or bool((edges < -1).any()):
        raise ValueError(f"edges must be -1 or from 0 to n - 1 = {n - 1}; they reach {edges.max()}")
    known = (edges >= 0).all(1).nonzero()[:, 0]
    a = torch.zeros(len(known), n, device=edges.device)
    a.scatter_add_(1, edges[known], weights[known].float())
    own = y[known].abs().float()
    x = _spectral(torch.randn((n, y.shape[1]), generator=generator).to(a), a, own, spread)
    columns, v = [part.contiguous() for part in own.split(COLUMNS, dim=1)], spread**2
    for turn in range(1 if shape is None else 2):
        progress((0.1, 0.5)[turn])
        if turn and shape is not None:
            signed = in_one_sign(x, shape).reshape(-1, *shape)
            x = F.avg_pool2d(F.pad(signed, (1, 1, 1, 1), mode="replicate"), 3, 1).flatten(1)
        stepper = Stepper(Optimiser(rule="adam", lr=RATE), x.unsqueeze(0))
        for k in range(n_steps):
            stepper.set_rate(RATE * (1 + math.cos(math.pi * k / n_steps)) / 2)
            parts = []
            for some, part in zip(columns, x.split(COLUMNS, dim=1), strict=True):
                r = torch.mm(a, part)  # 2 A^T (r - y s), s the sign of r as far as it is believed
                sign = (r * some).mul_(1 / v).tanh_() if v else r.sign()
                parts.append(2 * torch.mm(a.T, r.addcmul_(sign, some, value=-1)))
            gradient = torch.cat(parts, 1)
            if turn and shape is not None and total_variation:
                pictures, rough = x.reshape(-1, *shape), gradient.view(-1, *shape)
                for dim in (2, 3):  # of the sum over neighbours of sqrt(difference^2 + ROUNDED^2)
                    step = pictures.diff(dim=dim)
                    pull = total_variation * step / (step.square() + ROUNDED**2).sqrt()
                    rough.narrow(dim, 1, step.shape[dim]).add_(pull)
                    rough.narrow(dim, 0, step.shape[dim]).sub_(pull)
            stepper.step_(gradient.unsqueeze(0))
            x.clamp_(-1.0, 1.0)
    x[a.abs().sum(0) == 0] = torch.nan
    return x


def _spectral(
    v: Float32[Tensor, "n d"], a: Float32[Tensor, "m n"], y: Float32[Tensor, "m d"], spread: float
) -> Float32[Tensor, "n d"]:
    """Scaled so that its mixtures have the encodings' energy above the unknown part's."""
    found = []
    for own, first in zip(y.split(COLUMNS, dim=1), v.split(COLUMNS, dim=1), strict=True):
        x, energy = first, own.square()
        centre = energy - energy.mean(0)
        shift = centre.abs().mean(0) * a.square().sum(0).mean()
        for _ in range(N_POWER):
            u = shift * x + a.T @ (centre * (a @ x))
            x = u / u.norm(dim=0).clamp(min=1e-30)
        known = (energy.mean(0) - spread**2).clamp(min=1e-6)
        found.append(x * (known / (a @ x).square().mean(0).clamp(min=1e-30)).sqrt())
    return torch.cat(found, 1).clamp_(-1.0, 1.0)


def in_one_sign(images: Float[Tensor, "n d"], shape: ImageShape) -> Float[Tensor, "n d"]:
    """The images with positions' signs chosen so that neighbours agree; one sign for all remains,
    which is that of the first position. `shape`: (c, h, w).

    Photographs' positions near each other, and channels of one, are alike over the images.
    Positions are merged into regions: of all two that touch, the two whose correlations over their
    border have the largest sum in absolute value, with the sign of that sum.
    """
    x = images.nan_to_num(0.0).double().cpu()
    unit = np.asarray(x / x.norm(dim=0).clamp(min=1e-12))
    at = np.arange(unit.shape[1]).reshape(shape)
    firsts, seconds = [], []
    c, h, w = shape
    steps = range(-REACH, REACH + 1)
    for k, i, j in itertools.product(range(c), steps, steps):
        if (k, i, j) <= (0, 0, 0) or (k and (i or j)):
            continue  # each pair once; of channels only the same pixel
        rows, columns = slice(max(-i, 0), h - max(i, 0)), slice(max(-j, 0), w - max(j, 0))
        firsts.append(at[: c - k, rows, columns].ravel())
        rows, columns = slice(max(i, 0), h - max(-i, 0)), slice(max(j, 0), w - max(-j, 0))
        seconds.append(at[k:, rows, columns].ravel())
    first, second = np.concatenate(firsts), np.concatenate(seconds)
    alike = (unit[:, first] * unit[:, second]).sum(0)
    # the surest two regions first; the smaller one is turned
    n = unit.shape[1]
    sign, region = np.ones(n), [[k] for k in range(n)]
    border: list[dict[int, float]] = [defaultdict(float) for _ in range(n)]
    for i, j, value in zip(first.tolist(), second.tolist(), alike.tolist(), strict=True):
        border[i][j] = border[j][i] = value
    heap = [(-abs(v), i, j, v) for i in range(n) for j, v in border[i].items() if i < j]
    heapq.heapify(heap)
    while heap:
        _size, i, j, value = heapq.heappop(heap)
        if not region[i] or not region[j] or border[i].get(j) != value:
            continue  # one was merged since, or their border has changed
        if len(region[i]) < len(region[j]):
            i, j = j, i
        turn = -1.0 if value < 0 else 1.0
        sign[region[j]] *= turn
        region[i] += region[j]
        region[j] = []
        for other, between in border[j].items():
            del border[other][j]
            if other != i:
                total = border[i].get(other, 0.0) + turn * between
                border[i][other] = border[other][i] = total
                heapq.heappush(heap, (-abs(total), i, other, total))
        border[j] = {}
    return images * torch.from_numpy(sign * sign[0]).to(images)
