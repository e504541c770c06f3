"""study.json: cells are put together from the right rows, victims say what they say themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from recon_core.types import Victims
from storage.pairs.dataset import Dataset
from tasks.campaign.plan import VictimFiles, VictimsOfStore, code_version, version_key
from tasks.families.weights.study.record import (
    Examined,
    describe_study,
    effective_number,
    examine,
    unseen_images,
)
from tasks.families.weights.study.settings import StudyPlan
from tests.tasks.families.weights.study.studies import attacked, pictures, scored, small_study


@dataclass(frozen=True)
class Done:
    """A small study from its plan to its record."""

    plan: StudyPlan
    dataset: Dataset
    scored: Mapping[str, Any]
    kept: VictimsOfStore
    tests: np.ndarray[Any, np.dtype[np.int64]]
    examined: dict[int, Examined]
    record: dict[str, Any]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    root = tmp_path_factory.mktemp("study")
    plan = StudyPlan(small_study(), pictures())
    dataset = attacked(root / "store", plan)
    found = scored(root / "evaluation", plan, dataset)
    receipts = {receipt.part // 2: receipt for receipt in dataset.receipts}
    key = plan.study.victims_fingerprint(plan.images)
    kept = VictimsOfStore(root / "store" / "victims", key, receipts)
    tests = unseen_images(plan, dataset)
    examined = {v: examine(plan, v, tests=tests, device="cpu", victims=kept) for v in range(10)}
    record = describe_study(plan, found, examined, dataset)
    return Done(plan, dataset, found, kept, tests, examined, record)


def test_cells_are_put_together_from_their_own_images(done: Done) -> None:
    method, targets = done.scored["methods"]["plain"], done.scored["targets"]
    for cell in done.record["cells"]:
        number = cell["number"]
        victims = [2 * number, 2 * number + 1]
        assert cell["victims"] == victims
        rows = [row for row, v in enumerate(targets["victim"]) if v in victims]
        assert len(rows) == 2 * cell["n_images"] == cell["targets"]["n"] == cell["decoys"]["n"]
        ssim = np.array(method["targets"]["ssim"])[rows]
        assert cell["targets"]["mean_ssim"] == pytest.approx(ssim.mean(), abs=1e-6)
        assert cell["targets"]["n_good"] == (ssim > 0.4).sum()
        decoys = np.array(method["decoys"]["ssim"])[rows]
        assert cell["decoys"]["mean_ssim"] == pytest.approx(decoys.mean(), abs=1e-6)
        low, high = cell["targets"]["mean_ssim_interval"]
        assert low <= cell["targets"]["mean_ssim"] <= high
        images = done.record["images"]
        mine = [k for k, c in enumerate(images["cell"]) if c == number]
        assert [images["ssim"][k] for k in mine] == pytest.approx(ssim, abs=1e-6)
        assert [images["decoy_ssim"][k] for k in mine] == pytest.approx(decoys, abs=1e-6)
        assert [images["image_id"][k] for k in mine] == [targets["image_id"][r] for r in rows]
        assert sum(cell["outcomes"].values()) == 4
        each = cell["victim"]
        assert sum(each["n_good"]) == cell["targets"]["n_good"]
        assert np.mean(each["mean_ssim"]) == pytest.approx(ssim.mean(), abs=1e-5)
        shown = [images["ssim"][k] for k in cell["shown"]]
        assert shown == sorted(shown, reverse=True)
        assert set(cell["shown"]) <= set(mine)
        assert max(shown) == pytest.approx(ssim.max(), abs=1e-6)
    assert json.loads(json.dumps(done.record, allow_nan=False)) == done.record


def test_seconds_are_those_of_the_cells_parts(done: Done) -> None:
    spent = [0.0] * 5
    for receipt in done.dataset.receipts:
        spent[receipt.part // 4] += receipt.seconds
    assert [cell["seconds"] for cell in done.record["cells"]] == pytest.approx(spent, abs=1e-5)


def test_victims_say_their_losses_and_accuracies(done: Done) -> None:
    """Computed anew with torch's layers from the kept weights."""
    for victim in (0, 5, 8):  # binary, four classes, convolution
        cell = done.plan.cell(victim)
        spec = done.plan.spec(2 * victim)
        tensors = done.kept.get(victim)
        assert tensors is not None
        w = [tensors[f"parameters.{i}"][0] for i in range(len(tensors))
             if f"parameters.{i}" in tensors]  # fmt: skip
        own = torch.from_numpy(done.plan.images.images[list(spec.image_ids)]).float() / 255

        def outputs(images: torch.Tensor, w: Any = w, own: Any = own, cell: Any = cell) -> Any:
            x = images - own.mean(0)
            if cell.panel == "conv":
                x = F.conv2d(x, w[0].view(2, 3, 3, 3), w[1]).relu().flatten(1)
                return (x @ w[2].mT).relu() @ w[3].mT
            return (x.flatten(1) @ w[0].mT + w[1]).relu() @ w[2].mT

        labels = torch.tensor(spec.labels)
        phi = outputs(own).double()
        if cell.experiment.n_outputs == 1:
            loss = F.binary_cross_entropy_with_logits(phi[:, 0], labels.double(), reduction="none")
        else:
            loss = F.cross_entropy(phi, labels, reduction="none")
        np.testing.assert_allclose(done.examined[victim].loss, loss, rtol=1e-2, atol=1e-7)
        known = done.plan.labels_of(cell)[done.tests]
        others = torch.from_numpy(done.plan.images.images[done.tests]).float() / 255
        phi = outputs(others)
        guess = (phi[:, 0] > 0).long() if phi.shape[1] == 1 else phi.argmax(1)
        accuracy = float((guess.numpy() == known).mean())
        assert done.examined[victim].test_accuracy == pytest.approx(accuracy, abs=0.03)


