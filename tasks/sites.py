"""What a site has to say about its Slurm or Kubernetes, and what Dask's packages are told.

Settings come from a YAML file with the fields below as keys; an unknown key is an error, as is a
value of another type. A worker is one job or one pod with one process, and with `gpu` exactly one
GPU, which the process then sees as its only one. Workers that have a GPU say so to the scheduler
(`--resources GPU=1`).
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import TypeAdapter, ValidationError

PIP_NAMES = {
    "dask_cuda": "dask-cuda",
    "dask_jobqueue": "dask-jobqueue",
    "dask_kubernetes": "dask-kubernetes",
    "yaml": "pyyaml",
}
GPU_RESOURCE = ("--resources", "GPU=1")

_Site = TypeVar("_Site", "SlurmSite", "KubernetesSite")


@dataclass(frozen=True, kw_only=True)
class SlurmSite:
    """One Slurm job per worker.

    `queue` is the partition. `cores` is of each job, 0 for as many as a part has threads.
    `gpu_directive` is how the site asks for one GPU. `directives` are further lines of #SBATCH,
    `prologue` lines of shell before the worker starts (modules, environments). `interface` is the
    network that nodes reach this machine by. `python` is the interpreter on the nodes.
    """

    queue: str | None = None
    account: str | None = None
    cores: int = 0
    memory: str = "8 GiB"
    walltime: str = "04:00:00"
    gpu: bool = False
    gpu_directive: str = "--gres=gpu:1"
    directives: tuple[str, ...] = ()
    prologue: tuple[str, ...] = ()
    interface: str | None = None
    python: str | None = None
    local_directory: str | None = None
    log_directory: str | None = None
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class KubernetesSite:
    """One pod per worker, by the Dask operator, which has to be in the cluster.

    `image` has palimpsest installed. `cores` and `memory` are of each pod, 0 cores for as many as a
    part has threads. `env` are further variables, such as `AWS_ENDPOINT_URL`. `gpu_resource` is
    what the cluster calls a GPU.
    """

    image: str
    name: str = "palimpsest"
    namespace: str | None = None
    cores: int = 0
    memory: str = "8Gi"
    gpu: bool = False
    gpu_resource: str = "nvidia.com/gpu"
    env: Mapping[str, str] = field(default_factory=dict)
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


def read_site(kind: type[_Site], path: str | None) -> _Site:
    """The settings in a YAML file; defaults without one.

    Raises:
        ValueError: no such file, no YAML, an unknown or a missing key, or a value of another type.
    """
    settings: Any = {}
    where = "the site's settings"
    if path is not None:
        where = path
        yaml = imported("yaml")
        try:
            settings = yaml.safe_load(Path(path).read_text())
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}; give a file of site settings") from error
        except yaml.YAMLError as error:
            text = " ".join(str(error).split())
            raise ValueError(f"{path} is not YAML ({text}); write `key: value` lines") from error
    try:
        return TypeAdapter(kind).validate_python({} if settings is None else settings)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        known = ", ".join(kind.__dataclass_fields__)
        raise ValueError(f"{where}: {key}: {first['msg']}; the keys are {known}") from error


def cuda_arguments(n_workers: int) -> dict[str, Any]:
    """For `LocalCUDACluster`: one process per GPU, on loopback."""
    return {
        "n_workers": n_workers or None,
        "threads_per_worker": 1,
        "host": "127.0.0.1",
        "dashboard_address": "127.0.0.1:0",
        "resources": {"GPU": 1},
    }


def slurm_arguments(
    site: SlurmSite, *, threads: int, environment: Mapping[str, int]
) -> dict[str, Any]:
    """For `SLURMCluster`: one job per worker, one process per job, one part at a time."""
    exports = [f"export {name}={value}" for name, value in environment.items()]
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
        "worker_extra_args": list(GPU_RESOURCE) if site.gpu else [],
        "interface": site.interface,
        "python": None if site.python is None else shlex.quote(site.python),
        "local_directory": site.local_directory,
        "log_directory": site.log_directory,
        "scheduler_options": {"dashboard_address": "127.0.0.1:0"},
    }
    return {name: value for name, value in arguments.items() if value is not None}


def kubernetes_arguments(
    site: KubernetesSite, *, n_workers: int, threads: int, environment: Mapping[str, int]
) -> dict[str, Any]:
    """For `KubeCluster`: one pod per worker, one process per pod, one part at a time."""
    limits = {"cpu": str(site.cores or threads), "memory": site.memory}
    if site.gpu:
        limits[site.gpu_resource] = "1"
    command = ["dask", "worker", "--nthreads", "1", *(GPU_RESOURCE if site.gpu else ())]
    env = {name: str(value) for name, value in environment.items()}
    env["DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES"] = "2"  # the scheduler is a pod, too
    arguments = {
        "name": site.name,
        "namespace": site.namespace,
        "image": site.image,
        "n_workers": n_workers,
        "resources": {"requests": limits, "limits": limits},
        "env": {**env, **site.env},
        "worker_command": command,
    }
    return {name: value for name, value in arguments.items() if value is not None}


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
