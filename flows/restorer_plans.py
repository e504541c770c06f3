"""Restorers of the presets: minutes on a CPU, half an hour on one core, or as in the image
restoration paper."""

from __future__ import annotations

from dataclasses import replace

from flows.recipe import RestorerPlan
from recon_core.restore import (
    CPU_RESTORERS,
    CPU_TRAININGS,
    EDM,
    PAPER_TRAININGS,
    BFDnCNN,
    RegressionUNet,
    Restorer,
    Training,
)
from tasks.training.validation import Validation


def small_restorers(longer: int = 1, *, fitted: bool = False) -> dict[str, RestorerPlan]:
    """Both restorers at the size that a CPU trains in about `longer` minutes. `fitted`: they go as
    far from a picture as helps images that they have not seen."""
    plans = {}
    for name in ("bf_dncnn", "edm"):
        training = CPU_TRAININGS[name]
        training = replace(training, n_steps=longer * training.n_steps)
        validation = Validation()
        if fitted:
            validation = Validation(every=training.n_steps, n_samples=8, strength="fitted")
        plans[name] = RestorerPlan(
            restorer=CPU_RESTORERS[name], training=training, validation=validation
        )
    return plans


def half_hour_restorers(
    *, fitted: bool = False, regress: bool = False, mirror: bool = True
) -> dict[str, RestorerPlan]:
    """Both restorers as one core trains them in half an hour each, on tens of thousands of pairs;
    `fitted` as of `small_restorers`. `regress`: EDM's network as a regression, too, and both
    regressions answer over mirror sides. `mirror`: mirrored images are like the others.

    They work on patches of 2x2 pixels, which makes them see the whole picture. BF-DnCNN is half as
    deep as the paper's and wider, since it learns faster so. EDM diffuses residuals (.33 of [-1, 1]
    in these pairs); it sees more of the high noise levels, where the reconstruction says what the
    noisy residual does not, and samples from 15 times the residuals on. Mirrored pairs and the best
    of the validations keep both from learning these few pairs by heart.
    """
    training = Training(
        n_steps=5_000,
        batch_size=64,
        lr=2e-3,
        warmup_images=6_400,
        decay="cosine",
        ema_halflife_images=10_000,
        mirror=mirror,
    )
    validation = Validation(every=1000, n_pairs=256, n_parts=2, n_samples=4, keep="best")
    if fitted:
        validation = replace(validation, strength="fitted")
    restorers: dict[str, Restorer] = {
        "bf_dncnn": BFDnCNN(
            depth=10,
            n_channels=96,
            patch=2,
            loss_terms="mse+ssim",
            ssim_weight=0.3,
            mirrored=regress and mirror,
        ),
        "edm": EDM(
            size="mini", target="residual", sigma_data=0.33, P_mean=0.0, sigma_max=5.0, n_steps=12
        ),
    }
    if regress:
        restorers["unet"] = RegressionUNet(
            size="mini", loss_terms="mse+ssim", ssim_weight=0.3, mirrored=mirror
        )
    return {
        name: RestorerPlan(restorer=restorer, training=training, validation=validation)
        for name, restorer in restorers.items()
    }


def paper_restorers() -> dict[str, RestorerPlan]:
    """Both restorers as the image restoration paper trained them (sections 3 and 4), but for what
    `PAPER_TRAININGS` names."""
    return {
        "bf_dncnn": RestorerPlan(restorer=BFDnCNN(), training=PAPER_TRAININGS["bf_dncnn"]),
        "edm": RestorerPlan(restorer=EDM(), training=PAPER_TRAININGS["edm"]),
    }
