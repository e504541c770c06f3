"""A server, `prefect deploy --all`, and a process worker, to which a schedule gives work."""

import importlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from prefect.utilities.callables import parameter_schema
from pydantic import TypeAdapter

from flows.families.weights.attack_plan import attack_plan, span_plan
from flows.presets import preset
from flows.regenerate import describe
from flows.settings import resolve as resolve_recipe
from flows.studies import kind_of, study
from recon_core.attacks.autoencoder.many_starts import NoiseAware
from storage.pairs.dataset import Dataset
from tasks.campaign.status import find_recipe
from tasks.families.autoencoder.inputs import AutoencoderJob
from tasks.families.instahide.inputs import InstaHideJob
from tasks.families.weights.attack import WeightsJob

REPOSITORY = Path(__file__).parents[2]
NIGHTLY = {
    f"{flow}/nightly-{flow}"
    for flow in ("generate", "top-up", "curate", "train", "evaluate", "chain", "audit")
}
ON_DEMAND = {
    *{"generate/batch", "generate/instahide", "regenerate/from-manifest"},
    *{"attack-kkt/weights-kkt", "attack-weights/weights-span", "attack-autoencoder/autoencoder"},
    *{"attack-instahide/encodings", "study/paper-kkt", "study-autoencoder/paper-autoencoder"},
    "study-inversion/paper-mixcon",
}
INTERNAL = {"command", "further", "resume_stopped"}
STAGES_SECONDS = 240
PROMPT = {
    "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
    "PREFECT_WORKER_QUERY_SECONDS": "2",
}
"""A server and a worker look every minute and every ten seconds; here they look at once."""


class Server:
    """A Prefect server of this test's own, on loopback; commands are given in `folder`, which is no
    checkout."""

    def __init__(self, home: Path, folder: Path) -> None:
        self.folder = folder
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
            **PROMPT,
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
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=STAGES_SECONDS,
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    def ask(self, path: str, body: Any = None) -> Any:
        """The answer to a POST of `body` to `path`; without it, all that a filter lists.

        A server whose SQLite file is locked rolls the request back, answers 503 and
        wants to be asked again; Prefect's own client does the same.
        """
        request = urllib.request.Request(
            f"{self.url}/{path if body is not None else path + '/filter'}",
            data=json.dumps({} if body is None else body).encode(),
            headers={"Content-Type": "application/json"},
        )
        deadline = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as refusal:
                if refusal.code != 503 or time.monotonic() > deadline:
                    raise
                time.sleep(1)

    def finished_run(self, deployment: str) -> dict[str, Any]:
        """The only run of a deployment that has begun, once it has ended."""
        deadline = time.monotonic() + STAGES_SECONDS
        while time.monotonic() < deadline:
            runs = [
                run
                for run in self.ask("flow_runs")
                if run["deployment_id"] == deployment and run["state"]["type"] in ENDED
            ]
            if runs:
                assert len(runs) == 1
                return dict(runs[0])
            time.sleep(0.5)
        pytest.fail(f"no run has ended: {[run['state'] for run in self.ask('flow_runs')]}")


ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a work pool, to which everything is deployed."""
    server = Server(tmp_path_factory.mktemp("prefect"), tmp_path_factory.mktemp("elsewhere"))
    server.prefect("work-pool", "create", "palimpsest", "--type", "process")
    server.prefect("deploy", "--all", "--prefect-file", str(REPOSITORY / "prefect.yaml"))
    yield server
    end(server.process)


@pytest.fixture(scope="module")
def deployments(server: Server) -> dict[str, dict[str, Any]]:
    """Every deployment, by `flow/name`."""
    flow_names = {flow["id"]: flow["name"] for flow in server.ask("flows")}
    return {f"{flow_names[d['flow_id']]}/{d['name']}": d for d in server.ask("deployments")}


@pytest.fixture
def worker(server: Server) -> Iterator[psutil.Process]:
    """A process worker that runs in the background, as it does every night."""
    words = ["worker", "start", "--pool", "palimpsest", "--type", "process"]
    process = subprocess.Popen(
        [sys.executable, "-m", "prefect", *words],
        env=server.environment,
        cwd=server.folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield psutil.Process(process.pid)
    end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Asks a process to end; a worker waits for its runs to end, and a schedule may have fired
    again, so that both are killed after a while."""
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
        process.wait(timeout=20)


