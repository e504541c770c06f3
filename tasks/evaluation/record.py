"""The record of an evaluation, evaluation.json (docs/evaluation.md), and the cache of its steps;
with a fingerprint of what they were computed from."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from recon_core.matching import CLIPPED, GAP
from recon_core.summary import compare, detect, roc, summarise
from storage.checkpoints import load_checkpoint, save_checkpoint
from storage.documents import read_document
from storage.pairs.dataset import Dataset
from storage.pairs.layout import OUTCOMES
from storage.sources.load import ImageSet
from tasks.attack_file.comparison import with_floats
from tasks.campaign.state import log_notice
from tasks.page.files import read_record

if TYPE_CHECKING:
    from tasks.evaluation.victims import Victim

SCHEMA, VERSION = "palimpsest-evaluation", 5
COMMAND = "palimpsest evaluate"
CACHE_VERSION = 6
"""Of the checkpoints that an evaluation goes on from; what is made of them may change alone."""
CONVENTIONS = {
    "picture": f"a raw reconstruction at the largest range of whose values {CLIPPED:.0%} are "
    "clipped, around the victim's mean image",
    "ssim": "Wang et al. 2004: Gaussian window 11x11, sigma 1.5, K1 .01, K2 .03, data range 1, "
    "population covariance, mean over the valid region and the channels",
    "ssim3": "of the same match with a Gaussian window 3x3, borders reflected, as the KKT paper "
    "and Haim et al. 2022 report; never to be mixed with ssim",
    "haarpsi": "Reisenhofer et al. 2018: C 30, alpha 4.2, YIQ; of the match with the best SSIM",
    "rmse": "root of the mean square difference of the match with the best SSIM, in [0, 1]",
    "lead": "SSIM of the match less the highest SSIM of the same picture with any other image "
    "given, of a decoy with any other decoy",
    "identified": f"a lead of at least {GAP:g} (image restoration paper, section 2); decoys among "
    "decoys",
    "mean_image": "a control: the mean of the victim's training images as the only picture of its "
    "attacks, which carries nothing of any one of them",
    "match": "per image, the picture with the best SSIM of all attacks on its victim; 0 where none "
    "of them left a picture",
    "vote": "KKT paper, appendix A.1: per image, the mean of all candidates at most vote_ratio "
    "times as far as the nearest, by normalised distance of half-size images; `nearest` has the "
    "scores of the nearest alone, which is not chosen by SSIM as a match is",
    "decoys": "images of the same source that no run of the store was trained on, as many per "
    "victim as it has targets, matched in the same way with the pictures of that victim",
    "interval": "95 %: of a mean the percentile bootstrap over images, 2000 resamples; of a share "
    "the exact one of Clopper and Pearson; of a rank correlation the percentile bootstrap over "
    "runs (ranking) or over victims, of fewer than five over images (hallucination)",
    "disagreement": "of the samples behind a mean: their standard deviation in [0, 0.5], averaged "
    "over the pixels and channels of the match",
}
DECIMALS = 6
SIDES = ("targets", "decoys")
SCORES = ("ssim", "haarpsi", "ssim3", "rmse", "lead")
NEAREST = ("ssim", "ssim3")
"""Scores of a vote's nearest candidate alone."""
ORIGIN = ("run", "candidate", "iteration")

Arrays = dict[str, npt.NDArray[Any]]


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
    record = read_document(path, "remove it, and it is evaluated again")
    return record if record.get("fingerprint") == fingerprint else None


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
        f"evaluation); run `{COMMAND}` first"
    )


def read_evaluation(folder: Path) -> dict[str, Any]:
    """The record of a finished evaluation. Raises ValueError if it is not JSON, not an
    evaluation's, or of another version than this release writes."""
    path = folder / "evaluation.json"
    return read_record(path, schema=SCHEMA, version=VERSION, command=COMMAND)


def trained(record: Mapping[str, Any]) -> list[str]:
    """The methods that learned from pairs, in the record's order."""
    return [name for name, method in record["methods"].items() if method["kind"] == "trained"]


def sampled_means(record: Mapping[str, Any]) -> list[str]:
    """The methods that average several samples: those with a disagreement."""
    methods = record["methods"]
    return [name for name in methods if "disagreement" in methods[name]["targets"]]


def best_trained(record: Mapping[str, Any]) -> str | None:
    """The trained method with most good targets, then with the highest mean SSIM; None if none."""

    def merit(name: str) -> tuple[int, float]:
        summary = record["methods"][name]["targets"]["summary"]
        return summary["n_good"], summary["mean_ssim"] or 0.0

    return max(trained(record), key=merit, default=None)


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


OnProgress = Callable[[int, int, str, float], None]
"""Called with the hundredths of jobs done and of all, what is done now, and its share of the
work."""


