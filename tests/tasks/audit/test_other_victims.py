"""Victims that give features away, and autoencoders: what they answer, and what comes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.inversion.strong_inversion import StrongInversion
from recon_core.victims.autoencoder import FullyConnected
from recon_core.victims.autoencoder_training import AutoencoderTraining
from recon_core.victims.network import Network, Released
from recon_core.victims.separability import MixCon
from tasks.audit.plan import AuditPlan
from tasks.audit.recipe import AutoencoderRecipe, VictimRecipe
from tasks.audit.victims import answers, released_weights, sent_features, unit_pictures
from tests.tasks.audit.small import (
    audit,
    defence,
    images_of,
    plan_of,
    product,
    recipe,
    record_of,
    run,
)

SMALL = AutoencoderRecipe(
    network=FullyConnected(depth=3, width=48),
    training=AutoencoderTraining(epochs=800, lr=3e-3, lr_end=1e-4, levels=(1e-5,)),
)
INVERSION = StrongInversion(zeta=0.01, n_steps=150, starts=("grey",))
RELEASES = (
    defence("noise", set={"released.noise": 0.5}),
    defence("int8", set={"released.precision": "int8"}),
)


def split_plan(root: Path, *defences: Any, **changes: Any) -> AuditPlan:
    """Photographs, of which clients send the first layer's features."""
    own = recipe(victim=Network(widths=(64, 32)), cut=1)
    made = audit(recipe=own, defences=defences, attacks=("features", "loss"), inversion=INVERSION)
    return plan_of(replace(made, **changes), root)


def autoencoder_plan(root: Path, *defences: Any) -> AuditPlan:
    made = audit(
        recipe=recipe(autoencoder=SMALL), defences=defences,
        attacks=("autoencoder", "span", "loss", "likelihood_ratio"),
        recovery=NoiseAware(n_steps=30),
    )  # fmt: skip
    return plan_of(made, root, images_of(80, 120))


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> AuditPlan:
    slow = {"mixcon": {"lam": 1.0}}
    plan = split_plan(
        tmp_path_factory.mktemp("split"), *RELEASES, defence("deeper", set={"cut": 2}),
        defence("mixcon", set=slow, scale={"training.optimiser.lr": 0.1, "training.epochs": 5}),
    )  # fmt: skip
    run(plan)
    return plan


@pytest.fixture(scope="module")
def auto(tmp_path_factory: pytest.TempPathFactory) -> AuditPlan:
    early = defence("early", set={"autoencoder.training.levels": [0.05]})
    plan = autoencoder_plan(tmp_path_factory.mktemp("auto"), *RELEASES, early)
    run(plan)
    return plan


def scores(plan: AuditPlan, name: Any, cell: str = "as it is") -> tuple[float, float]:
    """Mean SSIM of members and of decoys."""
    number = plan.numbers[cell]
    ssim = plan.scores(plan.study.cells[number], name)[0]["ssim"].astype(np.float64)
    members = plan.jobs[number].members
    return float(ssim[members].mean()), float(ssim[~members].mean())


def test_images_come_back_from_features_and_decoys_do_not(split: AuditPlan) -> None:
    back, decoys = scores(split, "features")
    assert back > 0.5
    assert decoys < 0.25
    noisy, _decoys = scores(split, "features", "noise")
    assert noisy < back - 0.1
    cell = record_of(split)["cells"][0]["attacks"]["features"]
    assert cell["good_at"]["0.01"]["mean"] > 0.8
    assert cell["p_value"] < 0.01


def test_what_is_sent_is_the_activations_of_the_layer(split: AuditPlan) -> None:
    arrays, job = product(split.jobs[0]), split.jobs[0]
    pool = unit_pictures(job.pool).numpy()
    x = (pool[None] - arrays["mean"][:, None]).reshape(4, len(pool), -1)
    first = np.maximum(x @ arrays["weights/0"].transpose(0, 2, 1), 0)
    second = np.maximum(first @ arrays["weights/1"].transpose(0, 2, 1), 0)
    output = (second @ arrays["weights/2"].transpose(0, 2, 1))[..., 0]
    sign = job.pool.labels * 2 - 1
    np.testing.assert_allclose(arrays["confidence"], output * sign, atol=1e-4)
    drawn = [torch.Generator().manual_seed(k) for k in range(4)]
    features = torch.from_numpy(first)
    noisy = sent_features(features, split.jobs[1].recipe, drawn)
    size = features.square().mean((1, 2)).sqrt()
    relative = (noisy - features).flatten(1).std(1) / size
    assert relative.tolist() == pytest.approx([0.5] * 4, rel=0.1)
    rounded = sent_features(features, split.jobs[2].recipe, drawn)
    steps = rounded / (features.amax(-1, keepdim=True) / 127)
    assert float((steps - steps.round()).abs().nan_to_num().max()) < 1e-3


def test_the_price_of_noisy_features_is_paid_by_who_sends_them(split: AuditPlan) -> None:
    plain, noisy = (product(split.jobs[split.numbers[n]]) for n in ("as it is", "noise"))
    for name in ("weights/0", "weights/1", "weights/2"):  # the network is the same
        assert plain[name].tobytes() == noisy[name].tobytes()
    assert (plain["confidence"] != noisy["confidence"]).mean() > 0.9


