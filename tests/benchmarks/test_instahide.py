"""The benchmarks of InstaHide: counts, verdicts that can fail, sides that agree."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.instahide.exact import _named, outcome, share
from benchmarks.instahide.oracles import all_solutions, auc
from benchmarks.instahide.photographs import (
    PHOTOGRAPHS,
    Case,
    Outcome,
    sizes_of,
    supports,
    with_true_publics,
)
from benchmarks.instahide.samples import (
    NAME,
    draw,
    from_which_on,
    met,
    sequence,
)
from benchmarks.instahide.speed import Gaussian, all_signs, edges_of
from benchmarks.papers import instahide as claims
from benchmarks.papers.findings import Run, part_of
from benchmarks.record import parse_claims
from recon_core.attacks.instahide.coherence import centred, pursued, whitened_windows
from recon_core.attacks.instahide.graph import gram
from recon_core.attacks.instahide.mixing import Encodings, Mixing
from recon_core.attacks.instahide.recover import Recovered, Status
from recon_core.attacks.instahide.signs import Equations, determined


@pytest.mark.parametrize("k_pub", [0, 2])
def test_a_wrong_pixel_is_no_exact_image(k_pub: int) -> None:
    """Without public images up to a sign of each pixel that all images share."""
    drawn = Gaussian.drawn(Mixing.by_parts(k_pub), n=6, p=9, m=60, d=1500)
    found = drawn.recovered()
    assert drawn.matched(found).n_exact == 6
    turned = torch.where(torch.arange(1500) % 3 == 0, -1.0, 1.0)
    exact = drawn.matched(replace(found, images=found.images * turned)).n_exact
    assert exact == (0 if k_pub else 6)
    images = found.images.clone()
    images[1, 7] += 1e-3
    images[2, 8] = torch.nan
    images[3] = torch.nan
    match = drawn.matched(replace(found, images=images))
    assert (match.n_exact, match.n_wrong) == (3, 1)


def test_an_image_that_the_graph_leaves_open_is_not_missed() -> None:
    drawn = Gaussian.drawn(Mixing.by_parts(2), n=6, p=9, m=60, d=1500)
    rows = (drawn.encodings.private != 5).all(1)
    fewer = {name: part[rows] for name, part in vars(drawn.encodings).items() if part is not None}
    found = outcome(replace(drawn, encodings=Encodings(**fewer)))
    assert (found.n_exact, found.n_possible, found.as_possible) == (5, 5, True)
    assert found.status == Counter({"free": 1})
    assert _named([found]).holds is True
    assert _named([found, replace(found, n_wrong=1)]).holds is False
    assert _named([replace(found, as_possible=False)]).holds is False


@pytest.mark.parametrize("with_public", [True, False])
def test_thresholds_are_where_everything_becomes_determined(with_public: bool) -> None:
    for seed in range(20):
        edges = sequence(9, np.random.default_rng(seed))
        twice = met(edges, 9, 2)
        found = from_which_on(edges, 9, twice, with_public=with_public)
        assert np.bincount(edges[:twice].ravel(), minlength=9).min() == 2
        assert np.bincount(edges[: twice - 1].ravel(), minlength=9).min() == 1
        for m, known in ((found - 1, False), (found, True), (found + 5, True)):
            equations = Equations(edges[:m], np.ones((m, 2)), 9)
            assert determined(equations, with_public=with_public).images.all() == known


def test_pairs_are_compared_under_the_images_own_names() -> None:
    edges = edges_of(12, 120, seed=1)
    noisy = torch.from_numpy(gram(edges).astype(np.float32))
    assert share(noisy, edges, 12) == 1
    other = edges.copy()
    other[:6] = (other[:6] + 1) % 12
    assert 0.9 < share(noisy, np.sort(other, axis=1), 12) < 1
    assert share(torch.zeros(120, 120), edges, 12) == 0


def as_true(drawn: Case) -> Recovered:
    """What an attack would give that found everything, images in another order."""
    n = len(drawn.private)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    place = order.argsort()
    return Recovered(
        images=drawn.private[order].double(),
        status=(Status.RECOVERED,) * n,
        edges=np.asarray(place[drawn.encodings.private].sort(1).values),
        weights=np.asarray(drawn.encodings.private_weights.double()),
        public=None,
        explained=np.ones(len(drawn.encodings.y), bool),
        scores=torch.zeros(160, 160),
        common=torch.zeros(160, 160, dtype=torch.int8),
        exact=False,
        n_graphs=1,
    )


def test_photographs_are_scored_by_what_came_back() -> None:
    drawn = Case.drawn("photos", sizes_of(Run(quick=True)), 0)
    found = as_true(drawn)
    best = Outcome.of(found, drawn, 1.0)
    assert (best.pairs, best.exact, best.false) == (1.0, 8, 0)
    assert best.correlation == pytest.approx(1)
    assert best.ssim == pytest.approx(1)
    images = found.images.clone()
    images[:5, ::2] += 0.5  # half the images
    images[5] = torch.nan
    edges = found.edges.copy()
    edges[:16] = -1  # a tenth of the encodings
    worse = Outcome.of(replace(found, images=images, edges=edges), drawn, 1.0)
    assert (worse.pairs, worse.exact, worse.false) == (0.9, 2, 6)
    assert 0.3 < worse.correlation < 0.99
    assert worse.ssim < 0.9


def test_true_public_images_are_the_best_that_pursuit_can_do() -> None:
    sizes = replace(sizes_of(Run(quick=True)), side=32, n_others=0)
    drawn = Case.drawn("photos", sizes, 0)
    e = drawn.encodings
    found = pursued(e.y, drawn.shape, drawn.public, largest=drawn.scheme.largest)
    windows = whitened_windows(drawn.shape, e.y, drawn.public)
    true = with_true_publics(drawn, *windows)
    assert auc(true, e.private) > auc(centred(found.scores), e.private)
    assert 0.2 < supports(drawn, found.coefficients) <= 1


@pytest.mark.slow
def test_a_quick_check_of_all_parts_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "claims.json"
    others = [name for name in claims.PARTS if name != "signs"]
    claims.main(["--quick", "--json", str(path), "--only", *others])
    assert not (tmp_path / NAME).exists()  # a figure of both or none
    claims.main(["--quick", "--json", str(path), "--only", "signs"])
    assert (tmp_path / NAME).read_bytes().startswith(b"\x89PNG")
    found = parse_claims(path.read_text(), name=path.name)
    parts = [part_of(claim) for claim in found]
    assert list(dict.fromkeys(parts)) == list(claims.PARTS)
    by_part = {name: [c for c in found if part_of(c) == name] for name in claims.PARTS}
    for name in ("exact", "publics", "large", "agreement"):
        assert all(claim.outcome == "holds" for claim in by_part[name]), name
    assert "48 recoveries of 8, 12 images" in by_part["samples"][2].ours
    assert by_part["samples"][2].outcome == "holds"
    assert (tmp_path / PHOTOGRAPHS).read_bytes().startswith(b"\x89PNG")
    (tmp_path / NAME).unlink()
    draw(tmp_path)
    assert (tmp_path / NAME).exists()


def test_the_reference_of_signs_is_the_oracle() -> None:
    rng = np.random.default_rng(0)
    edges = edges_of(4, 8, seed=2)
    equations = Equations(edges, np.ones((8, 2)), 4)
    c = rng.standard_normal((8, 3))
    y = np.abs(equations.matrix @ rng.standard_normal((4, 3)) + c)
    found = all_signs(equations, y, c)
    for pixel in range(3):
        solutions = all_solutions(y[:, pixel], c[:, pixel], equations)
        assert any(np.allclose(found[:, pixel], z) for z in solutions)
