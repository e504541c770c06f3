"""Claims of the KKT paper, decided by our own studies.

    python -m benchmarks.papers.kkt [--check] [--json docs/results/claims/kkt.json] STUDY...

STUDY is a study.json, or its folder. Every study checks its claims itself when it is made
(`tasks.families.weights.study.claims`, with the rules); they are checked again here, on its
numbers, and must come out the same. Seconds are the studies', and so is the hardware of those that
FILE already has; that of others is this machine's: collect them where they were made. Claims that a
benchmark put into FILE stay. With --check nothing is written: it fails if FILE's claims are not
those of the studies.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.record import Claim, Hardware, hardware, parse_claims
from tasks.families.weights.study.claims import check_claims
from tasks.families.weights.study.page import STUDY_PAGE
from tasks.page.formats import with_names
from tasks.page.study_page import StudyPage


def read_record(
    path: Path,
    page: StudyPage,
    check: Callable[[dict[str, Any]], list[dict[str, Any]]],
) -> dict[str, Any]:
    """The record at `path`, a file or the folder of a study with that page.

    Raises ValueError for anything else, and for one whose claims are not what `check` gives.
    """
    file = path / f"{page.name}.json" if path.is_dir() else path
    try:
        record = dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{file} is no study ({error}); give the folder of a study") from error
    found, expected = (record.get("schema"), record.get("version")), (page.schema, page.version)
    if found != expected:
        raise ValueError(f"{file} is {found}, expected {expected}; make the study again")
    record["claims"] = [c | {"where": with_names(c["where"])} for c in record["claims"]]
    if check(record) != record["claims"]:
        raise ValueError(
            f"the claims in {file} are not what its numbers give with this release; run the study "
            "again, which attacks nothing anew"
        )
    return record


read_study = partial(read_record, page=STUDY_PAGE, check=check_claims)


def claims_of(record: Mapping[str, Any], machines: Mapping[str, Hardware]) -> Iterator[Claim]:
    """Every claim of a study, in its order; the study's name and size stand before our numbers.

    `machines`: what made a study, by its command; this machine if it is not there.
    """
    name = f"{record['name']} ({record['preset']})"
    machine = machines.get(record["command"]) or hardware()
    for found in record["claims"]:
        made = {"command": record["command"], "hardware": machine}
        seconds = round(sum(record["seconds"].values()), 1)
        yield Claim(**found | made | {"ours": f"{name}: {found['ours']}", "seconds": seconds})


def first_tested(claims: Iterable[Claim]) -> list[Claim]:
    """Each claim as the first study that can test it gave it; of one that none can, the first.

    A later study so fills what an earlier one lacks, and adds no second opinion.
    """
    found: dict[tuple[str, str, str], Claim] = {}
    for claim in claims:
        key = claim.claim, claim.where, claim.theirs
        if key not in found or found[key].outcome == "not testable" != claim.outcome:
            found[key] = claim
    return list(found.values())


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: prints every claim, and writes them to --json."""
    collect(argv, read=read_study, title=__doc__.splitlines()[0], paper="kkt")


def collect(
    argv: Sequence[str] | None,
    *,
    read: Callable[[Path], dict[str, Any]],
    title: str,
    paper: str,
) -> None:
    """The command line of a paper's claims."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("studies", type=Path, nargs="+", metavar="STUDY")
    parser.add_argument("--json", type=Path, help=f"also write docs/results/claims/{paper}.json")
    parser.add_argument("--check", action="store_true", help="only compare with the file of --json")
    options = parser.parse_args(argv)
    path: Path | None = options.json
    try:
        records = [read(study) for study in options.studies]
        old = parse_claims(path.read_text(), name=path.name) if path and path.is_file() else []
    except ValueError as error:
        parser.error(str(error))
    machines = {claim.command: claim.hardware for claim in old}
    claims = [claim for claim in old if claim.command.startswith("python -m benchmarks.")]
    claims += first_tested(claim for record in records for claim in claims_of(record, machines))
    if options.check:
        if claims != old:
            parser.error(f"{path} has other claims than these studies; run it without --check")
        return
    for claim in claims:
        print(f"{claim.outcome.upper()}: {claim.claim} ({claim.where})")
        print(f"  theirs: {claim.theirs}\n  ours:   {claim.ours}\n  rule:   {claim.rule}")
    if path is not None:
        path.write_text(json.dumps([asdict(claim) for claim in claims], indent=1) + "\n")


if __name__ == "__main__":
    main()
