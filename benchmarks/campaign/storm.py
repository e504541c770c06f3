"""Is a campaign the same dataset whatever dies? Real campaigns, killed at 30 random moments each.

    python -m benchmarks.campaign.storm [--quick] [--json FILE] [--folder DIR]
                                        [--samplers uniform,...] [--workers 1,2,4]
                                        [--kinds group,server]

For each sampler one campaign of 208 real runs is left alone. Then the same command is run again in
new folders, with one, two and four workers, and things are killed with SIGKILL: a worker, the
process that coordinates them, or everything at once. What of it comes when is random; every kill
waits for a random number of the first half of the parts to be there, and then up to four seconds,
so that all of them hit before the end. A killed command is simply started again. A part that
happens to lose three workers in one go is quarantined, as it should be, and cleared with
`campaign retry`. `--kinds` draws from others: `group` is SIGTERM to the command's process group, as
`timeout`, systemd and Slurm send it, after which the command has a minute to end; `server` kills a
Prefect server that records the campaign, which comes back while the campaign goes on; `frozen` is
SIGSTOP to a worker, which nobody continues.

It ends with an error unless every campaign has the content hash of the undisturbed one of its
sampler, verifies, and leaves no process behind.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks.record import Measurement, measured, publish
from flows import PREFECT_DEFAULTS
from flows.presets import kkt
from flows.recipe import Recipe, one_phase
from flows.settings import to_json
from recon_core.sampling import Phase, Sampling
from storage.files import write_json
from storage.pairs.dataset import Dataset
from storage.pairs.verify import vacuum, verify_store

Sampler = Literal["uniform", "least_seen", "adaptive"]
Kind = Literal["worker", "coordinator", "machine", "group", "server", "frozen"]
SAMPLERS: tuple[Sampler, ...] = ("uniform", "least_seen", "adaptive")
KINDS: tuple[Kind, ...] = ("worker", "worker", "coordinator", "machine")
"""What is drawn, each equally likely. A worker that is not there yet when its turn comes is drawn
again, so fewer than half of the kills are of workers."""
_measured = partial(measured, "campaign under a storm of kills")
MARK = "PALIMPSEST_STORM"
"""A variable in the environment of every process of a campaign, to find them by."""
LONGEST_DELAY_S = 4.0
LEFT_OVER_S = 60.0
SERVER_START_S = 180.0
LONGEST_END_S = 60.0
"""From SIGTERM to the end of the command; a campaign's parts are far shorter."""
TIMEOUT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Size:
    """A campaign, and how often something in it is killed."""

    n_runs: int = 208
    runs_per_part: int = 4
    n_kills: int = 30
    workers: tuple[int, ...] = (1, 2, 4)
    samplers: tuple[Sampler, ...] = SAMPLERS
    kinds: tuple[Kind, ...] = KINDS

    @property
    def n_parts(self) -> int:
        return self.n_runs // self.runs_per_part

    def recipe(self, sampler: Sampler) -> Recipe:
        """Runs of a third of a second on eight photographs; rounds of four parts. `least_seen` has
        a uniform start, as in the image restoration paper; of 96 photographs some are always least
        seen."""
        first = self.n_runs // 4 // self.runs_per_part * self.runs_per_part
        phases: tuple[Phase, ...] = (Phase(sampler=sampler, n_runs=self.n_runs, pool_size=96),)
        if sampler == "least_seen":
            phases = (Phase(n_runs=first), replace(phases[0], n_runs=self.n_runs - first))
        return Recipe(
            name="storm",
            experiment=kkt(32, 8, epochs=300, save_at=(50, 100)),
            sampling=Sampling(
                images_per_run=8,
                phases=phases,
                runs_per_part=self.runs_per_part,
                parts_per_round=4,
            ),
            heldout=one_phase(1, images=8, per_part=1),
        )


QUICK = Size(n_runs=40, n_kills=5, workers=(2,), samplers=("adaptive",))


@dataclass
class Report:
    """Events of a campaign."""

    kills: Counter[str] = field(default_factory=Counter)
    n_starts: int = 0
    n_cleared: int = 0
    n_orphans: int = 0
    n_covered: int = 0
    n_pairs: int = 0
    content_hash: str = ""
    seconds: float = 0.0
    longest_end_s: float = 0.0


