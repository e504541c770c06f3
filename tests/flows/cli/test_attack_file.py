"""`palimpsest attack autoencoder` and `attack inversion`: from a file to a page, and how they are
refused."""

from __future__ import annotations

import io
import json
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from flows.attack_methods import autoencoder_methods, inversion_methods
from flows.cli.attack_file import ENTRIES
from flows.families.autoencoder.attack import attack_autoencoder
from flows.families.inversion import attack as attack_inversion
from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.inversion.feature_matching import GradientInversion
from recon_core.attacks.inversion.strong_inversion import StrongInversion
from recon_core.attacks.plug_and_play import Iteration, KnownMask, UnknownMask
from tasks.attack_file.networks import read_program
from tasks.families.autoencoder import attack as autoencoder_attack
from tasks.families.autoencoder.inputs import AutoencoderJob
from tests.storage.test_weights import Bomb
from tests.tasks.families.autoencoder.files import (
    N_IMAGES,
    SIDE,
    AutoencoderFiles,
    make_autoencoder,
)
from tests.tasks.families.inversion.classifier_files import N_IMAGES as N_CUT
from tests.tasks.families.inversion.classifier_files import ClassifierFiles, make_classifier
from tests.tasks.pages import FIRST_SCREEN, Page


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> AutoencoderFiles:
    return make_autoencoder(tmp_path_factory.mktemp("autoencoder"))


def words(files: AutoencoderFiles, weights: Path, out: Path, *more: object) -> list[object]:
    return ["attack", "autoencoder", "--weights", weights, "--out", out, "--device", "cpu",
            "--data", f"folder:{files.pictures}", *more]  # fmt: skip


