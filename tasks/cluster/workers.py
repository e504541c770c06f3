"""Dask workers for the length of a flow: started here, through a batch system, or somebody's own.

One process per worker and one part at a time per process; with GPUs one process per GPU. `local`
and `cuda` listen on loopback only, with a certificate that lives as long as they do: Dask runs what
it is sent, so nobody else on the machine may send it anything.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import dask.config
import torch
from distributed import Client, LocalCluster
from distributed.comm.addressing import parse_address, parse_host_port
from distributed.comm.core import connect
from distributed.security import Security

from recon_core.strict import Strict, Within
from tasks.cluster.batch_jobs import KeepJobs, check_script
from tasks.cluster.batch_systems import (
    ALLOWED_FAILURES,
    SILENT_S,
    KubernetesSite,
    SlurmSite,
    imported,
    kubernetes_arguments,
    read_site,
    slurm_arguments,
)
from tasks.cluster.process_settings import KEPT_MEMORY, waiting_settings
from tasks.devices import Device, resolve_device, usable_cores

CONNECT_SECONDS = 5.0
KINDS = ("local", "cuda", "slurm", "kubernetes")
_credentials: dict[str, Security] = {}
"""Of the clusters that this process has started, by their schedulers' addresses."""


@dataclass(frozen=True, kw_only=True)
class Workers(Strict):
    """Place where parts are computed; no setting here changes what is computed.

    `cluster`: `local`, `cuda`, `slurm`, `kubernetes`, or the address `tcp://host:port` of a Dask
    scheduler. `cluster_file`: a YAML file of site settings for Slurm or Kubernetes, also written
    `slurm:site.yaml`. `n_workers`: 0 means one per GPU, else one per core of this machine; a batch
    system has to be told.
    """

    cluster: str = "local"
    n_workers: Annotated[int, Within("[0, inf)", fix="0 is one per core")] = 0
    device: Device = "auto"
    cluster_file: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in KINDS and "://" not in self.cluster:
            raise ValueError(
                f"cluster={self.cluster!r} is none of {', '.join(KINDS)}, nor an address like "
                "tcp://127.0.0.1:8786"
            )
        if self.site_file is not None and self.kind not in ("slurm", "kubernetes"):
            raise ValueError(
                f"cluster={self.cluster!r} has no site settings; leave {self.site_file} out, or "
                "use slurm or kubernetes"
            )
        if ":" in self.cluster and self.cluster_file not in (None, self.site_file):
            raise ValueError(
                f"cluster={self.cluster!r} and cluster_file={self.cluster_file!r} name two files "
                "of site settings; leave one out"
            )
        if self.n_workers == 0 and self.kind in ("slurm", "kubernetes"):
            raise ValueError(
                f"n_workers=0, but {self.kind} has to be told how many to start; use --workers"
            )

    @property
    def kind(self) -> str:
        """The cluster's kind, or its address."""
        return self.cluster if "://" in self.cluster else self.cluster.partition(":")[0]

    @property
    def site_file(self) -> str | None:
        """The YAML file of site settings, if there is one."""
        if "://" in self.cluster:
            return self.cluster_file
        return self.cluster.partition(":")[2] or self.cluster_file


def device_of(workers: Workers) -> str:
    """The device that the workers' parts run on, `cpu` or `cuda`: `auto` looks at the site's
    settings, or this machine. ValueError if `cuda` is asked for and not there."""
    if workers.kind in ("slurm", "kubernetes"):
        site = site_of(workers)
        if workers.device == "cuda" and not site.gpu:
            raise ValueError(f"device='cuda', but {workers.kind}'s site has gpu: false; set it")
        return "cuda" if site.gpu and workers.device != "cpu" else "cpu"
    return resolve_device(workers.device, elsewhere=workers.kind not in KINDS)


def site_of(workers: Workers) -> SlurmSite | KubernetesSite:
    """The site's settings of a batch system; ValueError if they are not what they should be."""
    if workers.kind == "slurm":
        return read_site(SlurmSite, workers.site_file)
    return read_site(KubernetesSite, workers.site_file)


def check_workers(workers: Workers) -> None:
    """Raise ValueError for what `dask_client` would refuse, before it starts anything."""
    device_of(workers)
    packages = {"cuda": "dask_cuda", "slurm": "dask_jobqueue", "kubernetes": "dask_kubernetes"}
    if workers.kind in packages:
        imported(packages[workers.kind])
    elif workers.kind not in KINDS:
        _require_answer(workers.cluster)


