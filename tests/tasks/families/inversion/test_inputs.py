"""What an attack on a given classifier starts from: networks, cuts, images, and every refusal."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from recon_core.torchvision_compat import import_torchvision
from recon_core.victims.split import LeNet5, SplitMLP
from storage.errors import SourceError
from storage.weights import WeightsError
from tasks.families.inversion.cuts import image_shape, modules_of
from tasks.families.inversion.inputs import InversionJob, features, prepare_cut
from tasks.families.inversion.networks import read_network
from tests.tasks.families.inversion.classifier_files import (
    CLASSES,
    SIDE,
    ClassifierFiles,
    make_classifier,
    save_split,
)
from tests.tasks.families.weights.attack_victims import pictures, write_pictures


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ClassifierFiles:
    return make_classifier(tmp_path_factory.mktemp("classifier"))


def job_of(files: ClassifierFiles, weights: Path, **changes: object) -> InversionJob:
    settings: dict[str, object] = {"cut": "first", "trust": True} | changes
    return InversionJob(
        weights=weights, out=weights.parent / "out", data=f"folder:{files.pictures}",
        **settings,  # type: ignore[arg-type]
    )  # fmt: skip


def torchvision_net(name: str, **options: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net: nn.Module = import_torchvision().models.get_model(name, weights=None, **options)
    return net.eval()


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "regnet_x_400mf"])
def test_a_torchvision_model_is_what_torchvision_computes(tmp_path: Path, name: str):
    net = torchvision_net(name, num_classes=7)
    torch.save({"state_dict": net.state_dict(), "epoch": 3}, tmp_path / "net.pt")
    network = read_network(tmp_path / "net.pt", f"torchvision:{name}")
    assert (network.n_classes, network.channels) == (7, 3)
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(network.on((3, 64, 64), "cpu")(x), net(x))


def test_a_first_convolution_of_grey_images_and_swins_integers_are_read(tmp_path: Path):
    net = torchvision_net("resnet18", num_classes=10)
    net.conv1 = nn.Conv2d(1, 64, 7, stride=2, padding=3, bias=False)
    save_file(net.state_dict(), tmp_path / "grey.safetensors")
    network = read_network(tmp_path / "grey.safetensors", "torchvision:resnet18")
    assert network.channels == 1
    x = torch.rand(2, 1, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(network.on((1, 32, 32), "cpu")(x), net(x))
    swin = torchvision_net("swin_t", num_classes=3)
    torch.save(swin.state_dict(), tmp_path / "swin.pt")
    read = read_network(tmp_path / "swin.pt", "torchvision:swin_t")
    with torch.no_grad():
        x = torch.rand(1, 3, 32, 32)
        torch.testing.assert_close(read.on((3, 32, 32), "cpu")(x), swin(x))


def test_weights_that_do_not_fit_are_refused_with_the_tensor_and_the_fix(tmp_path: Path):
    net = torchvision_net("resnet18", num_classes=10)
    path = tmp_path / "net.pt"
    torch.save(net.state_dict(), path)
    with pytest.raises(WeightsError, match=r"layer1\.2\.conv1\.weight is not there"):
        read_network(path, "torchvision:resnet34")
    with pytest.raises(ValueError, match="no classification model 'resnet19'"):
        read_network(path, "torchvision:resnet19")
    with pytest.raises(ValueError, match="unknown architecture 'resnet18'"):
        read_network(path, "resnet18")
    with pytest.raises(ValueError, match="does not say which network"):
        read_network(path, None)
    with pytest.raises(WeightsError, match="which are not those of lenet5"):
        read_network(path, "lenet5")
    state = net.state_dict()
    state["extra.weight"] = torch.zeros(2)
    torch.save(state, path)
    with pytest.raises(WeightsError, match=r"extra\.weight, which torchvision's resnet18 has not"):
        read_network(path, "torchvision:resnet18")
    state["conv1.weight"][0] = torch.nan
    torch.save(state, path)
    with pytest.raises(WeightsError, match=r"conv1\.weight .* NaN or infinite"):
        read_network(path, "torchvision:resnet18")
    with pytest.raises(WeightsError, match="does not exist"):
        read_network(tmp_path / "none.pt", "lenet5")


@pytest.mark.parametrize("about", [True, False])
@pytest.mark.parametrize(
    ("network", "shape", "cuts"),
    [
        (LeNet5(), (1, 28, 28), ["conv1", "conv2", "fc1", "fc2"]),
        (LeNet5(cut=3), (3, 32, 32), ["conv1", "conv2", "fc1", "fc2"]),
        (SplitMLP(widths=(20, 8), cut=1), (1, 12, 12), ["fc1", "fc2"]),
    ],
)
def test_our_own_networks_are_cut_where_the_study_cuts_them(
    tmp_path: Path, network: LeNet5 | SplitMLP, shape: tuple[int, int, int], cuts: list[str],
    about: bool,
):  # fmt: skip
    path = tmp_path / "net.safetensors"
    weights = save_split(path, network, shape, 4, about=about)
    kind = "lenet5" if isinstance(network, LeNet5) else "split-mlp"
    read = read_network(path, None if about else kind)
    assert (read.text, read.n_classes, read.channels) == (kind, 4, shape[0])
    assert read.cut == (cuts[network.cut - 1] if about else None)
    module = read.on(shape, "cpu")
    x = torch.rand(3, *shape)
    found: dict[str, Tensor] = {}
    for name in cuts:

        def keep(_module: nn.Module, _inputs: object, output: Tensor, name: str = name) -> None:
            found[name] = output.flatten(1)

        module.get_submodule(name).register_forward_hook(keep)
    with torch.no_grad():
        logits = module(x)
        for number, name in enumerate(cuts, start=1):
            model = dataclasses.replace(network, cut=number).on(shape, 4)
            h = model.features(weights, x.unsqueeze(0))
            torch.testing.assert_close(found[name], h[0])
            torch.testing.assert_close(logits, model.classify(weights, h)[0])


def test_cuts_are_listed_in_order_with_their_shapes(files: ClassifierFiles):
    network = read_network(files.exported, None, trust=True)
    listed = modules_of(network, image_shape(network, None, None))
    assert listed[0] == ("first.0", (12, SIDE, SIDE))
    assert ("second", (4, 2, 2)) in listed
    assert listed[-1] == ("output", (len(CLASSES),))
    with pytest.raises(
        ValueError, match=r"no cut 'frist'; give --cut one of: .*first \(12x16x16\)"
    ):
        prepare_cut(job_of(files, files.exported, cut="frist"))
    with pytest.raises(ValueError, match=r"^give --cut one of"):
        prepare_cut(job_of(files, files.exported, cut=None))


@pytest.mark.parametrize("form", ["exported", "fixed"])
def test_a_program_is_cut_at_the_modules_that_it_was_exported_with(
    files: ClassifierFiles, form: str
):
    prepared = prepare_cut(job_of(files, getattr(files, form), mean=(0.5, 0.4, 0.3), std=(0.2,)))
    assert prepared.shape == (3, SIDE, SIDE)
    x = prepared.data.images
    normalised = (x - torch.tensor([0.5, 0.4, 0.3]).view(1, 3, 1, 1)) / 0.2
    with torch.no_grad():
        torch.testing.assert_close(prepared.z, files.net.first(normalised).flatten(1))
        predicted = files.net(normalised).argmax(1)
    labels = torch.tensor([int(Path(name).parts[0] == "b") for name in prepared.data.names])
    assert prepared.accuracy == float((predicted == labels).double().mean())


def test_torchscript_is_h_as_a_whole(files: ClassifierFiles):
    prepared = prepare_cut(job_of(files, files.torchscript, cut=None))
    assert (prepared.cut, prepared.accuracy) == ("output", None)
    with torch.no_grad():
        expected = files.net.first(prepared.data.images).flatten(1)
    torch.testing.assert_close(prepared.z, expected)
    assert "taken whole" in prepared.notes[0]
    with pytest.raises(ValueError, match="out of reach"):
        prepare_cut(job_of(files, files.torchscript, cut="0"))
    with pytest.raises(WeightsError, match="--trust"):
        prepare_cut(job_of(files, files.exported, trust=False))
    with pytest.raises(ValueError, match="has its architecture in it"):
        prepare_cut(job_of(files, files.exported, architecture="lenet5"))


class Detached(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "detach":
            return x.detach().flatten(1)
        if self.how == "round":
            return (x * 255).round().flatten(1)
        if self.how == "mean":
            return x.flatten(1) - x.flatten(1).mean(0)
        return x.flatten(1) / (x.flatten(1).sum(1, keepdim=True) * 0)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("detach", "have no gradient"),
        ("round", "have no gradient"),
        ("mean", "depend on the other images"),
        ("nan", "NaN or infinite"),
    ],
)
def test_features_that_cannot_be_attacked_are_refused(
    files: ClassifierFiles, tmp_path: Path, how: str, said: str, recwarn
):
    traced = torch.jit.trace(Detached(how), torch.zeros(2, 3, SIDE, SIDE))
    torch.jit.save(traced, tmp_path / "bad.pt")
    with pytest.raises((ValueError, WeightsError), match=said):
        prepare_cut(job_of(files, tmp_path / "bad.pt", cut=None))


def test_images_and_settings_that_do_not_fit_are_refused(files: ClassifierFiles, tmp_path: Path):
    start = {"weights": files.exported, "out": tmp_path, "data": "photos"}
    for changes, said in [
        ({"size": 10}, "smaller than the 11x11 window"),
        ({"size": 999_999}, "larger than 2048x2048"),
        ({"n_images": 1}, "n_images=1 must be at least 2"),
        ({"std": (0.0,)}, "must be positive"),
        ({"mean": (float("nan"),)}, "must be finite"),
        ({"n_steps": 0}, "n_steps=0 must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=said):
            InversionJob(**start, **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="takes images of 16x16, not --size 32"):
        prepare_cut(job_of(files, files.exported, size=32))
    with pytest.raises(ValueError, match="--mean has 2 numbers for 3 channels"):
        prepare_cut(job_of(files, files.exported, mean=(0.5, 0.5)))
    with pytest.raises(ValueError, match=r"6 of 6 public images .* are among those"):
        prepare_cut(job_of(files, files.exported, public=f"folder:{files.pictures}"))
    with pytest.raises(SourceError, match="is not a folder"):
        prepare_cut(job_of(files, files.exported, public=f"folder:{tmp_path / 'none'}"))
    torch.save(torchvision_net("resnet18", num_classes=5).state_dict(), tmp_path / "net.pt")
    wrong = job_of(files, tmp_path / "net.pt", architecture="torchvision:resnet18", n_classes=4)
    with pytest.raises(ValueError, match=r"--n-classes 4, but .* has 5 classes"):
        prepare_cut(wrong)
    small = save_split(tmp_path / "lenet.safetensors", LeNet5(), (1, 28, 28), 4, about=False)
    assert small
    with pytest.raises(WeightsError, match=r"fc1\.weight has shape \(120, 400\)"):
        prepare_cut(
            job_of(files, tmp_path / "lenet.safetensors", architecture="lenet5", cut="conv1")
        )


def test_tensors_under_other_names_are_named_with_the_renaming_that_helps(tmp_path: Path):
    state = torchvision_net("resnet18", num_classes=5).state_dict()
    torch.save({f"backbone.{name}": value for name, value in state.items()}, tmp_path / "a.pt")
    with pytest.raises(
        WeightsError, match=r"if backbone\.fc\.bias is meant, rename it to fc\.bias"
    ):
        read_network(tmp_path / "a.pt", "torchvision:resnet18")
    mlp = nn.Sequential(nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 2))
    torch.save(mlp.state_dict(), tmp_path / "b.pt")
    with pytest.raises(WeightsError, match=r"rename 0\.weight to fc1\.weight, 2\.weight to fc2\."):
        read_network(tmp_path / "b.pt", "split-mlp")


def test_accuracy_is_left_out_where_classes_cannot_be_matched(
    files: ClassifierFiles, tmp_path: Path
):
    write_pictures(tmp_path / "three", pictures(6, 3, SIDE), ("a", "b", "c"))
    job = dataclasses.replace(
        job_of(files, files.exported), data=f"folder:{tmp_path / 'three'}", n_images=4
    )
    prepared = prepare_cut(job)
    assert len(prepared.data) == 4
    assert prepared.accuracy is None
    assert "have 3 classes and the network 2" in prepared.notes[0]
    for path in (tmp_path / "three").rglob("*.png"):
        path.rename(tmp_path / "three" / path.name)
    assert "no class folders" in prepare_cut(job).notes[0]


def test_features_are_of_the_images_alone_and_in_order(files: ClassifierFiles):
    prepared = prepare_cut(job_of(files, files.fixed))
    rows = [features(prepared.h, x.unsqueeze(0), "cpu") for x in prepared.data.images]
    torch.testing.assert_close(torch.cat(rows), prepared.z)
