"""Several processes learn what one learns from the same batches."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recon_core.restore import Fit
from recon_core.restore.examples import Examples
from recon_core.restore.fit import Ranks
from storage.checkpoints import load_checkpoint, save_checkpoint
from storage.errors import StorageError
from storage.pairs.dataset import Dataset
from tasks.dataset.pair_stream import PairExamples
from tasks.training.loop import Accelerated
from tasks.training.validation import held_out_parts
from tests.storage import stores
from tests.tasks.training import train_on_ranks as ranks
from tests.tasks.training.test_train import read_log

needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="needs the package accelerate"
)


def in_one_process(dataset: Dataset) -> tuple[Fit, list[float], int]:
    """Trained on the batches of both ranks, one after the other; losses; number of examples."""
    seen = dataset.without(held_out_parts(dataset, 1))
    readers = [
        PairExamples(
            seen,
            batch_size=ranks.TRAINING.batch_size // 2,
            seed=ranks.TRAINING.seed,
            curation=ranks.CURATION,
            images_for_noise=ranks.images(),
            rank=rank,
            world_size=2,
            endless=True,
            prefetch=False,
        )
        for rank in range(2)
    ]
    feeds = [iter(reader) for reader in readers]
    fit = Fit(ranks.RESTORER, ranks.TRAINING, device="cpu")
    losses = []
    while not fit.done:
        both = [next(feed) for feed in feeds]
        batch = {name: torch.cat([one[name] for one in both]) for name in both[0]}
        losses.append(fit.update(Examples(**batch)))
    return fit, losses, sum(reader.n_given for reader in readers)


@pytest.mark.slow
@needs_accelerate
def test_two_processes_train_the_weights_of_one(tmp_path: Path) -> None:
    dataset = stores.store(tmp_path / "store", n_parts=5, size=ranks.SIDE, n_pairs=400)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(ranks.__file__, str(tmp_path / "store"), str(tmp_path / "out")),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    fit, losses, n_images = in_one_process(dataset)
    lines = read_log(tmp_path / "out")
    assert [line["loss"] for line in lines if "loss" in line] == pytest.approx(losses, rel=1e-4)
    assert [line["step"] for line in lines if "loss" not in line] == [5, 10]
    found = load_checkpoint(tmp_path / "out", "model")
    assert found is not None
    start = Fit(ranks.RESTORER, ranks.TRAINING, device="cpu").ema.state_dict()
    moved = off = 0.0
    for name, value in fit.ema.state_dict().items():
        moved += float((value - start[name]).square().sum())
        off += float((torch.from_numpy(found[0][name]) - value).square().sum())
    assert off**0.5 < 0.02 * moved**0.5
    assert n_images < 80  # an epoch's last batches are smaller, and not the same on both ranks
    assert found[1]["n_images"] == n_images


def test_a_checkpoint_is_removed_only_after_every_process_has_looked(tmp_path: Path) -> None:
    stores.store(tmp_path / "store", n_parts=2, size=ranks.SIDE)
    latest = tmp_path / "out" / "latest.json"
    there: list[bool] = []

    class Watching(Ranks):
        def gather(self, value: Any) -> list[Any]:
            there.append(latest.exists())
            return super().gather(value)

    save_checkpoint(latest.parent, "latest", {"x": np.zeros(1)}, {"fingerprint": "another"})
    with pytest.raises(ranks.Interrupted):
        ranks.train(tmp_path / "store", latest.parent, Watching(), interrupt=True)
    assert there[0]


def test_processes_that_see_different_pairs_are_refused(tmp_path: Path) -> None:
    class Other(Ranks):
        def gather(self, value: Any) -> list[Any]:
            return [value, "another fingerprint"]

    stores.store(tmp_path / "store", n_parts=2, size=ranks.SIDE)
    with pytest.raises(StorageError, match=r"processes found different pairs in .*/store; start"):
        ranks.train(tmp_path / "store", tmp_path / "out", Other(), interrupt=False)


def test_a_batch_that_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    group = Ranks()
    group.size = 3
    stores.store(tmp_path / "store", n_parts=2, size=ranks.SIDE)
    with pytest.raises(ValueError, match="batch_size=8 cannot be shared evenly by 3 processes"):
        ranks.train(tmp_path / "store", tmp_path / "out", group, interrupt=False)


def test_a_missing_accelerate_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ValueError, match=r"several processes need accelerate.*\[multigpu\]"):
        Accelerated(cpu=True)
