"""Claims of a paper as a study's page has them: counted by outcome, and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.page.tables import Table

KEYS = ("claim", "where", "theirs", "ours", "rule", "outcome")
OUTCOMES = {"holds": "holds", "fails": "does not hold", "undecided": "undecided",
            "untestable": "not testable"}  # fmt: skip


def claim_counts(record: Mapping[str, Any]) -> dict[str, int]:
    """Number of claims (`n_claims`), and of each outcome."""
    found = [claim["outcome"] for claim in record["claims"]]
    return {"n_claims": len(found)} | {k: found.count(text) for k, text in OUTCOMES.items()}


def whose_claims(record: Mapping[str, Any]) -> str:
    """Words for whose the claims are: the paper's, or ours too."""
    is_ours = any(claim["where"] == "ours" for claim in record["claims"])
    return "of the paper and ours" if is_ours else "of the paper"


def claims_table(record: Mapping[str, Any]) -> Table:
    """One row per claim."""
    cells = {key: [claim[key] for claim in record["claims"]] for key in KEYS}
    plain = (type(None), str, int, float)
    return Table(
        "claims",
        {key: [v if isinstance(v, plain) else str(v) for v in cells[key]] for key in KEYS},
    )
