"""The claims about the span attack: each rule finds what was planted, its opposite, and a doubt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flows.study import study
from tasks.families.weights.study.claims import check_claims
from tasks.families.weights.study.span_claims import STATEMENTS, WHAT
from tasks.page.formats import is_ours
from tests.tasks.families.weights.study.test_claims import LETTERS, record_of

Body = dict[str, Any]
Level = Callable[[Body], float]
N = len(WHAT)
AXES, DECOYS, BEATS, NO_MORE = (
    slice(0, N),
    slice(N, N + 1),
    slice(N + 1, N + 2),
    slice(N + 2, N + 3),
)
STARTS, LAYERS = slice(N + 3, N + 7), slice(N + 7, N + 10)
"""Claims of axes; decoys; the KKT attack behind, and no better elsewhere; standard starts without
weight decay (unknown, known), what decay adds to each; layers by KKT, span, span from a known
start."""


def claims(
    span: Level, kkt: Level = lambda body: 0.1, *, only: str = "", **planted: Any
) -> list[dict[str, Any]]:
    """Of a made-up record in which these shares come back."""
    made = replace(study("span-networks", "cpu", only=only), n_victims=2)

    def share(body: Body, _seed: int) -> float:
        return (span if body["at"]["attack"] == "span" else kkt)(body)

    return check_claims(record_of(made, share, **planted))


def level(share: float) -> Level:
    return lambda body: share


def at(body: Body, axis: str) -> str:
    return str(body["at"][axis])


def of_starts(body: Body) -> float:
    """As it is: nothing without weight decay unless the start is known."""
    return 0.0 if at(body, "start") == "standard, unknown" and at(body, "decay") == "0" else 0.9


def kkt_of_starts(body: Body) -> float:
    return 0.3 if at(body, "decay") != "0" or at(body, "start").startswith("small") else 0.0


def fewer(body: Body) -> float:
    return 0.9 - 0.2 * int(at(body, "layers"))


def more(body: Body) -> float:
    return 0.1 + 0.2 * int(at(body, "layers"))


def fewer_of_small(body: Body) -> float:
    return fewer(body) if at(body, "start") == "small, unknown" else 1.0


def adam_by_kkt(body: Body) -> float:
    return 1.0 if at(body, "rule") == "Adam" else 0.1


def short_of_adam(body: Body) -> float:
    return 7.0 if body["name"].startswith("Adam;") and at(body, "attack") == "KKT" else 10.0


def short_of_kkt(body: Body) -> float:
    return 1.0 + (at(body, "attack") == "span")


def test_every_axis_has_its_claim_and_names_are_different() -> None:
    assert set(WHAT) == set(study("span-networks", "cpu").axes) - {"attack"}
    said = [statement.claim for statement in STATEMENTS]
    assert all(is_ours(statement.where) for statement in STATEMENTS)
    assert len(set(said)) == len(said) == N + 10


@pytest.mark.parametrize(
    ("span", "kkt", "planted", "asked", "outcomes"),
    [
        (level(0.9), level(0.1), {}, AXES, "+" * N),
        (level(0.1), level(0.1), {}, AXES, "-" * N),
        (level(0.5), level(0.1), {}, AXES, "?" * N),
        (level(0.9), level(0.1), {}, DECOYS, "+"),
        (level(0.9), level(0.1), {"decoys": 0.1}, DECOYS, "-"),
        # 19 of 1,880 and an interval on both sides of one of a hundred
        (level(0.9), level(0.1), {"decoys": 0.01, "only": "images"}, DECOYS, "?"),
        (level(0.9), level(0.1), {}, BEATS, "+"),
        (level(0.9), level(0.9), {}, BEATS, "?"),
        (level(0.9), level(1.0), {}, BEATS, "-"),
        (level(0.1), level(0.3), {}, BEATS, "0"),
        (level(0.9), level(0.1), {}, NO_MORE, "0"),
        (level(0.1), level(0.0), {}, NO_MORE, "+"),
        (level(0.1), level(0.1), {}, NO_MORE, "?"),
        (level(0.1), level(0.3), {}, NO_MORE, "-"),
        (level(0.9), adam_by_kkt, {}, BEATS, "-"),
        (level(0.9), adam_by_kkt, {"seconds": short_of_adam}, BEATS, "+"),  # left out, and named
        (level(0.9), level(0.1), {"seconds": short_of_kkt}, BEATS, "0"),
        (of_starts, kkt_of_starts, {}, STARTS, "+-+?"),
        (level(1.0), kkt_of_starts, {}, STARTS, "----"),
        (level(0.05), level(0.05), {}, STARTS, "++??"),
        (level(0.06), level(0.1), {}, STARTS, "????"),  # 12 of 200 may be 5 %
        (fewer, fewer, {}, LAYERS, "+++"),
        (more, more, {}, LAYERS, "---"),
        (fewer_of_small, more, {}, LAYERS, "-+-"),
        (level(0.5), fewer, {}, LAYERS, "+??"),
        (level(0.9), level(0.1), {"only": "3 hidden layers"}, STARTS, "0000"),
    ],
)
def test_rules_find_what_was_planted(
    span: Level, kkt: Level, planted: dict[str, Any], asked: slice, outcomes: str
) -> None:
    found = claims(span, kkt, **planted)[asked]
    assert "".join(LETTERS[claim["outcome"]] for claim in found) == outcomes


def test_what_decides_is_named() -> None:
    axes = dict(zip(WHAT, claims(lambda body: 0.2 if at(body, "weights") == "noise 10 %" else 0.9),
                    strict=False))  # fmt: skip
    assert [name for name in WHAT if axes[name]["outcome"] == "does not hold"] == ["weights"]
    assert axes["weights"]["ours"].startswith("float32: 90% (decoys 0.0%), float16: 90%")
    assert axes["weights"]["ours"].endswith("; less than half at noise 10 %")
    (beaten,) = claims(level(0.9), adam_by_kkt, seconds=short_of_adam)[BEATS]
    assert beaten["ours"].endswith("; left out, the KKT attack had less time: Adam")
    (many,) = claims(level(0.9), decoys=0.1)[DECOYS]
    assert "; above 3 %: base, " in many["ours"]
    some = claims(level(0.9), only="3 hidden layers")
    assert some[0]["ours"] == "no cell of the axis images"
    (half,) = claims(level(0.9), only="images; span")[BEATS]
    assert half["ours"] == "20 images: only attacked by span"
