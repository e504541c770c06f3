"""Numbers of a store: from its receipts alone, or from one pass over three columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.documents import seal_of
from storage.pairs.dataset import Dataset
from storage.pairs.layout import OUTCOMES, OnPart, mixed
from storage.pairs.receipts import Receipt

_THREADS = 4
_MEASURED = ("pairs/iteration", "pairs/ssim_best", "pairs/confident")


@dataclass(frozen=True, kw_only=True)
class SavedIteration:
    """The pairs that were saved at one iteration of the attacks; mean SSIM with their target, or
    None."""

    iteration: int
    n_pairs: int
    n_confident: int
    ssim: float | None
    ssim_confident: float | None


def attacks_of(dataset: Dataset, by_kind: Collection[str] = ()) -> dict[str, int]:
    """Number of parts of a store by family, or, of the families `by_kind`, by kind of attack. Told
    by the manifest of their fingerprint: "unknown" where that cannot be. Empty for a store that
    does not say."""

    def attack_of(manifest: Mapping[str, Any]) -> str | None:
        experiment = manifest.get("campaign", {}).get("experiment", {})
        family: str | None = experiment.get("family")
        return str(experiment["attack"]["kind"]) if family in by_kind else family

    names = {seal_of(one): attack_of(one) for one in mixed(dataset.manifest)}
    if None in names.values():
        return {}
    otherwise = next(iter(names.values())) if len(names) == 1 else "unknown"
    return dict(Counter(str(names.get(r.fingerprint, otherwise)) for r in dataset.receipts))


def summarise(dataset: Dataset) -> tuple[dict[str, Any], npt.NDArray[np.int64]]:
    """Facts of a store from its receipts alone, by name, and the confident pairs of every image
    that a run was trained on (0: it never came back)."""
    receipts, confident = dataset.receipts, dataset.image_counts()[1]
    outcomes = {name: sum(r.outcomes.get(name, 0) for r in receipts) for name in OUTCOMES}
    n_bytes = sum(size for r in receipts for size, _checksum in r.files.values())
    facts = {
        "parts": len(receipts),
        "runs": dataset.n_runs,
        "outcomes": {name: n for name, n in outcomes.items() if n},
        "targets": dataset.n_targets,
        "pairs": dataset.n_pairs,
        "confident_pairs": int(confident.sum()),
        "images_trained_on": len(confident),
        "images_with_a_confident_pair": int((confident > 0).sum()),
        "encoding": dataset.encoding,
        "bytes": n_bytes,
        "bytes_per_pair": round(n_bytes / max(1, dataset.n_pairs), 1),
        "worker_seconds": round(sum(r.seconds for r in receipts), 1),
        "code": sorted({r.code_version for r in receipts}),
        "torch": sorted({r.torch_version for r in receipts}),
        "devices": sorted({r.device for r in receipts}),
        "dataset_hash": dataset.content_hash,
    }
    return facts, confident


def saved_iterations(
    dataset: Dataset, *, on_part: OnPart = lambda _done, _n: None
) -> tuple[SavedIteration, ...]:
    """Pairs and mean SSIM per saved iteration, ascending; one pass over three columns of pairs.
    Raises CorruptPartError where the stored bytes are not what was written."""
    totals: dict[int, npt.NDArray[np.float64]] = {}
    receipts = dataset.receipts

    def sums_of(receipt: Receipt) -> dict[int, npt.NDArray[np.float64]]:
        columns = dataset.read(receipt.part, _MEASURED)
        iteration, position = np.unique(columns["pairs/iteration"], return_inverse=True)
        ssim = columns["pairs/ssim_best"].astype(np.float64)
        confident = columns["pairs/confident"].astype(np.float64)
        weights = (np.ones_like(ssim), confident, ssim, ssim * confident)
        sums = [np.bincount(position, one, len(iteration)) for one in weights]
        return dict(zip(iteration.tolist(), np.stack(sums, axis=1), strict=True))

    on_part(0, len(receipts))
    with ThreadPoolExecutor(_THREADS) as pool:
        for done, of_part in enumerate(pool.map(sums_of, receipts), start=1):
            for iteration, row in of_part.items():
                totals[iteration] = totals.get(iteration, np.zeros(4)) + row
            on_part(done, len(receipts))
    return tuple(
        SavedIteration(
            iteration=iteration,
            n_pairs=int(n),
            n_confident=int(n_confident),
            ssim=ssim / n if n else None,
            ssim_confident=ssim_confident / n_confident if n_confident else None,
        )
        for iteration, (n, n_confident, ssim, ssim_confident) in sorted(
            (iteration, row.tolist()) for iteration, row in totals.items()
        )
    )
