"""The pictures of an evaluation: which rows are shown, and pictures.npz; only those are read back
from the cache, one checkpoint at a time."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from storage.checkpoints import load_checkpoint
from storage.errors import StorageError
from storage.files import write_file
from storage.sources.load import ImageSet
from tasks.evaluation.record import SIDES, Arrays
from tasks.evaluation.scores import N_UNLIKE, Bench, read_candidates
from tasks.evaluation.settings import CONTROL, ORACLE, PROJECTED
from tasks.evaluation.sweep import VictimScores, chosen_unlike
from tasks.evaluation.victims import Victim
from tasks.page.pictures import eight_bits

SPREAD_LIMIT = 0.5
"""The largest standard deviation of values in [0, 1], which 255 stands for."""


EXAMPLE_EDGES = (-1.0, 0.2, 0.3, 0.4, 0.5, 0.6, 1.0)
"""What a threshold of SSIM means is seen in pairs of every bin between these (KKT paper, figure
8)."""
N_EXAMPLES = {"targets": 8, "decoys": 4}
OF_VICTIMS = ("vote", CONTROL, ORACLE)
"""Steps with one checkpoint for all runs of a victim."""


def choose_rows(
    methods: Mapping[str, Mapping[str, Any]], *, grid_rows: int, appendix_rows: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(grid, appendix): the rows with the best SSIM of `plain` (image restoration paper, figure 1),
    and those with the best of the method that restores best by design, the mean of a trained
    restorer's samples. Not shown are `plain_all`, whose pictures hardly differ from those of
    `plain`, the mean image, and classical denoisers, inside the span or not."""
    kinds = {name: method["kind"] for name, method in methods.items()}
    sources = {name: kinds.get(name.removesuffix(PROJECTED)) for name in kinds}
    shown = [
        name
        for name in kinds
        if name not in ("plain_all", CONTROL) and sources[name] != "classical"
    ]
    trained = [name for name in kinds if kinds[name] == "trained"]
    means = [name for name in trained if "disagreement" in methods[name]["targets"]]
    order = (means or trained or ["plain"])[0]

    def best(method: str, side: str, n_rows: int) -> list[int]:
        scores = np.array(methods[method][side]["ssim"], np.float64)
        rows: list[int] = np.argsort(-scores, kind="stable")[:n_rows].tolist()
        return rows

    grid = {"methods": shown, **{side: best("plain", side, grid_rows) for side in SIDES}}
    appendix = {
        "methods": shown,
        "targets": best(order, "targets", appendix_rows),
        "appendix_order": order,
    }
    return grid, appendix


