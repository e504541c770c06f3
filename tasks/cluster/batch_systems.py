"""Settings of a site's Slurm or Kubernetes, and what Dask's packages are told.

Settings come from a YAML file with the fields below as keys; an unknown key is an error, as is a
value of another type. A worker is one job or one pod with one process, and with `gpu` exactly one
GPU, which the process then sees as its only one. Workers that have a GPU say so to the scheduler
(`--resources GPU=1`).
"""

from __future__ import annotations

import importlib
import re
import shlex
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from recon_core.strict import Strict
from storage.files import read_bounded, reason_of
from tasks.cluster import batch_jobs

PIP_NAMES = {
    "dask_cuda": "dask-cuda",
    "dask_jobqueue": "dask-jobqueue",
    "dask_kubernetes": "dask-kubernetes",
    "yaml": "pyyaml",
}
GPU_RESOURCE = ("--resources", "GPU=1")
ALLOWED_FAILURES = 2
"""Deaths of workers after which Dask tries a part again; the third gives it up."""
SILENT_S = 90
"""A worker that says nothing for so long is frozen, and started anew. Dask looks as often, so that
nobody waits longer than twice that; its own 300 would be ten minutes."""
MOST_BYTES = 2**20
"""A site's settings are a page of text."""
IDLE_S = 3600
"""After so long without work Kubernetes removes a cluster whose campaign was killed."""

_Site = TypeVar("_Site", "SlurmSite", "KubernetesSite")


