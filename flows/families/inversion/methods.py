"""Attacks on the features of a classifier: the paper's, ours or both, with changed settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flows.method_settings import with_settings
from recon_core.attacks.inversion.feature_matching import MNIST, SVHN, GradientInversion
from recon_core.attacks.inversion.strong_inversion import StrongInversion
from tasks.families.inversion.inputs import Attack

InversionMethod = GradientInversion | StrongInversion


def inversion_methods(
    attack: Attack, *, channels: int, n_steps: int | None = None,
    settings: Mapping[str, str] | None = None,
) -> tuple[InversionMethod, ...]:  # fmt: skip
    """The paper's attack, with its settings for grey or coloured images, ours, or both; changed.

    `settings`: `lr=.1` for every attack that has it, `sgd.lr=1` or `strong.zeta=.03` for one.
    Raises ValueError for unknown names and bad values.
    """
    paper = SVHN if channels == 3 else MNIST
    chosen: dict[Attack, list[InversionMethod]] = {
        "paper": [paper],
        "strong": [StrongInversion()],
        "both": [paper, StrongInversion()],
    }
    methods = chosen[attack]
    if n_steps is not None:
        methods = [replace(m, n_steps=n_steps) for m in methods]
    methods = with_settings(methods, settings)
    for method in methods:
        if method.value_range != (0.0, 1.0):
            raise ValueError(
                f"value_range={method.value_range}, but images are in [0, 1]; leave it as it is"
            )
    return tuple(methods)
