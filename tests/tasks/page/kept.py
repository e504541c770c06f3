"""The kept records of docs/results/studies as records for pages, with pictures of noise."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.audit.page import AUDIT_PAGE
from tasks.families.autoencoder.study.figure_specs import group_name
from tasks.families.autoencoder.study.page import RECOVERY_PAGE
from tasks.families.inversion.study.page import INVERSION_PAGE
from tasks.families.weights.study.page import STUDY_PAGE
from tests.tasks.page.study_pages import Arrays, Made, StudyPages

STUDIES = Path(__file__).parents[3] / "docs" / "results" / "studies"
PAGES = {
    page.name: StudyPages(page) for page in (AUDIT_PAGE, STUDY_PAGE, RECOVERY_PAGE, INVERSION_PAGE)
}
SMALLEST = {"audit": "audit-standard", "study": "cnn", "recovery": "noise-20-layers",
            "inversion": "inversion"}  # fmt: skip
"""The study of each kind with the smallest record that has most kinds of figures."""
SIZE, KERNEL = 8, 3


@cache
def _text(kind: str, study: str) -> str:
    return (STUDIES / study / f"{kind}.json").read_text()


def kept(kind: str, study: str = "") -> Made:
    """(record, pictures) of a kept study of this kind, which a test may change."""
    record = json.loads(_text(kind, study or SMALLEST[kind]))
    record |= {"settings": {"seed": 42}, "command": "palimpsest"}  # without the null of a setting
    pictures = {"audit": _exposed, "study": _cells, "recovery": _recovered, "inversion": _inverted}
    return record, pictures[kind](record)


def noise(*shape: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(shape).integers(0, 256, shape, np.uint8)


def _exposed(record: dict[str, Any]) -> Arrays:
    return {
        f"{side}/{what}": noise(len(record[rows]), 3, SIZE, SIZE)
        for side, rows in (("exposed", "exposed"), ("decoys", "decoys_shown"))
        for what in ("original", "reconstruction")
    }


def _cells(record: dict[str, Any]) -> Arrays:
    found = {
        f"cell_{cell['number']:04d}/{what}": noise(len(cell["shown"]), 3, SIZE, SIZE)
        for cell in record["cells"]
        for what in ("original", "reconstruction")
    }
    for figure in record["figures"]:
        for number in figure["cells"] if figure["kind"] == "kernels" else ():
            found[f"kernels_{number:04d}"] = noise(12, 3, KERNEL, KERNEL)
    return found


def _recovered(record: dict[str, Any]) -> Arrays:
    found: Arrays = {
        f"masks/{mask['name']}": np.indices((SIZE, SIZE)).sum(0) % (k + 2) > 0
        for k, mask in enumerate(record["masks"])
    }
    for shown in record["shown"]:
        group, n = group_name(shown), len(shown["rows"])
        found |= {f"{group}/{what}": noise(n, 3, SIZE, SIZE) for what in ("original", "degraded")}
        where = {key: shown[key] for key in ("victim", "level", "mask", "sigma")}
        for cell in record["cells"]:
            if cell["split"] == "train" and where.items() <= cell.items():
                name = f"{group}/{cell['method']}"
                found[name] = noise(n, 3, SIZE, SIZE)
                found[f"{name}/mse"] = np.array([cell["mse"][row] for row in shown["rows"]])
                if cell["mask_accuracy"] is not None:
                    found[f"{group}/mask/{cell['method']}"] = noise(n, SIZE, SIZE) > 127
    return found


def _inverted(record: dict[str, Any]) -> Arrays:
    """Of the first source, to which the record is cut down."""
    (source,) = record["sources"] = record["sources"][:1]
    for part in ("cells", "sweet_spots"):
        record[part] = [one for one in record[part] if one["source"] == source["name"]]
    sides = (source["side"], source["side"])
    shape = (3, *sides) if source["channels"] == 1 else (3, source["channels"], *sides)
    found = {f"{source['name']}/original": noise(*shape)}
    for k, cell in enumerate(record["cells"]):
        for attack in cell["attacks"] if cell["roles"] or not cell["in_grid"] else ():
            found[f"{k}/{attack}"] = noise(*shape)
    return found
