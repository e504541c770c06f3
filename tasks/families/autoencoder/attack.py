"""Recover degraded images from an autoencoder in pieces: some images of one case by one method, a
function of f, the images, the method and their own random numbers. Each leaves a checkpoint in
`OUT/cache`, named by a hash of all that it depends on, so that none is done again."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from recon_core.attacks.autoencoder.preflight import reconstruction_errors
from recon_core.attacks.plug_and_play import Degraded, Ending, Function, KnownMask
from recon_core.similarity import ACCURATE, APPROXIMATE, THRESHOLDS, Rates, errors, psnr, rates
from recon_core.types import seeded_generator
from storage.checkpoints import load_checkpoint, save_checkpoint
from storage.errors import StoreMismatchError
from tasks.attack_file.record import claimed, six_digits
from tasks.attack_file.report import STEPS, as_bytes, uri_of, write_arrays
from tasks.families.autoencoder.inputs import AutoencoderJob, AutoencoderVictim, Case, Method
from tasks.page.files import page_html
from tasks.page.pictures import Strip, strips_sheet, wrapped

PIECE = 32
"""Images of one piece."""
OnProgress = Callable[[float, float], None]


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


def recover_all(
    job: AutoencoderJob,
    victim: AutoencoderVictim,
    cases: tuple[Case, ...],
    *,
    device: str,
    on_progress: OnProgress,
) -> list[Recovery]:
    """Every case by every method; raises StoreMismatchError if `job.out` is of other weights.

    CorruptPartError if a checkpoint is not as it was written.
    """
    cache = job.out / "cache"
    wanted = {"weights": victim.sha256}
    if claimed(cache, wanted) != wanted:
        raise StoreMismatchError(
            f"{job.out} holds an attack on other weights; use another --out, or --fresh to start "
            "over"
        )
    pieces = _Pieces(job, victim, cache, device)
    pairs = [(case, method) for case in cases for method in job.methods]
    total = sum(len(case.names) for case, _method in pairs)
    done = 0
    found = []
    for case, method in pairs:
        parts = []
        for rows in _rows(case):
            on_progress(done, total)
            parts.append(pieces.done(case, method, rows))
            done += len(rows)
        found.append(_joined(case, method, parts))
    on_progress(done, total)
    return found


Part = tuple[dict[str, Tensor], float]
"""A piece's tensors and seconds."""


class _Pieces:
    """Does pieces, or reads what was done."""

    def __init__(
        self, job: AutoencoderJob, victim: AutoencoderVictim, cache: Path, device: str
    ) -> None:
        self.job, self.victim, self.cache, self.device = job, victim, cache, device
        self.f: Function = victim.function(device)

    def done(self, case: Case, method: Method, rows: range) -> Part:
        """A piece from its checkpoint, or computed and saved."""
        name = f"{method.kind}_{self.digest(case, method, rows)}"
        saved = load_checkpoint(self.cache, name)
        if saved is not None:
            arrays, meta = saved
            return {key: torch.from_numpy(a.copy()) for key, a in arrays.items()}, meta["seconds"]
        started = time.perf_counter()
        tensors = self.compute(case, method, rows)
        seconds = round(time.perf_counter() - started, 3)
        arrays = {key: tensor.numpy() for key, tensor in tensors.items()}
        save_checkpoint(self.cache, name, arrays, {"seconds": seconds})
        return tensors, seconds

    def compute(self, case: Case, method: Method, rows: range) -> dict[str, Tensor]:
        """Images that the method makes of these rows."""
        chosen = slice(rows.start, rows.stop)
        told = case.mask if isinstance(method, KnownMask) else None
        purpose = f"start {case.mask_name} {case.side}"
        degraded = Degraded(
            y=case.y[chosen].to(self.device),
            mask=None if told is None else told[chosen].to(self.device),
            sigma=_told_noise(self.job),
            generators=tuple(seeded_generator(self.job.seed, row, purpose) for row in rows),
        )
        result = method.recover(self.f, degraded)
        tensors = {
            "x": result.x,
            "mask": result.mask,
            "n_applied": result.n_applied,
            "ending": result.ending,
            "residual": reconstruction_errors(self.f, result.x).nan_to_num(nan=torch.inf),
        }
        return {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}

    def digest(self, case: Case, method: Method, rows: range) -> str:
        """Hash of everything that a piece depends on."""
        facts = {name: value for name, value in self.victim.facts.items() if name != "file"}
        purpose = [self.job.seed, case.mask_name, case.side, rows.start, rows.stop]
        told = [_told_noise(self.job), self.device.partition(":")[0]]
        text = json.dumps([facts, asdict(method), purpose, told], sort_keys=True)
        digest = hashlib.sha256(text.encode())
        chosen = slice(rows.start, rows.stop)
        digest.update(case.y[chosen].numpy().tobytes())
        if case.mask is not None and isinstance(method, KnownMask):
            digest.update(case.mask[chosen].numpy().tobytes())
        return digest.hexdigest()[:24]


