"""Generate pairs, the worker's side: one part, from its planned runs to its receipt.

A worker tells the coordinator when it starts a part (before anything can kill it, so that deaths
are counted against the right part) and how far it is. The end of its log of a part is what remains
of a worker that was killed.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt
import torch
from distributed import Worker
from distributed.utils import sync

from recon_core.types import STATS, Progress, RunResult, RunSpec
from storage.object_store import open_place
from storage.pairs.layout import OUTCOMES
from storage.pairs.parts import write_part
from storage.pairs.receipts import Provenance, Receipt, load_receipt, receipt_path
from tasks.campaign.plan import PlannedPart, code_version, kept_victims
from tasks.cluster.jobs import TOPIC, cpu_threads, device_name, own_device, reporting, this_worker

HEARTBEAT_SECONDS = 30.0
STUCK_SECONDS = 2 * HEARTBEAT_SECONDS
"""Without a line for so long the interpreter itself is stuck, and where is written to the log."""


@dataclass(frozen=True)
class PartJob:
    """All that a worker needs for one part; images (r, n, 3, h, w) travel with it.

    `logs`: a folder for the part's log, if it can be written. `victims`: a folder for victims that
    several parts attack, and the hash of what they depend on; `train_first`: the seconds of the
    part are without theirs.
    """

    root: str
    planned: PlannedPart
    images: npt.NDArray[np.uint8]
    fingerprint: str
    source_hash: str
    device: str
    threads: int
    logs: str | None = None
    victims: tuple[str, str] | None = None
    train_first: bool = False


def run_part(job: PartJob) -> Receipt:
    """Train and attack the part's victims and write what came back; on a worker or in-process.

    A part that is already in the store is not made again: Dask repeats a part whose worker died
    after it had published the receipt.
    """
    worker = this_worker()
    part = job.planned.part
    with PartLog.of(job, worker) as log:
        if worker is not None:
            # Until the scheduler knows: what is killed from here on is known to have been this.
            begun = {"job": part, "fraction": 0.0, "started_on": f"{worker.name} {worker.address}"}
            sync(worker.loop, worker.scheduler.log_event, topic=TOPIC, msg=begun)
        with suppress(FileNotFoundError):
            stored = load_receipt(open_place(job.root), receipt_path(part))
            if stored.plan_hash == job.planned.plan_hash:  # of another, `write_part` has to judge
                log.stage("in the store already")
                return stored
        place, images = own_device(job.device, worker), torch.from_numpy(job.images)
        device, experiment = torch.device(place), job.planned.experiment
        kept = kept_victims(job.victims, device_name(place))
        with cpu_threads(job.threads):
            if job.train_first:
                log.stage("train")
                for spec, own in zip(job.planned.specs, images, strict=True):
                    experiment.train_victim(spec, own, device=device, victims=kept)
            started = time.perf_counter()
            log.stage("attack")
            results = experiment.run_batch(
                job.planned.specs,
                images,
                device=device,
                progress=log.progress,
                victims=kept,
            )
        provenance = Provenance(
            run_first=job.planned.specs[0].run,
            fingerprint=job.fingerprint,
            plan_hash=job.planned.plan_hash,
            source_hash=job.source_hash,
            code_version=code_version(),
            torch_version=torch.__version__,
            device=device_name(place),
            threads=job.threads,
            seconds=round(time.perf_counter() - started, 3),
        )
        log.stage("write")
        receipt = write_part(job.root, part, columns_of(results), provenance=provenance)
        log.stage("done")
        return receipt


def columns_of(results: Sequence[RunResult]) -> dict[str, npt.NDArray[Any]]:
    """The columns of a part, from its runs' results in order."""
    n_targets = [len(r.targets) for r in results]
    n_pairs = [len(r.pairs) for r in results]
    first_target = np.cumsum([0, *n_targets[:-1]])
    rows = np.arange(len(results))

    def joined(tensors: list[torch.Tensor]) -> npt.NDArray[Any]:
        return np.asarray(torch.cat(tensors).numpy())

    pairs = [r.pairs for r in results]
    columns: dict[str, npt.NDArray[Any]] = {
        "runs/run": np.array([r.spec.run for r in results], np.int64),
        "runs/outcome": np.array([OUTCOMES.index(r.outcome) for r in results], np.uint8),
        "runs/mean_image": joined([r.mean_image[None] for r in results]),
        "targets/image": joined([r.targets for r in results]),
        "targets/image_id": np.concatenate([np.array(r.spec.image_ids, np.int64) for r in results]),
        "targets/label": np.concatenate([np.array(r.spec.labels, np.int16) for r in results]),
        "targets/run_row": np.repeat(rows, n_targets).astype(np.int32),
        "targets/augment": joined([r.augment for r in results]),
        "pairs/reconstruction": joined([p.reconstruction for p in pairs]),
        "pairs/target_row": (
            joined([p.target_row for p in pairs]) + np.repeat(first_target, n_pairs)
        ).astype(np.int32),
        "pairs/run_row": np.repeat(rows, n_pairs).astype(np.int32),
        "pairs/candidate": joined([p.candidate for p in pairs]).astype(np.int32),
        "pairs/iteration": joined([p.iteration for p in pairs]).astype(np.int32),
        "pairs/ssim_best": joined([p.ssim_best for p in pairs]),
        "pairs/ssim_second": joined([p.ssim_second for p in pairs]),
        "pairs/confident": joined([p.confident for p in pairs]),
        "targets/margin": joined([r.margins for r in results]),
    }
    stats = {f"runs/{name}": [r.stats[name] for r in results] for name in STATS}
    return columns | {name: np.array(values, np.float32) for name, values in stats.items()}


