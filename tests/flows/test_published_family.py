"""A family that a package outside the tree publishes goes through the chain and a study."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOY = Path(__file__).parents[1] / "published" / "blur.py"
THROUGH_ALL = """
import json, sys
from dataclasses import replace
from pathlib import Path

import flows
from flows import study as studies
from flows.chain import chain
from flows.families.weights.study import GridStudy
from flows.recipe import Recipe
from flows.settings import from_json, resolve, to_json
from flows.study import run_study
from recon_core.experiments import FAMILIES
from tasks.cluster.workers import Workers
from tasks.evaluation.settings import Evaluation
from tasks.families.weights.study.settings import Axis, Cell, Study

def main(root):
    workers = Workers(n_workers=1, device="cpu")
    small = {
        "experiment.family": "blurred", "experiment.side": 5, "experiment.keep": "all",
        "sampling.images_per_run": 4, "heldout.images_per_run": 4,
        "sampling.phases.0.n_runs": 2, "heldout.phases.0.n_runs": 2,
    }
    recipe = replace(resolve("smoke", small), restorers={})
    assert from_json(to_json(recipe)) == recipe
    products = chain(recipe, root / "job", workers=workers)
    blurred = FAMILIES["blurred"].experiment
    cells = tuple(
        Cell(
            name=f"side {side}", panel="sides", at={"side": side}, images_per_run=4,
            experiment=blurred(side=side, keep="all"),
        )
        for side in (3, 7)
    )
    axes = {"side": Axis(title="Side", values=(3, 7), scale="linear")}
    study = Study(
        name="sides", preset="cpu", data="photos", cells=cells, axes=axes, n_victims=2,
        n_attacks=1, runs_per_part=1, n_tests=8, train_first=True,
        evaluation=Evaluation(baselines=(), n_samples=1),
    )
    studies.STUDIES["sides"] = GridStudy(
        name="sides", title="Sides", question="Does a wider blur hide more?", paper="",
        presets={"cpu": lambda: study},
    )
    page = run_study("sides", root / "study", workers=workers)
    record = json.loads((root / "study" / "study.json").read_text())
    print("FOUND", json.dumps({
        "pairs": products["pairs"]["pairs"],
        "methods": sorted(products["evaluation"]["methods"]),
        "report": str(products["report"]),
        "study": str(page),
        "ssim": [cell["targets"]["mean_ssim"] for cell in record["cells"]],
    }))

if __name__ == "__main__":
    main(Path(sys.argv[1]))
"""


def published(folder: Path, name: str = "blurred", value: str = "blur:FAMILY") -> dict[str, str]:
    """The environment of a process in which a package of one file is installed."""
    shutil.copy(TOY, folder / "blur.py")
    facts = folder / "blur-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: blur\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[palimpsest.families]\n{name} = {value}\n")
    path = os.pathsep.join([str(folder), str(TOY.parents[2]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PREFECT_HOME": str(folder / "prefect")}


@pytest.mark.slow
def test_a_family_of_one_file_outside_the_tree_goes_all_the_way(tmp_path: Path) -> None:
    environment = published(tmp_path)
    (tmp_path / "through_all.py").write_text(THROUGH_ALL)
    words = [sys.executable, str(tmp_path / "through_all.py"), str(tmp_path / "out")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.split("FOUND ")[1])
    assert found["pairs"] == 2 * 4
    assert {"plain", "vote"} <= set(found["methods"])
    assert "given a blurred copy of each picture" in Path(found["report"]).read_text()
    little, much = found["ssim"]
    assert 1 > little > much > 0
    assert Path(found["study"]).read_text().startswith("<!doctype html>")


def test_what_is_no_family_is_named_with_the_fix(tmp_path: Path) -> None:
    environment = published(tmp_path, value="blur:Blurred")
    words = [sys.executable, "-c", "import recon_core.experiments"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert "blurred = blur:Blurred of palimpsest.families is no Family; mend or" in done.stderr
