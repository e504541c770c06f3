"""An attack on a given classifier: networks, cuts, images and every refusal; and its scores against
the own image, against others, and by maps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from recon_core.attacks.inversion.feature_matching import GradientInversion
from recon_core.attacks.inversion.strong_inversion import ZETAS, StrongInversion
from recon_core.metrics import ssim_matrix
from recon_core.torchvision_compat import import_torchvision
from recon_core.victims.split import LeNet5, SplitMLP
from storage.errors import SourceError
from storage.weights import WeightsError
from tasks.attack_file.networks import read_classifier
from tasks.families.inversion import attack as inversion_attack
from tasks.families.inversion.attack import attack_all, inversion_record, shown_rows
from tasks.families.inversion.inputs import (
    InversionJob,
    PreparedCut,
    features,
    image_shape,
    modules_of,
    outputs_of,
    prepare_cut,
)
from tests.tasks.families.inversion.classifier_files import (
    CLASSES,
    N_IMAGES,
    SIDE,
    ClassifierFiles,
    make_classifier,
    save_split,
)
from tests.tasks.families.weights.attack_victims import pictures, write_pictures

FEW = StrongInversion(n_steps=150, zeta=0.001, starts=("grey",))


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


@pytest.mark.parametrize(
    "name", ["resnet18", "squeezenet1_1", "regnet_x_400mf", "swin_t", "resnet18 in grey"]
)
def test_a_torchvision_model_is_what_torchvision_computes(tmp_path: Path, name: str):
    kind, _space, grey = name.partition(" ")
    net = torchvision_net(kind, num_classes=7)
    if grey:
        net.conv1 = nn.Conv2d(1, 64, 7, stride=2, padding=3, bias=False)
    torch.save({"state_dict": net.state_dict(), "epoch": 3}, tmp_path / "net.pt")
    network = read_classifier(tmp_path / "net.pt", f"torchvision:{kind}")
    shape = (1 if grey else 3, 64, 64)
    assert (network.n_classes, network.channels) == (7, shape[0])
    x = torch.rand(2, *shape)
    with torch.no_grad():
        torch.testing.assert_close(network.on(shape, "cpu")(x), net(x))


def test_weights_that_do_not_fit_are_refused_with_the_tensor_and_the_fix(tmp_path: Path):
    path, state = tmp_path / "net.pt", torchvision_net("resnet18", num_classes=10).state_dict()
    torch.save(state, path)
    for name, error, said in (
        ("torchvision:resnet34", WeightsError, r"layer1\.2\.conv1\.weight is not there"),
        ("torchvision:resnet19", ValueError, "no classification model 'resnet19'"),
        ("resnet18", ValueError, "unknown architecture 'resnet18'"),
        (None, ValueError, "does not say which network"),
        ("lenet5", WeightsError, "which are not those of lenet5"),
    ):
        with pytest.raises(error, match=said):
            read_classifier(path, name)
    for name, tensor, said in (
        ("extra.weight", torch.zeros(2), r"extra\.weight, which torchvision's resnet18 has not"),
        ("conv1.weight", torch.full((64, 3, 7, 7), torch.nan), r"conv1\.weight .* NaN or infinite"),
    ):
        torch.save(state | {name: tensor}, path)
        with pytest.raises(WeightsError, match=said):
            read_classifier(path, "torchvision:resnet18")
    with pytest.raises(WeightsError, match="does not exist"):
        read_classifier(tmp_path / "none.pt", "lenet5")


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
    read = read_classifier(path, None if about else kind)
    assert (read.text, read.n_classes, read.channels) == (kind, 4, shape[0])
    assert read.cut == (cuts[network.cut - 1] if about else None)
    module = read.on(shape, "cpu")
    x = torch.rand(3, *shape)
    with torch.no_grad():
        with outputs_of(module, cuts, 3) as found:
            logits = module(x)
        for number, name in enumerate(cuts, start=1):
            model = dataclasses.replace(network, cut=number).on(shape, 4)
            h = model.features(weights, x.unsqueeze(0))
            torch.testing.assert_close(found[name].flatten(1), h[0])
            torch.testing.assert_close(logits, model.classify(weights, h)[0])


def test_cuts_are_listed_in_order_with_their_shapes(files: ClassifierFiles):
    network = read_classifier(files.exported, None, trust=True)
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
    rows = [features(prepared.h, image.unsqueeze(0), "cpu") for image in x]  # of each alone
    torch.testing.assert_close(torch.cat(rows), prepared.z)
    labels = torch.tensor([int(Path(name).parts[0] == "b") for name in prepared.data.names])
    assert prepared.accuracy == float((predicted == labels).double().mean())


def test_torchscript_is_h_as_a_whole(files: ClassifierFiles):
    prepared = prepare_cut(job_of(files, files.torchscript, cut=None))
    assert (prepared.cut, prepared.accuracy) == ("output", None)
    with torch.no_grad():
        expected = files.net.first(prepared.data.images).flatten(1)
    torch.testing.assert_close(prepared.z, expected)
    assert "taken whole" in prepared.notes[0]
    for path, changes, error, said in (
        (files.torchscript, {"cut": "0"}, ValueError, "out of reach"),
        (files.exported, {"trust": False}, WeightsError, "--trust"),
        (files.exported, {"architecture": "lenet5"}, ValueError, "has its architecture in it"),
    ):
        with pytest.raises(error, match=said):
            prepare_cut(job_of(files, path, **changes))


WRONG: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "detach": (lambda x: x.detach().flatten(1), "have no gradient"),
    "round": (lambda x: (x * 255).round().flatten(1), "have no gradient"),
    "mean": (lambda x: x.flatten(1) - x.flatten(1).mean(0), "depend on the other images"),
    "nan": (lambda x: x.flatten(1) / (x.flatten(1).sum(1, keepdim=True) * 0), "NaN or infinite"),
}


class Whole(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return WRONG[self.how][0](x)


@pytest.mark.parametrize("how", WRONG)
def test_features_that_cannot_be_attacked_are_refused(
    files: ClassifierFiles, tmp_path: Path, how: str, recwarn
):
    traced = torch.jit.trace(Whole(how), torch.zeros(2, 3, SIDE, SIDE))
    torch.jit.save(traced, tmp_path / "bad.pt")
    with pytest.raises((ValueError, WeightsError), match=WRONG[how][1]):
        prepare_cut(job_of(files, tmp_path / "bad.pt", cut=None))


def test_images_and_settings_that_do_not_fit_are_refused(files: ClassifierFiles, tmp_path: Path):
    start = {"weights": files.exported, "out": tmp_path, "data": "photos"}
    for name, value in {"size": 10, "n_images": 1, "std": (0.0,), "mean": (float("nan"),)}.items():
        with pytest.raises(ValueError, match=name):
            InversionJob(**start, **{name: value})  # type: ignore[arg-type]
    for changes, error, said in (
        ({"size": 32}, ValueError, "takes images of 16x16, not --size 32"),
        ({"mean": (0.5, 0.5)}, ValueError, "--mean has 2 numbers for 3 channels"),
        ({"public": f"folder:{files.pictures}"}, ValueError, "6 of 6 public images .* are among"),
        ({"public": f"folder:{tmp_path / 'none'}"}, SourceError, "is not a folder"),
    ):
        with pytest.raises(error, match=said):
            prepare_cut(job_of(files, files.exported, **changes))
    torch.save(torchvision_net("resnet18", num_classes=5).state_dict(), tmp_path / "net.pt")
    wrong = job_of(files, tmp_path / "net.pt", architecture="torchvision:resnet18", n_classes=4)
    with pytest.raises(ValueError, match=r"--n-classes 4, but .* has 5 classes"):
        prepare_cut(wrong)
    path = tmp_path / "lenet.safetensors"
    save_split(path, LeNet5(), (1, 28, 28), 4, about=False)
    with pytest.raises(WeightsError, match=r"fc1\.weight has shape \(120, 400\)"):
        prepare_cut(job_of(files, path, architecture="lenet5", cut="conv1"))


def test_tensors_under_other_names_are_named_with_the_renaming_that_helps(tmp_path: Path):
    state = torchvision_net("resnet18", num_classes=5).state_dict()
    torch.save({f"backbone.{name}": value for name, value in state.items()}, tmp_path / "a.pt")
    with pytest.raises(
        WeightsError, match=r"if backbone\.fc\.bias is meant, rename it to fc\.bias"
    ):
        read_classifier(tmp_path / "a.pt", "torchvision:resnet18")
    mlp = nn.Sequential(nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 2))
    torch.save(mlp.state_dict(), tmp_path / "b.pt")
    with pytest.raises(WeightsError, match=r"rename 0\.weight to fc1\.weight, 2\.weight to fc2\."):
        read_classifier(tmp_path / "b.pt", "split-mlp")


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


@pytest.fixture(scope="module")
def job(files: ClassifierFiles) -> InversionJob:
    return job_of(files, files.exported, public=f"folder:{files.public}")


@pytest.fixture(scope="module")
def prepared(job: InversionJob) -> PreparedCut:
    return prepare_cut(job)


def test_images_come_back_from_a_layer_that_hides_nothing(job: InversionJob, prepared: PreparedCut):
    (found,) = attack_all(job, prepared, [FEW], tuned=False, device="cpu")
    assert float(found.ssim.min()) > 0.9
    assert float(found.others.max()) < float(found.ssim.min())
    assert bool(found.identified.all())
    expected = ssim_matrix(found.found.x, prepared.data.images).double()
    torch.testing.assert_close(found.ssim, expected.diagonal(), atol=1e-5, rtol=0)
    others = (expected.sum(1) - expected.diagonal()) / (N_IMAGES - 1)
    torch.testing.assert_close(found.others, others, atol=1e-5, rtol=0)
    assert float((found.psim - found.psim_other).min()) > 0
    record = inversion_record(found, prepared.data.names)
    ssim = record["summary"]["ssim"]
    best = max(record["images"], key=lambda image: image["ssim"])
    assert (ssim["worst"], ssim["worst_image"]) == (best["ssim"], best["name"])
    assert ssim["mean"] == pytest.approx(float(found.ssim.mean()), rel=1e-5)
    assert record["n_identified"] == N_IMAGES
    order = shown_rows([found], 3)
    ranks = [found.order().index(row) for row in order]
    assert (ranks[0], ranks[-1], len(ranks)) == (0, N_IMAGES - 1, 3)


def test_features_that_say_nothing_score_as_chance(job: InversionJob, prepared: PreparedCut):
    """The features of one image sent for all: nothing can be identified beyond that one."""
    same = dataclasses.replace(prepared, z=prepared.z[:1].expand_as(prepared.z).contiguous())
    (found,) = attack_all(job, same, [FEW], tuned=False, device="cpu")
    assert int(found.identified.sum()) == 1
    wrong = found.ssim[1:] - found.others[1:]
    assert abs(float(wrong.mean())) < 0.3
    assert float(found.ssim[0] - found.others[0]) > 0.5


def test_groups_of_images_are_solved_as_if_they_were_alone(
    job: InversionJob, prepared: PreparedCut, monkeypatch: pytest.MonkeyPatch
):
    method = dataclasses.replace(FEW, n_steps=10, starts=("noise",))
    (whole,) = attack_all(job, prepared, [method], tuned=False, device="cpu")
    monkeypatch.setattr(inversion_attack, "VALUES_AT_ONCE", 2 * 3 * 16 * 16)
    (parts,) = attack_all(job, prepared, [method], tuned=False, device="cpu")
    torch.testing.assert_close(parts.found.x, whole.found.x, atol=1e-4, rtol=0)


def test_zeta_is_tuned_on_public_images_and_said(
    job: InversionJob, prepared: PreparedCut, monkeypatch: pytest.MonkeyPatch
):
    seen = []
    real = inversion_attack.errors_by_zeta

    def spied(method, h, public, zetas, **more):
        seen.append(public)
        return real(method, h, public, zetas, **more)

    monkeypatch.setattr(inversion_attack, "errors_by_zeta", spied)
    start = dataclasses.replace(FEW, n_steps=30, zeta=777.0)
    (tuned,) = attack_all(job, prepared, [start], tuned=True, device="cpu")
    assert prepared.public is not None
    assert torch.equal(seen[0], prepared.public.images)
    assert isinstance(tuned.method, StrongInversion)
    assert tuned.method.zeta in ZETAS
    assert f"zeta = {tuned.method.zeta:g} was best" in tuned.notes[0]
    alone = dataclasses.replace(prepared, public=None)
    (untuned,) = attack_all(job, alone, [start], tuned=True, device="cpu")
    assert "No --public images" in untuned.notes[0]
    assert "zeta is the default, 777" in untuned.notes[1]


def test_a_descent_that_diverges_is_said_and_scored(job: InversionJob, prepared: PreparedCut):
    method = GradientInversion(lr=1e30, n_steps=20)
    (found,) = attack_all(job, prepared, [method], tuned=False, device="cpu")
    record = inversion_record(found, prepared.data.names)
    assert record["endings"]["nonfinite"] == N_IMAGES
    assert f"{N_IMAGES} of {N_IMAGES} descents diverged" in record["notes"][0]
    assert all(image["ssim"] is not None for image in record["images"])


def test_own_maps_are_the_outermost_modules_in_their_order(prepared: PreparedCut):
    maps = prepared.maps(prepared.data.images)
    shapes = [tuple(layer.shape[1:]) for layer in maps]
    assert shapes == [(12, 16, 16), (4, 2, 2), (16,), (2,)]
    torch.testing.assert_close(maps[0].flatten(1), prepared.z)
