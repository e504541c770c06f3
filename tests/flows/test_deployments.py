"""A server, a process worker, `prefect deploy --all`, and one run of `generate` through them."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from storage.dataset import Dataset

REPOSITORY = Path(__file__).parents[2]
FLOWS = {"generate", "curate", "train", "evaluate", "chain"}
STAGES_SECONDS = 240


class Server:
    """A Prefect server of this test's own, on loopback."""

    def __init__(self, home: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.environment = {
            **os.environ,
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
        }
        words = ["server", "start", "--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "prefect", *words],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 120
        while not self.healthy():
            assert time.monotonic() < deadline, "the Prefect server did not start"
            time.sleep(0.3)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def prefect(self, *words: str) -> str:
        """The output of `prefect words...`; fails if the command does."""
        finished = subprocess.run(
            [sys.executable, "-m", "prefect", "--no-prompt", *words],
            env=self.environment,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=STAGES_SECONDS,
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    def ask(self, path: str) -> list[dict[str, Any]]:
        """The objects that the server's filter endpoint `path` lists."""
        request = urllib.request.Request(
            f"{self.url}/{path}/filter", data=b"{}", headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return list(json.load(answer))


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("prefect"))
    yield server
    server.process.terminate()
    server.process.wait(timeout=30)


@pytest.mark.slow
def test_deployed_generate_runs_on_a_process_worker(server: Server, tmp_path: Path) -> None:
    server.prefect("work-pool", "create", "palimpsest", "--type", "process")
    server.prefect("deploy", "--all")
    deployments = server.ask("deployments")
    flow_names = {flow["id"]: flow["name"] for flow in server.ask("flows")}
    assert {flow_names[d["flow_id"]] for d in deployments} == FLOWS
    for deployment in deployments:
        assert [s["active"] for s in deployment["schedules"]] == [False]
        assert deployment["parameters"]["recipe"] == "demo"

    store = tmp_path / "store"
    parameters = {
        "recipe": "smoke",
        "store": str(store),
        "settings": {"sampling.phases.0.n_runs": 2},
        "workers": {"n_workers": 1, "device": "cpu"},
    }
    server.prefect("deployment", "run", "generate/nightly", "--params", json.dumps(parameters))
    server.prefect("worker", "start", "--pool", "palimpsest", "--run-once", "--type", "process")
    (run,) = server.ask("flow_runs")
    assert run["state"]["type"] == "COMPLETED", run["state"]
    assert Dataset(store / "pairs").n_runs == 2
    assert {a["key"] for a in server.ask("artifacts")} >= {"pairs-train"}

    listening = {
        connection.laddr.ip
        for process in [psutil.Process(server.process.pid)]
        for p in [process, *process.children(recursive=True)]
        for connection in p.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}
