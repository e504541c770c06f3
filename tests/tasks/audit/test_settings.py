"""Settings of an audit: defences as changes by name, limits in words, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.audit import PRESETS, QUICK, defences
from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.attacks.span.search import SpanAttack
from recon_core.victims.losses import Loss
from recon_core.victims.network import Released
from recon_core.victims.separability import MixCon
from recon_core.victims.training import Training
from tasks.audit.recipe import AutoencoderRecipe, Private, VictimRecipe
from tasks.audit.settings import (
    MOST_CANDIDATES,
    RECONSTRUCTION,
    Audit,
    GivenWeights,
    adapter,
    limit_of,
)
from tests.tasks.audit.small import audit, defence, images_of, plan_of, recipe

PLAIN = VictimRecipe()
CE = Training(epochs=10, loss=Loss(kind="ce"))


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Single settings by dotted name; `private` stands as a whole."""
    found = {}
    for key, value in tree.items():
        if isinstance(value, dict) and key != "private":
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def test_a_defence_of_the_grid_changes_what_it_names_and_nothing_else() -> None:
    base = VictimRecipe(n_images=24)
    before, *others = (flat(adapter(VictimRecipe).dump_python(made, mode="json"))
                       for made in (base, *(d.of(base) for d in defences())))  # fmt: skip
    for one, after in zip(defences(), others, strict=True):
        changed = {name for name, value in after.items() if value != before[name]}
        assert {n.partition(".")[0] for n in changed} == {n.partition(".")[0] for n in one.names}
        values = {name: after[name] for name in one.set if name in after and name != "private"}
        assert values == {name: one.set[name] for name in values}, one.name
    assert set(QUICK) <= {one.name for one in defences()}


def test_a_defence_sets_and_scales_by_dotted_name() -> None:
    of_all = defence(
        "all",
        set={"training.weight_decay": 0.5, "released.precision": "int8", "victim.widths": [8, 8]},
        scale={"training.epochs": 0.0004, "training.optimiser.lr": 2, "n_images": 3},
    )
    made = of_all.of(recipe())
    assert made.training.weight_decay == 0.5
    assert made.released == Released(precision="int8")
    assert made.victim.widths == (8, 8)
    assert made.training.epochs == 1  # a whole number, and at least one
    assert made.training.optimiser.lr == 0.4
    assert made.n_images == 24
    left = defence("left to the source", scale={"n_images": 4, "training.batch_size": 2})
    full = replace(PLAIN, training=replace(PLAIN.training, batch_size=None))
    assert left.of(full) == full
    assert of_all.names == (*of_all.set, *of_all.scale)
    private = defence("private", set={"private": {"epsilon": 3}}).of(PLAIN)
    assert private.private == Private(epsilon=3.0)
    again = defence("less", set={"private.clip": 0.5}, scale={"private.epsilon": 2}).of(private)
    assert again.private == Private(epsilon=6.0, clip=0.5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"set": {"training.epoch": 3}}, "sets 'training.epoch', which no recipe has; it has auto"),
        ({"set": {"epochs": 3}}, "sets 'epochs', which no recipe has"),
        ({"scale": {"victim.widths.first": 3}}, "'victim.widths.first', which no recipe has"),
        ({"set": {"private.epsilon": 3}}, "sets 'private.epsilon', which no recipe has"),
        ({"set": {"training.epochs": 0}}, "training: epochs=0 must be at least 1"),
        ({"set": {"training.epochs": "many"}}, "training.epochs: Input should be a valid int"),
        ({"set": {"dropout": 1}}, "dropout=1.0 is outside [0, 1)"),
        ({"set": {"private": {"epsilon": 0}}}, "private: epsilon=0.0 must be positive"),
        (
            {"set": {"private": {"epsilon": 1, "eps": 1}}},
            "private.eps: Unexpected keyword argument",
        ),
        ({"set": {"n_images": 7}}, "n_images=7 is not a multiple of n_classes=2"),
        ({"scale": {"training.span": 2}}, "scales 'training.span', which is 'auto' and no number"),
        ({"scale": {"victim.widths": 2}}, "scales 'victim.widths', which is"),
        ({"scale": {"distilled": 2}}, "scales 'distilled', which is False and no number; set it"),
        ({"scale": {"training": 2}}, "scales 'training', which is {"),
    ],
)
def test_a_defence_that_cannot_be_is_refused_by_its_name(changes: Any, said: str) -> None:
    one = defence("own one", **changes)
    with pytest.raises(ValueError, match=re.escape(said)) as refusal:
        one.of(PLAIN)
    assert "defence 'own one'" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match="defence 'own one'"):
        audit(recipe=PLAIN, defences=(one,))
    if "which no recipe has" in said:
        assert all(name in str(refusal.value) for name in ("training.epochs", "released.noise"))


