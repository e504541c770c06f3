"""Invert what a client's half sends, and score it beside chance: each reconstruction against its
own image, and against the others, which it cannot be of. The SSIM to the others is what a picture
gets for looking like any picture of this kind; an image counts as identified if its reconstruction
is more like it than like any other. For people: a sheet of pictures, a page, raw files."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from recon_core.attacks.inversion.feature_matching import GradientInversion, Inverted
from recon_core.attacks.inversion.strong_inversion import (
    ZETAS,
    StrongInversion,
    errors_by_zeta,
    whiten,
)
from recon_core.attacks.plug_and_play import Ending
from recon_core.metrics import ssim_matrix
from recon_core.precision import float32_arithmetic
from recon_core.similarity import perceptual_similarity, similarities, spread
from recon_core.types import seeded_generator
from recon_core.victims.separability import separability
from tasks.attack_file.comparison import six_digits
from tasks.attack_file.pictures import Named
from tasks.attack_file.report import as_bytes
from tasks.families.inversion.inputs import InversionJob, PreparedCut, features
from tasks.page.files import page_html
from tasks.page.formats import fixed
from tasks.page.pictures import COLUMNS, Tile, data_uri, strips_sheet, wrapped

Method = GradientInversion | StrongInversion
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
    on_progress: Callable[[float, float], None] = lambda _done, _total: None,
) -> list[Attacked]:
    """Every attack on all images; `tuned`: ours finds its zeta on public images, if there are any.

    Raises ValueError for features that cannot be attacked.
    """
    attacked = []
    with float32_arithmetic("float32", torch.device(device)):
        for i, method in enumerate(methods):
            on_progress(i, len(methods))
            started = time.perf_counter()
            used, found, notes = _inverted(job, prepared, method, tuned, device)
            x, original = found.x.float(), prepared.data.images
            every = ssim_matrix(x.to(device), original.to(device)).cpu().double()
            own, rest = every.diagonal(), every.clone().fill_diagonal_(-math.inf)
            maps, truth = prepared.maps(x.to(device)), prepared.maps(original.to(device))
            scores, others = similarities(x, original), [layer.roll(-1, 0) for layer in truth]
            attacked.append(
                Attacked(
                    used, found, ssim=2 * scores.ssim - 1,
                    others=(every.sum(1) - own) / (len(own) - 1), identified=own > rest.amax(1),
                    psnr=scores.psnr, mse=scores.mse,
                    psim=perceptual_similarity(maps, truth).cpu(),
                    psim_other=perceptual_similarity(maps, others).cpu(),
                    seconds=time.perf_counter() - started, notes=notes,
                )
            )  # fmt: skip
    on_progress(len(methods), len(methods))
    return attacked


def _inverted(
    job: InversionJob, prepared: PreparedCut, method: Method, tuned: bool, device: str
) -> tuple[Method, Inverted, tuple[str, ...]]:
    """The method with the zeta that it used, its reconstructions, and notes about them.

    Features are measured by the spread of those of public images or, without, of those sent.
    """
    more: dict[str, Any] = {}
    notes: list[str] = []
    if isinstance(method, StrongInversion):
        public = None if prepared.public is None else prepared.public.images
        known = prepared.z if public is None else features(prepared.h, public, device)
        more["whitening"] = whiten(known)
        if public is None:
            notes.append(
                "No --public images: features are measured by the spread of those that were sent."
            )
        if tuned and public is not None:
            few = public[:N_TUNED].to(device)
            drawn = [seeded_generator(job.seed, row, "start tuning") for row in range(len(few))]
            error = errors_by_zeta(method, prepared.h, few, ZETAS, generators=drawn, **more)
            zeta = ZETAS[int(error.argmin())]
            method = dataclasses.replace(method, zeta=zeta)
            edge = "; the largest that was tried, so more may be better" * (zeta == ZETAS[-1])
            notes.append(
                f"zeta = {zeta:g} was best of {len(ZETAS)} on {len(few)} public images{edge}."
            )
        elif tuned:
            notes.append(f"zeta is the default, {method.zeta:g}, not found on public images.")
    n_starts = len(method.starts) if isinstance(method, StrongInversion) else 1
    per_group = max(1, VALUES_AT_ONCE // (n_starts * math.prod(prepared.shape)))
    parts = []
    for rows in torch.arange(len(prepared.z)).split(per_group):
        drawn = [seeded_generator(job.seed, int(row), "start") for row in rows]
        parts.append(
            method.invert(
                prepared.h, prepared.z[rows], shape=prepared.shape, generators=drawn, **more
            )
        )
    fields = ("x", "objective", "ending", "n_steps")
    joined = Inverted(*(torch.cat([getattr(p, f).cpu() for p in parts]) for f in fields))
    if n_lost := int((joined.ending == Ending.NONFINITE).sum()):
        notes.append(
            f"{n_lost} of {len(joined.x)} descents diverged and were stopped at the last finite "
            "image: a smaller rate may do better (--set sgd.lr=1, strong.lr=.01)."
        )
    return method, joined, tuple(notes)


def inversion_record(attacked: Attacked, names: Sequence[str]) -> dict[str, Any]:
    """Scores of one attack, as JSON: every image, and what the MixCon paper reports of them all."""
    scores = {"ssim": attacked.ssim, "ssim_unit": (attacked.ssim + 1) / 2}
    scores |= {"psnr": attacked.psnr, "mse": attacked.mse, "psim": attacked.psim}
    chance = {"ssim": attacked.others, "ssim_unit": (attacked.others + 1) / 2}
    chance["psim"] = attacked.psim_other
    found = attacked.found
    of_images = scores | {"ssim_others": attacked.others, "identified": attacked.identified}
    columns = {key: values.tolist() for key, values in of_images.items()}
    columns["objective"] = found.objective.tolist()

    def spread_of(name: str, values: Float64[Tensor, " n"]) -> dict[str, Any]:
        """`worst` is who defends' worst case: the image recovered best."""
        found = spread(values, higher_is_alike=name != "mse")
        numbers = {"mean": found.mean, "std": found.std, "worst": found.worst}
        return {**six_digits(numbers), "worst_image": names[found.worst_row]}

    return {
        "attack": attacked.method.kind,
        "title": attacked.title,
        "settings": dataclasses.asdict(attacked.method),
        "summary": {name: spread_of(name, values) for name, values in scores.items()},
        "chance": {name: spread_of(name, values) for name, values in chance.items()},
        "n_identified": int(attacked.identified.sum()),
        "identified_by_chance": six_digits(1 / len(names)),
        "images": [
            {"name": name} | six_digits({key: values[i] for key, values in columns.items()})
            for i, name in enumerate(names)
        ],
        "endings": {e.name.lower(): int((found.ending == e).sum()) for e in Ending},
        "n_steps": six_digits(float(found.n_steps.double().mean())),
        "seconds": round(attacked.seconds, 3),
        "notes": list(attacked.notes),
    }


