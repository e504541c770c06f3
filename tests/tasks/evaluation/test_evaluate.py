"""Evaluation: planted reconstructions are found, decoys are not, kills and repeats cost nothing."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from recon_core.matching import CLIPPED
from recon_core.metrics import ssim_pairs
from recon_core.restore import EDM, BFDnCNN
from storage.checkpoints import save_checkpoint
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.parts import write_part
from storage.pairs.receipts import publish_receipt
from storage.sources.load import ImageSet
from tasks.evaluation.evaluate import Evaluation, evaluate
from tasks.evaluation.record import SIDES, VERSION, fingerprint_of
from tasks.evaluation.scores import read_candidates
from tasks.evaluation.victims import find_victims
from tasks.training import train
from tests.storage.stores import MANIFEST, provenance
from tests.tasks.evaluation.evaluations import (
    N_IMAGES,
    SIZE,
    Blender,
    image_set,
    planted_columns,
    planted_store,
    weights,
)

CONFIG = Evaluation(n_samples=3, grid_rows=5, baselines=())


RESTORED = ["bf_dncnn", "edm_x1", "edm_x3"]


def _without_seconds(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "seconds"}


def _loader(*restorers: tuple[str, Blender]) -> Any:
    by_stem = dict(restorers)
    return lambda path, _device: (by_stem[path.stem], nn.Identity())


@pytest.fixture(scope="module")
def images() -> ImageSet:
    return image_set()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, images: ImageSet) -> Dataset:
    """Two parts of two runs, every image planted."""
    return planted_store(tmp_path_factory.mktemp("planted"), images)


def test_planted_reconstructions_score_one_and_decoys_do_not(
    tmp_path: Path, images: ImageSet, store: Dataset
) -> None:
    record = evaluate(
        CONFIG, dataset=store, heldout=images, restorers={}, out=tmp_path / "out", device="cpu"
    )
    plain = record["methods"]["plain"]
    assert min(plain["targets"]["ssim"]) > 0.98  # black or white in a value of 300 is clipped
    assert min(plain["targets"]["haarpsi"]) > 0.95
    assert max(plain["decoys"]["ssim"]) < 0.9
    assert plain["targets"]["summary"]["n_good"] == 4 * N_IMAGES == plain["targets"]["summary"]["n"]
    assert plain["n_targets_above_every_decoy"] == 4 * N_IMAGES
    assert list(record["methods"]) == ["plain", "plain_all", "vote"]
    assert min(record["methods"]["vote"]["targets"]["ssim"]) > 0.98
    assert record == json.loads((tmp_path / "out" / "evaluation.json").read_text())


def test_decoys_were_never_trained_on_and_do_not_repeat_within_a_run(
    tmp_path: Path, images: ImageSet
) -> None:
    twin = images.images.copy()
    twin[39] = twin[0]  # a copy of a target must not serve as a decoy
    images = replace(images, images=twin)
    store = planted_store(tmp_path / "store", images)
    record = evaluate(
        CONFIG, dataset=store, heldout=images, restorers={}, out=tmp_path / "out", device="cpu"
    )
    decoys, targets = record["decoys"], record["targets"]
    assert len(decoys["image_id"]) == len(targets["image_id"])
    assert not set(decoys["image_id"]) & ({*targets["image_id"], 39})
    for run in range(4):
        mine = [i for r, i in zip(decoys["victim"], decoys["image_id"], strict=True) if r == run]
        assert len(set(mine)) == N_IMAGES
    other = evaluate(
        replace(CONFIG, decoy_seed=1),
        dataset=store,
        heldout=images,
        restorers={},
        out=tmp_path / "other",
        device="cpu",
    )
    assert other["decoys"]["image_id"] != decoys["image_id"]


def test_the_pictures_are_those_that_were_scored(tmp_path: Path, images: ImageSet) -> None:
    store = planted_store(tmp_path / "store", images, planted=2)
    out = tmp_path / "out"
    record = evaluate(CONFIG, dataset=store, heldout=images, restorers={}, out=out, device="cpu")
    with np.load(out / "pictures.npz") as pictures:
        for side in ("targets", "decoys"):
            rows = record["grid"][side]
            assert len(rows) == 5
            original = pictures[f"{side}/original"]
            ids = [record[side]["image_id"][row] for row in rows]
            np.testing.assert_array_equal(original, images.images[ids])
            best = torch.from_numpy(pictures[f"{side}/plain"]).float() / 255
            scores = ssim_pairs(best, torch.from_numpy(original).float() / 255)
            stored = [record["methods"]["plain"][side]["ssim"][row] for row in rows]
            np.testing.assert_allclose(scores.numpy(), stored, atol=5e-3)
    plain = record["methods"]["plain"]["targets"]["ssim"]
    best = [plain[row] for row in record["grid"]["targets"]]
    assert best == sorted(plain, reverse=True)[:5]


def test_restorers_give_one_method_or_two(tmp_path: Path, images: ImageSet, store: Dataset) -> None:
    paths = {name: weights(tmp_path, name) for name in ("bf_dncnn", "edm")}
    seen: list[tuple[int, int, str]] = []
    record = evaluate(
        CONFIG,
        dataset=store,
        heldout=images,
        restorers=paths,
        out=tmp_path / "out",
        device="cpu",
        on_progress=lambda done, total, message: seen.append((done, total, message)),
        load=_loader(("bf_dncnn", Blender(1)), ("edm", Blender())),
    )
    assert list(record["methods"]) == ["plain", "plain_all", "vote", *RESTORED]
    one, mean = (record["methods"][m]["targets"]["summary"] for m in ("edm_x1", "edm_x3"))
    assert mean["mean_ssim"] > one["mean_ssim"]
    after = record["methods"]["bf_dncnn"]["targets"]["compared_with_plain"]
    assert (after["n_better"], after["n_worse"]) == (0, 4 * N_IMAGES)
    steps = [done for done, _total, _message in seen]
    assert steps == sorted(steps)
    assert seen[-1][0] == seen[-1][1]


def test_classical_denoisers_are_methods_that_need_no_file(
    tmp_path: Path, images: ImageSet, store: Dataset
) -> None:
    how: dict[str, Any] = {"dataset": store, "heldout": images, "restorers": {}, "device": "cpu"}
    config = replace(CONFIG, baselines=("wavelet", "tv"))
    record = evaluate(config, out=tmp_path / "out", **how)
    assert list(record["methods"]) == ["plain", "plain_all", "vote", "wavelet", "tv"]
    for name in ("wavelet", "tv"):
        scores = record["methods"][name]["targets"]["ssim"]
        assert scores != record["methods"]["plain"]["targets"]["ssim"]
        assert min(scores) > 0.5
    kinds = ["attack", "attack", "vote", "classical", "classical"]
    assert [method["kind"] for method in record["methods"].values()] == kinds
    assert record["grid"]["methods"] == ["plain", "vote"]
    fewer = evaluate(replace(config, baselines=("tv",)), out=tmp_path / "out", **how)
    assert fewer["fingerprint"] != record["fingerprint"]
    assert fewer["methods"]["tv"] == record["methods"]["tv"]
    assert fewer["seconds"]["tv"] == record["seconds"]["tv"]  # from the cache


def test_the_disagreement_is_that_of_the_samples_behind_the_best_match(
    tmp_path: Path, images: ImageSet
) -> None:
    store = planted_store(tmp_path / "store", images, n_parts=1, outcomes=(0, 2))
    record = evaluate(
        replace(CONFIG, n_samples=200),
        dataset=store,
        heldout=images,
        restorers={"edm": weights(tmp_path, "edm")},
        out=tmp_path / "out",
        device="cpu",
        load=_loader(("edm", Blender())),
    )
    assert "disagreement" not in record["methods"]["edm_x1"]["targets"]
    for side in ("targets", "decoys"):
        spread = record["methods"]["edm_x200"][side]["disagreement"]
        assert spread[:N_IMAGES] == pytest.approx([0.1] * N_IMAGES, rel=0.1)  # the Blender's noise
        assert spread[N_IMAGES:] == [None] * N_IMAGES  # its run left no picture


class _KilledError(Exception):
    pass


def test_a_killed_evaluation_resumes_with_the_same_result(
    tmp_path: Path, images: ImageSet, store: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    paths = {"edm": weights(tmp_path, "edm")}

    def run(out: Path, restorer: Blender, stop_at: int | None = None) -> dict[str, Any]:
        def on_progress(done: int, _total: int, _message: str) -> None:
            if stop_at is not None and done >= stop_at:
                raise _KilledError

        return evaluate(
            CONFIG,
            dataset=store,
            heldout=images,
            restorers=paths,
            out=out,
            device="cpu",
            on_progress=on_progress,
            load=_loader(("edm", restorer)),
        )

    whole = run(tmp_path / "whole", Blender())
    with pytest.raises(_KilledError):
        run(tmp_path / "killed", Blender(), stop_at=800)
    assert not (tmp_path / "killed" / "evaluation.json").exists()
    assert not caplog.messages
    rest = Blender()
    resumed = run(tmp_path / "killed", rest)
    (said,) = caplog.messages
    assert re.fullmatch(r"Evaluate: goes on, 7 of \d+ steps are finished", said)
    assert 0 < rest.n_calls < 5  # four runs, and the pictures that resemble nothing
    assert _without_seconds(resumed) == _without_seconds(whole)
    with (
        np.load(tmp_path / "whole" / "pictures.npz") as a,
        np.load(tmp_path / "killed" / "pictures.npz") as b,
    ):
        assert all((a[name] == b[name]).all() for name in a.files)
    idle = Blender()
    assert run(tmp_path / "killed", idle) == resumed
    assert idle.n_calls == 0


def test_other_weights_are_scored_again_and_the_attack_is_not(
    tmp_path: Path, images: ImageSet, store: Dataset
) -> None:
    path = weights(tmp_path, "edm")
    how: dict[str, Any] = {"dataset": store, "heldout": images, "restorers": {"edm": path}}
    how |= {"out": tmp_path / "out", "device": "cpu"}
    first = evaluate(CONFIG, **how, load=_loader(("edm", Blender())))
    path.write_bytes(b"trained further")
    again = Blender()
    second = evaluate(CONFIG, **how, load=_loader(("edm", again)))
    assert again.n_calls == 5  # four runs, and the pictures that resemble nothing
    assert second["fingerprint"] != first["fingerprint"]
    assert second["seconds"]["plain"] == first["seconds"]["plain"]


def test_runs_that_diverged_count_as_nothing(tmp_path: Path, images: ImageSet) -> None:
    store = planted_store(tmp_path / "store", images, n_parts=1, outcomes=(0, 2))
    record = evaluate(
        CONFIG,
        dataset=store,
        heldout=images,
        restorers={"edm": weights(tmp_path, "edm")},
        out=tmp_path / "out",
        device="cpu",
        load=_loader(("edm", Blender())),
    )
    assert record["dataset"]["outcomes"] == {"ok": 1, "unfitted": 0, "nonfinite": 1, "stopped": 0}
    assert record["dataset"]["n_runs_without_pictures"] == 1
    for method in record["methods"].values():
        assert method["targets"]["ssim"][N_IMAGES:] == [0.0] * N_IMAGES
        assert method["targets"]["summary"]["n"] == 2 * N_IMAGES
        assert method["targets"]["summary"]["n_good"] <= N_IMAGES


def test_all_iterations_reach_the_restorers(tmp_path: Path, images: ImageSet) -> None:
    store = planted_store(tmp_path / "store", images, n_parts=1)
    record = evaluate(
        replace(CONFIG, restore_iterations="all"),
        dataset=store,
        heldout=images,
        restorers={},
        out=tmp_path / "out",
        device="cpu",
    )
    assert list(record["methods"]) == ["plain", "vote"]
    assert record["methods"]["plain"]["targets"]["summary"]["n_good"] == 2 * N_IMAGES


def test_chosen_iterations_reach_the_restorers(tmp_path: Path, images: ImageSet) -> None:
    how: dict[str, Any] = {"heldout": images, "restorers": {}, "device": "cpu"}
    how["dataset"] = planted_store(tmp_path / "store", images, n_parts=1)

    def plain(which: Any) -> Any:
        config = replace(CONFIG, restore_iterations=which)
        return evaluate(config, out=tmp_path / str(which), **how)["methods"]["plain"]

    assert plain((500,)) == plain("last")
    assert plain((100, 500)) == plain("all")
    assert plain((100,))["targets"]["summary"]["n_good"] < 2 * N_IMAGES  # planted in 500 alone
    with pytest.raises(ValueError, match=r"run 0 has nothing of \[7\]; it was saved at \[100, 500"):
        plain((7, 500))


def test_what_cannot_be_evaluated_is_said(tmp_path: Path, images: ImageSet, store: Dataset) -> None:
    how: dict[str, Any] = {"dataset": store, "out": tmp_path / "out", "device": "cpu"}
    few = image_set(18)
    short = planted_store(tmp_path / "short", few)
    with pytest.raises(ValueError, match=r"run 0 has 4 images but only 2 of the 18 images"):
        evaluate(CONFIG, **{**how, "dataset": short}, heldout=few, restorers={})
    with pytest.raises(ValueError, match="give the same source"):
        evaluate(CONFIG, **how, heldout=image_set(seed=1), restorers={})
    with pytest.raises(ValueError, match="cannot name a method"):
        evaluate(CONFIG, **how, heldout=images, restorers={"Plain EDM": tmp_path})
    mixture = create_or_open(tmp_path / "mixture", {"mixture": [MANIFEST, {"other": 1}]})
    for receipt in store.receipts[:1]:
        group = f"parts/{receipt.group}"
        shutil.copytree(Path(store.root) / group, tmp_path / "mixture" / group)
        publish_receipt(mixture.place, receipt)
    mixture.refresh()
    with pytest.raises(ValueError, match="mixes pairs of several experiments"):
        evaluate(CONFIG, **{**how, "dataset": mixture}, heldout=images, restorers={})
    empty = planted_store(tmp_path / "empty", images, n_parts=0)
    with pytest.raises(ValueError, match="no run to evaluate"):
        evaluate(CONFIG, **{**how, "dataset": empty}, heldout=images, restorers={})
    with pytest.raises(ValueError, match="restore_iterations='first'"):
        Evaluation(restore_iterations="first")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"restore_iterations=\(\); expected"):
        Evaluation(restore_iterations=())
    with pytest.raises(ValueError, match="n_samples=0"):
        Evaluation(n_samples=0)
    for baselines in (("tv", "tv"), ("median",)):
        with pytest.raises(ValueError, match=r"baselines=.*expected some of \['nlm', 'tv'"):
            Evaluation(baselines=baselines)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'tv' cannot name a method"):
        evaluate(CONFIG, **how, heldout=images, restorers={"tv": tmp_path})


def test_a_further_attack_is_scored_as_if_it_were_alone(
    tmp_path: Path, images: ImageSet, store: Dataset
) -> None:
    """On the same rows, beside the first attack, whose own numbers and fingerprint stay."""
    other = planted_store(tmp_path / "other", images, planted=2)
    how: dict[str, Any] = {"heldout": images, "restorers": {}, "device": "cpu"}
    first = evaluate(CONFIG, dataset=store, out=tmp_path / "first", **how)
    alone = evaluate(CONFIG, dataset=other, out=tmp_path / "alone", **how)
    further = {"span": other}
    both = evaluate(CONFIG, dataset=store, further=further, out=tmp_path / "both", **how)
    assert (first["attacks"], first["side_by_side"]) == ([], None)
    assert first["fingerprint"] != both["fingerprint"]
    nothing = evaluate(CONFIG, dataset=store, further={}, out=tmp_path / "none", **how)
    inputs = [store.content_hash, images.content_hash, 1]
    before = fingerprint_of(VERSION, CLIPPED, asdict(CONFIG), inputs, {}, None)
    assert nothing["fingerprint"] == first["fingerprint"] == before
    found = both["methods"].pop("plain_span")
    assert both["methods"] == first["methods"]
    names = ("ssim", "haarpsi", "ssim3", "rmse", "run", "candidate", "iteration", "summary")
    for side in SIDES:
        assert both[side] == alone[side]
        expected = alone["methods"]["plain"][side]
        assert {n: found[side][n] for n in names} == {n: expected[n] for n in names}
    assert found["detection"] == alone["methods"]["plain"]["detection"]
    assert sum(ssim > 0.9 for ssim in found["targets"]["ssim"]) == 8
    assert sum(ssim > 0.9 for ssim in both["methods"]["plain"]["targets"]["ssim"]) == 16
    told = [(a["method"], a["kind"], a["n_candidates"]) for a in both["attacks"]]
    assert told == [("plain", "kkt", 32), ("plain_span", "span", 32)]
    hashes = [a["content_hash"] for a in both["attacks"]]
    assert hashes == [store.content_hash, other.content_hash]
    assert [a["seconds"] for a in both["attacks"]] == [None, None], "no victims were kept"
    chosen = both["side_by_side"]
    assert (chosen["victim"], chosen["methods"]) == (0, ["plain_span", "plain"])
    with np.load(tmp_path / "both" / "pictures.npz") as pictures:
        for side in SIDES:
            original, best = (
                torch.from_numpy(pictures[f"attacks_{side}/{name}"]).float() / 255
                for name in ("original", "plain_span")
            )
            stored = [found[side]["ssim"][row] for row in chosen[side]]
            np.testing.assert_allclose(ssim_pairs(best, original).numpy(), stored, atol=5e-3)
    margins = planted_columns(images, 0)["targets/margin"]
    strange = create_or_open(tmp_path / "strange", MANIFEST)
    for part in range(2):
        columns = planted_columns(images, part) | {"targets/margin": margins + part}
        source = provenance(run_first=2 * part, source_hash=images.content_hash)
        write_part(tmp_path / "strange", part, columns, provenance=source)
    strange.refresh()
    with pytest.raises(ValueError, match=r"victim 2 of .*strange is not that of .* remove both"):
        evaluate(CONFIG, dataset=store, further={"kkt": strange}, out=tmp_path / "x", **how)


def test_trained_restorers_are_read_and_applied(tmp_path: Path, images: ImageSet) -> None:
    """The real interface, end to end: files of a training, and a run without pictures."""
    small = {
        "bf_dncnn": BFDnCNN(depth=3, n_channels=4),
        "edm": EDM(size="tiny", resolution=SIZE, n_steps=2),
    }
    paths = {}
    for name, restorer in small.items():
        net = restorer.build(seed=0)
        tensors = {key: value.numpy() for key, value in net.state_dict().items()}
        card = {"schema": train.SCHEMA, "version": train.VERSION, "restorer": asdict(restorer)}
        paths[name] = save_checkpoint(tmp_path / name, "model", tensors, card)
    store = planted_store(tmp_path / "store", images, n_parts=1, outcomes=(0, 2))
    record = evaluate(
        Evaluation(n_samples=2, grid_rows=2),
        dataset=store,
        heldout=images,
        restorers=paths,
        out=tmp_path / "out",
        device="cpu",
    )
    restored = ["nlm", "tv", "wavelet", "bf_dncnn", "edm_x1", "edm_x2"]
    assert list(record["methods"]) == ["plain", "plain_all", "vote", *restored]
    for method in record["methods"].values():
        assert np.all(np.array(method["targets"]["ssim"][:N_IMAGES]) != 0)
        assert method["targets"]["ssim"][N_IMAGES:] == [0.0] * N_IMAGES


def test_the_last_of_a_candidate_is_its_own_last(tmp_path: Path, images: ImageSet) -> None:
    """Attacks on autoencoders save each candidate once, whenever it is done."""
    columns = planted_columns(images, 0, outcomes=(0,))
    rows = len(columns["pairs/iteration"])
    columns["pairs/iteration"] = np.arange(rows, dtype=np.int64)[::-1] + 5
    columns["pairs/candidate"] = np.arange(rows, dtype=np.int64) // 2
    create_or_open(tmp_path / "s", MANIFEST)
    made = provenance(source_hash=images.content_hash)
    write_part(tmp_path / "s", 0, columns, provenance=made)
    dataset = Dataset(tmp_path / "s")
    (victim,) = find_victims(dataset, images, decoy_seed=0)
    found = read_candidates(dataset, victim.runs[0], "last", "cpu")
    assert found.candidate.tolist() == list(range(rows // 2))
    assert found.iteration.tolist() == [rows + 4 - 2 * k for k in range(rows // 2)]
