"""`palimpsest study inversion`: listed, priced, run from nothing, and run again for free."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.papers import mixcon as claims_003
from flows.cli.main import app
from flows.families.inversion.grids import PRESETS
from flows.families.inversion.study import INVERSION
from flows.study import UnitsFailedError
from recon_core.victims.separability import MixCon
from tasks.families.inversion.study.record import sweet_spots
from tasks.families.inversion.study.settings import Cell
from tests.benchmarks.pages import build_page

RUN = CliRunner()
inversion_study, resolve_inversion = INVERSION.named, INVERSION.resolve
changed, command, to_json = INVERSION.changed, INVERSION.command, INVERSION.to_json


def words(store: Path, *more: str) -> list[str]:
    return ["study", "inversion", "--preset", "tiny", "--store", str(store), "--workers", "1",
            "--device", "cpu", *more]  # fmt: skip


def test_it_is_listed_with_its_sizes() -> None:
    shown = " ".join(RUN.invoke(app, ["study", "list"]).stdout.split())
    assert "inversion A client sends the features of an image" in shown
    assert "paper: 3 sources, 192 cells" in shown


def test_a_dry_run_says_what_it_would_take_and_makes_nothing(tmp_path: Path) -> None:
    store = tmp_path / "study"
    done = RUN.invoke(app, words(store, "--dry-run"))
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    time = r"[\d.]+ (s|min)"
    assert re.search(rf"digits 14 {time} {time} {time}", text)
    assert re.search(rf"6 cells: about {time} of work on cpu, {time} on 1 workers", text)
    assert not store.exists()


@pytest.mark.slow
def test_a_study_goes_from_images_to_a_page_and_is_not_repeated(
    tmp_path: Path, prefect_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    confirmed = Cell("digits", 2, MixCon(lam=0.1, beta=1e-2))  # has one network until it is chosen
    monkeypatch.setattr(
        "flows.families.inversion.study.sweet_spots",
        lambda plan: {**sweet_spots(plan), ("digits", "confirmed"): confirmed},
    )
    store = tmp_path / "study"
    done = RUN.invoke(app, words(store, "--set", "n_seeds=3"))
    assert done.exit_code == 0, done.output
    assert "At matched accuracy MixCon lowers SSIM" in " ".join(done.stdout.split())
    assert {path.name for path in store.iterdir()} == INVERSION.entries - {"control.json"}
    record = json.loads((store / "inversion.json").read_bytes())
    assert (record["schema"], record["preset"]) == ("palimpsest-inversion", "tiny")
    assert [a["name"] for a in record["attacks"]] == ["paper", "tuned", "strong", "restored"]
    assert record["failed"] == []
    assert len(record["sweet_spots"]) == 2
    cell = next(c for c in record["cells"] if c["defence"]["lam"] == 0.1)
    assert len(cell["attacks"]["strong"]["ssim"]["values"]) == 3
    with np.load(store / "inversion-pictures.npz") as arrays:
        assert arrays["digits/original"].shape == (3, 16, 16)
    before = {path: path.stat().st_mtime_ns for path in (store / "products").iterdir()}
    again = RUN.invoke(app, ["study", "inversion", "--store", str(store), "--device", "cpu"])
    assert again.exit_code == 0, again.output  # with the settings of the store
    assert before == {path: path.stat().st_mtime_ns for path in (store / "products").iterdir()}
    same = json.loads((store / "inversion.json").read_bytes())
    assert {**same, "created": ""} == {**record, "created": ""}
    _on_the_results_page(store, tmp_path)


def _on_the_results_page(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "claims.json"
    claims_003.main([str(store), "--json", str(out)])
    text = (store / "inversion.json").read_text()
    page = build_page({"claims/mixcon.json": out.read_text(), "studies/a/inversion.json": text})
    record = json.loads(text)
    assert f"### {record['title']}" in page
    assert "# MixCon paper" in page
    for claim in record["claims"]:
        assert claim["rule"] in page
    mean = record["cells"][0]["attacks"]["strong"]["ssim"]["mean"]
    assert f"{mean:.3f} [" in page
    assert "| digits | 2 | no defence | vanilla" in page
    record["cells"][0]["accuracy"]["mean"] = 0.0
    record["cells"][0]["seeds"] = []
    (tmp_path / "inversion.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="are not what its numbers give"):
        claims_003.read_study(tmp_path / "inversion.json")
    with pytest.raises(ValueError, match="make the study again"):
        build_page({"studies/a/inversion.json": "{}"})


def test_a_unit_that_fails_is_said_after_the_others_are_shown(
    tmp_path: Path, prefect_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that cannot be read: nothing can be scored, but networks are trained and tested."""
    store = tmp_path / "study"
    done = RUN.invoke(
        app,
        words(store, "--set", "perceptual=vgg16:none.pth", "--set", "synthetic=null",
              "--set", "chain=null", "--set", "source.cuts=2"),
    )  # fmt: skip
    assert isinstance(done.exception, UnitsFailedError)
    assert "invert digits, cut 2, vanilla, seed 0" in str(done.exception)
    assert "none.pth" in str(done.exception)
    record = json.loads((store / "inversion.json").read_bytes())
    assert record["cells"][0]["accuracy"]["mean"] is not None
    assert record["cells"][0]["attacks"] == {}
    assert len(record["failed"]) == sum(len(cell["seeds"]) for cell in record["cells"])
    assert (store / "inversion.html").is_file()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "source.training.epoch=3"], "did you mean 'training.epochs'?"),
        (["--set", "digits.lam=3"], "did you mean 'lams'?"),
        (["--set", "strong.n_step=3"], "did you mean 'strong.n_steps'?"),
        (["--set", "source.training.epochs=0"], "epochs=0 must be at least 1"),
        (["--set", "digits.n_train=5000"], "n_train + n_public takes 504 images of each class"),
        (["--only", "mnist"], "unknown source 'mnist'"),
        (["--data", "svhn:nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_said_in_one_line(more: list[str], message: str, tmp_path: Path) -> None:
    done = RUN.invoke(app, words(tmp_path / "s", *more))
    assert done.exit_code != 0
    assert message in str(done.exception)
    assert not (tmp_path / "s").exists()


def test_a_store_keeps_to_its_study(tmp_path: Path) -> None:
    kept = inversion_study("tiny", {"root_seed": 5})
    (tmp_path / "settings.json").write_text(json.dumps(to_json(kept)))
    assert resolve_inversion(None, {}, tmp_path) == kept
    assert resolve_inversion(None, {"n_shown": 1}, tmp_path).root_seed == 5
    assert resolve_inversion("tiny", {}, tmp_path).root_seed == 42
    (tmp_path / "settings.json").write_text(json.dumps({"name": "width"}))
    with pytest.raises(ValueError, match="holds study 'width', not 'inversion'"):
        resolve_inversion(None, {}, tmp_path)


def test_settings_survive_json_and_unknown_ones_are_refused() -> None:
    for preset in PRESETS:
        made = inversion_study(preset)
        assert changed(made, {}) == made
    for name in ("sources.0.gama", "source.gama", "gama", "strong.gama"):
        with pytest.raises(ValueError, match="unknown setting"):
            inversion_study("tiny", {name: 1})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, ""),
        ({"root_seed": 3}, " --set root_seed=3"),
        ({"chain": "null"}, " --set chain=null"),
        ({"digits.eps": 1e-4}, " --set digits.eps=0.0001"),
        ({"data": "folder:x"}, " --data folder:x"),
        ({"source.lams": "0.5,1"}, " --set 'digits.lams=[0.5, 1.0]'"),
    ],
)
def test_the_command_of_a_study_makes_it_again(settings: dict[str, Any], said: str) -> None:
    made = inversion_study("tiny", settings)
    text = command(made)
    assert text == f"palimpsest study inversion --preset tiny{said}"
    words_ = shlex.split(text)
    chosen = dict(w.split("=", 1) for k, w in enumerate(words_) if words_[k - 1] == "--set")
    chosen |= {"data": words_[words_.index("--data") + 1]} if "--data" in words_ else {}
    assert inversion_study("tiny", chosen) == made


def test_the_papers_sizes_are_the_papers() -> None:
    """MixCon paper: sections 4.2 and 4.3, appendix C."""
    made = inversion_study("paper")
    at = {source.name: source for source in made.sources}
    assert {name: (s.chosen, s.attack.zeta, s.channels) for name, s in at.items()} == {
        "mnist": ((1.0, 1e-4), 1e-5, 1),
        "fashion-mnist": ((1.0, 1e-4), 1e-5, 1),
        "svhn": ((0.5, 1e-4), 0.01, 3),
    }
    for name, source in at.items():
        assert source.n_inverted == 100
        assert (source.training.lr, source.training.epochs, source.training.per_class) == (
            0.01, 20, 40)  # fmt: skip
        assert (source.attack.lr, source.attack.n_steps) == (10.0, 500)
        assert Cell(name, 2, MixCon(lam=100.0, beta=1e-8)) in source.cells()
    own = made.synthetic
    assert own is not None
    assert own.network("wider").widths == (500, 2, 2048)
    assert own.training.lr == 0.1
