"""Attacks on given weights: what they start from, resuming, ranking, scoring, and the pictures."""

from __future__ import annotations

import io
import json
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from PIL import Image

from recon_core.attacks.kkt.objective import KKTAttack, Search
from recon_core.attacks.kkt.solver import Solver
from recon_core.matching import fit_to_range
from recon_core.metrics import ssim_matrix
from recon_core.optimisers import Optimiser
from storage.errors import SourceError, StoreMismatchError
from storage.weights import WeightsError
from tasks.families.weights import attack as attack_module
from tasks.families.weights import results as attack_results
from tasks.families.weights.attack import WeightsJob, read_attack, run_attacks
from tasks.families.weights.inputs import read_victim
from tasks.families.weights.preflight import (
    PreparedWeights,
    prepare_weights,
    read_mean,
    read_pictures,
)
from tasks.families.weights.results import (
    Results,
    gather,
    scores_record,
    to_pictures,
    weights_sheet,
    write_reconstructions,
)
from tests.tasks.families.weights.attack_victims import (
    N_IMAGES,
    SIDE,
    VictimFiles,
    attacked,
    make_victim,
    pictures,
    write_pictures,
)

SHAPE = (3, SIDE, SIDE)
STATE_ITERATIONS = 20
Done = tuple[WeightsJob, PreparedWeights, Results]
ATTACK = KKTAttack(
    n_candidates=2 * N_IMAGES,
    save_at=(100, 200),
    search=Search(lr=None, sigma=(1e-4, 1e-2), lam_min=(0.1, 0.6), alpha=(10.0, 60.0)),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> VictimFiles:
    return make_victim(tmp_path_factory.mktemp("victim"))


def job_of(files: VictimFiles, out: Path, **changes: object) -> WeightsJob:
    job = WeightsJob(
        weights=files.torch_file, out=out, attack=ATTACK, n_attacks=3,
        data=f"folder:{files.images}", decoys=f"folder:{files.decoys}",
    )  # fmt: skip
    return replace(job, **changes)  # type: ignore[arg-type]


run = partial(run_attacks, device="cpu", on_progress=lambda _done, _total: None)


@pytest.fixture(scope="module")
def done(files: VictimFiles, tmp_path_factory: pytest.TempPathFactory) -> Done:
    job = job_of(files, tmp_path_factory.mktemp("out"))
    return job, *attacked(job)


def test_both_formats_are_the_same_victim(files: VictimFiles) -> None:
    for path in (files.torch_file, files.safetensors_file):
        victim = read_victim(path)
        assert victim.layers.architecture == "mlp:432-32-32-1"
        assert victim.architecture.shape == SHAPE
        for w, expected in zip(victim.parameters.weights, files.parameters.weights, strict=True):
            assert torch.equal(w, expected)
    named = read_victim(
        files.torch_file, arch="mlp:432-32-32-1", shape=SHAPE, activation="leaky_relu", leak=0.2,
        dtype="float64",
    )  # fmt: skip
    assert named.parameters.weights[0].dtype == torch.float64
    assert named.facts["leak"] == 0.2
    with pytest.raises(WeightsError, match=r"--arch says mlp:432-64-1 .* make mlp:432-32-32-1"):
        read_victim(files.torch_file, arch="mlp:432-64-1")
    with pytest.raises(ValueError, match="not of the form"):
        read_victim(files.torch_file, arch="432")


def test_pictures_of_a_folder_are_all_of_its_pictures(tmp_path: Path) -> None:
    images = pictures(4, 3)
    write_pictures(tmp_path / "deep", images, classes=("x/inner", "y"))
    found = read_pictures(f"folder:{tmp_path / 'deep'}", SHAPE)
    assert found.class_names == ("x", "y")
    torch.testing.assert_close(found.images, images[[0, 2, 1, 3]])
    assert found.labels == (0, 0, 1, 1)
    grey = read_pictures(f"folder:{tmp_path / 'deep'}", (1, SIDE, SIDE))
    assert grey.images.shape == (4, 1, SIDE, SIDE)
    assert float(grey.images[0].mean()) == pytest.approx(
        float((images[0].mean((1, 2)) * torch.tensor([0.299, 0.587, 0.114])).sum()), abs=1e-6
    )
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.png").write_bytes(b"no picture")
    for source, said in (
        ("floder:x", "unknown image source"),
        (f"folder:{tmp_path / 'empty'}", "no pictures"),
        (f"folder:{tmp_path / 'bad'}", r"x\.png cannot be read"),
        (f"folder:{tmp_path / 'absent'}", "is not a folder"),
    ):
        with pytest.raises(SourceError, match=said):
            read_pictures(source, SHAPE)
    with pytest.raises(ValueError, match="4x12x12"):
        read_pictures(f"folder:{tmp_path / 'deep'}", (4, SIDE, SIDE))


def test_every_way_to_give_the_mean(tmp_path: Path) -> None:
    image = pictures(1, 7)[0]
    arrays = {"chw": image, "hwc": image.permute(1, 2, 0), "flat": image.flatten()}
    arrays |= {"wrong": torch.zeros(3, 4, 4), "bytes": torch.full(SHAPE, 128.0)}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array.numpy())
    pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(tmp_path / "mean.png")
    Image.new("RGB", (SHAPE[2] + 1, SHAPE[1])).save(tmp_path / "larger.png")
    (tmp_path / "text.npy").write_bytes(b"text")
    for name in ("chw.npy", "hwc.npy", "flat.npy", "mean.png"):
        torch.testing.assert_close(read_mean(str(tmp_path / name), SHAPE), image, atol=1e-6, rtol=0)
    three = read_mean("0.1,0.2,0.3", SHAPE)
    assert three[:, 5, 5].tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert not read_mean("none", SHAPE).any()
    for name, error, said in (
        ("0.1,0.2", ValueError, "2 numbers for 3 channels"),
        ("wrong.npy", ValueError, r"has shape \(3, 4, 4\)"),
        ("bytes.npy", ValueError, r"outside \[0, 1\]"),
        ("larger.png", ValueError, "another size"),
        ("absent.png", SourceError, "cannot be read"),
        ("absent.npy", SourceError, "--mean"),
        ("text.npy", SourceError, "cannot be read|can be read"),
    ):
        with pytest.raises(error, match=said):
            read_mean(name if "," in name else str(tmp_path / name), SHAPE)


