"""Attack an autoencoder that is given as a file: do its training images come back from damage?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.artifacts import publish_table
from tasks.attack_file.comparison import plain, setting_rows
from tasks.attack_file.report import check_chances, leave, page_context
from tasks.devices import Device, resolve_device
from tasks.families.autoencoder import attack as recovery
from tasks.families.autoencoder.inputs import (
    AutoencoderJob,
    PreparedAutoencoder,
    prepare_autoencoder,
)
from tasks.orchestration import flow, task
from tasks.progress import stage_progress

recover = task(name="recover")(recovery.recover_all)


@flow(name="attack-autoencoder", flow_run_name="{job.weights}")
def attack_autoencoder(
    job: AutoencoderJob, device: Device = "auto", force: bool = False
) -> dict[str, Any]:
    """Recover degraded training images from a given autoencoder; the record in attack.json.

    1. Read the network and the images. 2. Ask f whether it can work. 3. Attack training images and
    control images alike. 4. Show what came back, with scores.
    Raises ValueError if an attack cannot work, unless `force`.

    Args:
        job: The autoencoder's file, the folder of results, images, masks and methods.
        device: Where to compute: `auto`, `cpu` or `cuda`.
        force: Attack even if preflight says that it cannot work.
    """
    place = resolve_device(device)
    prepared = prepare_autoencoder(job, place)
    check_chances(prepared, job.out, force=force)
    cases = prepared.material.cases
    with stage_progress("Recover", "image") as advance:
        found = recover(job, prepared.victim, cases, device=place, on_progress=advance)
    record = autoencoder_record(job, prepared, found)
    recovery.write_recoveries(job.out / "recoveries.safetensors", found)
    settings = list(setting_rows(record["settings"]))
    context = page_context(("numpy", "safetensors"), settings=settings)
    page = recovery.autoencoder_page(record, found, context)
    png = recovery.recoveries_sheet(found, job.n_shown)
    leave(job.out, record, page, sheet=("recoveries", png, "What came back, beside what was given"))
    publish_table("recoveries", screen_rows(record), "Every mask and method, beside the control")
    return record


def autoencoder_record(
    job: AutoencoderJob, prepared: PreparedAutoencoder, recoveries: Sequence[recovery.Recovery]
) -> dict[str, Any]:
    """Everything but the pictures, as JSON. `best`: the mask and method with the most accurate
    training images, beside its control."""
    material, best = prepared.material, None
    scored = [(one.rates, one, control) for one, control in recovery.pairs(recoveries) if one.rates]
    if scored:
        rates, one, control = max(scored, key=lambda found: (found[0].n_accurate, found[0].psnr[0]))
        against = None if control is None else control.rates
        best = {
            "mask": one.case.mask_name,
            "method": one.method.kind,
            "title": one.title,
            "n": rates.n,
            "n_accurate": rates.n_accurate,
            "control": None
            if against is None
            else {"n": against.n, "n_accurate": against.n_accurate},
        }
    return {
        "schema": "palimpsest-attack-autoencoder",
        "version": 1,
        "victim": prepared.victim.facts,
        "settings": {
            "methods": {
                m.kind: {name: value for name, value in plain(m).items() if name != "kind"}
                for m in job.methods
            },
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
        "n_images": len(material.cases[0].names),
        "preflight": prepared.record(),
        "best": best,
        "cells": [one.record() for one in recoveries],
        "conventions": recovery.conventions(job),
    }


def screen_rows(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """Accurate training images beside accurate control images, per mask and method."""
    if record["best"] is None:
        return []
    by_key = {(c["mask"], c["method"], c["split"]): c for c in record["cells"]}
    rows = []
    for (mask, method, side), cell in by_key.items():
        if side == "train":
            against = by_key.get((mask, method, "control"))
            rows.append(
                {
                    "mask": mask,
                    "method": method,
                    "training images": f"{cell['n_accurate']} of {cell['n']}",
                    "control": "–"
                    if against is None
                    else f"{against['n_accurate']} of {against['n']}",
                    "PSNR": f"{cell['psnr'][0]:.1f} dB",
                }
            )
    return rows


def screen_lines(record: Mapping[str, Any]) -> list[str]:
    """Summary of what came back, in a sentence or two."""
    best = record["best"]
    if best is None:
        return [
            f"{record['n_images']} degraded pictures were attacked; without their originals what "
            "came back cannot be scored."
        ]
    where = "" if best["mask"] == "given" else f" from the mask {best['mask']}"
    several = sum(cell["split"] == "train" for cell in record["cells"]) > 1
    said = (
        f"{best['n_accurate']} of {best['n']} training images came back accurately{where} "
        f"({best['title']}{', the best of what was tried' if several else ''})"
    )
    if best["control"] is None:
        return [f"{said}. There is no control: give --control with images that f never saw."]
    return [f"{said}; of control images {best['control']['n_accurate']} of {best['control']['n']}."]
