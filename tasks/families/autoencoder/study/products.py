"""Products of a study of recovery, besides those of `tasks.study.products`.

ROOT/victims/NAME-LEVEL.safetensors   weights where a victim passed a loss; architecture inside
ROOT/victims/NAME/                what became of its training, and its state while it trains
ROOT/inpainter/KEY/               the generic inpainter, a folder per set of images
ROOT/cells/KEY.json               what methods gave for one victim at one loss
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from tasks.families.autoencoder.study.settings import level_name
from tasks.study.products import Folder, loaded, sha256

TRAINED, STATE = "trained", "state"


class VictimFolder(Folder):
    """The paths of a study, and its products by key."""

    name: ClassVar[str] = "cells"

    def victim(self, name: str) -> Path:
        return self.root / "victims" / name

    def weights(self, name: str, level: float | None) -> Path:
        """Weights of a victim at a loss; None: where its training ended."""
        which = "last" if level is None else level_name(level)
        return self.root / "victims" / f"{name}-{which}.safetensors"

    def inpainter(self, key: str) -> Path:
        return self.root / "inpainter" / key[:16]

    def trained(self, name: str, key: str) -> dict[str, Any] | None:
        """Outcome of a victim's training; None unless it ended with this key and its weights
        are still as they were written."""
        found = loaded(self.victim(name), TRAINED)
        if found is None or found[1].get("key") != key:
            return None
        meta = found[1]
        for level in meta["levels"]:
            path = self.weights(name, level["level"])
            if not path.is_file() or sha256(path.read_bytes()) != level["sha256"]:
                return None
        return meta
