"""`palimpsest study` of every kind: listed, priced, kept to, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from flows.study import STUDIES, study
from tests.flows.cli.test_study import PACE
from tests.flows.cli.test_study import words as small_grid

RUN = CliRunner()
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
        (small_grid(Path("s"))[1:], rf"1 cell, 4 attacks: about {TIME} of work on cpu, {TIME} on "),
        (["autoencoder", "--preset", "tiny", "--only", "fc3"],
         rf"fc3-leaky_relu .*7 units: at most about {TIME} of work on cpu, {TIME} on 1 workers"),
        (["inversion", "--preset", "tiny"],
         rf"digits 14 {TIME} {TIME} {TIME} .*6 cells: about {TIME} of work on cpu, {TIME} on 1 w"),
        (["span", "--preset", "tiny", "--only", "gradients"],
         rf"photographs 1 {TIME} .*1 row: about {TIME} of work on cpu, {TIME} on 1 workers"),
    ],
)  # fmt: skip
def test_a_dry_run_says_what_it_would_take_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.setattr("tasks.families.weights.study.settings.measured_pace", lambda _device: PACE)
    store = tmp_path / "study"
    asked = ["--store", str(store), "--workers", "1", "--device", "cpu", "--dry-run"]
    done = RUN.invoke(app, ["study", *words, *asked])
    assert done.exit_code == 0, done.output
    assert re.search(said, " ".join(done.stdout.split()))
    assert not store.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("multiclas", "unknown study 'multiclas'; did you mean 'multiclass'?"),
        ("losses --set experiment.trainng.epochs=3", "did you mean 'experiment.train"),
        ("losses --set n_attacks=7", "runs_per_part=4 does not divide n_attacks=7"),
        ("losses --set experiment.training.epochs=0", "epochs=0 must be at least 1"),
        ("losses --data svhn:nowhere", "nowhere"),
        ("large --data photos --set cells.0.images_per_run=5000", "cell '200 images"),
        ("autoencoder --set victim.training.epoch=3", "did you mean 'training.epochs'?"),
        ("autoencoder --set methods.unknown.gama=3", "did you mean 'methods.unknown.gamma'?"),
        ("autoencoder --set victim.training.epochs=0", "epochs=0 must be at least 1"),
        ("autoencoder --set victims.0.n_images=50000", "n_images=50000, but 'photos'"),
        ("autoencoder --only resnet", "unknown victim 'resnet'"),
        ("autoencoder --set masks=rndom", "noise.mask='random' is none of masks"),
        ("autoencoder --data svhn:nowhere", "nowhere"),
        ("inversion --set source.training.epoch=3", "did you mean 'training.epochs'?"),
        ("inversion --set digits.lam=3", "did you mean 'lams'?"),
        ("inversion --set strong.n_step=3", "did you mean 'strong.n_steps'?"),
        ("inversion --set source.training.epochs=0", "epochs=0 must be at least 1"),
        ("inversion --set digits.n_train=5000", "takes 504 images of each class"),
        ("inversion --only mnist", "unknown source 'mnist'"),
        ("inversion --data svhn:nowhere", "nowhere"),
        ("span --set rows.0.optimiser=Adm", "optimiser='Adm' is none of ['SGD', "),
        ("span --set rows.0.n=1", "n=1 must be at least 2"),
        ("span --set rows.0.n=5000", "5000 images and as many decoys are more than the "),
        ("span --set rows.0.images=faces", "images='faces' is none of the kinds"),
        ("span --set kinds.photographs.dat=photos", "did you mean 'kinds.photographs.data'?"),
        ("span --set rows.1.has=checkpoint", "two rows are 'photographs, 20, SGD, momentum, check"),
        ("span --only mine", "rows of one's own pictures need --data"),
        ("span --data svhn:nowhere", "nowhere"),
    ],
)
def test_bad_input_is_said_in_one_line(words: str, said: str, tmp_path: Path) -> None:
    has_tiny = words.split(maxsplit=1)[0] in ("autoencoder", "inversion", "span")
    tiny = ["--preset", "tiny"] if has_tiny else []
    done = RUN.invoke(app, ["study", *words.split(), *tiny, "--store", str(tmp_path / "s")])
    assert done.exit_code != 0
    assert said in str(done.exception)
    assert not (tmp_path / "s").exists()


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
        assert STUDIES[name].from_json(json.loads(json.dumps(STUDIES[name].to_json(made)))) == made


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
        ("inversion", "", {"digits.eps": 1e-4}, " --set digits.eps=0.0001"),
        ("span", "mine", {"kinds.mine.size": 24}, " --only mine --set kinds.mine.size=24"),
        ("inversion", "", {"source.lams": "0.5,1"}, " --set 'digits.lams=[0.5, 1.0]'"),
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
