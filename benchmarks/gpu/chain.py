"""The chain from images to a report on one GPU within ten minutes: a first look, which resumes.

    python -m benchmarks.gpu.chain --out FOLDER [--device cuda] [--seconds 540] [--data photos]
    python -m benchmarks.gpu.chain --out FOLDER --rehearse

Victims are the image restoration paper's (3072-1000-1000-1, first layer 1e-4, 300 images), trained
and attacked for as much of its schedule as the time allows; `--rehearse` has small ones, for a CPU.
Stages run as commands of Palimpsest, in order of priority, each for its share of the time that is
left; one that is stopped or fails does not end the others. `--work` holds the products: a second
call goes on where the first ended. FOLDER then has chain.json (written after each stage), log.txt,
report.html, pictures, and the products in pieces (work.tar.0, ...) where they are small enough.
Exit code 0 once every stage is done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TREE = Path(__file__).parents[2]
PALIMPSEST = (sys.executable, "-c", "from flows.cli.main import main; main()")
GRACE_S = 15.0
"""Given to a stopped command before it is killed."""
FLOOR_S = 45.0
"""Allowed to every stage while there is time: earlier ones may take it from later ones."""
LEAST_S = 2.0
"""With less left a stage is not started."""
TAIL_CHARS = 2000
PIECE_BYTES, MOST_PIECES = 15 * 2**20, 3


class StoppedError(Exception):
    """A stage's time is up."""


class CommandError(Exception):
    """A command failed; its last words."""


class NoDeviceError(Exception):
    """There is nothing to run on; no further stage is tried."""