def test_preparation_finds_labels_whichever_way_round(files: VictimFiles, tmp_path: Path) -> None:
    prepared = prepare_weights(job_of(files, tmp_path))
    assert prepared.preflight.outlook == "good"
    assert prepared.preflight.numbers["train_accuracy"] == 1
    assert prepared.labels == "labels: a against b"
    assert prepared.record()["verdict"] == "An attack can work."
    write_pictures(tmp_path / "turned", pictures(N_IMAGES, 0), classes=("z", "y"))
    turned = prepare_weights(job_of(files, tmp_path, data=f"folder:{tmp_path / 'turned'}"))
    assert turned.preflight.numbers == pytest.approx(prepared.preflight.numbers)
    write_pictures(tmp_path / "one", pictures(N_IMAGES, 0), classes=("all",))
    unknown = prepare_weights(job_of(files, tmp_path, data=f"folder:{tmp_path / 'one'}"))
    assert "network's own answers" in unknown.labels
    assert unknown.preflight.numbers == pytest.approx(prepared.preflight.numbers)
    blind = prepare_weights(job_of(files, tmp_path, data=None, decoys=None))
    assert (blind.mean, blind.truth, blind.mean_source) == (None, None, "unknown")


def test_divided_inputs_are_asked_about_seen_and_turned_back(
    files: VictimFiles, tmp_path: Path
) -> None:
    """A first layer made of the images divided by a deviation per channel, as of gradient descent:
    preflight says the ratio, and with --std candidates are drawn as the images were."""

    def asked(job: WeightsJob) -> list[tuple[str, str]]:
        findings = prepare_weights(job).preflight.findings
        return [(f.level, f.text) for f in findings if f.subject == "scale of the channels"]

    [(level, text)] = asked(job_of(files, tmp_path, data=None, decoys=None))
    assert (level, "give --std" in text) == ("ok", True)
    assert asked(job_of(files, tmp_path, data=None, decoys=None, std=(0.2, 0.2, 0.3))) == []
    [(level, text)] = asked(job_of(files, tmp_path))
    assert (level, "as is assumed" in text) == ("ok", True)
    std = torch.tensor([0.1, 0.25, 0.6])
    inputs = ((pictures(N_IMAGES, 0) - files.mean) / std[:, None, None]).flatten(1)
    later = files.parameters.weights[1:]
    made = torch.randn(32, N_IMAGES, generator=torch.Generator().manual_seed(0)) @ inputs
    state = files.architecture.to_state_dict(
        replace(files.parameters, weights=(made[None], *later))
    )
    torch.save(state, tmp_path / "divided.pt")
    job = job_of(files, tmp_path / "out", weights=tmp_path / "divided.pt", n_attacks=1)
    [(level, text)] = asked(job)
    assert (level, "0.41 : 1.01 : 2.43" in text, "--std" in text) == ("warning", True, True)
    [(level, text)] = asked(replace(job, std=(0.1, 0.25, 0.6)))
    assert (level, "as is said" in text) == ("ok", True)
    raw = attacked(job)[1].ranked
    drawn = attacked(replace(job, std=(0.1, 0.25, 0.6)))[1].ranked[0]  # the same attack
    assert any(torch.allclose(drawn.x, r.x * std[:, None, None]) for r in raw)
    for numbers, said in [((0.2, 0.2), "--std has 2 numbers for 3"), ((0.0,), "positive")]:
        with pytest.raises(ValueError, match=said):
            prepare_weights(job_of(files, tmp_path, std=numbers))


