"""Evaluation of sweeps: a victim takes the best of all attacks on it, and decoys take it too."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recon_core.matching import fit_to_range
from recon_core.metrics import ncc_matrix, ssim_matrix, ssim_pairs
from recon_core.ranking import agreement, consistency
from recon_core.types import seeded_generator
from storage.pairs.dataset import Dataset
from storage.sources.load import ImageSet
from tasks.evaluation.evaluate import Evaluation
from tasks.evaluation.sweep import UNLIKE_COLUMNS
from tests.recon_core.votes import vote
from tests.storage.damage import reseal_store
from tests.tasks.evaluation.evaluations import (
    ITERATIONS,
    N_IMAGES,
    Blender,
    evaluated_sweep,
    image_set,
    planted_store,
    planted_sweep,
    scored,
)

CONFIG = Evaluation(n_samples=3, grid_rows=5, appendix_rows=6, baselines=())
N_ROWS = 2 * N_IMAGES  # two victims
Scored = tuple[dict[str, Any], Path]


@pytest.fixture(scope="module")
def images() -> ImageSet:
    return image_set()


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Scored:
    """The record of two victims with three attacks each, of which the second found all images."""
    folder = tmp_path_factory.mktemp("sweep")
    return evaluated_sweep(folder), folder


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Scored:
    """The record of two victims with three attacks each, none of which found anything."""
    folder = tmp_path_factory.mktemp("noise")
    return evaluated_sweep(folder, planted=0), folder


def _refuse(text: str) -> None:
    raise AssertionError(f"the record has {text}")


def _is_strict_json(out: Path) -> bool:
    """True, or it raises: the record has no NaN and no infinity."""
    return bool(json.loads((out / "evaluation.json").read_text(), parse_constant=_refuse))


def _score(store: Dataset, images: ImageSet, out: Path, **changes: Any) -> dict[str, Any]:
    return scored(out, store, images, replace(CONFIG, **changes))


def _raw(store: Dataset, run: int, attacks: int = 3) -> tuple[Tensor, Tensor]:
    """(candidates at the last iteration, mean image) of one run of a sweep."""
    columns = store.read(run // attacks, ["pairs/run_row", "pairs/iteration"])
    mine = (columns["pairs/run_row"] == run % attacks) & (
        columns["pairs/iteration"] == ITERATIONS[-1]
    )
    x = store.read(run // attacks, ["pairs/reconstruction"])["pairs/reconstruction"][mine]
    mean = store.read(run // attacks, ["runs/mean_image"])["runs/mean_image"][run % attacks]
    return torch.from_numpy(x), torch.from_numpy(mean)


def _wanted(record: dict[str, Any], images: ImageSet, side: str, victim: int) -> Tensor:
    rows = [k for k, v in enumerate(record[side]["victim"]) if v == victim]
    ids = [record[side]["image_id"][row] for row in rows]
    return torch.from_numpy(images.images[ids]).float() / 255


def test_what_one_attack_of_three_found_counts_for_the_victim(sweep: Scored) -> None:
    record, folder = sweep
    assert _is_strict_json(folder / "out")
    facts = record["dataset"]
    assert (facts["n_runs"], facts["n_victims"], facts["attacks_per_victim"]) == (6, 2, 3)
    assert (facts["n_targets"], facts["images_per_victim"]) == (N_ROWS, [N_IMAGES])
    assert record["targets"]["victim"] == [0] * N_IMAGES + [1] * N_IMAGES
    plain = record["methods"]["plain"]
    assert min(plain["targets"]["ssim"]) > 0.98
    assert plain["targets"]["run"] == [1] * N_IMAGES + [4] * N_IMAGES
    assert plain["targets"]["candidate"] == [*range(N_IMAGES)] * 2
    assert plain["targets"]["iteration"] == [ITERATIONS[-1]] * N_ROWS
    assert max(plain["decoys"]["ssim"]) < 0.9
    assert plain["n_targets_above_every_decoy"] == N_ROWS
    assert record["runs"]["n_good"][1] == record["runs"]["n_good"][4] == N_IMAGES
    assert record["runs"]["mean_ssim"][0] < 0.6


def test_every_row_takes_the_best_of_all_runs(noise: Scored, images: ImageSet) -> None:
    record, folder = noise
    store = Dataset(folder / "store")
    for victim in range(2):
        raws = [_raw(store, run) for run in range(3 * victim, 3 * victim + 3)]
        pictures = torch.cat([fit_to_range(*raw) for raw in raws])
        for side in ("targets", "decoys"):
            rows = slice(victim * N_IMAGES, (victim + 1) * N_IMAGES)
            scores = ssim_matrix(pictures, _wanted(record, images, side, victim))
            found = record["methods"]["plain"][side]
            best, row = scores.max(dim=0)
            assert found["ssim"][rows] == pytest.approx(best.tolist(), abs=1e-6)
            assert found["run"][rows] == (3 * victim + row // (2 * N_IMAGES)).tolist()
            assert found["candidate"][rows] == (row % (2 * N_IMAGES)).tolist()
    assert len(set(record["methods"]["plain"]["targets"]["run"])) > 2


def test_equal_matches_are_the_first_runs(tmp_path: Path, images: ImageSet) -> None:
    record = _score(planted_sweep(tmp_path / "s", images, planted_in=None), images, tmp_path / "o")
    assert record["methods"]["plain"]["targets"]["run"] == [0] * N_IMAGES + [3] * N_IMAGES


def test_votes_are_those_of_all_candidates_at_once(noise: Scored, images: ImageSet) -> None:
    record, folder = noise
    store = Dataset(folder / "store")
    found = record["methods"]["vote"]
    assert found["kind"] == "vote"
    for victim in range(2):
        raws = [_raw(store, run) for run in range(3 * victim, 3 * victim + 3)]
        x, mean = torch.cat([raw for raw, _mean in raws]), raws[0][1]
        for side in ("targets", "decoys"):
            wanted = _wanted(record, images, side, victim)
            voted = vote(x, ncc_matrix(x, wanted - mean, half_size=True), ratio=1.1)
            assert voted.n_voters.max() > 1
            scores = ssim_pairs(fit_to_range(voted.x, mean), wanted)
            rows = slice(victim * N_IMAGES, (victim + 1) * N_IMAGES)
            assert found[side]["ssim"][rows] == pytest.approx(scores.tolist(), abs=1e-5)
    assert set(found["targets"]["run"]) == {-1}
    assert found["halves"] is None


def test_decoys_are_drawn_per_victim_from_its_number(tmp_path: Path, images: ImageSet) -> None:
    single = _score(planted_store(tmp_path / "one", images, n_parts=1), images, tmp_path / "a")
    sweep = _score(planted_sweep(tmp_path / "many", images), images, tmp_path / "b")
    assert single["dataset"]["attacks_per_victim"] == 1
    assert single["targets"]["image_id"] == sweep["targets"]["image_id"]
    assert single["decoys"]["image_id"] == sweep["decoys"]["image_id"]
    pool = [i for i in range(40) if i not in single["targets"]["image_id"]]
    for victim in range(2):
        generator = seeded_generator(0, victim, "decoys")
        drawn = torch.randperm(len(pool), generator=generator)[:N_IMAGES].tolist()
        rows = slice(victim * N_IMAGES, (victim + 1) * N_IMAGES)
        assert single["decoys"]["image_id"][rows] == [pool[k] for k in drawn]


def test_halves_are_two_sets_of_runs_whose_better_is_the_whole(
    noise: Scored, tmp_path: Path, images: ImageSet
) -> None:
    record, folder = noise
    for name in ("plain", "plain_all", "edm_x3"):
        method = record["methods"][name]
        for side in ("targets", "decoys"):
            halves = np.array(method["halves"][side]["ssim"])
            assert halves.max(axis=0).tolist() == method[side]["ssim"]
            assert (halves[0] != halves[1]).all()
            assert np.array(method["halves"][side]["haarpsi"]).shape == halves.shape
    other = _score(Dataset(folder / "store"), images, tmp_path / "other", decoy_seed=1)
    assert other["methods"]["plain"]["halves"] != record["methods"]["plain"]["halves"]
    single = _score(planted_store(tmp_path / "one", images, n_parts=1), images, tmp_path / "one-o")
    assert single["methods"]["plain"]["halves"] is None
    assert single["ranking"] is None


def test_criteria_rank_the_attacks_on_a_victim(sweep: Scored) -> None:
    record, folder = sweep
    runs, store = record["runs"], Dataset(folder / "store")
    raws = [_raw(store, run)[0] for run in range(3)]
    owner = torch.arange(3).repeat_interleave(2 * N_IMAGES)
    agreed = agreement(torch.cat(raws), owner).view(3, -1).mean(dim=1)
    assert runs["agreement"][:3] == pytest.approx(agreed.tolist(), abs=1e-6)
    x = store.read(0, ["pairs/reconstruction"])["pairs/reconstruction"][: 4 * N_IMAGES]
    saved = torch.from_numpy(x).unflatten(0, (-1, len(ITERATIONS))).transpose(0, 1)
    assert runs["consistency"][0] == pytest.approx(consistency(saved).mean().item(), abs=1e-6)
    residual = record["ranking"]["kkt_residual"]
    assert residual["n_runs"] == 6
    assert residual["best_of_top_quarter"] is True
    assert (residual["n_victims"], residual["n_best_in_top_quarter"]) == (2, 2)
    assert residual["spearman"] >= 0.5
    assert record["ranking"]["n_iterations"]["spearman"] is None  # all the same
    assert record["ranking"]["residual_relu"]["best_of_top_quarter"] is False
    assert runs["lr"] == pytest.approx([0.1 + 0.01 * k for k in range(6)])
    assert runs["n_iterations"] == [ITERATIONS[-1]] * 6
    assert record["targets"]["margin"] == [k / 8 for k in range(N_IMAGES)] * 2


def test_the_disagreement_is_held_against_the_error(noise: Scored) -> None:
    from scipy import stats

    record, _folder = noise
    assert list(record["hallucination"]) == ["edm_x3"]
    found, method = record["hallucination"]["edm_x3"], record["methods"]["edm_x3"]
    spread, error = (np.array(method["targets"][name]) for name in ("disagreement", "rmse"))
    expected = stats.spearmanr(spread, error).statistic
    assert found["spearman"] == pytest.approx(expected, abs=1e-6)
    assert sum(part["n"] for part in found["bins"]) == found["n"] == N_ROWS
    assert sum(part["decoys"]["n"] for part in found["bins"]) == N_ROWS
    first = found["bins"][0]
    low, high = first["disagreement"]
    mine = spread < found["bins"][1]["disagreement"][0]
    assert low == spread.min()
    assert high == pytest.approx(np.quantile(spread, 0.2), abs=1e-6)
    assert first["n"] == mine.sum()
    assert first["mean_rmse"] == pytest.approx(error[mine].mean(), abs=1e-6)


def test_pictures_that_resemble_nothing_are_the_worst_of_each_victim(
    tmp_path: Path, images: ImageSet
) -> None:
    n_images = 6  # twelve pictures of a run, more than are kept of it
    store = planted_sweep(tmp_path / "store", images, planted=0, n_images=n_images)
    record = _score(store, images, tmp_path / "out")
    found = record["nothing"]
    assert (found["methods"], found["n"]) == (["plain"], 8)
    worst: list[Tensor] = []
    closest: list[int] = []
    for victim in range(2):
        raws = [_raw(store, run) for run in range(3 * victim, 3 * victim + 3)]
        pictures = torch.cat([fit_to_range(*raw) for raw in raws])
        best, image = ssim_matrix(pictures, _wanted(record, images, "targets", victim)).max(dim=1)
        order = best.argsort()[:4]
        worst += list(pictures[order])
        closest += (victim * n_images + image[order]).tolist()
    expected = (torch.stack(worst) * 255).round().to(torch.uint8).numpy()
    with np.load(tmp_path / "out" / "pictures.npz") as kept:
        shown, nearest = kept["nothing/plain"], kept["nothing/closest"]
    place = [int(np.flatnonzero((expected == x).all(axis=(1, 2, 3)))[0]) for x in shown]
    assert sorted(place) == [*range(8)]
    assert found["closest"] == [closest[k] for k in place]
    np.testing.assert_array_equal(nearest, images.images[found["closest"]])
    assert [run // 3 for run in found["run"]] == found["victim"]
    scores = ssim_pairs(*(torch.from_numpy(x).float() / 255 for x in (shown, nearest)))
    np.testing.assert_allclose(scores, found["ssim"], atol=5e-3)


class _KilledError(Exception):
    pass


def test_a_killed_sweep_resumes_with_the_same_result(
    tmp_path: Path, images: ImageSet, caplog: pytest.LogCaptureFixture
) -> None:
    store = planted_sweep(tmp_path / "store", images)

    def run(out: str, restorer: Blender, stop_at: int | None = None) -> dict[str, Any]:
        def on_progress(done: int, _total: int, _message: str, _share: float) -> None:
            if stop_at is not None and done >= stop_at:
                raise _KilledError

        how: dict[str, Any] = {"blenders": {"edm": restorer}, "on_progress": on_progress}
        record = scored(tmp_path / out, store, images, CONFIG, **how)
        return {key: value for key, value in record.items() if key != "seconds"}

    whole = run("whole", Blender())
    with pytest.raises(_KilledError):
        run("killed", Blender(), stop_at=1250)  # in the second victim's first run
    assert not (tmp_path / "killed" / "evaluation.json").exists()
    assert not caplog.messages
    rest = Blender()
    assert run("killed", rest) == whole
    (said,) = caplog.messages
    assert re.fullmatch(r"Evaluate: goes on, \d+ of \d+ steps are finished", said)
    assert rest.n_calls == 3 + 1  # the second victim's runs, and what resembles nothing
    contents = [(tmp_path / name / "pictures.npz").read_bytes() for name in ("whole", "killed")]
    assert contents[0] == contents[1]
    idle = Blender()
    assert run("killed", idle) == whole
    assert idle.n_calls == 0


def test_attacks_on_one_victim_have_its_images(tmp_path: Path, images: ImageSet) -> None:
    store = planted_sweep(tmp_path / "store", images)

    def change(body: dict[str, Any]) -> None:
        content = json.dumps(body["manifest"])
        body["manifest"] = json.loads(
            content.replace('"attacks_per_victim": 3', '"attacks_per_victim": 2')
        )

    reseal_store(tmp_path / "store", change)
    with pytest.raises(ValueError, match="runs 2 and 3 attack victim 1 but have different images"):
        _score(Dataset(store.root), images, tmp_path / "out")


def test_what_is_stopped_or_diverged_counts_as_nothing(tmp_path: Path, images: ImageSet) -> None:
    store = planted_sweep(tmp_path / "store", images, outcomes=(3, 2, 0), planted_in=2)
    record = _score(store, images, tmp_path / "out")
    assert _is_strict_json(tmp_path / "out")
    runs = record["runs"]
    assert runs["outcome"] == ["stopped", "nonfinite", "ok"] * 2
    assert runs["n_pictures"] == [0, 0, 4 * N_IMAGES] * 2
    assert runs["mean_ssim"] == pytest.approx([0.0, 0.0, 1.0] * 2, abs=0.01)
    assert runs["agreement"] == [None] * 6  # no other attack left a picture
    assert runs["consistency"][0] is None
    assert runs["consistency"][2] is not None
    assert record["dataset"]["n_runs_without_pictures"] == 4
    assert record["methods"]["plain"]["targets"]["run"] == [2] * N_IMAGES + [5] * N_IMAGES
    assert record["ranking"]["kkt_residual"]["n_runs"] == 2
    assert record["methods"]["plain"]["halves"]["targets"]["ssim"][1] == [0.0] * N_ROWS


def test_a_store_without_any_picture_is_evaluated(tmp_path: Path) -> None:
    record = evaluated_sweep(tmp_path, outcomes=(2, 3, 2))
    assert _is_strict_json(tmp_path / "out")
    control = record["methods"].pop("mean_image")
    assert min(control["targets"]["ssim"]) > 0
    for name, method in record["methods"].items():
        for side in ("targets", "decoys"):
            assert method[side]["ssim"] == method[side]["haarpsi"] == [0.0] * N_ROWS, name
            assert method[side]["rmse"] == [None] * N_ROWS
            assert method[side]["run"] == method[side]["iteration"] == [-1] * N_ROWS
        assert method["targets"]["summary"]["n_good"] == 0
    assert record["nothing"] == {"methods": ["plain"], "n": 0} | {c: [] for c in UNLIKE_COLUMNS}
    assert record["hallucination"]["edm_x3"] == {
        "n": 0, "spearman": None, "interval": None, "bins": [],
    }  # fmt: skip
    assert {found["n_runs"] for found in record["ranking"].values()} == {0}
    with np.load(tmp_path / "out" / "pictures.npz") as pictures:
        assert not pictures["targets/plain"].any()
        assert pictures["nothing/closest"].shape == (0, 3, 16, 16)


def test_victims_of_one_image_are_evaluated(tmp_path: Path) -> None:
    record = evaluated_sweep(tmp_path, n_images=1)
    assert _is_strict_json(tmp_path / "out")
    assert record["dataset"]["images_per_victim"] == [1]
    assert record["methods"]["plain"]["targets"]["ssim"] == [1.0, 1.0]
    assert record["methods"]["vote"]["targets"]["run"] == [-1, -1]
    assert len(record["decoys"]["image_id"]) == 2
    assert record["hallucination"]["edm_x3"]["n"] == 2
    assert record["hallucination"]["edm_x3"]["spearman"] is None
