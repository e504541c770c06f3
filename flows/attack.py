"""Attack a network that is given as a file of weights, and leave something to look at."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from flows.naming import unknown_name
from flows.papers import EXPERIMENTS, AttackPlan, attack_preset
from flows.presets import Recipe
from flows.settings import resolve
from recon_core.attacks.kkt_objective import Condition, KKTAttack, Search
from recon_core.experiments import KKT
from recon_core.victims.losses import Loss
from recon_core.victims.network import Activation
from recon_core.victims.training import Training
from storage.files import write_file, write_json
from tasks.artifacts import leave_link, leave_picture, leave_table
from tasks.attack import AttackJob, AttackRun, run_attacks
from tasks.attack_inputs import read_victim
from tasks.attack_preflight import Prepared, prepare
from tasks.attack_report import contact_sheet, write_page, write_reconstructions
from tasks.attack_results import Results, gather, record_of
from tasks.campaign import code_version
from tasks.orchestration import flow, task
from tasks.progress import stage_progress
from tasks.workers import Device, resolve_device, usable_cores

ENTRIES = frozenset(
    {
        *("cache", "preflight.json", "attack.json", "reconstructions.safetensors"),
        *("reconstructions.png", "report.html"),
    }
)
"""What an attack leaves in its folder."""
SHOWN_VERSIONS = ("palimpsest", "torch", "numpy", "safetensors")
SCHEMA, VERSION = "palimpsest-attack", 1


def ensemble() -> AttackPlan:
    """Ours: six attacks with Adadelta as in paper 001, each with its own drawn settings.

    Without originals, pictures are ranked by how many attacks arrive at them; that tells more
    between settings than between starts. The ranges surround the settings of paper 001.
    """
    search = Search(lr=None, sigma=(1e-4, 1e-2), lam_min=(0.1, 0.6), alpha=(10.0, 60.0))
    attack = KKTAttack(save_at=(500, 1000, 2000, 4000), search=search)
    return AttackPlan(attack=attack, n_attacks=6)


DEFAULT_PRESET = "ensemble"


def attack_plan(
    preset: str = DEFAULT_PRESET,
    *,
    n_outputs: int,
    condition: Condition | None = None,
    n_attacks: int | None = None,
    n_images: int | None = None,
    n_iterations: int | None = None,
    settings: Mapping[str, str] | None = None,
) -> AttackPlan:
    """A preset made to fit a network, then changed by `settings` (`attack.alpha`, `n_attacks`).

    The condition is the preset's if it goes with the number of outputs, otherwise binary for one
    output and multiclass for several. `n_images`, a guess at the size of the training set, gives
    twice as many candidates (002, section 3). Raises ValueError for unknown names and bad values.
    """
    if preset == DEFAULT_PRESET:
        plan = ensemble()
    elif preset in EXPERIMENTS:
        plan = attack_preset(preset)
    else:
        raise ValueError(unknown_name("attack preset", preset, {DEFAULT_PRESET, *EXPERIMENTS}))
    fits = (plan.attack.condition == "multiclass") == (n_outputs > 1)
    by_outputs: Condition = "multiclass" if n_outputs > 1 else "binary"
    changes: dict[str, Any] = {
        "condition": condition or (plan.attack.condition if fits else by_outputs),
        "ncc_stop_above": None,  # this rule looks at the training images
    }
    if n_images is not None:
        if n_images < 1:
            raise ValueError(f"--n-images-guess {n_images} must be at least 1")
        changes["n_candidates"] = 2 * max(n_images, n_outputs)
    if n_iterations is not None:
        if n_iterations < 1:
            raise ValueError(f"--iterations {n_iterations} must be at least 1")
        parts = {max(1, n_iterations // part) for part in (8, 4, 2, 1)}
        changes["save_at"] = tuple(sorted(parts))
    attack = replace(plan.attack, **changes)
    plan = AttackPlan(attack=attack, n_attacks=plan.n_attacks if n_attacks is None else n_attacks)
    return _changed(plan, settings or {}) if settings else plan


def attack_job(
    weights: Path,
    out: Path,
    *,
    preset: str = DEFAULT_PRESET,
    condition: Condition | None = None,
    n_attacks: int | None = None,
    n_images: int | None = None,
    n_iterations: int | None = None,
    settings: Mapping[str, str] | None = None,
    arch: str | None = None,
    shape: tuple[int, int, int] | None = None,
    activation: Activation = "relu",
    leak: float = 0.01,
    data: str | None = None,
    decoys: str | None = None,
    mean: str | None = None,
    seed: int = 0,
    dtype: Literal["float32", "float64"] = "float32",
    n_shown: int = 40,
) -> AttackJob:
    """The job of a command: a plan that fits the network in `weights`, and what is known of it.

    Raises WeightsError for files and ValueError for settings that cannot be used.
    """
    victim = read_victim(
        weights, arch=arch, shape=shape, activation=activation, leak=leak, dtype=dtype
    )
    plan = attack_plan(
        preset,
        n_outputs=victim.architecture.n_outputs,
        condition=condition,
        n_attacks=n_attacks,
        n_images=n_images,
        n_iterations=n_iterations,
        settings=settings,
    )
    return AttackJob(
        weights=weights,
        out=out,
        arch=arch,
        shape=shape,
        activation=activation,
        leak=leak,
        attack=plan.attack,
        n_attacks=plan.n_attacks,
        data=data,
        decoys=decoys,
        mean=mean,
        seed=seed,
        dtype=dtype,
        n_shown=n_shown,
    )


def _changed(plan: AttackPlan, settings: Mapping[str, str]) -> AttackPlan:
    """The plan with single settings replaced, by the same names and rules as in a recipe."""
    changes = {f"experiment.{k.removeprefix('experiment.')}": v for k, v in settings.items()}
    for name in changes:
        if name.split(".")[1] not in ("attack", "n_attacks"):
            raise ValueError(
                f"--set {name.removeprefix('experiment.')}: of weights that are given only the "
                "attack has settings, for example attack.alpha=50 or n_attacks=20"
            )
    loss = Loss(kind="ce" if plan.attack.condition == "multiclass" else "bce")
    experiment = KKT(attack=plan.attack, n_attacks=plan.n_attacks, training=Training(loss=loss))
    changed = resolve(Recipe(experiment=experiment), changes).experiment
    if not isinstance(changed, KKT):
        raise ValueError(
            f"experiment.family={changed.family!r} is not the attack on given weights; leave it out"
        )
    return AttackPlan(attack=changed.attack, n_attacks=changed.n_attacks)


@flow(name="attack-kkt", flow_run_name="{job.weights}")
def attack_kkt(
    job: AttackJob, device: Device = "auto", force: bool = False, command: str = ""
) -> dict[str, Any]:
    """Reconstruct training images from given weights; the record that attack.json holds.

    1. Read the network and what is known beside it. 2. Ask whether an attack can work. 3. Attack.
    4. Rank and score what came back. 5. Show it.
    Raises ValueError if an attack cannot work, unless `force`.
    """
    prepared = prepare(job)
    job.out.mkdir(parents=True, exist_ok=True)
    write_json(job.out / "preflight.json", prepared.record())
    if prepared.preflight.stopped and not force:
        raise ValueError(refusal(prepared))
    runs = do_attacks(job, prepared, resolve_device(device))
    results = gather(
        job,
        runs,
        shape=prepared.victim.architecture.shape,
        n_outputs=prepared.victim.architecture.n_outputs,
        mean=prepared.mean,
        truth=prepared.truth,
        decoys=prepared.decoys,
    )
    record = record_of_attack(job, prepared, runs, results)
    show(job, prepared, results, record, command)
    leave_table("attacks", summary_rows(record), "Every attack on the given weights")
    return record


@task(name="attack")
def do_attacks(job: AttackJob, prepared: Prepared, device: str) -> list[AttackRun]:
    """The attacks that are not done yet; an interrupted one goes on where it was."""
    with stage_progress("Attack", "attack") as advance:
        return run_attacks(job, prepared.victim, device=device, on_progress=advance)


def show(
    job: AttackJob,
    prepared: Prepared,
    results: Results,
    record: Mapping[str, Any],
    command: str,
) -> None:
    """Every file of the folder, the record last: where it is, the rest is whole."""
    truth, decoys = prepared.truth, prepared.decoys
    write_reconstructions(job.out / "reconstructions.safetensors", results)
    sheet = contact_sheet(results, truth, decoys)
    write_file(job.out / "reconstructions.png", sheet)
    context = {
        "command": command,
        "created": datetime.now(UTC).isoformat(timespec="minutes"),
        "settings": _leaves(record["settings"]),
        "versions": {
            "code": code_version(),
            "python": platform.python_version(),
            **{name: version(name) for name in SHOWN_VERSIONS},
            "machine": f"{platform.machine()}, {usable_cores()} cores, {platform.system()}",
        },
    }
    page = job.out / "report.html"
    write_page(page, record, results, truth=truth, decoys=decoys, context=context)
    write_json(job.out / "attack.json", record)
    leave_picture("reconstructions", sheet, "What came back, beside what is known")
    leave_link("report", page, "The report, one self-contained HTML file")


def record_of_attack(
    job: AttackJob, prepared: Prepared, runs: list[AttackRun], results: Results
) -> dict[str, Any]:
    """Everything but the pictures, as JSON."""
    good = {} if results.truth is None else results.truth.by_attack
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "victim": prepared.victim.facts,
        "mean": prepared.mean_source,
        "settings": {
            "attack": _json(asdict(job.attack)),
            "n_attacks": job.n_attacks,
            "seed": job.seed,
            "dtype": job.dtype,
        },
        "preflight": prepared.record(),
        "attacks": [{**asdict(run), "n_good": good.get(run.number)} for run in runs],
        **record_of(results, prepared.truth, prepared.decoys),
    }


def summary_rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per attack."""
    return [
        {
            "attack": run["number"],
            "ending": run["ending"],
            "residual": None if run["residual"] is None else round(run["residual"], 5),
            "iterations": run["n_iterations"],
            **{name: float(f"{value:.3g}") for name, value in run["settings"].items()},
            **({} if run["n_good"] is None else {"good": run["n_good"]}),
        }
        for run in record["attacks"]
    ]


