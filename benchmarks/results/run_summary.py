"""A finished job as one small JSON file for `docs/results/`: its scores, its command, its seconds.

    python -m benchmarks.results.run_summary WORKSPACE --name NAME --command "..." --json FILE

WORKSPACE is the folder of a job; its evaluation.json has the scores of every image, of which only
the summaries are kept, targets and decoys side by side, with the learning curves of its restorers.
`--curves FILE` draws these, and every method's hits against its false positives.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter

from benchmarks.record import Hardware, checked_json, hardware, versions
from benchmarks.restore.gains import (
    Disagreement,
    Gain,
    Interval,
    Learned,
    disagreement,
    draw,
    gain,
    learned,
)
from tasks.evaluation.record import SCHEMA, VERSION
from tasks.report.headline import method_title


@dataclass(frozen=True, kw_only=True)
class Scores:
    """One method on one side (targets or decoys): counts and means over the images."""

    n: int
    n_good: int
    good_interval: Interval | None = None
    mean_ssim: float
    mean_ssim_interval: Interval | None = None
    mean_haarpsi: float
    mean_haarpsi_interval: Interval | None = None
    best_ssim: float
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method's scores on images that victims were trained on, and on images none was.

    `auc` and `found_at`: targets told from decoys by SSIM, at false positive rates. `gain` over the
    attack alone; None for the attack itself. Summaries made before these were there lack them.
    """

    targets: Scores
    decoys: Scores
    n_targets_above_every_decoy: int
    auc: float | None = None
    found_at: dict[str, float] | None = None
    gain: Gain | None = None
    disagreement: Disagreement | None = None
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """Ranking of the attacks on a victim by a criterion that needs no training image: Spearman's
    correlation with their mean SSIM, 1 being perfect, and its interval."""

    n_runs: int
    spearman: float | None
    interval: Interval | None
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A job's evaluation. `seconds` are per stage; `picture`, `curves` and `report` are files
    beside this one, or None. `n_runs` attacked `n_victims` victims, or as many if that is None;
    `outcomes` says how they ended, `ranking` is of sweeps."""

    name: str
    command: str
    source: str
    n_runs: int
    n_victims: int | None = None
    images_per_run: tuple[int, ...]
    good_threshold: float
    methods: dict[str, Method]
    seconds: dict[str, float]
    picture: str | None
    curves: str | None = None
    report: str | None = None
    outcomes: dict[str, int] | None = None
    ranking: dict[str, Ranked] | None = None
    restorers: dict[str, Learned] | None = None
    hardware: Hardware
    versions: dict[str, str]
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if not self.methods:
            raise ValueError("methods is empty; expected at least 'plain'")


def summarise_run(
    evaluation: dict[str, Any],
    *,
    name: str,
    command: str,
    seconds: dict[str, float],
    picture: str | None = None,
    curves: str | None = None,
    report: str | None = None,
    restorers: dict[str, Learned] | None = None,
) -> RunSummary:
    """The summary of an evaluation.json.

    Raises:
        ValueError: it is no evaluation of this version, or has no image to sum up.
    """
    found = evaluation.get("schema"), evaluation.get("version")
    if found != (SCHEMA, VERSION):
        raise ValueError(
            f"schema and version are {found}, expected {(SCHEMA, VERSION)}; evaluate the job again "
            "with this version"
        )
    kept = [field.name for field in fields(Scores)]
    methods = {
        method: {
            side: {key: body[side]["summary"][key] for key in kept}
            for side in ("targets", "decoys")
        }
        | {"n_targets_above_every_decoy": body["n_targets_above_every_decoy"]}
        | {key: body["detection"][key] for key in ("auc", "found_at")}
        | {
            "gain": None if method.startswith("plain") else asdict(gain(evaluation, method)),
            "disagreement": (d := disagreement(evaluation, method)) and asdict(d),
        }
        for method, body in evaluation["methods"].items()
    }
    ranking = evaluation["ranking"] and {
        name: {field.name: body[field.name] for field in fields(Ranked)}
        for name, body in evaluation["ranking"].items()
    }
    return TypeAdapter(RunSummary).validate_python(
        {
            "name": name,
            "command": command,
            "source": evaluation["source"]["name"],
            "n_runs": evaluation["dataset"]["n_runs"],
            "n_victims": evaluation["dataset"]["n_victims"],
            "outcomes": evaluation["dataset"]["outcomes"],
            "ranking": ranking,
            "images_per_run": tuple(evaluation["dataset"]["images_per_victim"]),
            "good_threshold": evaluation["settings"]["good_threshold"],
            "methods": methods,
            "seconds": seconds,
            "picture": picture,
            "curves": curves,
            "report": report,
            "restorers": {key: asdict(learned) for key, learned in (restorers or {}).items()},
            "hardware": hardware(),
            "versions": versions(),
        }
    )


def parse_run(text: str, *, name: str) -> RunSummary:
    """The summary in a file. Raises ValueError saying which field of `name` is wrong."""
    return checked_json(TypeAdapter(RunSummary), text, name)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: reads a job's folder, writes the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workspace", type=Path, help="folder of a finished job")
    parser.add_argument("--name", required=True, help="heading of the results")
    parser.add_argument("--command", required=True, help="the command that made the job")
    parser.add_argument("--picture", help="file name of a picture in docs/results/pictures")
    parser.add_argument(
        "--curves", type=Path, help="docs/results/pictures/NAME-curves.png, to be drawn"
    )
    parser.add_argument("--report", help="file name of the report beside the summary")
    parser.add_argument("--json", type=Path, required=True, help="docs/results/runs/NAME.json")
    options = parser.parse_args(argv)
    evaluation = json.loads((options.workspace / "evaluation" / "evaluation.json").read_text())
    timings = options.workspace / "timings.json"
    restorers = learned(options.workspace)
    summary = summarise_run(
        evaluation,
        name=options.name,
        command=options.command,
        seconds=json.loads(timings.read_text()) if timings.is_file() else {},
        picture=options.picture,
        curves=None if options.curves is None else options.curves.name,
        report=options.report,
        restorers=restorers,
    )
    if options.curves is not None:
        titles = {name: method_title(name)[0] for name in [*evaluation["methods"], *restorers]}
        options.curves.write_bytes(draw(evaluation, restorers, titles=titles))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(asdict(summary), indent=1) + "\n")


if __name__ == "__main__":
    main()