def test_tests_are_images_that_no_victim_saw(done: Done) -> None:
    used = set(done.dataset.column("targets/image_id").tolist())
    assert len(done.tests) == 40
    assert not used & set(done.tests.tolist())


def test_kernels_are_those_of_the_first_layer(done: Done) -> None:
    tensors = done.kept.get(8)
    assert tensors is not None
    kernels = tensors["parameters.0"][0].view(2, 3, 3, 3).numpy()
    shown = done.examined[8].kernels
    assert shown is not None
    for k, (own, seen) in enumerate(zip(kernels, shown, strict=True)):
        unit = (own - own.min()) / (own.max() - own.min())
        np.testing.assert_allclose(seen / 255, unit, atol=0.003, err_msg=str(k))
    assert done.examined[0].kernels is None


def test_a_victim_that_is_gone_is_trained_again(done: Done) -> None:
    """With the same losses, and the store's folder stays as it is."""

    class Nothing:
        def get(self, victim: int) -> None:
            return None

        def put(self, victim: int, tensors: Any) -> None:
            assert victim == 4

    victims: Victims = Nothing()
    torch.set_num_threads(1)
    again = examine(done.plan, 4, tests=done.tests, device="cpu", victims=victims)
    np.testing.assert_array_equal(again.loss, done.examined[4].loss)
    assert again.test_accuracy == done.examined[4].test_accuracy


def test_victims_of_a_store_are_read_as_they_were_made(done: Done, tmp_path: Path) -> None:
    """By the code and device of the receipt, whatever runs now; nothing is written."""
    receipts = {receipt.part // 2: receipt for receipt in done.dataset.receipts}
    made = receipts[0]
    assert made.code_version == code_version()
    key = version_key("study", "other code", made.torch_version, "a GPU")
    tensors = {"parameters.0": torch.ones(2)}
    VictimFiles(tmp_path, key).put(0, tensors)

    class Made:
        code_version = "other code"
        torch_version = made.torch_version
        device = "a GPU"

    kept = VictimsOfStore(tmp_path, "study", {0: Made()})  # type: ignore[dict-item]
    found = kept.get(0)
    assert found is not None
    assert torch.equal(found["parameters.0"], torch.ones(2))
    assert kept.get(1) is None
    assert VictimsOfStore(tmp_path, "study", receipts).get(0) is None
    before = sorted(tmp_path.iterdir())
    kept.put(1, tensors)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([2.0, 2.0, 2.0], 3.0), ([0.0, 5.0], 1.0), ([3.0, 1.0], 1.6), ([0.0, 0.0], None)],
)
def test_the_effective_number_of_images(weights: list[float], expected: float | None) -> None:
    found = effective_number(np.array(weights))
    assert found == expected if expected is None else found == pytest.approx(expected)


def test_images_weigh_as_much_as_the_slope_of_their_loss(done: Done) -> None:
    """Of a binary victim sigma(-margin), of one with classes 1 - p of its own."""
    margins = np.array(done.scored["targets"]["margin"], np.float64)
    victim = np.array(done.scored["targets"]["victim"])
    mine = margins[victim == 0]
    weights = 1 / (1 + np.exp(mine))
    expected = weights.sum() ** 2 / np.square(weights).sum()
    assert done.examined[0].n_effective == pytest.approx(expected, rel=1e-3)
    of_classes = -np.expm1(-done.examined[5].loss)
    expected = of_classes.sum() ** 2 / np.square(of_classes).sum()
    assert done.examined[5].n_effective == pytest.approx(expected, rel=1e-6)
    cell = done.record["cells"][0]
    assert cell["victim"]["n_effective"][0] == pytest.approx(done.examined[0].n_effective, abs=1e-5)
