"""Attack a classifier that is given as a file: do images come back from the features it sends?"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

from flows.cli.attack_methods import inversion_methods
from storage.files import write_file, write_json
from tasks.artifacts import leave_link, leave_picture, leave_table
from tasks.campaign.plan import code_version
from tasks.cluster.workers import Device, resolve_device, usable_cores
from tasks.families.inversion.attack import Attacked, Method, attack_all, record_of, separability_of
from tasks.families.inversion.inputs import InversionJob, Prepared, prepare
from tasks.families.inversion.report import contact_sheet, write_page, write_reconstructions
from tasks.orchestration import flow, task
from tasks.progress import stage_progress

RECORD = "inversion.json"
ENTRIES = frozenset({RECORD, "reconstructions.safetensors", "reconstructions.png", "report.html"})
"""What an attack leaves in its folder."""
SHOWN_VERSIONS = ("palimpsest", "torch", "torchvision", "numpy", "safetensors")
SCHEMA, VERSION = "palimpsest-attack-inversion", 1


@flow(name="attack-inversion", flow_run_name="{job.weights}")
def attack_inversion(
    job: InversionJob, device: Device = "auto", threads: int | None = None, command: str = ""
) -> dict[str, Any]:
    """Recover images from the features of a given classifier; the record in inversion.json.

    1. Read the network and the images, and check h. 2. Invert. 3. Score beside chance. 4. Show it.
    Raises ValueError, WeightsError or SourceError before anything is written.
    """
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads={threads} must be at least 1")
        torch.set_num_threads(threads)
    place = resolve_device(device)
    prepared = prepare(job, place)
    methods = inversion_methods(
        job.attack, channels=prepared.shape[0], n_steps=job.n_steps, settings=job.settings
    )
    attacked = do_inversions(job, prepared, methods, place)
    record = record_of_job(job, prepared, attacked)
    show(job, prepared, record, attacked, command)
    leave_table("inversion", summary_rows(record), "Every attack, beside chance")
    return record


@task(name="invert")
def do_inversions(
    job: InversionJob, prepared: Prepared, methods: Sequence[Method], device: str
) -> list[Attacked]:
    """All attacks; ours finds its zeta on public images unless it is told one."""
    tuned = not {"zeta", "strong.zeta"} & set(job.settings)
    with stage_progress("Invert", "attack") as advance:
        return attack_all(job, prepared, methods, tuned=tuned, device=device, on_progress=advance)


def show(
    job: InversionJob,
    prepared: Prepared,
    record: Mapping[str, Any],
    attacked: Sequence[Attacked],
    command: str,
) -> None:
    """Every file of the folder, the record last: where it is, the rest is whole."""
    job.out.mkdir(parents=True, exist_ok=True)
    (job.out / RECORD).unlink(missing_ok=True)  # of an earlier attack, whose pictures go now
    write_reconstructions(job.out / "reconstructions.safetensors", prepared.data, attacked)
    sheet = contact_sheet(prepared.data, attacked, job.n_shown)
    write_file(job.out / "reconstructions.png", sheet)
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
    write_page(page, record, prepared.data, attacked, context)
    write_json(job.out / RECORD, record)
    leave_picture("reconstructions", sheet, "What came back, below the originals")
    leave_link("report", page, "The report, one self-contained HTML file")


def record_of_job(
    job: InversionJob, prepared: Prepared, attacked: Sequence[Attacked]
) -> dict[str, Any]:
    """Everything but the pictures, as JSON."""
    notes = [*prepared.notes, *(f"{a.title}: {note}" for a in attacked for note in a.notes)]
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "victim": prepared.facts,
        "settings": {
            "mean": list(job.mean),
            "std": list(job.std),
            "perceptual": job.perceptual,
            "n_public": 0 if prepared.public is None else len(prepared.public),
            "seed": job.seed,
        },
        "sources": {
            "attacked images": prepared.data.source,
            "public images": None if prepared.public is None else prepared.public.source,
        },
        "n_images": len(prepared.data),
        "accuracy": prepared.accuracy,
        "separability": separability_of(prepared.z),
        "attacks": [record_of(a, prepared.data.names) for a in attacked],
        "notes": notes,
        "conventions": {
            "ssim": "Gaussian window of 11x11, in [-1, 1]; ssim_unit is (SSIM + 1) / 2 (003, C.3)",
            "psim": "1 - 1/2 mean squared difference of unit feature vectors, of "
            + (
                "the attacked network's own modules"
                if job.perceptual == "own"
                else f"torchvision's VGG16 ({job.perceptual.partition(':')[2]})"
            ),
            "psnr": "in dB, 120 at most",
            "chance": "SSIM: of each reconstruction to all other images; PSIM: to the next image",
            "worst": "of the image recovered best",
            "separability": "l2 distance of features at norm 1, all pairs (003, definition 3.1)",
        },
    }


def summary_rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per attack."""
    return [
        {
            "attack": a["title"],
            "SSIM": f"{a['summary']['ssim']['mean']:.3f} ± {a['summary']['ssim']['std']:.3f}",
            "worst": f"{a['summary']['ssim']['worst']:.3f}",
            "chance": f"{a['chance']['ssim']['mean']:.3f}",
            "PSIM": f"{a['summary']['psim']['mean']:.3f}",
            "PSNR": f"{a['summary']['psnr']['mean']:.1f} dB",
            "identified": f"{a['n_identified']} of {record['n_images']}",
        }
        for a in record["attacks"]
    ]


def outcome(record: Mapping[str, Any]) -> str:
    """What came back, in a sentence or two."""
    best = max(record["attacks"], key=lambda a: a["summary"]["ssim"]["mean"])
    ssim, chance = best["summary"]["ssim"], best["chance"]["ssim"]
    several = ", the better of the two" if len(record["attacks"]) > 1 else ""
    return (
        f"Images that were recovered from features have an SSIM of {ssim['mean']:.2f} to their "
        f"originals ({best['title']}{several}; {ssim['worst']:.2f} at best), and of "
        f"{chance['mean']:.2f} to other images, which is chance. {best['n_identified']} of "
        f"{record['n_images']} are more like their original than like any other image."
    )
