"""Attack a network that is given as a file of weights, and leave something to look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tasks.artifacts import publish_table
from tasks.attack_file.comparison import plain, sentences, setting_rows
from tasks.attack_file.report import check_chances, leave, page_context
from tasks.devices import Device, resolve_device
from tasks.families.weights.attack import AttackRun, WeightsJob, run_attacks
from tasks.families.weights.preflight import PUBLISH, PreparedWeights, prepare_weights
from tasks.families.weights.results import (
    Results,
    gather,
    scores_record,
    weights_page,
    weights_sheet,
    write_reconstructions,
)
from tasks.orchestration import flow, task
from tasks.progress import stage_progress

do_attacks = task(name="attack")(run_attacks)


@flow(name="attack-weights", flow_run_name="{job.weights}")
def attack_weights(job: WeightsJob, device: Device = "auto", force: bool = False) -> dict[str, Any]:
    """Reconstruct training images from given weights; the record that attack.json holds.

    1. Read the network and what is known beside it. 2. Ask whether an attack can work. 3. Attack.
    4. Rank and score what came back. 5. Show it.
    Raises ValueError if an attack cannot work, unless `force`.

    Args:
        job: The file of weights, the folder of results, and what is known of the network.
        device: Where to compute: `auto`, `cpu` or `cuda`.
        force: Attack even if preflight says that it cannot work.
    """
    prepared = prepare_weights(job)
    check_chances(prepared, job.out, force=force)
    ends_early = prepared.method == "span"  # once nothing falls any more
    with stage_progress("Attack", "attack", may_end_early=ends_early) as advance:
        place = resolve_device(device)
        runs = do_attacks(job, prepared.victim, device=place, on_progress=advance)
    results = gather(job, runs, prepared)
    record = record_of_attack(job, prepared, runs, results)
    write_reconstructions(job.out / "reconstructions.safetensors", results)
    settings = list(setting_rows(record["settings"]))
    context = page_context(("numpy", "safetensors"), settings=settings)
    truth, decoys = prepared.truth, prepared.decoys
    page = weights_page(record, results, truth=truth, decoys=decoys, context=context)
    png = weights_sheet(results, truth, decoys)
    sheet = ("reconstructions", png, "What came back, beside what is known")
    leave(job.out, record, page, sheet=sheet)
    publish_table("attacks", summary_rows(record), "Every attack on the given weights")
    return record


attack_kkt = attack_weights.renamed(name="attack-kkt")


def record_of_attack(
    job: WeightsJob, prepared: PreparedWeights, runs: list[AttackRun], results: Results
) -> dict[str, Any]:
    """Everything but the pictures, as JSON."""
    good = {} if results.truth is None else results.truth.by_attack
    return {
        "schema": "palimpsest-attack",
        "version": 1,
        "victim": prepared.victim.facts,
        "mean": prepared.mean_source,
        "std": None if job.std is None else list(job.std),
        "method": prepared.method,
        "settings": {
            "attack": plain(job.attack),
            "n_attacks": job.n_attacks,
            "seed": job.seed,
            "dtype": job.dtype,
        },
        "preflight": prepared.record(),
        "source": prepared.source,
        "spectrum": prepared.spectrum(),
        "attacks": [{**asdict(run), "n_good": good.get(run.number)} for run in runs],
        **scores_record(results, prepared.truth, prepared.decoys),
    }


def summary_rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per attack."""
    return [
        {
            "attack": run["number"],
            "ending": run["ending"],
            **({} if run["residual"] is None else {"residual": round(run["residual"], 5)}),
            "iterations": run["n_iterations"],
            **{name: float(f"{value:.3g}") for name, value in run["settings"].items()},
            **({} if run["n_good"] is None else {"good": run["n_good"]}),
        }
        for run in record["attacks"]
    ]


def screen_rows(_record: Mapping[str, Any]) -> list[dict[str, str]]:
    """No table: the page has it."""
    return []


def screen_lines(record: Mapping[str, Any]) -> list[str]:
    """Summary of what came back, in one or two sentences."""
    ranking, scores = record["ranking"], record["scores"]
    n_compared = ranking["n_attacks_compared"]
    said = "No attack left a picture."
    if n_compared and record["method"] == "span":
        said = f"{ranking['n_pictures']} pictures were taken out of the first layer"
        used = (record["source"] or {}).get("used", "weights")
        said += {
            "weights": ".",
            "state": " of the optimiser's state.",
            "gradients": " of gradients.",
        }[used]
        if used == "state" and record["source"]["publish_weights_alone"]:
            said += f" {PUBLISH}."
    elif n_compared == 1:
        said = f"One attack left {ranking['n_pictures']} different pictures."
    elif n_compared:
        said = (
            f"{n_compared} attacks arrived at {ranking['n_pictures']} different pictures, "
            f"{ranking['n_agreed']} of them in at least half of the attacks."
        )
    if scores["images"]:
        said += f" Good matches: {scores['images']['n_good']} of {scores['images']['n']} images"
        if scores["decoys"]:
            said += f", {scores['decoys']['n_good']} of {scores['decoys']['n']} decoys"
        said = " ".join([f"{said}.", *sentences(scores, record["preflight"]["outlook"])])
    if ranking["found"]:
        counts = " / ".join(str(n) for n in ranking["found"]["n_found"])
        said += f" Without the originals {counts} at 0 / 1 / 5 % false pictures."
    return [said]
