"""The files of an evaluation: evaluation.json, pictures.npz and the cache of its steps.

docs/evaluation.md specifies the first two. Everything is written atomically, the JSON last, and
carries a fingerprint of what it was computed from.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recon_core.summary import compare, detect, n_above_every, summarise
from storage.checkpoints import load_checkpoint, save_checkpoint
from storage.dataset import Dataset
from storage.files import write_file, write_json
from storage.layout import OUTCOMES
from storage.sources import ImageSet

SCHEMA = "palimpsest-evaluation"
VERSION = 2
CONVENTIONS = {
    "ssim": "Wang et al. 2004: Gaussian window 11x11, sigma 1.5, K1 .01, K2 .03, data range 1, "
    "population covariance, mean over the valid region and the channels",
    "haarpsi": "Reisenhofer et al. 2018: C 30, alpha 4.2, YIQ; of the match with the best SSIM",
    "match": "per image, the picture of its run with the best SSIM; 0 where a run left no picture",
    "decoys": "images of the same source that no run of the store was trained on, as many per run "
    "as it has targets, matched in the same way with the pictures of that run",
    "interval": "95 %: of a mean the percentile bootstrap over images, 2000 resamples; of a share "
    "the exact one of Clopper and Pearson",
    "disagreement": "of the samples behind a mean: their standard deviation in [0, 0.5], averaged "
    "over the pixels and channels of the match",
}
DECIMALS = 6
SIDES = ("targets", "decoys")

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class EvaluatedRun:
    """One run of the store: where it is, and which images its pictures are scored against."""

    number: int
    part: int
    row: int
    outcome: str
    n_pairs: int
    image_ids: npt.NDArray[np.int64]
    targets: npt.NDArray[np.uint8]
    decoy_ids: npt.NDArray[np.int64]


def fingerprint_of(*inputs: Any) -> str:
    """SHA-256 of the inputs as canonical JSON."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def weights_digest(path: Path) -> str:
    """SHA-256 of a restorer's file: of `path` itself, or of model.json in the folder `path`, which
    has the SHA-256 of its weights in it."""
    file = path / "model.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} is not there; train the restorer first")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def read_finished(out: Path, fingerprint: str) -> dict[str, Any] | None:
    """The record in `out`, if one with this fingerprint was finished there."""
    path = out / "evaluation.json"
    if not path.is_file() or not (out / "pictures.npz").is_file():
        return None
    record: dict[str, Any] = json.loads(path.read_bytes())
    return record if record.get("fingerprint") == fingerprint else None


def cached(
    folder: Path, name: str, key: str, compute: Callable[[], dict[str, Arrays]]
) -> tuple[dict[str, Arrays], float]:
    """(results, seconds): from checkpoint `name` if its key is `key`, else computed and saved."""
    found = load_checkpoint(folder, name)
    if found is not None and found[1].get("key") == key:
        nested: dict[str, Arrays] = {method: {} for method in found[1]["methods"]}
        for path, array in found[0].items():
            method, _slash, column = path.partition("/")
            nested[method][column] = array
        return nested, float(found[1]["seconds"])
    start = time.perf_counter()
    results = compute()
    seconds = round(time.perf_counter() - start, 3)
    flat = {f"{m}/{name}": array for m, arrays in results.items() for name, array in arrays.items()}
    save_checkpoint(folder, name, flat, {"key": key, "seconds": seconds, "methods": list(results)})
    return results, seconds


def joined(
    parts: Mapping[str, Sequence[Arrays]], runs: Sequence[EvaluatedRun]
) -> dict[str, Arrays]:
    """Per method, `<side>/<column>` over all runs; a run has its targets first, then its decoys."""
    methods: dict[str, Arrays] = {}
    for method, pieces in parts.items():
        methods[method] = {}
        for column in pieces[0]:
            halves = [
                np.split(piece[column], [len(run.targets)])
                for piece, run in zip(pieces, runs, strict=True)
            ]
            for k, side in enumerate(SIDES):
                methods[method][f"{side}/{column}"] = np.concatenate([half[k] for half in halves])
    return methods


