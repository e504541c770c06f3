"""`flows.audit`: presets, settings and their command, and an audit that goes on where it was."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from flows.audit import AUDIT, PRESETS, given_settings, recipe_settings
from flows.cli.main import app
from flows.study import LimitExceededError, run_study
from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.victims.network import Conv
from tasks.audit.recipe import Private
from tasks.audit.settings import Audit, Defence
from tasks.cluster.workers import Workers

OWN = [
    {"name": "early", "group": "stop", "about": "Ends early.", "scale": {"training.epochs": 0.1}},
    {"name": "noise", "group": "release", "about": "It's noisy.", "set": {"released.noise": 0.3}},
]
TINY: dict[str, Any] = {
    "data": "photos", "n_victims": 4, "n_tests": 100,
    "attacks": ["span", "loss", "likelihood_ratio"],
    "recipe": {"n_images": 8, "victim": {"widths": [32, 32]}, "training": {"epochs": 300}},
    "defences": [*OWN, {"name": "large steps", "group": "own", "about": "It diverges.",
                        "set": {"training.optimiser.lr": 1e30}}],
}  # fmt: skip


def asked_for(command: str, monkeypatch: pytest.MonkeyPatch) -> Audit:
    """The audit that a command makes, which is not run."""

    class Planned(Exception):
        pass

    def plan(_kind: Any, made: Audit, *_rest: Any) -> None:
        raise Planned(made)

    monkeypatch.setattr(type(AUDIT), "plan", plan)
    first, *words = shlex.split(command)
    assert first == "palimpsest"
    done = CliRunner().invoke(app, [*words, "--store", "nowhere"])
    assert isinstance(done.exception, Planned), done.output + str(done.exception)
    made: Audit = done.exception.args[0]
    return made


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_sizes_that_they_say(name: str) -> None:
    made = AUDIT.named(name)
    assert made.preset == name
    assert ("kkt" in made.attacks) == (name in ("cpu", "given"))
    assert bool(made.left_out) == (name in ("quick", "wide", "given"))
    for cell in made.cells:  # every defence is one of the recipe
        assert cell.recipe.cut == {"split": 2 if "second" in cell.name else 1}.get(name)
    n, others = ([cell.kind for cell in made.cells].count(kind) for kind in ("defence", "variant"))
    said = AUDIT.size(made)
    assert said.startswith(f"{n} defences, ")
    assert (f"{others} other ways to train" in said) == (others > 0)
    assert said.endswith("one network" if name == "given" else f"{made.n_victims} networks each")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"data": "folder:my images", "seed": "3", "rate": "0.05", "channels": "1",
         "skip_corrupt": "true", "only": "", "good_threshold": "0.5", "threads": "2"},
        {"recipe.training.epochs": "50", "recipe.victim.widths": "64,32", "recipe.n_images": "12",
         "recipe.training.batch_size": "4", "recipe.training.loss.kind": "mse",
         "recipe.released.precision": "int8", "recipe.views": "2", "recipe.distilled": "true"},
        {"recipe.private.epsilon": "8", "recipe.private.clip": "0.5", "recipe.dropout": "0.25"},
        {"recipe.training.batch_size": "null", "recipe.cut": "2", "recipe.mixcon.lam": "3",
          "inversion.zeta": "0.1", "defences": []},
        {"recipe.autoencoder.network.depth": "3", "recovery.n_steps": "9", "mask": "half",
         "recipe.autoencoder.training.levels": "1e-3,1e-4", "defences": []},
        {"recipe": {"private": {"epsilon": 3, "delta": 1e-6}, "training": {"weight_decay": 0.01}}},
        {"recipe.victim.conv": '{"kernel":3,"channels":4}', "recipe.victim.init_std_first": "null"},
        {"recipe": {"training": {"loss": {"kind": "ce"}}, "n_classes": 4}},
        {"fail_above": ["good>0.05@fpr=0.01", "found > 0.5 @ fpr=0"]},
        {"defences": OWN},
        {"defences": []},
        {"defences.0.name": "it's new", "defences.1.about": "Another one."},
        {"attacks": "span,kkt", "kkt.save_at": "20,40", "kkt.alpha": "3.5", "span.n_network": "9"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("preset", ["quick", "cpu"])
def test_the_command_of_an_audit_makes_that_audit(
    preset: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = AUDIT.named(preset, settings)
    assert made != AUDIT.named(preset) or not settings
    assert asked_for(AUDIT.command(made), monkeypatch) == made


def test_the_command_keeps_to_some_defences(monkeypatch: pytest.MonkeyPatch) -> None:
    made = AUDIT.named("cpu", {"seed": "2"}, only="DP-SGD, epsilon")
    assert [d.name for d in made.defences] == [f"DP-SGD, epsilon {e}" for e in (1, 8, 50)]
    command = AUDIT.command(made)
    assert "--only 'DP-SGD, epsilon'" in command
    assert asked_for(command, monkeypatch) == made
    with pytest.raises(ValueError, match="unknown defence 'magic'"):
        AUDIT.named("cpu", only="magic")


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"initial": "start.pt", "arch": "mlp:3072-48-1", "shape": (3, 32, 32), "leak": 0.2,
         "activation": "leaky_relu", "mean": "0.5,0.4,0.3", "std": (0.2, 0.3, 0.25)},
    ],
)  # fmt: skip
def test_the_command_of_a_given_network_makes_that_audit(
    facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = given_settings("folder:a b", weights="net.pt", decoys="folder:others", **facts)
    more = {"data": "folder:a b", "attacks": "span", "fail_above": ["good>0.1@fpr=0.01"]}
    made = AUDIT.named("given", weights | more)
    assert made.weights is not None
    assert Path(made.weights.file).is_absolute()
    command = AUDIT.command(made)
    assert "--preset" not in command
    assert asked_for(command, monkeypatch) == made


def test_a_recipe_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "n_images: 16\nvictim:\n  widths: [64]\ntraining:\n  weight_decay: 0.01\n"
        "private: {epsilon: 8}\ndefences:\n"
        "  - {name: early, group: stop, about: Ends early., scale: {training.epochs: 0.1}}\n"
        '  - name: noise\n    group: release\n    about: "It\'s noisy."\n'
        "    set: {released.noise: 0.3}\n"
    )
    made = AUDIT.named("quick", recipe_settings(path))
    plain = AUDIT.named("quick")
    assert made.defences == tuple(Defence(**one) for one in OWN)
    assert (made.recipe.n_images, made.recipe.victim.widths) == (16, (64,))
    assert made.recipe.private == Private(epsilon=8.0)
    assert made.recipe.training.weight_decay == 0.01
    assert made.recipe.training.epochs == plain.recipe.training.epochs  # what it leaves out
    assert made.recipe.victim.init_std_first == plain.recipe.victim.init_std_first
    path.write_text(json.dumps({"n_images": 10}))
    alone, more = recipe_settings(path), {"recipe.n_images": "12"}
    assert AUDIT.named("quick", alone).defences == plain.defences
    assert AUDIT.named("quick", alone).recipe.n_images == 10
    assert AUDIT.named("quick", alone | more).recipe.n_images == 12


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n- b\n", "has no settings; write `key: value` lines"),
        ("", "has no settings"),
        ("3: a\n", "has no settings"),
        ("a: [\n", "is not YAML"),
        ("nimages: 3\n", "recipe.nimages=3: Unexpected keyword argument"),
        ("training: {epoch: 3}\n", "recipe.training.epoch=3: Unexpected keyword argument"),
        ("training: 3\n", "recipe.training=3"),
        ("n_images: many\n", "recipe.n_images='many'"),
        ("n_images: 9\n", "n_images=9 is not a multiple of n_classes=2"),
        ("defences: 3\n", "defences=3"),
        ("defences: [{name: a}]\n", "defences.0.group={'name': 'a'}: Field required"),
        ("defences: [{name: a, group: b, about: c, set: {epochs: 3}}]\n",
         "defence 'a' sets 'epochs', which no recipe has"),
        ("defences: [{name: a, group: b, about: c, sets: {}}]\n", "defences.0.sets"),
    ],
)  # fmt: skip
def test_a_recipe_that_cannot_be_is_refused_in_a_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)) as refusal:
        AUDIT.named("quick", recipe_settings(path))
    assert "\n" not in str(refusal.value)


def test_a_part_of_a_recipe_leaves_the_rest(tmp_path: Path) -> None:
    made = AUDIT.named("quick", {"recipe": {"victim": {"conv": {"kernel": 3, "channels": 4}}}})
    assert made.recipe.victim.conv == Conv(kernel=3, channels=4)
    assert made.recipe.victim.widths == (200, 200)
    assert made.kkt == PRESETS["quick"]().kkt != KKTAttack()
    nothing = AUDIT.changed(AUDIT.named("cpu", {"recipe.private.epsilon": "8"}),
                            {"recipe.private": "null"})  # fmt: skip
    assert nothing == AUDIT.named("cpu")


def products_of(store: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (store / "products").rglob("*.*")}


def same_but_for_times(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return {**a, "created": ""} == {**b, "created": ""}


@pytest.mark.slow
def test_an_audit_goes_on_where_it_was(tmp_path: Path, prefect_server: None) -> None:
    store, workers = tmp_path / "audit", Workers(n_workers=1, device="cpu")

    def made(preset: str | None, settings: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
        with suppress(LimitExceededError):
            page = run_study("audit", store, preset, settings, workers=workers, **more)
            assert page == store / "audit.html"
        record: dict[str, Any] = json.loads((store / "audit.json").read_bytes())
        return record

    record = made("quick", TINY)
    assert {path.name for path in store.iterdir()} == AUDIT.entries - {"control.json"}
    base, early, noisy, large = record["cells"]
    assert (base["failed"], base["leak"]["attack"]) == (None, "span")
    assert base["leak"]["mean"] > 0.3
    assert record["verdict"]["level"] == "leaks"
    assert large["failed"] == "4 of the victims diverged in training"
    assert not large["on_front"]
    assert {early["failed"], noisy["failed"]} == {None}
    assert noisy["accuracy"]["change"] is not None
    with np.load(store / "audit-pictures.npz") as arrays:
        assert arrays["exposed/original"].shape == (16, 3, 32, 32)
        assert arrays["exposed/reconstruction"].shape == (16, 3, 32, 32)
    before = products_of(store)
    assert len(before) > 4 * 5  # cells, and their victims and attacks

    again = made(None, None)  # with the settings of the store
    assert products_of(store) == before
    assert same_but_for_times(again, record)

    lost = sorted(path.stem for path in (store / "products").glob("*.json"))[0]
    for path in (store / "products").glob(f"{lost}*"):
        path.unlink()
    healed = made(None, None)
    assert products_of(store).keys() == before.keys()
    kept = {name: when for name, when in products_of(store).items() if not name.startswith(lost)}
    assert kept == {name: when for name, when in before.items() if not name.startswith(lost)}
    for name in ("fingerprint", "settings", "exposed", "verdict"):
        assert healed[name] == record[name]

    other = made(None, {"rate": "0.05", "fail_above": ["good>0.1@fpr=0.05"]})  # counted anew
    assert products_of(store).keys() == before.keys()
    assert (other["rate"], other["checks"][0]["outcome"]) == (0.05, "fails")
    assert other["fingerprint"] != record["fingerprint"]


@pytest.mark.slow
def test_some_defences_alone_use_what_is_there(tmp_path: Path, prefect_server: None) -> None:
    store, workers = tmp_path / "audit", Workers(n_workers=1, device="cpu")
    settings = {name: value for name, value in TINY.items() if name != "defences"}
    run_study("audit", store, "quick", settings, only="int8", workers=workers)
    record = json.loads((store / "audit.json").read_bytes())
    assert [cell["name"] for cell in record["cells"]] == ["as it is", "weights in int8"]
    assert "--only int8" in record["command"]
    before = products_of(store)
    run_study("audit", store, "quick", settings, only="50 %", workers=workers)
    record = json.loads((store / "audit.json").read_bytes())
    assert [cell["name"] for cell in record["cells"]] == [
        "as it is",
        "noise of 50 % on the weights",
    ]
    after = products_of(store)
    assert {name: after[name] for name in before} == before
    n_base = len(before) // 2  # the network as it is was made once
    assert len(after) == len(before) + n_base
