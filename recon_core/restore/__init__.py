"""The restorers: networks that turn a reconstruction into the image it came from.

A restorer is a frozen dataclass of hyperparameters with three methods: `build` a network, its
training `loss`, and `restore`. `fit` trains any of them. A new one is a file here and a member of
the union and of `RESTORERS`.
"""

from __future__ import annotations

from recon_core.restore.bf_dncnn import BFDnCNN
from recon_core.restore.edm import EDM
from recon_core.restore.examples import Examples, make_examples, noise_examples
from recon_core.restore.fit import Fit, NonfiniteLossError, Training

Restorer = EDM | BFDnCNN
"""Any restorer; `kind` is the tag that tells them apart."""

RESTORERS: dict[str, type[EDM] | type[BFDnCNN]] = {"edm": EDM, "bf_dncnn": BFDnCNN}
"""Each restorer's class by its `kind`."""

__all__ = [
    "EDM",
    "RESTORERS",
    "BFDnCNN",
    "Examples",
    "Fit",
    "NonfiniteLossError",
    "Restorer",
    "Training",
    "make_examples",
    "noise_examples",
]
