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
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.parts import write_part
from storage.pairs.receipts import publish_receipt
from storage.sources.load import ImageSet
from tasks.evaluation.evaluate import Evaluation, evaluate
from tasks.evaluation.record import SIDES, VERSION, fingerprint_of
from tasks.evaluation.scores import read_candidates
from tasks.evaluation.victims import find_victims
from tests.storage.stores import MANIFEST, provenance
from tests.tasks.evaluation.evaluations import (
    N_IMAGES,
    Blender,
    image_set,
    planted_columns,
    planted_store,
    scored,
    weights,
)

CONFIG = Evaluation(n_samples=3, grid_rows=5, baselines=())


def _run(
    out: Path, store: Dataset, images: ImageSet, config: Evaluation = CONFIG, **how: Any
) -> dict[str, Any]:
    return scored(out, store, images, config, **how)


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
    record = _run(tmp_path / "out", store, images)
    plain = record["methods"]["plain"]
    assert min(plain["targets"]["ssim"]) > 0.98  # black or white in a value of 300 is clipped
    assert min(plain["targets"]["haarpsi"]) > 0.95
    assert max(plain["decoys"]["ssim"]) < 0.9
    assert plain["targets"]["summary"]["n_good"] == 4 * N_IMAGES == plain["targets"]["summary"]["n"]
    assert plain["n_targets_above_every_decoy"] == 4 * N_IMAGES
    assert list(record["methods"]) == ["plain", "plain_all", "vote", "mean_image"]
    assert min(record["methods"]["vote"]["targets"]["ssim"]) > 0.98
    control = record["methods"]["mean_image"]["targets"]
    for method in ("plain", "vote"):
        found = record["methods"][method]["targets"]
        assert found["summary"]["n_identified"] == 4 * N_IMAGES
        assert np.all(np.array(found["ssim"]) > np.array(control["ssim"]) + 0.05)
    assert control["summary"]["n_identified"] <= 4  # of each victim one that it is nearest to
    assert record == json.loads((tmp_path / "out" / "evaluation.json").read_text())


def test_decoys_were_never_trained_on_and_do_not_repeat_within_a_run(
    tmp_path: Path, images: ImageSet
) -> None:
    twin = images.images.copy()
    twin[39] = twin[0]  # a copy of a target must not serve as a decoy
    images = replace(images, images=twin)
    store = planted_store(tmp_path / "store", images)
    record = _run(tmp_path / "out", store, images)
    decoys, targets = record["decoys"], record["targets"]
    assert len(decoys["image_id"]) == len(targets["image_id"])
    assert not set(decoys["image_id"]) & ({*targets["image_id"], 39})
    for run in range(4):
        mine = [i for r, i in zip(decoys["victim"], decoys["image_id"], strict=True) if r == run]
        assert len(set(mine)) == N_IMAGES
    other = _run(tmp_path / "other", store, images, replace(CONFIG, decoy_seed=1))
    assert other["decoys"]["image_id"] != decoys["image_id"]


def test_classical_denoisers_are_methods_that_need_no_file(
    tmp_path: Path, images: ImageSet, store: Dataset
) -> None:
    config = replace(CONFIG, baselines=("wavelet", "tv"))
    record = _run(tmp_path / "out", store, images, config)
    assert list(record["methods"]) == ["plain", "plain_all", "vote", "mean_image", "wavelet", "tv"]
    for name in ("wavelet", "tv"):
        scores = record["methods"][name]["targets"]["ssim"]
        assert scores != record["methods"]["plain"]["targets"]["ssim"]
        assert min(scores) > 0.5
    kinds = ["attack", "attack", "vote", "control", "classical", "classical"]
    assert [method["kind"] for method in record["methods"].values()] == kinds
    assert record["grid"]["methods"] == ["plain", "vote"]
    fewer = _run(tmp_path / "out", store, images, replace(config, baselines=("tv",)))
    assert fewer["fingerprint"] != record["fingerprint"]
    assert fewer["methods"]["tv"] == record["methods"]["tv"]
    assert fewer["seconds"]["tv"] == record["seconds"]["tv"]  # from the cache


def test_the_disagreement_is_that_of_the_samples_behind_the_best_match(
    tmp_path: Path, images: ImageSet
) -> None:
    store = planted_store(tmp_path / "store", images, n_parts=1, outcomes=(0, 2))
    config = replace(CONFIG, n_samples=200)
    record = _run(tmp_path / "out", store, images, config, blenders={"edm": Blender()})
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
    def run(out: Path, restorer: Blender, stop_at: int | None = None) -> dict[str, Any]:
        def on_progress(done: int, _total: int, _message: str, _share: float) -> None:
            if stop_at is not None and done >= stop_at:
                raise _KilledError

        return _run(out, store, images, blenders={"edm": restorer}, on_progress=on_progress)

    whole = run(tmp_path / "whole", Blender())
    with pytest.raises(_KilledError):
        run(tmp_path / "killed", Blender(), stop_at=900)
    assert not (tmp_path / "killed" / "evaluation.json").exists()
    assert not caplog.messages
    rest = Blender()
    resumed = run(tmp_path / "killed", rest)
    (said,) = caplog.messages
    assert re.fullmatch(r"Evaluate: goes on, 8 of \d+ steps are finished", said)
    assert 0 < rest.n_calls < 5  # four runs, and the pictures that resemble nothing
    assert {**resumed, "seconds": 0} == {**whole, "seconds": 0}
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
    first = _run(tmp_path / "out", store, images, blenders={"edm": Blender()})
    again = Blender()
    changed = {"edm": weights(tmp_path / "further", "edm")}
    changed["edm"].write_bytes(b"trained further")
    second = evaluate(
        CONFIG, dataset=store, heldout=images, restorers=changed, out=tmp_path / "out",
        device="cpu", load=lambda _path, _device: (again, nn.Identity()),
    )  # fmt: skip
    assert again.n_calls == 5  # four runs, and the pictures that resemble nothing
    assert second["fingerprint"] != first["fingerprint"]
    assert second["seconds"]["plain"] == first["seconds"]["plain"]


