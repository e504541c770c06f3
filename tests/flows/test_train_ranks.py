"""Training without Prefect, as each process that torchrun starts does it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flows.recipe import Recipe, RestorerPlan
from flows.settings import to_json
from flows.train_ranks import main, train_on_ranks
from recon_core.balance import Curation
from recon_core.restore import BFDnCNN, Training
from storage.files import write_json
from tasks.training.train import load_restorer
from tasks.training.validation import Validation
from tests.storage import stores
from tests.tasks.training.test_train import read_log

PLAN = RestorerPlan(
    restorer=BFDnCNN(depth=2, n_channels=2),
    training=Training(n_steps=3, batch_size=4, warmup_images=0),
    validation=Validation(every=3, n_pairs=2),
)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    stores.store(tmp_path / "pairs", n_parts=3, size=32)
    recipe = Recipe(curation=Curation(n_subsets=2), restorers={"a": PLAN, "b": PLAN})
    write_json(tmp_path / "recipe.json", to_json(recipe))
    return tmp_path


def test_a_job_is_trained_from_its_own_recipe(job: Path) -> None:
    train_on_ranks(job, only="a", settings=["restorers.a.validation.every=2"], device="cpu")
    restorer, _net = load_restorer(job / "restorers" / "a", device="cpu")
    assert restorer == PLAN.restorer
    lines = read_log(job / "restorers" / "a")
    assert [line["step"] for line in lines if "validation_ssim" in line] == [2, 3]
    assert not (job / "restorers" / "b").exists()


@pytest.mark.parametrize(
    ("words", "environment", "code", "said"),
    [
        (["--store", "nowhere"], {}, 1, "error: nowhere has no recipe.json; start with"),
        (["--store", ".", "--only", "c"], {}, 2, "error: "),
        (
            ["--store", ".", "--only", "c"],
            {"WORLD_SIZE": "2", "RANK": "1"},
            2,
            "process 1: error: ",
        ),
    ],
)
def test_errors_are_one_line(
    job: Path,
    words: list[str],
    environment: dict[str, str],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(job)
    monkeypatch.setattr(sys, "argv", ["train_ranks", *words, "--device", "cpu"])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr().err
    assert ended.value.code == code, shown
    assert shown.startswith(said)
    assert shown.count("\n") == 1
