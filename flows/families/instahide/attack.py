"""Attack InstaHide's encodings that are given as files: do private images come back?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.artifacts import publish_table
from tasks.attack_file.report import leave, page_context
from tasks.devices import Device, resolve_device, use_threads
from tasks.families.instahide import report as pages
from tasks.families.instahide.attack import (
    LEVELS,
    NORMAL,
    InstaHideJob,
    attack_all,
    prepare_challenge,
)
from tasks.families.instahide.results import best_of, record_of, scored
from tasks.orchestration import flow, task
from tasks.page.formats import duration
from tasks.progress import stage_progress

RECORD = "instahide.json"


attack = task(name="attack-encodings")(attack_all)


@flow(name="attack-instahide", flow_run_name="{job.path}")
def attack_instahide(
    job: InstaHideJob, device: Device = "auto", threads: int | None = None
) -> dict[str, Any]:
    """Recover private images from encodings; the record in instahide.json.

    1. Read encodings and what is known. 2. Attack. 3. Score, if the truth is there. 4. Show it.
    Raises ValueError or SourceError before anything is written.

    Args:
        job: The encodings, the folder of results, and what is known of the scheme.
        device: Where to compute: `auto`, `cpu` or `cuda`.
        threads: Threads to compute with; by default all.
    """
    use_threads(threads)
    prepared = prepare_challenge(job)
    with stage_progress("Attack", "percent") as advance:
        attacked = attack(
            job,
            prepared,
            device=resolve_device(device),
            progress=lambda share: advance(round(100 * share), 100),
        )
    attacked = [scored(one, prepared) for one in attacked]
    record = record_of(job, prepared, attacked)
    job.out.mkdir(parents=True, exist_ok=True)
    (job.out / RECORD).unlink(missing_ok=True)  # of an earlier attack, whose pictures go now
    best, sheet = best_of(attacked), None
    pages.clear_images(job.out)
    if best is not None:
        pages.write_images(job.out, best, prepared)
        png = pages.instahide_sheet(best, prepared, job.n_shown)
        sheet = ("reconstructions", png, "What came back")
    packages = ("numpy", "scipy")
    context = page_context(packages, outcome=outcome(record), n_shown=job.n_shown)
    page = pages.instahide_page(record, prepared, attacked, context)
    leave(job.out, record, page, name=RECORD, sheet=sheet)
    publish_table("instahide", screen_rows(record), "Every method")
    return record


def screen_rows(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row per method."""
    rows = []
    for a in record["methods"]:
        row = {"method": a["title"]}
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


def screen_lines(record: Mapping[str, Any]) -> list[str]:
    """Methods that failed, then the outcome."""
    failed = [f"{a['title']}: {a['failure']}" for a in record["methods"] if "failure" in a]
    return [*failed, outcome(record)]


def outcome(record: Mapping[str, Any]) -> str:
    """Summary of what came back, in a sentence or two."""
    if record["best"] is None:
        return "No method gave anything: " + "; ".join(a["failure"] for a in record["methods"])
    best = record["methods"][record["best"]]
    n, got = best["n_images"], best["by_status"].get("recovered", 0)
    said = (
        f"{got} of {n} private images are recovered from {best['n_encodings']:,} encodings in "
        f"{duration(best['seconds'])}"
    )
    if record["has_truth"]:
        units = NORMAL if record["units"]["kind"] == NORMAL.kind else LEVELS
        said += f"; {best['n_exact']} are the originals, no pixel off by more than "
        said += units.same_said
        if best["n_false"]:
            are = "is" if best["n_false"] == 1 else "are"
            said += f", {best['n_false']} called recovered {are} off by more"
    rest = {k: v for k, v in best["by_status"].items() if k != "recovered"}
    if rest:
        said += ". The others: " + ", ".join(f"{v} {k}" for k, v in rest.items())
    return said + "."
