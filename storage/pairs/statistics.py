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
class Summary:
    """Sums over the receipts of a store. `outcomes` maps the name of an outcome to its number of
    runs, `confident_per_image` are the confident pairs of every image that a run was trained on (0:
    it never came back), `n_bytes` is the size of all data files."""

    n_parts: int
    n_runs: int
    n_targets: int
    n_pairs: int
    outcomes: dict[str, int]
    confident_per_image: npt.NDArray[np.int64]
    encoding: str
    n_bytes: int
    worker_seconds: float
    code_versions: tuple[str, ...]
    torch_versions: tuple[str, ...]
    devices: tuple[str, ...]
    content_hash: str

    @property
    def n_confident(self) -> int:
        return int(self.confident_per_image.sum())

    @property
    def n_images(self) -> int:
        return len(self.confident_per_image)

    @property
    def n_covered(self) -> int:
        return int((self.confident_per_image > 0).sum())

    @property
    def bytes_per_pair(self) -> float:
        return self.n_bytes / self.n_pairs if self.n_pairs else 0.0


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


def summarise(dataset: Dataset) -> Summary:
    """Numbers of the receipts; reads no data."""
    receipts = dataset.receipts
    return Summary(
        n_parts=len(receipts),
        n_runs=dataset.n_runs,
        n_targets=dataset.n_targets,
        n_pairs=dataset.n_pairs,
        outcomes={name: sum(r.outcomes.get(name, 0) for r in receipts) for name in OUTCOMES},
        confident_per_image=dataset.image_counts()[1],
        encoding=dataset.encoding,
        n_bytes=sum(size for r in receipts for size, _checksum in r.files.values()),
        worker_seconds=sum(r.seconds for r in receipts),
        code_versions=tuple(sorted({r.code_version for r in receipts})),
        torch_versions=tuple(sorted({r.torch_version for r in receipts})),
        devices=tuple(sorted({r.device for r in receipts})),
        content_hash=dataset.content_hash,
    )


def saved_iterations(
    dataset: Dataset, *, on_part: OnPart = lambda _done, _n: None
) -> tuple[SavedIteration, ...]:
    """Pairs and mean SSIM per saved iteration, ascending; one pass over three columns of pairs.
    Raises CorruptPartError where the stored bytes are not what was written."""
    totals: dict[int, npt.NDArray[np.float64]] = {}
    receipts = dataset.receipts
    on_part(0, len(receipts))
    with ThreadPoolExecutor(_THREADS) as pool:
        sums = pool.map(lambda receipt: _sums(dataset, receipt), receipts)
        for done, of_part in enumerate(sums, start=1):
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
        for iteration, (n, n_confident, ssim, ssim_confident) in (
            (iteration, totals[iteration].tolist()) for iteration in sorted(totals)
        )
    )


def _sums(dataset: Dataset, receipt: Receipt) -> dict[int, npt.NDArray[np.float64]]:
    columns = dataset.read(receipt.part, _MEASURED)
    iteration, position = np.unique(columns["pairs/iteration"], return_inverse=True)
    ssim = columns["pairs/ssim_best"].astype(np.float64)
    confident = columns["pairs/confident"].astype(np.float64)
    sums = np.stack(
        [
            np.bincount(position, weights, len(iteration))
            for weights in (np.ones_like(ssim), confident, ssim, ssim * confident)
        ],
        axis=1,
    )
    return dict(zip(iteration.tolist(), sums, strict=True))
