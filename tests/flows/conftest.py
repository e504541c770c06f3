"""One Prefect server for the whole session, on a database of its own."""

import signal
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

import flows  # noqa: F401  (sets Prefect's defaults before Prefect is imported)
from flows.cli import main as cli
from flows.presets import preset
from flows.recipe import Recipe


@pytest.fixture(scope="session", autouse=True)
def no_process_of_its_own() -> Iterator[None]:
    """Commands run in this process here, which has to keep its signals, environment and malloc."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "start_guard", lambda: None)
        patch.setattr(cli, "take_ctrl_c_alone", lambda: None)
        patch.setattr(cli, "keep_freed_memory", lambda: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def no_worker_of_its_own(all_workers_in_process: None) -> None:
    """Flows compute in this process, too."""


@pytest.fixture
def palimpsest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs `palimpsest words...`: exit code, what it printed, what it complained."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["palimpsest", *map(str, words)])
        before = signal.getsignal(signal.SIGTERM)
        capsys.readouterr()
        try:
            with pytest.raises(SystemExit) as end:
                cli.main()
        finally:
            signal.signal(signal.SIGTERM, before)
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    return run


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A temporary server; starting it takes seconds, so there is one."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="session")
def tiny() -> Recipe:
    """The smoke recipe with one-step restorers: every station, no meaning."""
    recipe = preset("smoke")
    restorers = {
        name: replace(plan, training=replace(plan.training, n_steps=2, batch_size=8))
        for name, plan in recipe.restorers.items()
    }
    return replace(recipe, restorers=restorers)
