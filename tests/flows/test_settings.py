"""Recipes round-trip, every name can be set, and wrong names and values are explained."""

import functools
import itertools
import json
import re
import shlex
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flows.presets import PRESETS, preset
from flows.recipe import Recipe
from flows.settings import command, from_json, parse_assignments, portable, resolve, to_json
from recon_core.attacks.instahide.mixing import InstaHide, Mixing
from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.attacks.span.attack import SpanAttack
from recon_core.experiments import (
    AutoencoderRecovery,
    InstaHideRecovery,
    Inversion,
)
from recon_core.victims.autoencoder import UNet
from recon_core.victims.separability import MixCon, UniCon


def typed_again(recipe: Recipe, base: str) -> Recipe:
    """The recipe that the command of `recipe` makes of the preset `base`."""
    words = shlex.split(command(recipe, Path("runs/x")))
    return resolve(
        base, parse_assignments([w for flag, w in itertools.pairwise(words) if flag == "--set"])
    )


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_named_by_its_key_and_survives_json(name: str) -> None:
    recipe = preset(name)
    assert recipe.name == name
    assert from_json(json.loads(json.dumps(to_json(recipe)))) == recipe


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("seed", "7", lambda r: r.seed == 7),
        ("experiment.victim.widths", "64,32", lambda r: r.experiment.victim.widths == (64, 32)),
        ("experiment.attack.alpha", "50", lambda r: r.experiment.attack.alpha == 50.0),
        ("sampling.phases.0.n_runs", "48", lambda r: r.sampling.n_runs == 48),
        ("data", "folder:1", lambda r: r.data == "folder:1"),
        ("restorers.edm.training.n_steps", "3", lambda r: r.restorers["edm"].training.n_steps == 3),
        ("evaluation.external.mine", "m.onnx", lambda r: r.evaluation.external["mine"] == "m.onnx"),
        ("evaluation.restore_iterations", "all", lambda r: r.evaluation.n_samples == 8),
        ("further_attacks", "[]", lambda r: r.further_attacks == ()),
    ],
)
def test_a_setting_changes_what_it_names_and_nothing_else(name, value, found) -> None:
    changed = resolve("demo", {name: value})
    assert found(changed)
    before, after = to_json(preset("demo")), to_json(changed)
    assert sum(before[key] != after[key] for key in before) == 1


SPLIT = {"experiment.family": "inversion", "experiment.n_classes": "4"}
DEFENDED = SPLIT | {"experiment.defence.kind": "mixcon", "experiment.defence.beta": "1e-6"}
SPAN = {"experiment.attack.kind": "span", "experiment.attack.n_network": "3"}
SEARCH = {"experiment.attack.kind": "kkt", "experiment.attack.save_at": "50,1400",
          "curation.min_iteration": "50", "evaluation.restore_iterations": "[50,1400]"}  # fmt: skip
THEORY = {"experiment.scheme.kind": "theory", "experiment.n_encodings": "240",
          "experiment.scheme.k_pub": "1"}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("demo", [SPLIT], lambda _: Inversion(n_classes=4)),
        ("demo", [DEFENDED], lambda _: Inversion(n_classes=4, defence=MixCon(beta=1e-6))),
        ("demo", [DEFENDED, {"experiment.defence.kind": "unicon"}],
         lambda _: Inversion(n_classes=4, defence=UniCon())),
        ("demo", [DEFENDED, {"experiment.defence": "null"}], lambda _: Inversion(n_classes=4)),
        ("cifar-hundred", [SPAN], lambda old: replace(old, attack=SpanAttack(n_network=3))),
        ("cifar-hundred", [SPAN, SEARCH],
         lambda old: replace(old, attack=KKTAttack(save_at=(50, 1400)))),
        ("cifar-hundred", [SPAN, {"experiment.attack.kind": "kkt"}],
         lambda old: replace(old, attack=KKTAttack())),
        ("buzaglo2023-multiclass",
         [{"experiment.attack.kind": "span"}, {"experiment.attack.kind": "kkt"}],
         lambda old: replace(old, attack=KKTAttack(condition="multiclass"))),
        ("autoencoder-demo",
         [{"experiment.victim.channels": "8,16", "experiment.victim.kind": "unet"}],
         lambda old: replace(old, victim=UNet(channels=(8, 16)))),
        ("demo", [{"experiment.family": "autoencoder", "experiment.sigma": "0.02"}],
         lambda _: AutoencoderRecovery(sigma=0.02)),
        ("demo", [{"experiment.family": "instahide", "experiment.scheme.n_epochs": "9"}],
         lambda _: InstaHideRecovery(scheme=InstaHide(k_pub=2, n_epochs=9))),
        ("instahide-small", [THEORY],
         lambda old: replace(old, scheme=Mixing(k_pub=1), n_encodings=240)),
        ("instahide-small",
         [THEORY, {"experiment.scheme.kind": "instahide", "experiment.n_encodings": "0"}],
         lambda old: replace(old, scheme=InstaHide())),
    ],
)  # fmt: skip
def test_a_kind_is_chosen_with_its_defaults_and_survives_the_command(
    name: str, settings: list[dict[str, str]], expected: Callable[[Any], Any]
) -> None:
    recipe = functools.reduce(resolve, settings, preset(name))
    assert recipe.experiment == expected(preset(name).experiment)
    assert typed_again(recipe, name) == recipe


