"""Records of benchmarks and claims, and the pages made of them: malformed ones stop the build."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import (
    Claim,
    Measurement,
    hardware,
    main,
    parse_claims,
    parse_lines,
    versions,
)
from benchmarks.results import page, run_summary
from benchmarks.results.page import RESULTS, build_pages
from benchmarks.results.run_summary import parse_run, summarise_run
from tests.tasks.evaluation.evaluations import evaluated_sweep
from tests.tasks.page.kept import kept

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


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("not json", "line 2: the object: Invalid JSON"),
        (line(value="0.5"), "line 2: value: Input should be a valid number"),
        (line(value=0), "expected above 0"),
        (line(repeats=0), "repeats=0"),
        (line(speed=1), "line 2: speed: Unexpected keyword argument"),
        (line(ratio=None), "all or none"),
        (line(ratio=5.0), "ratio=5.0 is not reference_value / value = 4"),
        (line(value=1).replace('"value": 1', '"value": NaN'), "line 2"),
    ],
)
def test_refuses_malformed_lines(bad: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"demo\.json, line 2") as caught:
        parse_lines(f"{line()}\n{bad}\n", name="demo.json")
    assert message in str(caught.value)


def test_claims_read_back_and_malformed_ones_are_refused() -> None:
    raw = dataclasses.asdict(CLAIM)
    unmeasured = {key: value for key, value in raw.items() if key != "rule"} | {"seconds": None}
    claims = parse_claims(json.dumps([raw, unmeasured]), name="claims.json")
    assert claims == [CLAIM, dataclasses.replace(CLAIM, rule=None, seconds=None)]
    for bad in ({"outcome": "yes"}, {"seconds": "1"}, {"verdict": True}):
        with pytest.raises(ValueError, match=rf"claims\.json: 1\.{next(iter(bad))}"):
            parse_claims(json.dumps([raw, raw | bad]), name="claims.json")


def test_the_command_line_prints_lines_and_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(quick: bool) -> Iterator[Measurement]:
        yield MEASUREMENT
        yield dataclasses.replace(MEASUREMENT, repeats=1 if quick else 2)

    file = tmp_path / "demo.json"
    main(measure, ["--quick", "--json", str(file)])
    assert file.read_text() == capsys.readouterr().out
    first, second = parse_lines(file.read_text(), name=file.name)
    assert (first, second.repeats) == (MEASUREMENT, 1)


def files() -> dict[str, str]:
    return {
        "benchmarks/kkt.json": line() + "\n",
        "claims/image-restoration.json": json.dumps([dataclasses.asdict(CLAIM)]),
        "runs/demo.json": (RESULTS / "runs" / "demo.json").read_text(),
    }


def test_what_belongs_to_no_page_or_lacks_its_decoys_stops_the_build() -> None:
    raw = json.loads(files()["runs/demo.json"])
    del raw["methods"]["plain"]["decoys"]
    study = "studies/x/study.json"
    record, _pictures = kept("study", "multiclass")
    for name, text, message in (
        ("runs/demo.json", json.dumps(raw), r"methods\.plain\.decoys: Field required"),
        ("claims/x.json", json.dumps([dataclasses.asdict(CLAIM)]), "belongs to no page"),
        (study, "[1]", "is no study"),
        (study, json.dumps(record | {"version": 0}), r"\('palimpsest-study', 0\), expected"),
    ):
        with pytest.raises(ValueError, match=rf"{name}.*{message}"):
            build_pages({name: text})


@pytest.mark.parametrize("name", files())
def test_malformed_files_stop_the_build_and_are_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(files()[name][:-5])
    assert page.main(["--results", str(tmp_path)]) == 1
    assert name in capsys.readouterr().err
    assert not (tmp_path / "README.md").exists()


def test_check_notices_an_outdated_page(tmp_path: Path) -> None:
    options = ["--results", str(tmp_path)]
    assert page.main([*options, "--check"]) == 1
    assert page.main(options) == 0
    assert page.main([*options, "--check"]) == 0
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/kkt.json").write_text(files()["benchmarks/kkt.json"])
    assert page.main([*options, "--check"]) == 1


def test_the_committed_page_is_what_its_files_say() -> None:
    assert page.main(["--check", "--results", str(RESULTS)]) == 0


def test_a_summary_is_written_from_a_jobs_folder(tmp_path: Path) -> None:
    record = evaluated_sweep(tmp_path)
    (tmp_path / "out").rename(tmp_path / "evaluation")
    (tmp_path / "timings.json").write_text('{"generate": 12.25}')
    out = tmp_path / "demo.json"
    options = ["--name", "Demo", "--command", "palimpsest demo", "--json", str(out)]
    run_summary.main([str(tmp_path), *options])
    written = parse_run(out.read_text(), name=out.name)
    assert written.seconds == {"generate": 12.25}
    assert list(written.methods) == list(record["methods"])
    for name, method in written.methods.items():
        assert method.targets.n_good == record["methods"][name]["targets"]["summary"]["n_good"]
    with pytest.raises(ValueError, match="methods is empty"):
        summarise_run(record | {"methods": {}}, name="x", command="x", seconds={})
    evaluation = tmp_path / "evaluation" / "evaluation.json"
    evaluation.write_text(json.dumps(record | {"version": 1}))
    with pytest.raises(ValueError, match=r"are \('palimpsest-evaluation', 1\), expected"):
        run_summary.main([str(tmp_path), *options])