def choose_examples(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Rows whose `plain` SSIM is in each bin between EXAMPLE_EDGES (above the lower, at most the
    upper edge), in ascending order: at most N_EXAMPLES of a side and bin, evenly spread over its
    rows with a picture."""
    plain = methods["plain"]
    chosen: dict[str, Any] = {"edges": list(EXAMPLE_EDGES)}
    for side in SIDES:
        scores = np.array(plain[side]["ssim"], np.float64)
        has_picture = np.array(plain[side]["run"], np.int64) >= 0
        chosen[side] = []
        for low, high in pairwise(EXAMPLE_EDGES):
            found = np.flatnonzero((scores > low) & (scores <= high) & has_picture)
            found = found[np.argsort(scores[found], kind="stable")]
            n = min(N_EXAMPLES[side], len(found))
            spread = np.linspace(0, len(found) - 1, n).round().astype(np.int64)
            chosen[side].append(found[spread].tolist())
    return chosen


class KeptPictures:
    """Reads the pictures of rows of the record from the cache in `folder`."""

    def __init__(self, folder: Path, victims: Sequence[Victim], steps: Mapping[str, str]) -> None:
        """`steps`: the step that each method comes from."""
        self.folder = folder
        self.steps = steps
        self.places: dict[str, list[tuple[Victim, int]]] = {
            side: [
                (victim, row + k * len(victim)) for victim in victims for row in range(len(victim))
            ]
            for k, side in enumerate(SIDES)
        }

    def read(
        self,
        wanted: Mapping[str, tuple[str, str, Sequence[int], Sequence[int]]],
        shape: tuple[int, ...],
    ) -> Arrays:
        """By key of `wanted`, the pictures (rows, *shape) of (method, side, rows, the runs that
        their matches are from); black where there is none. Raises StorageError if a checkpoint was
        removed meanwhile."""
        pictures = {
            key: np.zeros((len(rows), *shape), np.uint8)
            for key, (_method, _side, rows, _runs) in wanted.items()
        }
        files: dict[str, list[tuple[str, str, int, int]]] = defaultdict(list)
        for key, (method, side, rows, runs) in wanted.items():
            for position, (row, run) in enumerate(zip(rows, runs, strict=True)):
                victim, place = self.places[side][row]
                step = self.steps[method]
                if step in OF_VICTIMS:
                    files[victim_file(victim.number, step)].append((key, method, position, place))
                elif run >= 0:
                    files[run_file(run, step)].append((key, method, position, place))
        for name, requests in files.items():
            found = load_checkpoint(self.folder, name)
            if found is None:
                raise StorageError(f"{self.folder / name} was removed; evaluate again")
            for key, method, position, place in requests:
                pictures[key][position] = found[0][f"{method}/picture"][place]
        return pictures


def run_file(run: int, step: str) -> str:
    """The checkpoint of one run and step."""
    return f"run_{run:08d}.{step}"


def victim_file(victim: int, step: str) -> str:
    """The checkpoint of what is computed of all runs of a victim."""
    return f"victim_{victim:08d}.{step}"


def write_pictures(
    path: Path,
    record: Mapping[str, Any],
    kept: KeptPictures,
    heldout: ImageSet,
    nothing: Arrays,
) -> None:
    """pictures.npz: those of the record's grid, appendix, examples and attacks side by side, and
    `nothing` as it is."""
    shape = heldout.images.shape[1:]
    wanted = {}
    pictures: Arrays = {}
    places = [(side, side, record["grid"]) for side in SIDES]
    places.append(("appendix", "targets", record["appendix"]))
    if record["side_by_side"] is not None:
        places += [(f"attacks_{side}", side, record["side_by_side"]) for side in SIDES]
    for side in SIDES:
        rows = [row for of_bin in record["examples"][side] for row in of_bin]
        places.append((f"examples_{side}", side, {side: rows, "methods": ["plain"]}))
    for place, side, shown in places:
        rows = shown[side]
        ids = np.array(record[side]["image_id"], np.int64)[np.array(rows, np.int64)]
        pictures[f"{place}/original"] = _originals(kept, heldout, side, rows, ids)
        for method in shown["methods"]:
            runs = record["methods"][method][side]["run"]
            wanted[f"{place}/{method}"] = (method, side, rows, [runs[row] for row in rows])
    pictures |= kept.read(wanted, shape) | nothing
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **pictures)
    write_file(path, content.getvalue())


def restore_unlike(
    bench: Bench, scores: Sequence[VictimScores], steps: Sequence[str]
) -> dict[str, Arrays]:
    """Pictures of the attack that resemble no target, and what restorers make of them (image
    restoration paper, figure 4): `{"nothing": {name: (n, 3, h, w) uint8}}`, names as in
    pictures.npz."""
    chosen = chosen_unlike(scores, N_UNLIKE)
    shape = bench.heldout.images.shape[1:]
    plain, seeds, closest = [], [], []
    for victim, run, which in chosen:
        attack = next(r for r in victim.runs if r.number == run)
        found = read_candidates(
            bench.dataset, attack, bench.config.restore_iterations, bench.device
        )
        row = np.flatnonzero(
            (found.candidate == which["candidate"]) & (found.iteration == which["iteration"])
        )[0]
        plain.append(found.pictures()[row])
        seeds.append(found.seeds(run)[row])
        closest.append(victim.targets[int(which["closest"])])
    pictures = torch.stack(plain) if plain else torch.zeros(0, *shape)
    arrays: Arrays = {"plain": eight_bits(pictures)}
    arrays["closest"] = np.stack(closest) if closest else np.zeros((0, *shape), np.uint8)
    for step in steps if chosen else ():
        for name, made in bench.restore(step, pictures, torch.stack(seeds)).items():
            arrays[name] = eight_bits(made.images)
            if made.spread is not None:
                spread = made.spread[:, None].expand_as(made.images) / SPREAD_LIMIT
                arrays[f"disagreement_{step}"] = eight_bits(spread)
    return {"nothing": arrays}


def _originals(
    kept: KeptPictures,
    heldout: ImageSet,
    side: str,
    rows: Sequence[int],
    ids: npt.NDArray[np.int64],
) -> npt.NDArray[np.uint8]:
    """Targets as the victims saw them, decoys as the source has them."""
    if side == "decoys" or not len(rows):
        return heldout.images[ids]
    places = [kept.places[side][row] for row in rows]
    return np.stack([victim.targets[place] for victim, place in places])
