"""The reading example of docs/dataset.md, run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.pairs.layout import COLUMNS
from storage.pairs.receipts import Receipt
from tests.storage.stores import store

DOCUMENT = (Path(__file__).parents[2] / "docs/dataset.md").read_text()


def test_the_five_lines_read_the_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dataset = store(tmp_path / "store", 2)
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    assert code is not None
    lines = code[1].strip().splitlines()
    assert len(lines) == 5
    read: dict[str, Any] = {}
    exec(code[1], read)
    expected = dataset.read(1, ["pairs/reconstruction", "pairs/target_row", "targets/image"])
    np.testing.assert_array_equal(read["x"], expected["pairs/reconstruction"])
    np.testing.assert_array_equal(
        read["original"], expected["targets/image"][expected["pairs/target_row"]]
    )


def test_every_column_and_receipt_field_is_documented_with_its_type():
    for name, column in COLUMNS.items():
        shape = ", ".join(map(str, column.trailing)).replace("c, h, w", "3, h, w")
        row = f"| `{name}` | {column.dtype[1:]} | {shape + ' ' if shape else ''}|"
        assert row in DOCUMENT
    for field in Receipt.__dataclass_fields__:
        assert f"`{field}`" in DOCUMENT
