"""The words of an audit: what may be quoted of it, what it does not say, and its documents."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tasks.audit.tables import share
from tasks.audit.verdict import SUITE, does_not_cover, effect_of, junit, model_card, verdict_of
from tests.tasks.audit.records import DIVERGED, REFUSED, audit, nothing, weights

EVIL = 'a|b <script>"x"</script> `c` _d_\x00\x1b'
NO_PRICE = "not measured: 5 held-out images, 100 needed"
Record = dict[str, Any]


def record(
    leak: float, interval: tuple[float, float], *, p_value: float = 0.001, attack: str = "span",
    cells: tuple[Record, ...] = (), **changes: Any,
) -> Record:  # fmt: skip
    """A made-up record with this leak of the network as it is, and these defences."""
    made, _pictures = audit(limits=False)
    base = made["cells"][0]
    base["leak"] = {"attack": attack, "mean": leak, "interval": list(interval), "each": [leak]}
    base["attacks"][attack]["p_value"] = p_value
    return made | {"cells": [base, *cells]} | changes


def cell(name: str, leak: float | None, accuracy: float, *, front: bool = True,
         kind: str = "defence", failed: str | None = None) -> Record:  # fmt: skip
    share = None if leak is None else {"mean": leak, "interval": [leak, leak], "attack": "span"}
    effect = {"word": "a word", "interval": [(leak or 0) - 0.6, (leak or 0) - 0.6]}
    about = {"test": accuracy, "change": accuracy - 0.8}
    return {
        "name": name, "kind": kind, "leak": share, "effect": effect, "accuracy": about,
        "on_front": front, "failed": failed, "epsilon": None, "attacks": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("leak", "interval", "p_value", "level"),
    [
        (0.663, (0.601, 0.718), 0.001, "leaks"),
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
    made["cells"][0]["attacks"]["span"] |= {"n": 200, "n_good": 162, "n_decoys": 200,
                                            "n_good_decoys": 120}  # fmt: skip
    found = verdict_of(made)
    assert (found["level"], found["base_leak"], found["defence"]) == (level, leak, None)
    facts = [share(leak), "1 % false positives", "span, start unknown, over 12 networks"]
    low, high = (share(end) for end in interval)
    facts += [high if level == "nothing found" else f"{low.removesuffix(' %')} to {high}"]
    facts += ["162 of 200, and for 120 of 200 decoys"]  # decoys score like members
    assert all(fact in found["sentence"] for fact in facts)
    one = verdict_of(made | {"n_victims": 1})  # whose interval is of its images alone
    assert one["level"] == ("nothing found" if p_value > 0.05 else level)
    assert "networks" not in one["sentence"]


def test_the_sentence_has_the_start_unknown_and_other_ways_to_train() -> None:
    cells = (cell("Adam", 0.2, 0.9, kind="variant"), cell("private", 0.04, 0.7))
    made = record(1.0, (0.891, 1.0), attack="span_known", cells=cells)
    found = verdict_of(made)
    assert "with the start unknown: 66 % (62 to 70 %)." in found["sentence"]
    assert "Trained in other ways: Adam: 20 %" in found["sentence"]
    assert found["defence"] == "private"
    base = audit()[0]["cells"][0] | {"leak": None, "failed": "out of memory"}
    none = verdict_of(made | {"cells": [base]})  # no attack gave images
    assert (none["level"], none["base_leak"], none["defence"]) == ("nothing found", None, None)
    assert "out of memory" in none["sentence"]


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
    assert effect_of(leak, before)["word"] == word
    one = effect_of(leak | {"each": each[:1]}, before | {"each": [0.66]})  # of one network
    assert one["interval"] == pytest.approx([interval[0] - 0.7, interval[1] - 0.62])


LITTLE = (
    cell("little", 0.31, 0.9),
    cell("beaten", 0.3, 0.75, front=False),
    cell("failed", 0.0, 0.95, failed="1 of the victims diverged in training"),
    cell("refused", None, 0.95, front=False),
)
HALF = cell("half", 0.3, 0.9, front=False)


@pytest.mark.parametrize(
    ("leak", "defences", "best", "no_price"),
    [
        (0.6, (HALF, cell("most", 0.05, 0.7), cell("all", 0.0, 0.65)), "most", None),
        (0.6, (*LITTLE, cell("half", 0.3, 0.7), cell("more", 0.06, 0.6)), "half", None),
        (0.6, (*LITTLE, cell("half", 0.3, 0.7), cell("free", 0.1, 0.82)), "free", None),
        (0.6, LITTLE, None, None),
        (0.0, (cell("half", 0.0, 0.9),), None, None),
        (0.6, (HALF, cell("most", 0.05, 0.7, front=False)), "most", NO_PRICE),
    ],
)
def test_the_best_defence_is_the_cheapest_that_leaves_little_or_halves_the_leak(
    leak: float, defences: tuple[Record, ...], best: str | None, no_price: str | None
) -> None:
    p_value, ends = 0.001 if leak else 0.5, (leak, leak + 0.03)
    made = record(leak, ends, p_value=p_value, cells=defences, no_price=no_price)
    found = verdict_of(made)
    assert found["defence"] == best
    assert ("defence" in found["sentence"]) == (best is not None)
    assert best is None or f" is {best}: " in found["sentence"]
    assert no_price is None or no_price in found["sentence"]
    assert any(NO_PRICE in text for text in does_not_cover(made)) == (no_price is not None)


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
    assert not any("One network in particular" in entry for entry in does_not_cover(weights()[0]))


def suite_of(record: Record) -> ET.Element:
    root = ET.fromstring(junit(record))
    assert root.tag == "testsuites"
    (suite,) = root
    assert (suite.tag, suite.get("name")) == ("testsuite", SUITE)
    counts = {"tests": "testcase", "failures": "testcase/failure", "skipped": "testcase/skipped"}
    found = {key: f"{len(suite.findall(path))}" for key, path in counts.items()}
    assert {key: suite.get(key) for key in counts} == found
    assert suite.get("errors") == "0"
    return suite


def properties(of: ET.Element) -> dict[str, str]:
    found = of.findall("properties/property")
    return {entry.attrib["name"]: entry.attrib["value"] for entry in found}


def test_a_limit_is_a_test_case() -> None:
    record = audit()[0]
    suite = suite_of(record)
    cases = suite.findall("testcase")
    ends = [["failure"], [], ["skipped"]]  # it fails, passes, is undecided
    assert [[child.tag for child in case] for case in cases] == [["properties", *e] for e in ends]
    assert cases[0].get("classname") == f"{SUITE}.{record['cells'][0]['name']}"
    assert cases[0].get("name") == "good>0.05@fpr=0.01 (span_known)"
    assert properties(cases[1])["value"] == "0.66"
    assert properties(suite)["verdict"] == record["verdict"]["sentence"]
    assert suite.get("time") == f"{sum(record['seconds'].values()):.3f}"


@pytest.mark.parametrize("make", [lambda: audit(limits=False), weights, nothing])
def test_without_limits_every_attack_is_a_test_case(make: Any) -> None:
    record = make()[0]
    record["cells"][0]["name"] = EVIL  # which XML cannot hold
    suite = suite_of(record)
    cases = suite.findall("testcase")
    assert len(cases) == len(record["cells"]) * len(record["attacks"])
    assert suite.get("failures") == "0"
    written = EVIL.replace("\x00", "�").replace("\x1b", "�")
    assert cases[0].get("classname") == f"{SUITE}.{written}"
    if make in (weights, nothing):
        return
    skips = suite.findall("testcase/skipped")
    assert sorted(str(skip.get("message")) for skip in skips) == [REFUSED] + [DIVERGED] * 5
    first, said = record["cells"][0]["attacks"]["span"], properties(cases[0])
    assert said["good at 0.01"] == str(first["good_at"]["0.01"]["mean"])
    assert said["found at 0.05 high"] == str(first["found_at"]["0.05"]["interval"][1])
    assert [said[key] for key in ("n", "n_good", "auc")] == [
        str(first[key]) for key in ("n", "n_good", "auc")
    ]
    assert cases[0].get("time") == f"{first['seconds']:.3f}"
    assert "good at 0.01" not in properties(cases[3])


def tables_of(card: str) -> list[list[list[str]]]:
    """The cells of each table, whose rows must all be as long as its head."""
    found = []
    for block in card.split("\n\n"):
        if block.startswith("|"):
            rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()]
            assert {len(row) for row in rows} == {len(rows[0])}
            assert all(set(cell.strip()) <= set(":-") for cell in rows[1])
            found.append([[cell.strip() for cell in row] for row in rows])
    return found


def test_a_model_card_has_the_numbers_of_the_record() -> None:
    record = audit()[0]
    card = model_card(record)
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
    whole = (record["verdict"]["sentence"], *record["does_not_cover"], record["fingerprint"])
    assert all(text in card for text in whole)
    _attacks, defences = tables_of(model_card(weights()[0]))  # of one file, without accuracy
    assert [row[-2:] for row in defences[2:]] == [["–", "–"]] * 3


def test_names_are_not_markdown() -> None:
    record = audit()[0]
    record["cells"][1]["name"] = EVIL
    record["attacks"][0]["title"] = EVIL
    record["command"] = "palimpsest `audit`\n --data x"
    card = model_card(record)
    tables_of(card)
    assert "<script" not in card
    assert "a\\|b" in card
    assert "`` palimpsest `audit` --data x ``" in card
