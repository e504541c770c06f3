"""Does a campaign through a real Slurm survive the death of a node, with the same dataset?

Starts Debian's Slurm on this machine (`benchmarks.slurm.cluster`: three nodes of one CPU), runs a
campaign locally, runs the same campaign as Slurm jobs, and kills one node when a third of the parts
are done: its slurmd and every process of its job, by SIGKILL. It ends with an error unless the
campaign completes by itself, on the node that was spare, and both datasets have the same content
hash. The second two thirds of the runs are planned from what the first brought back.

    python -m benchmarks.slurm.cluster
    python -m benchmarks.slurm.campaign --json FILE --log FILE

Needs dask-jobqueue and pyyaml (`pip install '.[slurm]'`).
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.record import Measurement, measured, publish
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
"""The command itself, with a file of its own for what the campaign reports of jobs and parts."""

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
_measured = partial(measured, "slurm")


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

    def timed(self, text: str) -> None:
        self(f"{time.strftime('%H:%M:%S')} {text}")

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
                stdout=screen, stderr=subprocess.STDOUT, env=environment | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def n_parts(self) -> int:
        """Parts that are in the store now."""
        return len(list((self.store / "pairs" / "receipts").glob("*")))

    def end(self, log: Log) -> tuple[float, str]:
        """Waits for it; its seconds and the hash of its dataset. RuntimeError with its last words
        if it failed or hangs."""
        try:
            code = self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = -1
        if code:
            raise RuntimeError(f"the campaign ended with {code}: {self.screen.read_text()[-2000:]}")
        seconds, dataset = time.monotonic() - self.started, Dataset(self.store / "pairs")
        pairs = dataset.image_counts()[1]
        log(
            f"{len(dataset.receipts)} parts, {dataset.n_runs} runs, {int(pairs.sum())} confident "
            f"pairs of {int((pairs > 0).sum())} images, {seconds:.0f} s\n"
            f"dataset hash {dataset.content_hash}"
        )
        return seconds, dataset.content_hash


def run(folder: Path, log: Log) -> Iterator[Measurement]:
    """Both campaigns; a measurement for each thing that was shown."""
    log(f"A campaign of {N_PARTS} parts, {RUNS_PER_PART} runs each, the last two thirds adaptive.")
    log("\n== On this machine\n")
    local = Campaign(folder / "local", "local", dict(os.environ))
    log(f"$ {shlex.join(['palimpsest', *local.words])}")
    local_s, expected = local.end(log)
    log("\n== Through Slurm\n")
    cluster = SlurmCluster(folder / "slurm")
    cluster.start(N_NODES)
    site = folder / "site.yaml"
    site.write_text(SITE.format(folder=folder))
    (folder / "shared").mkdir()
    log.command(cluster, "sinfo")
    log("site.yaml:")
    log(site.read_text(), indent="    ")
    try:
        campaign = Campaign(folder / "through-slurm", f"slurm:{site}", cluster.environment)
        log(f"$ {shlex.join(['palimpsest', *campaign.words])}")
        try:
            n_killed, replaced_s = kill_a_node(campaign, cluster, folder, log)
        finally:
            if campaign.process.poll() is None:
                campaign.process.kill()
        seconds, found = campaign.end(log)
        log("\nNotices of the campaign:")
        log(campaign.notices.read_text(), indent="    ")
        log.command(cluster, "squeue")
        log.command(cluster, "sinfo")
    finally:
        cluster.stop()
    log(f"The hash is {'that' if found == expected else 'NOT that'} of the campaign here.")
    if found != expected or replaced_s is None or campaign.n_parts() != N_PARTS:
        raise RuntimeError("the campaign through Slurm is not what it should be; see the log")
    what = f"{N_PARTS} parts, {N_WORKERS} Slurm jobs on {N_NODES} nodes"
    reference = f"--cluster local, {N_WORKERS} workers, nothing killed"
    yield _measured(f"{what}, a node killed after a third", seconds, "s", reference=reference,
                    reference_value=local_s)  # fmt: skip
    yield _measured(f"{what}: from the node's death to a worker elsewhere", replaced_s, "s")
    yield _measured(f"{what}: processes that died with the node", n_killed, "processes")
    yield _measured(f"{what}: parts in the end, of the hash of --cluster local", N_PARTS, "parts")


def kill_a_node(
    campaign: Campaign, cluster: SlurmCluster, folder: Path, log: Log
) -> tuple[int, float | None]:
    """Kills a node at a third, and watches the queue until the campaign has ended: the number of
    killed processes, and the seconds until a worker was in their place."""

    def queue() -> list[tuple[str, str]]:
        """Job and node of every job in the queue, with its state where it does not simply run."""
        rows = cluster.call("squeue", "--noheader", "--format=%i %t %N").splitlines()
        fields = [[*row.split(), ""][:3] for row in sorted(rows)]
        return [(job, node if state == "R" else f"{node} {state}") for job, state, node in fields]

    def has_worker(job: str) -> bool:
        file = folder / "worker-logs" / f"palimpsest-{job}.err"
        return file.is_file() and "Registered to" in file.read_text()

    while campaign.n_parts() < N_PARTS // 3:
        if campaign.process.poll() is not None:
            campaign.end(log)
            raise RuntimeError("the campaign ended before a third of its parts")
        time.sleep(0.5)
    log("")
    log.timed(f"{campaign.n_parts()} of {N_PARTS} parts are done")
    log.command(cluster, "squeue")
    rows = before = queue()
    node = before[0][1]
    n_killed, replaced_s, died = cluster.kill_node(node), None, time.monotonic()
    log.timed(f"{node} is killed, {n_killed} processes")
    while campaign.process.poll() is None:
        if (now := queue()) != rows:
            rows = now
            jobs = ", ".join(f"job {job} {where}" for job, where in rows) or "no job"
            log.timed(f"{campaign.n_parts()} parts; {jobs}")
        new = [job for job, _where in rows if job not in dict(before)]
        if replaced_s is None and any(map(has_worker, new)):
            replaced_s = time.monotonic() - died
            log.timed(f"its place is taken, {replaced_s:.0f} s after its death")
        time.sleep(0.5)
    log.timed("the campaign has ended by itself")
    return n_killed, replaced_s


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; the log also goes to stderr."""
    parser = argparse.ArgumentParser(description="A campaign through a real Slurm.")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    parser.add_argument("--log", type=Path, help="write the log to this file")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="palimpsest-slurm-") as name:
        log = Log(Path(name))
        try:
            publish(run(Path(name), log), options.json)
        finally:
            if options.log is not None:
                options.log.write_text("\n".join(log.lines) + "\n")


if __name__ == "__main__":
    main()
