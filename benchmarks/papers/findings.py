"""Parts of a check of a paper's claims: each runs alone and replaces the claims that it gave.

A part is a function of a `Run` that yields `Finding`s; a script has them by name and calls `main`.
Its command line: `[--only NAME ...] [--quick] [--json FILE] [--data SOURCE]`. FILE keeps the claims
of the parts that were not run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.record import Claim, claims_in, hardware
from tasks.study.statements import outcome_of

PHOTOS = "photos"


@dataclass(frozen=True, kw_only=True)
class Run:
    """Inputs of every part. `quick`: small cases. `folder`: where pictures and their data go;
    None: nowhere. `data`: the source of photographs, for parts that take any."""

    quick: bool = False
    folder: Path | None = None
    data: str = PHOTOS


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A claim, what was found, and the verdict by `rule`: None leaves it undecided."""

    claim: str
    where: str
    theirs: str
    ours: str
    holds: bool | None
    rule: str


Part = Callable[[Run], Iterator[Finding]]


def claims_of(script: str, name: str, part: Part, run: Run) -> list[Claim]:
    """The claims of one part, with the command that runs it and the seconds of all of it."""
    start = time.perf_counter()
    findings = list(part(run))
    seconds = round(time.perf_counter() - start, 1)
    command = f"python -m benchmarks.{script} --only {name}" + (" --quick" if run.quick else "")
    if run.data != PHOTOS:
        command += f" --data {run.data}"
    return [
        Claim(
            **{name: value for name, value in vars(found).items() if name != "holds"},
            outcome=outcome_of(found.holds),
            command=command,
            seconds=seconds,
            hardware=hardware(),
        )
        for found in findings
    ]


def part_of(claim: Claim) -> str:
    """The name of the part that a claim comes from."""
    return claim.command.partition("--only ")[2].partition(" ")[0]


def merged(old: Iterable[Claim], new: Sequence[Claim], order: Sequence[str]) -> list[Claim]:
    """`new` in the place of what the same parts gave before, parts in their order."""
    replaced = {part_of(claim) for claim in new}
    kept = [*(claim for claim in old if part_of(claim) not in replaced), *new]
    places = {name: k for k, name in enumerate(order)}
    return sorted(kept, key=lambda claim: places.get(part_of(claim), len(places)))


def main(
    script: str, parts: Mapping[str, Part], title: str, argv: Sequence[str] | None = None
) -> None:
    """The command line: prints every claim, and writes them to --json, part after part."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--only", nargs="+", choices=tuple(parts), metavar="NAME",
                        default=tuple(parts), help=f"of {', '.join(parts)}")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small cases")
    parser.add_argument("--json", type=Path, help="write the claims there, pictures beside them")
    parser.add_argument("--data", default=PHOTOS, metavar="SOURCE",
                        help="photographs, for parts that take any")  # fmt: skip
    options = parser.parse_args(argv)
    path: Path | None = options.json
    folder = None if path is None else path.parent
    run = Run(quick=options.quick, folder=folder, data=options.data)
    try:
        old = claims_in(path)
    except ValueError as error:
        parser.error(str(error))
    for name in (name for name in parts if name in options.only):
        new = claims_of(script, name, parts[name], run)
        for claim in new:
            print(claim)
        print(f"[{name}: {new[0].seconds} s]", flush=True)
        old = merged(old, new, tuple(parts))
        if path is not None:
            path.write_text(json.dumps([asdict(claim) for claim in old], indent=1) + "\n")