def batch_of(specs: Sequence[RunSpec], images: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The images (r, n, 3, h, w) of equally long runs, from the source's images (n, 3, h, w)."""
    ids = np.array([spec.image_ids for spec in specs], np.int64)
    return np.take(images, ids, axis=0)  # one pass: indexing run by run and stacking takes thrice


class PartLog:
    """The log of one attempt at a part: a line per stage and one every 30 seconds in between. In a
    worker's own process a crash, and an interpreter that is stuck, leave a traceback in it."""

    def __init__(self, file: TextIO | None, report: Progress) -> None:
        self._file = file
        self._alone = multiprocessing.parent_process() is not None
        self._stage, self._fraction, self._report = "start", 0.0, report
        self._ended = threading.Event()
        self._lock = threading.Lock()

    @classmethod
    @contextmanager
    def of(cls, job: PartJob, worker: Worker | None) -> Iterator[PartLog]:
        """The log of a job; ends with a line that names the error, if there is one."""
        path = log_path(job, "here" if worker is None else str(worker.name))
        try:
            file = None if path is None else path.open("a", buffering=1)
        except OSError:
            file = None  # another machine's folder, or a full one: no reason to fail a part
        log = cls(file, reporting(job.planned.part))
        beat = threading.Thread(target=log._beat, name="part-log", daemon=True)
        if file is None:
            yield log
            return
        if log._alone:
            faulthandler.enable(file)
        with file:
            log.stage("start")
            beat.start()
            try:
                yield log
            except BaseException as error:
                log.stage(f"ended by {type(error).__name__}: {error}")
                raise
            finally:
                log._ended.set()
                beat.join()
                if log._alone:
                    faulthandler.cancel_dump_traceback_later()
                    faulthandler.disable()

    def progress(self, fraction: float) -> None:
        """Note the fraction of the stage that is done, and report it to the coordinator."""
        self._fraction = fraction
        self._report(fraction)

    def stage(self, name: str) -> None:
        self._stage = name
        self._line()

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            self._line()

    def _line(self) -> None:
        if self._file is None:
            return
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        try:
            with self._lock:
                self._file.write(f"{now} {self._stage}  {self._fraction:.0%}  {memory_text()}\n")
                if self._alone:
                    faulthandler.dump_traceback_later(STUCK_SECONDS, file=self._file)
        except (OSError, ValueError):
            self._file = None


def log_path(job: PartJob, worker: str) -> Path | None:
    """Path of a worker's log of a part: `part-000012-<worker>.log`; None without a folder."""
    if job.logs is None:
        return None
    name = re.sub(r"[^A-Za-z0-9.]+", "_", worker)
    return Path(job.logs) / f"part-{job.planned.part:06d}-{name}.log"


def log_tail(folder: Path | None, part: int, *, chars: int = 4000) -> str:
    """Ends of all workers' logs of a part, the latest last; a sentence if there is none."""
    found = [] if folder is None else folder.glob(f"part-{part:06d}-*.log")
    paths = sorted(found, key=lambda path: path.stat().st_mtime)
    pieces = [f"== {path.name}\n{path.read_text(errors='replace')[-chars:]}" for path in paths]
    return "\n".join(pieces) or "no log: the workers' folder for it is not on this machine"


def memory_text() -> str:
    """Memory of this process, such as `412 MiB`, and what torch has of a GPU."""
    try:
        status = Path("/proc/self/status").read_text()
        text = f"{int(status.split('VmRSS:')[1].split()[0]) / 1024:.0f} MiB"
    except (OSError, IndexError):
        text = "memory unknown"
    if torch.cuda.is_initialized():
        text += f", {torch.cuda.memory_reserved() / 2**20:.0f} MiB of the GPU"
    return text