@dataclass(frozen=True, kw_only=True)
class SlurmSite(Strict):
    """One Slurm job per worker.

    `queue` is the partition. `cores` is of each job, 0 for as many as a part has threads.
    `margin` is how long before the walltime a worker begins no other part and ends after the one
    that it has; a tenth of the walltime if left out. `directives` are further lines of #SBATCH,
    `prologue` lines of shell before the worker starts. `interface` is the network that nodes reach
    this machine by; without one everything listens on loopback, which is enough for a Slurm on one
    machine only. With `tls` the certificate is a file in `shared_directory` (the current one if
    left out), which the nodes have to see. `python` is the interpreter on the nodes.
    """

    queue: str | None = None
    account: str | None = None
    cores: int = 0
    memory: str = "8 GiB"
    walltime: str = "04:00:00"
    margin: str | None = None
    gpu: bool = False
    gpu_directive: str = "--gres=gpu:1"
    directives: tuple[str, ...] = ()
    prologue: tuple[str, ...] = ()
    interface: str | None = None
    tls: bool = True
    shared_directory: str | None = None
    python: str | None = None
    local_directory: str | None = None
    log_directory: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.work_s <= 0:
            raise ValueError(
                f"margin={self.margin!r} leaves nothing of walltime={self.walltime!r}; a worker "
                "needs time for a part at least"
            )

    @property
    def work_s(self) -> int:
        """Seconds from a job's start until its worker begins no other part."""
        walltime = slurm_seconds(self.walltime)
        return walltime - (walltime // 10 if self.margin is None else slurm_seconds(self.margin))


@dataclass(frozen=True, kw_only=True)
class KubernetesSite(Strict):
    """One pod per worker and one for the scheduler, by the Dask operator, which has to be there.

    `image` has palimpsest installed. `name` is what the names of its pods begin with. `cores` and
    `memory` are of each worker, 0 cores for as many as a part has threads. `env` are further
    variables, such as `AWS_ENDPOINT_URL`; `secret` is a secret whose keys become variables, such as
    `AWS_SECRET_ACCESS_KEY`. `pod` are further fields of the workers' pods (`nodeSelector`,
    `tolerations`). `gpu_resource` is what the cluster calls a GPU.
    """

    image: str
    name: str = "palimpsest"
    namespace: str | None = None
    cores: int = 0
    memory: str = "8Gi"
    scheduler_memory: str = "4Gi"
    gpu: bool = False
    gpu_resource: str = "nvidia.com/gpu"
    env: Mapping[str, str] = field(default_factory=dict)
    secret: str | None = None
    pod: Mapping[str, Any] = field(default_factory=dict)


def read_site(kind: type[_Site], path: str | None) -> _Site:
    """The settings in a YAML file; defaults without one. ValueError for what is none."""
    settings: Any = {}
    where = "the site's settings"
    if path is not None:
        where = path
        settings = read_yaml(path, "give a file of site settings")
    try:
        return TypeAdapter(kind).validate_python({} if settings is None else settings)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        known = ", ".join(kind.__dataclass_fields__)
        fix = f"the keys are {known}"
        if first["type"] == "string_type" and isinstance(first["input"], int):
            fix = "put it in quotes"  # YAML reads 12:00:00 as a number of seconds
        raise ValueError(f"{where}: {key}: {first['msg']}; {fix}") from error


def read_yaml(path: str, fix: str) -> Any:
    """Values in a YAML file; ValueError that ends with the hint `fix` if it cannot be read."""
    yaml = imported("yaml")
    try:
        return yaml.safe_load(read_bounded(Path(path), MOST_BYTES))
    except OSError as error:
        raise ValueError(f"{path}: {reason_of(error)}; {fix}") from error
    except (yaml.YAMLError, RecursionError) as error:
        text = " ".join(str(error).split())
        raise ValueError(f"{path} is not YAML ({text}); write `key: value` lines") from error


def slurm_arguments(
    site: SlurmSite, *, threads: int, environment: Mapping[str, int | str]
) -> dict[str, Any]:
    """For `SLURMCluster`: one job per worker, one process per job, one part at a time."""
    exports = [f"export {name}={value}" for name, value in environment.items()]
    # Up to a tenth earlier: jobs that start together are not to end together.
    at = f"$(date +%s) + {site.work_s} - RANDOM % {site.work_s // 10 + 1}"
    exports.append(f"export {batch_jobs.VARIABLE}=$(( {at} ))")
    scheduler = {"dashboard_address": "127.0.0.1:0"}
    if site.interface is None:
        scheduler["host"] = "127.0.0.1"
    gpu = (site.gpu_directive,) if site.gpu else ()
    arguments = {
        "queue": site.queue,
        "account": site.account,
        "cores": 1,  # of Dask: parts at a time
        "processes": 1,
        "job_cpu": site.cores or threads,
        "memory": site.memory,
        "walltime": site.walltime,
        "job_extra_directives": [*gpu, *site.directives],
        "job_script_prologue": [*exports, *site.prologue],
        "job_name": "palimpsest",
        "worker_extra_args": [
            *("--preload", batch_jobs.__name__),
            *("--dashboard-address", "127.0.0.1:0"),
            *(GPU_RESOURCE if site.gpu else ()),
        ],
        "interface": site.interface,
        "security": site.tls or None,
        "shared_temp_directory": site.shared_directory or str(Path.cwd()),
        "python": None if site.python is None else shlex.quote(site.python),
        "local_directory": site.local_directory,
        "log_directory": site.log_directory,
        "scheduler_options": scheduler,
    }
    return {name: value for name, value in arguments.items() if value is not None}


def slurm_seconds(text: str) -> int:
    """A duration as Slurm writes it: minutes, m:s, h:m:s, or days- before h, h:m or h:m:s; else
    ValueError."""
    if not re.fullmatch(r"\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2}", text):
        raise ValueError(f"{text!r} is no duration; write hours:minutes:seconds, as in '04:00:00'")
    days, dash, clock = text.rpartition("-")
    fields = [int(field) for field in clock.split(":")]
    if dash or len(fields) == 3:
        hours, minutes, seconds = (*fields, 0, 0)[:3]
    else:
        hours, (minutes, seconds) = 0, (*fields, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def kubernetes_arguments(
    site: KubernetesSite, *, n_workers: int, threads: int, environment: Mapping[str, int | str]
) -> dict[str, Any]:
    """For `KubeCluster`: one pod per worker, one process per pod, one part at a time.

    The cluster is described here as a whole. What dask-kubernetes makes of plain arguments gives
    the scheduler a GPU as well, and starts it by a command that Dask has had no more since 2026.6.
    """
    name = f"{site.name}-{uuid.uuid4().hex[:6]}"  # of one name two campaigns would share workers
    secrets = [] if site.secret is None else [{"secretRef": {"name": site.secret}}]

    def ports(key: str, numbers: Mapping[str, int]) -> list[dict[str, Any]]:
        return [{"name": n, key: port, "protocol": "TCP"} for n, port in numbers.items()]

    def container(
        role: str,
        command: list[str],
        limits: Mapping[str, str],
        variables: Mapping[str, int | str],
        numbers: Mapping[str, int],
    ) -> dict[str, Any]:
        env = {**{key: str(value) for key, value in variables.items()}, **site.env}
        return {
            "name": role,
            "image": site.image,
            "args": command,
            "env": [{"name": key, "value": value} for key, value in env.items()],
            "envFrom": secrets,
            "resources": {"requests": limits, "limits": limits},
            "ports": ports("containerPort", numbers),
        }

    limits = {"cpu": str(site.cores or threads), "memory": site.memory}
    if site.gpu:
        limits[site.gpu_resource] = "1"
    command = ["dask", "worker", "--name", "$(DASK_WORKER_NAME)", "--nthreads", "1"]
    command += ["--dashboard-address", "8788", *(GPU_RESOURCE if site.gpu else ())]
    # The operator asks the workers by HTTP which of them may go.
    worker = container("worker", command, limits, environment, {"http-dashboard": 8788})
    variables = {"ALLOWED_FAILURES": ALLOWED_FAILURES, "WORKER_TTL": SILENT_S}
    numbers = {"tcp-comm": 8786, "http-dashboard": 8787}
    scheduler = container(
        "scheduler",
        ["dask", "scheduler", "--host", "0.0.0.0"],
        {"cpu": "1", "memory": site.scheduler_memory},
        {f"DASK_DISTRIBUTED__SCHEDULER__{key}": value for key, value in variables.items()},
        numbers,
    )
    health = {"httpGet": {"port": "http-dashboard", "path": "/health"}}
    scheduler["readinessProbe"] = {**health, "periodSeconds": 5}
    scheduler["livenessProbe"] = {**health, "initialDelaySeconds": 60, "periodSeconds": 20}
    service = {
        "type": "ClusterIP",
        "selector": {"dask.org/cluster-name": name, "dask.org/component": "scheduler"},
        "ports": [port | {"targetPort": port["name"]} for port in ports("port", numbers)],
    }
    cluster = {
        "apiVersion": "kubernetes.dask.org/v1",
        "kind": "DaskCluster",
        "metadata": {"name": name},
        "spec": {
            "idleTimeout": IDLE_S,
            "worker": {"replicas": n_workers, "spec": {**site.pod, "containers": [worker]}},
            "scheduler": {"spec": {"containers": [scheduler]}, "service": service},
        },
    }
    arguments = {"custom_cluster_spec": cluster, "namespace": site.namespace, "quiet": True}
    return {key: value for key, value in arguments.items() if value is not None}


def imported(module: str) -> Any:
    """A module of an optional package; ValueError with the pip command if it is not installed."""
    try:
        if module == "dask_kubernetes":
            importlib.import_module("dask_kubernetes.operator")
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{module} cannot be imported ({error}); install it with: pip install "
            f"{PIP_NAMES[module]}"
        ) from error
