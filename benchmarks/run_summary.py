"""A finished job as one small JSON file for `docs/results/`: its scores, its command, its seconds.

    python -m benchmarks.run_summary WORKSPACE --name NAME --command "..." --json FILE

WORKSPACE is the folder of a job; its evaluation.json has the scores of every image, of which only
the summaries are kept, targets and decoys side by side.
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

EVALUATION_SCHEMA = "palimpsest-evaluation"


@dataclass(frozen=True, kw_only=True)
class Scores:
    """One method on one side (targets or decoys): counts and means over the images."""

    n: int
    n_good: int
    mean_ssim: float
    mean_haarpsi: float
    best_ssim: float
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method's scores on images that victims were trained on, and on images none was."""

    targets: Scores
    decoys: Scores
    n_targets_above_every_decoy: int
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A job's evaluation. `seconds` are per stage; `picture` is a file beside this one, or None."""

    name: str
    command: str
    source: str
    n_runs: int
    images_per_run: tuple[int, ...]
    good_threshold: float
    methods: dict[str, Method]
    seconds: dict[str, float]
    picture: str | None
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
) -> RunSummary:
    """The summary of an evaluation.json.

    Raises:
        ValueError: it is no evaluation, or has no image to sum up.
    """
    if evaluation.get("schema") != EVALUATION_SCHEMA:
        raise ValueError(
            f"schema={evaluation.get('schema')!r} is not {EVALUATION_SCHEMA!r}; give the folder of "
            "a job whose evaluation is finished"
        )
    kept = [field.name for field in fields(Scores)]
    methods = {
        method: {
            side: {key: body[side]["summary"][key] for key in kept}
            for side in ("targets", "decoys")
        }
        | {"n_targets_above_every_decoy": body["n_targets_above_every_decoy"]}
        for method, body in evaluation["methods"].items()
    }
    return TypeAdapter(RunSummary).validate_python(
        {
            "name": name,
            "command": command,
            "source": evaluation["source"]["name"],
            "n_runs": evaluation["dataset"]["n_runs"],
            "images_per_run": tuple(evaluation["dataset"]["images_per_run"]),
            "good_threshold": evaluation["settings"]["good_threshold"],
            "methods": methods,
            "seconds": seconds,
            "picture": picture,
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
    parser.add_argument("--picture", help="file name of a picture beside the summary")
    parser.add_argument("--json", type=Path, required=True, help="docs/results/run-NAME.json")
    options = parser.parse_args(argv)
    timings = options.workspace / "timings.json"
    summary = summarise_run(
        json.loads((options.workspace / "evaluation" / "evaluation.json").read_text()),
        name=options.name,
        command=options.command,
        seconds=json.loads(timings.read_text()) if timings.is_file() else {},
        picture=options.picture,
    )
    options.json.write_text(json.dumps(asdict(summary), indent=1) + "\n")


if __name__ == "__main__":
    main()
