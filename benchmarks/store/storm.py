"""Does the pair store survive SIGKILL at any moment: 200 of them, four times.

Four writers and a reader work on one store while they are killed at random moments and replaced.
"spread" gives every writer its own parts, "race" two writers every part; each in a folder and on
an S3 server (moto's, on loopback, every request atomic). It ends with an error unless

- no reader saw a torn or half part, and none that it or a writer had seen was lost or replaced,
- the campaign, resumed, has the content hash of one that nobody disturbed,
- vacuum frees exactly the orphans, and what is left verifies and holds no foreign file.

    python -m benchmarks.store.storm --json docs/results/benchmarks/store_storm.json
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.record import Measurement, main, measured
from tests.storage.s3_server import S3Server, s3_server
from tests.storage.storm import N_WRITERS, STAGES, Storm, run_apart

VARIANTS = ("spread", "race", "spread on S3", "race on S3")
TIMEOUT_S = 1800.0


def measure(quick: bool) -> Iterator[Measurement]:
    """Kills survived, and what the reader, the writers and vacuum did meanwhile."""
    n_kills = 10 if quick else 200
    with tempfile.TemporaryDirectory() as folder:
        for variant in VARIANTS:
            on_s3 = variant.endswith("S3")
            n_parts = 40 if quick else 320 if on_s3 else 480
            with s3_server() if on_s3 else nullcontext() as server:
                report = storm(Path(folder), variant, server, n_kills=n_kills, n_parts=n_parts)
            yield from measurements(variant, report)


def storm(
    folder: Path, variant: str, server: S3Server | None, *, n_kills: int, n_parts: int
) -> dict[str, Any]:
    """The report of one storm without a fault; SystemExit names the first faults otherwise."""
    name = variant.replace(" ", "-")
    report = run_apart(
        Storm(
            variant=variant,
            location=server.location(name) if server else str(folder / name),
            expected=str(folder / f"expected-{n_parts}.json"),
            scratch=str(folder),
            n_parts=n_parts,
            n_kills=n_kills,
            seed=time.time_ns() % 2**32,
        ),
        server.environment if server else {},
        TIMEOUT_S,
    )
    if report["faults"]:
        sys.exit(f"{variant}: {'; '.join(report['faults'][:5])}")
    return report


def measurements(variant: str, report: Mapping[str, Any]) -> Iterator[Measurement]:
    """The numbers of one storm."""
    kills = report["kills"]
    places = [f"{stage} {kills[stage]}" for stage in (*STAGES, "reader") if kills.get(stage)]
    values = (
        (f"SIGKILLs ({', '.join(places)})", report["n_kills"], "kills"),
        (f"the storm and its check, {N_WRITERS} writers and a reader", report["seconds"], "s"),
        (
            "parts in the end, with the content hash of an undisturbed campaign",
            report["n_parts"],
            "parts",
        ),
        ("of these written between the kills", report["n_parts_during_the_storm"], "parts"),
        ("columns the reader hashed, none torn or lost", report["reader_columns"], "columns"),
        (
            f"orphans that vacuum freed, {report['left_temporary_files']} of them temporary files",
            report["left_groups"] + report["left_temporary_files"],
            "orphans",
        ),
    )
    for case, value, unit in values:
        if value:
            yield measured("store under a storm of kills", f"{variant}: {case}", value, unit)


if __name__ == "__main__":
    main(measure)
