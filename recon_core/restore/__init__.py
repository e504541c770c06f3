"""The restorers: networks that turn a reconstruction into the image it came from.

A restorer is a frozen dataclass of hyperparameters with three methods: `build` a network, its
training `loss`, and `restore`. `fit` trains any of them.
"""

from __future__ import annotations

from recon_core.restore.edm import EDM
from recon_core.restore.examples import Examples, make_examples, noise_examples
from recon_core.restore.fit import Fit, NonfiniteLossError, Training
from recon_core.restore.regression import BFDnCNN, RegressionUNet

PaperRestorer = EDM | BFDnCNN
"""The two of the image restoration paper."""

Restorer = PaperRestorer | RegressionUNet
"""Any restorer; `kind` is the tag that tells them apart."""

PAPER_TRAININGS: dict[str, Training] = {
    "edm": Training(),
    "unet": Training(),
    "bf_dncnn": Training(
        n_steps=40_000, batch_size=128, warmup_images=0, decay="halving", ema_halflife_images=0
    ),
}
"""How the image restoration paper trained each kind (sections 3 and 4); BF-DnCNN has no averaged
weights there, and the U-Net, which the paper has not, is trained as the diffusion model.

Where we depart: the diffusion model trains on EDM's batches of 512, which 2, 4 or 8 GPUs divide,
not 513, and in float32 as EDM's code does, not in double precision. Open: the number of steps (here
EDM's).
"""

_BRIEF = Training(
    n_steps=300,
    batch_size=32,
    lr=3e-3,
    warmup_images=320,
    decay="cosine",
    ema_halflife_images=1000,
)
CPU_TRAININGS: dict[str, Training] = {
    "edm": Training(
        n_steps=1000,
        batch_size=16,
        lr=1.6e-2,
        warmup_images=320,
        decay="cosine",
        ema_halflife_images=2000,
    ),
    "bf_dncnn": _BRIEF,
    "unet": _BRIEF,
}
"""For `CPU_RESTORERS`: about a minute for EDM, half of one for the others, on one free core."""

CPU_RESTORERS: dict[str, Restorer] = {
    "edm": EDM(size="tiny", target="residual", sigma_data=0.33, sigma_max=5.0, n_steps=12),
    "bf_dncnn": BFDnCNN(depth=8, n_channels=48, patch=2),
    "unet": RegressionUNet(size="tiny"),
}
"""Each kind at a size that a CPU trains in about a minute. In that time EDM does not learn to copy
what it is conditioned on, so it diffuses what that lacks."""

__all__ = [
    "CPU_RESTORERS",
    "CPU_TRAININGS",
    "EDM",
    "PAPER_TRAININGS",
    "BFDnCNN",
    "Examples",
    "Fit",
    "NonfiniteLossError",
    "PaperRestorer",
    "RegressionUNet",
    "Restorer",
    "Training",
    "make_examples",
    "noise_examples",
]
