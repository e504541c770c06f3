"""Held-out pairs: which they are, that no training sees them, what is kept of the scores; and what
a training writes to be watched."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from recon_core.balance import Curation
from recon_core.metrics import ssim_pairs
from recon_core.restore import EDM, Fit, NonfiniteLossError
from storage.checkpoints import load_checkpoint
from storage.errors import StorageError
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.parts import write_part
from tasks.dataset.pair_stream import PairExamples
from tasks.training import loop as train_loop
from tasks.training import train as training
from tasks.training.loop import TrainingLog, grid
from tasks.training.train import load_restorer
from tasks.training.validation import (
    HeldOut,
    Validation,
    _rank,
    fitted_strength,
    held_out_parts,
    read_held_out,
    score,
)
from tests.storage import stores
from tests.tasks.training.test_train import (
    CURATION,
    RESTORER,
    TRAINING,
    one_thread,
    read_log,
    same,
    stopped,
    train,
    weights,
)

__all__ = ["one_thread"]

SIDE = 16  # the window of SSIM needs 11
EVERY_4 = Validation(every=4, n_pairs=6)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return stores.store(tmp_path / "store", n_parts=4, size=SIDE)


def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (20, 3, SIDE, SIDE), dtype=np.uint8)


def validated(dataset: Dataset, out: Path, **changes: object) -> dict[str, object]:
    return train(dataset, out, images_for_noise=images(), **({"validation": EVERY_4} | changes))


def test_held_out_parts_stay_held_out_in_a_growing_store(tmp_path: Path) -> None:
    found = [
        held_out_parts(stores.store(tmp_path, n_parts=n, n_pairs=1), 1)[0] for n in range(2, 9)
    ]
    # A new part takes over now and then; between, the choice stays.
    assert all(now in (before, n) for n, (before, now) in enumerate(pairwise(found), 2))
    assert held_out_parts(stores.store(tmp_path, n_parts=9, n_pairs=1), 3)[0] in range(9)


def test_the_training_never_reads_the_held_out_parts(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = validated(dataset, tmp_path / "with")
    held_out = card["validation"]["held_out_parts"]
    assert held_out == list(held_out_parts(dataset, 1))
    # Without those parts in the store at all, the weights are the same.
    without = dataset.without(held_out)
    assert len(without.receipts) == 3
    train(without, tmp_path / "without", images_for_noise=images())
    assert same(tmp_path / "with", tmp_path / "without")
    train(dataset, tmp_path / "all", images_for_noise=images())
    assert not same(tmp_path / "with", tmp_path / "all")


def test_scored_pairs_are_confident_late_and_unaugmented(tmp_path: Path) -> None:
    root = tmp_path / "store"
    create_or_open(root, stores.MANIFEST)
    held_out = min((0, 1), key=_rank)
    stores.write(root, 1 - held_out, size=SIDE)
    columns = stores.columns(seed=1, size=SIDE, n_pairs=30)
    plain = np.arange(10) % 2 == 0
    columns["targets/augment"][plain] = 0
    write_part(root, held_out, columns, provenance=stores.provenance())
    dataset = Dataset(root)
    curation = Curation(min_iteration=500)
    wanted = (
        columns["pairs/confident"]
        & (columns["pairs/iteration"] >= 500)
        & plain[columns["pairs/target_row"]]
    )
    both = Validation(every=1, n_pairs=1000, n_parts=1)
    chosen = read_held_out(dataset, both, curation)
    assert chosen.parts == (held_out,)
    assert chosen.unaugmented
    assert len(chosen.targets) == wanted.sum()
    targets = columns["targets/image"][columns["pairs/target_row"][wanted]] / 255
    ours = sorted(chosen.targets.flatten(1).sum(1).tolist())
    assert ours == pytest.approx(sorted(targets.sum(axis=(1, 2, 3)).tolist()), rel=1e-5)
    again = read_held_out(dataset, replace(both, n_pairs=3), curation)
    assert len(again.targets) == 3
    assert torch.equal(again.targets, chosen.targets[:3])


def test_the_card_has_the_curve(dataset: Dataset, tmp_path: Path) -> None:
    card = validated(dataset, tmp_path / "out", validation=replace(EVERY_4, every=5))
    facts = card["validation"]
    assert [step for step, _ in facts["ssim_curve"]] == [5, 10, 12]
    held_out = read_held_out(dataset, EVERY_4, CURATION)
    assert facts["n_pairs"] == len(held_out.inputs) == 6
    ssim = float(ssim_pairs(held_out.inputs, held_out.targets).mean())
    assert facts["ssim_inputs"] == pytest.approx(ssim)
    fit = Fit(RESTORER, TRAINING, device="cpu")
    fit.ema.load_state_dict(
        {name: torch.from_numpy(value) for name, value in weights(tmp_path / "out").items()}
    )
    last = RESTORER.restore(fit.ema, held_out.inputs, n_samples=1, seeds=torch.arange(6))[0]
    assert facts["ssim_curve"][-1][1] == float(ssim_pairs(last, held_out.targets).mean())
    assert card["step"] == 12
    stored = json.loads((tmp_path / "out" / "model.json").read_text())["meta"]
    assert stored == json.loads(json.dumps(card))
    page = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    assert "of 6 partly augmented pairs of part" in page
    assert f"| 10 | {facts['ssim_curve'][1][1]:.4f} |" in page


@pytest.mark.parametrize("keep", ["last", "best"])
def test_the_best_or_the_last_weights_are_kept(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str
) -> None:
    scores = {4: 0.1, 8: 0.3, 12: 0.2}
    ends: dict[int, np.ndarray] = {}

    def scored(
        _restorer: object, net: torch.nn.Module, *_: object, **__: object
    ) -> tuple[float, torch.Tensor]:
        ends[4 * len(ends) + 4] = net.state_dict()["last.weight"].numpy().copy()
        return scores[4 * len(ends)], torch.zeros(6, 3, SIDE, SIDE)

    monkeypatch.setattr(train_loop, "score", scored)
    card = validated(dataset, tmp_path / "out", validation=replace(EVERY_4, keep=keep))
    kept = {"last": 12, "best": 8}[keep]
    assert card["step"] == kept
    assert card["validation"]["best"] == {"step": 8, "ssim": 0.3}
    assert np.array_equal(weights(tmp_path / "out")["last.weight"], ends[kept])
    best = load_checkpoint(tmp_path / "out", "best")
    assert best is not None
    assert np.array_equal(best[0]["last.weight"], ends[8])


@pytest.mark.parametrize("stop_after", [3, 5, 9])
def test_an_interrupted_training_ends_with_the_same_best(
    dataset: Dataset, tmp_path: Path, stop_after: int
) -> None:
    best = replace(EVERY_4, keep="best")
    through = validated(dataset, tmp_path / "through", validation=best)
    stopped(validated, dataset, tmp_path / "out", after=stop_after, validation=best)
    steps: list[int] = []
    resumed = validated(
        dataset, tmp_path / "out", validation=best, on_step=lambda done, *_: steps.append(done)
    )
    assert 1 < steps[0] <= stop_after + 1
    assert resumed["validation"] == through["validation"]
    assert resumed["step"] == through["step"]
    assert same(tmp_path / "through", tmp_path / "out")


def test_a_training_never_goes_back_before_its_best(dataset: Dataset, tmp_path: Path) -> None:
    for keep, step in (("best", 4), ("last", None)):
        settings = {"validation": replace(EVERY_4, keep=keep), "checkpoint_seconds": 1e9}
        stopped(validated, dataset, tmp_path / keep, after=6, **settings)
        latest = load_checkpoint(tmp_path / keep, "latest")
        assert (latest[1]["step"] if latest else None) == step


def with_images(ids: list[int], gain: list[float]) -> tuple[torch.Tensor, HeldOut]:
    """Answers that go twice as far as they should, the targets' way or against it, times `gain`."""
    noise = torch.Generator().manual_seed(0)
    targets = torch.rand(len(ids), 3, SIDE, SIDE, generator=noise)
    inputs = (targets + 0.2 * torch.randn(targets.shape, generator=noise)).clamp(0, 1)
    restored = inputs + 2 * torch.tensor(gain)[:, None, None, None] * (targets - inputs)
    ssim = float(ssim_pairs(inputs, targets).mean())
    return restored, HeldOut((0,), True, np.array(ids), inputs, targets, ssim)


