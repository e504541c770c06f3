"""Flows and tasks that Prefect records where it has a server, and that need none.

Without a server (no `PREFECT_API_URL` in the environment or the profile) flows are called as the
functions that they are: nothing is started, nothing listens. If a server goes away in the middle,
that is said once and the work goes on without it. An interrupted run is Cancelled on its page, not
Crashed: the same call goes on from the store.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import signal
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import httpx
from prefect import Flow, Task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext
from prefect.settings import get_current_settings
from prefect.states import Cancelled
from prefect.utilities.callables import call_with_parameters, get_call_parameters
from prefect.utilities.hashing import file_hash

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

INTERRUPTED = "Interrupted; the same call goes on from what is stored."
_UNSET: Any = object()
_gone = threading.Event()
"""Set once a server did not answer: the rest of this process does without it."""


@dataclass
class _Ending:
    """The end of a recorded function, whatever Prefect made of it."""

    value: Any = _UNSET
    raised: BaseException | None = None
    on_sigterm: Any = field(default_factory=lambda: signal.getsignal(signal.SIGTERM))
    """The answer to SIGTERM before Prefect put its own there, which makes a crash of it."""


_ending: ContextVar[_Ending | None] = ContextVar("palimpsest_ending", default=None)


class RecordedFlow(Flow[P, R]):
    """A Prefect flow that is a plain function where there is no server."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:  # type: ignore[override]
        def alone() -> Any:  # with parameters checked as Prefect checks them
            parameters = get_call_parameters(self.fn, args, kwargs)
            if self.should_validate_parameters:
                parameters = self.validate_parameters(parameters)
            return call_with_parameters(self.fn, parameters)

        call: Callable[..., Any] = super().__call__
        value: R = _called(lambda: call(*args, **kwargs), alone)
        return value

    def validate_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """The parameters as the types of the function's own module have them."""
        plain: Flow[P, R] = copy.copy(self)
        plain.fn = inspect.unwrap(self.fn)
        return Flow.validate_parameters(plain, parameters)

    def renamed(self, **names: str) -> RecordedFlow[P, R]:
        """The same flow with another `name` or `flow_run_name`."""
        other = copy.copy(self)
        vars(other).update(names)
        return other


class RecordedTask(Task[P, R]):
    """A Prefect task that is a plain function where there is no server."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:  # type: ignore[override]
        call: Callable[..., Any] = super().__call__
        return _called(lambda: call(*args, **kwargs), lambda: self.fn(*args, **kwargs))


def flow(
    *, name: str, flow_run_name: str | None = None, validate_parameters: bool = True
) -> Callable[[Callable[P, R]], RecordedFlow[P, R]]:
    """A decorator, as Prefect's of the same name."""
    return lambda function: RecordedFlow(
        _noted(function),
        name=name,
        flow_run_name=flow_run_name,
        version=file_hash(inspect.getsourcefile(function) or __file__),
        validate_parameters=validate_parameters,
    )


def task(*, name: str) -> Callable[[Callable[P, R]], RecordedTask[P, R]]:
    """A decorator, as Prefect's of the same name; no result is cached."""
    return lambda function: RecordedTask(_noted(function), name=name, cache_policy=NO_CACHE)


def is_recorded() -> bool:
    """True if there is a Prefect server that is told about runs."""
    return not _gone.is_set() and get_current_settings().api.url is not None


def recorded(tell: Callable[[], T]) -> T | None:
    """Answer of `tell` from the server about the present run; None without one or the other, and if
    the server has just gone away."""
    if not is_recorded() or FlowRunContext.get() is None:
        return None
    try:
        return tell()
    except Exception as error:
        if not _is_lost_server(error):
            raise
        _do_without_server()
        return None


def _called(through_prefect: Callable[[], Any], alone: Callable[[], R]) -> R:
    """Call a function, through Prefect if a server records it."""
    if not is_recorded():
        return alone()
    ending = _Ending()
    token = _ending.set(ending)
    client = get_current_settings().client
    retries = client.max_retries
    try:
        through_prefect()
    except Exception as error:
        if ending.raised is None and not _is_lost_server(error):
            raise
        if _is_lost_server(error):
            _do_without_server()
    finally:
        _ending.reset(token)
        client.max_retries = 0 if _gone.is_set() else retries
    if ending.raised is not None:
        raise ending.raised
    value: R = alone() if ending.value is _UNSET else ending.value
    return value


def _noted(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that it notes how it ended for the caller behind Prefect."""

    @functools.wraps(function)
    def noted(*args: P.args, **kwargs: P.kwargs) -> R:
        ending = _ending.get()
        if ending is None:
            return function(*args, **kwargs)
        token = _ending.set(None)
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGTERM, ending.on_sigterm) if is_main else None
        try:
            ending.value = function(*args, **kwargs)
        except KeyboardInterrupt as interrupt:
            ending.raised = interrupt
            get_current_settings().client.max_retries = 0  # its page is not worth half a minute
            state: Any = Cancelled(message=INTERRUPTED)
            return state  # type: ignore[no-any-return]  # the state that Prefect gives the run
        except BaseException as error:
            ending.raised = error
            raise
        finally:
            if is_main:
                signal.signal(signal.SIGTERM, before)
            _ending.reset(token)
        value: R = ending.value
        return value

    return noted


def _is_lost_server(error: BaseException | None) -> bool:
    """True if a connection's failure is at the root of an error."""
    while error is not None:
        if isinstance(error, httpx.TransportError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _do_without_server() -> None:
    """Report once that the server is lost, and let Prefect's clients give up at once."""
    if _gone.is_set():
        return
    _gone.set()
    settings = get_current_settings()
    settings.client.max_retries = 0
    settings.logging.to_api.enabled = False
    logging.getLogger("palimpsest").warning(
        f"Prefect's server at {settings.api.url} does not answer; the work goes on without it"
    )
