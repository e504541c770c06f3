"""Studies of units from images to the results page, again for free, and with units that fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.papers import studies
from benchmarks.results.page import build_pages
from flows.cli.main import app
from flows.study import STUDIES, UnitsFailedError
from recon_core.victims.separability import MixCon
from tasks.families.inversion.study.record import sweet_spots
from tasks.families.inversion.study.settings import Cell

RUN = CliRunner()
FEW = {
    "autoencoder": ["--set", "victim.training.epochs=400", "--set", "masks=random,window",
                    "--set", "methods.unknown.n_alternations=2"],
    "inversion": [],
}  # fmt: skip
"""Makes of the smallest preset something that takes a few seconds."""


def words(kind: str, store: Path, *more: str) -> list[str]:
    return ["study", kind, "--preset", "tiny", "--store", str(store), "--workers", "1",
            "--device", "cpu", *FEW[kind], *more]  # fmt: skip


def made_twice(kind: str, store: Path, *more: str, said: str, kept: tuple[str, ...]) -> Any:
    """The record of a study, which is the same when it is run again and makes nothing anew."""
    done = RUN.invoke(app, words(kind, store, *more))
    assert done.exit_code == 0, done.output
    assert said in " ".join(done.stdout.split())
    entries, file = STUDIES[kind].entries, store / STUDIES[kind].record
    assert {path.name for path in store.iterdir()} == entries - {"control.json"}
    record = json.loads(file.read_bytes())
    assert (record["preset"], record["failed"]) == ("tiny", [])
    before = {path: path.stat().st_mtime_ns for name in kept for path in (store / name).rglob("*")}
    again = RUN.invoke(app, ["study", kind, "--store", str(store), "--device", "cpu"])
    assert again.exit_code == 0, again.output  # with the settings of the store
    assert before == {path: path.stat().st_mtime_ns for name in kept
                      for path in (store / name).rglob("*")}  # fmt: skip
    assert {**json.loads(file.read_bytes()), "created": ""} == {**record, "created": ""}
    return record


def results_page(paper: str, store: Path, record: str, other_cells: list[Any]) -> str:
    """The results page of the study alone; what is no study of its kind, or has other claims than
    its numbers give, is refused."""
    out, changed = store.parent / "claims.json", store.parent / record
    studies.main([str(store), "--json", str(out)])
    text = (store / record).read_text()
    pages = build_pages({f"claims/{paper}.json": out.read_text(), f"studies/a/{record}": text})
    page = pages[f"{paper}.md"]
    made = json.loads(text)
    assert f"### {made['title']}" in page
    assert all(claim["rule"] in page for claim in made["claims"])
    changed.write_text(json.dumps({**made, "cells": other_cells}))
    with pytest.raises(ValueError, match="are not what its numbers give"):
        studies.read_study(changed)
    with pytest.raises(ValueError, match="make the study again"):
        build_pages({f"studies/a/{record}": "{}"})
    return page


@pytest.mark.slow
def test_recoveries_go_from_images_to_the_results_page_once(
    tmp_path: Path, prefect_server: None
) -> None:
    store, kept = tmp_path / "study", ("victims", "inpainter", "cells")
    said = "Test images are not recovered accurately"
    record = made_twice("autoencoder", store, said=said, kept=kept)
    assert {c["method"] for c in record["cells"]} == {m["name"] for m in record["methods"]}
    assert len(record["methods"]) == 6
    with np.load(store / "recovery-pictures.npz") as arrays:
        for shown in record["shown"]:
            place = f"{shown['victim']}/{shown['level']:g}/{shown['mask']}/{shown['sigma']:g}"
            assert f"{place}/ddnm" in arrays
    cells = [c for c in record["cells"] if (c["victim"], c["method"], c["split"], c["sigma"])
             == ("fc3-leaky_relu", "known", "train", 0.0)]  # fmt: skip
    level = min(c["level"] for c in cells)
    n_close = sum(c["n_approximate"] for c in cells if c["level"] == level)
    page = results_page("autoencoder", store, "recovery.json", [])
    assert f"| paper, mask known | 0 of 12 | {n_close} of 12 |" in page


@pytest.mark.slow
def test_inversions_go_from_images_to_the_results_page_once(
    tmp_path: Path, prefect_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    confirmed = Cell("digits", 2, MixCon(lam=0.1, beta=1e-2))  # has one network until it is chosen
    monkeypatch.setattr(
        "flows.families.inversion.study.sweet_spots",
        lambda plan: {**sweet_spots(plan), ("digits", "confirmed"): confirmed},
    )
    store, more = tmp_path / "study", ("--set", "n_seeds=3")
    said = "At matched accuracy MixCon lowers SSIM"
    record = made_twice("inversion", store, *more, said=said, kept=("products",))
    assert [a["name"] for a in record["attacks"]] == ["paper", "tuned", "strong", "restored"]
    assert len(record["sweet_spots"]) == 2
    cell = next(c for c in record["cells"] if c["defence"]["lam"] == 0.1)
    assert len(cell["attacks"]["strong"]["ssim"]["values"]) == 3
    with np.load(store / "inversion-pictures.npz") as arrays:
        assert arrays["digits/original"].shape == (3, 16, 16)
    first, *others = record["cells"]
    spoiled = {**first, "accuracy": {**first["accuracy"], "mean": 0.0}, "seeds": []}
    page = results_page("mixcon", store, "inversion.json", [spoiled, *others])
    assert f"{first['attacks']['strong']['ssim']['mean']:.3f} [" in page


def test_a_victim_that_fails_is_said_after_the_others_are_shown(
    tmp_path: Path, prefect_server: None
) -> None:
    store = tmp_path / "study"
    (store / "victims").mkdir(parents=True)
    (store / "victims/fc3-leaky_relu").write_text("a file where a folder has to be")
    done = RUN.invoke(app, words("autoencoder", store, "--set", "methods.ddnm=null"))
    assert isinstance(done.exception, UnitsFailedError)
    assert "train fc3-leaky_relu" in str(done.exception)
    record = json.loads((store / "recovery.json").read_bytes())
    assert [victim["name"] for victim in record["victims"]] == ["unet-softplus"]
    assert [entry["unit"] for entry in record["failed"]] == ["train fc3-leaky_relu"]
    assert (store / "recovery.html").is_file()


def test_scores_that_fail_are_said_and_networks_are_trained_and_tested(
    tmp_path: Path, prefect_server: None
) -> None:
    store, more = tmp_path / "study", ("perceptual=vgg16:none.pth", "chain=null")
    settings = [word for one in (*more, "source.cuts=2") for word in ("--set", one)]
    done = RUN.invoke(app, words("inversion", store, *settings))
    assert isinstance(done.exception, UnitsFailedError)
    assert "invert digits, cut 2, vanilla, seed 0" in str(done.exception)
    assert "none.pth" in str(done.exception)
    record = json.loads((store / "inversion.json").read_bytes())
    assert record["cells"][0]["accuracy"]["mean"] is not None
    assert record["cells"][0]["attacks"] == {}
    assert len(record["failed"]) == sum(len(cell["seeds"]) for cell in record["cells"])
    assert (store / "inversion.html").is_file()
