"""The study of the autoencoder paper: train autoencoders, ask for their images, judge them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.study_kind import UnitStudy
from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.plug_and_play import Iteration, UnknownMask
from recon_core.restore.edm import EDM
from recon_core.restore.fit import Training
from recon_core.restore.inpaint import DDNM
from recon_core.victims.autoencoder import Activation, FullyConnected, UNet
from recon_core.victims.autoencoder_training import LEVELS, AutoencoderTraining
from storage.files import write_file
from tasks.campaign.state import CONTROL_FILE
from tasks.families.autoencoder.study import record as records
from tasks.families.autoencoder.study.claims import check_recovery
from tasks.families.autoencoder.study.figure_specs import cells_of, describe_figures, lowest, pooled
from tasks.families.autoencoder.study.page import RECOVERY_PAGE
from tasks.families.autoencoder.study.plan import RecoveryPlan, costs_of
from tasks.families.autoencoder.study.settings import (
    Methods,
    Noise,
    RecoveryStudy,
    RecoveryVictim,
    Sources,
)
from tasks.study.executor import Outcome
from tasks.training.inpainter import CPU_DDNM, CPU_INPAINTER, PAPER_INPAINTER, Inpainter

TINY_IMAGENET = "tiny-imagenet:tiny-imagenet-200"
SVHN = "svhn:svhn"
CIFAR10 = "cifar10:cifar-10-batches-py"
ACTIVATIONS: dict[Activation, str] = {
    "leaky_relu": "leaky ReLU",
    "prelu": "PReLU",
    "softplus": "softplus",
}

PAPER_DENSE = AutoencoderTraining(epochs=100_000, lr=1e-4)
PAPER_UNET = AutoencoderTraining(epochs=100_000, lr=1e-3)
MODERATE_DENSE = AutoencoderTraining(
    epochs=2_000, lr=1e-4, batch_size=500, levels=(1e-4,), check_every=5
)
MODERATE_UNET = AutoencoderTraining(epochs=50_000, lr=1e-3, levels=(1e-4,))

CPU_DENSE = AutoencoderTraining(epochs=6_000, lr=1e-3, hold=0.3, levels=(1e-3, *LEVELS))
CPU_UNET = AutoencoderTraining(
    epochs=20_000, lr=2e-3, lr_end=2e-5, levels=(1e-3, 3e-4, 1e-4, 3e-5, *LEVELS[1:])
)
CPU_MODERATE = replace(CPU_DENSE, lr=3e-4, hold=0.6, levels=(1e-3, 1e-4))
CPU_SKIPS = replace(CPU_UNET, epochs=4_000, hold=0.2, levels=(1e-4, 1e-5))
CPU_WIDTH = 512
CPU_CHANNELS = (16, 32, 64, 128, 512)
"""Down to 2x2: what passes there has two thirds of the numbers of an image, so that the network
cannot be the identity."""


def dense(
    depth: int,
    activation: Activation,
    training: AutoencoderTraining,
    *,
    n_images: int,
    width: int = 1024,
    name: str = "",
) -> RecoveryVictim:
    """A fully connected victim with the gamma of the autoencoder paper, appendix D.2.

    Of 20 layers, the autoencoder paper does not say where they start from; from torch's own start
    they hardly learn.
    """
    few_layers = depth == 10 and activation == "leaky_relu"
    return RecoveryVictim(
        name=f"fc{depth}-{activation}{name}",
        title=f"fully connected, {depth} layers, {ACTIVATIONS[activation]}",
        network=FullyConnected(
            depth=depth,
            width=width,
            activation=activation,
            init="torch" if depth <= 10 else "kaiming",
        ),
        training=training,
        n_images=n_images,
        gamma=0.5 if few_layers else 0.1,
        start="random",
    )


def unet(
    activation: Activation,
    training: AutoencoderTraining,
    *,
    n_images: int,
    network: UNet | None = None,
    name: str = "",
) -> RecoveryVictim:
    """A U-Net with gamma and start of the autoencoder paper, section 3.2 and appendix D.2. Its
    title says whether it has skip connections."""
    network = replace(network or UNet(), activation=activation)
    skips = "with" if network.skips else "without"
    return RecoveryVictim(
        name=f"unet-{activation}{name}",
        title=f"U-Net {skips} skip connections, {ACTIVATIONS[activation]}",
        network=network,
        training=training,
        n_images=n_images,
        gamma=1.0,
        start="nothing",
    )


def paper() -> RecoveryStudy:
    """Autoencoder paper, section 4: perfect fitting, and the moderate regime of tables 1 and 2."""
    unets = [unet(activation, PAPER_UNET, n_images=50) for activation in ACTIVATIONS]
    many_dense = dense(20, "leaky_relu", MODERATE_DENSE, n_images=25_000, name="-moderate")
    many_unet = unet("softplus", MODERATE_UNET, n_images=1_000, name="-moderate")
    return RecoveryStudy(
        preset="paper",
        data=TINY_IMAGENET,
        size=64,
        victims=(
            dense(10, "leaky_relu", PAPER_DENSE, n_images=600),
            dense(10, "prelu", PAPER_DENSE, n_images=600),
            dense(20, "leaky_relu", PAPER_DENSE, n_images=600),
            *(replace(victim, data=SVHN, size=32) for victim in unets),
            replace(many_dense, title=f"{many_dense.title}, 25,000 images"),
            replace(many_unet, title=f"{many_unet.title}, 1,000 images", data=CIFAR10, size=32),
        ),
        noise=Noise(victims=("fc10-leaky_relu", "fc20-leaky_relu")),
        inpainter=PAPER_INPAINTER,
    )


def cpu() -> RecoveryStudy:
    """Small networks in hours on two cores, on CIFAR-10 at 32x32.

    The U-Net has no skip connections; the one that has them learns to copy its input, and shows
    that a low training loss alone is no memory.
    """
    small = UNet(channels=CPU_CHANNELS, convolutions=1, skips=False)
    return RecoveryStudy(
        preset="cpu",
        data=CIFAR10,
        victims=(
            dense(10, "leaky_relu", CPU_DENSE, n_images=100, width=CPU_WIDTH),
            dense(10, "prelu", CPU_DENSE, n_images=100, width=CPU_WIDTH),
            dense(20, "leaky_relu", CPU_MODERATE, n_images=100, width=CPU_WIDTH, name="-moderate"),
            unet("leaky_relu", CPU_UNET, n_images=50, network=small),
            replace(
                unet("leaky_relu", CPU_SKIPS, n_images=50, network=replace(small, skips=True)),
                name="unet-skips",
            ),
        ),
        methods=Methods(
            iteration=Iteration(n_iterations=500),
            unknown=UnknownMask(n_alternations=50),
            ddnm=CPU_DDNM,
        ),
        inpainter=CPU_INPAINTER,
        n_shown=4,
    )


def tiny() -> RecoveryStudy:
    """For tests: tiles of photographs of 8x8, every method and mask, seconds."""
    dense_training = AutoencoderTraining(
        epochs=1_500, lr=2e-3, levels=(1e-2, 1e-3, 1e-4), check_every=5
    )
    unet_training = replace(dense_training, epochs=300, levels=(5e-2, 2e-2), lr=5e-3)
    small = dense(3, "leaky_relu", dense_training, n_images=6, width=64)
    folded = UNet(channels=(8, 16), convolutions=1, skips=False)
    return RecoveryStudy(
        preset="tiny",
        data="photos",
        size=8,
        victims=(
            replace(small, gamma=0.5),
            unet("softplus", unet_training, n_images=4, network=folded),
        ),
        methods=Methods(
            iteration=Iteration(n_iterations=50),
            unknown=UnknownMask(n_admm=10, n_alternations=5),
            noise_aware=NoiseAware(fills=(0.5, 0.1), gammas=(0.5,), n_steps=20),
            ddnm=DDNM(n_steps=4),
        ),
        inpainter=Inpainter(
            restorer=EDM(size="tiny"),
            training=Training(n_steps=4, batch_size=8, warmup_images=8),
        ),
        n_shown=3,
    )


class AutoencoderStudy(UnitStudy[RecoveryStudy, RecoveryPlan]):
    """Victims, masks, methods and losses: `RecoveryStudy`."""

    settings = RecoveryStudy
    parts, each, unit = "victims", "victim", "unit"
    products = frozenset({"victims", "inpainter", "cells", CONTROL_FILE})
    flow = "study-autoencoder"
    whole_units = True

    def size(self, study: RecoveryStudy) -> str:
        return f"{len(study.victims)} autoencoders, {len(study.masks)} masks"

    def narrowed(self, study: RecoveryStudy, changes: Mapping[str, Any]) -> RecoveryStudy:
        """Without the noise, if none of the victims is asked with it."""
        noise, names = study.noise, {victim.name for victim in changes["victims"]}
        if noise is not None and noise.victims:
            left = tuple(name for name in noise.victims if name in names)
            noise = replace(noise, victims=left) if left else None
        return replace(study, noise=noise, **changes)

    def plan(self, study: RecoveryStudy, store: Path, device: str) -> RecoveryPlan:
        return RecoveryPlan(study, Sources.read(study), store, device=device)

    def facts(self, plan: RecoveryPlan) -> list[tuple[str, Mapping[str, str]]]:
        return [
            (images.split, images.facts)
            for splits in plan.sources.sets.values()
            for images in splits.values()
        ]

    def describe(self, plan: RecoveryPlan, ended: Outcome) -> tuple[list[Any], dict[str, Any]]:
        hashes = {
            f"{data} {size} {split}": images.content_hash
            for (data, size), splits in plan.sources.sets.items()
            for split, images in splits.items()
        }
        return [self.to_json(plan.study), hashes], records.describe_recovery(plan, ended)

    def keep_pictures(
        self, store: Path, plan: RecoveryPlan, ended: Outcome, record: Mapping[str, Any]
    ) -> None:
        write_file(store / self.pictures, records.pictures_of(plan, ended, record))

    def rows(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One row per victim and method, at the lowest loss that was reached, over all masks."""
        rows: list[dict[str, Any]] = []
        for victim in record["victims"]:
            if (at := lowest(victim)) is None:
                last = f"last {victim['last']['loss']:.2g}"
                rows.append({"victim": victim["title"], "loss": "none", "method": last})
                continue
            for method in record["methods"]:
                where = {"victim": victim["name"], "level": at["level"], "method": method["name"]}
                cells = cells_of(record, split="train", sigma=0.0, **where)
                if not cells:
                    continue
                found = pooled(cells)
                rows.append(
                    {
                        "victim": victim["title"],
                        "loss": f"{at['level']:g}",
                        "method": method["title"],
                        "accurate": f"{found['n_accurate']}/{found['n']}",
                        "approximate": f"{found['n_approximate']}/{found['n']}",
                        "PSNR": f"{found['psnr']:.1f} dB",
                    }
                )
        names = ("victim", "loss", "method", "accurate", "approximate", "PSNR")
        return [{name: row.get(name, "") for name in names} for row in rows]


AUTOENCODER = AutoencoderStudy(
    name="autoencoder",
    title="Training images from overfitted autoencoders",
    question="Do overfitted autoencoders give back training images of which pixels are missing?",
    paper="autoencoder paper, section 4",
    presets={"paper": paper, "cpu": cpu, "tiny": tiny},
    costs=costs_of,
    figures=lambda _plan, record: describe_figures(record),
    claims=check_recovery,
    page=RECOVERY_PAGE,
)
