"""Score what came back of every victim: the attack alone and after each restorer, beside decoys.

The protocol of the image restoration paper, section 5.1.1: each image takes the best match of all
attacks on its victim. Two additions: every number has its twin measured on as many *decoys*, images
of the same source that no run of the store was trained on, and a victim whose attacks all diverged
counts, its images scoring 0.

Methods: `plain` (the attack's pictures at the iterations that the restorers see), `plain_<kind>`
(those of a further attack on the same victims), `mean_image` (a control: the mean of the victim's
training images, a picture that shows none of them), `plain_all` (at all saved iterations), `vote`
(per image the mean of nearly nearest candidates: the KKT paper), the classical denoisers of
`baselines`, restorers from elsewhere (`external`), and per restorer either `<name>` (one answer)
or `<name>_x1` and `<name>_x<n>` (one sample; the mean of n, which is the image restoration paper's
guard against hallucination, with how far the n samples disagree). With `span`, each of these and
`plain` has a twin `<method>_projected`, and `oracle` is the images' own projections.

`out/` gets evaluation.json (docs/evaluation.md), pictures.npz, and cache/ with one checkpoint per
run and step, so that a killed evaluation goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from recon_core.experiments import KKT
from recon_core.matching import CLIPPED
from storage.documents import read_document, understood
from storage.files import write_json
from storage.object_store import LocalPlace
from storage.pairs.dataset import Dataset
from storage.sources.load import ImageSet
from tasks.campaign.plan import VICTIMS
from tasks.devices import Device
from tasks.evaluation import pictures, record, sweep
from tasks.evaluation.pictures import KeptPictures
from tasks.evaluation.record import Arrays, OnProgress, Work
from tasks.evaluation.scores import (
    SPAN,
    Advance,
    Bench,
    Further,
    LoadRestorer,
    describe_span,
    experiment_of,
    find_span,
    projection_on,
)
from tasks.evaluation.settings import (
    BASELINES,
    CONTROL,
    ORACLE,
    PROJECTED,
    Baseline,
    Evaluation,
    check_names,
)
from tasks.evaluation.sweep import VictimScores
from tasks.evaluation.victims import Victim, attacks_per_victim, find_victims
from tasks.restoring.restore import OpenRestorer, open_restorer
from tasks.training.train import load_restorer

__all__ = ["BASELINES", "Baseline", "Evaluation", "evaluate", "read_excluded"]

EXCLUDED_FILE = "heldout-excluded.json"
"""Beside the evaluation's folder: held-out images that were left out as near copies."""


def evaluate(
    config: Evaluation,
    *,
    dataset: Dataset,
    heldout: ImageSet,
    restorers: Mapping[str, Path],
    out: Path,
    device: str,
    on_progress: OnProgress = lambda _done, _total, _message, _share: None,
    load: LoadRestorer | None = None,
    excluded: Mapping[str, Any] | None = None,
    further: Mapping[str, Dataset] | None = None,
) -> dict[str, Any]:
    """Score every victim of `dataset` and return what is written to `out/evaluation.json`.

    `dataset` was generated from `heldout` with every candidate kept. `restorers` maps the names
    that methods get to the files of trained restorers; `load` reads one. `excluded` says which
    images of the source were left out of `heldout` (`read_excluded`); it is only shown. `further`:
    by kind, the stores of other attacks on the same victims. Finished work with the same inputs is
    returned, unfinished work is continued. `on_progress(done, total, message, share)` counts
    hundredths of a step; `share` is of the time.

    Raises ValueError where the store has no run or was made from other images than `heldout`, too
    few images are left for decoys, a further attack has other victims, the span is asked for of
    victims that have none, a restorer's name cannot be a method's, or an external restorer is not
    there or works at another size; StorageError if one cannot be read.
    """
    check_names(restorers, taken=config.external)
    opened = open_elsewhere(config, heldout, device)
    digests = {name: restorer.fingerprint for name, restorer in opened.items()}
    digests |= {name: record.weights_digest(path) for name, path in restorers.items()}
    n_attacks = attacks_per_victim(dataset)
    inputs = [dataset.content_hash, heldout.content_hash, n_attacks]
    others = {kind: store.content_hash for kind, store in (further or {}).items()}
    own = [record.VERSION, CLIPPED, asdict(config), inputs, digests, excluded]
    fingerprint = record.fingerprint_of(*own, *([others] if others else []))
    finished = record.read_finished(out, fingerprint)
    if finished is not None:
        return finished
    victims = find_victims(dataset, heldout, decoy_seed=config.decoy_seed)
    attacks = find_further(config, dataset, heldout, victims, further or {})
    bench = Bench(
        config, dataset, heldout, restorers, device, load or load_restorer, digests, attacks
    )
    bench.loaded.update({name: (r.restorer, r.net) for name, r in opened.items()})
    experiment = experiment_of(dataset) if config.span else None
    every = ["plain_all"] if config.restore_iterations != "all" else []
    steps = ["plain", *attacks, *every, *digests]
    work = Work(
        folder=out / "cache",
        key=[record.CACHE_VERSION, inputs, config.decoy_seed],
        jobs=dict.fromkeys(steps, sum(len(victim.runs) for victim in victims))
        | dict.fromkeys(("vote", CONTROL, "criteria"), len(victims))
        | ({ORACLE: len(victims)} if config.span else {})
        | {"nothing": 1},
        on_progress=on_progress,
    )
    scores = [_score_victim(bench, victim, steps, experiment, work) for victim in victims]
    unlike = [name for name in digests if name not in config.baselines]
    nothing = work.do(
        "nothing",
        "nothing",
        [config.restore_iterations, config.n_samples, digests, unlike],
        lambda _advance: pictures.restore_unlike(bench, scores, unlike),
    )["nothing"]
    on_progress(100 * work.n_jobs, 100 * work.n_jobs, "writing", 1.0)
    body = {
        "schema": record.SCHEMA,
        "version": record.VERSION,
        "fingerprint": fingerprint,
        "settings": asdict(config),
        "conventions": record.CONVENTIONS,
        "source": record.describe_source(heldout),
        "dataset": record.describe_dataset(dataset, victims, n_attacks),
        **record.describe_rows(victims, heldout),
        **_scored(config, scores, n_attacks, attacks),
        "attacks": describe_attacks(dataset, attacks),
        "nothing": sweep.describe_unlike(nothing, scores),
        "excluded": None if excluded is None else dict(excluded),
        "restorers": digests,
        "seconds": {step: round(spent, 3) for step, spent in work.seconds.items()},
    }
    step_of = {}
    for name in body["methods"]:
        step = name.removesuffix(PROJECTED)
        is_step = step in (*steps, *pictures.OF_VICTIMS)
        step_of[name] = step if is_step else step.rpartition("_x")[0]
    kept = KeptPictures(work.folder, victims, step_of)
    shown = {f"nothing/{name}": made for name, made in nothing.items()}
    pictures.write_pictures(out / "pictures.npz", body, kept, heldout, shown)
    write_json(out / "evaluation.json", body)
    written: dict[str, Any] = json.loads((out / "evaluation.json").read_bytes())
    return written


