"""Runs that Prefect records, runs without a server, and runs whose server goes away."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prefect import Flow, Task, get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

from tasks import orchestration
from tasks.artifacts import publish_facts, publish_progress
from tasks.orchestration import flow, is_recorded, task

CALLS: list[str] = []


@task(name="inner step")
def step(number: int) -> int:
    CALLS.append(f"step {number}")
    publish_facts("of-a-step", {"number": number}, "a step")
    return number + 1


@flow(name="outer job", flow_run_name="{number}")
def job(number: int, *, interrupted: bool = False) -> int:
    CALLS.append(f"job {number}")
    progress = publish_progress("of-a-job", "a job")
    result = step(number)
    progress(0.5)
    if interrupted:
        signal.raise_signal(signal.SIGTERM)
    return result


@flow(name="whole chain")
def chain(number: int, *, interrupted: bool = False) -> int:
    return job.renamed(flow_run_name="by another name")(number, interrupted=interrupted)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No server is lost yet, and what is done without one stays in the test."""
    CALLS.clear()
    monkeypatch.setattr(orchestration, "_gone", threading.Event())
    settings = get_current_settings()
    kept = settings.client.max_retries, settings.logging.to_api.enabled
    yield
    settings.client.max_retries, settings.logging.to_api.enabled = kept


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Prefect has none, and must not be asked to run anything: it would start one."""

    def started(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("Prefect would start a server")

    monkeypatch.setattr(Flow, "__call__", started)
    monkeypatch.setattr(Task, "__call__", started)
    with temporary_settings({PREFECT_API_URL: None}):
        yield


@pytest.fixture
def nobody_there() -> Iterator[None]:
    """A server is configured, and nothing listens there."""
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        yield


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGTERM is what it is in a command."""

    def interrupt(_signal: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    yield
    signal.signal(signal.SIGTERM, before)


def test_without_a_server_a_flow_is_its_function_and_checks_its_parameters(no_server: None) -> None:
    assert not is_recorded()
    assert chain(3) == 4
    assert CALLS == ["job 3", "step 3"]
    numeral: Any = "3"
    assert job(numeral) == 4  # as Prefect converts it
    wrong: Any = "three"
    with pytest.raises(Exception, match="number"):
        job(wrong)


def test_a_server_that_is_not_there_is_said_once_and_ends_nothing(
    nobody_there: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert chain(3) == 4
    assert CALLS == ["job 3", "step 3"]
    said = [r.getMessage() for r in caplog.records if r.name == "palimpsest"]
    assert said == [
        "Prefect's server at http://127.0.0.1:9/api does not answer; the work goes on without it"
    ]
    assert not is_recorded()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_function_runs_once_whenever_its_server_goes_away(
    when: str, nobody_there: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(self: Flow[Any, Any], *args: Any, **kwargs: Any) -> Any:
        if when == "after":
            self.fn(*args, **kwargs)
        raise RuntimeError("no state") from httpx.ConnectError("refused")

    monkeypatch.setattr(Flow, "__call__", dying)
    assert job(3) == 4
    assert CALLS == ["job 3", "step 3"]


def test_an_interrupted_run_does_not_wait_for_a_server_that_has_gone(
    nobody_there: None, interrupts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = get_current_settings().client
    before, asked = client.max_retries, []

    def served(self: Flow[Any, Any], *args: Any, **kwargs: Any) -> None:
        self.fn(*args, **kwargs)
        asked.append(client.max_retries)

    monkeypatch.setattr(Flow, "__call__", served)
    monkeypatch.setattr(Task, "__call__", lambda self, *args, **kwargs: self.fn(*args, **kwargs))
    with pytest.raises(KeyboardInterrupt):
        job(3, interrupted=True)
    assert asked == [0]
    assert client.max_retries == before > 0


def test_an_interrupted_run_is_cancelled_on_its_page(
    prefect_server: None, interrupts: None
) -> None:
    with pytest.raises(KeyboardInterrupt):
        chain(7, interrupted=True)
    assert CALLS == ["job 7", "step 7"]
    with get_client(sync_client=True) as client:
        states = {}
        for name in ("whole chain", "outer job"):
            only = FlowFilter(name=FlowFilterName(any_=[name]))
            (run,) = client.read_flow_runs(flow_filter=only)
            assert run.state is not None
            states[name] = (run.state.name, run.state.message)
    assert set(states.values()) == {("Cancelled", orchestration.INTERRUPTED)}
    assert is_recorded()