def test_iterations_are_those_of_the_victims_that_they_are_asked_of() -> None:
    before = preset("cifar-hundred")
    assert before.curation.min_iteration > 0
    span = resolve(before, SPAN)
    assert (span.curation.min_iteration, span.evaluation.restore_iterations) == (0, "last")
    search = resolve(span, SEARCH)
    assert (search.curation.min_iteration, search.evaluation.restore_iterations) == (50, (50, 1400))
    before = preset("restoration-cpu")
    learned = resolve(before, {"experiment.attack.kind": "span"})
    assert (learned.evaluation, learned.curation.min_iteration) == (before.evaluation, 0)
    judged = resolve(before, {"heldout_experiment.attack.kind": "span"})
    assert judged.evaluation.restore_iterations == "last"
    assert judged.curation == before.curation


def test_further_attacks_are_named_by_their_kinds_and_survive_the_command() -> None:
    smoke, demo = preset("smoke"), preset("demo")
    recipe = resolve("smoke", {"further_attacks": "span"})
    assert recipe.further_attacks == (SpanAttack(),)
    more = resolve(recipe, {"further_attacks.0.n_network": "3"})
    assert more.further_attacks == (SpanAttack(n_network=3),)
    assert typed_again(more, "smoke") == more
    assert resolve(more, {"further_attacks": "[]"}) == smoke
    assert demo.further_attacks
    assert resolve(demo, {"experiment.attack.kind": "span"}).further_attacks == ()
    assert resolve(demo, {"experiment.family": "autoencoder"}).further_attacks == ()
    own, further = smoke.campaign("heldout"), more.further_campaigns()
    attack = SpanAttack(n_network=3)
    assert further == {"span": replace(own, experiment=replace(own.experiment, attack=attack))}
    with pytest.raises(ValueError, match="has the experiment's own attack, 'kkt'; leave it out"):
        replace(smoke, further_attacks=(own.experiment.attack,))
    with pytest.raises(ValueError, match="set further_attacks to"):
        replace(preset("instahide-small"), further_attacks=(SpanAttack(),))


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("experiment.attack.alfa", "experiment.attack.alpha"),
        ("sampling.image_per_run", "sampling.images_per_run"),
        ("n_samples", "evaluation.n_samples"),
        ("experiment.attack", "experiment.attack"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match="unknown setting") as refusal:
        resolve("demo", {name: "1"})
    assert nearest in str(refusal.value)


