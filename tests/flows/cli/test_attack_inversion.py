"""`palimpsest attack inversion`: from a file and a folder to a page, and how it is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file

from flows.attack_methods import inversion_methods
from flows.cli.attack_file import ENTRIES
from flows.families.inversion import attack as attack_inversion
from recon_core.attacks.inversion.feature_matching import GradientInversion
from recon_core.attacks.inversion.strong_inversion import StrongInversion
from tests.tasks.families.inversion.classifier_files import (
    N_IMAGES,
    ClassifierFiles,
    make_classifier,
)
from tests.tasks.pages import FIRST_SCREEN, Page


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ClassifierFiles:
    return make_classifier(tmp_path_factory.mktemp("classifier"))


def words(files: ClassifierFiles, out: Path, *more: object) -> list[object]:
    return ["attack", "inversion", "--weights", files.exported, "--trust", "--out", out,
            "--data", f"folder:{files.pictures}", "--public", f"folder:{files.public}",
            "--device", "cpu", *more]  # fmt: skip


@pytest.mark.slow
def test_from_a_program_to_a_page(
    palimpsest, tmp_path: Path, files: ClassifierFiles, prefect_server
) -> None:
    out = tmp_path / "out"
    start = words(files, out, "--cut", "first", "--steps", 100, "--threads", 1)
    shown = palimpsest.done(*start, "--set", "strong.zeta=0.001", "--set", "sgd.lr=100")
    assert {entry.name for entry in out.iterdir()} < ENTRIES
    record = json.loads((out / "inversion.json").read_bytes())
    paper, ours = record["attacks"]
    assert (paper["attack"], ours["attack"]) == ("sgd", "strong")
    assert (paper["settings"]["lr"], ours["settings"]["zeta"]) == (100.0, 0.001)
    assert ours["n_identified"] == N_IMAGES
    assert ours["summary"]["ssim"]["mean"] > 0.8 > ours["chance"]["ssim"]["mean"]
    assert 0 <= record["accuracy"] <= 1
    assert record["separability"]["minimum"] <= record["separability"]["mean"]
    text = " ".join(shown.split())
    assert f"{N_IMAGES} of {N_IMAGES} are more like their original" in text
    tensors = load_file(out / "reconstructions.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == dict.fromkeys(
        ("original", "sgd", "strong"), (N_IMAGES, 3, 16, 16)
    )
    page = Page(out / "report.html")
    assert page.n_first_words < FIRST_SCREEN
    assert not [a for a in page.addresses if not a.startswith(("data:", "#"))]
    assert len(page.images) == 3 * N_IMAGES
    assert f"SSIM of {ours['summary']['ssim']['mean']:.2f}" in "".join(page.text)
    with Image.open(out / "reconstructions.png") as sheet:
        assert sheet.width > 600

    # The same again gives the same pictures; one attack alone leaves no other's behind.
    before = (out / "reconstructions.safetensors").read_bytes()
    more = ("--set", "strong.zeta=0.001", "--set", "sgd.lr=100", "--fresh")
    palimpsest.done(*start, *more)
    assert (out / "reconstructions.safetensors").read_bytes() == before
    palimpsest.done(*start, "--attack", "paper")
    assert set(load_file(out / "reconstructions.safetensors")) == {"original", "sgd"}


def test_cuts_are_listed_without_an_attack(palimpsest, files: ClassifierFiles) -> None:
    words = ["--weights", files.exported, "--trust", "--cut", "list"]
    shown = palimpsest.done("attack", "inversion", *words)
    assert "second.0" in shown
    assert "12x16x16" in shown
    assert "3,072" in shown


def test_refusals_start_no_server_and_leave_nothing_behind(
    palimpsest, monkeypatch, tmp_path: Path, files: ClassifierFiles
) -> None:
    monkeypatch.setattr(attack_inversion, "attack_inversion", None)  # the flow
    out = tmp_path / "out"
    for more, said in [
        (["--cut", "frist"], "no cut 'frist'"),
        (["--cut", "first", "--size", 8], "window of 11x11"),
        (["--cut", "first", "--set", "sgd.rate=1"], "unknown setting"),
        (["--cut", "first", "--mean", "grey"], "--mean grey is no number"),
        (["--cut", "first", "--threads", 0], "greater than or equal to 1"),
        (["--cut", "first", "--perceptual", "lpips"], "names no network"),
    ]:
        code, _shown, err = palimpsest(*words(files, out, *more, "--steps", 2))
        assert code == 2, (more, err)
        assert said in " ".join(err.split())
        assert not out.exists()
    err = palimpsest.refused("attack", "inversion", "--weights", files.exported, "--trust")
    assert "give --data" in err


def test_the_papers_attack_has_its_settings_for_grey_and_colour() -> None:
    colour, ours = inversion_methods("both", channels=3)
    (grey,) = inversion_methods("paper", channels=1, n_steps=7)
    assert isinstance(colour, GradientInversion)
    assert isinstance(grey, GradientInversion)
    assert (colour.zeta, grey.zeta, grey.n_steps) == (0.01, 1e-5, 7)
    assert isinstance(ours, StrongInversion)