def read_excluded(out: Path) -> dict[str, Any] | None:
    """Content of `heldout-excluded.json` beside the evaluation's folder `out`; None without one.

    Raises ValueError if it is something else.
    """
    path = out.parent / EXCLUDED_FILE
    if not path.exists():
        return None
    fix = "make it again, or remove it"
    with understood(path, fix):
        found = read_document(path, fix)
        rows = [dict(row) for row in found["rows"]]
        return {"threshold": float(found["threshold"]), "n": len(rows), "rows": rows}


def open_elsewhere(config: Evaluation, heldout: ImageSet, device: str) -> dict[str, OpenRestorer]:
    """The restorers that were not trained here, classical ones first. Raises ValueError if there is
    none of that name or it does not take the held-out images, StorageError if its file cannot be
    read."""
    opened = {str(name): open_restorer(name) for name in config.baselines}
    where: Device = "cuda" if device.startswith("cuda") else "cpu"
    for name, path in config.external.items():
        opened[name] = open_restorer(path, device=where)
        wrong = opened[name].why_not(*heldout.images.shape[2:])
        if wrong is not None:
            raise ValueError(f"external.{name}: every picture of {heldout.name!r} {wrong}")
    return opened


def find_further(
    config: Evaluation,
    dataset: Dataset,
    heldout: ImageSet,
    victims: Sequence[Victim],
    stores: Mapping[str, Dataset],
) -> dict[str, Further]:
    """By method, the stores of other attacks (by kind) on `victims`, which are those of `dataset`,
    and their runs by number.

    Each victim's images and margins are compared: no other weights have the same margins. Raises
    ValueError as `find_victims`, or if a store's victims are others.
    """
    found: dict[str, Further] = {}
    for kind, store in stores.items():
        others = find_victims(store, heldout, decoy_seed=config.decoy_seed)
        by_number = {other.number: other for other in others}
        for victim in victims:
            other = by_number.get(victim.number)
            if other is None or not (
                [run.number for run in victim.runs] == [run.number for run in other.runs]
                and np.array_equal(victim.image_ids, other.image_ids)
                and np.array_equal(victim.targets, other.targets)
                and np.array_equal(victim.decoy_ids, other.decoy_ids)
                and np.array_equal(victim.margins, other.margins, equal_nan=True)
            ):
                raise ValueError(
                    f"victim {victim.number} of {store.root} is not that of {dataset.root}: they "
                    "were trained by other code or on another device; remove both and evaluate "
                    "again"
                )
        found[f"plain_{kind}"] = store, {run.number: run for v in others for run in v.runs}
    return found


