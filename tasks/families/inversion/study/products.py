"""Where a study of split classifiers keeps what its units make: each product once, under its key.

ROOT/settings.json                 the study's settings
ROOT/products/KEY.*                what a unit gave: victims' weights, recovered images, restorers
ROOT/victims/NAME.safetensors      networks that the page shows more of, architecture inside
ROOT/inversion.json, inversion-pictures.npz, inversion.html, inversion-data/

A key is a sha256 of settings and images, not of the code or the machine: a release that computes
otherwise does not make products of an older one again. `--fresh` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.checkpoints import save_checkpoint
from tasks.campaign.state import CONTROL_FILE
from tasks.study.products import Arrays, loaded

SETTINGS = "settings.json"
RECORD = "inversion.json"
PICTURES = "inversion-pictures.npz"
PAGE = "inversion.html"
ENTRIES = frozenset(
    {SETTINGS, RECORD, PICTURES, PAGE, "inversion-data", "products", "victims", CONTROL_FILE}
)
"""All that a study makes in its folder."""


@dataclass(frozen=True)
class Folder:
    """A study's products by key."""

    root: Path

    def product(self, key: str) -> tuple[Arrays, dict[str, Any]] | None:
        """What a unit gave; None if it is not there, or not as it was written."""
        found = loaded(self.root / "products", key[:32])
        return None if found is None or found[1].get("key") != key else found

    def made(
        self, key: str, make: Callable[[], tuple[Arrays, Mapping[str, Any]]]
    ) -> dict[str, Any]:
        """What is known of a product, which `make` makes if it is not there. Raises
        StoreFullError."""
        if (found := self.product(key)) is not None:
            return found[1]
        arrays, about = make()
        self.put(key, arrays, about)
        return dict(about)

    def put(self, key: str, arrays: Arrays, about: Mapping[str, Any]) -> None:
        """Keeps a product. Raises StoreFullError."""
        save_checkpoint(self.root / "products", key[:32], arrays, {"key": key, **about})
