"""A user's ONNX file as a restorer: ranges, shapes that the file fixes, and what is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.errors import StorageError
from tasks.restoring.restore import open_restorer
from tests.tasks.restoring.restorers import SIZE, floats

MISSING = [name for name in ("onnx", "onnxruntime") if importlib.util.find_spec(name) is None]
needs_onnx = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; pip install onnx onnxruntime"
)
ANY = ("n", 3, "h", "w")


def model(
    path: Path,
    *,
    shape: tuple[Any, ...] = ANY,
    weight: float = 1.0,
    nodes: Any = None,
    elem: str = "FLOAT",
    n_inputs: int = 1,
) -> Path:
    """An ONNX file that multiplies its input by `weight`, or does what `nodes(helper)` say."""
    import onnx
    from onnx import TensorProto, helper

    kind = getattr(TensorProto, elem)
    made = nodes(helper) if nodes else [helper.make_node("Mul", ["x", "weight"], ["y"])]
    inputs = [helper.make_tensor_value_info(f"x{k or ''}", kind, shape) for k in range(n_inputs)]
    graph = helper.make_graph(
        made,
        "restorer",
        inputs,
        [helper.make_tensor_value_info("y", kind, None if nodes else shape)],
        [helper.make_tensor("weight", kind, [], [weight])],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), str(path))
    return path


@needs_onnx
def test_pictures_go_through_the_model_in_its_range(tmp_path: Path) -> None:
    half = model(tmp_path / "half.onnx", weight=0.5)
    pictures = floats(3)
    mean, disagreement = open_restorer(half, device="cpu")(pictures, n_samples=4)
    np.testing.assert_allclose(mean, pictures / 2, atol=1e-6)
    assert not disagreement.any()
    symmetric = open_restorer(half, device="cpu", onnx_range="-1..1")
    np.testing.assert_allclose(symmetric(pictures)[0], 0.5 + (pictures - 0.5) / 2, atol=1e-6)
    double = open_restorer(model(tmp_path / "double.onnx", weight=2.0), device="cpu")
    np.testing.assert_allclose(double(pictures)[0], np.minimum(2 * pictures, 1), atol=1e-6)


@needs_onnx
@pytest.mark.parametrize("n_fixed", [1, 2, 4])
def test_a_model_of_a_fixed_batch_is_filled_up(tmp_path: Path, n_fixed: int) -> None:
    path = model(tmp_path / "m.onnx", shape=(n_fixed, 3, SIZE, SIZE), weight=0.5)
    opened = open_restorer(path, device="cpu")
    np.testing.assert_allclose(opened(floats(5))[0], floats(5) / 2, atol=1e-6)
    assert opened.resolution == (SIZE, SIZE)
    with pytest.raises(ValueError, match=r"10 x 10, but m.onnx works at 8 x 8"):
        opened(floats(1, size=10))


@needs_onnx
def test_any_size_goes_through_a_model_that_fixes_none(tmp_path: Path) -> None:
    opened = open_restorer(model(tmp_path / "m.onnx"), device="cpu")
    assert opened(floats(2, size=10)[..., :7])[0].shape == (2, 3, 10, 7)
    one_side = open_restorer(model(tmp_path / "s.onnx", shape=("n", 3, 10, "w")), device="cpu")
    assert one_side(floats(2, size=10)[..., :7])[0].shape == (2, 3, 10, 7)
    with pytest.raises(ValueError, match=r"8 x 8, but s.onnx works at 10 x any"):
        one_side(floats(1))


@needs_onnx
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"shape": ("n", 1, "h", "w")}, r"input 'x' .*\['n', 1, 'h', 'w'\]; .*\(n, 3, h, w\)"),
        ({"shape": ("n", "h", "w")}, r"float32 pictures \(n, 3, h, w\)"),
        ({"elem": "DOUBLE"}, r"tensor\(double\)"),
        ({"n_inputs": 2}, "inputs x, x1 and the outputs y; export a model with one of each"),
    ],
)
def test_a_model_of_something_else_than_pictures_is_refused(
    tmp_path: Path, how: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        open_restorer(model(tmp_path / "m.onnx", **how), device="cpu")


@needs_onnx
@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        (
            lambda h: [h.make_node("MaxPool", ["x"], ["y"], kernel_shape=[2, 2], strides=[2, 2])],
            r"makes \(2, 3, 4, 4\) of pictures \(2, 3, 8, 8\)",
        ),
        (lambda h: [h.make_node("Log", ["x"], ["y"])], "not finite; check --onnx-range"),
        (
            lambda h: [
                h.make_node("Constant", [], ["s"], value_ints=[5, 3, 7, 7]),
                h.make_node("Reshape", ["x", "s"], ["y"]),
            ],
            r"fails on pictures of shape \(2, 3, 8, 8\)",
        ),
    ],
)
def test_an_answer_that_is_no_picture_is_refused(tmp_path: Path, nodes: Any, said: str) -> None:
    opened = open_restorer(model(tmp_path / "m.onnx", nodes=nodes), device="cpu")
    pictures = floats(2)
    pictures[0, 0, 0, 0] = 0
    with pytest.raises(ValueError, match=said):
        opened(pictures)


@needs_onnx
def test_a_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"no model")
    with pytest.raises(StorageError, match=r"m.onnx is not a model that onnxruntime can run"):
        open_restorer(tmp_path / "m.onnx", device="cpu")
    with pytest.raises(ValueError, match=r"n.onnx is not a file"):
        open_restorer(tmp_path / "n.onnx", device="cpu")
    with pytest.raises(ValueError, match=r"onnx_range='0..255'; choose one of 0..1, -1..1"):
        open_restorer(tmp_path / "m.onnx", device="cpu", onnx_range="0..255")  # type: ignore[arg-type]


@needs_onnx
def test_cuda_that_is_not_there_is_said(tmp_path: Path) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    path = model(tmp_path / "m.onnx")
    with pytest.raises(ValueError, match="onnxruntime-gpu"):
        open_restorer(path, device="cuda")
    assert open_restorer(path, device="auto").device == "cpu"


@needs_onnx
def test_the_range_and_the_file_identify_it(tmp_path: Path) -> None:
    path = model(tmp_path / "m.onnx")
    first = open_restorer(path, device="cpu")
    assert first.settings != open_restorer(path, device="cpu", onnx_range="-1..1").settings
    assert first.fingerprint == open_restorer(path, device="cpu").fingerprint
    model(path, weight=0.5)
    assert first.fingerprint != open_restorer(path, device="cpu").fingerprint


@needs_onnx
@pytest.mark.parametrize("location", ["m.onnx.data", "w" * 200])
def test_weights_in_a_file_of_their_own_identify_it_too(tmp_path: Path, location: str) -> None:
    import onnx

    prints = set()
    for number, weight in enumerate((0.5, 0.25)):
        path = model(tmp_path / "m.onnx", weight=weight)
        graph = onnx.load(path)
        graph.graph.initializer[0].raw_data = np.float32(weight).tobytes()
        graph.graph.initializer[0].ClearField("float_data")
        (tmp_path / location).unlink(missing_ok=True)
        onnx.save(graph, path, save_as_external_data=True, location=location, size_threshold=0)
        opened = open_restorer(path, device="cpu")
        np.testing.assert_allclose(opened(floats(1))[0], floats(1) * weight, atol=1e-6)
        prints.add((path.read_bytes(), opened.fingerprint))
        assert len(prints) == number + 1
    assert len({content for content, _ in prints}) == 1
    (tmp_path / location).unlink()
    with pytest.raises(StorageError, match="export it again, with its weights in the file"):
        open_restorer(path, device="cpu")


def test_a_missing_onnxruntime_is_named_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StorageError, match=r"pip install '\.\[onnx\]'"):
        open_restorer(tmp_path / "m.onnx")
