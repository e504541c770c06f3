"""Claims of the KKT, autoencoder and MixCon papers, decided by our own studies.

    python -m benchmarks.papers.studies [--check] [--json docs/results/claims/kkt.json] STUDY...

STUDY is a study.json, recovery.json or inversion.json, or its folder. Every study checks its claims
itself when it is made (`study/claims.py` of its family, with the rules); they are checked again
here, on its numbers, and must come out the same. Seconds are the studies', and so is the hardware
of those that FILE already has; that of others is this machine's: collect them where they were made.
Claims that a benchmark put into FILE stay. With --check nothing is written: it fails if FILE's
claims are not those of the studies.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import Claim, Hardware, claims_in, hardware, write_claims
from benchmarks.results.studies import read_record
from tasks.families.autoencoder.study.claims import check_recovery
from tasks.families.autoencoder.study.page import RECOVERY_PAGE
from tasks.families.inversion.study.claims import check_inversion
from tasks.families.inversion.study.page import INVERSION_PAGE
from tasks.families.weights.study.claims import check_claims
from tasks.families.weights.study.page import STUDY_PAGE

KINDS = ((STUDY_PAGE, check_claims), (RECOVERY_PAGE, check_recovery),
         (INVERSION_PAGE, check_inversion))  # fmt: skip


def read_study(path: Path) -> dict[str, Any]:
    """The record of a study, a file or its folder.

    Raises ValueError for anything else, and for one whose claims are not what its check gives.
    """
    files = {path / f"{page.name}.json" if path.is_dir() else path: (page, check)
             for page, check in KINDS if path.stem == page.name or path.is_dir()}  # fmt: skip
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise ValueError(f"{path} is no study; give the folder of a study")
    page, check = files[file]
    record = read_record(file.read_text(), str(file), page)
    if check(record) != record["claims"]:
        raise ValueError(
            f"the claims in {file} are not what its numbers give with this release; run the study "
            "again, which attacks nothing anew"
        )
    return record


def claims_of(record: Mapping[str, Any], machines: Mapping[str, Hardware]) -> Iterator[Claim]:
    """Every claim of a study, in its order; the study's name and size stand before our numbers.

    `machines`: what made a study, by its command; this machine if it is not there.
    """
    name, command = f"{record['name']} ({record['preset']})", record["command"]
    made = {"command": command, "hardware": machines.get(command) or hardware(),
            "seconds": round(sum(record["seconds"].values()), 1)}  # fmt: skip
    for found in record["claims"]:
        yield Claim(**found | made | {"ours": f"{name}: {found['ours']}"})


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("studies", type=Path, nargs="+", metavar="STUDY")
    parser.add_argument("--json", type=Path, help="also write docs/results/claims/PAPER.json")
    parser.add_argument("--check", action="store_true", help="only compare with the file of --json")
    options = parser.parse_args(argv)
    path: Path | None = options.json
    try:
        records = [read_study(study) for study in options.studies]
        old = claims_in(path)
    except ValueError as error:
        parser.error(str(error))
    machines = {claim.command: claim.hardware for claim in old}
    claims = [claim for claim in old if claim.command.startswith("python -m benchmarks.")]
    claims += first_tested(claim for record in records for claim in claims_of(record, machines))
    if options.check:
        if claims != old:
            parser.error(f"{path} has other claims than these studies; run it without --check")
        return
    write_claims(claims, path)


if __name__ == "__main__":
    main()
