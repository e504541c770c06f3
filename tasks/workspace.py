"""Places of the products of a job: one folder, one place per stage.

ROOT/recipe.json      the settings everything below was made with
ROOT/pairs/           store of pairs that restorers learn from (or elsewhere, see `pairs_at`)
ROOT/heldout/         store of pairs of the victims that are evaluated (likewise)
ROOT/heldout-KIND/    the same of each further attack on these victims (likewise)
ROOT/heldout-excluded.json  images that are no victim's, being near copies of training images
ROOT/curation.json    how often each image's pairs are shown to a restorer
ROOT/restorers/NAME/  checkpoints and the finished weights
ROOT/evaluation/      evaluation.json, pictures.npz, and report.html, the page made from them
ROOT/timings.json     seconds of work per stage, summed over interrupted attempts
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.documents import read_document, understood
from storage.errors import DocumentError
from storage.files import write_json
from storage.object_store import Location

RECIPE_FIX = "restore it, or name the settings with --preset"


@dataclass(frozen=True)
class Workspace:
    """The paths of a job below `root`; the stores of pairs are at `pairs_at`, a folder or
    s3://bucket/prefix, if that is given."""

    root: Path
    pairs_at: str | None = None

    @classmethod
    def found(cls, root: Path) -> Workspace:
        """The workspace of the job that was started at `root`, its pairs where they were put."""
        found = cls(root)
        pairs_at = (found.settings() or {}).get("pairs_at")
        if not isinstance(pairs_at, str | None):
            raise DocumentError(
                f"{found.recipe}: pairs_at is {pairs_at!r}, expected a folder or null; {RECIPE_FIX}"
            )
        return cls(root, pairs_at)

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.json"

    def settings(self) -> dict[str, Any] | None:
        """The settings in recipe.json; None without one. Raises DocumentError."""
        try:
            return read_document(self.recipe, RECIPE_FIX)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def pairs(self, split: str, further: str | None = None) -> Location:
        """The store of the victims trained on one split of the images; `further`: the kind of
        another attack on them."""
        name = {"train": "pairs", "heldout": "heldout"}[split]
        if further is not None:
            name = f"{name}-{further.replace('_', '-')}"
        if self.pairs_at is None:
            return self.root / name
        return f"{self.pairs_at.rstrip('/')}/{name}"

    @property
    def excluded(self) -> Path:
        return self.root / "heldout-excluded.json"

    @property
    def curation(self) -> Path:
        return self.root / "curation.json"

    def restorer(self, name: str) -> Path:
        return self.root / "restorers" / name

    @property
    def evaluation(self) -> Path:
        return self.root / "evaluation"

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of work per stage so far. Raises DocumentError."""
        if not self._timings.exists():
            return {}
        fix = "remove it: only the times of the report are in it"
        with understood(self._timings, fix):
            found = read_document(self._timings, fix)
            return {stage: round(float(seconds), 3) for stage, seconds in found.items()}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time spent inside to the stage's, also when it is interrupted."""
        _ = self.timings  # refused before the work, and not after it
        started = time.perf_counter()
        try:
            yield
        finally:
            if self.root.is_dir():
                seconds = self.timings.get(stage, 0.0) + time.perf_counter() - started
                write_json(self._timings, {**self.timings, stage: round(seconds, 3)})

    @property
    def _timings(self) -> Path:
        return self.root / "timings.json"