def test_mixcon_draws_features_together(split: AuditPlan) -> None:
    distances = []
    for name in ("as it is", "mixcon"):
        arrays, job = product(split.jobs[split.numbers[name]]), split.jobs[split.numbers[name]]
        assert arrays["train_accuracy"].tolist() == [1.0] * 4, name
        pool = unit_pictures(job.pool).numpy()
        x = (pool[None] - arrays["mean"][:, None]).reshape(4, len(pool), -1)
        h = np.maximum(x @ arrays["weights/0"].transpose(0, 2, 1), 0)
        u = h / np.linalg.norm(h, axis=2, keepdims=True)
        across = job.pool.labels[:, None] != job.pool.labels
        far = [np.linalg.norm(own[m][:, None] - own[m], axis=2)[across[m][:, m]].mean()
               for own, m in zip(u, job.members, strict=True)]  # fmt: skip
        distances.append(np.mean(far))
    assert distances[1] < 0.9 * distances[0]


def test_cells_that_differ_in_what_becomes_of_networks_train_them_once(
    split: AuditPlan, auto: AuditPlan, tmp_path: Path
) -> None:
    made = audit(defences=(defence("student", set={"distilled": True}), *RELEASES))
    students = plan_of(made, tmp_path / "students", images_of(80, 120))
    noisy = audit(recipe=recipe(released=Released(noise=0.1)), defences=RELEASES[1:])
    each = plan_of(noisy, tmp_path, images_of(80))  # int8 of noisy weights, and noisy weights
    for plan, by in ((split, [0, 0, 0, 0, 4]), (auto, [0, 0, 0, 3]), (students, [0] * 4),
                     (each, [0, 1])):  # fmt: skip
        assert list(plan.trained_by.values()) == by
    assert [unit.name for unit in split.first_units()] == ["train as it is", "train mixcon"]
    assert len(run(students).done) == students.n_units == 4 + 4 * 4
    for number, plan in ((3, split), (1, auto), (1, students)):
        job = plan.jobs[number]
        assert job.networks_of == plan.jobs[0].key
        alone = replace(job, root=str(tmp_path / "alone"), networks_of="")
        assert alone.key == job.key
        ours, theirs = product(alone), product(job)
        assert ours.keys() == theirs.keys()
        assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


def test_an_autoencoder_gives_its_images_back_and_no_others(auto: AuditPlan) -> None:
    back, decoys = scores(auto, "autoencoder")
    assert back > 0.9
    assert decoys < 0.6
    noisy, _decoys = scores(auto, "autoencoder", "noise")
    assert noisy < back - 0.1
    record = record_of(auto)
    base = record["cells"][0]
    assert record["price"] == "variance explained"
    assert base["attacks"]["span"] == {
        "status": "refused", "why": "it is an attack on classifiers, and this is an autoencoder",
    }  # fmt: skip
    for name in ("loss", "likelihood_ratio"):
        assert base["attacks"][name]["found_at"]["0.01"]["mean"] > 0.9, name
    assert base["accuracy"]["train"] > 0.99 > base["accuracy"]["test"]
    early = record["cells"][auto.numbers["early"]]
    assert early["accuracy"]["train"] < base["accuracy"]["train"]
    assert {entry["why"] for entry in record["exposed"]} <= {"", "it is fitted worst"} | {
        f"{words}its class leaks most" for words in ("", "it is fitted worst; ")
    }


def test_answers_of_an_autoencoder_are_those_of_its_errors() -> None:
    generator = torch.Generator().manual_seed(0)
    pool, tests = (torch.rand(n, 1, 4, 4, generator=generator) for n in (6, 5))
    tiny = AutoencoderRecipe(network=FullyConnected(depth=2, width=3))
    weights = {"0.weight": torch.zeros(2, 3, 16), "0.bias": torch.zeros(2, 3),
               "1.weight": torch.zeros(2, 16, 3), "1.bias": torch.zeros(2, 16)}  # fmt: skip
    weights["1.bias"][1] = tests.mean(0).flatten()  # which knows nothing but their mean
    members = torch.tensor([[True] * 3 + [False] * 3] * 2)
    found = answers(tiny, weights, pool, tests, members)
    torch.testing.assert_close(found["confidence"][0], -pool.square().flatten(1).mean(1).log())
    assert float(found["correct"][1].mean()) == pytest.approx(0.0, abs=1e-6)
    wanted = 1 - pool[:3].square().mean() / (pool[:3] - pool[:3].mean(0)).square().mean()
    assert float(found["train_accuracy"][0]) == pytest.approx(float(wanted), rel=1e-5)


def test_slopes_are_released_with_the_other_weights() -> None:
    weights = {"0.weight": torch.rand(2, 3, 4), "0.slope": torch.tensor([0.25, 0.5])}
    drawn = [torch.Generator().manual_seed(k) for k in range(2)]
    given = released_weights(weights, Released(noise=0.1), drawn)
    assert given["0.slope"].shape == (2,)
    assert (given["0.slope"] != weights["0.slope"]).all()
    whole = released_weights(weights, Released(), drawn)
    assert all(torch.equal(whole[name], weights[name]) for name in weights)


def test_attacks_that_a_recipe_gives_nothing_for_say_what_is_missing(tmp_path: Path) -> None:
    made = audit(attacks=("span", "features", "autoencoder", "loss", "likelihood_ratio"))
    plan = plan_of(made, tmp_path, images_of(80))
    base = plan.study.cells[0]
    assert "set recipe.cut" in (plan.why_not(base, "features") or "")
    assert "set recipe.autoencoder" in (plan.why_not(base, "autoencoder") or "")
    run(plan)
    record = record_of(plan)
    assert record["cells"][0]["attacks"]["features"]["status"] == "refused"
    assert record["left_out"] == [f"the attack {name}" for name in ("span, start known", "KKT")]


def test_a_recipe_as_trained_leaves_out_what_becomes_of_networks() -> None:
    assert VictimRecipe(cut=2).as_trained == VictimRecipe()
    assert recipe(cut=2, mixcon=MixCon()).as_trained.cut == 2
