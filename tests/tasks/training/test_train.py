"""Training from a store: cards, resuming after a kill, not repeating what is done, errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recon_core.balance import Curation
from recon_core.restore import BFDnCNN, NonfiniteLossError, Restorer, Training
from storage.checkpoints import load_checkpoint
from storage.errors import StorageError
from storage.pairs.dataset import Dataset
from tasks import interruption
from tasks.training.loop import LOG
from tasks.training.train import load_restorer, train_restorer
from tests.storage import stores
from tests.tasks.restoring import restorers

SIZE = 8
RESTORER = BFDnCNN(depth=3, n_channels=4)
TRAINING = Training(
    n_steps=12, batch_size=8, lr=1e-3, warmup_images=16, ema_halflife_images=50, seed=3
)
CURATION = Curation(n_subsets=3, share=1, noise_fraction=0.2)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bit for bit holds for one number of threads, which other tests and processes may change."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return stores.store(tmp_path / "store", n_parts=3, size=SIZE)


def images() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (20, 3, SIZE, SIZE), dtype=np.uint8)


def train(dataset: Dataset, out: Path, **changes: object) -> dict[str, object]:
    settings = {
        "dataset": dataset,
        "curation": CURATION,
        "images_for_noise": images(),
        "out": out,
        "device": "cpu",
    }
    restorer = changes.pop("restorer", RESTORER)
    training = changes.pop("training", TRAINING)
    return train_restorer(restorer, training, **(settings | changes))


def weights(out: Path) -> dict[str, np.ndarray]:
    found = load_checkpoint(out, "model")
    assert found is not None
    return found[0]


def same(first: Path, second: Path) -> bool:
    a, b = weights(first), weights(second)
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_a_training_leaves_a_model_and_its_card(dataset: Dataset, tmp_path: Path) -> None:
    steps: list[tuple[int, int, float]] = []
    card = train(dataset, tmp_path / "out", on_step=lambda *step: steps.append(step))
    assert [done for done, _, _ in steps] == list(range(1, 13))
    assert all(n_steps == 12 for _, n_steps, _ in steps)
    assert card["restorer"] == {
        "kind": "bf_dncnn",
        "depth": 3,
        "n_channels": 4,
        "patch": 1,
        "loss_terms": "mse",
        "ssim_weight": 0.1,
        "strength": 1.0,
        "mirrored": False,
    }
    assert card["dataset"] == {
        "content_hash": dataset.content_hash,
        "n_pairs": dataset.n_pairs,
        "n_pairs_used": dataset.n_pairs,
    }
    assert card["loss_curve"] == [(step, pytest.approx(loss)) for step, _, loss in steps]
    assert card["n_parameters"] == 2 * 9 * 3 * 4 + 9 * 4 * 4 + 4
    stored = json.loads((tmp_path / "out" / "model.json").read_text())["meta"]
    assert stored == json.loads(json.dumps(card))
    assert not list((tmp_path / "out").glob("latest*"))
    restorer, net = load_restorer(tmp_path / "out", device="cpu")
    again, _ = load_restorer(tmp_path / "out" / "model.json", device="cpu")
    assert restorer == again == RESTORER
    assert not net.training
    saved = weights(tmp_path / "out")
    assert all(np.array_equal(value, saved[name]) for name, value in net.state_dict().items())
    steps.clear()  # a finished training is not repeated
    assert train(dataset, tmp_path / "out", on_step=lambda *step: steps.append(step)) == stored
    assert not steps


def test_other_settings_train_again(dataset: Dataset, tmp_path: Path) -> None:
    first = train(dataset, tmp_path / "out")
    changes = {
        "restorer": replace(RESTORER, n_channels=5),
        "training": replace(TRAINING, seed=4),
        "curation": replace(CURATION, seed=1),
        "images_for_noise": images()[:10],
    }
    fingerprints = {first["fingerprint"]}
    for name, value in changes.items():
        fingerprints.add(train(dataset, tmp_path / "out", **{name: value})["fingerprint"])
    assert len(fingerprints) == 5
    steps: list[int] = []  # nor is a checkpoint of others continued
    stopped(train, dataset, tmp_path / "begun", after=5)
    other = replace(TRAINING, seed=9)
    train(dataset, tmp_path / "begun", training=other, on_step=lambda done, *_: steps.append(done))
    assert steps[0] == 1
    stores.write(dataset.root, 3, size=SIZE)
    fingerprints.add(train(Dataset(dataset.root), tmp_path / "out")["fingerprint"])
    assert len(fingerprints) == 6


def read_log(out: Path) -> list[dict[str, Any]]:
    """The lines of the log in `out`, as they were written."""
    return [json.loads(line) for line in (out / LOG).read_bytes().splitlines()]


class Stopped(Exception):
    """What the tests stop a training with."""


def stopped(make: Callable[..., object], *given: object, after: int, **changes: object) -> None:
    """A training by `make` that stops after so many steps, with a checkpoint whenever it may."""

    def stop(done: int, _n_steps: int, _loss: float) -> None:
        if done > after:
            raise Stopped

    with pytest.raises(Stopped):
        make(*given, on_step=stop, **({"checkpoint_seconds": 0.0} | changes))


@pytest.mark.parametrize("stop_after", [1, 7])
def test_an_interrupted_training_continues_bit_for_bit(
    dataset: Dataset, tmp_path: Path, stop_after: int
) -> None:
    through = train(dataset, tmp_path / "through")
    stopped(train, dataset, tmp_path / "out", after=stop_after)
    steps: list[int] = []
    resumed = train(dataset, tmp_path / "out", on_step=lambda done, *_: steps.append(done))
    assert 1 < steps[0] <= stop_after + 1  # it did not start over
    assert steps[-1] == 12
    assert same(tmp_path / "through", tmp_path / "out")
    assert resumed["loss_curve"] == through["loss_curve"]
    assert resumed["n_images"] == through["n_images"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGTERM as a command takes it."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    yield
    signal.signal(signal.SIGTERM, before)


def test_every_interruption_keeps_the_step_and_says_where_it_goes_on(
    dataset: Dataset, tmp_path: Path, interruptible: None, caplog: pytest.LogCaptureFixture
) -> None:
    train(dataset, tmp_path / "through")
    first_steps = []
    for last in (3, 4, 9, 12):
        steps: list[int] = []

        def step(done: int, _n: int, _loss: float, steps: list[int] = steps, last: int = last):
            steps.append(done)
            if done == last < 12:
                signal.raise_signal(signal.SIGTERM)

        with suppress(KeyboardInterrupt):  # no checkpoint is due within 20 s
            train(dataset, tmp_path / "out", on_step=step)
        first_steps.append(steps[0])
        assert steps[-1] == last
    assert first_steps == [1, 4, 5, 10]
    assert same(tmp_path / "through", tmp_path / "out")
    said = [record.message for record in caplog.records if record.name == "palimpsest"]
    assert said == [f"out goes on after step {step} of 12" for step in (3, 4, 9)]


def test_a_second_interruption_does_not_wait(
    dataset: Dataset, tmp_path: Path, interruptible: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interruption, "SAME_REQUEST_S", 0.0)

    def twice(_done: int, _n_steps: int, _loss: float) -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the second one did nothing")

    with pytest.raises(KeyboardInterrupt):
        train(dataset, tmp_path / "out", on_step=twice)
    assert not (tmp_path / "out" / "latest.json").exists()


@pytest.mark.parametrize(
    ("at", "n_signals", "kept"),
    [(3, 2, "latest"), (12, 1, "model")],
    ids=["to the process and to its group", "in the last step"],
)
def test_an_interruption_comes_when_what_is_done_is_kept(
    dataset: Dataset, tmp_path: Path, interruptible: None, at: int, n_signals: int, kept: str
) -> None:
    def interrupt(done: int, _n_steps: int, _loss: float) -> None:
        for _ in range(n_signals if done == at else 0):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        train(dataset, tmp_path / "out", on_step=interrupt)
    assert load_checkpoint(tmp_path / "out", kept) is not None


KILLED = """
import os, signal, sys
from pathlib import Path
from storage.pairs.dataset import Dataset
from tests.tasks.training import test_train as t

