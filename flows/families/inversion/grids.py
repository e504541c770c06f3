"""The study of the MixCon paper at the paper's size, at a CPU's, and at that of a test.

The MixCon paper gives networks, grids and attacks for MNIST, FashionMNIST and SVHN; eps, the
stronger attack and the restorer are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from recon_core.attacks.inversion.feature_matching import SVHN, GradientInversion
from recon_core.attacks.inversion.strong_inversion import StrongInversion
from recon_core.restore import BFDnCNN, Training
from recon_core.victims.split_training import SplitTraining
from tasks.families.inversion.study.settings import (
    Chain,
    InversionSource,
    InversionStudy,
)

CPU_CHAIN = Chain(
    restorer=BFDnCNN(depth=8, n_channels=48, patch=2, loss_terms="mse+ssim", ssim_weight=0.3),
    training=Training(
        n_steps=300,
        batch_size=32,
        lr=2e-3,
        warmup_images=640,
        decay="cosine",
        ema_halflife_images=1_000,
    ),
)
"""About a minute on one core."""


def paper() -> InversionStudy:
    """MixCon paper, sections 4.2 and 4.3: the grid of 56 settings, four cuts, 100 test images."""
    mnist = InversionSource(
        name="mnist",
        title="MNIST",
        data="mnist:mnist",
        size=28,
        n_train=50_000,
        n_tests=8_000,
        n_public=1_000,
    )
    return InversionStudy(
        preset="paper",
        sources=(
            mnist,
            replace(
                mnist,
                name="fashion-mnist",
                title="FashionMNIST",
                data="fashion-mnist:fashion-mnist",
            ),
            InversionSource(
                name="svhn",
                title="SVHN",
                data="svhn:svhn",
                channels=3,
                n_train=45_000,
                n_tests=15_000,
                n_public=1_000,
                chosen=(0.5, 1e-4),
                unicon=0.5,
                attack=SVHN,
            ),
        ),
        n_seeds=5,
        n_grid_seeds=3,
    )


def cpu() -> InversionStudy:
    """An hour on two cores: digits with the paper's whole grid, and CIFAR-10 in grey."""
    return InversionStudy(
        preset="cpu",
        sources=(
            InversionSource(
                name="digits",
                title="digits",
                data="digits",
                n_train=1_000,
                n_tests=330,
                n_inverted=20,
                n_public=200,
                training=SplitTraining(epochs=150, lr=0.05, per_class=20),
                chosen=(1.0, 1e-2),
            ),
            InversionSource(
                name="cifar10",
                title="CIFAR-10 in grey",
                data="cifar10:cifar-10-batches-py",
                n_train=10_000,
                n_tests=2_000,
                n_inverted=20,
                n_public=200,
                training=SplitTraining(epochs=30, lr=0.01, momentum=0.9, per_class=20),
                lams=(0.01, 0.03, 0.1, 1.0),
                betas=(1e-2, 1e-4, 1e-6),
                chosen=(0.1, 1e-2),
            ),
        ),
        n_seeds=4,
        n_grid_seeds=1,
        rates=(0.03, 0.3, 3.0),
        zetas=(0.1, 0.3, 1.0, 3.0),
        strong=StrongInversion(n_steps=200),
        n_tuning=10,
        chain=CPU_CHAIN,
        victims_at_once=4,
    )


def tiny() -> InversionStudy:
    """For tests: digits of 16x16, two settings, seconds."""
    return InversionStudy(
        preset="tiny",
        sources=(
            InversionSource(
                name="digits",
                title="digits",
                data="digits",
                size=16,
                n_train=200,
                n_tests=100,
                n_inverted=10,
                n_public=40,
                training=SplitTraining(epochs=3, lr=0.05, per_class=10),
                lams=(0.1, 1.0),
                betas=(1e-2,),
                chosen=(1.0, 1e-2),
                cuts=(1, 2),
                attack=GradientInversion(n_steps=10),
            ),
        ),
        n_seeds=2,
        n_grid_seeds=1,
        rates=(0.1, 10.0),
        strong=StrongInversion(n_steps=10, starts=("grey", "noise")),
        zetas=(0.01, 1.0),
        n_tuning=10,
        chain=Chain(
            restorer=BFDnCNN(depth=2, n_channels=4),
            training=Training(n_steps=3, batch_size=8, warmup_images=8),
        ),
        n_shown=3,
    )


PRESETS: dict[str, Callable[[], InversionStudy]] = {"paper": paper, "cpu": cpu, "tiny": tiny}
