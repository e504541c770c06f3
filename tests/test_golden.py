"""Numbers and verdicts of the kept records, frozen: a change of the code that changes one says so.

`golden.json` has a digest of every record in docs/results: of its numbers, truth values and
verdicts, whatever the keys are called. After a change that is meant,

    python -m tests.test_golden

writes it anew, and the commit says which records changed and why.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).with_name("golden.json")
OUTCOMES = {"holds", "does not hold", "undecided", "not testable"}
NUMBER = re.compile(r"[-+]?\d[\d.,]*")


def leaves(value: Any) -> Iterator[str]:
    """The outcomes of claims and the numbers in a document, those in its sentences included."""
    if isinstance(value, dict):
        for part in value.values():
            yield from leaves(part)
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, str):
        yield from [value] if value in OUTCOMES else NUMBER.findall(value)
    else:
        yield repr(value)


def digests() -> dict[str, str]:
    """The digest of each record, by its path; leaves are sorted, so that order does not matter."""
    found = {}
    for path in sorted((ROOT / "docs" / "results").rglob("*.json")):
        text = path.read_text()
        lines = text.splitlines() if path.parent.name == "benchmarks" else [text]
        parts = "\n".join(sorted(leaves([json.loads(line) for line in lines])))
        found[str(path.relative_to(ROOT))] = hashlib.sha256(parts.encode()).hexdigest()[:16]
    return found


def test_records_have_the_numbers_and_verdicts_that_are_frozen():
    assert digests() == json.loads(GOLDEN.read_text())


def test_a_changed_number_or_verdict_changes_a_digest_and_a_new_key_does_not():
    row = {"ssim": 0.5, "outcome": "holds", "good": True, "ours": "36 of 100 with [-0.031, -0.007]"}
    renamed = {"found": 0.5, "finding": "holds", "good": True, "we": "[-0.031, -0.007], 36 of 100"}
    assert sorted(leaves(row)) == sorted(leaves([renamed]))
    for changed in ({"ssim": 0.51}, {"outcome": "undecided"}, {"good": False}, {"ours": "36"}):
        assert sorted(leaves(row | changed)) != sorted(leaves(row))


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(digests(), indent=1) + "\n")
