"""`palimpsest study` of every kind, and `audit`: listed, priced, run from nothing to a page and
again for free, kept to, and with units that fail."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.papers import studies
from benchmarks.results.page import build_pages
from flows.audit import AUDIT
from flows.cli.main import app
from flows.families.weights.study import GRID_NAMES
from flows.settings import validated
from flows.study import STUDIES, UnitsFailedError, kind_of, study
from recon_core.victims.separability import MixCon
from tasks.families.inversion.study.record import sweet_spots
from tasks.families.inversion.study.settings import Cell
from tasks.families.weights.study.figure_specs import describe_figures, kernels_of
from tests.flows.conftest import Command

RUN = CliRunner()
TINY = {
    "n_victims": "2",
    "n_attacks": "2",
    "runs_per_part": "2",
    "n_tests": "20",
    "cells.0.images_per_run": "20",
    "experiment.n_classes": "4",
    "experiment.victim.widths": "12,12",
    "experiment.training.epochs": "30",
    "experiment.training.batch_size": "7",
    "experiment.attack.n_candidates": "20",
    "experiment.attack.save_at": "4",
}
"""Makes of `large` one cell of two victims with 20 images of four classes."""


def sets(settings: dict[str, str]) -> list[str]:
    return [word for item in settings.items() for word in ("--set", "=".join(item))]


def small_grid(store: Path, *more: str) -> list[str]:
    return ["study", "large", "--data", "photos", "--store", str(store), "--workers", "1",
            "--device", "cpu", *sets(TINY), *more]  # fmt: skip


AUDIT_SETTINGS = {
    "recipe.n_images": "8", "recipe.victim.widths": "32,32", "recipe.training.epochs": "300",
    "n_victims": "4", "n_tests": "40", "attacks": "span,loss,likelihood_ratio",
}  # fmt: skip
TINY_AUDIT = ["--quick", "--data", "photos", "--only", "int8", "--workers", "1", "--device", "cpu",
              *sets(AUDIT_SETTINGS)]  # fmt: skip
"""Makes of the quick size two cells of four small networks."""


def test_a_study_goes_from_images_to_a_page_and_is_not_repeated(tmp_path: Path) -> None:
    store = tmp_path / "study"
    done = RUN.invoke(app, small_grid(store))
    assert done.exit_code == 0, done.output
    assert "200 images, width 500" in done.stdout  # a cell keeps its name
    assert "Some of very many images come back" in " ".join(done.stdout.split())
    assert {path.name for path in store.iterdir()} == STUDIES["large"].entries
    record = json.loads((store / "study.json").read_bytes())
    assert (record["name"], record["preset"]) == ("large", "cpu")
    (cell,) = record["cells"]
    assert (cell["n_images"], cell["victims"], cell["targets"]["n"]) == (20, [0, 1], 40)
    assert sum(cell["outcomes"].values()) == 4
    assert len(record["claims"]) == 3
    assert all(n is not None for n in cell["victim"]["test_accuracy"])
    page = (store / "study.html").read_text()
    assert "Many images" in page
    before = {path: path.stat().st_mtime_ns for path in (store / "heldout").rglob("*.json")}
    again = RUN.invoke(app, ["study", "large", "--store", str(store), "--device", "cpu"])
    assert again.exit_code == 0, again.output  # with the settings of the store
    assert before == {path: path.stat().st_mtime_ns for path in before}
    same = json.loads((store / "study.json").read_bytes())
    for name in ("cells", "images", "claims", "settings", "fingerprint"):
        assert same[name] == record[name]


def test_some_cells_of_a_study(tmp_path: Path) -> None:
    made = study("multiclass", "cpu", {"cells.0.images_per_run": 6}, only="2 classes, 5 each")
    (cell,) = made.cells
    assert made.only == cell.name == "2 classes, 5 each"
    assert cell.images_per_run == 6
    assert kind_of("multiclass").resolve(None, {}, tmp_path, only="5 each").only == "5 each"
    for name in GRID_NAMES:
        some = study(name, "cpu", only=study(name, "cpu").cells[0].name)
        (figure,) = describe_figures(some)
        assert figure["cells"] == tuple(range(len(some.cells)))
        assert kernels_of(some) == []
    with pytest.raises(ValueError, match="unknown cell '7 classes'"):
        study("multiclass", "cpu", only="7 classes")


TIME = r"[\d.]+ (s|min)"


def test_every_study_is_listed_with_its_sizes() -> None:
    shown = " ".join(RUN.invoke(app, ["study", "list"]).stdout.split())
    for name, kind in STUDIES.items():
        assert name in shown
        assert kind.paper in shown
    for size in ("60 cells, 18,000 attacks", "8 autoencoders, 6 masks", "3 sources, 192 cells"):
        assert f"paper: {size}" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (small_grid(Path("s")), rf"1 cell, 4 attacks: about {TIME} of work on cpu, {TIME} on "),
        (["study", "autoencoder", "--preset", "tiny", "--only", "fc3"],
         rf"fc3-leaky_relu .*7 units: at most about {TIME} of work on cpu, {TIME} on 1 workers"),
        (["study", "inversion", "--preset", "tiny"],
         rf"digits 14 {TIME} {TIME} {TIME} .*\d+ units: about {TIME} of work on cpu, {TIME} on 1"),
        (["study", "span", "--preset", "tiny", "--only", "gradients"],
         rf"photographs 1 {TIME} .*\d+ units: about {TIME} of work on cpu, {TIME} on 1 workers"),
        (["audit", *TINY_AUDIT],
         rf"as it is 8 4 4 {TIME} {TIME} .*weights.* 8 4 4 .*10 units: about {TIME} of work"),
    ],
)  # fmt: skip
def test_a_dry_run_says_what_it_would_take_and_makes_nothing(
    tmp_path: Path, words: list[str], said: str
) -> None:
    store = tmp_path / "study"
    asked = ["--store", str(store), "--workers", "1", "--device", "cpu", "--dry-run"]
    done = RUN.invoke(app, [*words, *asked])
    assert done.exit_code == 0, done.output
    assert re.search(said, " ".join(done.stdout.split()))
    assert not store.exists()


@pytest.mark.parametrize(
    ("name", "preset", "kept", "more"),
    [
        ("losses", "cpu", {"seed": 5}, {"n_attacks": 8}),
        ("autoencoder", "tiny", {"root_seed": 5}, {"n_shown": 1}),
        ("inversion", "tiny", {"root_seed": 5}, {"n_shown": 1}),
        ("span", "tiny", {"victim.seed": 5}, {"n_shown": 1}),
    ],
)
def test_a_store_keeps_to_its_study(
    name: str, preset: str, kept: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    made = study(name, preset, kept)
    (tmp_path / "settings.json").write_text(json.dumps(STUDIES[name].to_json(made)))
    assert STUDIES[name].resolve(None, {}, tmp_path) == made
    assert STUDIES[name].resolve(None, more, tmp_path) == study(name, preset, kept | more)
    assert STUDIES[name].resolve(preset, {}, tmp_path) == study(name, preset)
    (tmp_path / "settings.json").write_text(json.dumps({"name": "width"}))
    with pytest.raises(ValueError, match=f"holds study 'width', not '{name}'"):
        STUDIES[name].resolve(None, {}, tmp_path)


@pytest.mark.parametrize("name", STUDIES)
def test_settings_survive_json(name: str) -> None:
    for preset in STUDIES[name].presets:
        made = study(name, preset)
        assert STUDIES[name].changed(made, {}) == made
        tree = json.loads(json.dumps(STUDIES[name].to_json(made)))
        assert validated(STUDIES[name].settings, tree) == made


@pytest.mark.parametrize(
    ("name", "only", "settings", "said"),
    [
        ("losses", "10 images", {}, " --only '10 images'"),
        ("losses", "", {"n_victims": 5, "seed": 2}, " --set seed=2 --set n_victims=5"),
        ("losses", "", {"cells.1.experiment.attack.alpha": 7.5},
         " --set cells.1.experiment.attack.alpha=7.5"),
        ("autoencoder", "unet", {}, " --only unet"),
        ("autoencoder", "fc3", {"root_seed": 3}, " --only fc3 --set root_seed=3"),
        ("autoencoder", "", {"methods.ddnm": "null"}, " --set methods.ddnm=null"),
        ("autoencoder", "", {"victims.1.gamma": 0.25}, " --set victims.1.gamma=0.25"),
        ("autoencoder", "", {"noise": None}, " --set noise=null"),
        ("inversion", "", {"chain": "null"}, " --set chain=null"),
        ("inversion", "", {"digits.eps": 1e-4}, " --set sources.0.eps=0.0001"),
        ("span", "mine", {"kinds.mine.size": 24}, " --only mine --set kinds.mine.size=24"),
        ("inversion", "", {"source.lams": "0.5,1"}, " --set 'sources.0.lams=[0.5, 1.0]'"),
    ],
)  # fmt: skip
def test_the_command_of_a_study_makes_it_again(
    name: str, only: str, settings: dict[str, Any], said: str
) -> None:
    preset = "cpu" if name == "losses" else "tiny"
    made = study(name, preset, {"data": "folder:x", **settings}, only=only)
    text = STUDIES[name].command(made)
    assert text == f"palimpsest study {name} --preset {preset} --data folder:x{said}"
    words = shlex.split(text)
    chosen = dict(w.split("=", 1) for k, w in enumerate(words) if words[k - 1] == "--set")
    assert study(name, preset, {"data": "folder:x", **chosen}, only=only) == made


FEW = {
    "autoencoder": ["--set", "victim.training.epochs=400", "--set", "masks=random,window",
                    "--set", "methods.unknown.n_alternations=2"],
    "inversion": [],
}  # fmt: skip
"""Makes of the smallest preset something that takes a few seconds."""


def tiny_study(kind: str, store: Path, *more: str) -> list[str]:
    return ["study", kind, "--preset", "tiny", "--store", str(store), "--workers", "1",
            "--device", "cpu", *FEW[kind], *more]  # fmt: skip


def made_twice(kind: str, store: Path, *more: str, said: str, kept: tuple[str, ...]) -> Any:
    """The record of a study, which is the same when it is run again and makes nothing anew."""
    done = RUN.invoke(app, tiny_study(kind, store, *more))
    assert done.exit_code == 0, done.output
    assert said in " ".join(done.stdout.split())
    entries, file = STUDIES[kind].entries, store / STUDIES[kind].record
    assert {path.name for path in store.iterdir()} == entries - {"control.json"}
    record = json.loads(file.read_bytes())
    assert (record["preset"], record["failed"]) == ("tiny", [])
    before = {path: path.stat().st_mtime_ns for name in kept for path in (store / name).rglob("*")}
    again = RUN.invoke(app, ["study", kind, "--store", str(store), "--device", "cpu"])
    assert again.exit_code == 0, again.output  # with the settings of the store
    assert before == {path: path.stat().st_mtime_ns for name in kept
                      for path in (store / name).rglob("*")}  # fmt: skip
    assert {**json.loads(file.read_bytes()), "created": ""} == {**record, "created": ""}
    return record


def results_page(paper: str, store: Path, record: str, other_cells: list[Any]) -> str:
    """The results page of the study alone; what is no study of its kind, or has other claims than
    its numbers give, is refused."""
    out, changed = store.parent / "claims.json", store.parent / record
    studies.main([str(store), "--json", str(out)])
    text = (store / record).read_text()
    pages = build_pages({f"claims/{paper}.json": out.read_text(), f"studies/a/{record}": text})
    page = pages[f"{paper}.md"]
    made = json.loads(text)
    assert f"### {made['title']}" in page
    assert all(claim["rule"] in page for claim in made["claims"])
    changed.write_text(json.dumps({**made, "cells": other_cells}))
    with pytest.raises(ValueError, match="are not what its numbers give"):
        studies.read_study(changed)
    with pytest.raises(ValueError, match="make the study again"):
        build_pages({f"studies/a/{record}": "{}"})
    return page


@pytest.mark.slow
def test_recoveries_go_from_images_to_the_results_page_once(
    tmp_path: Path, prefect_server: None
) -> None:
    store, kept = tmp_path / "study", ("victims", "inpainter", "cells")
    said = "Test images are not recovered accurately"
    record = made_twice("autoencoder", store, said=said, kept=kept)
    assert {c["method"] for c in record["cells"]} == {m["name"] for m in record["methods"]}
    assert len(record["methods"]) == 6
    with np.load(store / "recovery-pictures.npz") as arrays:
        for shown in record["shown"]:
            place = f"{shown['victim']}/{shown['level']:g}/{shown['mask']}/{shown['sigma']:g}"
            assert f"{place}/ddnm" in arrays
    cells = [c for c in record["cells"] if (c["victim"], c["method"], c["split"], c["sigma"])
             == ("fc3-leaky_relu", "known", "train", 0.0)]  # fmt: skip
    level = min(c["level"] for c in cells)
    n_close = sum(c["n_approximate"] for c in cells if c["level"] == level)
    page = results_page("autoencoder", store, "recovery.json", [])
    assert f"| paper, mask known | 0 of 12 | {n_close} of 12 |" in page


@pytest.mark.slow
def test_inversions_go_from_images_to_the_results_page_once(
    tmp_path: Path, prefect_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    confirmed = Cell("digits", 2, MixCon(lam=0.1, beta=1e-2))  # has one network until it is chosen
    monkeypatch.setattr(
        "flows.families.inversion.study.sweet_spots",
        lambda plan: {**sweet_spots(plan), ("digits", "confirmed"): confirmed},
    )
    store, more = tmp_path / "study", ("--set", "n_seeds=3")
    said = "At matched accuracy MixCon lowers SSIM"
    record = made_twice("inversion", store, *more, said=said, kept=("products",))
    assert [a["name"] for a in record["attacks"]] == ["paper", "tuned", "strong", "restored"]
    assert len(record["sweet_spots"]) == 2
    cell = next(c for c in record["cells"] if c["defence"]["lam"] == 0.1)
    assert len(cell["attacks"]["strong"]["ssim"]["values"]) == 3
    with np.load(store / "inversion-pictures.npz") as arrays:
        assert arrays["digits/original"].shape == (3, 16, 16)
    first, *others = record["cells"]
    spoiled = {**first, "accuracy": {**first["accuracy"], "mean": 0.0}, "seeds": []}
    page = results_page("mixcon", store, "inversion.json", [spoiled, *others])
    assert f"{first['attacks']['strong']['ssim']['mean']:.3f} [" in page


def test_a_victim_that_fails_is_said_after_the_others_are_shown(
    tmp_path: Path, prefect_server: None
) -> None:
    store = tmp_path / "study"
    (store / "victims").mkdir(parents=True)
    (store / "victims/fc3-leaky_relu").write_text("a file where a folder has to be")
    done = RUN.invoke(app, tiny_study("autoencoder", store, "--set", "methods.ddnm=null"))
    assert isinstance(done.exception, UnitsFailedError)
    assert "train fc3-leaky_relu" in str(done.exception)
    record = json.loads((store / "recovery.json").read_bytes())
    assert [victim["name"] for victim in record["victims"]] == ["unet-softplus"]
    assert [entry["unit"] for entry in record["failed"]] == ["train fc3-leaky_relu"]
    assert (store / "recovery.html").is_file()


def test_scores_that_fail_are_said_and_networks_are_trained_and_tested(
    tmp_path: Path, prefect_server: None
) -> None:
    store, more = tmp_path / "study", ("perceptual=vgg16:none.pth", "chain=null")
    settings = [word for one in (*more, "source.cuts=2") for word in ("--set", one)]
    done = RUN.invoke(app, tiny_study("inversion", store, *settings))
    assert isinstance(done.exception, UnitsFailedError)
    assert "invert digits, cut 2, vanilla, seed 0" in str(done.exception)
    assert "none.pth" in str(done.exception)
    record = json.loads((store / "inversion.json").read_bytes())
    assert record["cells"][0]["accuracy"]["mean"] is not None
    assert record["cells"][0]["attacks"] == {}
    assert len(record["failed"]) == sum(len(cell["seeds"]) for cell in record["cells"])
    assert (store / "inversion.html").is_file()


@pytest.fixture
def audit(palimpsest: Command) -> Command:
    return palimpsest.of("audit")


def test_a_leak_above_a_limit_is_exit_code_3(
    audit: Command, tmp_path: Path, prefect_server: None
) -> None:
    store = tmp_path / "audit"
    code, said, complaint = audit(*TINY_AUDIT, "--out", store, "--fail-above", "good>0.0@fpr=0.05")
    assert code == 3, complaint
    text = " ".join(said.split())
    assert "palimpsest audit quick, 1 defence, 4 networks each, on photos" in text
    assert re.search(r"fails: good>0.0@fpr=0.05 is [01]\.\d\d\d by span", text)
    assert "training images come back well" in text
    for name in ("audit.html", "audit.json", "audit-junit.xml", "model-card.md"):
        assert (store / name).is_file()
        assert str((store / name).absolute()) in said
    assert {path.name for path in store.iterdir()} == AUDIT.entries - {"control.json"}
    record = json.loads((store / "audit.json").read_bytes())
    assert record["verdict"]["sentence"] in text
    (check,) = record["checks"]
    assert (check["condition"], check["outcome"]) == ("good>0.0@fpr=0.05", "fails")
    suite = ET.fromstring((store / "audit-junit.xml").read_bytes())[0]
    assert (suite.get("tests"), suite.get("failures")) == ("1", "1")
    assert record["verdict"]["sentence"] in (store / "model-card.md").read_text()
    assert record["verdict"]["sentence"] in (store / "audit.html").read_text()
    products = {path: path.stat().st_mtime_ns for path in (store / "products").iterdir()}

    limits = ("--fail-above", "good>1@fpr=0.01", "--fail-above", "found>1@fpr=0.01")
    said = audit.done("--out", store, "--workers", "1", "--device", "cpu", *limits)
    assert "passes: good>1@fpr=0.01" in " ".join(said.split())
    assert {p: p.stat().st_mtime_ns for p in (store / "products").iterdir()} == products
    again = json.loads((store / "audit.json").read_bytes())
    assert [check["outcome"] for check in again["checks"]] == ["passes"] * 2
    assert again["cells"] == record["cells"]

    refused = audit.refused("--out", store, "--fresh", "--data", "svhn:nowhere")
    assert "nowhere" in refused
    assert {p: p.stat().st_mtime_ns for p in (store / "products").iterdir()} == products
