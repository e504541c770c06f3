"""The victims of a study that others may want: one safetensors file for each cell with a role.

Each says in its metadata which network it is and where it is cut, so that `palimpsest attack
inversion` takes it as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch

from tasks.families.inversion.study.plan import InversionPlan
from tasks.families.inversion.study.settings import Cell, defence_json, defence_name
from tasks.study.products import write_weights

VICTIMS = "victims"


def write_victims(plan: InversionPlan, cells: Iterable[Cell]) -> list[Path]:
    """The networks of the first seed of some cells that are there; their files.

    Raises StoreFullError.
    """
    written = []
    for cell in cells:
        victim = plan.victim(cell, 0)
        found = plan.folder.product(victim.key)
        if found is None:
            continue
        arrays, shapes = found[0], victim.model().tensor_shapes
        path = Path(plan.root) / VICTIMS / f"{_file_name(cell)}.safetensors"
        about = {
            "kind": "split",
            "network": asdict(cell.network),
            "shape": list(victim.shape),
            "victim": victim.name,
            "defence": defence_json(cell.defence),
            "accuracy": float(arrays["accuracy"]),
        }
        weights = {name: torch.from_numpy(arrays[f"weights/{name}"])[None] for name in shapes}
        write_weights(path, weights, about)
        written.append(path)
    return written


def _file_name(cell: Cell) -> str:
    """`digits-cut2-mixcon-1-0.0001`."""
    return f"{cell.source}-cut{cell.cut}-{defence_name(cell.defence).replace(' ', '-')}"
