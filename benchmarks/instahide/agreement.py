"""The steps of the InstaHide paper's recovery beside its own algorithms, on random small cases,
counted.

A part of `benchmarks.papers.instahide`: public images beside the semidefinite program, graphs
beside all graphs, signs beside all signs. Numbers of roots and of solutions are compared as well.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Int64

from benchmarks.instahide.oracles import all_solutions, assign_by_trying
from benchmarks.instahide.speed import Gaussian, edges_of
from benchmarks.papers.findings import Finding, Run
from recon_core.attacks.instahide.graph import assign, canonical, gram
from recon_core.attacks.instahide.mixing import Mixing
from recon_core.attacks.instahide.public_images import by_sdp, find_publics
from recon_core.attacks.instahide.signs import Equations, determined, solve

SEED = 40_000
"""The first of all seeds: cases that no test has."""
MOST_IMAGES = 7
"""That trying all graphs can have."""


def agreement(run: Run) -> Iterator[Finding]:
    """Three steps beside the paper's."""
    n = 6 if run.quick else 300
    yield publics_agree(n)
    yield graphs_agree(n)
    yield signs_agree(n)


def publics_agree(n_cases: int) -> Finding:
    count = Counter[str]()
    for k_pub, block in itertools.product((2, 3, 4), range(n_cases // 3)):
        seed = SEED + 1000 * k_pub + block
        case = Gaussian.drawn(Mixing.by_parts(k_pub), n=8, p=12, m=1, d=1500, seed=seed)
        y, truth = case.encodings.y, case.encodings.public.sort(1).values
        ours = find_publics(y, case.public, case.mixing)
        theirs = by_sdp(y, case.public, case.mixing)
        count["same"] += torch.equal(ours, theirs)
        count["ours"] += torch.equal(ours, truth)
        count["theirs"] += torch.equal(theirs, truth)
    return Finding(
        claim="Public images without a semidefinite program are those of the program",
        where="section 3.2",
        theirs="the leading eigenvector of its solution",
        ours=f"the same for {count['same']} of {n_cases} encodings (2, 3 or 4 of 12, d=1500); "
        f"right for {count['ours']}, the program's for {count['theirs']}",
        holds=count["same"] == n_cases,
        rule="the same public images in every case",
    )


def graphs_agree(n_cases: int) -> Finding:
    rng, count = np.random.default_rng(SEED), Counter[str]()
    while count["tried"] < n_cases:
        n, m = int(rng.integers(2, 6)), int(rng.integers(1, 8))
        edges = edges_of(n, m, int(rng.integers(2**31)))
        ours, n_images = all_roots(gram(edges))
        if n_images > MOST_IMAGES:
            continue
        theirs = {root.tobytes() for root in assign_by_trying(gram(edges), n_images)}
        count["tried"] += 1
        count["same"] += ours == theirs
        count["several"] += len(theirs) > 1
        count["roots"] += len(theirs)
        count["parallel"] += len(np.unique(edges, axis=0)) < m
    return Finding(
        claim="The graph is found with all its roots",
        where="lemma 3.6 and algorithm 2",
        theirs="one graph, up to the images' numbers, unless it is a triangle or a star of three",
        ours="the same assignments as by trying all graphs, as many and no others, in "
        f"{count['same']} of {n_cases} cases of at most 5 images and 7 encodings: {count['roots']} "
        f"assignments; {count['several']} cases with more than one, {count['parallel']} with "
        "parallel edges",
        holds=count["same"] == n_cases,
        rule="the same set of assignments in every case",
    )


def all_roots(shared: Int64[np.ndarray, "m m"]) -> tuple[set[bytes], int]:
    """Every assignment of the whole, from those of its components; the most images of one."""
    parts = assign(shared)
    found = set()
    for roots in itertools.product(*(part.roots for part in parts)):
        edges, first = np.zeros((len(shared), 2), np.int64), 0
        for part, root in zip(parts, roots, strict=True):
            edges[part.rows] = root + first
            first += int(root.max()) + 1
        found.add(canonical(edges).tobytes())
    return found, sum(max(p.n_images(k) for k in range(len(p.roots))) for p in parts)


def signs_agree(n_cases: int) -> Finding:
    rng, count = np.random.default_rng(SEED), Counter[str]()
    for case in range(n_cases):
        with_public = case % 2 == 0
        n = int(rng.integers(2, 6))
        m = int(rng.integers(n + 1, 12))
        equations = Equations(edges_of(n, m, int(rng.integers(2**31))), np.ones((m, 2)), n)
        c = rng.standard_normal((m, 1)) * with_public
        y = np.abs(equations.matrix @ rng.standard_normal((n, 1)) + c)
        known = determined(equations, with_public=with_public)
        solutions = np.array(all_solutions(y[:, 0], c[:, 0], equations))
        if not known.free.any():
            count["counted"] += 1
            count["as many"] += len(solutions) == known.n_solutions
        ours = solve(torch.from_numpy(y), torch.from_numpy(c), equations, tolerance=1e-7).z
        own = ours[:, 0].numpy()
        values, mine = (solutions, own) if with_public else (np.abs(solutions), np.abs(own))
        off = np.abs(values - mine).max(0)
        count["images"] += int(known.images.sum())
        count["same"] += int((off[known.images] < 1e-6).sum())
        count["open"] += int(known.ambiguous.sum())
        differ = (np.ptp(solutions, axis=0) > 1e-6) & np.isnan(own)
        count["left open"] += int(differ[known.ambiguous].sum())
    pairs = (("as many", "counted"), ("same", "images"), ("left open", "open"))
    return Finding(
        claim="Signs and images are those of trying all signs",
        where="lemma 3.7 and algorithm 3",
        theirs="the least squares of all 2^m signs",
        ours=f"{n_cases} pixels of 2 to 5 images, half with public ones, up to 11 encodings: as "
        f"many solutions as were predicted in {count['as many']} of {count['counted']} without "
        f"free images; {count['same']} of {count['images']} determined images the same in all "
        f"solutions and ours; {count['left open']} of {count['open']} ambiguous ones differ "
        "between solutions and were not given",
        holds=all(count[got] == count[of] for got, of in pairs),
        rule="the same in every case",
    )