def outcome(record: Mapping[str, Any]) -> str:
    """What came back, in one or two sentences."""
    ranking, scores = record["ranking"], record["scores"]
    n_compared = ranking["n_attacks_compared"]
    said = "No attack left a picture."
    if n_compared == 1:
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
        said += "."
    return said


def refusal(prepared: Prepared) -> str:
    """Why the attack is not even tried."""
    stops = [f for f in prepared.preflight.findings if f.level == "stop"]
    reasons = [f"{finding.subject}: {finding.text}" for finding in stops]
    return f"{prepared.preflight.verdict} {' '.join(reasons)} (--force attacks all the same)"


def parse_shape(text: str) -> tuple[int, int, int]:
    """`3x32x32` as channels, height, width."""
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--shape {text} is not of the form CxHxW, for example 3x32x32")
    channels, height, width = (int(part) for part in parts)
    return channels, height, width


def _json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _leaves(tree: Mapping[str, Any], above: str = "") -> list[tuple[str, str]]:
    """Dotted name and text of every setting."""
    rows = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            rows += _leaves(value, f"{above}{key}.")
        elif isinstance(value, list):
            rows.append((f"{above}{key}", ", ".join(map(str, value))))
        else:
            rows.append((f"{above}{key}", "none" if value is None else str(value)))
    return rows
