"""Attack an autoencoder that is given as a file: do its training images come back from damage?"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from storage.files import write_file, write_json
from tasks.artifacts import leave_link, leave_picture, leave_table
from tasks.campaign.plan import code_version
from tasks.cluster.workers import Device, resolve_device, usable_cores
from tasks.families.autoencoder.attack import Recovery, recover_all
from tasks.families.autoencoder.inputs import AutoencoderJob, Method
from tasks.families.autoencoder.preflight import Prepared, prepare
from tasks.families.autoencoder.report import contact_sheet, write_page, write_recoveries
from tasks.families.autoencoder.results import Cell, conventions, pairs, record_of_cell, score
from tasks.orchestration import flow, task
from tasks.progress import stage_progress

ENTRIES = frozenset(
    {
        *("cache", "preflight.json", "attack.json", "recoveries.safetensors"),
        *("recoveries.png", "report.html"),
    }
)
"""What an attack leaves in its folder."""
SHOWN_VERSIONS = ("palimpsest", "torch", "numpy", "safetensors")
SCHEMA, VERSION = "palimpsest-attack-autoencoder", 1


@flow(name="attack-autoencoder", flow_run_name="{job.weights}")
def attack_autoencoder(
    job: AutoencoderJob, device: Device = "auto", force: bool = False, command: str = ""
) -> dict[str, Any]:
    """Recover degraded training images from a given autoencoder; the record in attack.json.

    1. Read the network and the images. 2. Ask f whether it can work. 3. Attack training images and
    control images alike. 4. Score. 5. Show it.
    Raises ValueError if an attack cannot work, unless `force`.
    """
    place = resolve_device(device)
    prepared = prepare(job, place)
    job.out.mkdir(parents=True, exist_ok=True)
    write_json(job.out / "preflight.json", prepared.record())
    if prepared.preflight.stopped and not force:
        raise ValueError(refusal(prepared))
    cells = score(do_recoveries(job, prepared, place))
    record = record_of(job, prepared, cells)
    show(job, record, cells, command)
    leave_table("recoveries", summary_rows(cells), "Every mask and method, beside the control")
    return record


@task(name="recover")
def do_recoveries(job: AutoencoderJob, prepared: Prepared, device: str) -> list[Recovery]:
    """What is not done yet."""
    with stage_progress("Recover", "image") as advance:
        return recover_all(
            job, prepared.victim, prepared.material.cases, device=device, on_progress=advance
        )


def show(
    job: AutoencoderJob, record: Mapping[str, Any], cells: Sequence[Cell], command: str
) -> None:
    """Every file of the folder, the record last: where it is, the rest is whole."""
    write_recoveries(job.out / "recoveries.safetensors", cells)
    sheet = contact_sheet(cells, job.n_shown)
    write_file(job.out / "recoveries.png", sheet)
    context = {
        "command": command,
        "created": datetime.now(UTC).isoformat(timespec="minutes"),
        "settings": list(_leaves(record["settings"])),
        "versions": {
            "code": code_version(),
            "python": platform.python_version(),
            **{name: version(name) for name in SHOWN_VERSIONS},
            "machine": f"{platform.machine()}, {usable_cores()} cores, {platform.system()}",
        },
    }
    page = job.out / "report.html"
    write_page(page, record, cells, context)
    write_json(job.out / "attack.json", record)
    leave_picture("recoveries", sheet, "What came back, beside what was given")
    leave_link("report", page, "The report, one self-contained HTML file")


def record_of(job: AutoencoderJob, prepared: Prepared, cells: Sequence[Cell]) -> dict[str, Any]:
    """Everything but the pictures, as JSON."""
    material = prepared.material
    train = material.cases[0]
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "victim": prepared.victim.facts,
        "settings": {
            "methods": {m.kind: _settings(m) for m in job.methods},
            "masks": [*job.masks, *map(str, job.mask_files)] if job.data else None,
            "noise": job.noise,
            "seed": job.seed,
            "limit": job.limit,
        },
        "sources": {
            "training images": f"folder:{job.degraded}, degraded already"
            if material.train is None
            else material.train.source,
            "control images": None if material.control is None else material.control.source,
        },
        "n_images": len(train.names),
        "preflight": prepared.record(),
        "best": _best(cells),
        "cells": [record_of_cell(cell) for cell in cells],
        "conventions": conventions(job),
    }


def _settings(method: Method) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(json.dumps(asdict(method)))
    return {name: value for name, value in tree.items() if name != "kind"}


def _best(cells: Sequence[Cell]) -> dict[str, Any] | None:
    """The mask and method with the most accurate training images, beside its control."""
    scored = [(cell, control) for cell, control in pairs(cells) if cell.rates is not None]
    if not scored:
        return None
    cell, control = max(scored, key=lambda pair: _rank(pair[0]))
    rates = cell.rates
    against = None if control is None else control.rates
    assert rates is not None
    return {
        "mask": cell.recovery.case.mask_name,
        "method": cell.recovery.method.kind,
        "title": cell.title,
        "n": rates.n,
        "n_accurate": rates.n_accurate,
        "control": None if against is None else {"n": against.n, "n_accurate": against.n_accurate},
    }


def _rank(cell: Cell) -> tuple[float, float]:
    return (0.0, 0.0) if cell.rates is None else (cell.rates.n_accurate, cell.rates.psnr[0])


def summary_rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """One row per mask and method."""
    return [
        {
            "mask": cell.recovery.case.mask_name,
            "method": cell.title,
            "accurate": _count(cell),
            "control": "–" if control is None else _count(control),
            "PSNR": "–" if cell.rates is None else f"{cell.rates.psnr[0]:.1f}",
            "f(x)": round(float(cell.recovery.n_applied.double().mean())),
        }
        for cell, control in pairs(cells)
    ]


def _count(cell: Cell) -> str:
    return "–" if cell.rates is None else f"{cell.rates.n_accurate} of {cell.rates.n}"


def outcome(record: Mapping[str, Any]) -> str:
    """What came back, in a sentence or two."""
    best = record["best"]
    if best is None:
        return (
            f"{record['n_images']} degraded pictures were attacked; without their originals what "
            "came back cannot be scored."
        )
    where = "" if best["mask"] == "given" else f" from the mask {best['mask']}"
    several = sum(cell["split"] == "train" for cell in record["cells"]) > 1
    said = (
        f"{best['n_accurate']} of {best['n']} training images came back accurately{where} "
        f"({best['title']}{', the best of what was tried' if several else ''})"
    )
    if best["control"] is None:
        return f"{said}. There is no control: give --control with images that f never saw."
    return f"{said}; of control images {best['control']['n_accurate']} of {best['control']['n']}."


def refusal(prepared: Prepared) -> str:
    """Why the attack is not even tried."""
    stops = [f for f in prepared.preflight.findings if f.level == "stop"]
    reasons = [f"{finding.subject}: {finding.text}" for finding in stops]
    return f"{prepared.preflight.verdict} {' '.join(reasons)} (--force attacks all the same)"


def _leaves(tree: Mapping[str, Any], above: str = "") -> Sequence[tuple[str, str]]:
    """Dotted name and text of every setting."""
    rows: list[tuple[str, str]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            rows += _leaves(value, f"{above}{key}.")
        elif isinstance(value, list):
            rows.append((f"{above}{key}", ", ".join(map(str, value))))
        else:
            rows.append((f"{above}{key}", "none" if value is None else str(value)))
    return rows
