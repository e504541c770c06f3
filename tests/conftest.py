"""Shape annotations are enforced while testing; and an S3 server for whoever asks for one.

Tests run side by side, a process per core, so a process and its children compute with one thread;
tests of several threads ask for them.
"""

from __future__ import annotations

import os

for _library in ("OMP", "MKL", "OPENBLAS"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")  # before anything imports torch or numpy

from jaxtyping import install_import_hook  # noqa: E402

install_import_hook(["recon_core"], "beartype.beartype")  # before anything imports the core

import dataclasses  # noqa: E402
import itertools  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Generator, Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402

from tests.storage.s3_server import S3Server, s3_server  # noqa: E402
from tests.tasks.browser import Browser, chromium  # noqa: E402

_numbers = itertools.count()
_LOG_CHARS = 1500


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows what the workers of campaigns wrote last: where one hung, it is there."""
    report = yield
    factory = getattr(item.config, "_tmp_path_factory", None)
    if report.failed and factory is not None:
        for log in sorted(factory.getbasetemp().rglob("logs/part-*.log")):
            if log.stat().st_mtime >= call.start:
                report.sections.append((f"log {log.name}", log.read_text()[-_LOG_CHARS:]))
    return report


@contextmanager
def _threads_for_workers() -> Iterator[None]:
    """Local Dask workers are threads of this process: an own process takes seconds to import torch.

    The scheduler, TLS and what is sent stay as they are.
    """
    from distributed import LocalCluster

    from tasks.cluster import workers

    def in_process(**options: Any) -> Any:
        return LocalCluster(**options | {"processes": False})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "LocalCluster", in_process)
        yield


@pytest.fixture
def workers_in_process() -> Iterator[None]:
    """The workers that this test's campaigns start are threads."""
    with _threads_for_workers():
        yield


@pytest.fixture(params=["threads", pytest.param("processes", marks=pytest.mark.slow)])
def threads_or_processes(request: pytest.FixtureRequest) -> None:
    """The workers that this test's campaigns start: threads; in `make test-all` processes."""
    if request.param == "threads":
        request.getfixturevalue("workers_in_process")


@pytest.fixture(scope="module")
def all_workers_in_process() -> Iterator[None]:
    """The workers that a file's campaigns start are threads."""
    with _threads_for_workers():
        yield


@pytest.fixture(scope="session")
def s3_process() -> Iterator[S3Server]:
    """One S3 server for all tests."""
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(s3_process: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The S3 server, set in this test's environment, with a prefix that no other test uses."""
    for name, value in s3_process.environment.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    return dataclasses.replace(s3_process, prefix=f"test-{next(_numbers)}/")


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one, for tests that write hundreds of parts."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="palimpsest-", dir=memory) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all pages."""
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