def _told_noise(job: AutoencoderJob) -> float | None:
    """What the methods are told of the noise: its level only where the user says it of pictures
    that are degraded already; eight bits have no negative values to measure it on."""
    return job.noise if job.degraded is not None and job.noise else None


def _rows(case: Case) -> Iterator[range]:
    n = len(case.names)
    for first in range(0, n, PIECE):
        yield range(first, min(first + PIECE, n))


def _joined(case: Case, method: Method, parts: list[Part]) -> Recovery:
    tensors = {key: torch.cat([part[key] for part, _s in parts]) for key in parts[0][0]}
    return Recovery(case, method, seconds=sum(seconds for _part, seconds in parts), **tensors)


TITLES = {
    "noise_aware": "ours, mask unknown",
    "unknown": "paper, mask unknown",
    "known": "paper, mask known",
    "iteration": "f alone",
}
RATES = ("n_accurate", "n_approximate", "accurate", "approximate", "psnr", "by_threshold")
SIDES = {"train": "training images", "control": "control images"}


@dataclass(frozen=True, eq=False)
class Cell:
    """One recovery and its scores, where the originals are known."""

    recovery: Recovery
    mse: Float64[Tensor, " n"] | None
    rates: Rates | None

    @property
    def title(self) -> str:
        """Title of its method."""
        return TITLES[self.recovery.method.kind]

    def order(self) -> list[int]:
        """Rows, the best first: by error, or, without originals, by what f changes least."""
        by = self.recovery.residual if self.mse is None else self.mse
        return [int(row) for row in by.argsort(stable=True)]

    def label(self, row: int) -> str:
        """The score of one image, in a few characters."""
        if self.mse is None:
            return f"{float(self.recovery.residual[row]):.0e}"
        return f"{float(psnr(self.mse[row : row + 1])):.0f} dB"

    def is_accurate(self, row: int) -> bool:
        """True if it came back accurately; False where that is not known."""
        return self.mse is not None and bool(self.mse[row] < ACCURATE)


def score(recoveries: Sequence[Recovery]) -> list[Cell]:
    """A cell each."""
    cells = []
    for recovery in recoveries:
        original = recovery.case.original
        mse = None if original is None else errors(recovery.x, original)
        cells.append(Cell(recovery, mse, None if mse is None else rates(mse)))
    return cells


def pairs(cells: Sequence[Cell]) -> list[tuple[Cell, Cell | None]]:
    """Every cell of training images, with the control's of the same mask and method."""
    sides: dict[str, dict[tuple[str, str], Cell]] = {"train": {}, "control": {}}
    for cell in cells:
        case = cell.recovery.case
        sides[case.side].setdefault((case.mask_name, cell.recovery.method.kind), cell)
    return [(cell, sides["control"].get(key)) for key, cell in sides["train"].items()]


def record_of_cell(cell: Cell) -> dict[str, Any]:
    """Everything but the pictures, as JSON; in the form of a cell of `recovery.json`."""
    recovery, case = cell.recovery, cell.recovery.case
    found = {
        "mask": case.mask_name,
        "split": case.side,
        "method": recovery.method.kind,
        "n": len(case.names),
        "known_share": None if case.mask is None else six_digits(float(case.mask.double().mean())),
        "images": list(case.names),
        "residual": six_digits(recovery.residual.tolist()),
        "n_applied": six_digits(float(recovery.n_applied.double().mean())),
        "endings": {e.name.lower(): int((recovery.ending == e).sum()) for e in Ending},
        "mask_accuracy": None
        if case.mask is None or recovery.method.kind == "iteration"
        else six_digits(float((recovery.mask == case.mask).double().mean())),
        "seconds": round(recovery.seconds, 3),
    }
    rates = {} if cell.rates is None else six_digits(asdict(cell.rates))
    mse = None if cell.mse is None else six_digits(cell.mse.tolist())
    return found | {name: rates.get(name) for name in RATES} | {"mse": mse}


def conventions(job: AutoencoderJob) -> dict[str, str]:
    """Meanings of the words and numbers."""
    noise = f"Gaussian, standard deviation {job.noise:g}" if job.noise else "none"
    return {
        "accurate": f"mean square error below {ACCURATE:g}, a PSNR above 70 dB (paper 000)",
        "approximate": f"below {APPROXIMATE:g}, 33 dB",
        "thresholds": ", ".join(f"{value:g}" for value in THRESHOLDS),
        "residual": "mean square of f(x) - x of what came back; small at fixed points of f",
        "intervals": "95 %: Clopper and Pearson for shares, bootstrap over images for PSNR",
        "noise": noise,
    }


