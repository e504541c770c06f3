"""Invert what a client's half sends, and score it beside chance.

A score needs something to be compared with. A reconstruction is therefore scored against every
image: against its own, and against the others, which it cannot be of. The SSIM to the others is
what a picture gets for looking like any picture of this kind, and an image counts as identified if
its reconstruction is more like it than like any other.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn

from recon_core.attacks.inversion.feature_matching import GradientInversion, Inverted
from recon_core.attacks.inversion.strong_inversion import (
    ZETAS,
    StrongInversion,
    Whitening,
    errors_by_zeta,
    whiten,
)
from recon_core.attacks.plug_and_play import Ending
from recon_core.metrics import ssim_matrix
from recon_core.restore.precision import float32_arithmetic
from recon_core.similarity import perceptual_similarity, similarities, spread
from recon_core.types import seeded_generator
from recon_core.victims.separability import separability
from tasks.attack_file.record import six_digits
from tasks.evaluation.perceptual import MapsOf
from tasks.families.inversion.inputs import InversionJob, PreparedCut, features

Method = GradientInversion | StrongInversion
OnProgress = Callable[[float, float], None]
TITLES = {"sgd": "the paper's attack", "strong": "ours"}
VALUES_AT_ONCE = 3 << 20
"""Pixels and channels of all starts that are moved at once: 340 images of 3x32x32 from 3 starts."""
N_TUNED = 8
"""Public images that zeta is found on."""


@dataclass(frozen=True, eq=False)
class Attacked:
    """One attack's images, scored. `ssim` to the own image and `others`, the mean over all other
    images, are in [-1, 1]; `identified`: the own image is the most alike of all. `psim_other`: to
    the next image."""

    method: Method
    found: Inverted
    ssim: Float64[Tensor, " n"]
    others: Float64[Tensor, " n"]
    identified: Tensor
    psnr: Float64[Tensor, " n"]
    mse: Float64[Tensor, " n"]
    psim: Float64[Tensor, " n"]
    psim_other: Float64[Tensor, " n"]
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return TITLES[self.method.kind]

    def order(self) -> list[int]:
        """Rows, the best recovered first."""
        return [int(row) for row in self.ssim.argsort(descending=True, stable=True)]


def attack_all(
    job: InversionJob,
    prepared: PreparedCut,
    methods: Sequence[Method],
    *,
    tuned: bool,
    device: str,
    on_progress: OnProgress = lambda _done, _total: None,
) -> list[Attacked]:
    """Every attack on all images; `tuned`: ours finds its zeta on public images, if there are any.

    Raises ValueError for features that cannot be attacked.
    """
    maps_of = prepared.maps or own_maps(prepared)
    attacked = []
    with float32_arithmetic("float32", torch.device(device)):
        for i, method in enumerate(methods):
            on_progress(i, len(methods))
            started = time.perf_counter()
            used, found, notes = _inverted(job, prepared, method, tuned, device)
            scores = _scores(prepared, found.x.float(), maps_of, device)
            seconds = time.perf_counter() - started
            attacked.append(
                Attacked(method=used, found=found, seconds=seconds, notes=notes, **scores)
            )
    on_progress(len(methods), len(methods))
    return attacked


def _inverted(
    job: InversionJob, prepared: PreparedCut, method: Method, tuned: bool, device: str
) -> tuple[Method, Inverted, tuple[str, ...]]:
    """The method with the zeta that it used, what it found, and what is to be said about it."""
    whitening: Whitening | None = None
    notes: tuple[str, ...] = ()
    if isinstance(method, StrongInversion):
        whitening, notes = _whitening(prepared, device)
        if tuned and prepared.public is not None:
            method, more = _tuned(job, prepared, method, whitening, device)
            notes = (*notes, more)
        elif tuned:
            notes = (*notes, f"zeta is the default, {method.zeta:g}, not found on public images.")
    n_starts = len(method.starts) if isinstance(method, StrongInversion) else 1
    per_group = max(1, VALUES_AT_ONCE // (n_starts * math.prod(prepared.shape)))
    parts = []
    for rows in torch.arange(len(prepared.z)).split(per_group):
        generators = [seeded_generator(job.seed, int(row), "start") for row in rows]
        parts.append(_solved(method, prepared, prepared.z[rows], generators, whitening))
    fields = ("x", "objective", "ending", "n_steps")
    joined = Inverted(*(torch.cat([getattr(p, f).cpu() for p in parts]) for f in fields))
    n_lost = int((joined.ending == Ending.NONFINITE).sum())
    if n_lost:
        notes = (
            *notes,
            f"{n_lost} of {len(joined.x)} descents diverged and were stopped at the last finite "
            "image: a smaller rate may do better (--set sgd.lr=1, strong.lr=.01).",
        )
    return method, joined, notes


def _solved(
    method: Method,
    prepared: PreparedCut,
    z: Tensor,
    generators: Sequence[torch.Generator],
    whitening: Whitening | None,
) -> Inverted:
    if isinstance(method, StrongInversion):
        return method.invert(
            prepared.h, z, shape=prepared.shape, generators=generators, whitening=whitening
        )
    return method.invert(prepared.h, z, shape=prepared.shape, generators=generators)


def _whitening(prepared: PreparedCut, device: str) -> tuple[Whitening, tuple[str, ...]]:
    """By features of public images, or, without, of those that were sent."""
    if prepared.public is None:
        return whiten(prepared.z), (
            "No --public images: features are measured by the spread of those that were sent.",
        )
    return whiten(features(prepared.h, prepared.public.images, device)), ()


def _tuned(
    job: InversionJob,
    prepared: PreparedCut,
    method: StrongInversion,
    whitening: Whitening,
    device: str,
) -> tuple[StrongInversion, str]:
    assert prepared.public is not None
    public = prepared.public.images[:N_TUNED].to(device)
    generators = [seeded_generator(job.seed, row, "start tuning") for row in range(len(public))]
    error = errors_by_zeta(
        method, prepared.h, public, ZETAS, generators=generators, whitening=whitening
    )
    zeta = ZETAS[int(error.argmin())]
    edge = "; the largest that was tried, so more may be better" if zeta == ZETAS[-1] else ""
    said = f"zeta = {zeta:g} was best of {len(ZETAS)} on {len(public)} public images{edge}."
    return dataclasses.replace(method, zeta=zeta), said


def _scores(
    prepared: PreparedCut, x: Float[Tensor, "n c h w"], maps_of: MapsOf, device: str
) -> dict[str, Tensor]:
    """The scores of an `Attacked`, by name."""
    original = prepared.data.images
    every = ssim_matrix(x.to(device), original.to(device)).cpu().double()
    own = every.diagonal()
    rest = every.clone().fill_diagonal_(-math.inf)
    maps, truth = maps_of(x.to(device)), maps_of(original.to(device))
    scores = similarities(x, original)
    return {
        "ssim": 2 * scores.ssim - 1,
        "others": (every.sum(1) - own) / (len(own) - 1),
        "identified": own > rest.amax(1),
        "psnr": scores.psnr,
        "mse": scores.mse,
        "psim": perceptual_similarity(maps, truth).cpu(),
        "psim_other": perceptual_similarity(maps, [layer.roll(-1, 0) for layer in truth]).cpu(),
    }


def own_maps(prepared: PreparedCut) -> MapsOf:
    """Maps of the attacked classifier: what its outermost modules give, or, where it has fewer than
    two, those inside them; of a file that is taken whole its output."""
    module = prepared.module
    inner = [name for name, _part in module.named_modules() if name]
    if not prepared.network.cut_inside:
        inner = []
    outermost = [name for name in inner if name.count(".") == 0]
    chosen = outermost if len(outermost) > 1 else [n for n in inner if n.count(".") <= 1]

    @torch.no_grad()
    def maps_of(images: Tensor) -> list[Tensor]:
        batch = prepared.network.batch
        parts = []
        for rows in images.split(batch or 64):
            full = rows
            if batch is not None and len(rows) < batch:
                full = torch.cat([rows, rows[-1:].expand(batch - len(rows), *rows.shape[1:])])
            parts.append([m[: len(rows)] for m in _outputs(prepared, module, chosen, full)])
        return [torch.cat(layer) for layer in zip(*parts, strict=True)]

    return maps_of


def _outputs(prepared: PreparedCut, module: nn.Module, names: list[str], x: Tensor) -> list[Tensor]:
    """Of the modules that give a tensor with a row per image, as maps (n, channels, ...)."""
    found: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[[nn.Module, object, object], None]:
        def keep(_module: nn.Module, _inputs: object, output: object) -> None:
            is_map = isinstance(output, Tensor) and output.dim() >= 2 and len(output) == len(x)
            if is_map and name not in found:
                assert isinstance(output, Tensor)
                found[name] = output.clone()  # what follows may work in place

        return keep

    hooks = [module.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    try:
        last = module(prepared.normalise(x))
    finally:
        for handle in hooks:
            handle.remove()
    return list(found.values()) or [last]


def inversion_record(attacked: Attacked, names: Sequence[str]) -> dict[str, Any]:
    """Scores of one attack, as JSON: every image, and what the MixCon paper reports of them all."""
    n = len(names)
    columns: dict[str, Float64[Tensor, " n"]] = {
        "ssim": attacked.ssim,
        "ssim_unit": (attacked.ssim + 1) / 2,
        "psnr": attacked.psnr,
        "mse": attacked.mse,
        "psim": attacked.psim,
    }
    chance = {"ssim": attacked.others, "ssim_unit": (attacked.others + 1) / 2}
    chance["psim"] = attacked.psim_other
    by_chance = {name: _spread(values, higher=True, names=names) for name, values in chance.items()}
    endings: Int64[Tensor, " n"] = attacked.found.ending
    return {
        "attack": attacked.method.kind,
        "title": attacked.title,
        "settings": dataclasses.asdict(attacked.method),
        "summary": {
            name: _spread(values, higher=name != "mse", names=names)
            for name, values in columns.items()
        },
        "chance": by_chance,
        "n_identified": int(attacked.identified.sum()),
        "identified_by_chance": six_digits(1 / n),
        "images": [
            {"name": name}
            | {key: six_digits(float(values[i])) for key, values in columns.items()}
            | {"ssim_others": six_digits(float(attacked.others[i]))}
            | {"identified": bool(attacked.identified[i])}
            | {"objective": six_digits(float(attacked.found.objective[i]))}
            for i, name in enumerate(names)
        ],
        "endings": {e.name.lower(): int((endings == e).sum()) for e in Ending},
        "n_steps": six_digits(float(attacked.found.n_steps.double().mean())),
        "seconds": round(attacked.seconds, 3),
        "notes": list(attacked.notes),
    }


def separability_of(z: Float[Tensor, "n m"]) -> dict[str, float | None]:
    """Mean and least distance of different images' features, at norm 1 (MixCon paper, 3.1)."""
    found = separability(z.unsqueeze(0))
    return {"mean": six_digits(float(found.mean)), "minimum": six_digits(float(found.minimum))}


def _spread(values: Float64[Tensor, " n"], *, higher: bool, names: Sequence[str]) -> dict[str, Any]:
    """`worst` is who defends' worst case: the image recovered best."""
    found = spread(values, higher_is_alike=higher)
    return {
        "mean": six_digits(found.mean),
        "std": six_digits(found.std),
        "worst": six_digits(found.worst),
        "worst_image": names[found.worst_row],
    }
