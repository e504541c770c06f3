"""Methods of an attack on an autoencoder by name, with the paper's settings for its network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import get_args

from flows.method_settings import with_settings
from flows.naming import unknown_name
from recon_core.attacks.plug_and_play import KnownMask, UnknownMask
from tasks.families.autoencoder.inputs import Method

DEEP = 15
"""Layers from which on a dense network takes the settings that the autoencoder paper has for 20."""
METHODS: dict[str, type[Method]] = {
    cls.__dataclass_fields__["kind"].default: cls for cls in get_args(Method)
}


def autoencoder_methods(
    names: Sequence[str], *, architecture: str = "", noise: float = 0.0,
    settings: Mapping[str, str] | None = None,
) -> tuple[Method, ...]:  # fmt: skip
    """Methods by name, with the autoencoder paper's settings for a kind of network, then changed.

    `settings`: `gamma=.5` for every method that has it, `unknown.gamma=.5` for one. Raises
    ValueError for unknown names and bad values.
    """
    for name in names:
        if name not in METHODS:
            raise ValueError(unknown_name("method", name, METHODS))
    methods = [_papers(METHODS[name](), architecture, noise) for name in names]
    return tuple(with_settings(methods, settings))


def _papers(method: Method, architecture: str, noise: float) -> Method:
    """Gamma by network and noise, and H's start with a U-Net (autoencoder paper, D and G)."""
    is_unet = architecture.startswith("unet")
    is_deep = "prelu" in architecture or architecture.count("-") >= DEEP
    gamma = 0.1 if noise or (is_deep and not is_unet) else 1.0 if is_unet else 0.5
    if isinstance(method, UnknownMask):
        return replace(method, gamma=gamma, start="nothing" if is_unet else "random")
    if isinstance(method, KnownMask):
        return replace(method, gamma=gamma, noisy=noise > 0)
    return method