@pytest.mark.parametrize(
    ("recipe", "settings", "said"),
    [
        ("demo", {"sampling.images_per_run": "1"}, "images_per_run=1 must be at least 2"),
        ("demo", {"sampling.phases.0.n_runs": "25"}, "use 28"),
        ("demo", {"seed": "x"}, "seed='x'"),
        ("demo", {"experiment.attack.save_at": "300,100"}, "must be increasing"),
        ("demo", {"experiment.augment_p": "2"}, "augment_p=2.0 is outside [0, 1]"),
        ("demo", {"further_attacks": "ica"}, "kind must be one of kkt, span"),
        ("demo", {"further_attacks": "span,span"}, "['span', 'span'] names a kind twice"),
        ("demo", {"further_attacks": '[{"kind":"span","n_images":1}]'},
         "further_attacks.0: n_images=1 must be at least 2"),
        ("demo", {"experiment.n_attacks": "2"}, "with n_attacks=2; set n_attacks to 1"),
        ("demo", {"experiment.victim.conv": '{"kernel":3,"channels":4}'},
         "attack.kind='span' on a victim whose first layer is a convolution of 3x3"),
        ("demo", {"experiment.victim.widths": "30,30"}, "or set further_attacks to []"),
        ("demo", {"evaluation.span": "2"}, "evaluation.span=2: Input should be a valid boolean"),
        ("cifar-hundred",
         {"evaluation.span": "true", "experiment.victim.conv": '{"kernel":3,"channels":4}'},
         "evaluation.span of victims whose first layer is a convolution of 3x3"),
        ("instahide-small", {"evaluation.span": "true"},
         "evaluation.span of experiment.family='instahide': only victims of 'kkt'"),
        ("span-hundred", {"curation.min_iteration": "500"}, "curation.min_iteration=500 leaves "),
        ("span-hundred", {"evaluation.restore_iterations": "[1400]"}, "saves at [0]; choos"),
        ("span-hundred", {"experiment.attack.surplus": "x"}, "experiment.attack.surplus='x'"),
        ("autoencoder-paper", {"experiment.masks": "half,holes"},
         "masks='half,holes' must be different ones"),
        ("autoencoder-paper", {"experiment.attack.kind": "magic"}, "kind must be one of unknown, "),
        ("autoencoder-paper", {"experiment.family": "vae"},
         "family must be one of kkt, autoencoder"),
        ("instahide-small", {"experiment.scheme.kind": "theory"},
         "n_encodings=0: a theory scheme needs it"),
        ("instahide-small", {"experiment.scheme.kind": "magic"},
         "kind must be one of instahide, theory"),
        ("instahide-small", {"experiment.scheme.k_pub": "41"},
         "n_public=40 must be at least 1 and scheme.k_pub=41"),
    ],
)  # fmt: skip
def test_bad_settings_are_explained_in_one_line(
    recipe: str, settings: dict[str, str], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as refusal:
        resolve(recipe, settings)
    assert "\n" not in str(refusal.value)


def test_assignments_need_an_equals_sign() -> None:
    assert parse_assignments(["a.b=1", "c = x=y"]) == {"a.b": "1", "c": "x=y"}
    with pytest.raises(ValueError, match="name=value"):
        parse_assignments(["seed"])


def test_the_command_of_a_recipe_makes_that_recipe() -> None:
    changes = {"seed": "3", "experiment.victim.widths": "64,32", "data": "folder:my images"}
    recipe = resolve("demo", changes)
    words = shlex.split(command(recipe, Path("runs/x")))
    assert words[:6] == ["palimpsest", "demo", "--preset", "demo", "--data", "folder:my images"]
    assert words[6:8] == ["--store", "runs/x"]
    settings = parse_assignments(words[9::2])
    assert set(words[8::2]) == {"--set"}
    assert resolve("demo", {**settings, "data": words[5]}) == recipe
    assert "--set" not in command(preset("smoke"), Path("s"))


def test_heldout_victims_differ_in_seed_and_keep_every_candidate() -> None:
    recipe: Recipe = preset("demo")
    train, heldout = recipe.campaign("train"), recipe.campaign("heldout")
    assert train.root_seed != heldout.root_seed
    assert (train.experiment.keep, heldout.experiment.keep) == ("confident", "all")
    assert heldout.experiment.augment_p == 0
    assert heldout.experiment.victim == train.experiment.victim


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("restore_iterations=last", "last"),
        ("restore_iterations=500,1400", (500, 1400)),
        ("restore_iterations=[800]", (800,)),
        ("baselines=nlm", ("nlm",)),
        ("baselines=tv,wavelet", ("tv", "wavelet")),
        ('baselines=["nlm"]', ("nlm",)),
        ("baselines=[]", ()),
    ],
)
def test_words_and_lists_stand_for_each_other(setting: str, expected: object) -> None:
    name = setting.partition("=")[0]
    changed = resolve("cifar-hundred", parse_assignments([f"evaluation.{setting}"]))
    assert getattr(changed.evaluation, name) == expected


def test_images_are_read_once_while_somebody_holds_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for k in range(6):
            Image.new("RGB", (8, 8), (40 * k, 9, 200)).save(tmp_path / name / f"{k}.png")
    recipe = resolve("smoke", {"data": f"folder:{tmp_path}"})
    held = recipe.images("train")
    assert recipe.images("train") is held
    assert recipe.images("heldout") is not held
    watched = weakref.ref(held)
    del held
    assert watched() is None, "a changed folder would not be read again"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("folder:/work/cifar10", "folder:cifar10"),
        ("palimpsest demo --store /tmp/sp51 --set x=1", "palimpsest demo --store sp51 --set x=1"),
        ("--set 'evaluation.external={\"a\": \"/home/me/m.onnx\"}'",
         "--set 'evaluation.external={\"a\": \"m.onnx\"}'"),
        ("folder:cifar10", "folder:cifar10"),
        ("runs/x/y", "runs/x/y"),
        ("s3://bucket/pairs", "s3://bucket/pairs"),
        ("3072-200-200-1, 1/N and 0.5", "3072-200-200-1, 1/N and 0.5"),
    ],
)  # fmt: skip
def test_records_have_no_paths_of_this_machine(text: str, found: str) -> None:
    assert portable(text) == found
    assert portable({"a": [text, 3, None]}) == {"a": [found, 3, None]}
    assert portable(f"--data folder:{Path.cwd()}/images") == "--data folder:images"
