"""The words of an audit: what may be quoted of it, and what it does not say."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.audit.verdict import best_defence, does_not_cover, verdict_of
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
        "sentence": "66 % of 100 training images come back well (60 to 72 %; 1 % false positives) "
        "from the weights alone, by the attack span, over 12 networks.",
        "base_leak": 0.663,
        "defence": None,
    }
    other = verdict_of(record(0.663, (0.601, 0.718), rate=0.001, attack="kkt", n_victims=1))
    assert other["sentence"].endswith(
        "(60 to 72 %; 0.1 % false positives) from the weights alone, by the attack KKT."
    )
    known = verdict_of(record(1.0, (0.891, 1.0), attack="span_known"))
    assert known["sentence"] == (
        "100 % of 100 training images come back well (89 to 100 %; 1 % false positives) from the "
        "weights and those that training began with, by the attack span, start known, over 12 "
        "networks."
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
        "positives, by the attack span, over 12 networks."
    )


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
    share = None if leak is None else {"mean": leak, "interval": [0.0, 1.0], "attack": "span"}
    about = {"test": accuracy, "change": accuracy - 0.8}
    return {"name": name, "leak": share, "accuracy": about, "on_front": front, "failed": failed,
            "epsilon": None, "attacks": {}}  # fmt: skip


def test_the_best_defence_is_the_cheapest_that_leaves_little() -> None:
    made = record(0.6, (0.5, 0.7))
    made["cells"] += [cell("half", 0.3, 0.9), cell("most", 0.05, 0.7), cell("all", 0.0, 0.65)]
    assert verdict_of(made)["defence"] == "most"
    assert "that leaves at most 5 % is most: 5.0 % come back" in verdict_of(made)["sentence"]


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
        "over 12 networks. The cheapest defence that halves the leak is half: 30 % come back, and "
        "accuracy changes by −10.0 points."
    )
    made["cells"][3] = cell("free", 0.1, 0.82)
    assert verdict_of(made)["sentence"].endswith("10 % come back, and accuracy changes by +2.0 "
                                                 "points.")  # fmt: skip
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
