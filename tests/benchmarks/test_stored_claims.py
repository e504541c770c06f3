"""docs/results: what is kept of claims is what the rules give on the studies that are kept."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.papers import autoencoder as claims_000
from benchmarks.papers import kkt as claims_002
from benchmarks.papers import mixcon as claims_003
from benchmarks.results.page import RESULTS
from tasks.page.formats import is_ours

ORDER = ("multiclass", "multiclass-vote", "losses", "weight-decay", "cnn", "width", "large")
PAPERS: dict[str, tuple[Callable[[list[str]], None], tuple[str, ...]]] = {
    "autoencoder": (claims_000.main, ("autoencoder", "noise-20-layers")),
    "kkt": (claims_002.main, ORDER),
    "mixcon": (claims_003.main, ("inversion",)),
    "span": (claims_002.main, ("span-networks",)),
}


def arguments(paper: str, file: Path) -> list[str]:
    return [
        "--check",
        "--json",
        str(file),
        *(str(RESULTS / "studies" / s) for s in PAPERS[paper][1]),
    ]


@pytest.mark.parametrize("paper", PAPERS)
def test_kept_claims_are_those_of_the_kept_studies(
    paper: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = PAPERS[paper][0]
    kept = RESULTS / "claims" / f"{paper}.json"
    main(arguments(paper, kept))
    claims = json.loads(kept.read_text())
    claims[-1]["ours"] += "!"  # the first may be of a benchmark, which no study can check
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(claims))
    with pytest.raises(SystemExit):
        main(arguments(paper, changed))
    assert "has other claims than these studies" in capsys.readouterr().err


def test_every_kept_study_is_collected() -> None:
    folders = [folder.name for folder in (RESULTS / "studies").iterdir()]
    kept = {name for name in folders if not name.startswith("audit")}  # which no paper claims
    assert kept == {name for _main, names in PAPERS.values() for name in names}


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
