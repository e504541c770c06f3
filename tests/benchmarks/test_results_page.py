"""The results page: made of nothing but the files, complete, and stopped by a malformed one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run_summary
from benchmarks.results_page import RESULTS, build_page, main
from benchmarks.run_summary import RunSummary, parse_run, summarise_run
from tests.benchmarks.test_record import CLAIM, MEASUREMENT

SIDE = {"n": 40, "n_good": 12, "mean_ssim": 0.43219, "mean_haarpsi": 0.5, "best_ssim": 0.9}
EXTRA = {"good_fraction": 0.3, "mean_ssim_interval": [0.4, 0.5]}


def evaluation() -> dict[str, Any]:
    """As much of an evaluation.json as a summary needs."""
    decoys = SIDE | {"n_good": 1, "mean_ssim": 0.2}
    return {
        "schema": "palimpsest-evaluation",
        "settings": {"good_threshold": 0.4},
        "source": {"name": "folder:pictures"},
        "dataset": {"n_runs": 2, "images_per_run": [20]},
        "methods": {
            name: {
                "targets": {"summary": SIDE | EXTRA, "ssim": [0.1]},
                "decoys": {"summary": decoys | EXTRA, "ssim": [0.1]},
                "n_targets_above_every_decoy": 7,
            }
            for name in ("plain", "edm_x1")
        },
    }


def summary(**changes: Any) -> RunSummary:
    made = summarise_run(
        evaluation(), name="Demo", command="palimpsest demo", seconds={"generate": 12.25}
    )
    return dataclasses.replace(made, **changes)


def as_json(value: Any) -> str:
    return json.dumps(dataclasses.asdict(value))


def files() -> dict[str, str]:
    return {
        "kkt.json": as_json(MEASUREMENT) + "\n",
        "claims-001.json": json.dumps([dataclasses.asdict(CLAIM)]),
        "run-demo.json": as_json(summary(picture="demo.png")),
    }


def test_every_number_of_the_files_is_on_the_page() -> None:
    page = build_page(files())
    assert "| a case | 0.5 s | a loop | 2 s | 4 | 3 |" in page
    assert "### Paper 001" in page
    assert "| Images come back | figure 1 | 59 of 500 | 3 of 40 | yes |" in page
    row = "| `plain` | 12 of 40 | 1 of 40 | 7 | 0.432 | 0.200 | 0.500 | 0.500 |"
    assert row in page
    assert row.replace("plain", "edm_x1") in page
    assert "2 victims of 20 images each, from `folder:pictures`" in page
    assert "`palimpsest demo`" in page
    assert "generate 12.2 s" in page
    assert "![Demo](results/demo.png)" in page


def test_good_counts_never_stand_without_their_decoys() -> None:
    raw = json.loads(files()["run-demo.json"])
    del raw["methods"]["plain"]["decoys"]
    with pytest.raises(ValueError, match=r"run-demo\.json: methods\.plain\.decoys: Field required"):
        build_page({"run-demo.json": json.dumps(raw)})


def test_the_page_does_not_depend_on_the_order_of_the_files() -> None:
    assert build_page(files()) == build_page(dict(reversed(files().items())))


@pytest.mark.parametrize(("holds", "shown"), [(False, "**no**"), (None, "not testable")])
def test_claims_that_do_not_hold_say_so(holds: bool | None, shown: str) -> None:
    claim = dataclasses.asdict(CLAIM) | {"holds": holds}
    assert shown in build_page({"claims-004.json": json.dumps([claim])})


def test_a_bar_in_a_text_does_not_break_the_table() -> None:
    page = build_page({"kkt.json": as_json(dataclasses.replace(MEASUREMENT, case="a | b"))})
    assert "| a \\| b |" in page


@pytest.mark.parametrize("name", ["kkt.json", "claims-001.json", "run-demo.json"])
def test_malformed_files_stop_the_build_and_are_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / name).write_text(files()[name][:-5])
    assert main(["--results", str(folder)]) == 1
    assert name in capsys.readouterr().err
    assert not (tmp_path / "results.md").exists()


def test_check_notices_an_outdated_page(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    options = ["--results", str(folder)]
    assert main([*options, "--check"]) == 1
    assert main(options) == 0
    assert main([*options, "--check"]) == 0
    assert "No results yet" in (tmp_path / "results.md").read_text()
    (folder / "kkt.json").write_text(files()["kkt.json"])
    assert main([*options, "--check"]) == 1


def test_the_committed_page_is_what_its_files_say() -> None:
    assert main(["--check", "--results", str(RESULTS)]) == 0


def test_a_summary_is_written_from_a_jobs_folder(tmp_path: Path) -> None:
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "evaluation.json").write_text(json.dumps(evaluation()))
    (tmp_path / "timings.json").write_text('{"generate": 12.25}')
    out = tmp_path / "run-demo.json"
    options = ["--name", "Demo", "--command", "palimpsest demo", "--json", str(out)]
    run_summary.main([str(tmp_path), *options])
    written = parse_run(out.read_text(), name=out.name)
    same_load = dataclasses.replace(written, hardware=summary().hardware)
    assert same_load == summary(hardware=same_load.hardware)


def test_something_else_is_not_summed_up() -> None:
    with pytest.raises(ValueError, match="schema='other' is not 'palimpsest-evaluation'"):
        summarise_run(
            evaluation() | {"schema": "other"}, name="x", command="x", seconds={}, picture=None
        )
    empty = evaluation() | {"methods": {}}
    with pytest.raises(ValueError, match="methods is empty"):
        summarise_run(empty, name="x", command="x", seconds={})