def make_record(
    settings: Mapping[str, Any],
    *,
    dataset: Dataset,
    heldout: ImageSet,
    runs: Sequence[EvaluatedRun],
    methods: Mapping[str, Arrays],
) -> dict[str, Any]:
    """The record, except for what the caller knows: fingerprint, restorers, seconds."""
    threshold = float(settings["good_threshold"])
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "settings": dict(settings),
        "conventions": CONVENTIONS,
        "source": {
            "name": heldout.name,
            "split": heldout.split,
            "n_images": len(heldout.images),
            "size": list(heldout.images.shape[2:]),
            "class_names": list(heldout.class_names),
            "content_hash": heldout.content_hash,
            "notes": list(heldout.notes),
        },
        "dataset": {
            "content_hash": dataset.content_hash,
            "manifest": dataset.manifest,
            "n_runs": len(runs),
            "n_targets": sum(len(run.targets) for run in runs),
            "n_pairs": dataset.n_pairs,
            "outcomes": {name: sum(run.outcome == name for run in runs) for name in OUTCOMES},
            "n_runs_without_pictures": sum(run.n_pairs == 0 for run in runs),
            "images_per_run": sorted({len(run.targets) for run in runs}),
        },
        "targets": _identities(runs, [run.image_ids for run in runs], heldout),
        "decoys": _identities(runs, [run.decoy_ids for run in runs], heldout),
        "methods": {
            name: _method(arrays, methods["plain"], threshold) for name, arrays in methods.items()
        },
        "grid": _grid(methods, int(settings["grid_rows"]), hidden=settings["baselines"]),
    }


def write_record(
    out: Path,
    record: Mapping[str, Any],
    *,
    runs: Sequence[EvaluatedRun],
    heldout: ImageSet,
    methods: Mapping[str, Arrays],
) -> dict[str, Any]:
    """Writes pictures.npz, then evaluation.json; returns the record as it reads back."""
    originals = {
        "targets": np.concatenate([run.targets for run in runs]),
        "decoys": heldout.images[np.concatenate([run.decoy_ids for run in runs])],
    }
    pictures: Arrays = {}
    for side in SIDES:
        rows = np.array(record["grid"][side], np.int64)
        pictures[f"{side}/original"] = originals[side][rows]
        for method in record["grid"]["methods"]:
            pictures[f"{side}/{method}"] = methods[method][f"{side}/picture"][rows]
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **pictures)
    write_file(out / "pictures.npz", content.getvalue())
    write_json(out / "evaluation.json", record)
    written: dict[str, Any] = json.loads((out / "evaluation.json").read_bytes())
    return written


def _identities(
    runs: Sequence[EvaluatedRun], ids: Sequence[npt.NDArray[np.int64]], heldout: ImageSet
) -> dict[str, list[int]]:
    image_ids = np.concatenate(ids)
    return {
        "run": [run.number for run, mine in zip(runs, ids, strict=True) for _image in mine],
        "image_id": image_ids.tolist(),
        "label": heldout.labels[image_ids].tolist(),
    }


def _method(arrays: Arrays, plain: Arrays, threshold: float) -> dict[str, Any]:
    """Scores of one method and what they sum up to; rounded last."""
    scores: dict[str, dict[str, npt.NDArray[np.float64]]] = {
        side: {metric: _rounded(arrays[f"{side}/{metric}"]) for metric in ("ssim", "haarpsi")}
        for side in SIDES
    }
    n_above = n_above_every(scores["targets"]["ssim"], scores["decoys"]["ssim"])
    body: dict[str, Any] = {
        side: {
            "summary": summarise(
                scores[side]["ssim"], scores[side]["haarpsi"], good_threshold=threshold
            ),
            "compared_with_plain": compare(_rounded(plain[f"{side}/ssim"]), scores[side]["ssim"]),
            **{metric: values.tolist() for metric, values in scores[side].items()},
        }
        for side in SIDES
    }
    if "targets/disagreement" in arrays:
        for side in SIDES:
            spread = _rounded(arrays[f"{side}/disagreement"]).tolist()
            body[side]["disagreement"] = [None if math.isnan(value) else value for value in spread]
    body["detection"] = detect(scores["targets"]["ssim"], scores["decoys"]["ssim"])
    return body | {"n_targets_above_every_decoy": n_above}


def _grid(
    methods: Mapping[str, Arrays], n_rows: int, *, hidden: Sequence[str]
) -> dict[str, list[Any]]:
    """What to show: the images that a shown method scores highest, targets and decoys by one rule.

    Not shown are `plain_all`, whose pictures hardly differ from those of `plain`, and `hidden`.
    """
    shown = [name for name in methods if name != "plain_all" and name not in hidden]
    grid: dict[str, list[Any]] = {"methods": shown}
    for side in SIDES:
        best = np.max([methods[name][f"{side}/ssim"] for name in shown], axis=0)
        grid[side] = np.argsort(-best, kind="stable")[:n_rows].tolist()
    return grid


def _rounded(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return values.astype(np.float64).round(DECIMALS)
