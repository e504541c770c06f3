"""`palimpsest audit`: what it says before, what it leaves, and the exit code of a limit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from flows.audit import AUDIT
from tests.flows.conftest import Command

TIME = r"[\d.]+ (s|min)"
SETTINGS = {
    "recipe.n_images": "8", "recipe.victim.widths": "32,32", "recipe.training.epochs": "300",
    "n_victims": "4", "n_tests": "40", "attacks": "span,loss,likelihood_ratio",
}  # fmt: skip
TINY = ["--quick", "--data", "photos", "--only", "int8", "--workers", "1", "--device", "cpu",
        *(word for item in SETTINGS.items() for word in ("--set", "=".join(item)))]  # fmt: skip
"""Makes of the quick size two cells of four small networks."""


@pytest.fixture
def audit(palimpsest: Command) -> Command:
    return palimpsest.of("audit")


def test_a_dry_run_says_what_it_would_take_and_makes_nothing(
    audit: Command, tmp_path: Path
) -> None:
    store = tmp_path / "audit"
    said = " ".join(audit.done(*TINY, "--out", store, "--dry-run").split())
    assert re.search(rf"as it is 8 4 4 {TIME} {TIME} .*weights.* 8 4 4 ", said)
    assert re.search(rf"10 units: about {TIME} of work on cpu, {TIME} on 1 workers", said)
    assert not store.exists()


def test_a_leak_above_a_limit_is_exit_code_3(
    audit: Command, tmp_path: Path, prefect_server: None
) -> None:
    store = tmp_path / "audit"
    code, said, complaint = audit(*TINY, "--out", store, "--fail-above", "good>0.0@fpr=0.05")
    assert code == 3, complaint
    text = " ".join(said.split())
    assert "palimpsest audit quick, 1 defence, 4 networks each, on photos" in text
    assert re.search(r"fails: good>0.0@fpr=0.05 is [01]\.\d\d\d by span", text)
    assert "training images come back well" in text
    for name in ("audit.html", "audit.json", "audit-junit.xml", "model-card.md"):
        assert (store / name).is_file()
        assert str((store / name).absolute()) in said
    assert {path.name for path in store.iterdir()} == AUDIT.entries - {"control.json"}
    record = json.loads((store / "audit.json").read_bytes())
    assert record["verdict"]["sentence"] in text
    (check,) = record["checks"]
    assert (check["condition"], check["outcome"]) == ("good>0.0@fpr=0.05", "fails")
    suite = ET.fromstring((store / "audit-junit.xml").read_bytes())[0]
    assert (suite.get("tests"), suite.get("failures")) == ("1", "1")
    assert record["verdict"]["sentence"] in (store / "model-card.md").read_text()
    assert record["verdict"]["sentence"] in (store / "audit.html").read_text()
    products = {path: path.stat().st_mtime_ns for path in (store / "products").iterdir()}

    limits = ("--fail-above", "good>1@fpr=0.01", "--fail-above", "found>1@fpr=0.01")
    said = audit.done("--out", store, "--workers", "1", "--device", "cpu", *limits)
    assert "passes: good>1@fpr=0.01" in " ".join(said.split())
    assert {p: p.stat().st_mtime_ns for p in (store / "products").iterdir()} == products
    again = json.loads((store / "audit.json").read_bytes())
    assert [check["outcome"] for check in again["checks"]] == ["passes"] * 2
    assert again["cells"] == record["cells"]

    refused = audit.refused("--out", store, "--fresh", "--data", "svhn:nowhere")
    assert "nowhere" in refused
    assert {p: p.stat().st_mtime_ns for p in (store / "products").iterdir()} == products


def test_a_store_of_another_study_is_refused(audit: Command, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps({"name": "width"}))
    complaint = audit.refused("--out", tmp_path)
    assert "holds study 'width', not 'audit'" in complaint