@pytest.mark.parametrize(
    ("ids", "gain", "wanted"),
    [
        ([0, 1, 2, 3, 4, 5], [1.0] * 6, 0.5),  # all the way is twice too far
        ([0, 1, 2, 3, 4, 5], [-1.0] * 6, 0.0),  # away from the target
        ([0, 1, 2, 3, 4, 5], [1.0, 1.0, -1.0, 0.1, -1.0, 0.1], 0.0),  # by chance
        ([7, 7, 7, 7, 7, 7], [1.0] * 6, 0.0),  # one image tells nothing of others
    ],
)
def test_the_strength_is_what_helps_beyond_chance(
    ids: list[int], gain: list[float], wanted: float
) -> None:
    restored, held_out = with_images(ids, gain)
    strength, curve = fitted_strength(restored, held_out)
    assert strength == wanted
    assert [s for s, _ in curve] == [k / 10 for k in range(11)]
    assert curve[0][1] == pytest.approx(held_out.ssim_inputs)
    assert curve[-1][1] == pytest.approx(float(ssim_pairs(restored, held_out.targets).mean()))


def test_a_fitted_restorer_has_not_seen_the_images_and_keeps_its_strength(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted = replace(EVERY_4, strength="fitted")
    held_out = read_held_out(dataset, fitted, CURATION)
    ids = np.unique(held_out.image_ids)
    assert len(ids) == 2  # a fifth of the store's twelve
    assert len(held_out.targets) == len(held_out.image_ids)
    feeds: list[dict[str, Any]] = []

    class Feed(PairExamples):
        def __init__(self, *given: Any, **settings: Any) -> None:
            feeds.append(settings)
            super().__init__(*given, **settings)

    monkeypatch.setattr(training, "PairExamples", Feed)
    monkeypatch.setattr(train_loop, "fitted_strength", lambda *_: (0.3, [(0.3, 0.5)]))
    scored: list[int] = []

    def score(*given: Any, **settings: Any) -> tuple[float, torch.Tensor]:
        scored.append(1)
        return train_loop_score(*given, **settings)

    train_loop_score = train_loop.score
    monkeypatch.setattr(train_loop, "score", score)
    out = tmp_path / "out"
    card = validated(dataset, out, validation=fitted)
    assert len(scored) == 3  # what the last validation restored serves the strength, too
    assert feeds[0]["left_out"].tolist() == ids.tolist()
    others = np.delete(images(), ids, axis=0)
    assert np.array_equal(feeds[0]["images_for_noise"], others)
    assert card["restorer"]["strength"] == 0.3
    assert "| 0.3 | 0.5000 |" in (out / "MODEL_CARD.md").read_text()
    restorer, net = load_restorer(out, device="cpu")
    pictures = torch.rand(2, 3, SIDE, SIDE)
    part, whole = (
        one.restore(net, pictures, n_samples=1, seeds=torch.arange(2))[0]
        for one in (restorer, RESTORER)
    )
    assert torch.allclose(part, pictures + 0.3 * (whole - pictures))
    # Finished is finished: the fitted strength is no other setting.
    assert validated(dataset, out, validation=fitted) == json.loads(json.dumps(card))
    assert validated(dataset, tmp_path / "full")["fingerprint"] != card["fingerprint"]


def test_the_best_of_other_settings_is_forgotten(dataset: Dataset, tmp_path: Path) -> None:
    validated(dataset, tmp_path / "out")
    assert (tmp_path / "out" / "best.json").exists()
    train(dataset, tmp_path / "out", images_for_noise=images())
    assert not list((tmp_path / "out").glob("best*"))


def test_what_the_weights_do_not_depend_on_trains_nothing_anew(
    dataset: Dataset, tmp_path: Path
) -> None:
    first = validated(dataset, tmp_path / "out")
    more = replace(EVERY_4, every=2, n_pairs=4)
    assert (
        validated(dataset, tmp_path / "out", validation=more)["fingerprint"]
        == (first["fingerprint"])
    )
    others = [replace(EVERY_4, n_parts=2), replace(EVERY_4, keep="best"), Validation()]
    found = {str(validated(dataset, tmp_path / "out", validation=v)["fingerprint"]) for v in others}
    assert len(found | {first["fingerprint"]}) == 4


def test_fewer_sampler_steps_for_validation_only(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[Any] = []
    monkeypatch.setattr(train_loop, "score", lambda restorer, *_, **__: scored.append(restorer))
    edm = EDM(size="tiny")
    trainer: Any = SimpleNamespace(held_out=True, device="cpu")
    for n_steps, restorer in ((4, edm), (None, edm), (4, RESTORER)):
        trainer.validation = replace(EVERY_4, n_sampler_steps=n_steps)
        train_loop.Trainer._scored(trainer, torch.nn.Identity(), restorer)
    assert scored == [replace(edm, n_steps=4), edm, RESTORER]


def test_restorations_that_are_not_numbers_have_a_score(dataset: Dataset) -> None:
    held_out = read_held_out(dataset, EVERY_4, CURATION)
    net = RESTORER.build(seed=0)
    with torch.no_grad():
        net.first.weight.fill_(torch.nan)
    found = score(RESTORER, net, held_out, device="cpu")
    black = ssim_pairs(torch.zeros_like(held_out.targets), held_out.targets)
    assert found[0] == pytest.approx(float(black.mean()))


def test_a_diverged_training_keeps_what_was_before(dataset: Dataset, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def poison(done: int, _n_steps: int, _loss: float) -> None:
        if done == 8:  # as if an overflow in the step's gradient had gone into the weights
            with torch.no_grad():
                next(trainers[-1].fit.net.parameters()).fill_(torch.inf)

    trainers: list[train_loop.Trainer] = []
    resume = train_loop.Trainer._resume

    def remembered(self: train_loop.Trainer) -> None:
        trainers.append(self)
        resume(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_loop.Trainer, "_resume", remembered)
        with pytest.raises(
            NonfiniteLossError,
            match=r"not finite in step 7 .*latest\.json is kept as it was .* after step [1-7];",
        ):
            validated(dataset, out, on_step=poison, checkpoint_seconds=0.0)
    found = load_checkpoint(out, "latest")
    assert found is not None
    assert all(np.isfinite(values).all() for values in found[0].values())
    assert found[1]["step"] < 8


def test_a_training_that_diverges_at_once_says_that_nothing_is_kept(
    dataset: Dataset, tmp_path: Path
) -> None:
    too_fast = replace(TRAINING, lr=1e30, warmup_images=0)
    with pytest.raises(NonfiniteLossError, match="no checkpoint had been written to"):
        validated(dataset, tmp_path / "out", training=too_fast, checkpoint_seconds=1e9)


def test_what_cannot_be_validated_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"1 parts with pairs and validation\.n_parts=1 are"):
        validated(stores.store(tmp_path / "one", n_parts=1, size=SIDE), tmp_path / "out")
    with pytest.raises(StorageError, match="have no confident pair from iteration 5000 on"):
        read_held_out(dataset, EVERY_4, Curation(min_iteration=5000))
    for name, value in (("keep", "best"), ("strength", "fitted")):
        with pytest.raises(ValueError, match=f"{name}='{value}' needs validations"):
            Validation(**{name: value})


def clockless(out: Path) -> list[dict[str, float]]:
    times = ("images_per_s", "wait_share")
    return [{k: v for k, v in line.items() if k not in times} for line in read_log(out)]


def test_the_log_has_every_step_and_validation(dataset: Dataset, tmp_path: Path) -> None:
    losses: list[float] = []
    card = validated(dataset, tmp_path, on_step=lambda _done, _n, loss: losses.append(loss))
    lines = read_log(tmp_path)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [line["loss"] for line in steps] == losses
    assert [line["lr"] for line in steps] == [TRAINING.learning_rate(step) for step in range(12)]
    assert all(line["images_per_s"] > 0 and 0 <= line["wait_share"] <= 1 for line in steps)
    scored = [(line["step"], line["validation_ssim"]) for line in lines if "loss" not in line]
    assert scored == card["validation"]["ssim_curve"]
    with Image.open(tmp_path / "validation.png") as picture:
        assert picture.size == (6 * (2 * SIDE + 4), 3 * (2 * SIDE + 4))


def test_a_resumed_log_is_the_log_of_one_training(dataset: Dataset, tmp_path: Path) -> None:
    validated(dataset, tmp_path / "through")
    stopped(validated, dataset, tmp_path / "out", after=6)
    assert read_log(tmp_path / "out")[-1]["step"] > 6
    with (tmp_path / "out" / "log.jsonl").open("ab") as log:
        log.write(b'{"step": 8, "lo')  # a kill in the middle of a line
    validated(dataset, tmp_path / "out")
    assert clockless(tmp_path / "out") == clockless(tmp_path / "through")


@pytest.mark.parametrize("damage", [b"\0" * 40 + b"\n", b"[]\n", b'{"loss": 1}\n', b"\xff\n"])
def test_a_damaged_log_does_not_end_a_resumed_training(tmp_path: Path, damage: bytes) -> None:
    lines = [b'{"step": %d, "loss": 1.0}\n' % step for step in (1, 2, 3)]
    (tmp_path / "log.jsonl").write_bytes(lines[0] + damage + lines[1] + lines[2])
    TrainingLog(tmp_path, step=2).close()
    assert (tmp_path / "log.jsonl").read_bytes() == lines[0] + lines[1]


def test_the_grid_has_a_row_per_kind_and_a_column_per_pair() -> None:
    pictures = torch.zeros(3, 4, 3, 5, 6)
    pictures[1, 2, 0] = 1.0  # the third pair, restored, is red
    found = grid(pictures)
    assert found.shape == (3, 3 * 14, 4 * 16)
    assert (found[:, 0] == 255).all()
    tile = found[:, 14 + 2 : 14 + 12, 2 * 16 + 2 : 2 * 16 + 14]
    assert (tile[0] == 255).all()
    assert not tile[1:].any()
    assert not found[:, 2:12, 2:14].any()


def test_a_log_goes_on_at_its_step(tmp_path: Path) -> None:
    for step in (0, 2):
        log = TrainingLog(tmp_path, step=step)
        log.scalars(step + 1, loss=1.0)
        log.scalars(step + 2, loss=2.0)
        log.scalars(step + 3, loss=3.0)
        log.close()
    assert [line["step"] for line in read_log(tmp_path)] == [1, 2, 3, 4, 5]
