"""Defences of an audit and its sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from flows.papers import gradient_descent
from recon_core.attacks.kkt.objective import KKTAttack
from tasks.audit.recipe import AutoencoderRecipe
from tasks.audit.settings import MEMBERSHIP, Audit, Defence, GivenWeights

SLOW = ("4 times the images", "augmentation")
"""Defences that are left out of the wide size."""
EPSILONS = (1.0, 8.0, 50.0)
PRIVATE_EPOCHS, PRIVATE_RATE = 60, 0.1
"""Steps of the whole batch and their rate: more steps need more noise."""
MIXCON = ((1.0, 1e-4), (10.0, 1e-4), (1.0, 1e-2))
"""(lambda, beta) of MixCon; the first is the MixCon paper's choice, table 3."""
MIXCON_SLOWER = 0.1
"""Of the rate: its gradient goes with one over the features, which are small at first."""
QUICK = ("Adam", "small start (risky)", "weight decay 0.01", "DP-SGD, epsilon 8",
         "weights in int8", "noise of 50 % on the weights")  # fmt: skip
"""Defences of the quick size."""


def defences() -> tuple[Defence, ...]:
    """Every defence of the grid, and other ways to train."""
    return tuple(_defences())


def _defences() -> Iterator[Defence]:
    def made(name: str, about: str, *, group: str = "", **changes: Any) -> Defence:
        return Defence(name=name, group=group or name, about=about, **changes)

    yield made(
        "Adam",
        "Trained by Adam at rate .001 in place of SGD.",
        kind="variant",
        set={"training.optimiser": {"rule": "adam", "lr": 1e-3}},
    )
    yield made(
        "momentum",
        "Trained by SGD with momentum .9, at rate .01.",
        kind="variant",
        set={"training.optimiser": {"rule": "gd", "lr": 0.01, "momentum": 0.9}},
    )
    yield made(
        "small start (risky)",
        "The first layer starts at 1e-4, as in papers on reconstruction; torch starts it larger.",
        kind="variant",
        set={"victim.init_std_first": 1e-4},
    )
    for name, share in (("a tenth", 0.1), ("a hundredth", 0.01)):
        yield made(
            f"{name} of the epochs",
            "Training stops early.",
            group="early stopping",
            scale={"training.epochs": share},
        )
    for decay in (0.001, 0.01):
        yield made(
            f"weight decay {decay:g}",
            "Weights shrink in every step.",
            group="weight decay",
            set={"training.weight_decay": decay},
        )
    for factor in (2, 4):
        yield made(
            f"{factor} times the images",
            f"Each network learns {factor} times as many images.",
            group="more images",
            scale={"n_images": factor},
        )
    yield made(
        "augmentation",
        "Every image is learned in 8 views, mirrored and moved by up to 4 pixels.",
        set={"views": 8},
    )
    yield made(
        "dropout",
        "Half of the hidden neurons are left out at every step.",
        set={"dropout": 0.5},
    )
    for epsilon in EPSILONS:
        yield made(
            f"DP-SGD, epsilon {epsilon:g}",
            "Gradients of single images are clipped and get noise, in few steps of all images.",
            group="DP-SGD",
            set={
                "private": {"epsilon": epsilon},
                "training.epochs": PRIVATE_EPOCHS,
                "training.batch_size": None,
                "training.optimiser": {"rule": "gd", "lr": PRIVATE_RATE},
            },
        )
    for noise in (0.1, 0.5):
        yield made(
            f"noise of {noise:.0%} on the weights".replace("%", " %"),
            "Normal noise is added to the weights before they are given away.",
            group="noise on the weights",
            set={"released.noise": noise},
        )
    yield made(
        "weights in float16",
        "Weights are given away in half precision.",
        group="precision",
        set={"released.precision": "float16"},
    )
    yield made(
        "weights in int8",
        "Weights are given away in 255 steps a neuron.",
        group="precision",
        set={"released.precision": "int8"},
    )
    yield made(
        "publish weights alone",
        "The optimiser's state stays at home, in place of a whole checkpoint of training.",
        set={"checkpoint": False},
    )
    yield made(
        "distillation",
        "A student learns the network's answers on public images, and is given away in its place.",
        set={"distilled": True},
    )


def split_defences() -> tuple[Defence, ...]:
    """Defences of a network that is cut after its first hidden layer."""
    return tuple(_split_defences())


