"""Debian's Slurm on one machine, for tests: several nodes on loopback, and one of them killed.

    python -m benchmarks.slurm.cluster                  # installs Slurm: apt-get, as root

Everything is below one folder (configuration, munge's key, state, logs); /etc is not touched. A
node is one slurmd (`slurmd -N`) with one CPU. There are no cgroups and no accounting, so it runs in
a container without systemd. The daemons run as the user who starts them, and listen on loopback.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import psutil

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
COMMANDS = ("munged", "slurmctld", "slurmd", "sinfo", "sbatch", "scancel", "squeue")
PATIENCE_S = 30.0
MEMORY_MIB = 4000
NODE_TIMEOUT_S = 30
"""Seconds without an answer after which Slurm calls a node down; its own default is 300."""

CONFIGURATION = """
ClusterName=palimpsest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={first_port}
SlurmUser={user}
SlurmdUser={user}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmdLogFile={folder}/%n/slurmd.log
SlurmdSpoolDir={folder}/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdTimeout={timeout}
KillWait=5
ReturnToService=2
MailProg=/bin/true
""".lstrip()


class SlurmCluster:
    """The daemons below `folder`, found by the files with their process ids."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.conf = self.folder / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment, with this cluster as the one that Slurm's commands see."""
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes, as configured."""
        lines = self.conf.read_text().splitlines() if self.conf.is_file() else []
        return [line.split()[0].partition("=")[2] for line in lines if line.startswith("NodeName")]

    def start(self, n_nodes: int) -> None:
        """Writes the configuration and starts every daemon; returns when all nodes are idle.

        Raises:
            ValueError: Slurm is not installed, or the folder has a cluster that runs.
            RuntimeError: a daemon does not come up, or listens beyond loopback; none is left.
        """
        if missing := [name for name in COMMANDS if shutil.which(name) is None]:
            raise ValueError(
                f"{', '.join(missing)} not found; run: python -m benchmarks.slurm.cluster"
            )
        if self._daemons():
            raise ValueError(f"a cluster runs in {self.folder}; stop it first")
        self._configure(n_nodes)
        munge = self.folder / "munge"
        names = {"key-file": "key", "socket": "socket", "pid-file": "munged.pid",
                 "log-file": "log", "seed-file": "seed"}  # fmt: skip
        try:
            # Forced, since a folder below /tmp is no place that munge trusts.
            self.call("munged", "--force", *(f"--{o}={munge / name}" for o, name in names.items()))
            self.call("slurmctld", "-i")
            for node in self.nodes:
                self.call("slurmd", "-N", node)
            until = time.monotonic() + PATIENCE_S
            while set(self.call("sinfo", "--noheader", "--format=%t").split()) != {"idle"}:
                if time.monotonic() > until:
                    raise RuntimeError(f"no idle nodes after {PATIENCE_S:.0f} s in {self.folder}")
                time.sleep(0.5)
            beyond = [
                f"{process.name()} {c.laddr.ip}:{c.laddr.port}"
                for process in self._daemons()
                for c in process.net_connections("inet")
                if c.status == "LISTEN" and c.laddr.ip not in ("127.0.0.1", "::1")
            ]
            if beyond:
                raise RuntimeError(f"listens on {', '.join(beyond)}; map {hostname()} to 127.0.0.1")
        except (RuntimeError, subprocess.CalledProcessError):
            self.stop()
            raise

    def stop(self) -> None:
        """Ends all jobs and daemons; what is left after ten seconds is killed."""
        if self._pid_of(self.folder / "slurmctld.pid"):
            subprocess.run(
                ["scancel", "--user", getpass.getuser()], check=False, env=self.environment
            )
        daemons = self._daemons()
        jobs = [process for node in self.nodes for process in self._job_processes(node)]
        for process in daemons:
            process.terminate()
        for process in psutil.wait_procs([*jobs, *daemons], timeout=10)[1]:
            process.kill()

    def kill_node(self, node: str) -> int:
        """SIGKILL to the node's slurmd and to all processes of its jobs; how many that were.

        Raises:
            ValueError: there is no such node, or it is dead.
        """
        slurmd = self._pid_of(self.folder / node / "slurmd.pid")
        if node not in self.nodes or slurmd is None:
            raise ValueError(f"no node {node!r} is running; there are {', '.join(self.nodes)}")
        dead = [slurmd, *self._job_processes(node)]
        for process in dead:
            process.kill()
        psutil.wait_procs(dead, timeout=PATIENCE_S)
        return len(dead)

    def call(self, *command: str) -> str:
        """Output of one of Slurm's commands; CalledProcessError if it fails."""
        return subprocess.run(
            command, env=self.environment, check=True, capture_output=True, text=True
        ).stdout

    def _configure(self, n_nodes: int) -> None:
        nodes = [f"node{i}" for i in range(1, n_nodes + 1)]
        for name in ("state", "munge", *nodes):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "munge").chmod(0o700)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(1 + n_nodes)]
        controller, *ports = (s.getsockname()[1] for s in sockets)
        for s in sockets:
            s.close()
        lines = [
            f"NodeName={node} NodeHostname={hostname()} NodeAddr=127.0.0.1 Port={port} CPUs=1 "
            f"RealMemory={MEMORY_MIB}"
            for node, port in zip(nodes, ports, strict=True)
        ]
        lines.append(f"PartitionName=cpu Nodes={','.join(nodes)} Default=YES MaxTime=1-00:00:00")
        head = CONFIGURATION.format(
            host=hostname(), first_port=controller, user=getpass.getuser(), folder=self.folder,
            timeout=NODE_TIMEOUT_S,
        )  # fmt: skip
        self.conf.write_text(head + "\n".join(lines) + "\n")

    def _daemons(self) -> list[psutil.Process]:
        pids = [
            *(self.folder / node / "slurmd.pid" for node in self.nodes),
            self.folder / "slurmctld.pid",
            self.folder / "munge" / "munged.pid",
        ]
        found = (self._pid_of(pid) for pid in pids)
        return [process for process in found if process is not None]

    @staticmethod
    def _pid_of(path: Path) -> psutil.Process | None:
        """The daemon that wrote a pid file, if it is alive and no other process has its number."""
        try:
            process = psutil.Process(int(path.read_text()))
            alive = process.status() != psutil.STATUS_ZOMBIE
            return process if alive and process.name() in COMMANDS else None
        except (OSError, ValueError, psutil.NoSuchProcess):
            return None

    def _job_processes(self, node: str) -> list[psutil.Process]:
        """The processes of the node's jobs, and above each job the slurmstepd that minds it."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                if environment.get("SLURM_CONF") != str(self.conf):
                    continue
                if environment.get("SLURMD_NODENAME") == node:
                    steps = [p for p in process.parents() if p.name().startswith("slurmstepd")]
                    found.update({p.pid: p for p in (*steps, process)})
            except psutil.Error:
                continue
        return list(found.values())


def install() -> None:
    """Slurm's packages from the distribution; whatever services they start are not used here."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        subprocess.run(["apt-get", *words], check=True, env=environment)


def hostname() -> str:
    """The machine's name, as Slurm wants it: without a domain."""
    return socket.gethostname().partition(".")[0]


if __name__ == "__main__":
    install()
