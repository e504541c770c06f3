"""`palimpsest study autoencoder`: listed, priced, run from nothing, and run again for free."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.papers import autoencoder as claims_000
from flows.cli.main import app
from flows.families.autoencoder.grids import PRESETS
from flows.families.autoencoder.study import AUTOENCODER
from flows.study import UnitsFailedError
from tests.benchmarks.pages import build_page

RUN = CliRunner()
recovery_study, resolve_recovery = AUTOENCODER.named, AUTOENCODER.resolve
changed, command, to_json = AUTOENCODER.changed, AUTOENCODER.command, AUTOENCODER.to_json
FEW = ["--set", "victim.training.epochs=400", "--set", "masks=random,window",
       "--set", "methods.unknown.n_alternations=2"]  # fmt: skip
"""Makes of the smallest preset something that takes a few seconds."""


def words(store: Path, *more: str) -> list[str]:
    return ["study", "autoencoder", "--preset", "tiny", "--store", str(store), "--workers", "1",
            "--device", "cpu", *FEW, *more]  # fmt: skip


def test_it_is_listed_with_its_sizes() -> None:
    shown = " ".join(RUN.invoke(app, ["study", "list"]).stdout.split())
    assert "autoencoder paper, section 4" in shown
    assert "paper: 8 autoencoders, 6 masks" in shown


def test_a_dry_run_says_what_it_would_take_and_makes_nothing(tmp_path: Path) -> None:
    store = tmp_path / "study"
    done = RUN.invoke(app, words(store, "--dry-run", "--only", "fc3"))
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    assert "fc3-leaky_relu" in text
    assert "unet" not in text
    time = r"[\d.]+ (s|min)"
    assert re.search(rf"7 units: at most about {time} of work on cpu, {time} on 1 workers", text)
    assert not store.exists()


@pytest.mark.slow
def test_a_study_goes_from_images_to_a_page_and_is_not_repeated(
    tmp_path: Path, prefect_server: None
) -> None:
    store = tmp_path / "study"
    done = RUN.invoke(app, words(store))
    assert done.exit_code == 0, done.output
    assert "Test images are not recovered accurately" in " ".join(done.stdout.split())
    assert {path.name for path in store.iterdir()} == AUTOENCODER.entries - {"control.json"}
    record = json.loads((store / "recovery.json").read_bytes())
    assert (record["schema"], record["preset"]) == ("palimpsest-recovery", "tiny")
    assert {c["method"] for c in record["cells"]} == {m["name"] for m in record["methods"]}
    assert len(record["methods"]) == 6
    assert record["failed"] == []
    with np.load(store / "recovery-pictures.npz") as arrays:
        for shown in record["shown"]:
            place = f"{shown['victim']}/{shown['level']:g}/{shown['mask']}/{shown['sigma']:g}"
            assert f"{place}/ddnm" in arrays
    kept = ("victims", "inpainter", "cells")
    before = {path: path.stat().st_mtime_ns for name in kept for path in (store / name).rglob("*")}
    again = RUN.invoke(app, ["study", "autoencoder", "--store", str(store), "--device", "cpu"])
    assert again.exit_code == 0, again.output  # with the settings of the store
    assert before == {path: path.stat().st_mtime_ns for path in before}
    same = json.loads((store / "recovery.json").read_bytes())
    assert {**same, "created": ""} == {**record, "created": ""}
    _on_the_results_page(store, tmp_path)


def _on_the_results_page(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "claims.json"
    claims_000.main([str(store), "--json", str(out)])
    text = (store / "recovery.json").read_text()
    page = build_page({"claims/autoencoder.json": out.read_text(), "studies/a/recovery.json": text})
    record = json.loads(text)
    assert f"### {record['title']}" in page
    assert "# Autoencoder paper" in page
    for claim in record["claims"]:
        assert claim["rule"] in page
    cells = [c for c in record["cells"] if (c["victim"], c["method"], c["split"], c["sigma"])
             == ("fc3-leaky_relu", "known", "train", 0.0)]  # fmt: skip
    level = min(c["level"] for c in cells)
    n_close = sum(c["n_approximate"] for c in cells if c["level"] == level)
    assert f"| paper, mask known | 0 of 12 | {n_close} of 12 |" in page
    record["cells"] = []
    (tmp_path / "recovery.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="are not what its numbers give"):
        claims_000.read_study(tmp_path / "recovery.json")
    with pytest.raises(ValueError, match="make the study again"):
        build_page({"studies/a/recovery.json": "{}"})


def test_a_unit_that_fails_is_said_after_the_others_are_shown(
    tmp_path: Path, prefect_server: None
) -> None:
    store = tmp_path / "study"
    (store / "victims").mkdir(parents=True)
    (store / "victims/fc3-leaky_relu").write_text("a file where a folder has to be")
    done = RUN.invoke(app, words(store, "--set", "methods.ddnm=null"))
    assert isinstance(done.exception, UnitsFailedError)
    assert "train fc3-leaky_relu" in str(done.exception)
    record = json.loads((store / "recovery.json").read_bytes())
    assert [victim["name"] for victim in record["victims"]] == ["unet-softplus"]
    assert [entry["unit"] for entry in record["failed"]] == ["train fc3-leaky_relu"]
    assert (store / "recovery.html").is_file()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "victim.training.epoch=3"], "did you mean 'training.epochs'?"),
        (["--set", "methods.unknown.gama=3"], "did you mean 'methods.unknown.gamma'?"),
        (["--set", "victim.training.epochs=0"], "epochs=0 must be at least 1"),
        (["--set", "victims.0.n_images=50000"], "n_images=50000, but 'photos'"),
        (["--only", "resnet"], "unknown victim 'resnet'"),
        (["--set", "masks=rndom"], "noise.mask='random' is none of masks"),
        (["--data", "svhn:nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_said_in_one_line(more: list[str], message: str, tmp_path: Path) -> None:
    start = ["study", "autoencoder", "--preset", "tiny", "--store", str(tmp_path / "s")]
    done = RUN.invoke(app, [*start, *more])
    assert done.exit_code != 0
    assert message in str(done.exception)
    assert not (tmp_path / "s").exists()


def test_a_store_keeps_to_its_study(tmp_path: Path) -> None:
    kept = recovery_study("tiny", {"root_seed": 5})
    (tmp_path / "settings.json").write_text(json.dumps(to_json(kept)))
    assert resolve_recovery(None, {}, tmp_path) == kept
    assert resolve_recovery(None, {"n_shown": 1}, tmp_path).root_seed == 5
    assert resolve_recovery("tiny", {}, tmp_path).root_seed == 42
    (tmp_path / "settings.json").write_text(json.dumps({"name": "width"}))
    with pytest.raises(ValueError, match="holds study 'width', not 'autoencoder'"):
        resolve_recovery(None, {}, tmp_path)


def test_settings_survive_json_and_unknown_ones_are_refused() -> None:
    for preset in PRESETS:
        made = recovery_study(preset)
        assert changed(made, {}) == made
        tree = json.loads(json.dumps(to_json(made)))
        assert tree["victims"][0]["network"]["kind"] == "fc"
    for name in ("victims.0.gama", "victim.gama", "gama", "methods.known.gama"):
        with pytest.raises(ValueError, match="unknown setting"):
            recovery_study("tiny", {name: 1})


@pytest.mark.parametrize(
    ("settings", "only", "said"),
    [
        ({}, "", ""),
        ({}, "unet", " --only unet"),
        ({"root_seed": 3}, "fc3", " --only fc3 --set root_seed=3"),
        ({"methods.ddnm": "null"}, "", " --set methods.ddnm=null"),
        ({"victims.1.gamma": 0.25}, "", " --set victims.1.gamma=0.25"),
        ({"noise": None}, "", " --set noise=null"),
    ],
)
def test_the_command_of_a_study_makes_it_again(
    settings: dict[str, Any], only: str, said: str
) -> None:
    made = recovery_study("tiny", {"data": "folder:x", **settings}, only=only)
    text = command(made)
    assert text == f"palimpsest study autoencoder --preset tiny --data folder:x{said}"
    words_ = shlex.split(text)
    chosen = dict(w.split("=", 1) for k, w in enumerate(words_) if words_[k - 1] == "--set")
    assert recovery_study("tiny", {"data": "folder:x", **chosen}, only=only) == made


def test_settings_of_every_victim_are_set_where_there_are_such() -> None:
    made = recovery_study("tiny", {"victim.training.epochs": 7, "victim.network.width": 5})
    assert {victim.training.epochs for victim in made.victims} == {7}
    assert made.victims[0].network.width == 5  # type: ignore[union-attr]


def test_the_papers_sizes_are_the_papers() -> None:
    """Autoencoder paper: section 4, appendices C and D.2."""
    made = recovery_study("paper")
    at = {victim.name: victim for victim in made.victims}
    assert {name: (v.n_images, v.gamma, v.start) for name, v in at.items()} == {
        "fc10-leaky_relu": (600, 0.5, "random"),
        "fc10-prelu": (600, 0.1, "random"),
        "fc20-leaky_relu": (600, 0.1, "random"),
        **{f"unet-{a}": (50, 1.0, "nothing") for a in ("leaky_relu", "prelu", "softplus")},
        "fc20-leaky_relu-moderate": (25_000, 0.1, "random"),
        "unet-softplus-moderate": (1_000, 1.0, "nothing"),
    }
    assert made.wanted(at["fc10-prelu"]) == (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
    assert made.wanted(at["unet-softplus-moderate"]) == (1e-4,)
    assert made.source_of(at["fc10-prelu"])[1] == 64
    assert made.source_of(at["unet-prelu"]) == ("svhn:svhn", 32)
    assert made.noise is not None
    assert (made.noise.sigma, made.noise.gamma, made.noise.mask) == (0.02, 0.1, "random")
    assert made.root_seed == 42
    some = recovery_study("paper", only="unet")
    assert some.noise is None  # figure G.1 is of fully connected networks
