"""Further attacks on the victims of an evaluation, which are the same to the last weight: each is
one method more, scored as `plain` is. One victim is shown whole, the attacks side by side."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from storage.object_store import LocalPlace
from storage.pairs.dataset import Dataset
from tasks.campaign.victim_files import VICTIMS
from tasks.evaluation.record import SIDES, Arrays
from tasks.evaluation.scores import Advance, Bench
from tasks.evaluation.victims import EvaluatedRun, Victim, find_victims
from tasks.report.record import best_trained

N_SHOWN = {"targets": 20, "decoys": 5}
"""Images of the victim that is shown with every attack."""


@dataclass(frozen=True)
class FurtherAttack:
    """Another attack on the victims: `bench` has its store, `runs` its runs by number."""

    method: str
    bench: Bench
    runs: Mapping[int, EvaluatedRun]

    @property
    def settings(self) -> tuple[Any, ...]:
        """Settings that its scores depend on, beside the victims."""
        config = self.bench.config
        return (self.bench.dataset.content_hash, config.restore_iterations)

    def score(self, victim: Victim, run: EvaluatedRun, advance: Advance) -> dict[str, Arrays]:
        """The best match of each row among the pictures of its own run of this number."""
        found = self.bench.score(victim, self.runs[run.number], "plain", advance)
        return {self.method: found["plain"]}


def find_further(
    bench: Bench, victims: Sequence[Victim], stores: Mapping[str, Dataset]
) -> dict[str, FurtherAttack]:
    """By method, the attacks of `stores` (by kind) on `victims`, which are those of
    `bench.dataset`, scored at the last saved iteration, or at all if `plain` is. Raises ValueError
    as `find_victims`, or if a store's victims are others."""
    config = bench.config
    if config.restore_iterations != "all":
        config = replace(config, restore_iterations="last")
    found = {}
    for kind, store in stores.items():
        own = replace(bench, config=config, dataset=store)
        method = f"plain_{kind}"
        found[method] = FurtherAttack(method, own, _runs_on(victims, bench.dataset, own))
    return found


def _runs_on(victims: Sequence[Victim], store: Dataset, bench: Bench) -> dict[int, EvaluatedRun]:
    """By number, the runs of `bench.dataset`, after a look at each victim's images and margins,
    which no other weights have; `victims` are those of `store`."""
    others = find_victims(bench.dataset, bench.heldout, decoy_seed=bench.config.decoy_seed)
    by_number = {other.number: other for other in others}
    for victim in victims:
        other = by_number.get(victim.number)
        if other is None or not _is_same(victim, other):
            raise ValueError(
                f"victim {victim.number} of {bench.dataset.root} is not that of {store.root}: they "
                "were trained by other code or on another device; remove both and evaluate again"
            )
    return {run.number: run for other in others for run in other.runs}


def _is_same(one: Victim, other: Victim) -> bool:
    numbers = [run.number for run in one.runs] == [run.number for run in other.runs]
    images = all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("image_ids", "targets", "decoy_ids")
    )
    return numbers and images and np.array_equal(one.margins, other.margins, equal_nan=True)


def describe_attacks(
    dataset: Dataset, further: Mapping[str, FurtherAttack]
) -> list[dict[str, Any]]:
    """The record's `attacks`: `plain` first; empty if it is the only one."""
    if not further:
        return []
    stores = {"plain": dataset} | {name: attack.bench.dataset for name, attack in further.items()}
    knows_own = _has_victims(dataset)
    knows_others = any(map(_has_victims, stores.values()))
    return [
        {
            "method": method,
            "kind": method.removeprefix("plain_") if method in further else settings["kind"],
            "settings": settings,
            "content_hash": store.content_hash,
            "n_runs": store.n_runs,
            "n_candidates": _count_candidates(store),
            "seconds": round(sum(receipt.seconds for receipt in store.receipts), 3)
            if (knows_own if method == "plain" else knows_others)
            else None,
        }
        for method, store in stores.items()
        for settings in (_attack_of(store),)
    ]


def _attack_of(store: Dataset) -> dict[str, Any]:
    manifest = store.manifest
    return dict(manifest.get("campaign", manifest).get("experiment", {}).get("attack", {}))


def _count_candidates(store: Dataset) -> int:
    """Different candidates of all runs, however often each was saved."""
    count = 0
    for receipt in store.receipts:
        read = store.read(receipt.part, ["pairs/run_row", "pairs/candidate"])
        count += len(np.unique(np.stack(list(read.values())), axis=1).T)
    return count


def _has_victims(store: Dataset) -> bool:
    """Whether victims were kept there, whose training is then not in the seconds of its parts."""
    return isinstance(store.place, LocalPlace) and (Path(store.root) / VICTIMS).is_dir()


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
        best = functools.reduce(np.maximum, scores)
        ranked = np.argsort(-best, kind="stable")
        n = min(N_SHOWN[side], n_rows)
        spread = np.linspace(0, n_rows - 1, n).round().astype(np.int64)
        chosen[side] = (ranked[spread] if side == "targets" else ranked[:n]).tolist()
    return chosen
