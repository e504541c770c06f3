"""Attack a classifier that is given as a file: do images come back from the features it sends?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flows.attack_methods import inversion_methods
from tasks.artifacts import publish_table
from tasks.attack_file.report import leave, page_context, write_arrays
from tasks.devices import Device, resolve_device, use_threads
from tasks.families.inversion import attack as inverting
from tasks.families.inversion.inputs import InversionJob, PreparedCut, prepare_cut
from tasks.orchestration import flow, task
from tasks.progress import stage_progress

RECORD = "inversion.json"


invert = task(name="invert")(inverting.attack_all)


@flow(name="attack-inversion", flow_run_name="{job.weights}")
def attack_inversion(
    job: InversionJob, device: Device = "auto", threads: int | None = None
) -> dict[str, Any]:
    """Recover images from the features of a given classifier; the record in inversion.json.

    1. Read the network and the images, and check h. 2. Invert. 3. Score beside chance. 4. Show it.
    Raises ValueError, WeightsError or SourceError before anything is written.

    Args:
        job: The classifier's file, the folder of results, images and methods.
        device: Where to compute: `auto`, `cpu` or `cuda`.
        threads: Threads to compute with; by default all.
    """
    use_threads(threads)
    place = resolve_device(device)
    prepared = prepare_cut(job, place)
    methods = inversion_methods(
        job.attack, channels=prepared.shape[0], n_steps=job.n_steps, settings=job.settings
    )
    tuned = not {"zeta", "strong.zeta"} & set(job.settings)  # on public images
    with stage_progress("Invert", "attack") as advance:
        attacked = invert(job, prepared, methods, tuned=tuned, device=place, on_progress=advance)
    record = record_of_inversion(job, prepared, attacked)
    job.out.mkdir(parents=True, exist_ok=True)
    (job.out / RECORD).unlink(missing_ok=True)  # of an earlier attack, whose pictures go now
    arrays = {"original": prepared.data.images} | {a.method.kind: a.found.x for a in attacked}
    write_arrays(job.out / "reconstructions.safetensors", arrays)
    packages = ("torchvision", "numpy", "safetensors")
    context = page_context(packages, outcome=outcome(record), n_shown=job.n_shown)
    page, png = inverting.inversion_page(record, prepared.data, attacked, context)
    sheet = ("reconstructions", png, "What came back, below the originals")
    leave(job.out, record, page, name=RECORD, sheet=sheet)
    publish_table("inversion", screen_rows(record), "Every attack, beside chance")
    return record


def record_of_inversion(
    job: InversionJob, prepared: PreparedCut, attacked: Sequence[inverting.Attacked]
) -> dict[str, Any]:
    """Everything but the pictures, as JSON."""
    notes = [*prepared.notes, *(f"{a.title}: {note}" for a in attacked for note in a.notes)]
    return {
        "schema": "palimpsest-attack-inversion",
        "version": 1,
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
        "separability": inverting.separability_of(prepared.z),
        "attacks": [inverting.inversion_record(a, prepared.data.names) for a in attacked],
        "notes": notes,
        "conventions": {
            "ssim": "Gaussian window of 11x11, in [-1, 1]; ssim_unit is (SSIM + 1) / 2 (MixCon "
            "paper, C.3)",
            "psim": "1 - 1/2 mean squared difference of unit feature vectors, of "
            + (
                "the attacked network's own modules"
                if job.perceptual == "own"
                else f"torchvision's VGG16 ({job.perceptual.partition(':')[2]})"
            ),
            "psnr": "in dB, 120 at most",
            "chance": "SSIM: of each reconstruction to all other images; PSIM: to the next image",
            "worst": "of the image recovered best",
            "separability": "l2 distance of features at norm 1, all pairs (MixCon paper, "
            "definition 3.1)",
        },
    }


def screen_rows(record: Mapping[str, Any]) -> list[dict[str, str]]:
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


def screen_lines(record: Mapping[str, Any]) -> list[str]:
    """Notes, then the outcome."""
    return [*record["notes"], outcome(record)]


def outcome(record: Mapping[str, Any]) -> str:
    """Summary of what came back, in a sentence or two."""
    best = max(record["attacks"], key=lambda a: a["summary"]["ssim"]["mean"])
    ssim, chance = best["summary"]["ssim"], best["chance"]["ssim"]
    several = ", the better of the two" if len(record["attacks"]) > 1 else ""
    return (
        f"Images that were recovered from features have an SSIM of {ssim['mean']:.2f} to their "
        f"originals ({best['title']}{several}; {ssim['worst']:.2f} at best), and of "
        f"{chance['mean']:.2f} to other images, which is chance. {best['n_identified']} of "
        f"{record['n_images']} are more like their original than like any other image."
    )
