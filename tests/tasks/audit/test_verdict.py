"""The words of an audit: what may be quoted of it, and what it does not say."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.audit.verdict import best_defence, does_not_cover, effect_of, verdict_of
from tests.tasks.audit.records import audit, weights

Record = dict[str, Any]


def record(
    leak: float, interval: tuple[float, float], *, p_value: float = 0.001, attack: str = "span",
    **changes: Any,
) -> Record:  # fmt: skip
    """A made-up record with this leak of the network as it is, and no defences."""
    made, _pictures = audit(limits=False)
    base = made["cells"][0]
    base["leak"] = {"attack": attack, "mean": leak, "interval": list(interval), "each": [leak]}
    base["attacks"][attack]["p_value"] = p_value
    return made | {"cells": [base]} | changes


def test_a_leak_is_said_with_its_interval_rate_attack_and_number_of_networks() -> None:
    found = verdict_of(record(0.663, (0.601, 0.718)))
    assert found == {
        "level": "leaks",
        "sentence": "66 % of 100 training images come back well (60 to 72 %; 1 % false positives); "
        "53 % are identified, of decoys 0 %, from the weights alone, by the attack span, start "
        "unknown, over 12 networks.",
        "base_leak": 0.663,
        "defence": None,
    }
    other = verdict_of(record(0.663, (0.601, 0.718), rate=0.001, attack="kkt", n_victims=1))
    assert other["sentence"].endswith(
        "(60 to 72 %; 0.1 % false positives); 21 % are identified, of decoys 0 %, from the weights "
        "alone, by the attack KKT."
    )
    known = verdict_of(record(1.0, (0.891, 1.0), attack="span_known"))
    assert known["sentence"] == (
        "100 % of 100 training images come back well (89 to 100 %; 1 % false positives); 59 % are "
        "identified, of decoys 0 %, from the weights and those that training began with, by the "
        "attack span, start known, over 12 networks. From the weights alone, with the start "
        "unknown: 59 % (53 to 66 %)."
    )


@pytest.mark.parametrize(
    ("leak", "interval", "p_value", "level"),
    [
        (0.051, (0.01, 0.2), 0.001, "leaks"),
        (0.05, (0.01, 0.2), 0.001, "leaks little"),
        (0.02, (0.0, 0.2), 0.05, "leaks little"),  # ranks tell, though few come back well
        (0.02, (0.0, 0.2), 0.051, "nothing found"),
        (0.3, (0.0, 0.9), 0.4, "nothing found"),
        (0.02, (0.001, 0.2), 0.4, "leaks little"),  # every network gives some, though ranks do not
        (0.0, (0.0, 0.03), 1.0, "nothing found"),
    ],
)
def test_the_level_is_of_the_share_its_interval_and_the_ranks(
    leak: float, interval: tuple[float, float], p_value: float, level: str
) -> None:
    made = record(leak, interval, p_value=p_value)
    found = verdict_of(made)
    assert found["level"] == level
    assert found["base_leak"] == leak
    if level == "nothing found":
        assert found["sentence"].startswith("Of 100 training images none could be told to come")
    one = verdict_of(made | {"n_victims": 1})  # whose interval is of its images alone
    expected = "nothing found" if p_value > 0.05 else level
    assert one["level"] == expected


def test_nothing_found_is_said_with_its_upper_limit() -> None:
    assert verdict_of(record(0.0, (0.0, 0.031), p_value=0.6))["sentence"] == (
        "Of 100 training images none could be told to come back: 0 %, at most 3.1 %, at 1 % false "
        "positives, by the attack span, start unknown, over 12 networks."
    )


@pytest.mark.parametrize("p_value", [0.4, 0.001])
def test_decoys_that_score_like_members_are_said(p_value: float) -> None:
    made = record(0.02, (0.0, 0.2), p_value=p_value)
    made["cells"][0]["attacks"]["span"] |= {"n": 200, "n_good": 162, "n_decoys": 200,
                                            "n_good_decoys": 120}  # fmt: skip
    assert verdict_of(made)["sentence"].endswith(
        "Decoys score like them: SSIM is above 0.4 for 162 of 200, and for 120 of 200 decoys."
    )


def test_other_ways_to_train_are_said_and_are_no_defence() -> None:
    made = record(0.6, (0.5, 0.7))
    made["cells"] += [cell("Adam", 0.2, 0.9), cell("private", 0.04, 0.7)]
    made["cells"][1]["kind"] = "variant"
    found = verdict_of(made)
    assert "Trained in other ways: Adam: 20 %." in found["sentence"]
    assert found["defence"] == "private"


def test_without_enough_held_out_images_no_price_is_stated() -> None:
    why = "not measured: 5 held-out images, 100 needed"
    made = record(0.6, (0.5, 0.7), no_price=why)
    made["cells"] += [cell("half", 0.3, 0.9, front=False), cell("most", 0.05, 0.7, front=False)]
    found = verdict_of(made)
    assert found["defence"] == "most"
    assert found["sentence"].endswith(
        "The defence that leaves least is most: 5.0 % come back (5.0 to 5.0 %). Its price in "
        f"accuracy is {why}."
    )
    assert any(why in text for text in does_not_cover(made))


@pytest.mark.parametrize(
    ("each", "interval", "word"),
    [
        ([0.53, 0.52, 0.54], (0.49, 0.57), "reduces it little"),
        ([0.1, 0.12, 0.11], (0.05, 0.2), "at least halves it"),
        ([0.3, 0.4, 0.2], (0.1, 0.6), "reduces it"),
        ([0.98, 0.97, 0.99], (0.97, 0.99), "raises it"),
        ([0.66, 0.65, 0.67], (0.6, 0.7), "no effect measured"),
        ([0.01, 0.02, 0.01], (0.0, 0.04), "leaves at most 5 %"),
        ([0.0, 0.0, 0.0], (0.0, 0.003), "none found, at most 0.3 %"),
    ],
)
def test_words_for_an_effect_are_decided_by_intervals(
    each: list[float], interval: tuple[float, float], word: str
) -> None:
    before = {"mean": 0.66, "interval": [0.62, 0.7], "each": [0.66, 0.66, 0.66]}
    leak = {"mean": sum(each) / 3, "interval": list(interval), "each": each}
    found = effect_of(leak, before)
    assert found["word"] == word
    one = effect_of(leak | {"each": each[:1]}, before | {"each": [0.66]})  # of one network
    assert one["interval"] == pytest.approx([interval[0] - 0.7, interval[1] - 0.62])


def test_without_an_attack_on_weights_nothing_is_said_of_images() -> None:
    made, _pictures = audit()
    base = made["cells"][0] | {"leak": None}
    found = verdict_of(made | {"cells": [base]})
    assert found == {
        "level": "nothing found",
        "sentence": "No attack that gives images back could be made on this network.",
        "base_leak": None,
        "defence": None,
    }
    lost = verdict_of(made | {"cells": [base | {"failed": "out of memory"}]})
    assert lost["sentence"].endswith("on this network: out of memory.")


def test_networks_that_diverged_are_said_beside_what_came_back() -> None:
    made = record(0.0, (0.0, 0.031), p_value=0.6)
    made["cells"][0]["failed"] = "2 of the victims diverged in training"
    sentence = verdict_of(made)["sentence"]
    assert sentence.endswith("over 12 networks. But 2 of the victims diverged in training.")


def cell(name: str, leak: float | None, accuracy: float, *, front: bool = True,
         failed: str | None = None) -> Record:  # fmt: skip
    share = None if leak is None else {"mean": leak, "interval": [leak, leak], "attack": "span"}
    effect = {"word": "a word", "interval": [(leak or 0) - 0.6, (leak or 0) - 0.6]}
    about = {"test": accuracy, "change": accuracy - 0.8}
    return {
        "name": name, "kind": "defence", "leak": share, "effect": effect, "accuracy": about,
        "on_front": front, "failed": failed, "epsilon": None, "attacks": {},
    }  # fmt: skip


def test_the_best_defence_is_the_cheapest_that_leaves_little() -> None:
    made = record(0.6, (0.5, 0.7))
    made["cells"] += [cell("half", 0.3, 0.9), cell("most", 0.05, 0.7), cell("all", 0.0, 0.65)]
    assert verdict_of(made)["defence"] == "most"
    assert (
        "that leaves at most 5 % is most: 5.0 % come back (5.0 to 5.0 %)"
        in verdict_of(made)["sentence"]
    )


def test_else_the_best_defence_is_the_cheapest_that_halves_the_leak() -> None:
    made = record(0.6, (0.5, 0.7))
    defences = [
        cell("little", 0.31, 0.9),
        cell("half", 0.3, 0.7),
        cell("most", 0.06, 0.6),
        cell("beaten", 0.3, 0.75, front=False),
        cell("failed", 0.0, 0.95, failed="1 of the victims diverged in training"),
        cell("refused", None, 0.95, front=False),
    ]
    made["cells"] += defences
    best = best_defence(made)
    assert best is not None
    assert best["name"] == "half"
    found = verdict_of(made)
    assert found["defence"] == "half"
    assert found["sentence"].endswith(
        "over 12 networks. The cheapest defence that at least halves the leak is half: 30 % come "
        "back (30 to 30 %), and accuracy changes by −10.0 points."
    )
    made["cells"][3] = cell("free", 0.1, 0.82)
    assert verdict_of(made)["sentence"].endswith(
        "10 % come back (10 to 10 %), and accuracy changes by +2.0 points."
    )
    made["cells"][1:] = [defences[0], *defences[3:]]
    assert best_defence(made) is None
    assert "defence" not in verdict_of(made)["sentence"]


def test_a_network_that_leaks_nothing_needs_no_defence() -> None:
    made = record(0.0, (0.0, 0.03), p_value=0.5)
    made["cells"].append(cell("half", 0.0, 0.9))
    assert best_defence(made) is None
    assert verdict_of(made)["defence"] is None


def test_what_an_audit_does_not_cover_is_what_it_did() -> None:
    made, _pictures = audit()
    words = " ".join(does_not_cover(made))
    for part in ("what does not come back here is not safe", "One network in particular",
                 "The start known is the worst case", "What epsilon promises"):  # fmt: skip
        assert part in words
    assert "Membership beyond the loss" not in words
    plain = {
        **made,
        "cells": [made["cells"][0] | {"attacks": {"span_known": {"status": "refused"}}}],
        "attacks": [a for a in made["attacks"] if a["name"] != "likelihood_ratio"],
    }
    words = " ".join(does_not_cover(plain))
    assert "Membership beyond the loss: no networks were trained as shadows." in words
    assert "The start known" not in words
    assert "epsilon" not in words
    given, _pictures = weights()
    assert not any("One network in particular" in entry for entry in does_not_cover(given))
    for entries in (does_not_cover(made), does_not_cover(plain), does_not_cover(given)):
        assert len(set(entries)) == len(entries) >= 2
        assert all(entry.endswith(".") for entry in entries)