def cells(out: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    record = json.loads((out / "attack.json").read_bytes())
    return {(c["mask"], c["method"], c["split"]): c for c in record["cells"]}


@pytest.mark.slow
def test_from_weights_to_a_page(
    palimpsest, monkeypatch, tmp_path: Path, files: AutoencoderFiles, prefect_server
) -> None:
    assert files.loss < 1e-9
    out = tmp_path / "out"
    start = words(files, files.state_dict, out, "--control", f"folder:{files.others}",
                  "--method", "noise_aware,known,iteration")  # fmt: skip
    shown = palimpsest.done(*start)
    assert "fc:192-64-64-64-192" in shown
    assert "An attack can work." in shown
    assert {entry.name for entry in out.iterdir()} < ENTRIES
    found = cells(out)
    assert len(found) == 2 * 3 * 2
    for mask in ("random", "half"):
        ours, control = found[mask, "noise_aware", "train"], found[mask, "noise_aware", "control"]
        assert (ours["n_accurate"], ours["n"]) == (N_IMAGES, N_IMAGES)
        assert (control["n_accurate"], control["n"]) == (0, N_IMAGES)
        assert ours["mask_accuracy"] > 0.99
        assert max(ours["mse"]) < 1e-7 < min(control["mse"])
        assert found[mask, "iteration", "control"]["n_accurate"] == 0
    text = " ".join(shown.split())
    assert f"{N_IMAGES} of {N_IMAGES} training images came back accurately" in text
    assert f"of control images 0 of {N_IMAGES}" in text
    pictures = load_file(out / "recoveries.safetensors")
    assert torch.allclose(
        pictures["train/half/noise_aware/x"], pictures["train/half/original"], atol=1e-3
    )
    page = Page(out / "report.html")
    page.check()
    assert page.n_first_words < FIRST_SCREEN
    assert len(page.images) == 2 * 2 * N_IMAGES * 5

    # The same command again computes nothing; one more mask is all that is new; other weights are
    # refused; --fresh starts over.
    computed = []
    compute = autoencoder_attack.recover_piece

    def counted(job: Any, f: Any, case: Any, method: Any, rows: range, *, device: str) -> Any:
        computed.append((case.mask_name, case.side, method.kind))
        return compute(job, f, case, method, rows, device=device)

    monkeypatch.setattr(autoencoder_attack, "recover_piece", counted)
    before = (out / "recoveries.safetensors").read_bytes()
    palimpsest.done(*start)
    assert computed == []
    assert (out / "recoveries.safetensors").read_bytes() == before
    palimpsest.done(*start, "--masks", "random,window", "--method", "known")
    assert computed == [("window", "train", "known"), ("window", "control", "known")]
    err = palimpsest.refused(*words(files, files.ours, out))
    assert "attack on other weights" in err
    palimpsest.done(*words(files, files.ours, out, "--fresh", "--masks", "half"))
    assert set(cells(out)) == {("half", "noise_aware", "train")}


def test_a_program_of_a_fixed_batch_and_no_control(
    palimpsest, tmp_path: Path, files: AutoencoderFiles, prefect_server
) -> None:
    more = ("--masks", "half", "--trust")
    shown = palimpsest.done(*words(files, files.exported_fixed, tmp_path / "out", *more))
    assert cells(tmp_path / "out")["half", "noise_aware", "train"]["n_accurate"] == N_IMAGES
    assert "There is no control" in " ".join(shown.split())
    assert "rows at once 4" in " ".join(shown.split())


def test_programs_are_not_touched_without_trust(palimpsest, tmp_path: Path, files) -> None:
    crater = tmp_path / "crater"
    bomb = io.BytesIO()
    torch.save((Bomb(crater), {}), bomb)
    with_bomb = tmp_path / "bomb.pt2"
    with zipfile.ZipFile(files.exported) as old, zipfile.ZipFile(with_bomb, "w") as new:
        for item in old.infolist():
            is_inputs = item.filename.endswith("sample_inputs/model.pt")
            new.writestr(item, bomb.getvalue() if is_inputs else old.read(item))
    program = read_program(with_bomb, trust=True)
    assert crater.is_file()  # why trust is asked for at all
    assert program is not None
    assert program.format == "export"
    crater.unlink()
    for weights in (with_bomb, files.torchscript):
        err = palimpsest.refused(*words(files, weights, tmp_path / "out"))
        assert "Give --trust if you made it yourself" in err
    assert not crater.exists()
    assert not (tmp_path / "out").exists()


def degrade_files(folder: Path, files: AutoencoderFiles) -> Path:
    """Degraded pictures as anybody would have them, the lower half black."""
    shutil.copytree(files.pictures, folder / "whole")
    for path in sorted((folder / "whole").rglob("*.png")):
        pixels = np.array(Image.open(path))
        pixels[SIDE // 2 :] = 0
        target = folder / "damaged" / path.relative_to(folder / "whole")
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(target)
    return folder


def test_pictures_that_are_degraded_already(
    palimpsest, tmp_path: Path, files: AutoencoderFiles, prefect_server
) -> None:
    degrade_files(tmp_path, files)
    start = ["attack", "autoencoder", "--weights", files.state_dict, "--device", "cpu",
             "--degraded", tmp_path / "damaged"]  # fmt: skip
    (tmp_path / "damaged" / "phone.heic").touch()
    scored = ["--originals", tmp_path / "whole", "--control", f"folder:{files.others}"]
    shown = " ".join(palimpsest.done(*start, *scored, "--out", tmp_path / "scored").split())
    assert f"Degraded images source folder:{tmp_path}/damaged pictures {N_IMAGES} " in shown
    assert " passed over .heic (1) " in shown
    found = cells(tmp_path / "scored")
    assert found["given", "noise_aware", "train"]["n_accurate"] == N_IMAGES
    assert found["given", "noise_aware", "control"]["n_accurate"] == 0
    assert found["given", "noise_aware", "train"]["images"][0] == "0.png"
    shown = palimpsest.done(*start, "--out", tmp_path / "blind")
    assert "cannot be scored" in " ".join(shown.split())
    blind = cells(tmp_path / "blind")["given", "noise_aware", "train"]
    assert blind["mse"] is None
    assert max(blind["residual"]) < 1e-9
    assert "cannot be scored" in "".join(Page(tmp_path / "blind" / "report.html").text)
    Image.new("RGB", (SIDE, SIDE + 1)).save(tmp_path / "damaged" / "z.png")
    err = palimpsest.refused(*start, "--out", tmp_path / "sizes")
    assert "z.png has 9x8 pixels" in err
    assert not (tmp_path / "sizes").exists()


def test_what_cannot_work_ends_with_2_and_the_reason_unless_forced(
    palimpsest, tmp_path: Path, files: AutoencoderFiles, prefect_server
) -> None:
    out = tmp_path / "out"
    start = words(files, files.state_dict, out, "--activation", "sigmoid", "--masks", "half")
    code, shown, _err = palimpsest(*start)
    assert code == 2
    assert "it does not reconstruct them" in " ".join(shown.split())
    assert not out.exists()
    job = AutoencoderJob(weights=files.state_dict, out=out, data=f"folder:{files.others}")
    with pytest.raises(ValueError, match=r"reconstruction.*--force"):
        attack_autoencoder(job, device="cpu")  # a deployment refuses, too, and leaves the reasons
    assert json.loads((out / "preflight.json").read_bytes())["outlook"] == "none"
    palimpsest.done(*start, "--force", "--method", "known")
    assert cells(out)["half", "known", "train"]["n_accurate"] == 0


def wrong_files(folder: Path, files: AutoencoderFiles) -> None:
    """Everything that the cases below name."""
    for name, size in (("wide", (SIDE + 1, SIDE)), ("white", (SIDE, SIDE))):
        Image.new("L", size, 255).save(folder / f"{name}.png")
    classifier = nn.Sequential(nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 2))
    torch.save(classifier.state_dict(), folder / "classifier.pt")
    normed = nn.Sequential(nn.Linear(192, 8), nn.BatchNorm1d(8), nn.Linear(8, 192))
    torch.save(normed.state_dict(), folder / "normed.pt")
    torch.save(nn.Sequential(nn.Conv2d(3, 4, 5), nn.Conv2d(4, 3, 5)).state_dict(),
               folder / "conv.pt")  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.AvgPool2d(2)), str(folder / "pool.pt"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--weights absent.pt", "absent.pt does not exist"),
        ("--weights classifier.pt", "no autoencoder"),
        ("--weights normed.pt", "which are no PReLUs"),
        ("--weights conv.pt", "names do not tell the network"),
        ("--weights pool.pt --trust", "gives (3, 3, 4, 4) for (3, 3, 8, 8)"),
        ("--weights pool.pt --trust --arch fc:2-1-2", "leave out --arch"),
        ("--arch fc:192-32-192", "but the tensors in"),
        ("--activation prelu", "has no slopes"),
        ("--shape 3x8", "--shape 3x8 is not of the form CxHxW"),
        ("--shape 3x9x9", "takes 192 numbers"),
        ("--masks random,hlaf", "unknown mask 'hlaf'"),
        ("--mask wide.png", "8x9"),
        ("--mask white.png", "missing"),
        ("--method niose_aware", "did you mean 'noise_aware'"),
        ("--set known.gamma=1", "noise_aware"),
        ("--set n_steps=-3", "n_steps=-3"),
        ("--mean 0.5,0.5", "2 numbers for 3 channels"),
        ("--mean grey", "--mean grey is no number"),
        ("--data folder:absent", "absent is not a folder"),
        ("--control folder:images", "are among the training images"),
        ("--degraded images", "give either --data"),
        ("--originals images", "--originals belong to --degraded"),
    ],
)
def test_bad_usage_ends_with_2_and_says_the_fix(
    palimpsest, monkeypatch, tmp_path: Path, files: AutoencoderFiles, more: str, said: str
) -> None:
    wrong_files(tmp_path, files)
    shutil.copytree(files.pictures, tmp_path / "images")
    monkeypatch.chdir(tmp_path)
    err = palimpsest.refused(*words(files, files.state_dict, tmp_path / "out", *more.split()))
    assert said in " ".join(err.split())
    assert not (tmp_path / "out").exists()


