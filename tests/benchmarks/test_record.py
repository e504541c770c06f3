"""The format of a measurement: what is written reads back, and anything else is refused."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import (
    Claim,
    Measurement,
    compared,
    hardware,
    main,
    parse_claims,
    parse_lines,
    versions,
)

MEASUREMENT = Measurement(
    benchmark="demo",
    case="a case",
    value=0.5,
    unit="s",
    reference="a loop",
    reference_value=2.0,
    ratio=4.0,
    repeats=3,
    hardware=hardware(),
    versions=versions(),
)
CLAIM = Claim(
    claim="Images come back",
    where="figure 1",
    theirs="59 of 500",
    ours="3 of 40",
    outcome="holds",
    rule="any",
    command="make claims",
    seconds=12.5,
    hardware=hardware(),
)


def line(**changes: Any) -> str:
    return json.dumps(dataclasses.asdict(MEASUREMENT) | changes)


def test_reads_back() -> None:
    text = f"{line()}\n\n{line(reference=None, reference_value=None, ratio=None)}\n"
    first, second = parse_lines(text, name="demo.json")
    assert first == MEASUREMENT
    assert second.ratio is None


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("not json", "line 2: the object: Invalid JSON"),
        ("[1, 2]", "line 2"),
        (line(value="0.5"), "line 2: value: Input should be a valid number"),
        (line(value=0), "expected above 0"),
        (line(repeats=0), "repeats=0"),
        (line(repeats=1.5), "line 2: repeats"),
        (line(speed=1), "line 2: speed: Unexpected keyword argument"),
        (line(ratio=None), "all or none"),
        (line(ratio=5.0), "ratio=5.0 is not reference_value / value = 4"),
        (line(hardware="fast"), "line 2: hardware"),
        (line().replace('"unit": "s", ', ""), "line 2: unit: Field required"),
        (line(value=1).replace('"value": 1', '"value": NaN'), "line 2"),
    ],
)
def test_refuses_malformed_lines(bad: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"demo\.json, line 2") as caught:
        parse_lines(f"{line()}\n{bad}\n", name="demo.json")
    assert message in str(caught.value)


def test_claims_read_back_and_malformed_ones_are_refused() -> None:
    raw = dataclasses.asdict(CLAIM)
    untestable = raw | {"outcome": "not testable"}
    without_rule = {key: value for key, value in raw.items() if key != "rule"}
    claims = parse_claims(json.dumps([raw, untestable, without_rule]), name="claims-001.json")
    assert claims[2].rule is None
    assert claims[0] == CLAIM
    assert claims[1].outcome == "not testable"
    unmeasured = json.dumps([raw | {"seconds": None}])
    assert parse_claims(unmeasured, name="claims-001.json")[0].seconds is None
    for bad in ({"outcome": "yes"}, {"seconds": "1"}, {"verdict": True}):
        with pytest.raises(ValueError, match=rf"claims-001\.json: 1\.{next(iter(bad))}"):
            parse_claims(json.dumps([raw, raw | bad]), name="claims-001.json")


def test_compares_medians_per_unit_of_work() -> None:
    measured = compared(
        "demo",
        "sleeping",
        ours=lambda: time.sleep(0.01),
        per_call=2,
        reference="sleeping longer",
        theirs=lambda: time.sleep(0.04),
        reference_per_call=4,
        repeats=3,
    )
    assert 0.005 <= measured.value < 0.02
    assert measured.reference_value is not None
    assert 0.01 <= measured.reference_value < 0.04
    assert parse_lines(json.dumps(dataclasses.asdict(measured)), name="x") == [measured]


def test_the_command_line_prints_lines_and_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[bool] = []

    def measure(quick: bool) -> Iterator[Measurement]:
        """Nothing real."""
        asked.append(quick)
        yield MEASUREMENT
        yield dataclasses.replace(MEASUREMENT, case="another")

    file = tmp_path / "demo.json"
    main(measure, ["--quick", "--json", str(file)])
    main(measure, [])
    assert asked == [True, False]
    assert file.read_text() * 2 == capsys.readouterr().out
    assert [m.case for m in parse_lines(file.read_text(), name=file.name)] == ["a case", "another"]
