"""`palimpsest attack kkt`: from a file of weights to a page, and every way it can be refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flows.families.weights.attack import attack_kkt
from flows.families.weights.attack_plan import attack_plan, planned
from flows.papers import EXPERIMENTS
from tasks.families.weights import attack as attack_module
from tasks.families.weights.attack import WeightsJob
from tests.tasks.families.weights.attack_victims import N_IMAGES, VictimFiles, make_victim

FILES = {"attack.json", "preflight.json", "reconstructions.png", "reconstructions.safetensors",
         "report.html", "cache"}  # fmt: skip
QUICK = ["--n-images-guess", str(N_IMAGES), "--iterations", "200", "--attacks", "3"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> VictimFiles:
    return make_victim(tmp_path_factory.mktemp("victim"))


def words(files: VictimFiles, out: Path, *more: str) -> list[str]:
    return ["attack", "kkt", "--weights", str(files.safetensors_file), "--out", str(out),
            "--device", "cpu", *QUICK, *more]  # fmt: skip


def test_from_weights_to_a_page(
    palimpsest, monkeypatch, tmp_path: Path, files: VictimFiles, prefect_server
) -> None:
    out = tmp_path / "out"
    known = ["--data", f"folder:{files.images}", "--decoys", f"folder:{files.decoys}"]
    shown = palimpsest.done(*words(files, out, *known))
    assert "mlp:432-32-32-1" in shown
    assert "An attack can work." in shown
    assert {entry.name for entry in out.iterdir()} == FILES
    record = json.loads((out / "attack.json").read_bytes())
    scores = record["scores"]
    assert scores["images"]["n_good"] >= N_IMAGES - 1
    assert scores["decoys"]["n_good"] <= 1
    good = f"Good matches: {scores['images']['n_good']} of {N_IMAGES} images"
    assert good in " ".join(shown.split())
    assert record["settings"]["attack"]["n_candidates"] == 2 * N_IMAGES
    assert record["settings"]["attack"]["save_at"] == [25, 50, 100, 200]
    assert len(record["attacks"]) == 3
    assert json.loads((out / "preflight.json").read_bytes())["outlook"] == "good"
    assert "--fresh" not in (out / "report.html").read_text()

    # The same command again repeats no attack; other settings are refused; --fresh starts over.
    def never(*_given: Any) -> None:
        raise AssertionError("attacked again")

    monkeypatch.setattr(attack_module, "reconstruct", never)
    assert "arrived at" in palimpsest.done(*words(files, out))
    record = json.loads((out / "attack.json").read_bytes())
    assert record["scores"] == {"images": None, "decoys": None, "compared": None}
    monkeypatch.undo()
    assert "seed is 0 there, 1 here" in palimpsest.refused(*words(files, out, "--seed", "1"))
    palimpsest.done(*words(files, out, "--seed", "1", "--fresh", "--attacks", "1"))


def with_norm() -> dict[str, torch.Tensor]:
    net = nn.Sequential(nn.Linear(432, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    return net.state_dict()


def test_what_cannot_work_ends_with_2_and_the_reason_unless_forced(
    palimpsest, tmp_path: Path, prefect_server
) -> None:
    torch.manual_seed(0)
    torch.save(with_norm(), tmp_path / "norm.pt")
    start = ["attack", "kkt", "--weights", str(tmp_path / "norm.pt"), "--device", "cpu"]
    start += ["--out", str(tmp_path / "out"), *QUICK, "--set", "attack.save_at=3"]
    code, shown, _err = palimpsest(*start)
    assert code == 2
    shown = " ".join(shown.split())
    assert "An attack cannot work here: normalisation layers" in shown
    assert "Attack not possible with this engine" in shown
    assert not (tmp_path / "out").exists()
    job = planned(WeightsJob(weights=tmp_path / "norm.pt", out=tmp_path / "out"), n_iterations=3)
    with pytest.raises(ValueError, match=r"normalisation layers.*--force"):
        attack_kkt(job, device="cpu")  # a deployment refuses, too, and leaves the reasons
    assert json.loads((tmp_path / "out" / "preflight.json").read_bytes())["outlook"] == "none"
    palimpsest.done(*start, "--force")
    assert (tmp_path / "out" / "report.html").is_file()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--weights", "absent.pt"], "absent.pt does not exist"),
        (["--arch", "mlp:432-64-1"], "--arch says mlp:432-64-1"),
        (["--arch", "resnet"], "mlp:3072-1000-1000-1"),
        (["--shape", "3x12"], "--shape 3x12 is not of the form CxHxW"),
        (["--condition", "multiclass"], "multiclass"),
        (["--preset", "haim2023"], "did you mean 'haim2022'"),
        (["--set", "attack.alhpa=3"], "attack.alpha"),
        (["--set", "attack.alpha=-3"], "alpha=-3"),
        (["--set", "victim.widths=3"], "only the attack has settings"),
        (["--iterations", "0"], "--iterations 0"),
        (["--data", "folder:absent"], "absent is not a folder"),
        (["--decoys", "folder:absent"], "give --data"),
        (["--mean", "0.1,0.2"], "2 numbers for 3 channels"),
    ],
)
def test_bad_usage_ends_with_2_and_says_the_fix(
    palimpsest, tmp_path: Path, files: VictimFiles, more: list[str], said: str
) -> None:
    assert said in " ".join(palimpsest.refused(*words(files, tmp_path / "out", *more)).split())
    assert not (tmp_path / "out").exists()


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.path, "executed"))


def test_a_pickle_bomb_does_not_go_off(palimpsest, tmp_path: Path) -> None:
    torch.save({"0.weight": torch.ones(4, 12), "x": Bomb(tmp_path / "crater")}, tmp_path / "b.pt")
    assert "pickled objects" in palimpsest.refused(
        "attack", "kkt", "--weights", str(tmp_path / "b.pt")
    )
    assert not (tmp_path / "crater").exists()


def test_plans_fit_the_network() -> None:
    plain = attack_plan(n_outputs=1)
    assert (plain.n_attacks, plain.attack.condition) == (6, "binary")
    assert plain.attack.search is not None
    several = attack_plan(n_outputs=10, n_images=50)
    assert (several.attack.condition, several.attack.n_candidates) == ("multiclass", 100)
    assert attack_plan(n_outputs=10, n_images=3).attack.n_candidates == 20
    assert attack_plan(n_outputs=1, condition="regression").attack.condition == "regression"
    for name, published in EXPERIMENTS.items():
        found = attack_plan(name, n_outputs=1 if "multiclass" not in name else 10)
        assert found.attack == replace(published.experiment().attack, ncc_stop_above=None)
        assert found.n_attacks == published.n_attacks
    assert attack_plan("buzaglo2023-multiclass", n_outputs=1).attack.condition == "binary"
    assert attack_plan("haim2022", n_outputs=10).attack.condition == "multiclass"
    changed = attack_plan(
        "haim2022", n_outputs=1, n_attacks=4,
        settings={"attack.search.alpha": "5,50", "n_attacks": "7", "attack.search.lr": "0.1,0.2"},
    )  # fmt: skip
    assert changed.attack.search is not None
    assert (changed.attack.search.alpha, changed.attack.search.lr) == ((5, 50), (0.1, 0.2))
    assert changed.n_attacks == 7
    assert attack_plan(n_outputs=1, settings={"experiment.attack.alpha": "3"}).attack.alpha == 3
    assert attack_plan(n_outputs=1, n_iterations=1).attack.save_at == (1,)


def test_preflight_loads_neither_prefect_nor_a_cluster() -> None:
    """They and what scipy has of statistics took half of the time of a preflight."""
    modules = "flows.families.weights.attack_plan, flows.attack_methods"
    for used in ("weights.preflight", "autoencoder.inputs", "inversion.inputs"):
        modules += f", tasks.families.{used}"
    modules += ", tasks.families.instahide.inputs"
    heavy = {"prefect", "distributed", "scipy.optimize", "scipy.stats", "matplotlib", "torchvision"}
    code = f"import sys, {modules}; print(*({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
