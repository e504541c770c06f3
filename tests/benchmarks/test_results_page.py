"""The results page: made of nothing but the files, complete, and stopped by a malformed one."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from benchmarks.results import run_summary
from benchmarks.results.page import RESULTS, main
from benchmarks.results.run_summary import RunSummary, parse_run, summarise_run
from tasks.evaluation.evaluate import Evaluation, evaluate
from tests.benchmarks.pages import build_page
from tests.benchmarks.test_record import CLAIM, MEASUREMENT
from tests.tasks.evaluation.evaluations import Blender, image_set, planted_store, weights
from tests.tasks.page.kept import kept


@cache
def _evaluated() -> str:
    """The evaluation of a small store, with one restorer of several samples."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        record = evaluate(
            Evaluation(n_samples=3, grid_rows=2, baselines=("tv",)),
            dataset=planted_store(root / "store", image_set(), n_parts=1, planted=2),
            heldout=image_set(),
            restorers={"edm": weights(root, "edm")},
            out=root / "out",
            device="cpu",
            load=lambda _path, _device: (Blender(), nn.Identity()),
        )
    return json.dumps(record)


def evaluation() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(_evaluated())
    return record


def summary(**changes: Any) -> RunSummary:
    made = summarise_run(
        evaluation(), name="Demo", command="palimpsest demo", seconds={"generate": 12.25}
    )
    return dataclasses.replace(made, **changes)


def as_json(value: Any) -> str:
    return json.dumps(dataclasses.asdict(value))


def files() -> dict[str, str]:
    return {
        "benchmarks/kkt.json": as_json(MEASUREMENT) + "\n",
        "claims/image-restoration.json": json.dumps([dataclasses.asdict(CLAIM)]),
        "runs/demo.json": as_json(summary(picture="demo.png")),
    }


def test_good_counts_never_stand_without_their_decoys() -> None:
    raw = json.loads(files()["runs/demo.json"])
    del raw["methods"]["plain"]["decoys"]
    with pytest.raises(
        ValueError, match=r"runs/demo\.json: methods\.plain\.decoys: Field required"
    ):
        build_page({"runs/demo.json": json.dumps(raw)})


def test_claims_of_no_paper_stop_the_build() -> None:
    with pytest.raises(ValueError, match=r"claims/x\.json belongs to no page"):
        build_page({"claims/x.json": json.dumps([dataclasses.asdict(CLAIM)])})


@pytest.mark.parametrize(
    "name", ["benchmarks/kkt.json", "claims/image-restoration.json", "runs/demo.json"]
)
def test_malformed_files_stop_the_build_and_are_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(files()[name][:-5])
    assert main(["--results", str(tmp_path)]) == 1
    assert name in capsys.readouterr().err
    assert not (tmp_path / "README.md").exists()


def test_check_notices_an_outdated_page(tmp_path: Path) -> None:
    options = ["--results", str(tmp_path)]
    assert main([*options, "--check"]) == 1
    assert main(options) == 0
    assert main([*options, "--check"]) == 0
    assert "No results yet" in (tmp_path / "benchmarks.md").read_text()
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/kkt.json").write_text(files()["benchmarks/kkt.json"])
    assert main([*options, "--check"]) == 1


def test_the_committed_page_is_what_its_files_say() -> None:
    assert main(["--check", "--results", str(RESULTS)]) == 0


def test_a_summary_is_written_from_a_jobs_folder(tmp_path: Path) -> None:
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "evaluation.json").write_text(json.dumps(evaluation()))
    (tmp_path / "timings.json").write_text('{"generate": 12.25}')
    out = tmp_path / "demo.json"
    options = ["--name", "Demo", "--command", "palimpsest demo", "--json", str(out)]
    run_summary.main([str(tmp_path), *options])
    written = parse_run(out.read_text(), name=out.name)
    same_load = dataclasses.replace(written, hardware=summary().hardware)
    assert same_load == summary(hardware=same_load.hardware)


def test_a_study_is_a_table_of_its_cells() -> None:
    record, _pictures = kept("study", "multiclass")
    name = "studies/multiclass/study.json"
    page = build_page({name: json.dumps(record)})
    for cell in record["cells"]:
        assert f"{cell['decoys']['n_good']} of {cell['decoys']['n']}" in page
    with pytest.raises(ValueError, match=r"studies/x/study\.json is no study"):
        build_page({"studies/x/study.json": "[1]"})
    with pytest.raises(ValueError, match=r"\('palimpsest-study', 0\), expected"):
        build_page({name: json.dumps(record | {"version": 0})})


def test_something_else_is_not_summed_up() -> None:
    with pytest.raises(ValueError, match=r"schema and version are \('palimpsest-evaluation', 1\)"):
        summarise_run(evaluation() | {"version": 1}, name="x", command="x", seconds={})
    with pytest.raises(ValueError, match=r"schema and version are \('other', \d\), expected"):
        summarise_run(
            evaluation() | {"schema": "other"}, name="x", command="x", seconds={}, picture=None
        )
    empty = evaluation() | {"methods": {}}
    with pytest.raises(ValueError, match="methods is empty"):
        summarise_run(empty, name="x", command="x", seconds={})