def _split_defences() -> Iterator[Defence]:
    for lam, beta in MIXCON:
        yield Defence(
            name=f"MixCon, lambda {lam:g}, beta {beta:g}",
            group="MixCon",
            about="Features of images of different classes are drawn together in training, at a "
            "tenth of the rate.",
            set={"mixcon": {"lam": lam, "beta": beta}},
            scale={"training.optimiser.lr": MIXCON_SLOWER},
        )
    yield Defence(
        name="a tenth of the rate",
        group="MixCon",
        about="The rate that MixCon is trained at, without it.",
        scale={"training.optimiser.lr": MIXCON_SLOWER},
    )
    yield Defence(
        name="cut after the second layer",
        group="deeper cut",
        about="Clients compute one layer more, and send what comes out of that.",
        set={"cut": 2},
    )
    same = {"noise on the weights": "noise on the features", "precision": "precision"}
    for defence in defences():
        if defence.group in same:
            yield replace(
                defence,
                name=defence.name.replace("weights", "features"),
                group=same[defence.group],
                about=defence.about.replace("the weights before they are given away", "features")
                .replace("Weights are given away", "Features are sent")
                .replace("a neuron", "an image"),
            )
    kept = ("weight decay", "more images", "augmentation", "small start (risky)", "Adam", "dropout")
    yield from (defence for defence in defences() if defence.group in kept)


def autoencoder_defences() -> tuple[Defence, ...]:
    """Defences of an autoencoder, which has no labels."""
    kept = ("more images", "augmentation", "noise on the weights", "precision")
    early = (
        Defence(
            name=f"stopped at a loss of {level:g}",
            group="early stopping",
            about="Training stops early.",
            set={"autoencoder.training.levels": [level]},
        )
        for level in (0.01, 0.001)
    )
    return (*early, *(defence for defence in defences() if defence.group in kept))


def cpu() -> Audit:
    """Width 200, up to 100 images, 12 networks a cell."""
    return Audit(preset="cpu", defences=defences(), kkt=search(800))


def wide() -> Audit:
    """Width 1,000, the width of the papers; what takes most time is left out."""
    made = cpu()
    victim = replace(made.recipe.victim, widths=(1000, 1000))
    return replace(
        made,
        preset="wide",
        recipe=replace(made.recipe, victim=victim),
        defences=tuple(defence for defence in made.defences if defence.name not in SLOW),
        left_out=(f"{', '.join(SLOW)}, which take hours at this width",),
        attacks=tuple(name for name in made.attacks if name != "kkt"),
    )


def quick() -> Audit:
    """Three minutes on two cores: 24 images, 6 networks a cell, a few defences, no KKT attack."""
    made = cpu()
    some = tuple(defence for defence in made.defences if defence.name in QUICK)
    others = [defence.name for defence in made.defences if defence.name not in QUICK]
    return replace(
        made,
        preset="quick",
        most_images=24,
        defences=some,
        n_victims=6,
        n_tests=400,
        attacks=tuple(name for name in made.attacks if name != "kkt"),
        left_out=(
            f"{', '.join(others)}",
            "networks of more than 24 images, and half of the networks",
        ),
    )


def split() -> Audit:
    """The networks of `cpu`, of whose images clients send what the first hidden layer makes. MixCon
    is of all images of a step, so that steps are of all."""
    made = cpu()
    training = replace(made.recipe.training, epochs=3000, batch_size=None)
    return replace(
        made,
        preset="split",
        recipe=replace(made.recipe, cut=1, training=training),
        defences=split_defences(),
        attacks=("features", *MEMBERSHIP),
    )


def autoencoder() -> Audit:
    """Autoencoders of 4 layers, up to 24 images, 12 networks a cell."""
    made = cpu()
    return replace(
        made,
        preset="autoencoder",
        recipe=replace(made.recipe, autoencoder=AutoencoderRecipe()),
        defences=autoencoder_defences(),
        most_images=24,
        attacks=("autoencoder", *MEMBERSHIP),
    )


def given() -> Audit:
    """One network that is there: it is attacked as it is, and as it might be given away."""
    made = cpu()
    some = tuple(
        d for d in made.defences
        if all(n.startswith("released.") or n == "checkpoint" for n in d.names)
    )  # fmt: skip
    return replace(
        made,
        preset="given",
        weights=GivenWeights(file="", decoys=""),
        defences=some,
        n_victims=1,
        left_out=("defences that need training: audit a recipe for those",),
    )


def search(n_iterations: int) -> KKTAttack:
    """The KKT attack at rates at which a few hundred iterations suffice; condition and number of
    candidates are the recipe's."""
    return KKTAttack(
        sigma=1e-2,
        lam_min=0.1,
        alpha=100.0,
        optimiser=gradient_descent(0.6, 0.9),
        lam_lr=0.3,
        save_at=(n_iterations,),
    )


PRESETS: dict[str, Callable[[], Audit]] = {
    "quick": quick,
    "cpu": cpu,
    "wide": wide,
    "split": split,
    "autoencoder": autoencoder,
    "given": given,
}
