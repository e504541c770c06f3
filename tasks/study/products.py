"""Products of a study's units, each made once and stored under its key; the order in which a study
draws images; and the timing behind its estimated costs.

ROOT/NAME/KEY.*   arrays and facts of a unit; NAME is "products" by default

A key is the sha256 of settings and images, not of the code or the machine: a new release keeps the
products of an older one, even if it would compute others. `--fresh` makes them again.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load, save
from torch import Tensor

from recon_core.types import Progress, no_progress
from storage.checkpoints import load_checkpoint, save_checkpoint
from storage.errors import CorruptPartError
from storage.files import full_device_explained, write_file
from storage.weights import METADATA

SETTINGS = "settings.json"

Arrays = dict[str, npt.NDArray[Any]]
Pixels = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]
NOTHING: Arrays = {"nothing": np.zeros(0, np.float32)}
"""Arrays of a product that consists of facts alone."""


@dataclass(frozen=True)
class Folder:
    """A study's products by key."""

    root: Path
    name: ClassVar[str] = "products"

    @property
    def place(self) -> Path:
        return self.root / self.name

    def product(self, key: str) -> tuple[Arrays, dict[str, Any]] | None:
        """Arrays of a unit and its facts; None if missing or corrupt."""
        found = loaded(self.place, key[:32])
        return None if found is None or found[1].get("key") != key else found

    def has(self, key: str) -> bool:
        """True if a product is stored under this key; it is not read."""
        return (self.place / f"{key[:32]}.json").exists()

    def put(self, key: str, arrays: Arrays, about: Mapping[str, Any]) -> None:
        """Store a product. Raises StoreFullError."""
        save_checkpoint(self.place, key[:32], arrays, {"key": key, **about})


@dataclass(frozen=True, kw_only=True)
class Job(ABC):
    """A product that is made once and stored in the study at `root` under the job's key."""

    root: str
    device: str

    @property
    def folder(self) -> Folder:
        return Folder(Path(self.root))

    @property
    @abstractmethod
    def key(self) -> str:
        """sha256 of everything that the product depends on."""

    @abstractmethod
    def make(self, progress: Progress) -> tuple[Arrays, dict[str, Any]]:
        """Make the product: arrays and facts."""

    def run(self, progress: Progress = no_progress) -> dict[str, Any]:
        """Return the product's facts; make it first unless it is stored. Raises StoreFullError."""
        if (found := self.folder.product(self.key)) is not None:
            return found[1]
        arrays, facts = self.make(progress)
        self.folder.put(self.key, arrays, facts)
        return facts


def write_weights(path: Path, weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """Save one network, with `about` as JSON in the file's metadata; return the file's sha256.

    Raises StoreFullError.
    """
    # numpy's ascontiguousarray would turn (), the shape of a PReLU's slope, into (1,)
    arrays = {name: t[0].cpu().contiguous().numpy() for name, t in weights.items()}
    # a single entry: safetensors writes several in no fixed order, and the file is hashed
    content = save(arrays, metadata={METADATA: json.dumps(dict(about))})
    with full_device_explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, content)
    return sha256(content)


def read_weights(path: Path) -> Arrays:
    """The tensors of one network that `write_weights` saved."""
    return dict(load(path.read_bytes()))


def key_of(body: Any) -> str:
    """sha256 of a JSON value."""
    return sha256(json.dumps(body, sort_keys=True).encode())


def hash_of(*arrays: npt.NDArray[Any]) -> str:
    """sha256 of arrays and their shapes."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(repr((array.shape, str(array.dtype))).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def npz_of(arrays: Arrays) -> bytes:
    """The arrays as a compressed .npz file."""
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    return content.getvalue()


def loaded(folder: Path, name: str) -> tuple[Arrays, dict[str, Any]] | None:
    """A checkpoint; None if missing or corrupt."""
    try:
        return load_checkpoint(folder, name)
    except CorruptPartError:  # made again, like a missing one
        return None


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def balanced_order(labels: npt.NDArray[np.int64], *, root_seed: int) -> Ids:
    """All rows in a seeded order, the k-th of each class before any class's (k + 1)-th."""
    rng = np.random.default_rng(np.random.SeedSequence((root_seed, 3)))
    members = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    rng.shuffle(members)
    longest = max(len(rows) for rows in members)
    by_turn = [rows[k] for k in range(longest) for rows in members if k < len(rows)]
    return np.array(by_turn, np.int64)


def content_of(image: Pixels) -> bytes:
    """sha256 of an image's pixels, the same for its copies."""
    return hashlib.sha256(image.tobytes()).digest()


TIMED_S = 0.2
"""Least seconds of a training or an attack that are timed."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Estimated cost of a part of a study: counts and seconds of work by title, memory of a worker
    (None: unknown) and space in the store."""

    name: str
    counts: dict[str, int]
    seconds_of: dict[str, float]
    disk_bytes: int
    memory_bytes: int | None = None

    @property
    def seconds(self) -> float:
        return sum(self.seconds_of.values())


def seconds_of(work: Callable[[], object], *, times: int = 1) -> float:
    """Time some work on this machine or its GPU: the fastest of several `times`."""
    spent = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - started)
    return min(spent)


def in_full(work: Callable[[int], object], n: int) -> float:
    """Estimate the seconds of n steps of some work by a line through two shorter runs."""
    work(1)  # warm up
    n_few = n_more = min(n, 2)
    few_s = more_s = seconds_of(partial(work, n_few))
    while n_more < n and more_s - few_s < TIMED_S:
        n_more = min(n, 4 * n_more)
        more_s = seconds_of(partial(work, n_more))
    step_s = max(0.0, more_s - few_s) / max(1, n_more - n_few)
    return more_s + (n - n_more) * step_s
