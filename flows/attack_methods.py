"""Methods of attacks on given files by name, with the papers' settings, changed as `--set` asks.

Nothing here needs a flow, so nothing here imports Prefect: preflight and refusals come at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from flows.naming import unknown_name

if TYPE_CHECKING:
    from recon_core.attacks.inversion.feature_matching import GradientInversion
    from recon_core.attacks.inversion.strong_inversion import StrongInversion
    from tasks.families.autoencoder.inputs import Method
    from tasks.families.inversion.inputs import Attack

AnyMethod = TypeVar("AnyMethod", bound=Any)
"""A frozen dataclass of settings, tagged by `kind`."""
DEEP = 15
"""Layers from which on a dense network takes the settings that the autoencoder paper has for 20."""


def autoencoder_methods(
    names: Sequence[str], *, architecture: str = "", noise: float = 0.0,
    settings: Mapping[str, str] | None = None,
) -> tuple[Method, ...]:  # fmt: skip
    """Build methods by name with the autoencoder paper's settings for a kind of network.

    Gamma is by network and noise, and H's start with a U-Net (appendices D and G). `settings`:
    `gamma=.5` for every method that has it, `unknown.gamma=.5` for one. Raises ValueError for
    unknown names and bad values.
    """
    from recon_core.attacks.plug_and_play import KnownMask, UnknownMask
    from tasks.families.autoencoder.inputs import Method

    known = {cls.__dataclass_fields__["kind"].default: cls for cls in get_args(Method)}
    is_unet = architecture.startswith("unet")
    is_deep = "prelu" in architecture or architecture.count("-") >= DEEP
    gamma = 0.1 if noise or (is_deep and not is_unet) else 1.0 if is_unet else 0.5
    methods = []
    for name in names:
        if name not in known:
            raise ValueError(unknown_name("method", name, known))
        method = known[name]()
        if isinstance(method, UnknownMask):
            method = replace(method, gamma=gamma, start="nothing" if is_unet else "random")
        elif isinstance(method, KnownMask):
            method = replace(method, gamma=gamma, noisy=noise > 0)
        methods.append(method)
    return tuple(with_settings(methods, settings))


def inversion_methods(
    attack: Attack, *, channels: int, n_steps: int | None = None,
    settings: Mapping[str, str] | None = None,
) -> tuple[GradientInversion | StrongInversion, ...]:  # fmt: skip
    """Build the MixCon paper's attack, with its settings for grey or colour images, ours, or both.

    `settings`: `lr=.1` for every attack that has it, `sgd.lr=1` or `strong.zeta=.03` for one.
    Raises ValueError for unknown names and bad values.
    """
    from recon_core.attacks.inversion.feature_matching import MNIST, SVHN
    from recon_core.attacks.inversion.strong_inversion import StrongInversion

    both: dict[str, Any] = {"paper": SVHN if channels == 3 else MNIST, "strong": StrongInversion()}
    methods = [method for name, method in both.items() if attack in (name, "both")]
    if n_steps is not None:
        methods = [replace(m, n_steps=n_steps) for m in methods]
    return tuple(with_settings(methods, settings))


def with_settings(
    methods: Sequence[AnyMethod], settings: Mapping[str, str] | None
) -> list[AnyMethod]:
    """Set `name=value` in every method that has it, or `kind.name=value` in one.

    Raises ValueError for unknown names and bad values.
    """
    kinds, changed = [method.kind for method in methods], list(methods)
    for setting, value in (settings or {}).items():
        from flows.settings import replace_setting, validated

        prefix, dot, name = setting.rpartition(".")
        if dot and prefix not in kinds:
            raise ValueError(unknown_name("method in --set", prefix, kinds))
        names = {m.kind: {f.name for f in fields(m)} - {"kind"} for m in methods}
        taking = [kind for kind in kinds if name in names[kind] and prefix in ("", kind)]
        if not taking:
            raise ValueError(unknown_name("setting", name, sorted(set().union(*names.values()))))
        for k, method in enumerate(changed):
            if method.kind in taking:
                tree = json.loads(json.dumps(asdict(method)))
                replace_setting(tree, name, value)
                try:
                    changed[k] = validated(type(method), tree)
                except ValueError as error:
                    raise ValueError(f"--set {name}={value}: {error}") from error
    return changed