class Server:
    """A Prefect server of the campaign's own, on loopback."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.home = folder / "prefect"
        self.home.mkdir(parents=True, exist_ok=True)
        self.api = f"http://127.0.0.1:{self.port}/api"
        self.start()
        until = time.monotonic() + SERVER_START_S
        while not self._serves():
            if time.monotonic() > until:
                sys.exit(f"{folder.name}: the Prefect server does not serve")
            time.sleep(0.2)

    def start(self) -> None:
        words = ["uvicorn", "--factory", "prefect.server.api.server:create_app"]
        words += ["--host", "127.0.0.1", "--port", str(self.port), "--log-level", "critical"]
        environment = {**os.environ, **PREFECT_DEFAULTS, "PREFECT_HOME": str(self.home)}
        self.process = subprocess.Popen([sys.executable, "-m", *words], env=environment)

    def kill(self) -> bool:
        """Kills it, if it serves by now, and starts another one."""
        if not self._serves():
            return False
        self.end()
        self.start()
        return True

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def _serves(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.api}/health", timeout=2) as answer:
                return bool(answer.status == HTTPStatus.OK)
        except OSError:
            return False


class Campaign:
    """`palimpsest generate` in a folder, as often as it takes."""

    def __init__(
        self, folder: Path, recipe: Recipe, n_workers: int, server: Server | None = None
    ) -> None:
        self.folder, self.n_workers, self.server = folder, n_workers, server
        self.mark = f"{folder.name}-{time.time_ns()}"
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "recipe.json", to_json(recipe))
        self.report = Report()
        self.log = (folder / "output.log").open("a")

    def start(self) -> subprocess.Popen[bytes]:
        """The command, started once more."""
        self.report.n_starts += 1
        words = ["generate", "--store", str(self.folder), "--workers", str(self.n_workers)]
        return self._popen([*words, "--device", "cpu"])

    def retry_quarantined(self) -> None:
        """Clears what is quarantined, as an operator would."""
        waiting = len(list((self.folder / "pairs" / "quarantine").glob("part-*.json")))
        self.report.n_cleared += waiting
        if waiting and self._popen(["campaign", "retry", "--store", str(self.folder)]).wait():
            sys.exit(f"{self.folder.name}: campaign retry failed; see {self.log.name}")

    def n_stored(self) -> int:
        """Parts that have a receipt."""
        return len(list((self.folder / "pairs" / "receipts").glob("part-*.json")))

    def processes(self) -> list[psutil.Process]:
        """All processes of this campaign, also those whose parents are gone."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # another user's, or just gone
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def workers(self, coordinator: psutil.Process) -> list[psutil.Process]:
        """The coordinator's Dask workers; Dask starts them by multiprocessing's `spawn`."""
        workers = []
        with suppress(psutil.NoSuchProcess):
            for process in coordinator.children():
                with suppress(psutil.Error):
                    if "spawn_main" in " ".join(process.cmdline()):
                        workers.append(process)
        return workers

    def kill(self, kind: Kind, coordinator: psutil.Process, rng: random.Random) -> bool:
        """Kills something of that kind; False if there is nothing of it now."""
        if kind == "group":  # the command and all it has started; SystemExit if it does not end
            start = time.monotonic()
            os.killpg(coordinator.pid, signal.SIGTERM)
            if psutil.wait_procs([coordinator], timeout=LONGEST_END_S)[1]:
                sys.exit(f"{self.folder.name}: SIGTERM to the group, and the command is there yet")
            self.report.longest_end_s = max(self.report.longest_end_s, time.monotonic() - start)
            killed = True
        elif kind == "server":
            killed = self.server is not None and self.server.kill()
        else:
            victims = {"coordinator": [coordinator], "machine": self.processes()}.get(kind)
            if victims is None:
                workers = self.workers(coordinator)
                victims = rng.sample(workers, 1) if workers else []
            for process in victims:
                with suppress(psutil.NoSuchProcess):
                    (process.suspend if kind == "frozen" else process.kill)()
            killed = bool(victims)
        self.report.kills[kind] += killed
        return killed

    def _popen(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        server = {} if self.server is None else {"PREFECT_API_URL": self.server.api}
        return subprocess.Popen(
            [str(Path(sys.executable).with_name("palimpsest")), *words],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1", MARK: self.mark, **server},
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )


def stormy(folder: Path, recipe: Recipe, n_workers: int, size: Size, seed: int) -> Report:
    """The campaign in which `size.n_kills` random kills happen before its last part."""
    rng = random.Random(seed)
    server = Server(folder) if "server" in size.kinds else None
    campaign = Campaign(folder, recipe, n_workers, server)
    n_parts = recipe.sampling.n_parts
    due = sorted(rng.randrange(n_parts // 2) for _ in range(size.n_kills))
    start = time.monotonic()
    command = campaign.start()
    while True:
        if time.monotonic() - start > TIMEOUT_S:
            sys.exit(f"{folder.name}: not done after {TIMEOUT_S:.0f} s; see {campaign.log.name}")
        if command.poll() is not None:
            if command.returncode == 0 and campaign.n_stored() == n_parts:
                if due:
                    sys.exit(f"{folder.name}: done with {len(due)} kills to go; give more runs")
                break
            campaign.retry_quarantined()
            command = campaign.start()
        if due and campaign.n_stored() >= due[0]:
            time.sleep(rng.uniform(0.0, LONGEST_DELAY_S))
            if command.poll() is None and campaign.kill(
                rng.choice(size.kinds), psutil.Process(command.pid), rng
            ):
                due.pop(0)
        time.sleep(0.05)
    if server is not None:
        server.end()
    return concluded(campaign, start)


def concluded(campaign: Campaign, start: float) -> Report:
    """The report of a campaign that has ended; SystemExit names what is not as it should be."""
    report = campaign.report
    report.seconds = time.monotonic() - start
    until = time.monotonic() + LEFT_OVER_S
    while (left := campaign.processes()) and time.monotonic() < until:
        time.sleep(0.5)
    if left:
        lines = "; ".join(" ".join(process.cmdline())[:120] for process in left)
        sys.exit(f"{campaign.folder.name}: {len(left)} processes are left: {lines}")
    campaign.log.close()
    dataset = Dataset(campaign.folder / "pairs")
    report.n_orphans = len(vacuum(dataset.place, older_than_s=0.0))
    found = verify_store(dataset.place)
    if not found.ok:
        sys.exit(f"{campaign.folder.name} does not verify: {'; '.join(found.problems)}")
    report.content_hash = dataset.content_hash
    report.n_pairs = dataset.n_pairs
    report.n_covered = int((dataset.image_counts()[1] > 0).sum())
    return report


def measure(size: Size, folder: Path, seed: int) -> Iterator[Measurement]:
    """Kills survived by each campaign, and the undisturbed one beside it."""
    for sampler in size.samplers:
        recipe = size.recipe(sampler)
        campaign, start = Campaign(folder / f"{sampler}-alone", recipe, 2), time.monotonic()
        if campaign.start().wait():
            sys.exit(f"the undisturbed campaign failed; see {campaign.log.name}")
        alone = concluded(campaign, start)
        what = f"{sampler}, {size.n_runs} runs, {size.n_parts} parts"
        yield _measured(f"{what}, left alone, 2 workers: images covered", alone.n_covered, "images")
        yield _measured(f"{what}, left alone, 2 workers", alone.seconds, "s")
        for n_workers in size.workers:
            where = folder / f"{sampler}-{n_workers}"
            report = stormy(where, recipe, n_workers, size, seed)
            if report.content_hash != alone.content_hash:
                sys.exit(
                    f"{where.name}: dataset {report.content_hash[:12]}, but "
                    f"{alone.content_hash[:12]} without kills; the stores are in {folder}"
                )
            seed += 1
            kinds = ", ".join(f"{n} of {kind}" for kind, n in sorted(report.kills.items()))
            for name, n, unit in (
                (f"kills survived with the same dataset ({kinds})", report.kills.total(), "kills"),
                ("starts of the command", report.n_starts, "starts"),
                ("time", report.seconds, "s"),
                ("longest end after SIGTERM", report.longest_end_s, "s"),
                ("orphans freed", report.n_orphans, "orphans"),
                ("parts cleared", report.n_cleared, "parts"),
            ):
                if n:
                    yield _measured(f"{what}, {n_workers} workers: {name}", n, unit)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line per measurement as it comes, and writes them to --json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="one short campaign, five kills")
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    parser.add_argument("--folder", type=Path, help="where the campaigns lie; default: temporary")
    parser.add_argument("--samplers", help="with commas between them")
    parser.add_argument("--workers", help="numbers of workers, with commas between them")
    parser.add_argument("--kinds", help="what is killed, with commas between them")
    parser.add_argument("--kills", type=int)
    parser.add_argument("--seed", type=int, help="default: another one each time")
    options = parser.parse_args(argv)
    chosen: dict[str, Any] = {
        name: tuple(value.split(","))
        for name in ("samplers", "kinds")
        if (value := getattr(options, name))
    }
    if options.workers:
        chosen["workers"] = tuple(int(n) for n in options.workers.split(","))
    if options.kills is not None:
        chosen["n_kills"] = options.kills
    size = replace(QUICK if options.quick else Size(), **chosen)
    seed = time.time_ns() % 2**32 if options.seed is None else options.seed
    print(f"seed {seed}", file=sys.stderr)
    temporary = partial(tempfile.TemporaryDirectory, prefix="palimpsest-storm-")
    with nullcontext(options.folder) if options.folder else temporary() as folder:
        publish(measure(size, Path(folder), seed), options.json)


if __name__ == "__main__":
    main()