def test_methods_have_the_papers_settings_and_then_the_users() -> None:
    names = ("noise_aware", "unknown", "known", "iteration")
    plain = autoencoder_methods(names, architecture="fc:192-64-192 leaky_relu")
    assert plain == (NoiseAware(), UnknownMask(), KnownMask(), Iteration())
    unet = autoencoder_methods(names, architecture="unet:16-32, with skips leaky_relu")
    assert unet[1:3] == (UnknownMask(gamma=1.0, start="nothing"), KnownMask(gamma=1.0))
    prelu = autoencoder_methods(("unknown",), architecture="fc:192-64-192 prelu")
    assert prelu == (UnknownMask(gamma=0.1),)
    deep = autoencoder_methods(("known",), architecture="fc:" + "-".join(["192"] * 21))
    assert deep == (KnownMask(gamma=0.1),)
    noisy = autoencoder_methods(("known",), noise=0.02)
    assert noisy == (KnownMask(gamma=0.1, noisy=True),)
    changed = autoencoder_methods(
        names, settings={"gamma": ".3", "unknown.n_admm": "7", "gammas": "0.1,0.2"}
    )
    assert changed == (
        NoiseAware(gammas=(0.1, 0.2)), UnknownMask(gamma=0.3, n_admm=7), KnownMask(gamma=0.3),
        Iteration(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> ClassifierFiles:
    return make_classifier(tmp_path_factory.mktemp("classifier"))


def cut_words(cut: ClassifierFiles, out: Path, *more: object) -> list[object]:
    return ["attack", "inversion", "--weights", cut.exported, "--trust", "--out", out,
            "--data", f"folder:{cut.pictures}", "--public", f"folder:{cut.public}",
            "--device", "cpu", *more]  # fmt: skip


@pytest.mark.slow
def test_from_a_program_to_a_page(
    palimpsest, tmp_path: Path, cut: ClassifierFiles, prefect_server
) -> None:
    out = tmp_path / "out"
    start = cut_words(cut, out, "--cut", "first", "--steps", 100, "--threads", 1)
    shown = palimpsest.done(*start, "--set", "strong.zeta=0.001", "--set", "sgd.lr=100")
    assert {entry.name for entry in out.iterdir()} < ENTRIES
    record = json.loads((out / "inversion.json").read_bytes())
    paper, ours = record["attacks"]
    assert (paper["attack"], ours["attack"]) == ("sgd", "strong")
    assert (paper["settings"]["lr"], ours["settings"]["zeta"]) == (100.0, 0.001)
    assert ours["n_identified"] == N_CUT
    assert ours["summary"]["ssim"]["mean"] > 0.8 > ours["chance"]["ssim"]["mean"]
    assert 0 <= record["accuracy"] <= 1
    assert record["separability"]["minimum"] <= record["separability"]["mean"]
    text = " ".join(shown.split())
    assert f"{N_CUT} of {N_CUT} are more like their original" in text
    tensors = load_file(out / "reconstructions.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == dict.fromkeys(
        ("original", "sgd", "strong"), (N_CUT, 3, 16, 16)
    )
    page = Page(out / "report.html")
    page.check()
    assert page.n_first_words < FIRST_SCREEN
    assert len(page.images) == 3 * N_CUT
    assert f"SSIM of {ours['summary']['ssim']['mean']:.2f}" in "".join(page.text)

    # The same again gives the same pictures; one attack alone leaves no other's behind.
    before = (out / "reconstructions.safetensors").read_bytes()
    more = ("--set", "strong.zeta=0.001", "--set", "sgd.lr=100", "--fresh")
    palimpsest.done(*start, *more)
    assert (out / "reconstructions.safetensors").read_bytes() == before
    palimpsest.done(*start, "--attack", "paper")
    assert set(load_file(out / "reconstructions.safetensors")) == {"original", "sgd"}


def test_cuts_are_listed_without_an_attack(palimpsest, cut: ClassifierFiles) -> None:
    words = ["attack", "inversion", "--weights", cut.exported, "--trust"]
    assert "give --data" in palimpsest.refused(*words)
    shown = palimpsest.done(*words, "--cut", "list")
    assert "second.0" in shown
    assert "12x16x16" in shown
    assert "3,072" in shown


def test_the_papers_attack_has_its_settings_for_grey_and_colour() -> None:
    colour, ours = inversion_methods("both", channels=3)
    (grey,) = inversion_methods("paper", channels=1, n_steps=7)
    assert isinstance(colour, GradientInversion)
    assert isinstance(grey, GradientInversion)
    assert (colour.zeta, grey.zeta, grey.n_steps) == (0.01, 1e-5, 7)
    assert isinstance(ours, StrongInversion)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--cut frist", "no cut 'frist'"),
        ("--cut first --size 8", "window of 11x11"),
        ("--cut first --set sgd.rate=1", "unknown setting"),
        ("--cut first --mean grey", "--mean grey is no number"),
        ("--cut first --threads 0", "greater than or equal to 1"),
        ("--cut first --perceptual lpips", "names no network"),
    ],
)
def test_bad_cuts_start_no_server_and_leave_nothing_behind(
    palimpsest, monkeypatch, tmp_path: Path, cut: ClassifierFiles, more: str, said: str
) -> None:
    monkeypatch.setattr(attack_inversion, "attack_inversion", None)  # the flow
    out = tmp_path / "out"
    refused = palimpsest.refused(*cut_words(cut, out, *more.split(), "--steps", 2))
    assert said in " ".join(refused.split())
    assert not out.exists()
