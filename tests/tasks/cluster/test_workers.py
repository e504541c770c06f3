"""Where workers come from: settings, what Dask's packages are told, and who listens where."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from distributed.comm.core import connect
from distributed.security import Security

from tasks.cluster import workers as workers_module
from tasks.cluster.batch_jobs import VARIABLE, KeepJobs
from tasks.cluster.batch_systems import (
    KubernetesSite,
    SlurmSite,
    imported,
    kubernetes_arguments,
    read_site,
    slurm_arguments,
    slurm_seconds,
)
from tasks.cluster.jobs import own_device
from tasks.cluster.workers import (
    Workers,
    dask_client,
    device_of,
    resolve_device,
    site_of,
    start_cluster,
    worker_environment,
)

SITE = """
queue: gpu
account: lab
gpu: true
walltime: "12:00:00"
directives: ["--exclude=node7"]
prologue: [module load cuda]
interface: lo
"""


@pytest.fixture
def slurm_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `sbatch` that takes every job."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\nexit 0\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return sbatch


@pytest.fixture
def site_file(tmp_path: Path) -> str:
    path = tmp_path / "site.yaml"
    path.write_text(SITE)
    return str(path)


class Recorded:
    """A cluster that only keeps what it was told."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.adapted: dict[str, object] = {}
        self.closed = False

    def job_script(self) -> str:
        return "#!/bin/sh\n"

    def adapt(self, **how: object) -> None:
        self.adapted = how

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """The clusters that Dask's packages are asked for."""
    clusters: list[Recorded] = []

    def started(**arguments: object) -> Recorded:
        clusters.append(Recorded(**arguments))
        return clusters[-1]

    module = SimpleNamespace(SLURMCluster=started, LocalCUDACluster=started)
    monkeypatch.setattr(workers_module, "imported", lambda _name: module)
    return clusters


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ValueError, match="--device cpu"):
        resolve_device("cuda")
    assert device_of(Workers(cluster="tcp://10.0.0.1:8786", device="cuda")) == "cuda"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("04:00:00", 14_400),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
        ("2-00:00:05", 172_805),
    ],
)
def test_durations_are_read_as_slurm_does(text: str, seconds: int) -> None:
    assert slurm_seconds(text) == seconds


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cluster": "slurn"}, "cluster='slurn' is none of local, cuda, slurm, kubernetes"),
        ({"n_workers": -1}, "n_workers=-1"),
        ({"cluster": "local:site.yaml"}, "leave site.yaml out"),
        ({"cluster": "tcp://h:1", "cluster_file": "site.yaml"}, "leave site.yaml out"),
        ({"cluster": "slurm:a.yaml", "cluster_file": "b.yaml"}, "name two files"),
        ({"cluster": "slurm"}, "n_workers=0.*--workers"),
        ({"cluster": "kubernetes:k.yaml"}, "n_workers=0.*--workers"),
    ],
)
def test_bad_worker_settings_are_refused(settings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workers(**settings)


def test_the_site_file_is_given_behind_the_kind_or_alone(site_file: str) -> None:
    one = Workers(cluster=f"slurm:{site_file}", n_workers=2)
    two = Workers(cluster="slurm", cluster_file=site_file, n_workers=2)
    assert site_of(one) == site_of(two)
    assert site_of(one) == SlurmSite(
        queue="gpu",
        account="lab",
        gpu=True,
        walltime="12:00:00",
        directives=("--exclude=node7",),
        prologue=("module load cuda",),
        interface="lo",
    )
    assert (device_of(one), device_of(Workers(cluster="slurm", n_workers=1))) == ("cuda", "cpu")
    with pytest.raises(ValueError, match="gpu: false"):
        device_of(Workers(cluster="slurm", n_workers=1, device="cuda"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("qeue: gpu", "site.yaml: qeue: .*keys are queue, account"),
        ("cores: many", "site.yaml: cores: "),
        ("- gpu", "site.yaml: the file: "),
        ("a: [", "site.yaml is not YAML"),
        ("walltime: 12:00:00", "walltime: .*put it in quotes"),
        ('walltime: "noon"', "'noon' is no duration"),
        ('{walltime: "01:00:00", margin: "60"}', "margin='60' leaves nothing"),
    ],
)
def test_a_wrong_site_file_is_refused_with_the_key(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_site(SlurmSite, str(path))


def test_a_site_file_that_is_no_page_of_text_is_refused(tmp_path: Path) -> None:
    pipe, long, deep = tmp_path / "pipe", tmp_path / "long.yaml", tmp_path / "deep.yaml"
    os.mkfifo(pipe)
    with long.open("wb") as file:
        file.truncate(2**40)
    deep.write_text("[" * 100_000)
    for path, said in (
        (pipe, "regular file"),
        (long, "bytes, more than"),
        (deep, "is not YAML"),
        (tmp_path / "none.yaml", r"none\.yaml: No such file"),
    ):
        with pytest.raises(ValueError, match=said):
            read_site(SlurmSite, str(path))
    with pytest.raises(ValueError, match="image: Field required"):
        read_site(KubernetesSite, None)


def test_a_package_that_is_not_installed_is_named_as_pip_knows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dask_cuda", None)
    with pytest.raises(ValueError, match="pip install dask-cuda"):
        imported("dask_cuda")


@pytest.mark.usefixtures("slurm_accepts")
def test_slurm_is_told_of_one_process_a_job_with_its_gpu_and_environment(
    site_file: str, recorded: list[Recorded]
) -> None:
    workers = Workers(cluster=f"slurm:{site_file}", n_workers=3)
    cluster = start_cluster(workers, 2, worker_environment(2))
    assert recorded == [cluster]
    assert cluster.adapted.pop("Adaptive") is KeepJobs
    hint = "; see slurm-JOB.out here; the scheduler listens on loopback: other machines need the "
    hint += "site's `interface`"
    assert cluster.adapted == {"minimum_jobs": 3, "maximum_jobs": 3, "hint": hint}
    told = cluster.arguments
    assert (told["cores"], told["processes"], told["job_cpu"]) == (1, 1, 2)
    assert told["job_extra_directives"] == ["--gres=gpu:1", "--exclude=node7"]
    assert told["job_script_prologue"][0] == "export OMP_NUM_THREADS=2"
    assert told["job_script_prologue"][-1] == "module load cuda"
    assert told["worker_extra_args"] == [
        *("--preload", "tasks.cluster.batch_jobs"),
        *("--dashboard-address", "127.0.0.1:0"),
        *("--resources", "GPU=1"),
    ]
    assert told["security"] is True
    assert "host" not in told["scheduler_options"]
    assert "python" not in told


def test_a_worker_ends_a_tenth_before_the_walltime_unless_the_site_says_otherwise() -> None:
    def line(**settings: str) -> str:
        told = slurm_arguments(SlurmSite(**settings), threads=1, environment={})
        return str(told["job_script_prologue"][0])

    assert line(walltime="10:00:00").startswith(f"export {VARIABLE}=$(( $(date +%s) + {9 * 3600} -")
    assert f"+ {8 * 3600} -" in line(walltime="10:00:00", margin="02:00:00")
    script = f"{line(walltime='01:00:00')}; echo $(( {VARIABLE} - $(date +%s) ))"
    left = [int(subprocess.check_output(["bash", "-c", script])) for _ in range(4)]
    assert all(0.9 * 3240 - 2 <= seconds <= 3240 for seconds in left)
    assert len(set(left)) > 1, "jobs that start together would end together"


def test_a_job_that_slurm_refuses_is_an_error_and_leaves_no_cluster(
    slurm_accepts: Path, recorded: list[Recorded]
) -> None:
    slurm_accepts.write_text("#!/bin/sh\necho invalid account >&2\nexit 1\n")
    with pytest.raises(ValueError, match=r"refuses the job \(invalid account\)"):
        start_cluster(Workers(cluster="slurm", n_workers=1), 1, {})
    assert recorded[0].closed


def test_a_pod_of_kubernetes_has_one_process_and_one_gpu_the_scheduler_none() -> None:
    site = KubernetesSite(
        image="registry/palimpsest:1",
        gpu=True,
        env={"AWS_REGION": "r"},
        secret="bucket",
        pod={"nodeSelector": {"gpu": "yes"}},
    )
    told = kubernetes_arguments(site, n_workers=4, threads=2, environment=worker_environment(2))
    spec = told["custom_cluster_spec"]["spec"]
    assert spec["worker"]["replicas"] == 4
    assert spec["worker"]["spec"]["nodeSelector"] == {"gpu": "yes"}
    (worker,) = spec["worker"]["spec"]["containers"]
    limits = {"cpu": "2", "memory": "8Gi", "nvidia.com/gpu": "1"}
    assert worker["resources"] == {"requests": limits, "limits": limits}
    assert worker["args"][:2] == ["dask", "worker"]
    assert worker["args"][-2:] == ["--resources", "GPU=1"]
    (scheduler,) = spec["scheduler"]["spec"]["containers"]
    assert scheduler["args"][:2] == ["dask", "scheduler"]
    assert "nvidia.com/gpu" not in scheduler["resources"]["limits"]
    for name, value in (("ALLOWED_FAILURES", "2"), ("WORKER_TTL", "90")):
        assert {"name": f"DASK_DISTRIBUTED__SCHEDULER__{name}", "value": value} in scheduler["env"]
    for container in (worker, scheduler):
        assert {"name": "AWS_REGION", "value": "r"} in container["env"]
        assert container["envFrom"] == [{"secretRef": {"name": "bucket"}}]
    assert {"name": "OMP_NUM_THREADS", "value": "2"} in worker["env"]


def test_cuda_is_told_of_one_process_a_gpu(recorded: list[Recorded]) -> None:
    start_cluster(Workers(cluster="cuda"), 1, {})
    told = recorded[0].arguments
    assert told.pop("security").require_encryption
    assert told == {
        **{"n_workers": None, "threads_per_worker": 1, "resources": {"GPU": 1}},
        **{"protocol": "tls", "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"},
    }


def test_the_job_script_that_dask_jobqueue_writes(site_file: str) -> None:
    jobqueue = pytest.importorskip("dask_jobqueue")
    site = read_site(SlurmSite, site_file)
    arguments = slurm_arguments(site, threads=2, environment=worker_environment(2))
    arguments["shared_temp_directory"] = str(Path(site_file).parent)
    with jobqueue.SLURMCluster(**arguments) as cluster:
        script = cluster.job_script()
    for line in (
        "#SBATCH -p gpu",
        "#SBATCH -A lab",
        "#SBATCH --cpus-per-task=2",
        "#SBATCH --mem=8G",
        "#SBATCH -t 12:00:00",
        "#SBATCH --gres=gpu:1",
        "#SBATCH --exclude=node7",
        "export OMP_NUM_THREADS=2",
        "module load cuda",
    ):
        assert line in script.splitlines()
    assert "--nthreads 1 " in script
    assert "--preload tasks.cluster.batch_jobs" in script
    assert "--tls-key " in script
    assert "--resources GPU=1" in script


def listening() -> set[tuple[str, int]]:
    """Addresses that this process and its children listen on."""
    me = psutil.Process()
    return {
        (connection.laddr.ip, connection.laddr.port)
        for process in [me, *me.children(recursive=True)]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.usefixtures("threads_or_processes")
def test_a_local_cluster_listens_on_loopback_only_beside_another_one() -> None:
    workers = Workers(n_workers=1, device="cpu")
    before = listening()
    with dask_client(workers, threads=1), dask_client(workers, threads=1) as second:
        assert second.submit(sum, [1, 2]).result() == 3
        opened = listening() - before
    assert {ip for ip, _port in opened} == {"127.0.0.1"}


@pytest.mark.usefixtures("workers_in_process")
def test_a_local_cluster_takes_work_from_its_owner_only() -> None:
    """Dask runs what it is sent: a scheduler that strangers can talk to runs their code as ours."""
    with dask_client(Workers(n_workers=1, device="cpu"), threads=1) as client:
        scheduler: Any = client.scheduler
        host = scheduler.addr.removeprefix("tls://")
        worker = next(iter(client.scheduler_info()["workers"]))
        assert worker.startswith("tls://")
        credulous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        credulous.check_hostname, credulous.verify_mode = False, ssl.CERT_NONE
        for address, arguments in (
            (f"tcp://{host}", {}),
            (f"tls://{host}", {"ssl_context": credulous}),
            (f"tls://{host}", Security.temporary().get_connection_args("client")),
        ):
            with pytest.raises(OSError, match=rf"{host}|TLS certificate does not match"):
                asyncio.run(connect(address, timeout=1, **arguments))
        with dask_client(Workers(cluster=scheduler.addr), threads=1) as known:
            assert known.submit(sum, [1, 2]).result() == 3


def test_whoever_listens_and_is_no_scheduler_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers_module, "CONNECT_SECONDS", 0.5)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        with (
            pytest.raises(ValueError, match=r"no Dask scheduler .*TimeoutError.*--cluster"),
            dask_client(Workers(cluster=address), threads=1),
        ):
            pass


def test_local_workers_take_a_gpu_each_by_number_and_dask_cudas_the_first_they_see(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    third: Any = SimpleNamespace(name="localcluster-3")
    assert own_device("cuda", third) == "cuda:3"
    assert own_device("cpu", third) == "cpu"
    assert own_device("cuda", None) == "cuda"
    monkeypatch.setitem(sys.modules, "dask_cuda", SimpleNamespace())
    assert own_device("cuda", third) == "cuda"
    assert chosen == [3]
