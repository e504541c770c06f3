"""A finished evaluation's numbers and pictures, as the report and the comparison read them.

docs/evaluation.md specifies both files. Nothing here computes a number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from storage.documents import read_document
from tasks.evaluation.record import SCHEMA, SIDES, VERSION
from tasks.page.files import Record

__all__ = ["COMMAND", "SIDES", "Record", "evaluation_folder", "read_record"]

COMMAND = "palimpsest evaluate"


def evaluation_folder(run: Path) -> Path:
    """The folder with evaluation.json: `run` itself, or `run`/evaluation of a job's folder.

    Raises ValueError if there is no such folder, or no finished evaluation in it.
    """
    if not run.is_dir():
        raise ValueError(f"{run} is not a folder; give a job's folder, or its evaluation folder")
    for folder in (run, run / "evaluation"):
        if (folder / "evaluation.json").is_file():
            if not (folder / "pictures.npz").is_file():
                raise ValueError(
                    f"{folder} has evaluation.json but no pictures.npz, so its evaluation was not "
                    "finished or not copied whole; copy both, or evaluate again"
                )
            return folder
    raise ValueError(
        f"{run} has no finished evaluation (no evaluation.json in it or in its folder "
        "evaluation); run `palimpsest evaluate` first"
    )


def read_record(path: Path) -> dict[str, Any]:
    """The numbers of `path`, an evaluation.json of the version that this release writes.

    Raises ValueError if it is not JSON, not an evaluation's, or of another version.
    """
    record = read_document(path, "evaluate again")
    name, version = record.get("schema"), record.get("version")
    if (name, version) != (SCHEMA, VERSION):
        raise ValueError(
            f"{path} is {name!r} version {version!r}, expected {SCHEMA!r} version {VERSION}; "
            "evaluate again with this release: palimpsest evaluate --store FOLDER"
        )
    return record


def trained(record: Record) -> list[str]:
    """The methods that learned from pairs, in the record's order."""
    return [name for name, method in record["methods"].items() if method["kind"] == "trained"]


def sampled_means(record: Record) -> list[str]:
    """The methods that average several samples: those with a disagreement."""
    methods = record["methods"]
    return [name for name in methods if "disagreement" in methods[name]["targets"]]


def best_trained(record: Record) -> str | None:
    """The trained method with most good targets, then with the highest mean SSIM; None if none."""

    def merit(name: str) -> tuple[int, float]:
        summary = record["methods"][name]["targets"]["summary"]
        return summary["n_good"], summary["mean_ssim"] or 0.0

    return max(trained(record), key=merit, default=None)


def campaign_of(record: Record) -> dict[str, Any]:
    """The settings of the campaign, from the manifest of the store."""
    manifest = record["dataset"]["manifest"]
    return dict(manifest.get("campaign", manifest))