def test_decoys_must_be_others_and_need_images(files: VictimFiles, tmp_path: Path) -> None:
    for changes, said in (
        ({"decoys": f"folder:{files.images}"}, "6 of 6 decoys"),
        ({"data": None}, "give --data"),
        ({"attack": replace(ATTACK, condition="multiclass")}, "multiclass"),
    ):
        with pytest.raises(ValueError, match=said):
            prepare_weights(job_of(files, tmp_path, **changes))


def test_the_images_come_back_and_decoys_do_not(done: Done) -> None:
    _job, prepared, results = done
    assert results.truth is not None
    assert results.decoys is not None
    assert results.truth.n_good >= N_IMAGES - 1
    assert results.decoys.n_good <= 1
    assert results.truth.ssim.mean() > results.decoys.ssim.mean() + 0.3
    assert sorted(results.truth.by_attack) == [0, 1, 2]
    assert max(results.truth.by_attack.values()) <= results.truth.n_good
    first = results.ranked[:N_IMAGES]
    assert [r.n_attacks for r in first] == sorted((r.n_attacks for r in first), reverse=True)
    assert first[0].n_attacks == 3
    good = {r.nearest_image for r in first if r.ssim is not None and r.ssim > 0.4}
    assert len(good) >= N_IMAGES // 2
    record = scores_record(results, prepared.truth, prepared.decoys)
    json.dumps(record, allow_nan=False)
    assert record["scores"]["images"]["n_good"] == results.truth.n_good
    assert record["ranking"]["n_agreed"] <= record["ranking"]["n_pictures"] == results.n_pictures


def test_scores_are_those_of_the_candidates_they_name(done: Done) -> None:
    job, prepared, results = done
    assert prepared.truth is not None
    assert prepared.mean is not None
    assert results.truth is not None
    found = zip(results.truth.attack.tolist(), results.truth.candidate.tolist(), strict=True)
    for row, (attack, candidate) in enumerate(found):
        x = read_attack(job.out / "cache", attack)[1]["x"][-1, candidate].view(1, *SHAPE)
        picture = fit_to_range(x, prepared.mean)
        torch.testing.assert_close(picture[0], results.truth.picture[row])
        score = ssim_matrix(picture, prepared.truth.images[row : row + 1])
        assert float(score) == pytest.approx(float(results.truth.ssim[row]), abs=1e-6)
    every = torch.cat([read_attack(job.out / "cache", n)[1]["x"][-1] for n in range(job.n_attacks)])
    scores = ssim_matrix(to_pictures(every.view(-1, *SHAPE), prepared.mean), prepared.truth.images)
    torch.testing.assert_close(results.truth.ssim, scores.amax(0))
    ranked = results.ranked[0]
    x = read_attack(job.out / "cache", ranked.attack)[1]["x"][-1, ranked.candidate].view(SHAPE)
    assert torch.equal(x, ranked.x)
    assert ranked.label == (-1 if ranked.candidate < N_IMAGES else 1)


