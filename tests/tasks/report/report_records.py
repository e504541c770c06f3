"""Evaluations for reports: of small planted sweeps, made once each, which a test may change."""

from __future__ import annotations

import copy
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.tasks.evaluation.evaluations import SIZE, evaluated_sweep

SIDES = ("targets", "decoys")
Arrays = dict[str, npt.NDArray[np.uint8]]


@cache
def _evaluated(**how: Any) -> tuple[dict[str, Any], Arrays]:
    with tempfile.TemporaryDirectory() as folder:
        record = evaluated_sweep(Path(folder), **how)
        with np.load(Path(folder) / "out" / "pictures.npz") as pictures:
            return record, dict(pictures)


def evaluation(**how: Any) -> tuple[dict[str, Any], Arrays]:
    """(record, pictures) of a sweep, of whose four images two came back if nothing else is said."""
    record, pictures = copy.deepcopy(_evaluated(**{"planted": 2} | how))
    return json.loads(json.dumps(record)), pictures


def write(folder: Path, record: dict[str, Any], pictures: Arrays) -> Path:
    """The two files of an evaluation in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evaluation.json").write_text(json.dumps(record, allow_nan=False))
    np.savez_compressed(folder / "pictures.npz", allow_pickle=False, **pictures)
    return folder


def with_a_further_attack() -> tuple[dict[str, Any], Arrays]:
    """The same of victims that a span attack was made on, too, in a time that is known."""
    record, pictures = evaluation()
    further = copy.deepcopy(record["methods"]["plain"]) | {"kind": "further", "halves": None}
    record["methods"]["plain_span"] = further
    shared = {"n_runs": 6, "content_hash": "c" * 64}
    record["attacks"] = [
        shared | {"method": "plain", "kind": "kkt", "settings": {}, "n_candidates": 80,
                  "seconds": None},
        shared | {"method": "plain_span", "kind": "span", "n_candidates": 48, "seconds": 17.0,
                  "settings": {"kind": "span", "start": "known"}},
    ]  # fmt: skip
    methods = ["plain_span", "plain", "edm_x3"]
    record["side_by_side"] = {"victim": 0, "methods": methods, "targets": [3, 2, 1, 0],
                              "decoys": [3, 1]}  # fmt: skip
    for side in SIDES:
        n = len(record["side_by_side"][side])
        for name in ("original", *methods):
            pictures[f"attacks_{side}/{name}"] = np.full((n, 3, SIZE, SIZE), 90, np.uint8)
    return record, pictures


def with_a_span() -> tuple[dict[str, Any], Arrays]:
    """The same evaluated inside the span of the networks' first layers, which one has not."""
    record, pictures = evaluation()
    methods = record["methods"]
    for name in ("tv", "edm_x3", "plain"):
        methods[f"{name}_projected"] = copy.deepcopy(methods[name]) | {"kind": "projected"}
    methods["oracle"] = copy.deepcopy(methods["plain"]) | {"kind": "oracle", "halves": None}
    closed = dict.fromkeys([name for name in methods if name not in ("plain", "oracle")], 0.125)
    closed |= {"edm_x3_projected": 0.5}
    record["span"] = {"n_directions": [11, 0], "n_without": 1, "headroom_closed": closed}
    return record, pictures
