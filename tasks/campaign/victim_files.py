"""The victims of a sweep, kept where all parts find them: a cache, which may be removed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from storage.checkpoints import load_checkpoint, save_checkpoint
from storage.errors import CorruptPartError, StoreFullError
from storage.pairs.receipts import Receipt
from tasks.campaign.plan import code_version

VICTIMS = "victims"
"""Beside a store's parts: the victims of a sweep, or of several attacks, which may be removed."""


@dataclass(frozen=True)
class VictimFiles:
    """A `recon_core.types.Victims` in a folder; `key` says what its victims were trained from."""

    folder: Path
    key: str

    def get(self, victim: int) -> Mapping[str, torch.Tensor] | None:
        """The tensors of a victim; None if it is not there, or not whole, or of another key."""
        try:
            found = load_checkpoint(self.folder, f"victim_{victim:08d}")
        except (CorruptPartError, OSError):
            return None
        if found is None or found[1].get("key") != self.key:
            return None
        return {name: torch.from_numpy(array.copy()) for name, array in found[0].items()}

    def put(self, victim: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keeps a victim, if the folder can be written."""
        arrays = {name: np.asarray(tensor.numpy()) for name, tensor in tensors.items()}
        with contextlib.suppress(StoreFullError, OSError):
            save_checkpoint(self.folder, f"victim_{victim:08d}", arrays, {"key": self.key})


def version_key(fingerprint: str, code: str, torch_version: str, device: str) -> str:
    """Origin of a trained victim: settings, code, torch, kind of device."""
    return f"{fingerprint} {code} {torch_version} {device}"


@dataclass(frozen=True)
class VictimsOfStore:
    """The victims that a store's parts were made with, whatever made them; read only: trained again
    by other code or on another device, one would be another. `receipts` by victim."""

    folder: Path
    fingerprint: str
    receipts: Mapping[int, Receipt]

    def get(self, victim: int) -> Mapping[str, torch.Tensor] | None:
        """The tensors of a victim; None if it is not kept."""
        made = self.receipts.get(victim)
        if made is None:
            return None
        key = version_key(self.fingerprint, made.code_version, made.torch_version, made.device)
        return VictimFiles(self.folder, key).get(victim)

    def put(self, victim: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keeps nothing."""


def kept_victims(victims: tuple[str, str] | None, device: str) -> VictimFiles | None:
    """Those of a (folder, fingerprint), of this code on this kind of device; None of None."""
    if victims is None:
        return None
    folder, fingerprint = victims
    key = version_key(fingerprint, code_version(), torch.__version__, device)
    return VictimFiles(Path(folder), key)
