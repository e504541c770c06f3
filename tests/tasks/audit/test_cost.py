"""Costs of an audit: of every cell that has victims, and of what its recipe asks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recon_core.attacks.inversion.strong_inversion import StrongInversion
from recon_core.victims.autoencoder import FullyConnected
from recon_core.victims.losses import Loss
from tasks.audit.plan import as_experiment, costs_of, training_seconds
from tasks.audit.recipe import AutoencoderRecipe, VictimRecipe
from tasks.families.weights.study.cost import Pace
from tests.tasks.audit.small import audit, defence, images_of, plan_of, recipe

PACE = Pace(epoch_s=1e-3, training_rate=1e9, iteration_s=2e-3, attack_rate=2e9)
SHAPE = (3, 32, 32)


@pytest.fixture(autouse=True)
def pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.audit.plan.measured_pace", lambda _device: PACE)


def test_cells_cost_what_their_recipes_ask_for(tmp_path: Path) -> None:
    made = audit(
        attacks=("span", "kkt", "loss"),
        defences=(
            defence("long", scale={"training.epochs": 10}),
            defence("student", set={"distilled": True}),
            defence("conv", set={"victim.conv": {"kernel": 3, "channels": 4}}),
            defence("too many", scale={"n_images": 90}),
            defence("released", set={"released.noise": 0.1}),
        ),
    )
    plan = plan_of(made, tmp_path, images_of(80, 120))
    base, long, student, conv, released = costs_of(plan, "cpu")
    assert [cost.name for cost in (base, long, student, conv, released)] == [
        "as it is", "long", "student", "conv", "released",
    ]  # fmt: skip
    assert base.counts == {"images": 8, "victims": 4, "attacks": 8}
    assert conv.counts["attacks"] == 4  # no span attack
    train = [cost.seconds_of["training"] for cost in (base, long, student, released)]
    assert train[0] == pytest.approx(4 * training_seconds(made.recipe, 8, (1, 16, 16), PACE))
    assert train[1] == pytest.approx(10 * train[0])
    assert train[2] > 0.9 * train[0]  # the student alone: its teacher is the base
    assert train[3] == 0  # its networks are those of the base
    attack = [cost.seconds_of["attacks take"] for cost in (base, long, released)]
    assert attack[0] == attack[1] == attack[2] > 0
    n_parameters = 256 * 32 + 32 * 32 + 32
    assert released.disk_bytes == 4 * 2 * 4 * n_parameters
    assert base.disk_bytes == released.disk_bytes + 4 * 2 * 16 * 256  # and pictures of two attacks
    assert all(cost.memory_bytes and cost.memory_bytes > 0 for cost in (base, conv))


def test_inversions_cost_their_steps_and_shared_networks_no_training(tmp_path: Path) -> None:
    short = StrongInversion(n_steps=10, starts=("grey",))
    made = audit(attacks=("features",), recipe=recipe(cut=1), inversion=short,
                 defences=(defence("deeper", set={"cut": 2}),))  # fmt: skip
    longer = replace(made, inversion=replace(short, n_steps=1000))
    base, deeper = costs_of(plan_of(made, tmp_path, images_of(80)), "cpu")
    assert (base.counts["attacks"], deeper.seconds_of["training"]) == (4, 0)
    assert deeper.seconds_of["attacks take"] > 0
    found = costs_of(plan_of(longer, tmp_path, images_of(80)), "cpu")[0].seconds_of["attacks take"]
    assert found > 10 * base.seconds_of["attacks take"]  # 100 times, but for a noisy clock


def test_autoencoders_cost_their_epochs_and_what_they_are_asked(tmp_path: Path) -> None:
    own = AutoencoderRecipe(network=FullyConnected(depth=2, width=8))
    made = audit(
        attacks=("autoencoder",), recipe=recipe(autoencoder=own),
        defences=(defence("long", scale={"autoencoder.training.epochs": 1000}),),
    )  # fmt: skip
    base, long = costs_of(plan_of(made, tmp_path, images_of(80)), "cpu")
    assert long.seconds_of["training"] > 100 * base.seconds_of["training"] > 0
    assert base.seconds_of["attacks take"] > 0
    n = 2 * 8 * 256 + 8 + 256
    assert long.disk_bytes == 4 * 4 * n


def test_a_training_costs_its_steps_views_and_images() -> None:
    def seconds(n: int = 100, **changes: Any) -> float:
        made = recipe(training=replace(recipe().training, span=False), **changes)
        return training_seconds(made, n, SHAPE, PACE)

    plain = seconds()
    assert seconds(200) > 1.5 * plain > plain > 300 * 1e-3
    assert seconds(views=4) == pytest.approx(seconds(400))
    batches = recipe(training=replace(recipe().training, span=False, batch_size=10))
    more = training_seconds(batches, 100, SHAPE, PACE) - plain
    assert more == pytest.approx(300 * 9 * 1e-3)
    spanned = training_seconds(recipe(), 100, SHAPE, PACE)
    noisy = training_seconds(recipe(dropout=0.5), 100, SHAPE, PACE)
    assert noisy == pytest.approx(plain)  # which the span saves nothing of
    assert spanned < plain


@pytest.mark.parametrize(("kind", "n_classes"), [("bce", 2), ("mse", 2), ("ce", 2), ("ce", 10)])
def test_every_loss_has_a_cost(kind: Any, n_classes: int) -> None:
    training = replace(VictimRecipe().training, loss=Loss(kind=kind))
    made = VictimRecipe(n_classes=n_classes, training=training)
    assert as_experiment(made).training == training
    assert training_seconds(made, 100, SHAPE, PACE) > 0
    assert training_seconds(replace(made, dropout=0.5), 100, SHAPE, PACE) > 0
