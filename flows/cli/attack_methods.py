"""Methods of attack by name, with the papers' settings for a kind of network, then changed.

Nothing here needs a flow, so nothing here imports Prefect: preflight and refusals come at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import TypeVar, get_args

from pydantic import TypeAdapter, ValidationError

from flows.naming import unknown_name
from recon_core.attacks.inversion.feature_matching import MNIST, SVHN, GradientInversion
from recon_core.attacks.inversion.strong_inversion import StrongInversion
from recon_core.attacks.plug_and_play import KnownMask, UnknownMask
from tasks.families.autoencoder.inputs import Method
from tasks.families.inversion.inputs import Attack

DEEP = 15
"""Layers from which on a dense network takes the settings that 000 has for 20."""
InversionMethod = GradientInversion | StrongInversion
AnyMethod = TypeVar("AnyMethod", bound=Method | InversionMethod)
METHODS: dict[str, type[Method]] = {
    cls.__dataclass_fields__["kind"].default: cls for cls in get_args(Method)
}


def autoencoder_methods(
    names: Sequence[str], *, architecture: str = "", noise: float = 0.0,
    settings: Mapping[str, str] | None = None,
) -> tuple[Method, ...]:  # fmt: skip
    """The methods by name, with paper 000's settings for a kind of network, then changed.

    `settings`: `gamma=.5` for every method that has it, `unknown.gamma=.5` for one. Raises
    ValueError for unknown names and bad values.
    """
    for name in names:
        if name not in METHODS:
            raise ValueError(unknown_name("method", name, METHODS))
    methods = [_papers(METHODS[name](), architecture, noise) for name in names]
    for setting, value in (settings or {}).items():
        methods = with_setting(methods, setting, value)
    return tuple(methods)


def _papers(method: Method, architecture: str, noise: float) -> Method:
    """000, appendix D and G: gamma by network and noise, and where H starts with a U-Net."""
    is_unet = architecture.startswith("unet")
    is_deep = "prelu" in architecture or architecture.count("-") >= DEEP
    gamma = 0.1 if noise or (is_deep and not is_unet) else 1.0 if is_unet else 0.5
    if isinstance(method, UnknownMask):
        return replace(method, gamma=gamma, start="nothing" if is_unet else "random")
    if isinstance(method, KnownMask):
        return replace(method, gamma=gamma, noisy=noise > 0)
    return method


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
    for setting, value in (settings or {}).items():
        methods = with_setting(methods, setting, value)
    for method in methods:
        if method.value_range != (0.0, 1.0):
            raise ValueError(
                f"value_range={method.value_range}, but images are in [0, 1]; leave it as it is"
            )
    return tuple(methods)


def with_setting(methods: Sequence[AnyMethod], setting: str, value: str) -> list[AnyMethod]:
    """Methods with `name=value` for all that have it, or `kind.name=value` for one; ValueError."""
    prefix, dot, name = setting.rpartition(".")
    if dot and prefix not in [m.kind for m in methods]:
        raise ValueError(unknown_name("method in --set", prefix, [m.kind for m in methods]))
    takes = [m for m in methods if _has(m, name) and prefix in ("", m.kind)]
    if not takes:
        known = {f.name for m in methods for f in fields(m) if f.name != "kind"}
        raise ValueError(unknown_name("setting", name, known))
    return [_with(m, name, value) if m in takes else m for m in methods]


def _has(method: AnyMethod, name: str) -> bool:
    return name != "kind" and name in {f.name for f in fields(method)}


def _with(method: AnyMethod, name: str, value: str) -> AnyMethod:
    from flows.settings import explained, replace_setting

    tree = json.loads(json.dumps(asdict(method)))
    replace_setting(tree, name, value)
    adapter: TypeAdapter[AnyMethod] = TypeAdapter(type(method))
    try:
        return adapter.validate_python(tree)
    except ValidationError as error:
        raise ValueError(f"--set {name}={value}: {explained(error)}") from error
