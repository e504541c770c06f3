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
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from benchmarks.record import Measurement, main, measured
from tests.storage.s3_server import s3_server
from tests.storage.storm import N_WRITERS, STAGES, Storm, run_apart

VARIANTS = ("spread", "race", "spread on S3", "race on S3")
TIMEOUT_S = 1800.0


def measure(quick: bool) -> Iterator[Measurement]:
    """Kills survived, and what the reader, the writers and vacuum did meanwhile; SystemExit names
    the first faults."""
    n_kills = 10 if quick else 200
    with tempfile.TemporaryDirectory() as folder:
        for variant in VARIANTS:
            name, on_s3 = variant.replace(" ", "-"), variant.endswith("S3")
            n_parts = 40 if quick else 320 if on_s3 else 480
            start = time.monotonic()
            with s3_server() if on_s3 else nullcontext() as server:
                report = run_apart(
                    Storm(
                        variant=variant,
                        location=server.location(name) if server else str(Path(folder, name)),
                        expected=str(Path(folder, f"expected-{n_parts}.json")),
                        scratch=folder,
                        n_parts=n_parts,
                        n_kills=n_kills,
                        seed=time.time_ns() % 2**32,
                    ),
                    server.environment if server else {},
                    TIMEOUT_S,
                )
            if report["faults"]:
                sys.exit(f"{variant}: {'; '.join(report['faults'][:5])}")
            kills, seconds = report["kills"], time.monotonic() - start
            places = [f"{stage} {kills[stage]}" for stage in (*STAGES, "reader") if stage in kills]
            kept = "parts in the end, with the content hash of an undisturbed campaign"
            for case, value, unit in (
                (f"SIGKILLs ({', '.join(places)})", sum(kills.values()), "kills"),
                (f"the storm and its check, {N_WRITERS} writers and a reader", seconds, "s"),
                (kept, n_parts, "parts"),
                ("of these written between the kills", report["n_parts_during_the_storm"], "parts"),
                (
                    "columns the reader hashed, none torn or lost",
                    report["reader_columns"],
                    "columns",
                ),
                ("groups without a receipt that vacuum freed", report["left_groups"], "orphans"),
            ):
                if value:
                    yield measured(
                        "store under a storm of kills", f"{variant}: {case}", value, unit
                    )


if __name__ == "__main__":
    main(measure)
