"""A curation is written once for the same settings and pairs, and anew for any others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recon_core.balance import Curation, occurrences
from tasks.dataset import curate
from tasks.dataset.curate import curate_pairs
from tasks.workspace import Workspace
from tests.storage import stores


def test_a_curation_is_made_anew_only_for_other_settings_pairs_or_a_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def counted(*given: Any) -> Any:
        made.append(given)
        return occurrences(*given)

    monkeypatch.setattr(curate, "occurrences", counted)
    workspace, paper = Workspace(tmp_path), Curation(n_subsets=3)
    stores.store(tmp_path / "pairs")
    first = curate_pairs(paper, workspace)
    assert curate_pairs(paper, workspace) == first
    assert len(made) == 1
    curate_pairs(Curation(n_subsets=4), workspace)
    assert len(made) == 2
    stores.write(tmp_path / "pairs", 3)
    more = curate_pairs(Curation(n_subsets=4), workspace)
    assert (len(made), more["n_pairs"] > first["n_pairs"]) == (3, True)
    workspace.curation.write_text("{}")
    assert curate_pairs(Curation(n_subsets=4), workspace) == more
    assert len(made) == 4
