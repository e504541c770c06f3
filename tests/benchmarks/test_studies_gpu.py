"""The studies on a GPU, with a CPU in its place: parity is told, estimates are ordered."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.papers import kkt as claims_002
from benchmarks.papers import studies_gpu
from benchmarks.record import parse_claims, parse_lines
from flows.study import study
from tasks.families.weights.study.claims import check_claims
from tasks.families.weights.study.settings import Pace
from tests.tasks.families.weights.study.test_claims import record_of

PACE = Pace(epoch_s=1e-5, training_rate=1e13, iteration_s=1e-5, attack_rate=1e13)


def test_parity_is_measured_for_every_kind_of_attack() -> None:
    found = list(studies_gpu.parity(torch.device("cpu")))
    assert len(found) == 2 * len(studies_gpu.CASES)
    for line in found:
        assert line.value < (1e-12 if "float64 against" in line.case else 1e-4)


def test_what_computes_something_else_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = studies_gpu.objective

    def wrong(*named: object) -> tuple[torch.Tensor, ...]:
        value, *rest = right(*named)  # type: ignore[arg-type]
        return value, *(rest if named[3] is studies_gpu.CPU else [2 * g for g in rest])

    monkeypatch.setattr(studies_gpu, "objective", wrong)
    with pytest.raises(SystemExit, match="differ by 1, more than 1e-09"):
        list(studies_gpu.parity(torch.device("cpu:0")))


def test_the_cheapest_is_run_and_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(studies_gpu, "measured_pace", lambda _device: PACE)
    cheapest = next(iter(studies_gpu.estimates(PACE)))
    asked: list[str] = []

    def waits(name: str, data: str, store: Path) -> list[str]:
        asked.extend((name, data, str(store)))
        return [sys.executable, "-c", "import time; time.sleep(60)"]

    monkeypatch.setattr(studies_gpu, "command_of", waits)
    out = tmp_path / "studies_gpu.json"
    words = ["--quick", "--json", str(out), "--data", "cifar10:x", "--store", "runs/x"]
    assert studies_gpu.main([*words, "--minutes", "0.001"]) == 0
    assert asked == [cheapest, "cifar10:x", "runs/x"]
    assert "the same command goes on" in capsys.readouterr().out
    lines = parse_lines(out.read_text(), name="x")
    assert next(m.case for m in lines if m.unit == "s").startswith(cheapest)
    with pytest.raises(SystemExit):
        studies_gpu.main(["--quick", "--data", "cifar10:x"])


def test_claims_of_studies_are_collected_and_checked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []
    for name in ("losses", "width"):
        record = record_of(study(name, "cpu"), lambda cell, seed: 5.0 / cell["n_images"])
        record |= {
            "schema": "palimpsest-study",
            "version": 2,
            "preset": "cpu",
            "command": f"palimpsest study {name}",
            "seconds": {"attack": 5.0, "score": 1.5},
        }
        record["claims"] = check_claims(record)
        folder = tmp_path / name
        folder.mkdir()
        (folder / "study.json").write_text(json.dumps(record))
        folders.append(str(folder))
    out = tmp_path / "claims-002.json"
    claims_002.main([*folders, "--json", str(out)])
    claims = parse_claims(out.read_text(), name="x")
    assert len(claims) == 4 + 3
    assert claims[0].ours.startswith("losses (cpu): ")
    assert claims[0].seconds == 6.5
    assert claims[-1].command == "palimpsest study width"
    assert "HOLDS: Victims of regression losses" in capsys.readouterr().out
    record["claims"][0]["outcome"] = "not testable"
    (tmp_path / "width" / "study.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="are not what its numbers give"):
        claims_002.read_study(tmp_path / "width")
    with pytest.raises(ValueError, match="is no study"):
        claims_002.read_study(tmp_path / "nothing")