def listening(process: psutil.Process) -> set[str]:
    """The addresses on which a process or one of its children waits for connections."""
    return {
        connection.laddr.ip
        for p in [process, *process.children(recursive=True)]
        for connection in p.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def rows_of(artifact: dict[str, Any]) -> dict[str, Any]:
    return {row["what"]: row["value"] for row in json.loads(artifact["data"])}


def entrypoints() -> list[str]:
    listed = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
    return sorted({entry["entrypoint"] for entry in listed})


@pytest.mark.parametrize("entrypoint", entrypoints())
def test_every_parameter_of_a_deployment_is_described_and_none_is_internal(entrypoint: str) -> None:
    module, _, name = entrypoint.rpartition(".")
    deployed = getattr(importlib.import_module(module), name)
    found = parameter_schema(deployed).properties  # as `prefect deploy` makes it
    assert found
    for parameter, about in found.items():
        assert about.get("description", "").endswith("."), parameter
        assert parameter not in INTERNAL


@pytest.mark.slow
def test_a_fresh_server_runs_nothing_by_itself(deployments: dict[str, dict[str, Any]]) -> None:
    assert set(deployments) == NIGHTLY | ON_DEMAND
    names = [name.partition("/")[2] for name in deployments]
    assert len(set(names)) == len(names)
    for name, deployment in deployments.items():
        assert [s["active"] for s in deployment["schedules"]] == [False] * (name in NIGHTLY)
        limit = deployment["global_concurrency_limit"]
        if name in NIGHTLY:
            assert name.startswith("audit/") or deployment["parameters"]["recipe"] == "demo"
            assert limit["limit"] == 1
            assert deployment["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"
        else:
            assert limit is None
    assert deployments["top-up/nightly-top-up"]["parameters"]["n_runs_at_most"] > 0
    weights = deployments["attack-kkt/weights-kkt"]["parameters"]["job"]
    attack = TypeAdapter(WeightsJob).validate_python(weights)
    plan = attack_plan(n_outputs=1)  # what the command does by itself
    assert (attack.attack, attack.n_attacks) == (plan.attack, plan.n_attacks)
    spanned = deployments["attack-weights/weights-span"]["parameters"]["job"]
    assert TypeAdapter(WeightsJob).validate_python(spanned).attack == span_plan().attack
    given = deployments["attack-autoencoder/autoencoder"]["parameters"]["job"]
    assert TypeAdapter(AutoencoderJob).validate_python(given).methods == (NoiseAware(),)
    given = deployments["attack-instahide/encodings"]["parameters"]["job"]
    assert TypeAdapter(InstaHideJob).validate_python(given).method == "auto"
    made = deployments["generate/instahide"]["parameters"]
    assert resolve_recipe(made["recipe"], made["settings"]) == preset("instahide-small")
    asked = deployments["study/paper-kkt"]["parameters"]
    made = kind_of(asked["name"]).resolve(asked["preset"], asked["settings"], Path(asked["store"]))
    assert made == study("multiclass", "paper")
    asked = deployments["audit/nightly-audit"]["parameters"]
    made = kind_of(asked["name"]).resolve(asked["preset"], asked["settings"], Path(asked["store"]))
    assert [limit.limit for limit in made.limits] == [0.05]


@pytest.mark.slow
def test_a_schedule_fires_and_the_store_is_topped_up_then_made_again(
    server: Server,
    deployments: dict[str, dict[str, Any]],
    worker: psutil.Process,
    tmp_path: Path,
) -> None:
    store = tmp_path / "store"
    nightly = deployments["top-up/nightly-top-up"]["id"]
    parameters = {
        "recipe": "smoke",
        "store": str(store),
        "coverage": 0.02,
        "n_runs_at_most": 40,
        "settings": {"sampling.parts_per_round": 1},
        "workers": {"n_workers": 1, "device": "cpu"},
    }
    soon = datetime.now(UTC) + timedelta(seconds=8)
    schedule = {"interval": 86_400, "anchor_date": soon.isoformat()}
    server.ask(
        f"deployments/{nightly}/schedules",
        [{"schedule": schedule, "active": True, "parameters": parameters}],
    )
    run = server.finished_run(nightly)
    assert run["state"]["type"] == "COMPLETED", run["state"]
    assert run["auto_scheduled"]
    assert run["created_by"]["type"] == "SCHEDULE"
    assert abs(datetime.fromisoformat(run["expected_start_time"]) - soon) < timedelta(seconds=1)
    assert datetime.fromisoformat(run["start_time"]) > soon - timedelta(seconds=1)
    assert run["name"] == f"{store}, train, to 0.02"

    dataset = Dataset(store / "pairs")
    assert dataset.n_runs > 4  # what smoke plans
    assert (dataset.image_counts()[1] > 0).sum() >= 0.02 * 869
    mine = [a for a in server.ask("artifacts") if a["flow_run_id"] == run["id"]]
    assert {(a["type"], a["key"]) for a in mine} == {
        ("progress", "top-up-progress-train"),
        ("table", "top-up-train"),
        ("table", "phases-train"),
        ("image", "coverage-train"),
    }
    facts = rows_of(next(a for a in mine if a["key"] == "top-up-train"))
    assert (facts["ending"], facts["runs"]) == ("reached", str(dataset.n_runs))
    bars = [a for a in server.ask("artifacts") if a["type"] == "progress"]
    assert len(bars) > 1  # one of the top-up, one of each campaign in it
    assert {a["data"] for a in bars} == {100.0}

    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps(describe(dataset, find_recipe(str(store)), None)))
    again = {"manifest": str(manifest), "store": str(tmp_path / "again")}
    again["workers"] = parameters["workers"]
    server.prefect(
        *("deployment", "run", "regenerate/from-manifest", "--params", json.dumps(again))
    )
    run = server.finished_run(deployments["regenerate/from-manifest"]["id"])
    assert run["state"]["type"] == "COMPLETED", run["state"]
    (compared,) = (a for a in server.ask("artifacts") if a["key"] == "regenerate-train")
    assert rows_of(compared)["differences"] == "none"
    assert Dataset(tmp_path / "again" / "pairs").content_hash == dataset.content_hash
    assert listening(psutil.Process(server.process.pid)) == {"127.0.0.1"}
    assert listening(worker) <= {"127.0.0.1"}


@pytest.mark.slow
def test_an_audit_over_its_limit_fails_its_run_with_the_page_written(
    server: Server,
    deployments: dict[str, dict[str, Any]],
    worker: psutil.Process,
    tmp_path: Path,
) -> None:
    del worker
    store = tmp_path / "audit"
    parameters = {
        "preset": "quick",
        "store": str(store),
        "settings": {
            "data": "photos", "n_victims": 4, "n_tests": 20, "attacks": ["span_known"],
            "defences": [], "recipe.n_images": 8, "recipe.victim.widths": [32],
            "recipe.training.epochs": 300, "fail_above": ["good>0.05@fpr=0.01"],
        },
        "workers": {"n_workers": 1, "device": "cpu"},
    }  # fmt: skip
    server.prefect(
        *("deployment", "run", "audit/nightly-audit", "--params", json.dumps(parameters))
    )
    run = server.finished_run(deployments["audit/nightly-audit"]["id"])
    assert run["state"]["type"] == "FAILED"
    assert "good>0.05@fpr=0.01 fails" in run["state"]["message"]
    record = json.loads((store / "audit.json").read_text())
    assert [check["outcome"] for check in record["checks"]] == ["fails"]
    assert (store / "audit.html").is_file()
