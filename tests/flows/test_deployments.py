"""A server, `prefect deploy --all`, and a process worker, to which a schedule gives work."""

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.utilities.callables import parameter_schema
from pydantic import TypeAdapter

from flows.families.weights.attack_plan import attack_plan
from flows.presets import preset
from flows.settings import resolve
from flows.study import kind_of, study
from recon_core.attacks.span.search import SpanAttack
from storage.pairs.dataset import Dataset
from tasks.families.weights.attack import WeightsJob

REPOSITORY = Path(__file__).parents[2]


def deployments() -> dict[str, dict[str, Any]]:
    """Every deployment of prefect.yaml, by name."""
    listed = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
    assert len({entry["name"] for entry in listed}) == len(listed)
    return {entry["name"]: entry for entry in listed}


def resolved(asked: dict[str, Any]) -> Any:
    """The study of a deployment's parameters."""
    return kind_of(asked["name"]).resolve(asked["preset"], asked["settings"], Path(asked["store"]))


@pytest.mark.parametrize("entrypoint", sorted({d["entrypoint"] for d in deployments().values()}))
def test_every_parameter_of_a_deployment_is_described_and_none_is_internal(entrypoint: str) -> None:
    module, _, name = entrypoint.rpartition(".")
    found = parameter_schema(getattr(importlib.import_module(module), name)).properties
    assert found
    for parameter, about in found.items():
        assert about.get("description", "").endswith("."), parameter
        assert parameter not in ("command", "further", "resume_stopped")


def test_deployments_run_nothing_by_themselves_and_have_parameters_that_can_be() -> None:
    made = deployments()
    for name, deployment in made.items():
        schedules = deployment.get("schedules", [])
        assert [schedule["active"] for schedule in schedules] == [False] * len(schedules)
        assert bool(schedules) == name.startswith("nightly-")
        module, _, flow = deployment["entrypoint"].rpartition(".")
        getattr(importlib.import_module(module), flow).validate_parameters(deployment["parameters"])
    parameters = {name: deployment["parameters"] for name, deployment in made.items()}
    assert parameters["nightly-top-up"]["n_runs_at_most"] > 0
    plan = attack_plan(n_outputs=1)  # what the command does by itself
    job = TypeAdapter(WeightsJob).validate_python(parameters["weights-kkt"]["job"])
    assert (job.attack, job.n_attacks) == (plan.attack, plan.n_attacks)
    job = TypeAdapter(WeightsJob).validate_python(parameters["weights-span"]["job"])
    assert job.attack == SpanAttack()
    instahide = parameters["instahide"]
    assert resolve(instahide["recipe"], instahide["settings"]) == preset("instahide-small")
    assert resolved(parameters["paper-kkt"]) == study("multiclass", "paper")
    assert [limit.limit for limit in resolved(parameters["nightly-audit"]).limits] == [0.05]


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_a_process_worker_runs_a_deployment(tmp_path: Path) -> None:
    """`prefect deploy --all` on a server of this test's own, and one run from its parameters."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    environment = {
        **os.environ,
        "PREFECT_HOME": str(tmp_path / "home"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
    }
    program = [sys.executable, "-m", "prefect", "--no-prompt"]

    def prefect(*words: str) -> None:
        done = subprocess.run(
            [*program, *words], env=environment, cwd=tmp_path, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    store = tmp_path / "job"
    parameters = {"recipe": "smoke", "store": str(store), "workers": {"n_workers": 1}}
    words = ["server", "start", "--host", "127.0.0.1", "--port", str(port)]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*program, *words], env=environment, **quiet) as server:
        try:
            deadline = time.monotonic() + 120
            while not answers(port):
                assert time.monotonic() < deadline, "the Prefect server did not start"
                time.sleep(0.3)
            prefect("work-pool", "create", "palimpsest", "--type", "process")
            prefect("deploy", "--all", "--prefect-file", str(REPOSITORY / "prefect.yaml"))
            prefect("deployment", "run", "generate/batch", "--params", json.dumps(parameters))
            prefect("worker", "start", "--pool", "palimpsest", "--type", "process", "--run-once")
        finally:
            server.terminate()
    assert Dataset(store / "pairs").n_runs == preset("smoke").sampling.n_runs
