"""Recover degraded images from an autoencoder, score them, and show them.

The work goes in pieces: some images of one case by one method, a function of f, the images, the
method and their own random numbers. Each leaves a checkpoint in `OUT/cache`, named by a hash of all
that it depends on, so that none is done again. Results are training images beside images that f
never saw; and for people a sheet of pictures, a page, raw files.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from recon_core.attacks.autoencoder.preflight import reconstruction_errors
from recon_core.attacks.plug_and_play import Degraded, Ending, Function, KnownMask
from recon_core.similarity import (
    ACCURATE,
    APPROXIMATE,
    THRESHOLDS,
    Rates,
    errors,
    psnr,
    rates,
)
from recon_core.types import seeded_generator
from storage.checkpoints import load_checkpoint, save_checkpoint
from storage.errors import StoreMismatchError
from tasks.attack_file.comparison import claimed, six_digits
from tasks.attack_file.report import STEPS, as_bytes, uri_of, write_arrays
from tasks.families.autoencoder.inputs import AutoencoderJob, AutoencoderVictim, Case, Method
from tasks.page.files import page_html
from tasks.page.pictures import Strip, strips_sheet, wrapped

PIECE = 32
"""Images of one piece."""
TITLES = {
    "noise_aware": "ours, mask unknown",
    "unknown": "paper, mask unknown",
    "known": "paper, mask known",
    "iteration": "f alone",
}
SIDES = {"train": "training images", "control": "control images"}
MAX_SHOWN = 20
"""Images of each mask and side on the page."""


@dataclass(frozen=True, eq=False)
class Recovery:
    """One method's images of one case; `residual`: the mean square of f(x) - x, which needs no
    original. `mask`: the estimate of H."""

    case: Case
    method: Method
    x: Float[Tensor, "n c h w"]
    mask: Bool[Tensor, "n c h w"]
    n_applied: Int64[Tensor, " n"]
    ending: Int64[Tensor, " n"]
    residual: Float64[Tensor, " n"]
    seconds: float

    @cached_property
    def mse(self) -> Float64[Tensor, " n"] | None:
        """Errors, where the originals are known."""
        return None if self.case.original is None else errors(self.x, self.case.original)

    @cached_property
    def rates(self) -> Rates | None:
        return None if self.mse is None else rates(self.mse)

    @property
    def title(self) -> str:
        """Title of its method."""
        return TITLES[self.method.kind]

    @property
    def counted(self) -> str:
        """`6 of 8 accurate`, if that is known."""
        return "" if self.rates is None else f"{self.rates.n_accurate} of {self.rates.n} accurate"

    def order(self, n: int) -> list[int]:
        """The best n rows: by error, or, without originals, by what f changes least."""
        by = self.residual if self.mse is None else self.mse
        return [int(row) for row in by.argsort(stable=True)[:n]]

    def label(self, row: int) -> str:
        """The score of one image, in a few characters."""
        if self.mse is None:
            return f"{float(self.residual[row]):.0e}"
        return f"{float(psnr(self.mse[row : row + 1])):.0f} dB"

    def is_accurate(self, row: int) -> bool:
        """True if it came back accurately; False where that is not known."""
        return self.mse is not None and bool(self.mse[row] < ACCURATE)

    def record(self) -> dict[str, Any]:
        """Everything but the pictures, as JSON; in the form of a cell of `recovery.json`."""
        case, mask = self.case, self.case.mask
        known_share = accuracy = None
        if mask is not None:
            known_share = float(mask.double().mean())
            if self.method.kind != "iteration":
                accuracy = float((self.mask == mask).double().mean())
        scores = {} if self.rates is None else asdict(self.rates)
        names = ("n_accurate", "n_approximate", "accurate", "approximate", "psnr", "by_threshold")
        record: dict[str, Any] = six_digits(
            {
                "mask": case.mask_name,
                "split": case.side,
                "method": self.method.kind,
                "n": len(case.names),
                "known_share": known_share,
                "images": list(case.names),
                "residual": self.residual.tolist(),
                "n_applied": float(self.n_applied.double().mean()),
                "endings": {e.name.lower(): int((self.ending == e).sum()) for e in Ending},
                "mask_accuracy": accuracy,
                "seconds": round(self.seconds, 3),
                **{name: scores.get(name) for name in names},
                "mse": None if self.mse is None else self.mse.tolist(),
            }
        )
        return record


def recover_all(
    job: AutoencoderJob,
    victim: AutoencoderVictim,
    cases: tuple[Case, ...],
    *,
    device: str,
    on_progress: Callable[[float, float], None],
) -> list[Recovery]:
    """Recover every case by every method.

    Raises StoreMismatchError if `job.out` is of other weights, CorruptPartError if a checkpoint is
    corrupt.
    """
    cache = job.out / "cache"
    wanted = {"weights": victim.sha256}
    if claimed(cache, wanted) != wanted:
        raise StoreMismatchError(
            f"{job.out} holds an attack on other weights; use another --out, or --fresh to start "
            "over"
        )
    f: Function = victim.function(device)
    facts = {name: value for name, value in victim.facts.items() if name != "file"}
    known = [_known_noise(job), device.partition(":")[0]]
    total = len(job.methods) * sum(len(case.names) for case in cases)
    done, recoveries = 0, []
    for case, method in itertools.product(cases, job.methods):
        parts: list[dict[str, Tensor]] = []
        seconds = 0.0
        for first in range(0, len(case.names), PIECE):
            rows = range(first, min(first + PIECE, len(case.names)))
            purpose = [job.seed, case.mask_name, case.side, rows.start, rows.stop]
            text = json.dumps([facts, asdict(method), purpose, known], sort_keys=True)
            digest = hashlib.sha256(text.encode())
            for tensor in _given(case, method, rows):
                digest.update(b"" if tensor is None else tensor.numpy().tobytes())
            on_progress(done, total)
            name = f"{method.kind}_{digest.hexdigest()[:24]}"
            if (saved := load_checkpoint(cache, name)) is None:
                started = time.perf_counter()
                part = recover_piece(job, f, case, method, rows, device=device)
                meta = {"seconds": round(time.perf_counter() - started, 3)}
                save_checkpoint(cache, name, {key: t.numpy() for key, t in part.items()}, meta)
            else:
                arrays, meta = saved
                part = {key: torch.from_numpy(a.copy()) for key, a in arrays.items()}
            parts.append(part)
            seconds += meta["seconds"]
            done += len(rows)
        tensors = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        recoveries.append(Recovery(case, method, seconds=seconds, **tensors))
    on_progress(done, total)
    return recoveries


def recover_piece(
    job: AutoencoderJob, f: Function, case: Case, method: Method, rows: range, *, device: str
) -> dict[str, Tensor]:
    """Some images of a case by one method, which are saved together."""
    y, mask = (None if t is None else t.to(device) for t in _given(case, method, rows))
    assert y is not None
    purpose = f"start {case.mask_name} {case.side}"
    drawn = tuple(seeded_generator(job.seed, row, purpose) for row in rows)
    degraded = Degraded(y=y, mask=mask, sigma=_known_noise(job), generators=drawn)
    result = method.recover(f, degraded)
    residual = reconstruction_errors(f, result.x).nan_to_num(nan=torch.inf)
    tensors = {n: getattr(result, n) for n in ("x", "mask", "n_applied", "ending")}
    return {n: t.cpu().contiguous() for n, t in (tensors | {"residual": residual}).items()}


def _given(case: Case, method: Method, rows: range) -> list[Tensor | None]:
    """Degraded images, and the mask for a method that is given it."""
    mask = case.mask if isinstance(method, KnownMask) else None
    return [None if t is None else t[rows.start : rows.stop] for t in (case.y, mask)]


def _known_noise(job: AutoencoderJob) -> float | None:
    """The noise's level, which the methods get only where the user says it of pictures that are
    degraded already; eight bits have no negative values to measure it on."""
    return job.noise if job.degraded is not None and job.noise else None


def pairs(recoveries: Sequence[Recovery]) -> list[tuple[Recovery, Recovery | None]]:
    """Every recovery of training images, with the control's of the same mask and method."""
    found = {(one.case.side, one.case.mask_name, one.method.kind): one for one in recoveries}
    return [
        (one, found.get(("control", mask, method)))
        for (side, mask, method), one in found.items()
        if side == "train"
    ]


