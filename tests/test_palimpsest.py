"""The module that users import: it does what the commands do, and leaves the same files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import palimpsest
from flows.audit import AUDIT
from palimpsest import attack, audit, open_dataset, restore
from storage.errors import StorageError
from tests.storage import stores
from tests.tasks.audit import records
from tests.tasks.audit.networks import Files, N, trained

TEXTS = ("defence", "effect")
"""Columns of an audit's table that are words."""


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


def test_results_are_short_to_look_at_and_hold_numbers(tmp_path: Path) -> None:
    found = palimpsest.Found(
        tmp_path, {"record": ["long"] * 5000}, "Of 60 images 40 come back. " * 40,
        [{"defence": "as it is", "accuracy": 0.912345, "loss": None}],
    )  # fmt: skip
    assert len(repr(found)) < 500
    assert "Of 60 images 40 come back." in repr(found)
    assert "table of 1 row" in repr(found)
    shown = found._repr_html_()
    assert "<td>0.9123</td><td>–</td>" in shown
    assert "5000" not in shown


def test_the_table_of_an_audit_is_numbers() -> None:
    record, _arrays = records.audit()
    numbers, texts = AUDIT.numbers(record), AUDIT.rows(record)
    values = [v for row in numbers for name, v in row.items() if name not in TEXTS]
    assert all(value is None or 0 <= value <= 1 for value in values)
    assert any(isinstance(value, float) for value in values)
    for row, text in zip(numbers, texts, strict=True):
        assert [row[name] for name in TEXTS] == [text[name] for name in TEXTS]
        for name, value in row.items():
            if name not in TEXTS:
                assert text[name] == ("-" if value is None else f"{100 * value:.1f}%")


def test_a_store_says_how_much_it_holds(tmp_path: Path) -> None:
    dataset = open_dataset(stores.store(tmp_path, n_parts=3, n_pairs=4).root)
    assert len(dataset) == dataset.n_pairs == 24
    assert repr(dataset) == f"<Dataset {tmp_path}: 24 pairs, 30 targets, 6 runs, 3 parts>"
    empty = stores.store(tmp_path / "empty", n_parts=0)
    assert len(empty) == 0
    assert empty  # it is there
