"""One Prefect server for the whole session, on a database of its own."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
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


class Command:
    """`palimpsest WORDS...` in this process."""

    def __init__(self, run: Callable[..., tuple[int, str, str]], *words: object) -> None:
        self.run, self.words = run, words

    def of(self, *words: object) -> Command:
        """The command that begins with these words, too."""
        return Command(self.run, *self.words, *words)

    def __call__(self, *words: object) -> tuple[int, str, str]:
        """Exit code, what it printed, what it complained."""
        return self.run(*self.words, *words)

    def done(self, *words: object) -> str:
        """What it printed; it ended well."""
        code, said, complaint = self(*words)
        assert code == 0, complaint
        return said

    def refused(self, *words: object, code: int = 2) -> str:
        """What it complained; it ended with this code and without a traceback."""
        ended, said, complaint = self(*words)
        assert ended == code, said + complaint
        assert "Traceback" not in complaint
        return complaint


@pytest.fixture
def palimpsest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
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

    return Command(run)


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
