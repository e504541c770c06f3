"""Output of a benchmark: one JSON object a line, with the machine it was measured on.

A script defines `measure(quick) -> Iterator[Measurement]` and calls `main(measure)`; run it as
`python -m benchmarks.FOLDER.NAME [--quick] [--json FILE]`. `docs/results/` keeps such files
(`benchmarks/`), claims (`claims/`, lists of `Claim`) and summaries of runs (`runs/`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from recon_core.strict import Strict
from tasks.devices import cpu_name
from tasks.study.statements import Outcome, Statement, decided

VERSIONS = ("torch", "numpy", "scikit-image", "zarr", "dask", "prefect")
RATIO_TOLERANCE = 0.01
AGREEMENT = 1e-3
"""Relative difference of two sides in float32 that are compared."""

_Record = TypeVar("_Record")
_Results = TypeVar("_Results")
Hardware = dict[str, str | int | float | None]


@dataclass(frozen=True, kw_only=True)
class Measurement(Strict):
    """One number, and the number it is compared with.

    `ratio` is reference_value / value: how many times less of `unit` than the reference it takes.
    Without a reference all three are None. `value` is a median over `repeats`.
    """

    benchmark: str
    case: str
    value: float
    unit: str
    reference: str | None
    reference_value: float | None
    ratio: float | None
    repeats: int
    hardware: Hardware
    versions: dict[str, str]

    def __post_init__(self) -> None:
        numbers = (self.value, self.reference_value, self.ratio)
        counted = self.reference is None and self.value == 0  # of things there may be none
        if not (counted or all(n is None or (math.isfinite(n) and n > 0) for n in numbers)):
            raise ValueError(f"value, reference_value and ratio are {numbers}; expected above 0")
        if self.repeats < 1:
            raise ValueError(f"repeats={self.repeats}; expected at least 1")
        given = [self.reference is None, self.reference_value is None, self.ratio is None]
        if len(set(given)) > 1:
            raise ValueError("reference, reference_value and ratio go together: all or none")
        if self.reference_value is not None and self.ratio is not None:
            expected = self.reference_value / self.value
            if abs(self.ratio / expected - 1) > RATIO_TOLERANCE:
                raise ValueError(
                    f"ratio={self.ratio} is not reference_value / value = {expected:.3g}"
                )


@dataclass(frozen=True, kw_only=True)
class Claim(Strict):
    """A claim of a paper, and what our check of it gave.

    `outcome`: as `tasks.study.statements` tells them apart. `rule`: what decides, in
    words. `seconds` are None where nobody measured them.
    """

    claim: str
    where: str
    theirs: str
    ours: str
    outcome: Outcome
    rule: str | None = None
    command: str
    seconds: float | None
    hardware: Hardware

    def __str__(self) -> str:
        return (
            f"{self.outcome.upper()}: {self.claim} ({self.where})\n"
            f"  theirs: {self.theirs}\n  ours:   {self.ours}\n  rule:   {self.rule}"
        )


def decided_claims(
    statements: Iterable[Statement[_Results]],
    results: _Results,
    *,
    name: str,
    command: str,
    seconds: float | None,
    machine: Hardware,
) -> list[Claim]:
    """Claims as they come out on results that a command made; `name` stands before our numbers."""
    made = {"command": command, "seconds": seconds, "hardware": machine}
    found = decided(statements, results)
    return [Claim(**one | made | {"ours": f"{name}{one['ours']}"}) for one in found]


def compared(
    benchmark: str,
    case: str,
    *,
    ours: Callable[[], object],
    reference: str,
    theirs: Callable[[], object],
    repeats: int,
    per_call: int = 1,
    reference_per_call: int | None = None,
) -> Measurement:
    """Median seconds of `ours` beside those of `theirs`, timed in turns.

    Each is called once unmeasured. `per_call` and `reference_per_call` (the same if left out) are
    the units of work in one call of either.
    """
    ours()
    theirs()
    timed = [(seconds_of(ours), seconds_of(theirs)) for _ in range(repeats)]
    return measured(
        benchmark,
        case,
        statistics.median(pair[0] for pair in timed) / per_call,
        "s",
        repeats,
        reference=reference,
        reference_value=statistics.median(pair[1] for pair in timed)
        / (reference_per_call or per_call),
    )


def batched(
    benchmark: str,
    case: Callable[[int], str],
    run: Callable[[range], tuple[Tensor, Tensor]],
    *,
    n: int,
    one_in: int,
    n_checked: int,
    repeats: int,
) -> Measurement:
    """Seconds of one of n items that are computed together, beside one at a time.

    `run` gives the results of some rows and the number of steps that each took, which `case` names;
    alone only every `one_in`-th is computed. Raises ValueError if the first `n_checked` of these
    differ from the batch, or if the numbers of steps do.
    """

    def one_by_one(rows: range) -> list[tuple[Tensor, Tensor]]:
        return [run(range(row, row + 1)) for row in rows]

    rows = range(0, n, one_in)
    together, alone = run(range(n)), one_by_one(rows[:n_checked])
    check_agreement(together[0][list(rows[:n_checked])], torch.cat([one[0] for one in alone]))
    n_steps = {int(steps) for _results, of_rows in (together, *alone) for steps in of_rows}
    if len(n_steps) > 1:
        raise ValueError("the two sides do not take equally many steps: not comparable")
    return compared(
        benchmark,
        case(n_steps.pop()),
        ours=lambda: run(range(n)),
        reference="the same method, one image at a time",
        theirs=lambda: one_by_one(rows),
        repeats=repeats,
        per_call=n,
        reference_per_call=len(rows),
    )


def measured(
    benchmark: str,
    case: str,
    value: float,
    unit: str = "relative difference",
    repeats: int = 1,
    *,
    reference: str | None = None,
    reference_value: float | None = None,
) -> Measurement:
    """A number to four digits, alone or beside another."""
    value = float(f"{value:.4g}")
    other = None if reference_value is None else float(f"{reference_value:.4g}")
    return Measurement(
        benchmark=benchmark,
        case=case,
        value=value,
        unit=unit,
        reference=None if other is None else reference,
        reference_value=other,
        ratio=None if other is None else float(f"{other / value:.4g}"),
        repeats=repeats,
        hardware=hardware(),
        versions=versions(),
    )


def median_seconds(action: Callable[[], object], repeats: int) -> float:
    """The median time of a call, after one that is not counted; a GPU's work is waited for."""
    action()
    return statistics.median(seconds_of(action) for _ in range(repeats))