@dataclass
class Work:
    """Does what is not in the cache, counts it and keeps time per step. `jobs`: how many there are
    of each step. What is in the cache is not reported before something is missing: it took no
    time."""

    folder: Path
    key: list[Any]
    jobs: Mapping[str, int]
    on_progress: OnProgress
    n_done: int = 0
    done_of: Counter[str] = field(default_factory=Counter)
    computes: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    def do(
        self,
        name: str,
        step: str,
        settings: Sequence[Any],
        compute: Callable[[Callable[[float], None]], dict[str, Arrays]],
    ) -> dict[str, Arrays]:
        message = f"{name.replace('_', ' ').partition('.')[0]}: {step}"

        def advance(fraction: float) -> None:
            done = 100 * self.n_done + int(100 * fraction)
            self.on_progress(done, 100 * self.n_jobs, message, self._share(step, fraction))

        def missing() -> dict[str, Arrays]:
            if self.n_done and not self.computes:
                log_notice(
                    f"Evaluate: goes on, {self.n_done:,} of {self.n_jobs:,} steps are finished"
                )
            self.computes = True
            advance(0.0)
            return compute(advance)

        key = fingerprint_of(*self.key, *settings)
        results, spent = cached(self.folder, name, key, missing)
        self.seconds[step] = self.seconds.get(step, 0.0) + spent
        self.n_done += 1
        self.done_of[step] += 1
        return results

    @property
    def n_jobs(self) -> int:
        return sum(self.jobs.values())

    def _share(self, step: str, fraction: float) -> float:
        """Share of the work that is done, by what jobs of each step took so far; a step that none
        was done of takes as long as the slowest."""
        known = {name: self.seconds[name] / n for name, n in self.done_of.items() if n}
        most = max(known.values(), default=1.0)
        cost = {name: max(known.get(name, most), 1e-9) for name in self.jobs}
        done = sum(cost[name] * n for name, n in self.done_of.items()) + fraction * cost[step]
        return done / sum(cost[name] * n for name, n in self.jobs.items())


def joined(parts: Mapping[str, Sequence[Arrays]], victims: Sequence[Victim]) -> dict[str, Arrays]:
    """Per method, `<side>/<column>` over all victims, of which each has its targets first."""
    n_targets = [len(victim) for victim in victims]
    methods: dict[str, Arrays] = {}
    for method, pieces in parts.items():
        methods[method] = {}
        for column in (name for name in pieces[0] if name != "picture"):
            halves = [np.split(p[column], [n]) for p, n in zip(pieces, n_targets, strict=True)]
            for k, side in enumerate(SIDES):
                methods[method][f"{side}/{column}"] = np.concatenate([half[k] for half in halves])
    return methods


def describe_source(heldout: ImageSet) -> dict[str, Any]:
    return {
        "name": heldout.name,
        "split": heldout.split,
        "n_images": len(heldout.images),
        "size": list(heldout.images.shape[2:]),
        "class_names": list(heldout.class_names),
        "content_hash": heldout.content_hash,
        "notes": list(heldout.notes),
    }


def describe_dataset(
    dataset: Dataset, victims: Sequence[Victim], attacks_per_victim: int
) -> dict[str, Any]:
    runs = [run for victim in victims for run in victim.runs]
    return {
        "content_hash": dataset.content_hash,
        "manifest": dataset.manifest,
        "n_runs": len(runs),
        "n_victims": len(victims),
        "attacks_per_victim": attacks_per_victim,
        "n_targets": sum(len(victim) for victim in victims),
        "n_pairs": dataset.n_pairs,
        "outcomes": {name: sum(run.outcome == name for run in runs) for name in OUTCOMES},
        "n_runs_without_pictures": sum(run.n_pairs == 0 for run in runs),
        "images_per_victim": sorted({len(victim) for victim in victims}),
    }


def describe_rows(victims: Sequence[Victim], heldout: ImageSet) -> dict[str, Any]:
    """`targets` and `decoys`: which image each row is. Labels are those of the source."""
    rows: dict[str, Any] = {}
    for side, name in (("targets", "image_ids"), ("decoys", "decoy_ids")):
        ids = np.concatenate([getattr(victim, name) for victim in victims])
        rows[side] = {
            "victim": [victim.number for victim in victims for _image in range(len(victim))],
            "image_id": ids.tolist(),
            "label": heldout.labels[ids].tolist(),
        }
    margins = np.concatenate([victim.margins for victim in victims])
    rows["targets"]["margin"] = rounded(margins.tolist())
    return rows


def describe_method(
    arrays: Arrays, plain: Arrays, *, kind: str, threshold: float, is_sweep: bool
) -> dict[str, Any]:
    """Scores of one method and what they sum up to, computed from the rounded scores."""
    body: dict[str, Any] = {"kind": kind}
    ssims = []
    for side in SIDES:
        scores = {name: arrays[f"{side}/{name}"].astype(np.float64).round(DECIMALS)
                  for name in SCORES}  # fmt: skip
        before = plain[f"{side}/ssim"].astype(np.float64).round(DECIMALS)
        ssims.append(scores["ssim"])
        body[side] = {
            "summary": summarise(
                *(scores[name] for name in ("ssim", "haarpsi", "ssim3")),
                good_threshold=threshold, lead=scores["lead"],
            ),
            "compared_with_plain": compare(before, scores["ssim"]),
            **{metric: values.tolist() for metric, values in scores.items()},
            **{name: arrays[f"{side}/{name}"].tolist() for name in ORIGIN},
        }  # fmt: skip
        if f"{side}/disagreement" in arrays:
            body[side]["disagreement"] = arrays[f"{side}/disagreement"].tolist()
        if f"{side}/nearest_ssim" in arrays:
            body[side]["nearest"] = {
                name: arrays[f"{side}/nearest_{name}"].tolist() for name in NEAREST
            }
    body["detection"] = {**detect(*ssims), "roc": roc(*ssims)}
    body["n_targets_above_every_decoy"] = int((ssims[0] > ssims[1].max(initial=-1.0)).sum())
    body["halves"] = None
    if is_sweep and "targets/half0_ssim" in arrays:
        body["halves"] = {
            side: {
                metric: [arrays[f"{side}/half{k}_{metric}"].tolist() for k in range(2)]
                for metric in ("ssim", "haarpsi")
            }
            for side in SIDES
        }
    rounded_body: dict[str, Any] = rounded(body)
    return rounded_body


def rounded(value: Any, decimals: int = DECIMALS) -> Any:
    """`value` with all floats in it rounded, and None for what is not finite."""
    return with_floats(value, lambda number: round(number, decimals))
