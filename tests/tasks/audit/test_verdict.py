"""The words of an audit: what may be quoted of it, what it does not say, and its documents."""

from __future__ import annotations

import copy
import re
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tasks.audit.tables import share
from tasks.audit.verdict import (
    HEADING,
    SUITE,
    does_not_cover,
    effect_of,
    junit,
    model_card,
    verdict_of,
)
from tests.tasks.audit.records import DIVERGED, REFUSED, audit, nothing, weights

EVIL = 'a|b <script>"x"</script> `c` _d_\x00\x1b'
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
    assert (found["level"], found["base_leak"], found["defence"]) == ("leaks", 0.663, None)
    assert "66 % of 100 training images" in found["sentence"]
    assert "(60 to 72 %; 1 % false positives)" in found["sentence"]
    assert "by the attack span, start unknown, over 12 networks" in found["sentence"]
    known = verdict_of(record(1.0, (0.891, 1.0), attack="span_known", n_victims=1))["sentence"]
    assert "with the start unknown: 66 % (62 to 70 %)." in known
    assert "networks" not in known


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


@pytest.mark.parametrize("p_value", [0.4, 0.001])
def test_decoys_that_score_like_members_are_reported(p_value: float) -> None:
    made = record(0.02, (0.0, 0.2), p_value=p_value)
    made["cells"][0]["attacks"]["span"] |= {"n": 200, "n_good": 162, "n_decoys": 200,
                                            "n_good_decoys": 120}  # fmt: skip
    assert "162 of 200, and for 120 of 200 decoys" in verdict_of(made)["sentence"]


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
    assert why in found["sentence"]
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
    base = audit()[0]["cells"][0] | {"leak": None, "failed": "out of memory"}
    found = verdict_of(audit()[0] | {"cells": [base]})
    assert (found["level"], found["base_leak"], found["defence"]) == ("nothing found", None, None)
    assert "out of memory" in found["sentence"]


def cell(name: str, leak: float | None, accuracy: float, *, front: bool = True,
         failed: str | None = None) -> Record:  # fmt: skip
    share = None if leak is None else {"mean": leak, "interval": [leak, leak], "attack": "span"}
    effect = {"word": "a word", "interval": [(leak or 0) - 0.6, (leak or 0) - 0.6]}
    about = {"test": accuracy, "change": accuracy - 0.8}
    return {
        "name": name, "kind": "defence", "leak": share, "effect": effect, "accuracy": about,
        "on_front": front, "failed": failed, "epsilon": None, "attacks": {},
    }  # fmt: skip


LITTLE = [
    cell("little", 0.31, 0.9),
    cell("beaten", 0.3, 0.75, front=False),
    cell("failed", 0.0, 0.95, failed="1 of the victims diverged in training"),
    cell("refused", None, 0.95, front=False),
]


@pytest.mark.parametrize(
    ("leak", "defences", "best"),
    [
        (0.6, [cell("half", 0.3, 0.9), cell("most", 0.05, 0.7), cell("all", 0.0, 0.65)], "most"),
        (0.6, [*LITTLE, cell("half", 0.3, 0.7), cell("more", 0.06, 0.6)], "half"),
        (0.6, [*LITTLE, cell("half", 0.3, 0.7), cell("free", 0.1, 0.82)], "free"),
        (0.6, LITTLE, None),
        (0.0, [cell("half", 0.0, 0.9)], None),
    ],
)
def test_the_best_defence_is_the_cheapest_that_leaves_little_or_halves_the_leak(
    leak: float, defences: list[Record], best: str | None
) -> None:
    made = record(leak, (leak, leak + 0.03), p_value=0.001 if leak else 0.5)
    made["cells"] += defences
    found = verdict_of(made)
    assert found["defence"] == best
    assert ("defence" in found["sentence"]) == (best is not None)
    if best is not None:
        assert f" is {best}: " in found["sentence"]


def test_what_an_audit_does_not_cover_is_what_it_did() -> None:
    made, _pictures = audit()
    words = " ".join(does_not_cover(made))
    parts = ("One network in particular", "The start known", "What epsilon promises")
    assert all(part in words for part in parts)
    assert "Membership beyond the loss" not in words
    plain = {
        **made,
        "cells": [made["cells"][0] | {"attacks": {"span_known": {"status": "refused"}}}],
        "attacks": [a for a in made["attacks"] if a["name"] != "likelihood_ratio"],
    }
    words = " ".join(does_not_cover(plain))
    assert "Membership beyond the loss" in words
    assert not any(part in words for part in parts[1:])
    given, _pictures = weights()
    assert not any("One network in particular" in entry for entry in does_not_cover(given))
    for entries in (does_not_cover(made), does_not_cover(plain), does_not_cover(given)):
        assert len(set(entries)) == len(entries) >= 2
        assert all(entry.endswith(".") for entry in entries)


def suite_of(record: dict[str, Any]) -> ET.Element:
    root = ET.fromstring(junit(record))
    assert root.tag == "testsuites"
    (suite,) = root
    assert (suite.tag, suite.get("name")) == ("testsuite", SUITE)
    cases = suite.findall("testcase")
    counts = {"tests": cases, "failures": suite.findall("testcase/failure"),
              "skipped": suite.findall("testcase/skipped")}  # fmt: skip
    assert {key: suite.get(key) for key in counts} == {k: f"{len(v)}" for k, v in counts.items()}
    assert suite.get("errors") == "0"
    return suite


