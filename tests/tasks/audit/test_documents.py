"""Documents of an audit: JUnit XML that a reader of it takes, and a section of a model card."""

from __future__ import annotations

import copy
import re
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tasks.audit.tables import share
from tasks.audit.verdict import HEADING, SUITE, junit, model_card
from tests.tasks.audit.records import DIVERGED, REFUSED, audit, nothing, weights

EVIL = 'a|b <script>"x"</script> `c` _d_\x00\x1b'


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
    failure, skipped = failed.find("failure"), open_.find("skipped")
    assert failure is not None
    assert skipped is not None
    assert failure.get("message") == (
        "good>0.05@fpr=0.01 fails: span_known on as it is: 66 %, the limit is 5.0 %"
    )
    assert failed.get("classname") == f"{SUITE}.as it is"
    assert failed.get("name") == "good>0.05@fpr=0.01 (span_known)"
    assert "undecided" in (skipped.get("message") or "")
    assert [child.tag for child in passed] == ["properties"]
    assert properties(passed)["value"] == "0.66"
    assert properties(suite)["verdict"] == record["verdict"]["sentence"]
    assert suite.get("time") == "3957.000"


def test_without_limits_every_attack_is_a_test_case() -> None:
    record = audit(limits=False)[0]
    suite = suite_of(record)
    cases = suite.findall("testcase")
    assert len(cases) == 5 * 11
    assert suite.get("failures") == "0"
    skips = suite.findall("testcase/skipped")
    assert sorted(str(skip.get("message")) for skip in skips) == [REFUSED] * 3 + [DIVERGED] * 5
    first = record["cells"][0]["attacks"]["span"]
    said = properties(cases[0])
    assert said["good_at 0.01"] == str(first["good_at"]["0.01"]["mean"])
    assert said["found_at 0.05 high"] == str(first["found_at"]["0.05"]["interval"][1])
    assert (said["n"], said["n_good"], said["auc"]) == ("1200", str(first["n_good"]),
                                                        str(first["auc"]))  # fmt: skip
    assert cases[0].get("time") == "8.125"
    assert "good_at 0.01" not in properties(cases[3])


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
    assert len(defences) == 2 + 11
    assert defences[4][0] == "more images"
    assert defences[4][1].startswith("22 %")
    assert defences[4][-1] == "+5.6 [+4.8, +6.4]"
    assert defences[-1][0] == f"large steps (no numbers: {DIVERGED})"
    for text in record["does_not_cover"]:
        assert f"- {text}" in card
    for text in (f"`{record['command']}`", f"`{record['fingerprint']}`", record["created"]):
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
    assert "over the images" in model_card(weights()[0])