def _require_answer(address: str) -> None:
    """Raise ValueError if no scheduler that knows us answers at an address, which Dask's client
    would try again for half a minute, and of a mute one for ever."""
    security = _credentials.get(address) or Security()

    async def knock() -> None:
        arguments = security.get_connection_args("client")
        async with asyncio.timeout(CONNECT_SECONDS):  # Dask's own bounds no handshake
            (await connect(address, timeout=CONNECT_SECONDS, **arguments)).abort()

    try:
        asyncio.run(knock())
    except (OSError, RuntimeError, TypeError) as error:
        port = parse_host_port(parse_address(address)[1])[1]
        raise ValueError(
            f"cluster={address!r}: no Dask scheduler answers there "
            f"({str(error) or type(error).__name__}); start one with "
            f"`dask scheduler --port {port}`, correct the address, or use --cluster local"
        ) from error


@contextmanager
def dask_client(workers: Workers, *, threads: int) -> Iterator[Client]:
    """Yield a client of `workers`, each with `threads` CPU threads; what is started ends with it.

    Raises:
        ValueError: a package is missing, a site's settings are wrong, or no scheduler answers at
            an address; the message has the fix.
    """
    if workers.kind not in KINDS:
        _require_answer(workers.cluster)
        security = _credentials.get(workers.cluster)
        with Client(workers.cluster, set_as_default=False, security=security) as client:
            yield client
        return
    environment = worker_environment(threads)
    with (
        dask.config.set(
            {
                "distributed.nanny.pre-spawn-environ": environment,
                "distributed.scheduler.allowed-failures": ALLOWED_FAILURES,
                "distributed.scheduler.worker-ttl": SILENT_S,
            }
        ),
        start_cluster(workers, threads, environment) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        address = client.scheduler.addr
        _credentials[address] = client.security
        try:
            yield client
        finally:
            del _credentials[address]


def worker_environment(threads: int) -> dict[str, int | str]:
    """The variables that a worker's process starts with.

    Dask makes its workers' malloc return every freed block, which doubled the time of a part.
    """
    libraries = ("OMP", "MKL", "OPENBLAS")
    numbers: dict[str, int | str] = {f"{name}_NUM_THREADS": threads for name in libraries}
    return numbers | KEPT_MEMORY | waiting_settings(os.environ)


def start_cluster(workers: Workers, threads: int, environment: dict[str, int | str]) -> Any:
    """Start the cluster, a context manager that ends its workers."""
    # Encrypted, and closed to whoever lacks the certificate, which is in memory only.
    private: dict[str, Any] = {"protocol": "tls", "security": Security.temporary()}
    private |= {"threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    if workers.kind == "cuda":
        n_workers = workers.n_workers or None
        resources = {"GPU": 1}
        dask_cuda = imported("dask_cuda")
        return dask_cuda.LocalCUDACluster(n_workers=n_workers, resources=resources, **private)
    if workers.kind in ("slurm", "kubernetes"):
        site = site_of(workers)
        if isinstance(site, KubernetesSite):
            arguments = kubernetes_arguments(
                site, n_workers=workers.n_workers, threads=threads, environment=environment
            )
            return imported("dask_kubernetes").operator.KubeCluster(**arguments)
        arguments = slurm_arguments(site, threads=threads, environment=environment)
        cluster = imported("dask_jobqueue").SLURMCluster(**arguments)
        try:
            check_script(cluster.job_script())
        except ValueError:
            cluster.close()
            raise
        n_jobs, folder = workers.n_workers, site.log_directory
        hint = f"; see {'slurm-JOB.out here' if folder is None else f'{folder}/*JOB.err'}"
        if site.interface in (None, "lo"):
            hint += "; the scheduler listens on loopback: "
            hint += "other machines need the site's `interface`"
        cluster.adapt(Adaptive=KeepJobs, minimum_jobs=n_jobs, maximum_jobs=n_jobs, hint=hint)
        return cluster
    n_workers = workers.n_workers or max(1, usable_cores() // threads)
    if workers.n_workers == 0 and resolve_device(workers.device) == "cuda":
        n_workers = torch.cuda.device_count()
    return LocalCluster(
        n_workers=n_workers,
        processes=True,
        silence_logs=logging.CRITICAL,
        **private,
    )