def properties(of: ET.Element) -> dict[str, str]:
    found = of.findall("properties/property")
    return {entry.attrib["name"]: entry.attrib["value"] for entry in found}


def test_a_limit_is_a_test_case() -> None:
    record = audit()[0]
    suite = suite_of(record)
    failed, passed, open_ = suite.findall("testcase")
    assert [child.tag for child in failed] == ["properties", "failure"]
    assert [child.tag for child in passed] == ["properties"]
    assert [child.tag for child in open_] == ["properties", "skipped"]
    assert failed.get("classname") == f"{SUITE}.{record['cells'][0]['name']}"
    assert failed.get("name") == "good>0.05@fpr=0.01 (span_known)"
    assert properties(passed)["value"] == "0.66"
    assert properties(suite)["verdict"] == record["verdict"]["sentence"]
    assert suite.get("time") == f"{sum(record['seconds'].values()):.3f}"


def test_without_limits_every_attack_is_a_test_case() -> None:
    record = audit(limits=False)[0]
    suite = suite_of(record)
    cases = suite.findall("testcase")
    assert len(cases) == 5 * 19
    assert suite.get("failures") == "0"
    skips = suite.findall("testcase/skipped")
    assert sorted(str(skip.get("message")) for skip in skips) == [REFUSED] + [DIVERGED] * 5
    first = record["cells"][0]["attacks"]["span"]
    said = properties(cases[0])
    assert said["good at 0.01"] == str(first["good_at"]["0.01"]["mean"])
    assert said["found at 0.05 high"] == str(first["found_at"]["0.05"]["interval"][1])
    assert {key: said[key] for key in ("n", "n_good", "auc")} == {
        key: str(first[key]) for key in ("n", "n_good", "auc")
    }
    assert cases[0].get("time") == f"{first['seconds']:.3f}"
    assert "good at 0.01" not in properties(cases[3])


@pytest.mark.parametrize("make", [weights, nothing])
def test_other_audits_have_test_cases_too(make: Any) -> None:
    record = make()[0]
    n = len(record["cells"]) * len(record["attacks"])
    assert len(suite_of(record).findall("testcase")) == n


def test_names_that_xml_cannot_hold_are_written() -> None:
    record = copy.deepcopy(audit(limits=False)[0])
    record["cells"][0]["name"] = EVIL
    case = suite_of(record).findall("testcase")[0]
    assert case.get("classname") == f"{SUITE}." + EVIL.replace("\x00", "�").replace("\x1b", "�")


def tables_of(card: str) -> list[list[list[str]]]:
    """The cells of each table, whose rows must all be as long as its head."""
    found = []
    for block in card.split("\n\n"):
        if not block.startswith("|"):
            continue
        rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()]
        assert {len(row) for row in rows} == {len(rows[0])}
        assert all(set(cell.strip()) <= set(":-") for cell in rows[1])
        found.append([[cell.strip() for cell in row] for row in rows])
    return found


def test_a_model_card_has_the_numbers_of_the_record() -> None:
    record = audit()[0]
    card = model_card(record)
    assert card.startswith(HEADING + "\n\n")
    assert record["verdict"]["sentence"] in card
    attacks, defences = tables_of(card)
    assert attacks[0] == ["Attack", "It has", "It gives", "0 %", "0.1 %", "1 %", "5 %"]
    for row, attack in zip(attacks[2:], record["attacks"], strict=True):
        found = record["cells"][0]["attacks"][attack["name"]]
        key = "good_at" if attack["kind"] == "reconstruction" else "found_at"
        assert row[:2] == [attack["title"], attack["knows"]]
        for text, entry in zip(row[3:], found[key].values(), strict=True):
            low, high = (share(end).removesuffix(" %") for end in entry["interval"])
            assert text == f"{share(entry['mean'])} [{low}, {high}]"
    assert len(defences) == 2 + 19
    for row, cell in zip(defences[2:-1], record["cells"][:-1], strict=True):
        assert row[0] == cell["name"]
        assert row[1].startswith(share(cell["leak"]["mean"]))
    assert f"(no numbers: {DIVERGED})" in defences[-1][0]
    uncovered = (f"- {text}" for text in record["does_not_cover"])
    for text in (*uncovered, f"`{record['command']}`", f"`{record['fingerprint']}`"):
        assert text in card


def test_names_are_not_markdown() -> None:
    record = copy.deepcopy(audit()[0])
    record["cells"][1]["name"] = EVIL
    record["attacks"][0]["title"] = EVIL
    record["command"] = "palimpsest `audit`\n --data x"
    card = model_card(record)
    tables_of(card)
    assert "<script" not in card
    assert "a\\|b" in card
    assert "`` palimpsest `audit` --data x ``" in card


def test_a_model_card_of_one_file_knows_no_accuracy() -> None:
    _attacks, defences = tables_of(model_card(weights()[0]))
    assert [row[-2:] for row in defences[2:]] == [["–", "–"]] * 3