WEIGHTS = GivenWeights(file="a", decoys="b")
NOISY = defence("noisy", set={"released.noise": 0.1})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_victims": 5}, "n_victims=5 must be even"),
        ({"n_victims": 2}, "at least 4, since the others are shadows"),
        ({"rate": 0.02}, "rate=0.02 is none of [0.0, 0.001, 0.01, 0.05]"),
        ({"attacks": ()}, "attacks is empty; name some of ['span', 'span_known', 'span_state'"),
        ({"attacks": ("span", "loss", "span")}, "['span', 'loss', 'span'] names one twice"),
        ({"defences": (defence("a"), defence("a"))}, "two defences are named 'a'"),
        ({"defences": (defence("as it is"),)}, "two defences are named 'as it is'"),
        ({"fail_above": ("leaks",)}, "--fail-above 'leaks' is not a limit as good>0.05@fpr=0.01"),
        ({"weights": WEIGHTS}, "set n_victims to 1"),
        (
            {"weights": WEIGHTS, "n_victims": 1, "recipe": recipe(autoencoder=AutoencoderRecipe())},
            "`palimpsest attack autoencoder`; leave the weights out",
        ),
        (
            {"weights": WEIGHTS, "n_victims": 1,
             "defences": (NOISY, defence("longer", scale={"training.epochs": 5}))},
            "defences ['longer'], which need training",
        ),
    ],
)  # fmt: skip
def test_an_audit_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        audit(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_images": 9}, "n_images=9 is not a multiple of n_classes=2"),
        ({"n_images": 8, "n_classes": 3, "training": CE}, "not a multiple of n_classes=3"),
        ({"n_classes": 3}, "n_classes=3 with training.loss.kind='bce'; more than two classes need"),
        ({"cut": 3}, "cut=3 is no hidden layer"),
        ({"cut": 0}, "cut=0 is no hidden layer"),
        ({"mixcon": MixCon(), "dropout": 0.5}, "mixcon with dropout or private"),
        ({"mixcon": MixCon(), "private": Private(epsilon=1.0)}, "mixcon with dropout or private"),
        ({"mixcon": MixCon()}, "batch_size=16 with a defence"),
        ({"autoencoder": AutoencoderRecipe(), "cut": 1}, "cut with an autoencoder"),
        ({"autoencoder": AutoencoderRecipe(), "distilled": True, "dropout": 0.5},
         "distilled, dropout with an"),
    ],
)  # fmt: skip
def test_a_recipe_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    training = PLAIN.training
    if {"mixcon", "cut"} & changes.keys() and len(changes) > 1:
        training = replace(training, batch_size=None)
    with pytest.raises(ValueError, match=re.escape(said)):
        VictimRecipe(**{"training": training} | changes)


def test_a_recipe_has_an_output_per_class_and_the_condition_of_its_loss() -> None:
    assert (PLAIN.n_outputs, PLAIN.condition, PLAIN.is_noisy) == (1, "binary", False)
    many = VictimRecipe(n_classes=4, training=CE)
    assert (many.n_outputs, many.condition) == (4, "multiclass")
    squared = VictimRecipe(training=replace(CE, loss=Loss(kind="mse")))
    assert (squared.n_outputs, squared.condition) == (1, "regression")
    assert VictimRecipe(dropout=0.1).is_noisy
    private = VictimRecipe(private=Private(epsilon=1, clip=0.3))
    assert private.is_noisy
    assert private.noise(2.5).clip == 0.3
    assert private.noise(2.5).noise_multiplier == 2.5
    assert PLAIN.noise(0.0).clip is None
    assert many.architecture((3, 8, 8)).n_outputs == 4


