"""Figures of a recovery from InstaHide's encodings: who shares images with whom, and the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from recon_core.attacks.instahide.recover import Recovered

HEAT = 360
"""Pixels of a heat map's side, about; encodings of which some are shown."""
DRAWN = 30
"""Images up to which the graph is drawn, with their pictures at its vertices."""
SIDE, APART = 600.0, 54.0
"""Side of the drawing, and distance between two vertices of it."""
MANY_NEIGHBOURS = 4.0
"""On average, from which on vertices are on a circle: any other drawing is a tangle, too."""
WHITE, DARK = (255.0, 255.0, 255.0), (16.0, 48.0, 110.0)

Picture = npt.NDArray[np.uint8]
Point = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Heat:
    """A matrix as a picture, from white at `low` to dark blue at `high`."""

    title: str
    picture: Picture
    low: float
    high: float
    n: int


def heat_maps(found: Recovered) -> list[Heat]:
    """Scores in the encodings' own order, and by the images that were found; common images by
    them."""
    m = len(found.edges)
    by_image = np.lexsort((found.edges[:, 1], found.edges[:, 0]))
    places = np.linspace(0, m - 1, min(m, HEAT)).round().astype(int)
    some, own = by_image[places], places
    scores, common = np.asarray(found.scores.cpu()), np.asarray(found.common.cpu()).astype(float)
    np.fill_diagonal(common, 2)
    mine = scores[np.ix_(some, some)]
    off = mine[~np.eye(len(mine), dtype=bool)] if len(mine) > 1 else mine.ravel()
    off = off[np.isfinite(off)]
    low, high = (float(np.median(off)), float(np.quantile(off, 0.995))) if len(off) else (0.0, 1.0)
    return [
        heat("measured, in the encodings' order", scores[np.ix_(own, own)], low, high),
        heat("measured, by recovered image", mine, low, high),
        heat("common images, by recovered image", common[np.ix_(some, some)], 0.0, 2.0),
    ]


def heat(title: str, values: npt.NDArray[Any], low: float, high: float) -> Heat:
    share = ((np.nan_to_num(values) - low) / max(high - low, 1e-30)).clip(0, 1)
    rgb = np.array(WHITE) + share[..., None] * (np.array(DARK) - np.array(WHITE))
    side = max(1, HEAT // max(len(values), 1))
    large = rgb.repeat(side, 0).repeat(side, 1)
    pixels: Picture = large.round().astype(np.uint8).transpose(2, 0, 1)
    return Heat(title, pixels, low, high, len(values))


def graph(found: Recovered, thumbnail: Callable[[int], str]) -> dict[str, Any]:
    """Images as vertices and encodings as lines, or, of many images, the matrix of encodings.

    `thumbnail`: an address of image k's picture, or empty.
    """
    n = len(found.status)
    known = found.edges[(found.edges >= 0).all(1)]
    counts = np.zeros((n, n), np.int64)
    np.add.at(counts, (known[:, 0], known[:, 1]), 1)
    counts += counts.T
    per_image = np.sort(counts.sum(1))
    said = {
        "n": n,
        "n_known": len(known),
        "fewest": int(per_image[0]),
        "half": int(per_image[n // 2]),
        "most": int(per_image[-1]),
        "n_pairs": int((np.triu(counts) > 0).sum()),
        "most_of_a_pair": int(counts.max(initial=0)),
    }
    if n > DRAWN:
        high = float(max(counts.max(initial=1), 1))
        return said | {"drawn": False, "matrix": heat("", counts.astype(float), 0.0, high)}
    at = _places(counts)
    vertices = [
        {
            "k": k,
            "x": at[k, 0],
            "y": at[k, 1],
            "uri": thumbnail(k),
            "status": found.status[k].value,
            "n": int(counts[k].sum()),
        }
        for k in range(n)
    ]
    lines = [
        {"x1": at[i, 0], "y1": at[i, 1], "x2": at[j, 0], "y2": at[j, 1], "n": int(counts[i, j])}
        for i in range(n)
        for j in range(i + 1, n)
        if counts[i, j]
    ]
    height = float(at[:, 1].max() + APART / 2)
    return said | {"drawn": True, "vertices": vertices, "lines": lines, "height": height}


def _places(counts: npt.NDArray[np.int64]) -> Point:
    """Places of all vertices inside a square; parts of the graph in rows, the largest first."""
    import networkx as nx

    whole = nx.from_numpy_array(counts > 0)
    parts = sorted(nx.connected_components(whole), key=lambda part: (-len(part), min(part)))
    at = np.zeros((len(counts), 2))
    left = top = bottom = 0.0
    for part in parts:
        vertices = sorted(part)
        side = SIDE if len(parts) == 1 else min(SIDE, max(APART, SIDE * _share(part, parts)))
        if left + side > SIDE + 1e-6:
            left, top = 0.0, bottom
        places = _laid_out(whole.subgraph(vertices), side)
        side_y = side if len(parts) == 1 else float(np.ptp(places[:, 1])) + APART
        shift = np.array([left + side / 2, top + side_y / 2])
        centre = (places.max(0) + places.min(0)) / 2
        at[vertices] = places - centre + shift
        left += side
        bottom = max(bottom, top + side_y)
    return at


def _share(part: set[int], parts: list[set[int]]) -> float:
    """Share of the square's side, so that areas are as the numbers of vertices."""
    n = sum(len(other) for other in parts)
    return float((len(part) / n) ** 0.5)


def _laid_out(part: Any, side: float) -> Point:
    """One connected part around 0, no vertex on another."""
    import networkx as nx

    n = len(part)
    if n == 1:
        return np.zeros((1, 2))
    dense = 2 * part.number_of_edges() / n > MANY_NEIGHBOURS
    found = nx.circular_layout(part) if dense else nx.kamada_kawai_layout(part)
    places = np.array([found[v] for v in sorted(part)])
    reach = (side - APART) / 2
    most = np.abs(places).max()
    places = places / most * reach if most > 0 else places
    for _ in range(100):
        between = places[:, None] - places[None]
        distance = np.linalg.norm(between, axis=2) + np.eye(n) * 2 * APART
        near = distance < APART - 0.5
        if not near.any():
            break
        push = (APART - distance) / 2 / np.maximum(distance, 1e-9) * near
        places = places + (between * push[..., None]).sum(1)
        places = places.clip(-reach, reach) if reach > n**0.5 * APART else places
    return places
