"""The pictures of an evaluation: which rows are shown, and pictures.npz; only those are read back
from the cache, one checkpoint at a time."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from storage.checkpoints import load_checkpoint
from storage.errors import StorageError
from storage.files import write_file
from storage.sources.load import ImageSet
from tasks.evaluation.record import SIDES, Arrays, best_trained, sampled_means, trained
from tasks.evaluation.scores import Bench, read_candidates
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
N_SHOWN = {"targets": 20, "decoys": 5}
"""Images of the victim that is shown with every attack."""
OF_VICTIMS = ("vote", CONTROL, ORACLE)
"""Steps with one checkpoint for all runs of a victim."""


def choose_rows(
    methods: Mapping[str, Mapping[str, Any]], *, grid_rows: int, appendix_rows: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(grid, appendix): the rows with the best SSIM of `plain` (image restoration paper, figure 1),
    and those with the best of the method that restores best by design, the mean of a trained
    restorer's samples. Not shown are `plain_all`, whose pictures hardly differ from those of
    `plain`, the mean image, and classical denoisers, inside the span or not."""
    shown = [
        name
        for name, method in methods.items()
        if name not in ("plain_all", CONTROL)
        if methods.get(name.removesuffix(PROJECTED), method)["kind"] != "classical"
    ]
    record = {"methods": methods}
    learned = trained(record)
    order = ([name for name in sampled_means(record) if name in learned] or learned or ["plain"])[0]

    def best(method: str, side: str, n_rows: int) -> list[int]:
        scores = np.array(methods[method][side]["ssim"], np.float64)
        rows: list[int] = np.argsort(-scores, kind="stable")[:n_rows].tolist()
        return rows

    grid = {"methods": shown, **{side: best("plain", side, grid_rows) for side in SIDES}}
    ranked = best(order, "targets", appendix_rows)
    return grid, {"methods": shown, "targets": ranked, "appendix_order": order}


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


def choose_side_by_side(
    methods: Mapping[str, Any], victims: Sequence[Victim], further: Iterable[str]
) -> dict[str, Any] | None:
    """The record's `side_by_side`: the first victim's rows, evenly spread from the one that an
    attack brought back best to the one that every attack brought back worst; the decoys that an
    attack came nearest to; and what is shown of them. None without a further attack."""
    attacks = [*further, "plain"]
    if len(attacks) == 1:
        return None
    restored = best_trained({"methods": methods})
    n_rows = len(victims[0])
    chosen: dict[str, Any] = {"victim": victims[0].number}
    chosen["methods"] = [*attacks, *([restored] if restored else [])]
    for side in SIDES:
        scores = [np.array(methods[name][side]["ssim"][:n_rows], np.float64) for name in attacks]
        best = np.max(scores, axis=0)
        ranked = np.argsort(-best, kind="stable")
        n = min(N_SHOWN[side], n_rows)
        spread = np.linspace(0, n_rows - 1, n).round().astype(np.int64)
        chosen[side] = (ranked[spread] if side == "targets" else ranked[:n]).tolist()
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
            step = self.steps[method]
            for position, (row, run) in enumerate(zip(rows, runs, strict=True)):
                victim, place = self.places[side][row]
                if step in OF_VICTIMS or run >= 0:
                    of_all = step in OF_VICTIMS
                    name = victim_file(victim.number, step) if of_all else run_file(run, step)
                    files[name].append((key, method, position, place))
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
    places = [(side, side, record["grid"]) for side in SIDES]
    places.append(("appendix", "targets", record["appendix"]))
    if record["side_by_side"] is not None:
        places += [(f"attacks_{side}", side, record["side_by_side"]) for side in SIDES]
    for side in SIDES:
        rows = [row for of_bin in record["examples"][side] for row in of_bin]
        places.append((f"examples_{side}", side, {side: rows, "methods": ["plain"]}))
    wanted, pictures = {}, dict(nothing)
    for place, side, shown in places:
        rows = shown[side]
        originals = heldout.images[[record[side]["image_id"][row] for row in rows] or slice(0)]
        if side == "targets" and len(rows):  # as the victims saw them
            seen = (kept.places[side][row] for row in rows)
            originals = np.stack([victim.targets[k] for victim, k in seen])
        pictures[f"{place}/original"] = originals
        for method in shown["methods"]:
            runs = record["methods"][method][side]["run"]
            wanted[f"{place}/{method}"] = (method, side, rows, [runs[row] for row in rows])
    pictures |= kept.read(wanted, heldout.images.shape[1:])
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **pictures)
    write_file(path, content.getvalue())


def restore_unlike(
    bench: Bench, scores: Sequence[VictimScores], steps: Sequence[str]
) -> dict[str, Arrays]:
    """Pictures of the attack that resemble no target, and what restorers make of them (image
    restoration paper, figure 4): `{"nothing": {name: (n, 3, h, w) uint8}}`, names as in
    pictures.npz."""
    shape = bench.heldout.images.shape[1:]
    plain, seeds, closest = [], [], []
    for victim, run, which in chosen_unlike(scores):
        attack = next(r for r in victim.runs if r.number == run)
        iterations = bench.config.restore_iterations
        found = read_candidates(bench.dataset, attack, iterations, bench.device)
        is_it = found.candidate == which["candidate"]
        row = np.flatnonzero(is_it & (found.iteration == which["iteration"]))[0]
        plain.append(found.pictures()[row])
        seeds.append(found.seeds(run)[row])
        closest.append(victim.targets[int(which["closest"])])
    pictures = torch.stack(plain) if plain else torch.zeros(0, *shape)
    arrays: Arrays = {"plain": eight_bits(pictures)}
    arrays["closest"] = np.stack(closest) if closest else np.zeros((0, *shape), np.uint8)
    for step in steps if plain else ():
        for name, made in bench.restore(step, pictures, torch.stack(seeds)).items():
            arrays[name] = eight_bits(made.images)
            if made.spread is not None:
                spread = made.spread[:, None].expand_as(made.images) / SPREAD_LIMIT
                arrays[f"disagreement_{step}"] = eight_bits(spread)
    return {"nothing": arrays}