def test_limits_are_read() -> None:
    limit = limit_of("good>0.05@fpr=0.01")
    assert (limit.of, limit.limit, limit.rate) == ("good", 0.05, 0.01)
    spaced = limit_of(" found > .5 @ fpr = 0.050 ")
    assert (spaced.of, spaced.limit, spaced.rate) == ("found", 0.5, 0.05)
    assert limit_of("good>0@fpr=0").rate == 0
    assert limit_of("good>1@fpr=0.001").limit == 1


@pytest.mark.parametrize(
    "text",
    [
        "", "good", "good>0.05", "good<0.05@fpr=0.01", "good>5%@fpr=0.01", "good>0.05@fpr=0.02",
        "good>1.5@fpr=0.01", "good>-0.1@fpr=0.01", "good>=0.05@fpr=0.01", "leak>0.05@fpr=0.01",
        "good>0.05@fpr=0.01,found>0.1@fpr=0.01", "good>0.05@fpr=1%", "good>1.@fpr=0.01",
        "good>nan@fpr=0.01", "good>0.05@fpr=0.01\n",
    ],
)  # fmt: skip
def test_what_is_no_limit_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a limit as good>0.05@fpr=0.01.* 0, 0.001, 0.01"):
        limit_of(text)


def test_attacks_have_the_settings_of_their_victims() -> None:
    plain = audit()
    assert plain.attack("span", plain.recipe) == SpanAttack(overcomplete=2.0)
    made = audit(span=SpanAttack(n_network=33), kkt=KKTAttack(alpha=7.0))
    settings = {
        "span": SpanAttack(n_network=33, start="unknown"),
        "span_known": SpanAttack(n_network=33, start="known"),
        "span_state": SpanAttack(n_network=33, source="state"),
        "gradient": SpanAttack(n_network=33, source="gradients"),
        "kkt": KKTAttack(alpha=7.0, condition="binary", n_candidates=16),
        "features": made.inversion,
        "autoencoder": made.recovery,
    }
    assert {name: made.attack(name, made.recipe) for name in RECONSTRUCTION} == settings
    many = made.attack("kkt", recipe(n_images=300, n_classes=4, training=CE))
    assert many == KKTAttack(alpha=7.0, condition="multiclass", n_candidates=MOST_CANDIDATES)


def test_cells_are_the_recipe_and_then_its_defences_in_order() -> None:
    made = audit(defences=(defence("b", set={"dropout": 0.5}), defence("a", set={"views": 3})))
    assert [(c.number, c.name, c.is_base) for c in made.cells] == [
        (0, "as it is", True), (1, "b", False), (2, "a", False),
    ]  # fmt: skip
    changed = [replace(made.recipe, dropout=0.5), replace(made.recipe, views=3)]
    assert [cell.recipe for cell in made.cells] == [made.recipe, *changed]
    given = audit(weights=WEIGHTS, n_victims=1, defences=(NOISY,))
    assert [cell.name for cell in given.cells] == ["as it is", "noisy"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_an_audit_that_survives_json(name: str) -> None:
    made = PRESETS[name]()
    assert made.preset == name
    again = adapter(Audit).validate_python(adapter(Audit).dump_python(made, mode="json"))
    assert again == made
    assert made.cells[0].recipe == made.recipe


def test_a_limit_that_no_attack_could_exceed_is_refused(tmp_path: Path) -> None:
    images = images_of(40)
    asked = audit(attacks=("loss",), fail_above=("good>0.05@fpr=0.01",))
    with pytest.raises(ValueError, match=r"good>0\.05@fpr=0\.01 can be held against no attack"):
        plan_of(asked, tmp_path, images)
    told = audit(attacks=("loss",), fail_above=("found>0.05@fpr=0.01",))
    assert plan_of(told, tmp_path, images).refused == {}
