"""The section of docs/results.md on one study, from its study.json (docs/studies.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.study_record import SCHEMA, VERSION

HEADER = (
    *("cell", "networks", "images each", "good", "good decoys", "mean SSIM", "decoys"),
    *("accuracy on others", "images behind the weights"),
)


def study_rows(text: str, *, name: str) -> tuple[list[str], list[Sequence[str]]]:
    """(what stands above the table of a study, the rows of that table).

    Raises ValueError, naming the file, if it is no study of this version.
    """
    try:
        record = dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} is no study ({error})") from error
    found = (record.get("schema"), record.get("version"))
    if found != (SCHEMA, VERSION):
        raise ValueError(f"{name} is {found}, expected {(SCHEMA, VERSION)}; make the study again")
    folder = name.rpartition("/")[0]
    n_hold = sum(claim["holds"] is True for claim in record["claims"])
    lines = [
        f"### {record['title']}\n",
        f"{record['question']} ({record['paper']}; preset `{record['preset']}`.) "
        f"{n_hold} of {len(record['claims'])} claims of the paper hold. The whole page: "
        f"[{folder}/study.html](results/{folder}/study.html).\n",
        f"`{record['command']}`, {sum(record['seconds'].values()):.0f} s on {record['machine']}; "
        f"{record['n_attacks']} attacks on each network.\n",
    ]
    return lines, [_row(cell) for cell in record["cells"]]


def _row(cell: Mapping[str, Any]) -> Sequence[str]:
    targets, decoys, victim = cell["targets"], cell["decoys"], cell["victim"]
    low, high = targets["mean_ssim_interval"]
    return (
        cell["name"],
        str(len(cell["victims"])),
        str(cell["n_images"]),
        f"{targets['n_good']} of {targets['n']}",
        f"{decoys['n_good']} of {decoys['n']}",
        f"{targets['mean_ssim']:.3f} [{low:.3f}, {high:.3f}]",
        f"{decoys['mean_ssim']:.3f}",
        _mean(victim["test_accuracy"], ".3f"),
        _mean(victim["n_effective"], ".1f"),
    )


def _mean(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):{form}}" if known else ""