t.torch.set_num_threads(1)

def kill(done, n_steps, loss):
    if done == 6:
        os.kill(os.getpid(), signal.SIGKILL)

t.train(Dataset(Path(sys.argv[1])), Path(sys.argv[2]), on_step=kill, checkpoint_seconds=0.0)
"""


def test_a_killed_training_continues_bit_for_bit(dataset: Dataset, tmp_path: Path) -> None:
    train(dataset, tmp_path / "through")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(dataset.root), str(tmp_path / "out")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    steps: list[int] = []
    train(dataset, tmp_path / "out", on_step=lambda done, *_: steps.append(done))
    assert steps[0] > 1
    assert same(tmp_path / "through", tmp_path / "out")


def test_a_diverging_training_names_the_step(dataset: Dataset, tmp_path: Path) -> None:
    too_fast = replace(TRAINING, lr=1e30, warmup_images=0, n_steps=50)
    with pytest.raises(NonfiniteLossError, match=r"in step \d+ with learning rate 1e\+30"):
        train(dataset, tmp_path / "out", training=too_fast)


def test_a_curation_that_draws_nothing_is_refused(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_of_them(columns: dict[str, np.ndarray], *_: object, **__: object) -> np.ndarray:
        return np.zeros(len(columns["image_id"]), np.int64)

    monkeypatch.setattr("tasks.dataset.pair_stream.curated_repeats", none_of_them)
    with pytest.raises(StorageError, match="n_subsets=3 and share=1 drew none"):
        train(dataset, tmp_path / "out")
    with pytest.raises(StorageError, match="confident one from iteration 5000 on; lower"):
        train(dataset, tmp_path / "out", curation=replace(CURATION, min_iteration=5000))


def test_a_model_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    out = restorers.trained(tmp_path / "model", RESTORER)
    path = out / "model.json"
    body = json.loads(path.read_text())
    body["meta"]["version"] = 2
    path.write_text(json.dumps(body))
    with pytest.raises(StorageError, match="version 2, this program reads"):
        load_restorer(out, device="cpu")
    with pytest.raises(StorageError, match="no finished restorer"):
        load_restorer(tmp_path, device="cpu")


def edited(out: Path, **changes: object) -> None:
    """Changes settings of the restorer in `model.json`; None removes one."""
    path = out / "model.json"
    body = json.loads(path.read_text())
    settings = body["meta"]["restorer"] | changes
    body["meta"]["restorer"] = {k: v for k, v in settings.items() if v is not None}
    path.write_text(json.dumps(body))


@pytest.mark.parametrize(
    ("restorer", "changes", "said"),
    [
        (RESTORER, {"kind": "gan"}, "'gan'.*'edm', 'bf_dncnn', 'unet'"),
        (RESTORER, {"kind": None}, "discriminator 'kind'"),
        (RESTORER, {"width": 7}, "width: Unexpected"),
        (RESTORER, {"depth": None}, "loading state_dict"),
        (RESTORER, {"depth": 1}, "depth=1 is outside"),
        (RESTORER, {"n_channels": 10**30}, ""),
        (RESTORER, {"n_channels": 10**12}, ""),
        (RESTORER, {"depth": "deep"}, "depth: Input should be a valid integer"),
        (RESTORER, {"depth": 5}, "loading state_dict"),
        (RESTORER, {"n_channels": 5}, "size mismatch"),
        (restorers.TINY_EDM, {"resolution": 9}, "resolution=9"),
    ],
)
def test_a_model_that_is_not_as_it_was_written_is_named(
    tmp_path: Path, restorer: Restorer, changes: dict[str, object], said: str
) -> None:
    out = restorers.trained(tmp_path / "model", restorer)
    edited(out, **changes)
    with pytest.raises(StorageError, match=rf"{out}/model\.json.*{said}.*train again") as raised:
        load_restorer(out, device="cpu")
    assert "\n" not in str(raised.value)


def test_only_the_model_itself_is_loaded(tmp_path: Path) -> None:
    out = restorers.trained(tmp_path / "model", RESTORER)
    (out / "best.json").write_text("{}")
    for other in (out / "best.json", *out.glob("*.safetensors")):
        with pytest.raises(StorageError, match=f"{other.name} is not the model.json of a finished"):
            load_restorer(other, device="cpu")
    named_like_a_file = out.rename(tmp_path / "model.json")
    assert load_restorer(named_like_a_file, device="cpu")[0] == RESTORER