def conventions(job: AutoencoderJob) -> dict[str, str]:
    """Meanings of the words and numbers."""
    return {
        "accurate": f"mean square error below {ACCURATE:g}, a PSNR above 70 dB (paper 000)",
        "approximate": f"below {APPROXIMATE:g}, 33 dB",
        "thresholds": ", ".join(f"{value:g}" for value in THRESHOLDS),
        "residual": "mean square of f(x) - x of what came back; small at fixed points of f",
        "intervals": "95 %: Clopper and Pearson for shares, bootstrap over images for PSNR",
        "noise": f"Gaussian, standard deviation {job.noise:g}" if job.noise else "none",
    }


def write_recoveries(path: Path, recoveries: Sequence[Recovery]) -> None:
    """Pictures in [0, 1] as safetensors: `SIDE/MASK/METHOD/x`, and per case what they were made
    from."""
    arrays: dict[str, Tensor] = {}
    for one in recoveries:
        start, kind = f"{one.case.side}/{one.case.mask_name}", one.method.kind
        arrays[f"{start}/degraded"] = one.case.y
        if one.case.original is not None:
            arrays[f"{start}/original"] = one.case.original
        arrays[f"{start}/{kind}/x"] = one.x
        if kind != "iteration":
            arrays[f"{start}/{kind}/mask"] = one.mask.to(torch.uint8)
    write_arrays(path, arrays)


