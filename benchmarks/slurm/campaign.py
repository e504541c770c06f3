"""Does a campaign through a real Slurm survive the death of a node, with the same dataset?

Starts Debian's Slurm on this machine (`benchmarks.slurm.cluster`: three nodes of one CPU), runs a
campaign locally, runs the same campaign as Slurm jobs, and kills one node when a third of the parts
are done: its slurmd and every process of its job, by SIGKILL. It ends with an error unless the
campaign completes by itself, on the node that was spare, and both datasets have the same content
hash. The second two thirds of the runs are planned from what the first brought back.

    python -m benchmarks.slurm.cluster install
    python -m benchmarks.slurm.campaign --json FILE --log FILE

Needs dask-jobqueue and pyyaml (`pip install '.[slurm]'`).
"""

from __future__ import annotations

import argparse
import getpass
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.record import Measurement, hardware, versions
from benchmarks.slurm.cluster import SlurmCluster, hostname
from storage.pairs.dataset import Dataset

N_WORKERS, N_NODES = 2, 3
N_PARTS, RUNS_PER_PART = 48, 4
SETTINGS = {
    "experiment.victim.widths": "64,64",
    "experiment.training.epochs": "600",
    "experiment.attack.n_candidates": "16",
    "experiment.attack.save_at": "100,200,400",
    "sampling.images_per_run": "8",
    "sampling.runs_per_part": str(RUNS_PER_PART),
    "sampling.parts_per_round": "4",
    "sampling.phases": json.dumps(
        [
            {"n_runs": N_PARTS // 3 * RUNS_PER_PART},
            {"sampler": "adaptive", "n_runs": N_PARTS // 3 * 2 * RUNS_PER_PART},
        ]
    ),
}
PALIMPSEST = """
import logging, sys
notices = logging.FileHandler(sys.argv.pop(1))
notices.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
logging.getLogger("palimpsest").addHandler(notices)
from flows.cli.main import main
main()
"""
"""The command itself, with a file of its own for what the campaign says of jobs and parts."""

SITE = """
queue: cpu
cores: 1
memory: 3 GiB
walltime: "00:30:00"
interface: lo
shared_directory: {folder}/shared
log_directory: {folder}/worker-logs
""".lstrip()
TIMEOUT_S = 1200.0


class Log:
    """A log without the machine's names in it: folders, host, user and interpreter are replaced."""

    def __init__(self, folder: Path) -> None:
        self.lines: list[str] = []
        self._names = {
            str(folder): "FOLDER",
            sys.executable: "python",
            str(Path.cwd()): "CHECKOUT",
            hostname(): "HOST",
            getpass.getuser(): "USER",
        }

    def __call__(self, text: str, *, indent: str = "") -> None:
        for name, shown in self._names.items():
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", shown, text)
        for line in text.splitlines() or [""]:
            self.lines.append(f"{indent}{line}".rstrip())
            print(self.lines[-1], file=sys.stderr, flush=True)

    def command(self, cluster: SlurmCluster, *words: str) -> None:
        """A command of Slurm's and what it prints."""
        self(f"$ {' '.join(words)}")
        self(cluster.call(*words), indent="    ")


class Campaign:
    """One campaign in a process of its own, and the store that it fills."""

    def __init__(self, store: Path, cluster: str, environment: dict[str, str]) -> None:
        self.store = store
        self.notices = store.with_name(f"{store.name}-notices.log")
        self.words = ["generate", "--preset", "demo", "--store", str(store)]
        self.words += ["--cluster", cluster, "--workers", str(N_WORKERS), "--device", "cpu"]
        for setting, value in SETTINGS.items():
            self.words += ["--set", f"{setting}={value}"]
        self.screen = store.with_name(f"{store.name}-screen.log")
        self.started = time.monotonic()
        with self.screen.open("w") as screen:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PALIMPSEST, str(self.notices), *self.words],
                stdout=screen, stderr=subprocess.STDOUT, env=environment,
            )  # fmt: skip

    @property
    def command(self) -> str:
        """As it would be typed."""
        return shlex.join(["palimpsest", *self.words])

    def n_parts(self) -> int:
        """Parts that are in the store now."""
        return len(list((self.store / "pairs" / "receipts").glob("*")))

    def end(self) -> float:
        """Waits for it; its seconds. RuntimeError with its last words if it failed or hangs."""
        try:
            code = self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = -1
        if code:
            said = self.screen.read_text()[-2000:]
            raise RuntimeError(f"the campaign ended with {code}: {said}")
        return time.monotonic() - self.started

    def facts(self, seconds: float) -> str:
        """Summary of the dataset, in lines."""
        dataset = Dataset(self.store / "pairs")
        _images, pairs = dataset.image_counts()
        return (
            f"{len(dataset.receipts)} parts, {dataset.n_runs} runs, {int(pairs.sum())} confident "
            f"pairs of {int((pairs > 0).sum())} images, {seconds:.0f} s\n"
            f"dataset hash {dataset.content_hash}"
        )

    def content_hash(self) -> str:
        """The hash of the dataset that it made."""
        return Dataset(self.store / "pairs").content_hash