def test_a_prefilter_by_correlation_finds_the_same_matches(
    done: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, prepared, results = done
    monkeypatch.setattr(attack_results, "MAX_PAIRS", 0)
    monkeypatch.setattr(attack_results, "N_NEAREST", 5)
    again = gather(job, run(job, prepared.victim), prepared)
    assert (again.exhaustive, results.exhaustive) == (False, True)
    assert again.truth is not None
    assert results.truth is not None
    torch.testing.assert_close(again.truth.ssim, results.truth.ssim)
    assert "nearest by correlation" in scores_record(again, None, None)["conventions"]["match"]


def test_an_interrupted_attack_ends_bit_for_bit_as_one_that_was_not(
    files: VictimFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = job_of(files, tmp_path / "whole"), job_of(files, tmp_path / "broken")
    victim = prepare_weights(whole).victim
    monkeypatch.setattr(attack_module, "STATE_EVERY", STATE_ITERATIONS)
    monkeypatch.setattr(attack_module, "SAVE_SECONDS", 0.0)
    run(whole, victim)
    monkeypatch.setattr(attack_module, "POLL_SECONDS", 0.01)
    plain, runners = attack_module.reconstruct, []
    held = threading.Event()
    n_before_stop = 3
    resumed: list[int] = []

    class Known(attack_module._Runner):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            runners.append(self)

    def slow(*given: Any, on_state: Any, **settings: Any) -> Any:
        """Comes to its third state only when the attack is being stopped."""
        n_states = 0
        resumed.append(0 if settings["state"] is None else int(settings["state"]["iteration"]))

        def stopped_at(solver: Solver) -> None:
            nonlocal n_states
            n_states += 1
            if n_states == n_before_stop:
                held.set()
                assert runners[-1].stop.wait(60)
            on_state(solver)

        return plain(*given, on_state=stopped_at, **settings)

    def interrupt(_done: float, _total: float) -> None:
        if held.is_set():
            raise KeyboardInterrupt

    monkeypatch.setattr(attack_module, "_Runner", Known)
    monkeypatch.setattr(attack_module, "reconstruct", slow)
    for _time in range(3):
        held.clear()
        with pytest.raises(KeyboardInterrupt):
            run(broken, victim, on_progress=interrupt)
        assert list((broken.out / "cache").glob("running*.json"))
    assert max(resumed) > STATE_ITERATIONS
    n_before_stop = 0  # never
    seen: list[float] = []
    runs = run(broken, victim, on_progress=lambda done, _total: seen.append(done))
    assert seen == sorted(seen)
    assert seen[-1] == len(runs)
    assert [one.number for one in runs] == [0, 1, 2]
    for number in range(3):
        first, again = (read_attack(j.out / "cache", number)[1] for j in (whole, broken))
        assert all(torch.equal(first[name], again[name]) for name in ("x", "lam"))
    assert not list((broken.out / "cache").glob("running*"))


def test_one_attack_alone_is_the_first_of_many_and_more_can_be_added(
    files: VictimFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several attacks take one thread each, a single one all there are
    try:
        one = job_of(files, tmp_path, n_attacks=1)
        victim = prepare_weights(one).victim
        run(one, victim)
    finally:
        torch.set_num_threads(torch_threads)
    first = read_attack(tmp_path / "cache", 0)[1]["x"]
    stamp = (tmp_path / "cache" / "attack_0000.json").stat().st_mtime_ns
    runs = run(replace(one, n_attacks=2), victim)
    assert (tmp_path / "cache" / "attack_0000.json").stat().st_mtime_ns == stamp
    assert torch.equal(read_attack(tmp_path / "cache", 0)[1]["x"], first)
    assert runs[0].settings != runs[1].settings
    assert all(one.ending == "ok" and one.residual is not None for one in runs)


def test_other_settings_are_not_mixed_in(files: VictimFiles, done: Done) -> None:
    job, prepared, _results = done
    for changes, said in (
        ({"seed": 1}, "seed is 0 there, 1 here"),
        ({"attack": replace(ATTACK, lam_scale="none")}, "attack.lam_scale"),
        ({"weights": files.safetensors_file}, "weights is"),
    ):
        other = replace(job, **changes)  # type: ignore[arg-type]
        victim = prepare_weights(other).victim
        with pytest.raises(StoreMismatchError, match=said):
            run(other, victim)
    shown = replace(job, n_shown=3, data=None, decoys=None)
    assert len(run(shown, prepared.victim)) == 3


def test_a_single_attack_is_ranked_by_consistency(files: VictimFiles, tmp_path: Path) -> None:
    job = job_of(files, tmp_path, n_attacks=1, data=None, decoys=None)
    _prepared, results = attacked(job)
    values = [r.agreement for r in results.ranked]
    assert values == sorted(values, reverse=True)
    assert (results.n_ranked_attacks, results.truth, results.decoys) == (1, None, None)
    assert len(weights_sheet(results)) > 1000


def test_attacks_that_left_nothing_are_said_and_counted(files: VictimFiles, tmp_path: Path) -> None:
    wild = Optimiser(rule="gd", lr=1e12, momentum=0.9)
    attack = replace(ATTACK, optimiser=wild, search=None)
    job = job_of(files, tmp_path, attack=attack, n_attacks=2)
    prepared, results = attacked(job)
    runs = run(job, prepared.victim)
    assert {one.ending for one in runs} == {"diverged"}
    assert runs[0].residual is None or np.isfinite(runs[0].residual)
    assert results.ranked == ()
    assert results.truth is not None
    assert results.truth.n_good == 0
    assert float(results.truth.ssim.max()) == -1
    json.dumps(scores_record(results, prepared.truth, prepared.decoys), allow_nan=False)
    assert len(weights_sheet(results, prepared.truth, prepared.decoys)) > 1000
    stopped = replace(attack, optimiser=Optimiser(), stop_above=1e-9, stop_after=1)
    runs = run(job_of(files, tmp_path / "s", attack=stopped, n_attacks=1), prepared.victim)
    assert runs[0].ending == "stopped"
    assert runs[0].n_iterations < ATTACK.n_iterations


def test_several_outputs_and_regression_run_through(files: VictimFiles, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {
        "a.weight": torch.randn(20, 432, generator=generator) * 0.1,
        "a.bias": torch.randn(20, generator=generator) * 0.1,
        "b.weight": torch.randn(3, 20, generator=generator),
    }
    safetensors.torch.save_file(state, tmp_path / "three.safetensors")
    write_pictures(tmp_path / "images", pictures(N_IMAGES, 0), classes=("x", "y", "z"))
    job = job_of(
        files, tmp_path / "out", weights=tmp_path / "three.safetensors",
        attack=replace(ATTACK, condition="multiclass", save_at=(5,)), n_attacks=2,
        data=f"folder:{tmp_path / 'images'}", decoys=None,
    )  # fmt: skip
    prepared, results = attacked(job)
    assert prepared.victim.layers.bias == "first"
    assert prepared.labels == "labels: the class folders in sorted order"
    assert {r.label for r in results.ranked} == {0, 1, 2}
    two_classes = prepare_weights(replace(job, data=f"folder:{files.images}"))
    assert "2 class folders for 3 outputs" in two_classes.labels
    free = job_of(
        files, tmp_path / "free", n_attacks=1,
        attack=replace(ATTACK, condition="regression", save_at=(5,)),
    )  # fmt: skip
    _prepared, results = attacked(free)
    assert {r.label for r in results.ranked} == {None}


def test_pictures_without_a_known_mean(files: VictimFiles) -> None:
    x = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    unknown, none = to_pictures(x, None), to_pictures(x, torch.zeros(SHAPE))
    assert all(float(found.min()) >= 0 and float(found.max()) <= 1 for found in (unknown, none))
    assert (float(none[0].min()), float(none[0].max())) == (0, 1)
    decides = x[0].abs().flatten().sort(descending=True).values[4]  # four of 432 are clipped
    torch.testing.assert_close(unknown[0] - 0.5, (x[0] * (0.5 / decides)).clamp(-0.5, 0.5))


def test_the_sheet_and_the_arrays_are_of_the_ranked_pictures(done: Done, tmp_path: Path) -> None:
    _job, prepared, results = done
    sheet = weights_sheet(results, prepared.truth, prepared.decoys)
    with Image.open(io.BytesIO(sheet)) as image:
        assert image.format == "PNG"
        assert image.width > 800
    write_reconstructions(tmp_path / "r.safetensors", results)
    arrays = safetensors.numpy.load_file(tmp_path / "r.safetensors")
    n = len(results.ranked)
    assert arrays["x"].shape == arrays["picture"].shape == (n, *SHAPE)
    assert arrays["best/picture"].shape == (N_IMAGES, *SHAPE)
    np.testing.assert_array_equal(arrays["attack"], [r.attack for r in results.ranked])
