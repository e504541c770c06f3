"""The module that users import: it does what the commands do, and leaves the same files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import palimpsest
from palimpsest import attack, audit, open_dataset, restore
from storage.errors import StorageError
from tests.tasks.audit.networks import Files, N, trained


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return trained(tmp_path_factory.mktemp("network"))


def test_an_attack_finds_images_and_restores_them(files: Files, tmp_path: Path) -> None:
    found = attack(
        files.weights,
        initial=files.initial,
        data=files.data,
        decoys=files.decoys,
        out=tmp_path / "attack",
        settings={"attack.n_images": N},
    )
    assert "Method: span" in found.sentence
    assert found.record["scores"]["images"]["n_good"] > 0.8 * N
    assert found.page is not None
    assert found.page.read_text().startswith("<!")
    shown = found._repr_html_()
    assert 'src="data:image/png;base64,' in shown
    assert "<td>" in shown
    better = restore(tmp_path / "attack", model="nlm", out=tmp_path / "restored")
    assert better.record["n_pictures"] >= N
    assert better.sheet is not None
    assert better.sheet.exists()


@pytest.mark.slow
def test_an_audit_of_a_given_network_says_what_it_leaks(files: Files, tmp_path: Path) -> None:
    found = audit(
        files.data,
        weights=files.weights,
        decoys=files.decoys,
        initial=files.initial,
        out=tmp_path / "audit",
        fail_above=["good>0.5@fpr=0.01"],
        settings={"attacks": ["span_known", "loss"]},
        n_workers=1,
    )
    assert "come back well" in found.sentence
    assert found.table[0]["defence"] == "as it is"
    assert [check["outcome"] for check in found.record["checks"]] == ["fails"]
    pictures = found.pictures["exposed/reconstruction"]
    assert pictures.dtype == np.uint8
    assert pictures.shape == (N, 3, 32, 32)
    names = {path.name for path in (tmp_path / "audit").iterdir()}
    assert {"audit.html", "audit.json", "audit-junit.xml", "model-card.md"} <= names


def test_refusals_name_what_is_missing(tmp_path: Path, files: Files) -> None:
    with pytest.raises(ValueError, match="decoys"):
        audit(files.data, weights=files.weights, out=tmp_path)
    with pytest.raises(ValueError, match="weights"):
        audit(files.data, decoys=files.decoys, out=tmp_path)
    with pytest.raises(StorageError):
        open_dataset(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


def test_importing_it_loads_nothing_heavy() -> None:
    text = "import sys, palimpsest; print(sorted({'torch', 'prefect', 'zarr'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    assert {name for name in palimpsest.__all__ if callable(getattr(palimpsest, name))} == {
        *("Found", "attack", "audit", "open_dataset", "restore")
    }
