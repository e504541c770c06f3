"""Feature maps of VGG16 for PSIM, against torchvision's own network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from recon_core.torchvision_compat import import_torchvision
from storage.weights import WeightsError
from tasks.evaluation.perceptual import MEAN, STD, feature_maps


@pytest.fixture(scope="module")
def vgg() -> nn.Sequential:
    """torchvision's convolutions with random weights, up to the last pooling."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with torch.device("meta"):
            network = import_torchvision().models.vgg16(weights=None)
        features: nn.Sequential = network.features.to_empty(device="cpu")
        for layer in features:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight)
                nn.init.uniform_(layer.bias, -0.1, 0.1)  # type: ignore[arg-type]
    return features.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def weights(vgg: nn.Sequential, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vgg") / "vgg16.pt"
    state = {f"features.{name}": tensor for name, tensor in vgg.state_dict().items()}
    torch.save(state, path)
    return path


def _images(n: int, c: int, h: int, w: int) -> Tensor:
    return torch.rand(n, c, h, w, generator=torch.Generator().manual_seed(1))


def test_the_maps_are_those_after_the_five_relus_of_lpips(vgg: nn.Sequential, weights: Path):
    x = _images(2, 3, 32, 32)
    a = (x - torch.tensor(MEAN).view(1, 3, 1, 1)) / torch.tensor(STD).view(1, 3, 1, 1)
    expected, before_pool = [], a
    for layer in vgg:  # each map is what a pooling is given
        if isinstance(layer, nn.MaxPool2d):
            expected.append(before_pool.clone())
        before_pool = layer(before_pool)
    maps = feature_maps(f"vgg16:{weights}", "cpu")(x)
    assert [m.shape[1] for m in maps] == [64, 128, 256, 512, 512]
    assert [m.shape[2] for m in maps] == [32, 16, 8, 4, 2]
    for found, wanted in zip(maps, expected, strict=True):
        torch.testing.assert_close(found, wanted)
        assert not found.requires_grad


def test_maps_do_not_depend_on_how_many_images_there_are_and_grey_is_repeated(
    weights: Path, monkeypatch: pytest.MonkeyPatch
):
    maps_of, grey = feature_maps(f"vgg16:{weights}", "cpu"), _images(3, 1, 16, 24)
    maps = maps_of(grey)
    assert maps[0].shape == (3, 64, 32, 48)  # small images are enlarged
    monkeypatch.setattr("tasks.evaluation.perceptual.ROWS_AT_ONCE", 2)
    for one, other in zip(maps, maps_of(grey.expand(-1, 3, -1, -1)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_safetensors_are_read_and_other_networks_are_refused(
    vgg: nn.Sequential, weights: Path, tmp_path: Path
):
    state = {f"features.{name}": tensor for name, tensor in vgg.state_dict().items()}
    save_file(state, tmp_path / "vgg16.safetensors")
    x = _images(1, 3, 32, 32)
    (a, b) = (
        feature_maps(f"vgg16:{p}", "cpu")(x)[4] for p in (weights, tmp_path / "vgg16.safetensors")
    )
    assert torch.equal(a, b)
    torch.save({"features.0.weight": torch.zeros(8, 3, 3, 3)}, tmp_path / "other.pt")
    with pytest.raises(WeightsError, match=r"features\.0\.weight has shape \(8, 3, 3, 3\)"):
        feature_maps(f"vgg16:{tmp_path / 'other.pt'}", "cpu")
    del state["features.28.bias"]
    torch.save(state, tmp_path / "short.pt")
    with pytest.raises(WeightsError, match=r"features\.28\.bias is missing"):
        feature_maps(f"vgg16:{tmp_path / 'short.pt'}", "cpu")


@pytest.mark.parametrize("spec", ["own", "vgg16", "vgg16:", "alexnet:x.pt"])
def test_other_specifications_are_refused(spec: str):
    with pytest.raises(ValueError, match="names no network to read"):
        feature_maps(spec, "cpu")