def run(folder: Path, log: Log) -> Iterator[Measurement]:
    """Both campaigns; a measurement for each thing that was shown."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log(f"A campaign of {N_PARTS} parts, {RUNS_PER_PART} runs each, the last two thirds adaptive.")
    log("\n== On this machine\n")
    local = Campaign(folder / "local", "local", environment)
    log(f"$ {local.command}")
    local_s = local.end()
    log(local.facts(local_s))
    log("\n== Through Slurm\n")
    cluster = SlurmCluster(folder / "slurm")
    cluster.start(N_NODES)
    try:
        campaign, told = _through_slurm(cluster, folder, log)
    finally:
        cluster.stop()
    same = campaign.content_hash() == local.content_hash()
    log(f"The hash is {'that' if same else 'NOT that'} of the campaign on this machine.")
    if not same or told.replaced_s is None or campaign.n_parts() != N_PARTS:
        raise RuntimeError("the campaign through Slurm is not what it should be; see the log")
    what = f"{N_PARTS} parts, {N_WORKERS} Slurm jobs on {N_NODES} nodes"
    local_words = f"--cluster local, {N_WORKERS} workers, nothing killed"
    yield _measured(f"{what}, a node killed after a third", told.seconds, "s", local_words, local_s)
    yield _measured(f"{what}: from the node's death to a worker elsewhere", told.replaced_s, "s")
    yield _measured(f"{what}: processes that died with the node", told.n_killed, "processes")
    yield _measured(f"{what}: parts in the end, of the hash of --cluster local", N_PARTS, "parts")


@dataclass
class Told:
    """Observations while a campaign ran through Slurm."""

    n_killed: int
    seconds: float = 0.0
    replaced_s: float | None = None


def _through_slurm(cluster: SlurmCluster, folder: Path, log: Log) -> tuple[Campaign, Told]:
    site = folder / "site.yaml"
    site.write_text(SITE.format(folder=folder))
    (folder / "shared").mkdir()
    log.command(cluster, "sinfo")
    log("site.yaml:")
    log(site.read_text(), indent="    ")
    environment = {**cluster.environment, "OMP_NUM_THREADS": "1"}
    campaign = Campaign(folder / "through-slurm", f"slurm:{site}", environment)
    log(f"$ {campaign.command}")
    try:
        told = _with_a_death(campaign, cluster, folder, log)
    finally:
        if campaign.process.poll() is None:
            campaign.process.kill()
    log("\nWhat the campaign said:")
    log(campaign.notices.read_text(), indent="    ")
    log.command(cluster, "squeue")
    log.command(cluster, "sinfo")
    _show_logs(folder, campaign, log)
    log(campaign.facts(told.seconds))
    return campaign, told


def _with_a_death(campaign: Campaign, cluster: SlurmCluster, folder: Path, log: Log) -> Told:
    """Kills a node at a third, and watches the queue until the campaign has ended."""
    while campaign.n_parts() < N_PARTS // 3:
        if campaign.process.poll() is not None:
            campaign.end()
            raise RuntimeError("the campaign ended before a third of its parts")
        time.sleep(0.5)
    log(f"\n{_now()} {campaign.n_parts()} of {N_PARTS} parts are done")
    log.command(cluster, "squeue")
    before = _queue(cluster)
    victim, node = before[0]
    log("The script of a job:")
    log(cluster.call("scontrol", "write", "batch_script", victim, "-"), indent="    ")
    told = Told(cluster.kill_node(node))
    died, rows = time.monotonic(), before
    log(f"{_now()} {node} is killed, {told.n_killed} processes")
    while campaign.process.poll() is None:
        if (now := _queue(cluster)) != rows:
            rows = now
            log(f"{_now()} {campaign.n_parts()} parts; {_in_words(rows)}")
        new = [job for job, _where in rows if job not in dict(before)]
        if told.replaced_s is None and any(_has_worker(folder, job) for job in new):
            told.replaced_s = time.monotonic() - died
            log(f"{_now()} its place is taken, {told.replaced_s:.0f} s after its death")
        time.sleep(0.5)
    told.seconds = campaign.end()
    log(f"{_now()} the campaign has ended by itself")
    return told


def _queue(cluster: SlurmCluster) -> list[tuple[str, str]]:
    """Job and node of every job in the queue, with its state where it does not simply run."""
    rows = cluster.call("squeue", "--noheader", "--format=%i %t %N").splitlines()
    fields = [[*row.split(), ""][:3] for row in sorted(rows)]
    return [(job, node if state == "R" else f"{node} {state}") for job, state, node in fields]


def _in_words(rows: list[tuple[str, str]]) -> str:
    return ", ".join(f"job {job} {where}" for job, where in rows) or "no job"


def _has_worker(folder: Path, job: str) -> bool:
    log = folder / "worker-logs" / f"palimpsest-{job}.err"
    return log.is_file() and "Registered to" in log.read_text()


def _show_logs(folder: Path, campaign: Campaign, log: Log) -> None:
    """Where the logs are, and those of the parts that the dead worker left."""
    names = sorted(path.name for path in (folder / "worker-logs").glob("*.err"))
    log(f"\nLogs of jobs (log_directory): {', '.join(names)}")
    log("Parts that were begun twice (in the store's folder, logs/):")
    for path in sorted((campaign.store / "pairs" / "logs").glob("part-*.log")):
        same_part = path.parent.glob(f"{path.name[:11]}*")
        text = "".join(other.read_text() for other in same_part)
        if text.count(" start ") > 1:
            log(path.name, indent="    ")
            log(path.read_text(), indent="        ")
    log("")


def _now() -> str:
    return time.strftime("%H:%M:%S")


def _measured(
    case: str, value: float, unit: str, reference: str | None = None, theirs: float | None = None
) -> Measurement:
    return Measurement(
        benchmark="slurm",
        case=case,
        value=round(float(value), 1),
        unit=unit,
        reference=reference,
        reference_value=None if theirs is None else round(theirs, 1),
        ratio=None if theirs is None else float(f"{theirs / value:.4g}"),
        repeats=1,
        hardware=hardware(),
        versions={**versions(), "dask-jobqueue": importlib.metadata.version("dask-jobqueue")},
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; the log also goes to stderr."""
    parser = argparse.ArgumentParser(description="A campaign through a real Slurm.")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    parser.add_argument("--log", type=Path, help="write the log to this file")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="palimpsest-slurm-") as name:
        log = Log(Path(name))
        try:
            lines = [json.dumps(asdict(measurement)) for measurement in run(Path(name), log)]
        finally:
            if options.log is not None:
                options.log.write_text("\n".join(log.lines) + "\n")
    print("\n".join(lines))
    if options.json is not None:
        options.json.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
