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
from tests.tasks.families.weights.study.test_claims import record_of

Body = dict[str, Any]
Level = Callable[[Body], float]
N_AXES = len(WHAT)
DECOYS, BEATS, NO_MORE = N_AXES, N_AXES + 1, N_AXES + 2
NOTHING, NOTHING_KNOWN, DECAY_SPAN, DECAY_KNOWN = range(N_AXES + 3, N_AXES + 7)
LAYERS, LAYERS_SPAN, LAYERS_KNOWN = range(N_AXES + 7, N_AXES + 10)


def claims(
    span: Level, kkt: Level = lambda body: 0.1, *, only: str = "", **given: Any
) -> list[dict[str, Any]]:
    """Of a made-up record in which these shares come back."""
    made = replace(study("span-networks", "cpu", only=only), n_victims=2)

    def share(body: Body, _seed: int) -> float:
        return (span if body["at"]["attack"] == "span" else kkt)(body)

    return check_claims(record_of(made, share, **given))


def outcomes(*args: Any, **given: Any) -> list[str]:
    return [claim["outcome"] for claim in claims(*args, **given)]


def test_every_axis_has_its_claim_and_names_are_different() -> None:
    axes = set(study("span-networks", "cpu").axes)
    assert set(WHAT) == axes - {"attack"}
    said = [statement.claim for statement in STATEMENTS]
    assert all(is_ours(statement.where) for statement in STATEMENTS)
    assert len(set(said)) == len(said) == N_AXES + 10


@pytest.mark.parametrize(
    ("level", "outcome"),
    [(0.9, "holds"), (0.1, "does not hold"), (0.5, "undecided")],
)
def test_more_than_half_at_every_value_of_an_axis(level: float, outcome: str) -> None:
    found = claims(lambda body: level)
    assert [claim["outcome"] for claim in found[:N_AXES]] == [outcome] * N_AXES
    assert all(("; less than half at" in c["ours"]) == (level < 0.5) for c in found[:N_AXES])


def test_one_value_of_an_axis_is_enough_to_refute_and_is_named() -> None:
    found = claims(lambda body: 0.2 if body["at"]["weights"] == "noise 10 %" else 0.9)
    axes = dict(zip(WHAT, found[:N_AXES], strict=True))
    assert [name for name, c in axes.items() if c["outcome"] == "does not hold"] == ["weights"]
    assert axes["weights"]["ours"].endswith("; less than half at noise 10 %")
    assert "float32: 90% (decays" not in axes["weights"]["ours"]
    assert axes["weights"]["ours"].startswith("float32: 90% (decoys 0.0%), float16: 90%")


def test_decoys_that_pass() -> None:
    assert outcomes(lambda body: 0.9)[DECOYS] == "holds"
    many = claims(lambda body: 0.9, decoys=0.1)[DECOYS]
    assert many["outcome"] == "does not hold"
    assert "; above 3 %: base, " in many["ours"]
    # 19 of 1,880 and an interval on both sides of one of a hundred
    assert outcomes(lambda body: 0.9, decoys=0.01, only="images")[DECOYS] == "undecided"


def test_the_kkt_attack_beside_it() -> None:
    ahead = claims(lambda body: 0.9, lambda body: 0.1)
    assert ahead[BEATS]["outcome"] == "holds"
    assert "least ahead at 20 images: +16 " in ahead[BEATS]["ours"]
    assert ahead[NO_MORE]["outcome"] == "not testable"
    assert ahead[NO_MORE]["ours"] == "nowhere does less than half come back"
    assert outcomes(lambda body: 0.9, lambda body: 0.9)[BEATS] == "undecided"
    assert outcomes(lambda body: 0.9, lambda body: 1.0)[BEATS] == "does not hold"
    behind = outcomes(lambda body: 0.1, lambda body: 0.3)
    assert (behind[BEATS], behind[NO_MORE]) == ("not testable", "does not hold")
    assert outcomes(lambda body: 0.1, lambda body: 0.0)[NO_MORE] == "holds"
    assert outcomes(lambda body: 0.1, lambda body: 0.1)[NO_MORE] == "undecided"


def test_an_attack_that_had_less_time_is_left_out_and_named() -> None:
    def seconds(body: Body) -> float:
        is_short = body["name"].startswith("Adam;") and body["at"]["attack"] == "KKT"
        return 7.0 if is_short else 10.0

    def kkt(body: Body) -> float:
        return 1.0 if body["at"]["rule"] == "Adam" else 0.1

    assert outcomes(lambda body: 0.9, kkt)[BEATS] == "does not hold"
    fair = claims(lambda body: 0.9, kkt, seconds=seconds)[BEATS]
    assert fair["outcome"] == "holds"
    assert fair["ours"].endswith("; left out, the KKT attack had less time: Adam")
    hurried = claims(lambda body: 0.9, seconds=lambda body: 1.0 + (body["at"]["attack"] == "span"))
    assert hurried[BEATS]["outcome"] == "not testable"


def test_what_stands_of_a_standard_start() -> None:
    """As it is: nothing without weight decay unless the start is known."""

    def span(body: Body) -> float:
        at = body["at"]
        return 0.0 if at["start"] == "standard, unknown" and at["decay"] == "0" else 0.9

    def kkt(body: Body) -> float:
        at = body["at"]
        return 0.3 if at["decay"] != "0" or at["start"].startswith("small") else 0.0

    found = outcomes(span, kkt)
    assert found[NOTHING] == "holds"
    assert found[NOTHING_KNOWN] == "does not hold"
    assert found[DECAY_SPAN] == "holds"
    assert found[DECAY_KNOWN] == "undecided"
    as_many = outcomes(lambda body: 1.0, kkt)
    assert as_many[NOTHING] == "does not hold"
    assert as_many[DECAY_SPAN] == as_many[DECAY_KNOWN] == "does not hold"
    nothing = outcomes(lambda body: 0.05, lambda body: 0.05)
    assert nothing[NOTHING] == nothing[NOTHING_KNOWN] == "holds"
    assert outcomes(lambda body: 0.06)[NOTHING] == "undecided", "12 of 200 may be 5 %"


def test_what_stands_of_layers() -> None:
    def fewer(body: Body) -> float:
        return 0.9 - 0.2 * int(body["at"]["layers"])

    def more(body: Body) -> float:
        return 0.1 + 0.2 * int(body["at"]["layers"])

    def only_small(body: Body) -> float:
        return fewer(body) if body["at"]["start"] == "small, unknown" else 1.0

    assert outcomes(fewer, fewer)[LAYERS:] == ["holds"] * 3
    assert outcomes(more, more)[LAYERS:] == ["does not hold"] * 3
    assert outcomes(only_small, more)[LAYERS:] == ["does not hold", "holds", "does not hold"]
    assert outcomes(lambda body: 0.5, fewer)[LAYERS:] == ["holds", "undecided", "undecided"]


def test_without_its_cells_a_claim_is_not_testable() -> None:
    some = claims(lambda body: 0.9, only="3 hidden layers")
    assert {c["outcome"] for c in some[:N_AXES]} == {"not testable", "holds"}
    assert some[0]["ours"] == "no cell of the axis images"
    for k in (NOTHING, NOTHING_KNOWN, DECAY_SPAN, DECAY_KNOWN, LAYERS_KNOWN):
        assert some[k]["outcome"] == "not testable"
    half = claims(lambda body: 0.9, only="images; span")
    assert half[BEATS]["ours"] == "20 images: only attacked by span"