def separability_of(z: Float[Tensor, "n m"]) -> dict[str, float | None]:
    """Mean and least distance of different images' features, at norm 1 (MixCon paper, 3.1)."""
    found = separability(z.unsqueeze(0))
    return dict(six_digits({"mean": float(found.mean), "minimum": float(found.minimum)}))


def shown_rows(attacked: Sequence[Attacked], n_shown: int) -> list[int]:
    """From best to worst by the last attack, which is ours where there are both; where not all are
    shown, at equal steps from the best to the worst."""
    order = attacked[-1].order()
    if len(order) <= n_shown:
        return order
    places = np.linspace(0, len(order) - 1, n_shown).round().astype(int)
    return [order[place] for place in places]


def inversion_page(
    record: Mapping[str, Any],
    data: Named,
    attacked: Sequence[Attacked],
    context: Mapping[str, Any],
) -> tuple[str, bytes]:
    """The page, and a PNG of originals over reconstructions with their SSIM, bold where identified,
    ten a row, from best to worst.

    `context`: `command` and `created` as texts, `versions` as a mapping, `outcome` in a sentence or
    two, `n_shown`.
    """
    rows = shown_rows(attacked, context["n_shown"])
    shown: list[tuple[str, list[Tile]]] = [
        ("original", [(as_bytes(data.images[i]), "", False) for i in rows])
    ]
    for a in attacked:
        scored = ((i, f"{float(a.ssim[i]):.2f}", bool(a.identified[i])) for i in rows)
        shown.append((a.title, [(as_bytes(a.found.x[i]), text, bold) for i, text, bold in scored]))
    lines = [(title.replace("'s ", "'s\n"), tiles) for title, tiles in shown]
    columns = min(len(rows), COLUMNS)
    png = strips_sheet([*wrapped(lines)], columns=columns, labels=1.5, tile_inches=0.78)

    def spread_text(found: Mapping[str, Any], digits: int = 2) -> str:
        """`.53 ± .08`."""
        return f"{fixed(found['mean'], digits)} ± {fixed(found['std'], digits)}"

    page = page_html(
        "attack-inversion.html",
        {"figure": lambda value, digits=2: fixed(value, digits), "spread": spread_text},
        record=record,
        names=[data.names[i] for i in rows],
        walls=[(t, [(data_uri(p), text, bold) for p, text, bold in tiles]) for t, tiles in shown],
        context=context,
    )
    return page, png
