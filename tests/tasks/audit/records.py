"""Records of audits for pages and documents: a kept one with a failed cell, limits and a refused
attack; of it, one of a single given file, and one whose attacks were all refused."""

from __future__ import annotations

from typing import Any

from tasks.audit.page import describe_figures
from tests.tasks.page.kept import PAGES as KINDS
from tests.tasks.page.kept import kept
from tests.tasks.page.study_pages import Made

RATES = (0.0, 0.001, 0.01, 0.05)
PAGES = KINDS["audit"]
REFUSED = "the first layer is a convolution, whose weights do not span the images"
DIVERGED = "training diverged: the loss of victim 3 is not a number"
NOT_RUN = {"status": "refused", "why": REFUSED}
NONE: dict[str, Any] = {"attacks": {}, "accuracy": None, "leak": None, "effect": None}
CHECKS = (
    ("good>0.05@fpr=0.01", "span_known", 0.66, 0.05, "fails"),
    ("good>0.8@fpr=0.01", "span_known", 0.66, 0.8, "passes"),
    ("found>0.9@fpr=0.01", "likelihood_ratio", 0.878, 0.9, "undecided"),
)


def audit(*, limits: bool = True) -> Made:
    """(record, pictures) of twelve networks as they are and under each of eighteen defences."""
    record, pictures = kept("audit", "audit")
    *_others, last = cells = record["cells"]
    cells[4]["attacks"]["kkt"] = NOT_RUN
    last |= NONE | {"failed": DIVERGED, "on_front": False}
    keys = ("condition", "attack", "value", "limit", "outcome")
    record["checks"] = [
        dict(zip(keys, check, strict=True)) | {"cell": cells[0]["name"]}
        for check in (CHECKS if limits else ())
    ]
    return _finished(record), pictures


def weights() -> Made:
    """(record, pictures) of one given file, of which no accuracy is known."""
    record, pictures = kept("audit", "audit")
    record["attacks"] = record["attacks"][:3]
    record["cells"] = [record["cells"][k] for k in (0, 14, 15)]
    for k, cell in enumerate(record["cells"]):
        cell |= {"number": k, "accuracy": None, "on_front": False, "epsilon": None}
        cell["attacks"] = {a["name"]: cell["attacks"][a["name"]] for a in record["attacks"]}
        cell["attacks"]["kkt"] = NOT_RUN
    for entry in record["exposed"]:
        entry["n_in"] = 1
    record |= {"subject": "weights", "n_victims": 1, "n_tests": 0, "checks": []}
    return _finished(record), pictures


def nothing() -> Made:
    """(record, pictures) of an audit whose attacks were all refused."""
    record, _pictures = audit(limits=False)
    for cell in record["cells"]:
        cell["attacks"] = {attack["name"]: NOT_RUN for attack in record["attacks"]}
        cell |= {"leak": None, "on_front": False}
    record |= {"exposed": [], "classes_exposed": [], "decoys_shown": []}
    record["verdict"] = {"level": "nothing found", "sentence": "No attack could be made.",
                         "base_leak": None, "defence": None}  # fmt: skip
    return _finished(record), {}


def _finished(record: dict[str, Any]) -> dict[str, Any]:
    return record | {"figures": describe_figures(record)}
