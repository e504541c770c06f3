"""Where a study of recovery keeps what its units make: each product made once, under its key.

ROOT/settings.json                the study's settings
ROOT/victims/NAME-LEVEL.safetensors   weights where a victim passed a loss; architecture inside
ROOT/victims/NAME/                what became of its training, and its state while it trains
ROOT/inpainter/KEY/               the generic inpainter, a folder per set of images
ROOT/cells/KEY.json               what methods gave for one victim at one loss
ROOT/recovery.json, recovery-pictures.npz, recovery.html, recovery-data/

A key is a sha256 of settings and images, not of the code or the machine: a release that computes
otherwise does not make products of an older one again. `--fresh` does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save
from torch import Tensor

from storage.checkpoints import load_checkpoint, save_checkpoint
from storage.errors import CorruptPartError
from storage.files import full_device_explained, write_file
from storage.weights import METADATA
from tasks.campaign.state import CONTROL_FILE
from tasks.families.autoencoder.study.settings import level_name

SETTINGS = "settings.json"
RECORD = "recovery.json"
PICTURES = "recovery-pictures.npz"
ENTRIES = frozenset(
    {
        *(SETTINGS, RECORD, PICTURES, "recovery.html", "recovery-data"),
        *("victims", "inpainter", "cells", CONTROL_FILE),
    }
)
"""All that a study makes in its folder."""
TRAINED, STATE = "trained", "state"

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Folder:
    """The paths of a study, and its products by key."""

    root: Path

    def victim(self, name: str) -> Path:
        return self.root / "victims" / name

    def weights(self, name: str, level: float | None) -> Path:
        """Of a victim at a loss; None: where its training ended."""
        which = "last" if level is None else level_name(level)
        return self.root / "victims" / f"{name}-{which}.safetensors"

    def inpainter(self, key: str) -> Path:
        return self.root / "inpainter" / key[:16]

    def trained(self, name: str, key: str) -> dict[str, Any] | None:
        """What became of a victim's training; None unless it ended with this key and its weights
        are still as they were written."""
        found = loaded(self.victim(name), TRAINED)
        if found is None or found[1].get("key") != key:
            return None
        meta = found[1]
        for level in meta["levels"]:
            path = self.weights(name, level["level"])
            if not path.is_file() or _sha256(path.read_bytes()) != level["sha256"]:
                return None
        return meta

    def cell(self, key: str) -> tuple[Arrays, dict[str, Any]] | None:
        """What a unit of recovery gave; None if it is not there."""
        found = loaded(self.root / "cells", key[:32])
        return None if found is None or found[1].get("key") != key else found

    def put_cell(self, key: str, arrays: Arrays, meta: Mapping[str, Any]) -> None:
        """Keeps what a unit of recovery gave. Raises StoreFullError."""
        save_checkpoint(self.root / "cells", key[:32], arrays, {"key": key, **meta})


def write_weights(path: Path, weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """Saves one network, with `about` as JSON in the file's metadata; the file's sha256.

    Raises StoreFullError.
    """
    # not numpy's ascontiguousarray, which makes (1,) of (): the shape of a PReLU's slope
    arrays = {name: t[0].cpu().contiguous().numpy() for name, t in weights.items()}
    # one entry alone: safetensors writes several in no fixed order, and the file has a hash
    content = save(arrays, metadata={METADATA: json.dumps(dict(about))})
    with full_device_explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, content)
    return _sha256(content)


def read_weights(path: Path) -> Arrays:
    """The tensors of one network that `write_weights` saved."""
    return dict(load(path.read_bytes()))


def key_of(body: Any) -> str:
    """sha256 of a JSON value."""
    return _sha256(json.dumps(body, sort_keys=True).encode())


def hash_of(*arrays: npt.NDArray[Any]) -> str:
    """sha256 of arrays and their shapes."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(repr((array.shape, str(array.dtype))).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def loaded(folder: Path, name: str) -> tuple[Arrays, dict[str, Any]] | None:
    try:
        return load_checkpoint(folder, name)
    except CorruptPartError:  # it is made again, as one that is not there
        return None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
