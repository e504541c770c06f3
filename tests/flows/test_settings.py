"""Recipes round-trip, every name can be set, and wrong names and values are explained."""

import itertools
import json
import re
import shlex
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from flows.presets import PRESETS, preset
from flows.recipe import Recipe
from flows.settings import command, from_json, parse_assignments, portable, resolve, to_json
from recon_core.attacks.instahide.mixing import InstaHide, Mixing
from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.attacks.span.attack import SpanAttack
from recon_core.experiments import (
    KKT,
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


def test_a_defence_is_chosen_by_its_kind_and_taken_back() -> None:
    split = resolve("demo", {"experiment.family": "inversion", "experiment.n_classes": "4"})
    assert split.experiment == Inversion(n_classes=4)
    chosen = {"experiment.defence.kind": "mixcon", "experiment.defence.beta": "1e-6"}
    defended = resolve(split, chosen)
    assert defended.experiment == Inversion(n_classes=4, defence=MixCon(beta=1e-6))
    assert typed_again(defended, "demo") == defended
    other = resolve(defended, {"experiment.defence.kind": "unicon"})
    assert other.experiment == Inversion(n_classes=4, defence=UniCon())
    assert resolve(defended, {"experiment.defence": "null"}) == split
    with pytest.raises(ValueError, match=r"kind must be one of mixcon, unicon"):
        resolve(split, {"experiment.defence.kind": "magic"})


def test_an_attack_on_weights_is_chosen_by_its_kind_and_asks_for_no_iteration_of_another() -> None:
    before = preset("cifar-hundred")
    assert isinstance(before.experiment, KKT)
    assert before.curation.min_iteration > 0
    span = resolve(before, {"experiment.attack.kind": "span", "experiment.attack.n_network": "3"})
    assert span == replace(
        before,
        experiment=replace(before.experiment, attack=SpanAttack(n_network=3)),
        curation=replace(before.curation, min_iteration=0),
        evaluation=replace(before.evaluation, restore_iterations="last"),
    )
    assert typed_again(span, "cifar-hundred") == span
    search = {
        "experiment.attack.kind": "kkt",
        "experiment.attack.save_at": "50,1400",
        "curation.min_iteration": "50",
        "evaluation.restore_iterations": "[50,1400]",
    }
    chosen = resolve(span, search)
    assert isinstance(chosen.experiment, KKT)
    assert chosen.experiment.attack == KKTAttack(save_at=(50, 1400))
    assert (chosen.curation.min_iteration, chosen.evaluation.restore_iterations) == (50, (50, 1400))
    back = resolve(span, {"experiment.attack.kind": "kkt"}).experiment
    assert back == replace(before.experiment, attack=KKTAttack())
    classes = resolve("buzaglo2023-multiclass", {"experiment.attack.kind": "span"})
    search = resolve(classes, {"experiment.attack.kind": "kkt"}).experiment
    assert search.attack == KKTAttack(condition="multiclass")


def test_a_kind_of_victim_and_a_family_are_chosen_with_their_defaults() -> None:
    chosen = {"experiment.victim.channels": "8,16", "experiment.victim.kind": "unet"}
    switched = resolve("autoencoder-demo", chosen)
    assert switched.experiment.victim == UNet(channels=(8, 16))
    assert typed_again(switched, "autoencoder-demo") == switched
    family = resolve("demo", {"experiment.family": "autoencoder", "experiment.sigma": "0.02"})
    assert family.experiment == AutoencoderRecovery(sigma=0.02)
    assert family.further_attacks == ()
    assert resolve("demo", {"experiment.attack.kind": "span"}).further_attacks == ()


def test_iterations_are_those_of_the_victims_that_they_are_asked_of() -> None:
    before = preset("restoration-cpu")
    learned = resolve(before, {"experiment.attack.kind": "span"})
    assert learned.evaluation == before.evaluation
    assert learned.curation.min_iteration == 0
    judged = resolve(before, {"heldout_experiment.attack.kind": "span"})
    assert judged.evaluation.restore_iterations == "last"
    assert judged.curation == before.curation


def test_further_attacks_are_named_by_their_kinds_and_survive_the_command() -> None:
    smoke = preset("smoke")
    assert smoke.further_attacks == ()
    recipe = resolve("smoke", {"further_attacks": "span"})
    assert recipe.further_attacks == (SpanAttack(),)
    more = resolve(recipe, {"further_attacks.0.n_network": "3"})
    assert more.further_attacks == (SpanAttack(n_network=3),)
    assert typed_again(more, "smoke") == more
    assert resolve(more, {"further_attacks": "[]"}) == smoke
    own, further = smoke.campaign("heldout"), more.further_campaigns()
    assert isinstance(own.experiment, KKT)
    assert further == {
        attack.kind: replace(own, experiment=replace(own.experiment, attack=attack))
        for attack in more.further_attacks
    }


def test_an_experiment_s_own_attack_or_another_family_s_is_no_further_one() -> None:
    own = replace(preset("demo"), further_attacks=())
    with pytest.raises(ValueError, match="has the experiment's own attack, 'kkt'; leave it out"):
        replace(own, further_attacks=(own.campaign("heldout").experiment.attack,))
    with pytest.raises(ValueError, match="set further_attacks to"):
        replace(preset("instahide-small"), further_attacks=(SpanAttack(),))


def test_a_scheme_is_chosen_with_the_number_of_its_encodings() -> None:
    mixed = {"experiment.family": "instahide", "experiment.scheme.n_epochs": "9"}
    assert resolve("demo", mixed).experiment == InstaHideRecovery(
        scheme=InstaHide(k_pub=2, n_epochs=9)
    )
    small = preset("instahide-small")
    theory = {"experiment.scheme.kind": "theory", "experiment.n_encodings": "240"}
    chosen = resolve(small, theory | {"experiment.scheme.k_pub": "1"})
    assert chosen.experiment == replace(small.experiment, scheme=Mixing(k_pub=1), n_encodings=240)
    assert typed_again(chosen, "instahide-small") == chosen
    back = {"experiment.scheme.kind": "instahide", "experiment.n_encodings": "0"}
    assert resolve(chosen, back).experiment.scheme == InstaHide()


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
