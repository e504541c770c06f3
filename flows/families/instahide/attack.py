"""Attack InstaHide's encodings that are given as files: do private images come back?"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

from storage.files import write_file, write_json
from tasks.artifacts import leave_link, leave_picture, leave_table
from tasks.campaign.plan import code_version
from tasks.cluster.workers import Device, resolve_device, usable_cores
from tasks.families.instahide.attack import METHODS, attack_all
from tasks.families.instahide.encode import EncodeJob, encode
from tasks.families.instahide.inputs import LEVELS, NORMAL, AttackJob, Prepared, prepare
from tasks.families.instahide.report import best_of, clear_images, sheet, write_images, write_page
from tasks.families.instahide.results import Scored, record_of
from tasks.families.instahide.similarity import SimilarityJob, train_similarity
from tasks.orchestration import flow, task
from tasks.page.formats import duration
from tasks.progress import stage_progress

RECORD = "instahide.json"
ENTRIES = frozenset(
    {RECORD, "images.npy", "images", "statuses.csv", "reconstructions.png", "report.html"}
)
"""What an attack leaves in its folder."""
SHOWN_VERSIONS = ("palimpsest", "torch", "numpy", "scipy")
SCHEMA, VERSION = "palimpsest-attack-instahide", 1


@flow(name="encode-instahide", flow_run_name="{job.out}")
def encode_instahide(job: EncodeJob) -> dict[str, Any]:
    """Make a challenge; its facts."""
    return encode(job)


@flow(name="train-similarity", flow_run_name="{job.out}")
def train_instahide_similarity(
    job: SimilarityJob, device: Device = "auto", threads: int | None = None
) -> dict[str, Any]:
    """Train the network that tells which encodings share an image; what it is."""
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads={threads} must be at least 1")
        torch.set_num_threads(threads)
    with stage_progress("Training", "step") as advance:
        n_steps = job.how.training.n_steps
        return train_similarity(
            job,
            device=resolve_device(device),
            progress=lambda share: advance(round(share * n_steps), n_steps),
        )


@flow(name="attack-instahide", flow_run_name="{job.path}")
def attack_instahide(
    job: AttackJob, device: Device = "auto", threads: int | None = None, command: str = ""
) -> dict[str, Any]:
    """Recover private images from encodings; the record in instahide.json.

    1. Read encodings and what is known. 2. Attack. 3. Score, if the truth is there. 4. Show it.
    Raises ValueError or SourceError before anything is written.
    """
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads={threads} must be at least 1")
        torch.set_num_threads(threads)
    prepared = prepare(job, tuple(METHODS))
    scored = do_attacks(job, prepared, resolve_device(device))
    record = record_of_job(job, prepared, scored)
    show(job, prepared, record, scored, command)
    leave_table("instahide", summary_rows(record), "Every method")
    return record


@task(name="attack-encodings")
def do_attacks(job: AttackJob, prepared: Prepared, device: str) -> list[Scored]:
    """All methods."""
    with stage_progress("Attack", "percent") as advance:
        return attack_all(
            job,
            prepared,
            device=device,
            progress=lambda share: advance(round(100 * share), 100),
        )


def show(
    job: AttackJob,
    prepared: Prepared,
    record: Mapping[str, Any],
    scored: Sequence[Scored],
    command: str,
) -> None:
    """Every file of the folder, the record last: where it is, the rest is whole."""
    job.out.mkdir(parents=True, exist_ok=True)
    (job.out / RECORD).unlink(missing_ok=True)  # of an earlier attack, whose pictures go now
    best = best_of(scored)
    clear_images(job.out)
    if best is not None:
        write_images(job.out, best, prepared)
        picture = sheet(best, prepared, job.n_shown)
        write_file(job.out / "reconstructions.png", picture)
        leave_picture("reconstructions", picture, "What came back")
    context = {
        "command": command,
        "created": datetime.now(UTC).isoformat(timespec="minutes"),
        "outcome": outcome(record),
        "n_shown": job.n_shown,
        "versions": {
            "code": code_version(),
            "python": platform.python_version(),
            **{name: version(name) for name in SHOWN_VERSIONS},
            "machine": f"{platform.machine()}, {usable_cores()} cores, {platform.system()}",
        },
    }
    page = job.out / "report.html"
    write_page(page, record, prepared, scored, context)
    write_json(job.out / RECORD, record)
    leave_link("report", page, "The report, one self-contained HTML file")


def record_of_job(job: AttackJob, prepared: Prepared, scored: Sequence[Scored]) -> dict[str, Any]:
    """Everything but the pictures, as JSON."""
    challenge, best = prepared.challenge, best_of(scored)
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "source": str(job.path),
        "scheme": dataclasses.asdict(prepared.scheme),
        "units": dataclasses.asdict(prepared.units) | {"exact_within": prepared.units.same},
        "n_encodings": len(challenge.encodings),
        "n_private": prepared.n_private,
        "n_public": 0 if challenge.public is None else len(challenge.public),
        "has_labels": challenge.labels is not None,
        "has_truth": "private" in challenge.secret,
        "shape": list(challenge.shape),
        "seed": job.seed,
        "methods": [record_of(s, prepared) for s in scored],
        "best": None if best is None else list(scored).index(best),
    }


def summary_rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per method."""
    rows = []
    for a in record["methods"]:
        row: dict[str, Any] = {"method": a["title"]}
        if "failure" in a:
            rows.append(row | {"recovered": "failed", "explained": "", "time": f"{a['seconds']} s"})
            continue
        row["recovered"] = f"{a['by_status'].get('recovered', 0)} of {a['n_images']}"
        if record["has_truth"]:
            row["exact"] = str(a["n_exact"])
            row["falsely"] = str(a["n_false"])
        row["explained"] = f"{a['n_explained']} of {a['n_encodings']}"
        rows.append(row | {"time": f"{a['seconds']} s"})
    return rows


def same_said(record: Mapping[str, Any]) -> str:
    """How far a pixel of an exact image may be off."""
    return (NORMAL if record["units"]["kind"] == NORMAL.kind else LEVELS).same_said


def outcome(record: Mapping[str, Any]) -> str:
    """What came back, in a sentence or two."""
    if record["best"] is None:
        return "No method gave anything: " + "; ".join(a["failure"] for a in record["methods"])
    best = record["methods"][record["best"]]
    n, got = best["n_images"], best["by_status"].get("recovered", 0)
    said = (
        f"{got} of {n} private images are recovered from {best['n_encodings']:,} encodings in "
        f"{duration(best['seconds'])}"
    )
    if record["has_truth"]:
        said += (
            f"; {best['n_exact']} are the originals, no pixel off by more than {same_said(record)}"
        )
        if best["n_false"]:
            are = "is" if best["n_false"] == 1 else "are"
            said += f", {best['n_false']} called recovered {are} off by more"
    rest = {k: v for k, v in best["by_status"].items() if k != "recovered"}
    if rest:
        said += ". The others: " + ", ".join(f"{v} {k}" for k, v in rest.items())
    return said + "."
