from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from storage.checkpoints import load_checkpoint, save_checkpoint, write_json
from storage.errors import CorruptPartError, StoreFullError
from tests.storage.calls import Calls, Killed

TENSORS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3).T, "step": np.array(3)}


@settings(max_examples=15, deadline=None)
@given(
    tensors=st.dictionaries(
        st.text("abc.", min_size=1, max_size=3),
        st.one_of(
            arrays(np.float32, array_shapes(min_dims=0, max_side=4)),
            arrays(np.int64, array_shapes(min_dims=0, max_side=4)),
            arrays(np.uint8, array_shapes(min_dims=0, min_side=0, max_side=4)),
        ),
        max_size=3,
    ),
    meta=st.dictionaries(st.text(max_size=3), st.one_of(st.integers(), st.text(max_size=3))),
)
def test_what_is_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, tensors: Any, meta: dict[str, Any]
):
    folder = tmp_path_factory.getbasetemp() / "checkpoints"
    save_checkpoint(folder, "last", tensors, meta)
    loaded = load_checkpoint(folder, "last")
    assert loaded is not None
    assert loaded[1] == meta
    assert set(loaded[0]) == set(tensors)
    for name, value in tensors.items():
        assert loaded[0][name].dtype == value.dtype
        np.testing.assert_array_equal(loaded[0][name], value)
    assert len(list(folder.iterdir())) == 2


def test_names(tmp_path: Path):
    assert load_checkpoint(tmp_path / "absent", "last") is None
    save_checkpoint(tmp_path, "a", TENSORS, {"x": 1})
    save_checkpoint(tmp_path, "b", {"w": np.zeros(1)}, {"x": 2})
    assert load_checkpoint(tmp_path, "a")[1] == {"x": 1}  # type: ignore[index]
    with pytest.raises(ValueError, match="name='a/b'"):
        save_checkpoint(tmp_path, "a/b", TENSORS, {})


def test_meta_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path):
    for meta in ({"loss": float("nan")}, {"path": tmp_path}):
        with pytest.raises((ValueError, TypeError)):
            save_checkpoint(tmp_path, "last", TENSORS, meta)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("death", [True, False], ids=["killed", "full"])
def test_interrupted_while_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: bool):
    """After death or a full device at any moment it is the old checkpoint or the new one, whole."""

    def error() -> BaseException:
        return Killed() if death else OSError(28, "No space left on device")

    save_checkpoint(tmp_path / "calm", "last", {"w": np.zeros(4)}, {"step": 1})
    with monkeypatch.context() as patch:
        calls = Calls(patch, error, death=death)
        save_checkpoint(tmp_path / "calm", "last", {"w": np.ones(4)}, {"step": 2})
    steps = []
    for at in range(calls.n):
        folder = tmp_path / str(at)
        save_checkpoint(folder, "last", {"w": np.zeros(4)}, {"step": 1})
        with monkeypatch.context() as patch:
            Calls(patch, error, at=at, death=death)
            with pytest.raises(Killed if death else StoreFullError):
                save_checkpoint(folder, "last", {"w": np.ones(4)}, {"step": 2})
        tensors, meta = load_checkpoint(folder, "last")  # type: ignore[misc]
        steps.append(meta["step"])
        np.testing.assert_array_equal(tensors["w"], np.full(4, meta["step"] - 1.0))
        save_checkpoint(folder, "last", TENSORS, {"step": 3})
        assert len(list(folder.glob("*.safetensors"))) == 1
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}


def test_damage_is_named_with_the_fix(tmp_path: Path):
    path = save_checkpoint(tmp_path, "last", TENSORS, {})
    tensors = next(tmp_path.glob("*.safetensors"))
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    with pytest.raises(CorruptPartError, match=r"SHA-256 differs.*remove .*last\.json"):
        load_checkpoint(tmp_path, "last")
    tensors.unlink()
    with pytest.raises(CorruptPartError, match="is missing"):
        load_checkpoint(tmp_path, "last")
    os.mkfifo(tensors)
    with pytest.raises(CorruptPartError, match=r"cannot be read \(it is a pipe.*restore both"):
        load_checkpoint(tmp_path, "last")
    path.write_text(json.dumps({"tensors": "../victim", "sha256": "", "meta": {}}))
    with pytest.raises(CorruptPartError, match=r"its tensors are at '\.\./victim', not beside it"):
        load_checkpoint(tmp_path, "last")


def test_write_json_replaces_and_refuses_nan(tmp_path: Path):
    write_json(tmp_path / "x.json", {"a": 1})
    write_json(tmp_path / "x.json", {"a": "ä"})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": "ä"}
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "x.json", {"a": float("inf")})
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
