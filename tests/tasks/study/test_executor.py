"""The time that units of a study have left."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from recon_core.types import Progress
from tasks.progress import Left
from tasks.study.executor import Unit, _Run


@dataclass(frozen=True)
class Job:
    attack: str
    device: str = "cpu"


def work(_job: Job, _progress: Progress) -> dict[str, Any]:
    return {}


def unit(name: str, attack: str) -> Unit:
    return Unit(name, work, Job(attack))


def test_the_time_left_is_by_what_units_of_the_same_kind_took() -> None:
    future: Any = None
    watch: Any = SimpleNamespace(n_workers=2)
    run = _Run(future, 1, watch, lambda *_: (), lambda *_a, **_k: None)
    run.took = {unit("0", "span").kind: [2.0, 4.0]}
    run.waiting = {name: unit(name, "span") for name in ("1", "2")}
    assert run._left() == Left(3.0)  # six seconds of work on two workers
    run.running = {"3": unit("3", "KKT")}
    run.reported = {"3": (0.05, 1.0)}
    assert run._left() == Left(3.0, is_all=False)  # too early to say how long that takes
    run.reported = {"3": (0.25, 10.0)}
    run.waiting["4"] = unit("4", "KKT")
    assert run._left() == Left((6.0 + 30.0 + 40.0) / 2)


def test_the_time_left_as_text() -> None:
    said = [
        str(Left(s, is_all=is_all)) for s, is_all in ((61.0, True), (61.0, False), (0.0, False))
    ]
    assert said == ["1:01 left", "more than 1:01 left", "? left"]