def test_chosen_iterations_reach_the_restorers(tmp_path: Path, images: ImageSet) -> None:
    store = planted_store(tmp_path / "store", images, n_parts=1)

    def plain(which: Any) -> Any:
        config = replace(CONFIG, restore_iterations=which)
        return _run(tmp_path / str(which), store, images, config)["methods"]["plain"]

    assert plain((500,)) == plain("last")
    assert plain((100, 500)) == plain("all")
    assert plain((100,))["targets"]["summary"]["n_good"] < 2 * N_IMAGES  # planted in 500 alone
    with pytest.raises(ValueError, match=r"run 0 has nothing of \[7\]; it was saved at \[100, 500"):
        plain((7, 500))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"restore_iterations": ()}, r"restore_iterations=\(\); expected"),
        ({"n_samples": 0}, "n_samples=0"),
        ({"rounds": 3}, "rounds=3 needs span=True"),
        ({"baselines": ("tv", "tv")}, "baselines=.*name each once"),
        ({"external": {"mine": "edm"}}, r"external\.mine='edm' is not an \.onnx file"),
        *(({"external": {name: "a.onnx"}}, "cannot name a method")
          for name in ("plain2", "tv", "vote", "Mine", "oracle", "mine_projected")),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Evaluation(**settings)


def test_what_cannot_be_evaluated_is_said(tmp_path: Path, images: ImageSet, store: Dataset) -> None:
    few, other = image_set(18), image_set(seed=1)
    short = planted_store(tmp_path / "short", few)
    empty = planted_store(tmp_path / "empty", images, n_parts=0)
    mixture = create_or_open(tmp_path / "mixture", {"mixture": [MANIFEST, {"other": 1}]})
    group = f"parts/{store.receipts[0].group}"
    shutil.copytree(Path(store.root) / group, tmp_path / "mixture" / group)
    publish_receipt(mixture.place, store.receipts[0])
    mixture.refresh()
    named = replace(CONFIG, external={"edm": "a.onnx"})
    for dataset, heldout, config, names, said in (
        (short, few, CONFIG, (), "run 0 has 4 images but only 2 of the 18 images"),
        (store, other, CONFIG, (), "give the same source"),
        (mixture, images, CONFIG, (), "mixes pairs of several experiments"),
        (empty, images, CONFIG, (), "no run to evaluate"),
        (store, images, CONFIG, ("Plain EDM",), "cannot name a method"),
        (store, images, CONFIG, ("tv",), "'tv' cannot name a method"),
        (store, images, named, ("edm",), "'edm' names both a trained and an external restorer"),
    ):
        blenders = {name: Blender() for name in names}
        with pytest.raises(ValueError, match=said):
            _run(tmp_path / "out", dataset, heldout, config, blenders=blenders)


def test_a_further_attack_is_scored_as_if_it_were_alone(
    tmp_path: Path, images: ImageSet, store: Dataset
) -> None:
    """On the same rows, beside the first attack, whose own numbers and fingerprint stay."""
    other = planted_store(tmp_path / "other", images, planted=2)
    first = _run(tmp_path / "first", store, images)
    alone = _run(tmp_path / "alone", other, images)
    further = {"span": other}
    both = _run(tmp_path / "both", store, images, further=further)
    assert (first["attacks"], first["side_by_side"]) == ([], None)
    assert first["fingerprint"] != both["fingerprint"]
    nothing = _run(tmp_path / "none", store, images, further={})
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
    columns = ("method", "kind", "n_candidates", "content_hash", "seconds")
    assert [tuple(attack[name] for name in columns) for attack in both["attacks"]] == [
        ("plain", "kkt", 32, store.content_hash, None),  # no victims were kept
        ("plain_span", "span", 32, other.content_hash, None),
    ]
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
    strange = create_or_open(tmp_path / "strange", {"campaign": MANIFEST})
    for part in range(2):
        columns = planted_columns(images, part) | {"targets/margin": margins + part}
        source = provenance(run_first=2 * part, source_hash=images.content_hash)
        write_part(tmp_path / "strange", part, columns, provenance=source)
    strange.refresh()
    with pytest.raises(ValueError, match=r"victim 2 of .*strange is not that of .* remove both"):
        _run(tmp_path / "x", store, images, further={"kkt": strange})


def test_the_last_of_a_candidate_is_its_own_last(tmp_path: Path, images: ImageSet) -> None:
    """Attacks on autoencoders save each candidate once, whenever it is done."""
    columns = planted_columns(images, 0, outcomes=(0,))
    rows = len(columns["pairs/iteration"])
    columns["pairs/iteration"] = np.arange(rows, dtype=np.int64)[::-1] + 5
    columns["pairs/candidate"] = np.arange(rows, dtype=np.int64) // 2
    create_or_open(tmp_path / "s", {"campaign": MANIFEST})
    made = provenance(source_hash=images.content_hash)
    write_part(tmp_path / "s", 0, columns, provenance=made)
    dataset = Dataset(tmp_path / "s")
    (victim,) = find_victims(dataset, images, decoy_seed=0)
    found = read_candidates(dataset, victim.runs[0], "last", "cpu")
    assert found.candidate.tolist() == list(range(rows // 2))
    assert found.iteration.tolist() == [rows + 4 - 2 * k for k in range(rows // 2)]