def recoveries_sheet(recoveries: Sequence[Recovery], n_shown: int) -> bytes:
    """PNG: per mask, originals over degraded images over what each method made of them."""
    strips: list[Strip] = []
    for heading, case, group, order in _walls(recoveries, n_shown):
        strips.append(heading)
        given = [] if case.original is None else [("original", case.original)]
        given.append(("degraded", case.y))
        rows = [(title, [(as_bytes(x[i]), "", False) for i in order]) for title, x in given]
        for one in group:
            title = "\n".join([*one.title.split(", "), one.counted]).rstrip()
            tiles = [(as_bytes(one.x[i]), one.label(i), one.is_accurate(i)) for i in order]
            rows.append((title, tiles))
        strips += wrapped(rows)
    widest = max(len(strip[1]) for strip in strips if not isinstance(strip, str))
    return strips_sheet(strips, columns=max(widest, 4), labels=1.8, at_edge=True)


def _walls(
    recoveries: Sequence[Recovery], n_shown: int
) -> list[tuple[str, Case, list[Recovery], list[int]]]:
    """(heading, case, its recoveries, the best rows of the first) of each case, in order."""
    walls = []
    for _case, same in itertools.groupby(recoveries, key=lambda one: id(one.case)):
        group = list(same)
        case, order = group[0].case, group[0].order(n_shown)
        where = "" if case.mask_name == "given" else f", mask {case.mask_name}"
        heading = f"{SIDES[case.side]}{where}"
        if case.original is None:
            heading = "degraded pictures, and how far f moves what came back"
        n = len(case.names)
        heading += f": the best {len(order)} of {n}" if len(order) < n else ""
        walls.append((heading, case, group, order))
    return walls


def autoencoder_page(
    record: Mapping[str, Any], recoveries: Sequence[Recovery], context: Mapping[str, Any]
) -> str:
    """The page. `context`: `command` and `created` as texts, `settings` and `versions`."""

    def percent(estimate: Sequence[float]) -> str:
        """`50 % (21 to 79)`."""
        value, low, high = (100 * number for number in estimate)
        return f"{value:.0f} % ({low:.0f} to {high:.0f})"

    rows = [
        {
            "mask": one.case.mask_name,
            "known": None if one.case.mask is None else float(one.case.mask.double().mean()),
            "method": one.title,
            "n_applied": float(one.n_applied.double().mean()),
            "seconds": one.seconds,
            "train": one.rates,
            "control": None if control is None else control.rates,
            "residual": float(one.residual.median()),
        }
        for one, control in pairs(recoveries)
    ]
    return page_html(
        "attack-autoencoder.html", {"percent": percent, "shown": uri_of}, record=record, rows=rows,
        walls=_walls(recoveries, MAX_SHOWN), steps=STEPS, context=context,
    )  # fmt: skip
