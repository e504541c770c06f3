"""The checks of the InstaHide paper: counts, verdicts that can fail, parts that merge."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.instahide.agreement import agreement
from benchmarks.instahide.blind import share
from benchmarks.instahide.exact import _named, outcome
from benchmarks.instahide.figure import NAME, PHOTOGRAPHS, draw
from benchmarks.instahide.oracles import auc
from benchmarks.instahide.photographs import (
    Case,
    Outcome,
    _supports,
    _with_true_publics,
    sizes_of,
)
from benchmarks.instahide.samples import (
    Needed,
    Point,
    as_possible,
    at_least,
    enough,
    from_which_on,
    met,
    quantile,
    sequence,
)
from benchmarks.instahide.signs import Cost
from benchmarks.instahide.speed import Gaussian, edges_of
from benchmarks.papers import instahide as claims_004
from benchmarks.papers.findings import Finding, Run, claims_of, merged, part_of
from benchmarks.record import Claim, parse_claims
from recon_core.attacks.instahide.determined import Equations, determined
from recon_core.attacks.instahide.line_graph import gram
from recon_core.attacks.instahide.mixing import Mixing
from recon_core.attacks.instahide.pair_statistics import likeness
from recon_core.attacks.instahide.recover import Recovered, Status
from tests.benchmarks.pages import build_page

FINDING = Finding(claim="a", where="b", theirs="c", ours="d", holds=True, rule="e")


def case() -> Gaussian:
    return Gaussian.drawn(Mixing.by_parts(2), n=6, p=9, m=60, d=1500)


def claims(name: str, text: str) -> list[Claim]:
    return claims_of(
        "papers.instahide", name, lambda _run: iter([replace(FINDING, claim=text)]), Run(quick=True)
    )


def test_a_part_replaces_its_own_claims_only() -> None:
    old = [*claims("large", "1"), *claims("exact", "2")]
    found = merged(old, [*claims("exact", "3"), *claims("exact", "4")], ("exact", "large"))
    assert [claim.claim for claim in found] == ["3", "4", "1"]
    assert [part_of(claim) for claim in found] == ["exact", "exact", "large"]
    assert found[0].command == "python -m benchmarks.papers.instahide --only exact --quick"


def test_a_wrong_pixel_is_no_exact_image() -> None:
    drawn = case()
    found = drawn.recovered()
    assert drawn.matched(found).n_exact == 6
    images = found.images.clone()
    images[1, 7] += 1e-3
    images[2, 8] = torch.nan
    images[3] = torch.nan
    match = drawn.matched(replace(found, images=images))
    assert (match.n_exact, match.n_wrong) == (3, 1)
    assert float(match.errors[1]) == pytest.approx(1e-3, rel=1e-3)


def test_images_without_signs_are_compared_up_to_one_for_each_pixel() -> None:
    drawn = Gaussian.drawn(Mixing.by_parts(0), n=6, p=0, m=40, d=1500)
    found = drawn.recovered()
    turned = torch.where(torch.arange(1500) % 3 == 0, -1.0, 1.0)
    assert drawn.n_exact(replace(found, images=found.images * turned)) == 6
    images = found.images.clone()
    images[0] *= turned
    assert drawn.n_exact(replace(found, images=images)) < 6


def test_an_image_that_the_graph_leaves_open_is_not_missed() -> None:
    drawn = case()
    rows = (drawn.encodings.private == 5).any(1)
    fewer = replace(drawn.encodings, **{
        name: getattr(drawn.encodings, name)[~rows]
        for name in ("y", "private", "private_weights", "public", "public_weights")
    })  # fmt: skip
    found = outcome(replace(drawn, encodings=fewer))
    assert (found.n_exact, found.n_possible, found.as_possible) == (5, 5, True)
    assert found.status == Counter({"free": 1})
    assert not found.all_exact
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


def points(**changes: int) -> list[Point]:
    made = []
    for n in (20, 200):
        at = {"n": n, "k_pub": 2, "m": round(1.3 * n * np.log(n)), "n_seeds": 4, "n_all": 4}
        more = {"n_possible": 4, "n_as_possible": 4, "n_wrong": 0}
        made.append(Point(**{**at, **more, **changes}, seconds=1.0))
    return made


def graphs(power: float) -> list[Needed]:
    """Thresholds that grow as n^power."""
    made = []
    for n in (20, 200):
        least = round(0.5 * 20 * np.log(20) * (n / 20) ** power)
        found = {k: [least + 5, least + 6] for k in (0, 2)}
        made.append(Needed(n, [least] * 2, [least + 2] * 2, found))
    return made


def test_verdicts_on_the_number_of_encodings_can_fail() -> None:
    law = 1 + np.log10(np.log(200) / np.log(20))
    assert enough(points(), graphs(law)).holds is True
    assert enough(points(), graphs(1.5)).holds is False  # faster than n log n
    assert enough(points(n_all=3), graphs(law)).holds is False
    assert at_least(graphs(law)).holds is True
    assert at_least(graphs(0.8)).holds is False  # slower
    assert as_possible(points()).holds is True
    assert as_possible(points(n_wrong=1)).holds is False
    assert as_possible(points(n_as_possible=3)).holds is False
    assert [quantile([4, 1, 3, 2], share) for share in (0.5, 0.95)] == [2, 4]


def test_growth_of_costs_is_fitted() -> None:
    cost = Cost(
        all_signs={m: 1e-6 * 2.0**m for m in (6, 8, 10, 12)},
        ours={6: 1.0},
        ours_large={m: 1e-6 * m**1.5 for m in (50, 100, 200)},
    )
    assert cost.factor == pytest.approx(2)
    assert cost.exponent == pytest.approx(1.5)
    assert cost.log10_all_signs(1000) == pytest.approx(-6 + 1000 * np.log10(2))


def test_pairs_are_compared_under_the_images_own_names() -> None:
    edges = edges_of(12, 120, seed=1)
    noisy = torch.from_numpy(gram(edges).astype(np.float32))
    assert share(noisy, edges, 12) == 1
    other = edges.copy()
    other[:6] = (other[:6] + 1) % 12
    assert 0.9 < share(noisy, np.sort(other, axis=1), 12) < 1
    assert share(torch.zeros(120, 120), edges, 12) == 0


def test_small_cases_agree_with_the_paper_s_algorithms() -> None:
    found = list(agreement(Run(quick=True)))
    assert [f.holds for f in found] == [True] * 3
    assert "the same for 6 of 6 encodings" in found[0].ours


def photographed(seed: int = 0) -> Case:
    return Case.drawn("photos", sizes_of(Run(quick=True)), seed)


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
    drawn = photographed()
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
    private = drawn.encodings.private
    assert auc(_with_true_publics(drawn), private) > auc(likeness("pursuit", drawn.seen()), private)
    assert 0.2 < _supports(drawn) <= 1


def test_a_source_with_too_few_photographs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"photos has .* images; 5100 are needed: give --data"):
        Case.drawn("photos", sizes_of(Run()), 0)


@pytest.mark.slow
def test_a_quick_check_of_all_parts_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "claims.json"
    others = [name for name in claims_004.PARTS if name != "signs"]
    claims_004.main(["--quick", "--json", str(path), "--only", *others])
    assert not (tmp_path / NAME).exists()  # a figure of both or none
    claims_004.main(["--quick", "--json", str(path), "--only", "signs"])
    assert (tmp_path / NAME).read_bytes().startswith(b"\x89PNG")
    found = parse_claims(path.read_text(), name=path.name)
    parts = [part_of(claim) for claim in found]
    assert list(dict.fromkeys(parts)) == list(claims_004.PARTS)
    by_part = {name: [c for c in found if part_of(c) == name] for name in claims_004.PARTS}
    for name in ("exact", "publics", "large", "agreement"):
        assert all(claim.outcome == "holds" for claim in by_part[name]), name
    assert "48 recoveries of 8, 12 images" in by_part["samples"][2].ours
    assert by_part["samples"][2].outcome == "holds"
    assert "# InstaHide paper" in build_page({"claims/instahide.json": path.read_text()})
    assert (tmp_path / PHOTOGRAPHS).read_bytes().startswith(b"\x89PNG")
    (tmp_path / NAME).unlink()
    draw(tmp_path)
    assert (tmp_path / NAME).exists()


def test_a_file_that_is_no_list_of_claims_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "claims.json"
    path.write_text("[1]")
    with pytest.raises(SystemExit):
        claims_004.main(["--quick", "--only", "noise", "--json", str(path)])
    assert "claims.json" in capsys.readouterr().err
    assert path.read_text() == "[1]"
