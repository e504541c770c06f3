"""Networks in files: the first layer before training, no classifiers, and pictures."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from storage.weights import WeightsError
from tasks.families.weights.inputs import Victim, read_victim
from tasks.families.weights.preflight import read_pictures

State = dict[str, Tensor]


def mlp(*sizes: int, seed: int = 0) -> State:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return dict(nn.Sequential(*layers).state_dict())


def victim(path: Path, state: State, **facts: Any) -> Victim:
    torch.save(state, path)
    return read_victim(path, **facts)


PREFIXES = ("", "_module.", "module.", "_orig_mod.", "model.", "net.", "wrapped.")


@pytest.mark.parametrize("ours", PREFIXES)
@pytest.mark.parametrize("theirs", PREFIXES)
def test_a_square_first_layer_has_its_start_under_any_prefix(
    ours: str, theirs: str, tmp_path: Path
) -> None:
    trained, start = (mlp(64, 64, 64, 10, seed=seed) for seed in (0, 1))
    initial = {"n_averaged": torch.tensor(3)} | {theirs + name: t for name, t in start.items()}
    torch.save(initial, tmp_path / "initial.pt")
    prefixed = {ours + name: tensor for name, tensor in trained.items()}
    found = victim(tmp_path / "net.pt", prefixed, initial=tmp_path / "initial.pt")
    assert found.start is not None
    assert torch.equal(found.parameters.weights[0][0], trained["0.weight"])
    for tensor, name in zip(found.start.parameters.tensors(), ("weight", "bias"), strict=True):
        assert torch.equal(tensor[0], start[f"0.{name}"])


def test_an_autoencoder_is_no_classifier_of_as_many_classes(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"an autoencoder; .*palimpsest attack autoencoder"):
        victim(tmp_path / "net.pt", mlp(192, 16, 192))
    with pytest.raises(WeightsError, match=r"takes 208 numbers and gives 192: .* denoiser"):
        victim(tmp_path / "net.pt", mlp(208, 16, 192))
    said = victim(tmp_path / "net.pt", mlp(192, 16, 192), arch="mlp:192-16-192")
    assert said.architecture.n_outputs == 192
    assert victim(tmp_path / "net.pt", mlp(64, 16, 40)).architecture.n_outputs == 40


def test_training_images_and_decoys_of_one_tree_are_its_splits(tmp_path: Path) -> None:
    """The training split counts each picture once, and its mean as often as it is there."""
    rng = np.random.default_rng(0)
    for folder in ("Training/a", "Training/b", "Testing/a", "Testing/b"):
        (tmp_path / folder).mkdir(parents=True)
        for k in range(3):
            pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / folder / f"{k}.png")
    shutil.copy(tmp_path / "Training/b/0.png", tmp_path / "Training/b/9.png")
    source, shape = f"folder:{tmp_path}", (3, 8, 8)
    truth, decoys = (read_pictures(source, shape, of_sets=split) for split in ("train", "heldout"))
    assert truth.class_names == decoys.class_names == ("a", "b")
    assert (truth.labels, decoys.labels) == ((0, 0, 0, 1, 1, 1), (0, 0, 0, 1, 1, 1))
    assert truth.facts["taken"] == decoys.facts["left aside"] == "Training/ (7 pictures)"
    assert decoys.facts["taken"] == truth.facts["left aside"] == "Testing/ (6 pictures)"
    truth.check_disjoint(decoys, "no SOURCE")
    weights = torch.tensor([1, 1, 1, 2, 1, 1])[:, None, None, None] / 7
    torch.testing.assert_close(truth.mean, (truth.images * weights).sum(0))
