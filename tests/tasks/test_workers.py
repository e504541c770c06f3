"""Where workers come from: settings, what Dask's packages are told, and who listens where."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from tasks import workers as workers_module
from tasks.sites import (
    KubernetesSite,
    SlurmSite,
    cuda_arguments,
    imported,
    kubernetes_arguments,
    read_site,
    slurm_arguments,
)
from tasks.workers import (
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
def site_file(tmp_path: Path) -> str:
    path = tmp_path / "site.yaml"
    path.write_text(SITE)
    return str(path)


class Recorded:
    """A cluster that only keeps what it was told."""

    def __init__(self, **arguments: object) -> None:
        self.arguments, self.jobs = arguments, 0

    def scale(self, *, jobs: int) -> None:
        self.jobs = jobs


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ValueError, match="--device cpu"):
        resolve_device("cuda")
    assert device_of(Workers(cluster="tcp://10.0.0.1:8786", device="cuda")) == "cuda"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cluster": "slurn"}, "cluster='slurn' is none of local, cuda, slurm, kubernetes"),
        ({"n_workers": -1}, "n_workers=-1"),
        ({"cluster": "local:site.yaml"}, "leave site.yaml out"),
        ({"cluster": "tcp://h:1", "cluster_file": "site.yaml"}, "leave site.yaml out"),
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
    ],
)
def test_a_wrong_site_file_is_refused_with_the_key(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_site(SlurmSite, str(path))


def test_a_missing_site_file_and_a_missing_key_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.yaml: No such file"):
        read_site(SlurmSite, str(tmp_path / "none.yaml"))
    with pytest.raises(ValueError, match="image: Field required"):
        read_site(KubernetesSite, None)


def test_a_package_that_is_not_installed_is_named_as_pip_knows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dask_cuda", None)
    with pytest.raises(ValueError, match="pip install dask-cuda"):
        imported("dask_cuda")


def test_slurm_is_told_of_one_process_a_job_with_its_gpu_and_environment(
    site_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        workers_module, "imported", lambda _name: SimpleNamespace(SLURMCluster=Recorded)
    )
    workers = Workers(cluster=f"slurm:{site_file}", n_workers=3)
    cluster = start_cluster(workers, 2, worker_environment(2))
    assert cluster.jobs == 3
    told = cluster.arguments
    assert (told["cores"], told["processes"], told["job_cpu"]) == (1, 1, 2)
    assert told["job_extra_directives"] == ["--gres=gpu:1", "--exclude=node7"]
    assert told["job_script_prologue"][0] == "export OMP_NUM_THREADS=2"
    assert told["job_script_prologue"][-1] == "module load cuda"
    assert told["worker_extra_args"] == ["--resources", "GPU=1"]
    assert "python" not in told


def test_kubernetes_and_cuda_are_told_of_one_process_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = KubernetesSite(image="registry/palimpsest:1", gpu=True, env={"AWS_REGION": "r"})
    told = kubernetes_arguments(site, n_workers=4, threads=2, environment=worker_environment(2))
    assert told["n_workers"] == 4
    limits = {"cpu": "2", "memory": "8Gi", "nvidia.com/gpu": "1"}
    assert told["resources"] == {"requests": limits, "limits": limits}
    assert told["worker_command"] == [
        "dask", "worker", "--nthreads", "1", "--resources", "GPU=1",
    ]  # fmt: skip
    assert told["env"]["OMP_NUM_THREADS"] == "2"
    assert told["env"]["AWS_REGION"] == "r"
    monkeypatch.setattr(
        workers_module, "imported", lambda _name: SimpleNamespace(LocalCUDACluster=Recorded)
    )
    cluster = start_cluster(Workers(cluster="cuda"), 1, {})
    assert cluster.arguments == cuda_arguments(0)
    assert cluster.arguments["resources"] == {"GPU": 1}
    assert cluster.arguments["n_workers"] is None


def test_the_job_script_that_dask_jobqueue_writes(site_file: str) -> None:
    jobqueue = pytest.importorskip("dask_jobqueue")
    site = read_site(SlurmSite, site_file)
    arguments = slurm_arguments(site, threads=2, environment=worker_environment(2))
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


def test_a_local_cluster_listens_on_loopback_only_beside_another_one() -> None:
    workers = Workers(n_workers=1, device="cpu")
    before = listening()
    with dask_client(workers, threads=1), dask_client(workers, threads=1) as second:
        assert second.submit(sum, [1, 2]).result() == 3
        opened = listening() - before
    assert {ip for ip, _port in opened} == {"127.0.0.1"}