def describe_attacks(dataset: Dataset, further: Mapping[str, Further]) -> list[dict[str, Any]]:
    """The record's `attacks`: `plain` first; empty if it is the only one. `seconds` are known where
    victims were kept, so that their training is not in the seconds of parts."""
    if not further:
        return []
    stores = {"plain": dataset} | {method: store for method, (store, _runs) in further.items()}
    kept = {
        method: isinstance(store.place, LocalPlace) and (Path(store.root) / VICTIMS).is_dir()
        for method, store in stores.items()
    }
    described = []
    for method, store in stores.items():
        settings = store.manifest["campaign"]["experiment"].get("attack", {})
        n_candidates = 0  # different ones, however often each was saved
        for receipt in store.receipts:
            read = store.read(receipt.part, ["pairs/run_row", "pairs/candidate"])
            n_candidates += len(np.unique(np.stack(list(read.values())), axis=1).T)
        seconds = round(sum(receipt.seconds for receipt in store.receipts), 3)
        known = kept["plain"] if method == "plain" else any(kept.values())
        described.append(
            {
                "method": method,
                "kind": method.removeprefix("plain_") if method in further else settings["kind"],
                "settings": settings,
                "content_hash": store.content_hash,
                "n_runs": store.n_runs,
                "n_candidates": n_candidates,
                "seconds": seconds if known else None,
            }
        )
    return described


def _score_victim(
    bench: Bench, victim: Victim, steps: Sequence[str], spans_of: KKT | None, work: Work
) -> VictimScores:
    """All attacks on one victim after every step, and what takes all of them together. `spans_of`:
    the settings of victims whose span is asked for."""
    config = bench.config
    half_of = sweep.split_in_halves(victim, seed=config.decoy_seed)
    scores = VictimScores(victim, half_of, config.good_threshold)

    def of_all(
        step: str, settings: Sequence[Any], compute: Callable[[Advance], dict[str, Arrays]]
    ) -> dict[str, Arrays]:
        return work.do(pictures.victim_file(victim.number, step), step, settings, compute)

    if spans_of is not None:
        found = of_all(ORACLE, [SPAN], lambda _advance: find_span(bench, spans_of, victim))
        scores.oracle, scores.n_directions = found[ORACLE], len(found[SPAN]["directions"])
        bench = replace(bench, project=projection_on(found[SPAN]))
    for run in victim.runs:
        for step in steps:
            name, compute = pictures.run_file(run.number, step), partial(bench.score, victim, run)
            results = work.do(name, step, bench.settings_of(step), partial(compute, step))
            scores.take(run, results)
    members = [run.number for run in victim.runs]
    settings = [config.restore_iterations, config.vote_ratio, "nearest", members]
    scores.vote = of_all("vote", settings, partial(sweep.vote_of_runs, bench, victim))["vote"]
    scores.control = of_all(CONTROL, [], lambda _advance: sweep.control_of(bench, victim))[CONTROL]
    made = of_all("criteria", [members], lambda _advance: sweep.criteria_of_runs(bench, victim))
    scores.criteria = made["runs"]
    return scores


def _scored(
    config: Evaluation,
    scores: Sequence[VictimScores],
    n_attacks: int,
    attacks: Iterable[str],
) -> dict[str, Any]:
    """The part of the record that is computed from scores."""
    last_attack = "plain" if config.restore_iterations == "all" else "plain_all"
    parts: dict[str, list[Arrays]] = {}
    for of_victim in scores:
        for method, arrays in of_victim.methods().items():
            parts.setdefault(method, []).append(arrays)
            if method == last_attack:
                parts.setdefault("vote", []).append(of_victim.vote)
                parts.setdefault(CONTROL, []).append(of_victim.control)
        if config.span:
            parts.setdefault(ORACLE, []).append(of_victim.oracle)
    arrays_of = record.joined(parts, [of_victim.victim for of_victim in scores])
    kinds: dict[str, str] = {
        **dict.fromkeys(("plain", "plain_all"), "attack"),
        **{"vote": "vote", CONTROL: "control", ORACLE: ORACLE},
        **{name: PROJECTED[1:] for name in arrays_of if name.endswith(PROJECTED)},
        **dict.fromkeys(config.baselines, "classical"),
        **dict.fromkeys(config.external, "external"),
        **dict.fromkeys(attacks, "further"),
    }
    methods = {
        name: record.describe_method(
            arrays,
            arrays_of["plain"],
            kind=kinds.get(name, "trained"),
            threshold=config.good_threshold,
            is_sweep=n_attacks > 1,
        )
        for name, arrays in arrays_of.items()
    }
    runs = sweep.describe_runs(scores)
    of_rows = [s.victim.number for s in scores for _row in range(len(s.victim))]
    grid, appendix = pictures.choose_rows(
        methods, grid_rows=config.grid_rows, appendix_rows=config.appendix_rows
    )
    spans = {SPAN: describe_span(methods, [s.n_directions for s in scores])} if config.span else {}
    return {
        "methods": methods,
        **spans,
        "runs": runs,
        "ranking": sweep.describe_ranking(runs) if n_attacks > 1 else None,
        "hallucination": sweep.describe_hallucination(methods, of_rows),
        "grid": grid,
        "appendix": appendix,
        "examples": pictures.choose_examples(methods),
        "side_by_side": pictures.choose_side_by_side(methods, [s.victim for s in scores], attacks),
    }