def relative(ours: Tensor, theirs: Tensor) -> float:
    """|ours - theirs| / |theirs|, in float64."""
    one, other = (tensor.detach().cpu().double() for tensor in (ours, theirs))
    return float((one - other).norm() / other.norm())


def check_agreement(ours: Tensor, theirs: Tensor, what: str = "results") -> None:
    """Raises ValueError if the two sides do not compute the same thing."""
    if not (difference := relative(ours, theirs)) < AGREEMENT:
        raise ValueError(
            f"the two sides differ by {difference:.2g} relative of {what}, more than {AGREEMENT}: "
            "not comparable"
        )


def process_memory(name: str) -> float:
    """VmRSS or VmHWM of this process in MiB; the peak is not getrusage's, which starts from that
    of the parent. Linux only."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) / 1024


def in_new_processes(
    action: Callable[..., float], given: tuple[object, ...], *, repeats: int
) -> float:
    """The median of what `action` gives, each time in a process of its own."""
    return statistics.median(in_new_process(action, *given) for _ in range(repeats))


def in_new_process(action: Callable[..., _Results], *given: object) -> _Results:
    """Result of a call in a process of its own, which may start others."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(action, *given).result()


def added_memory(warm_up: Callable[[], object], action: Callable[[], object]) -> float:
    """MiB that the peak of this process in `action` lies above what it held before."""
    warm_up()  # loads the libraries and the code
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = process_memory("VmRSS")
    action()
    return process_memory("VmHWM") - before


def hardware() -> Hardware:
    """The machine, the threads torch uses, and how busy it is with other work."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "memory_gib": round(memory / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that the numbers depend on."""
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def parse_lines(text: str, *, name: str) -> list[Measurement]:
    """The measurements of a file, one a line.

    Raises:
        ValueError: a line is not a measurement; the message says which one, and what is wrong.
    """
    adapter = TypeAdapter(Measurement)
    measurements = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            measurements.append(checked_json(adapter, line, f"{name}, line {number}"))
    if not measurements:
        raise ValueError(f"{name} has no measurement; run its benchmark again with --json {name}")
    return measurements


def parse_claims(text: str, *, name: str) -> list[Claim]:
    """The claims of a file, a JSON list. Raises ValueError as `parse_lines` does."""
    return checked_json(TypeAdapter(list[Claim]), text, name)


def claims_in(path: Path | None) -> list[Claim]:
    """The claims of a file; none where there is none."""
    return parse_claims(path.read_text(), name=path.name) if path and path.is_file() else []


def write_claims(claims: Sequence[Claim], path: Path | None) -> None:
    """Print claims, and write them to a file."""
    for claim in claims:
        print(claim)
    if path is not None:
        path.write_text(json.dumps([asdict(claim) for claim in claims], indent=1) + "\n")


def checked_json(adapter: TypeAdapter[_Record], text: str, where: str) -> _Record:
    """`text` as a record; ValueError naming `where`, the field and the fix if it is not one."""
    try:
        return adapter.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the object"
        raise ValueError(
            f"{where}: {place}: {first['msg']}; run the command that wrote it again"
        ) from error


def publish(measurements: Iterable[Measurement], path: Path | None) -> list[Measurement]:
    """Print each as a line of JSON as it comes, write those so far to `path`, and return all."""
    found, lines = [], []
    for measurement in measurements:
        found.append(measurement)
        lines.append(json.dumps(asdict(measurement)))
        print(lines[-1], flush=True)
        if path is not None:
            path.write_text("\n".join(lines) + "\n")
    return found


def main(
    measure: Callable[[bool], Iterator[Measurement]], argv: Sequence[str] | None = None
) -> None:
    """The command line of a benchmark: prints a line per measurement, and writes them to --json."""
    parser = argparse.ArgumentParser(description=measure.__doc__)
    parser.add_argument("--quick", action="store_true", help="small cases and few repeats")
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    options = parser.parse_args(argv)
    publish(measure(options.quick), options.json)


def seconds_of(action: Callable[[], object]) -> float:
    """The time of one call, with a GPU's work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
