"""docs/results: what is kept of claims is what the rules give on the studies that are kept."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.papers import studies
from benchmarks.record import parse_claims
from benchmarks.results.page import RESULTS
from flows.study import study
from tasks.families.weights.study.claims import check_claims
from tasks.page.formats import is_ours
from tests.tasks.families.weights.study.test_claims import record_of

ORDER = ("multiclass", "multiclass-vote", "losses", "weight-decay", "cnn", "width", "large")
PAPERS = {
    "autoencoder": ("autoencoder", "noise-20-layers"),
    "kkt": ORDER,
    "mixcon": ("inversion",),
    "span": ("span-networks",),
}


def arguments(paper: str, file: Path) -> list[str]:
    folders = (str(RESULTS / "studies" / name) for name in PAPERS[paper])
    return ["--check", "--json", str(file), *folders]


@pytest.mark.parametrize("paper", PAPERS)
def test_kept_claims_are_those_of_the_kept_studies(
    paper: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = RESULTS / "claims" / f"{paper}.json"
    studies.main(arguments(paper, kept))
    claims = json.loads(kept.read_text())
    claims[-1]["ours"] += "!"  # the first may be of a benchmark, which no study can check
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(claims))
    with pytest.raises(SystemExit):
        studies.main(arguments(paper, changed))
    assert "has other claims than these studies" in capsys.readouterr().err


def test_every_kept_study_is_collected() -> None:
    folders = [folder.name for folder in (RESULTS / "studies").iterdir()]
    kept = {name for name in folders if not name.startswith("audit")}  # which no paper claims
    assert kept == {name for names in PAPERS.values() for name in names}


def test_kept_pages_have_the_outcomes_of_their_records() -> None:
    pages = sorted((RESULTS / "studies").glob("*/*.html"))
    assert pages
    for file in pages:
        claims = json.loads(file.with_suffix(".json").read_bytes())["claims"]
        tables = re.findall(r'<table class="claims".*?</table>', file.read_text(), re.DOTALL)
        marks = re.findall(r'<span class="outcome \w+">.*?</svg>([^<]*)</span>', "".join(tables))
        ordered = sorted(claims, key=lambda claim: is_ours(claim["where"]))
        assert marks == [claim["outcome"] for claim in ordered], file


def test_no_claim_stands_in_two_files_and_no_question_of_ours_is_called_a_papers() -> None:
    kept = {p.stem: json.loads(p.read_text()) for p in (RESULTS / "claims").glob("*.json")}
    where = Counter(
        (claim["claim"], stem)
        for stem, claims in kept.items()
        for claim in {c["claim"]: c for c in claims if not c["claim"].startswith("...")}.values()
    )
    names = Counter(name for name, _stem in where)
    assert [name for name, n in names.items() if n > 1] == []
    for claims in kept.values():
        for claim in claims:
            unclaimed = claim["theirs"].startswith(("not claimed", "not in the paper", "not meas"))
            ours = claim["claim"].startswith("Ours") or unclaimed
            assert is_ours(claim["where"]) or not ours, claim["claim"]
            assert claim["seconds"] != 0, claim["claim"]


def test_claims_of_studies_are_collected_and_checked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []
    for name in ("losses", "width"):
        record = record_of(study(name, "cpu"), lambda cell, seed: 5.0 / cell["n_images"])
        record |= {
            "schema": "palimpsest-study",
            "version": 2,
            "preset": "cpu",
            "command": f"palimpsest study {name}",
            "seconds": {"attack": 5.0, "score": 1.5},
        }
        record["claims"] = check_claims(record)
        folder = tmp_path / name
        folder.mkdir()
        (folder / "study.json").write_text(json.dumps(record))
        folders.append(str(folder))
    out = tmp_path / "kkt.json"
    studies.main([*folders, "--json", str(out)])
    claims = parse_claims(out.read_text(), name="x")
    assert len(claims) == 4 + 3
    assert claims[0].ours.startswith("losses (cpu): ")
    assert claims[0].seconds == 6.5
    assert claims[-1].command == "palimpsest study width"
    assert "HOLDS: Victims of regression losses" in capsys.readouterr().out
    record["claims"][0]["outcome"] = "not testable"
    (tmp_path / "width" / "study.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="are not what its numbers give"):
        studies.read_study(tmp_path / "width")
    with pytest.raises(ValueError, match="is no study"):
        studies.read_study(tmp_path / "nothing")
