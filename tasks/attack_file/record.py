"""Parts of an attack's record and of its cache; nothing here needs a flow, nor imports Prefect."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recon_core.victims.preflight import Preflight
from storage.documents import read_document
from storage.files import write_json


def chances(found: Preflight) -> dict[str, Any]:
    """Verdict, outlook and findings as JSON."""
    findings = [asdict(finding) for finding in found.findings]
    return {"verdict": found.verdict, "outlook": found.outlook, "findings": findings}


def plain(settings: Any) -> dict[str, Any]:
    """A dataclass as JSON has it: tuples are lists."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    return found


def setting_rows(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, text) of every setting."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from setting_rows(value, f"{above}{key}.")
        elif isinstance(value, list):
            yield f"{above}{key}", ", ".join(map(str, value))
        else:
            yield f"{above}{key}", "none" if value is None else str(value)


def six_digits(value: float) -> float | None:
    """A number for a record; None for what JSON has no number for."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def claimed(cache: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The job that `cache/job.json` names; `wanted`, if that is new."""
    path = cache / "job.json"
    if path.exists():
        return read_document(path, "remove it with what is beside it, or start over with --fresh")
    cache.mkdir(parents=True, exist_ok=True)
    write_json(path, wanted)
    return wanted