@dataclass(frozen=True)
class Job:
    """Folders and settings that every stage has; `record` is what chain.json holds."""

    work: Path
    out: Path
    device: str
    data: str
    small: bool
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def store(self) -> Path:
        return self.work / "store"

    def run(self, seconds: float, *words: str) -> str:
        """Output of a command. Raises StoppedError after `seconds`, CommandError if it fails."""
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(TREE), os.environ.get("PYTHONPATH")]))
        }
        printed = self.work / "printed.txt"
        with printed.open("w") as output:
            process = subprocess.Popen(
                words,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=TREE,
                env=environment,
                process_group=0,
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:  # asked to end; then its group is killed
                    process.send_signal(signal.SIGTERM)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(GRACE_S)
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        text = printed.read_text(errors="replace")
        with (self.out / "log.txt").open("a") as log:
            log.write(f"$ {' '.join(words)}\n{text}\n")
        if code is None:
            raise StoppedError(f"stopped after {seconds:.0f} s: {text[-TAIL_CHARS:]}")
        if code:
            raise CommandError(f"exit code {code}: {text[-TAIL_CHARS:]}")
        return text

    def palimpsest(self, seconds: float, *words: str) -> str:
        return self.run(seconds, *PALIMPSEST, *words)

    def probe(self, seconds: float, *words: str) -> dict[str, Any]:
        """The JSON object that `benchmarks.gpu.probe` printed last."""
        printed = self.run(seconds, sys.executable, "-m", "benchmarks.gpu.probe", *words)
        found: dict[str, Any] = json.loads(printed.splitlines()[-1])
        return found


@dataclass(frozen=True)
class Stage:
    """One step; `weight`: its share of the time among the stages that are left. `always`: in every
    call, though it was done before."""

    name: str
    weight: float
    run: Callable[[Job, float], dict[str, Any]]
    always: bool = False


def run_stages(
    stages: Sequence[Stage],
    job: Job,
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    on_stage: Callable[[str], None] = lambda _name: None,
) -> None:
    """Run the stages that are not done within `seconds`; what came of each stands in the record.

    `on_stage` is called with the name of each. Time that a stage leaves goes to those after it.
    """
    results: dict[str, Any] = job.record.setdefault("stages", {})
    todo = [stage for stage in stages if stage.always or status(results, stage) != "done"]
    until = clock() + seconds
    for k, stage in enumerate(todo):
        started = clock()
        left = until - started
        share = min(left, max(FLOOR_S, left * stage.weight / sum(s.weight for s in todo[k:])))
        if share < LEAST_S:
            if status(results, stage) == "not started":
                results[stage.name] = {"status": "not started", "budget_s": round(share, 1)}
                on_stage(stage.name)
            continue
        result: dict[str, Any] = {"status": "done", "budget_s": round(share, 1)}
        try:
            result["numbers"] = stage.run(job, share)
        except StoppedError as stopped:
            result |= {"status": "stopped", "error": str(stopped)}
        except Exception as error:  # noqa: BLE001 - the stages after it may still tell something
            result |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
            if isinstance(error, NoDeviceError):
                todo.clear()
        result["seconds"] = round(clock() - started, 1)
        results[stage.name] = result
        on_stage(stage.name)


def status(results: dict[str, Any], stage: Stage) -> str:
    return str(results.get(stage.name, {}).get("status", "not started"))


def environment(job: Job, seconds: float) -> dict[str, Any]:
    found = job.probe(seconds, "environment", job.device)
    job.record["calls"][-1]["environment"] = found
    if not found.get("device found"):
        raise NoDeviceError(f"torch finds no {job.device} device; {found['missing']}")
    if found["missing"]:
        raise CommandError(f"cannot be imported: {found['missing']}")
    return {name: found[name] for name in ("driver", "cuda", "hardware")}


def pace(job: Job, seconds: float) -> dict[str, Any]:
    return job.probe(seconds, "pace", job.device, "small" if job.small else "paper", job.data)


def generate(job: Job, seconds: float) -> dict[str, Any]:
    from benchmarks.gpu.settings import PAPER, SMALL, Pace, described, recipe_of, schedule
    from flows.settings import to_json
    from storage.files import write_json

    if "schedule" not in job.record:
        size = SMALL if job.small else PAPER
        measured = job.record["stages"].get("pace", {}).get("numbers")
        planned = schedule(size, Pace(**measured) if measured else None, seconds)
        recipe = recipe_of(size, planned, job.data)
        job.store.mkdir(parents=True, exist_ok=True)
        write_json(job.store / "recipe.json", to_json(recipe))
        job.record["schedule"] = {"pace known": bool(measured), **described(size, planned, recipe)}
    job.palimpsest(seconds, "generate", "--store", str(job.store), "--device", job.device)
    return _contents(job, "train")


def curate(job: Job, seconds: float) -> dict[str, Any]:
    job.palimpsest(seconds, "curate", "--store", str(job.store))
    found: dict[str, Any] = json.loads((job.store / "curation.json").read_text())
    return {name: value for name, value in found.items() if not isinstance(value, dict)}


def train(name: str) -> Callable[[Job, float], dict[str, Any]]:
    """The stage that trains one restorer."""

    def run(job: Job, seconds: float) -> dict[str, Any]:
        words = ("train", "--only", name, "--store", str(job.store), "--device", job.device)
        job.palimpsest(seconds, *words)
        card = json.loads((job.store / "restorers" / name / "model.json").read_text())["meta"]
        return {key: value for key, value in card.items() if isinstance(value, int | float | str)}

    return run


def heldout(job: Job, seconds: float) -> dict[str, Any]:
    words = ("generate", "--split", "heldout", "--store", str(job.store), "--device", job.device)
    job.palimpsest(seconds, *words)
    return _contents(job, "heldout")


def evaluate(job: Job, seconds: float) -> dict[str, Any]:
    from flows.chain import summary_rows

    job.palimpsest(seconds, "evaluate", "--store", str(job.store), "--device", job.device)
    record = json.loads((job.store / "evaluation" / "evaluation.json").read_text())
    return {row.pop("method"): row for row in summary_rows(record)}


def identified(job: Job, seconds: float) -> dict[str, Any]:
    """How many images each method's pictures tell apart, beside decoys."""
    out = job.work / "identified.json"
    module = "benchmarks.restore.identification"
    job.run(seconds, sys.executable, "-m", module, str(job.store), "--json", str(out))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return {f"{line['case']}: {line['unit']}": line["value"] for line in lines}


def verify(job: Job, seconds: float) -> dict[str, Any]:
    found = {}
    until = time.monotonic() + seconds
    for split in ("train", "heldout"):
        words = ("dataset", "verify", "--store", str(job.store), "--split", split)
        job.palimpsest(until - time.monotonic(), *words)
        found[split] = "as its receipts say"
    return found


def again(job: Job, seconds: float) -> dict[str, Any]:
    """One short part, made twice from the same seeds: the hashes are compared."""
    from benchmarks.gpu.settings import again_of
    from flows.settings import read_recipe, to_json
    from storage.files import write_json
    from storage.pairs.dataset import Dataset
    from tasks.workspace import Workspace

    recipe = read_recipe(Workspace(job.store))
    if recipe is None:
        raise CommandError("generate left no recipe")
    until = time.monotonic() + seconds
    first, second = (job.work / name for name in ("first", "second"))
    for folder in (first, second):
        shutil.rmtree(folder, ignore_errors=True)
    first.mkdir()
    write_json(first / "recipe.json", to_json(again_of(recipe)))
    manifest = str(job.work / "manifest.json")
    device = ("--device", job.device)
    for words in (
        ("generate", "--store", str(first), *device),
        ("dataset", "manifest", "--store", str(first), "--out", manifest),
        ("dataset", "regenerate", manifest, "--store", str(second), *device),
    ):
        job.palimpsest(until - time.monotonic(), *words)
    stores = [Dataset(folder / "pairs") for folder in (first, second)]
    hashes = [store.content_hash for store in stores]
    return {"hashes": hashes, "equal": hashes[0] == hashes[1], "pairs": stores[0].n_pairs}


def report(job: Job, seconds: float) -> dict[str, Any]:
    job.palimpsest(seconds, "report", "--store", str(job.store))
    return {"bytes": (job.store / "evaluation" / "report.html").stat().st_size}


def pairs(job: Job, seconds: float) -> dict[str, Any]:
    """A picture of some originals over what came back of them."""
    words = ("dataset", "show", "--store", str(job.store), "--out", str(job.work / "pairs.png"))
    return {"caption": job.palimpsest(seconds, *words).strip().splitlines()[0]}


STAGES = (
    Stage("environment", 40, environment, always=True),
    Stage("pace", 30, pace),
    Stage("generate", 300, generate),
    Stage("curate", 15, curate),
    Stage("train bf_dncnn", 60, train("bf_dncnn")),
    Stage("train edm", 300, train("edm")),
    Stage("heldout", 75, heldout),
    Stage("evaluate", 50, evaluate),
    Stage("identified", 15, identified),
    Stage("verify", 20, verify),
    Stage("again", 45, again),
    Stage("report", 20, report),
    Stage("pairs", 10, pairs),
)


def _contents(job: Job, split: str) -> dict[str, Any]:
    """Counts of a store, and the time that its workers took."""
    from storage.pairs.dataset import Dataset
    from storage.pairs.statistics import summarise

    dataset = Dataset(job.store / {"train": "pairs", "heldout": "heldout"}[split])
    facts, _counts = summarise(dataset)
    names = ("confident_pairs", "images_trained_on", "images_with_a_confident_pair")
    return {
        **{name: facts[name] for name in ("runs", "outcomes", "pairs")},
        **{name.replace("_", " "): facts[name] for name in names},
        "MiB": round(facts["bytes"] / 2**20, 2),
        "seconds of parts": [receipt.seconds for receipt in dataset.receipts],
        "hash": dataset.content_hash,
    }


class Pieces:
    """A file to write that comes out in pieces; it stops, and says so, after the last one."""

    def __init__(self, stem: Path, *, n_bytes: int, most: int) -> None:
        self.stem, self.n_bytes, self.most = stem, n_bytes, most
        self.written = 0

    def write(self, content: bytes) -> int:
        taken = 0
        while taken < len(content):
            index, used = divmod(self.written, self.n_bytes)
            if index >= self.most:
                raise OverflowError(f"more than {self.most} pieces of {self.n_bytes:,} bytes")
            piece = content[taken : taken + self.n_bytes - used]
            with Path(f"{self.stem}.{index}").open("ab") as file:
                file.write(piece)
            taken += len(piece)
            self.written += len(piece)
        return taken


def pack(job: Job, *, n_bytes: int = PIECE_BYTES, most: int = MOST_PIECES) -> str:
    """The work folder as pieces of a tar in the output folder; what came of it, in words."""
    for old in job.out.glob("work.tar.*"):
        old.unlink()
    stem = job.out / "work.tar"
    pieces: Any = Pieces(stem, n_bytes=n_bytes, most=most)
    try:
        with tarfile.open(fileobj=pieces, mode="w|") as archive:
            archive.add(job.work, arcname=job.work.name)
    except OverflowError as error:
        for piece in job.out.glob("work.tar.*"):
            piece.unlink()
        return f"left in {job.work}: {error}"
    return f"{pieces.written:,} bytes in {stem.name}.*"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages; the exit code."""
    parser = argparse.ArgumentParser(description="The chain on one GPU, in stages that resume.")
    parser.add_argument("--out", type=Path, required=True, help="folder of what comes back")
    parser.add_argument("--work", type=Path, default=Path("palimpsest-runs/gpu"))
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--data", default="photos", help="as of palimpsest: photos, folder:PATH")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all of this call")
    parser.add_argument("--rehearse", action="store_true", help="small victims, on the CPU")
    options = parser.parse_args(argv)
    started, load = time.monotonic(), os.getloadavg()[0]
    for folder in (options.out, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    kept = options.work / "chain.json"
    record = json.loads(kept.read_text()) if kept.is_file() else {}
    device = options.device or ("cpu" if options.rehearse else "cuda")
    asked = {"device": device, "data": options.data, "rehearse": options.rehearse}
    if record.setdefault("asked", asked) != asked:
        print(f"{kept} is of {record['asked']}; use another --work", file=sys.stderr)
        return 2
    job = Job(
        *(options.work.absolute(), options.out.absolute(), device, options.data, options.rehearse),
        record=record,
    )
    call: dict[str, Any] = {"seconds asked": options.seconds, "load average": round(load, 2)}
    record.setdefault("calls", []).append(call)

    def save(name: str | None = None) -> None:
        call["seconds"] = round(time.monotonic() - started, 1)
        for file in (kept, job.out / "chain.json"):
            part = file.with_suffix(".part")  # whole or not at all: a call may be killed any time
            part.write_text(json.dumps(record, indent=1) + "\n")
            part.replace(file)
        if name is not None:
            print(
                f"{call['seconds']:7.1f} s  {name}: {record['stages'][name]['status']}", flush=True
            )

    run_stages(STAGES, job, options.seconds - GRACE_S, on_stage=save)
    evaluation = job.store / "evaluation"
    for file in (evaluation / "report.html", evaluation / "contact-sheet.png",
                 job.work / "pairs.png"):  # fmt: skip
        if file.is_file():
            shutil.copyfile(file, job.out / file.name)
    call["products"] = pack(job)
    save()
    for name, result in record["stages"].items():
        error = result.get("error", "").strip().splitlines()[-1:] or [""]
        seconds = result.get("seconds", 0.0)
        print(f"{name:16} {result['status']:12} {seconds:7.1f} s  {error[0][:100]}")
    return int(any(status(record["stages"], stage) != "done" for stage in STAGES))


if __name__ == "__main__":
    sys.exit(main())