def arrays(cells: Sequence[Cell]) -> dict[str, Tensor]:
    """Arrays of what came back, by `SIDE/MASK/METHOD`; degraded and original once per case."""
    found: dict[str, Tensor] = {}
    for cell in cells:
        case = cell.recovery.case
        start = f"{case.side}/{case.mask_name}"
        found[f"{start}/degraded"] = case.y
        if case.original is not None:
            found[f"{start}/original"] = case.original
        kind = cell.recovery.method.kind
        found[f"{start}/{kind}/x"] = cell.recovery.x
        if kind != "iteration":
            found[f"{start}/{kind}/mask"] = cell.recovery.mask.to(torch.uint8)
    return found


MIN_COLUMNS = 4
LABELS = 1.8
"""The width of the methods' names, in tiles."""
MAX_SHOWN = 20
"""Images of each mask and side on the page."""


def write_recoveries(path: Path, cells: Sequence[Cell]) -> None:
    """Pictures in [0, 1] as safetensors, `SIDE/MASK/METHOD/x` and what they were made from."""
    write_arrays(path, arrays(cells))


def recoveries_sheet(cells: Sequence[Cell], n_shown: int) -> bytes:
    """PNG: per mask, originals over degraded images over what each method made of them."""
    strips = list(_strips(cells, n_shown))
    n = max(len(strip[1]) for strip in strips if not isinstance(strip, str))
    return strips_sheet(strips, columns=max(n, MIN_COLUMNS), labels=LABELS, at_edge=True)


def _strips(cells: Sequence[Cell], n_shown: int) -> Iterator[Strip]:
    for case, group in _by_case(cells):
        order = group[0].order()[:n_shown]
        yield _heading(case, len(order))
        given = [("degraded", case.y)]
        if case.original is not None:
            given = [("original", case.original), *given]
        rows = [(title, [(as_bytes(x[i]), "", False) for i in order]) for title, x in given]
        for cell in group:
            title = "\n".join([*cell.title.split(", "), _count(cell)]).rstrip()
            x = cell.recovery.x
            tiles = [(as_bytes(x[i]), cell.label(i), cell.is_accurate(i)) for i in order]
            rows.append((title, tiles))
        yield from wrapped(rows)


def _heading(case: Case, n_shown: int) -> str:
    n = len(case.names)
    shown = f": the best {n_shown} of {n}" if n_shown < n else ""
    if case.original is None:
        return f"degraded pictures, and how far f moves what came back{shown}"
    where = "" if case.mask_name == "given" else f", mask {case.mask_name}"
    return f"{SIDES[case.side]}{where}{shown}"


def _count(cell: Cell) -> str:
    """`6 of 8 accurate`, if that is known."""
    return "" if cell.rates is None else f"{cell.rates.n_accurate} of {cell.rates.n} accurate"


def _by_case(cells: Sequence[Cell]) -> list[tuple[Case, list[Cell]]]:
    """Cells of the same degraded images, in their order."""
    groups: list[tuple[Case, list[Cell]]] = []
    for cell in cells:
        if not groups or groups[-1][0] is not cell.recovery.case:
            groups.append((cell.recovery.case, []))
        groups[-1][1].append(cell)
    return groups


def autoencoder_page(
    record: Mapping[str, Any], cells: Sequence[Cell], context: Mapping[str, Any]
) -> str:
    """The page. `context`: `command` and `created` as texts, `settings` and `versions`."""
    walls = [(case, group, group[0].order()[:MAX_SHOWN]) for case, group in _by_case(cells)]
    return page_html(
        "attack-autoencoder.html",
        {"percent": percent, "small": small, "shown": uri_of},
        record=record,
        rows=list(_table_rows(cells)),
        walls=[(_heading(case, len(order)), case, group, order) for case, group, order in walls],
        counted=_count,
        steps=STEPS,
        context=context,
    )


def percent(estimate: Sequence[float]) -> str:
    """`50 % (21 to 79)`."""
    value, low, high = (100 * number for number in estimate)
    return f"{value:.0f} % ({low:.0f} to {high:.0f})"


def small(value: float | None) -> str:
    """A mean square error, or a dash."""
    return "–" if value is None else f"{value:.1e}"


def _table_rows(cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """The table: training images beside their control."""
    for cell, control in pairs(cells):
        case = cell.recovery.case
        yield {
            "mask": case.mask_name,
            "known": None if case.mask is None else float(case.mask.double().mean()),
            "method": cell.title,
            "n_applied": float(cell.recovery.n_applied.double().mean()),
            "seconds": cell.recovery.seconds,
            "train": cell.rates,
            "control": None if control is None else control.rates,
            "residual": float(cell.recovery.residual.median()),
        }
