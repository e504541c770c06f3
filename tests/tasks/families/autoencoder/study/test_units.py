"""Units of a study of recovery: what they give, that they go on when killed, that none is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import Client, LocalCluster
from safetensors import safe_open

from recon_core.attacks.plug_and_play import Degraded, UnknownMask
from recon_core.degradation import degrade
from recon_core.types import Progress, seeded_generator
from recon_core.victims.autoencoder import (
    single,
)
from storage.checkpoints import load_checkpoint
from storage.object_store import open_place
from storage.weights import METADATA
from tasks.families.autoencoder.study.settings import RecoveryStudy
from tasks.families.autoencoder.study.units import VictimFolder, function_of
from tasks.progress import Left
from tasks.study.executor import Unit, run_units
from tasks.study.products import read_weights
from tests.tasks.families.autoencoder.recoveries import planned, run_here, small_study, small_victim


def weights_of(root: Path) -> dict[str, dict[str, np.ndarray]]:
    return {path.name: read_weights(path) for path in sorted(root.glob("victims/*.safetensors"))}


def test_a_victim_is_kept_at_its_losses_with_its_architecture(tmp_path: Path) -> None:
    study = small_study(victims=(small_victim(),))
    plan = planned(study, tmp_path)
    job = plan.training(study.victims[0])
    fractions: list[float] = []
    given = job.run(fractions.append)
    assert fractions[-1] == 1.0
    assert [level["level"] for level in given["levels"]] == [0.1, 0.03]
    x = torch.from_numpy(job.images).float() / 255
    for level in given["levels"]:
        path = VictimFolder(tmp_path).weights("fc-a", level["level"])
        model = study.victims[0].network.on((3, 8, 8))
        tensors = {name: torch.from_numpy(a) for name, a in read_weights(path).items()}
        loss = float((model.forward(single(model, tensors), x[None])[0] - x).square().mean())
        assert loss == pytest.approx(level["loss"], rel=1e-4)
        assert loss <= level["level"]
        with safe_open(path, "np") as file:
            about = json.loads(file.metadata()[METADATA])
        assert about["network"] == {
            **{"kind": "fc", "depth": 3, "width": 32},
            **{"activation": "leaky_relu", "leak": 0.01, "init": "torch"},
        }
        assert (about["shape"], about["loss"]) == ([3, 8, 8], level["loss"])
    assert given["test_loss"] > given["last"]["loss"]
    assert len(given["contraction"]["train"]) == 4
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert job.run() == given
    assert written == {path: path.stat().st_mtime_ns for path in written}
    VictimFolder(tmp_path).weights("fc-a", 0.1).write_bytes(b"damaged")
    again = job.run()
    assert again["levels"] == given["levels"]


def test_a_killed_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    slow = replace(small_victim().training, epochs=300, levels=(0.1, 1e-12), check_every=1)
    study = small_study(victims=(small_victim(training=slow),))
    straight = planned(study, tmp_path / "a").training(study.victims[0]).run()

    class Killed(Exception):
        pass

    def kill(fraction: float) -> None:
        if fraction > 0.5:
            raise Killed

    job = planned(study, tmp_path / "b", state_seconds=0.0).training(study.victims[0])
    with pytest.raises(Killed):
        job.run(kill)
    state = load_checkpoint(tmp_path / "b/victims/fc-a", "state")
    assert state is not None
    assert 140 < int(state[0]["epoch"]) < 160
    first: list[float] = []
    resumed = job.run(first.append)
    assert first[0] >= 0.5
    for name in ("levels", "last", "test_loss", "contraction"):
        assert resumed[name] == straight[name]
    assert weights_of(tmp_path / "a").keys() == weights_of(tmp_path / "b").keys()
    assert not list((tmp_path / "b/victims/fc-a").glob("state*"))


def test_a_batch_gives_what_one_sample_gives(tmp_path: Path) -> None:
    study = small_study(victims=(small_victim(),), noise=None)
    plan = planned(study, tmp_path)
    victim = study.victims[0]
    given = plan.training(victim).run()
    job = plan.recoveries(victim, given)[0.03]
    job.run()
    arrays, meta = VictimFolder(tmp_path).product(job.key) or ({}, {})
    assert set(meta["seconds"]) == {
        f"{split} 0/{method}"
        for split in ("train", "test")
        for method in ("iteration", "unknown", "known", "noise_aware")
    }
    group, row = job.groups[0], 2
    names = list(group.masks)
    tensors = read_weights(VictimFolder(tmp_path).weights("fc-a", 0.03))
    f = function_of(victim, tensors, (3, 8, 8), "cpu")
    original = torch.from_numpy(group.images[row : row + 1]).float() / 255
    method = UnknownMask(n_admm=3, n_alternations=2, gamma=0.5, start="random")
    assert study.methods.unknown is not None
    for number, name in enumerate(names):
        mask = torch.from_numpy(group.masks[name])
        y = degrade(original, mask)
        image_id = int(group.ids[row])
        generator = seeded_generator(study.root_seed, image_id, f"start train {name}")
        alone = method.recover(f, Degraded(y=y, generators=(generator,)))
        mse = float((alone.x - original).double().square().mean())
        assert arrays["train 0/unknown/mse"][number][row] == pytest.approx(mse, rel=1e-4)
        right = float((alone.mask == mask).double().mean())
        assert arrays["train 0/unknown/mask_right"][number][row] == pytest.approx(right)
        shown = (alone.x[0] * 255).round().numpy()
        assert np.abs(arrays["train 0/unknown/picture"][number][row] - shown).max() <= 1
        known = arrays["train 0/known/picture"][number][row]
        there = group.masks[name]
        assert (known[:, there] == group.images[row][:, there]).all()


def test_what_is_there_is_not_made_again_and_what_is_missing_is(tmp_path: Path) -> None:
    study = small_study()
    run_here(planned(study, tmp_path))
    cells = sorted((tmp_path / "cells").glob("*.json"))
    assert len(cells) == 4
    cells[0].unlink()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    run_here(planned(study, tmp_path))
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    changed = {path for path, when in after.items() if before.get(path) != when}
    assert {path for path in changed if path.suffix == ".json"} == {cells[0]}
    assert all(path.parent.name == "cells" for path in changed)


@dataclass(frozen=True)
class Job:
    """Writes its name to a file, or fails, or kills its process once."""

    folder: str
    name: str
    trouble: str = ""
    device: str = "cpu"


def work(job: Job, progress: Progress) -> dict[str, Any]:
    path = Path(job.folder, job.name)
    path.write_text((path.read_text() if path.is_file() else "") + "x")
    if job.trouble == "fails":
        raise ValueError(f"{job.name} cannot be done")
    if job.trouble == "dies" and len(path.read_text()) < 2:
        os._exit(9)
    progress(1.0)
    return {"name": job.name}


def unit(folder: Path, name: str, trouble: str = "", needs: tuple[str, ...] = ()) -> Unit:
    return Unit(name, work, Job(str(folder), name, trouble), frozenset(needs))


@pytest.mark.slow
def test_a_unit_that_fails_loses_no_other(tmp_path: Path) -> None:
    before = [unit(tmp_path, "made before"), unit(tmp_path, "failed before", "fails")]
    units = [
        *(unit(tmp_path, "bad", "fails"), unit(tmp_path, "mortal", "dies")),
        *(unit(tmp_path, "after bad", needs=("bad",)), unit(tmp_path, "good")),
        unit(tmp_path, "after good", needs=("good",)),
        unit(tmp_path, "after what was made before", needs=("good", "made before")),
        unit(tmp_path, "after what failed before", needs=("failed before",)),
        unit(tmp_path, "after nothing", needs=("unknown",)),
        unit(tmp_path, "after that", needs=("after nothing",)),
    ]

    def then(done: Unit, _given: dict[str, Any]) -> list[Unit]:
        return [unit(tmp_path, "more")] if done.name == "good" else []

    seen: list[tuple[float, float, Left]] = []

    def told(done: float, total: float, _note: str = "", *, left: Left, **_more: object) -> None:
        seen.append((done, total, left))

    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, host="127.0.0.1", dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        found = run_units(
            [before, units],
            client,
            place=open_place(str(tmp_path)),
            device="cpu",
            threads=1,
            then=then,
            on_progress=told,
        )
    made = {"made before", "good", "after good", "more", "mortal", "after what was made before"}
    assert set(found.done) == made
    assert found.failed == {
        "failed before": "ValueError: failed before cannot be done",
        "bad": "ValueError: bad cannot be done",
        "after bad": "needs bad, which failed",
        "after what failed before": "needs failed before, which failed",
        "after nothing": "needs unknown, which no unit makes before it",
        "after that": "needs after nothing, which no unit makes before it",
    }
    assert (tmp_path / "mortal").read_text() == "xx"
    assert seen[0] == (0, 2, Left(0.0, is_all=False))
    assert seen[-1] == (6, 12, Left(0.0))


def long_study() -> RecoveryStudy:
    """One of its victims trains for 1,500 epochs."""
    training = replace(small_victim().training, epochs=1500, levels=(0.1, 1e-12))
    slow = small_victim("fc-b", n_images=6, training=training)
    return small_study(victims=(small_victim(), slow))


@pytest.mark.slow
def test_a_study_that_is_killed_goes_on_to_the_same_products(tmp_path: Path) -> None:
    """A process of its own is killed while it trains, without a chance to tidy up."""
    script = (
        "import sys; from pathlib import Path\n"
        "from tests.tasks.families.autoencoder.recoveries import planned, run_here\n"
        "from tests.tasks.families.autoencoder.study.test_units import long_study\n"
        "run_here(planned(long_study(), Path(sys.argv[1]), state_seconds=0.0))\n"
    )
    root, state = tmp_path / "killed", tmp_path / "killed/victims/fc-b/state.json"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[5])}
    with subprocess.Popen([sys.executable, "-c", script, str(root)], env=environment) as process:
        deadline = time.monotonic() + 120
        while not state.is_file():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert not (root / "victims/fc-b/trained.json").exists()
    resumed = run_here(planned(long_study(), root))
    straight = run_here(planned(long_study(), tmp_path / "straight"))
    assert resumed.done.keys() == straight.done.keys()
    for name, given in straight.done.items():
        told = {key: value for key, value in given.items() if key != "seconds"}
        assert told == {key: resumed.done[name][key] for key in told}
    found, expected = (
        {path.name: path.read_bytes() for path in sorted((folder / "cells").glob("*.safetensors"))}
        for folder in (root, tmp_path / "straight")
    )
    assert found == expected
