"""Units of a study of split classifiers: what they make, once, and the same however it is made."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flows.families.inversion.study import tiny
from recon_core.similarity import unit_ssim
from recon_core.victims.separability import MixCon, UniCon
from tasks.attack_file.networks import read_classifier
from tasks.families.inversion.study import units as inversion_units
from tasks.families.inversion.study.plan import InversionPlan
from tasks.families.inversion.study.record import (
    JUDGED,
    NUMBERS,
    describe_inversion,
    estimate,
    pictures_of,
    sweet_spots,
)
from tasks.families.inversion.study.settings import Cell, read_sources
from tasks.families.inversion.study.units import victim_of
from tests.tasks.families.inversion.inversions import Numbers, described, plan_of, run_all, small


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What is equal bit for bit is so on one thread, which is also faster for so little."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


Done = tuple[InversionPlan, list[str]]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A study that was run, and the names of its units."""
    study = small(chain=tiny().chain, accuracy_loss=0.99, n_seeds=3)
    plan = plan_of(study, tmp_path_factory.mktemp("study"))
    return plan, run_all(plan)


def test_images_of_a_source_are_balanced_and_in_one_set_only() -> None:
    study = small()
    images, (source,) = read_sources(study)["digits"], study.sources
    seen: set[bytes] = set()
    for name in ("train", "tests", "public"):
        part, n = getattr(images, name), getattr(source, f"n_{name}")
        assert part.images.shape == (n, 1, 16, 16)
        assert np.bincount(part.labels).tolist() == [n // 10] * 10
        hashes = {image.tobytes() for image in part.images}
        assert len(hashes) == n
        assert not hashes & seen
        seen |= hashes
    assert sorted(images.tests.first(10).labels) == list(range(10))  # of those inverted, too


def test_a_source_with_too_few_images_says_which() -> None:
    source = replace(small().sources[0], n_tests=2000, n_inverted=10)
    with pytest.raises(ValueError, match=r"n_tests takes 200 images of each class, but 'digits'"):
        read_sources(small(sources=(source,)))
    with pytest.raises(ValueError, match="has 10 classes, not n_classes=5"):
        read_sources(small(sources=(replace(small().sources[0], n_classes=5),)))


def test_victims_are_the_same_whatever_they_are_trained_with(tmp_path: Path) -> None:
    """Bit for bit, on one thread; so a study that is changed keeps what it has."""
    study = small(perceptual="vgg16:none.pth")
    together, alone = (plan_of(study, tmp_path / name) for name in ("together", "alone"))
    (job,) = [
        u.job for u in together.first_units() if u.name.startswith("train digits, cut 2, seed 0")
    ]
    assert len(job.victims) == 4
    job.run()
    replace(job, root=alone.root, victims=job.victims[2:]).run()
    replace(job, root=alone.root).run()  # makes what is lacking
    for victim in job.victims:
        one, other = (p.folder.product(victim.key) for p in (together, alone))
        assert one is not None
        assert other is not None
        assert one[0].keys() == other[0].keys()
        for name, array in one[0].items():
            assert np.array_equal(array, other[0][name]), (victim.name, name)


@pytest.mark.slow
def test_what_is_there_is_not_made_again(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, names = done
    assert len(names) == len(set(names))
    folder = Path(plan.root) / "products"
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    for work in ("train_split", "run_attack", "Fit"):
        monkeypatch.setattr(inversion_units, work, lambda *_a, **_k: pytest.fail("again"))
    assert run_all(plan_of(plan.study, Path(plan.root))) == names
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_another_setting_is_another_product() -> None:
    plan = plan_of(small(), Path("nowhere"))
    cell = Cell("digits", 2, MixCon(lam=1.0, beta=1e-2))
    victim = plan.victim(cell, 0)
    others = [
        plan.victim(cell, 1),
        plan.victim(replace(cell, cut=1), 0),
        plan.victim(replace(cell, defence=None), 0),
        plan.victim(replace(cell, defence=UniCon(lam=1.0)), 0),
        plan.victim(replace(cell, defence=MixCon(lam=1.0, beta=1e-2, eps=1e-4)), 0),
        replace(victim, data="other"),
        replace(victim, root_seed=1),
        replace(victim, source=replace(victim.source, training=replace(
            victim.source.training, lr=0.1))),
    ]  # fmt: skip
    assert len({v.key for v in [victim, *others]}) == len(others) + 1
    job = plan.inverting(victim)
    changed = [
        replace(job, zetas=(0.5,)),
        replace(job, rates=(0.5,)),
        replace(job, maps="vgg16:x"),
        replace(job, inverted=job.inverted.first(5)),
        replace(job, strong=replace(job.strong, n_steps=3)),
    ]
    assert len({j.key for j in [job, *changed]}) == len(changed) + 1
    renamed = replace(victim, source=replace(victim.source, title="other", n_inverted=20))
    assert renamed.key == victim.key


@pytest.mark.slow
def test_an_inversion_is_scored_against_the_images_that_were_sent(done: Done) -> None:
    plan, _names = done
    job = plan.inverting(plan.victim(Cell("digits", 2, None), 0))
    arrays, about = plan.folder.product(job.key) or ({}, {})
    x = torch.from_numpy(job.inverted.images).float() / 255
    for attack in ("paper", "tuned", "strong"):
        shown = torch.from_numpy(arrays[f"{attack}/picture"]).float() / 255
        assert np.allclose(arrays[f"{attack}/ssim"], unit_ssim(shown, x).numpy(), atol=0.01)
        others = torch.stack([unit_ssim(shown, x.roll(k, 0)) for k in range(1, 10)]).mean(0)
        assert np.allclose(arrays[f"{attack}/chance"], others.numpy(), atol=0.01)
    assert about["zeta"] in plan.study.zetas
    victim, errors = victim_of(plan.root, job.victim, "cpu"), {}
    public = torch.from_numpy(job.tuning.images).float() / 255
    for rate in plan.study.rates:
        attack = replace(job.victim.source.attack, lr=rate)
        found = attack.invert(victim.h, victim.sent(public), shape=(1, 16, 16))
        errors[rate] = float((found.x.double() - public.double()).square().mean())
    assert about["rate"] == min(errors, key=lambda rate: errors[rate])


def test_a_victim_that_diverged_sends_nothing_and_the_study_goes_on(tmp_path: Path) -> None:
    source = small().sources[0]
    wild = replace(source, training=replace(source.training, lr=1e6), cuts=(), unicon=None)
    plan = plan_of(small(sources=(wild,)), tmp_path)
    run_all(plan)
    record = describe_inversion(plan)
    json.dumps(record, allow_nan=False)
    assert record["attacks"] == []
    assert all(cell["diverged"] == len(cell["seeds"]) > 0 for cell in record["cells"])
    assert record["sweet_spots"] == []


def test_an_inversion_without_its_victim_says_so(tmp_path: Path) -> None:
    plan = plan_of(small(), tmp_path)
    with pytest.raises(ValueError, match="digits, cut 2, vanilla, seed 0 is not there"):
        plan.inverting(plan.victim(Cell("digits", 2, None), 0)).run()


@pytest.mark.parametrize(
    ("accuracies", "best"),
    [((0.9, 0.86, 0.84), 1), ((0.9, 0.86, 0.85), 2), ((0.9, 0.1, 0.1), 0)],
)
def test_sweet_spots_have_the_least_leakage_within_the_loss(
    accuracies: tuple[float, ...], best: int
) -> None:
    study = small(accuracy_loss=0.05, chain=tiny().chain)
    cells = [cell for cell in study.cells if study.sources[0].in_grid(cell)]

    def planted(cell: Cell, _seed: int) -> Numbers:
        k = cells.index(cell) if cell in cells else 0
        numbers = dict.fromkeys(NUMBERS, 1.0) | {"accuracy": accuracies[k]}
        return numbers, {attack: np.full(10, 0.8 - 0.1 * k) for attack in JUDGED}

    plan, record = described(study, planted)
    assert set(sweet_spots(plan).values()) == {cells[best]}
    assert record["sweet_spots"][0]["leakage"] == pytest.approx(0.8 - 0.1 * best)


@pytest.mark.slow
def test_sweet_spots_get_all_seeds_and_the_record_has_every_cell(done: Done) -> None:
    plan, names = done
    record = describe_inversion(plan)
    first = [c["name"] for c in record["cells"][:3]]
    assert first == ["vanilla", "mixcon 0.1 0.01", "mixcon 1 0.01"]
    spots = {spot["cell"] for spot in record["sweet_spots"]}
    assert len(record["sweet_spots"]) == 2
    for k, cell in enumerate(record["cells"]):
        in_grid_only = cell["name"] == "mixcon 0.1 0.01"
        assert len(cell["seeds"]) == (3 if k in spots or not in_grid_only else 1)
        for name, attack in cell["attacks"].items():
            assert name == "restored" or attack["n"] == 10 * len(cell["seeds"])
    with np.load(io.BytesIO(pictures_of(plan, record))) as arrays:
        assert arrays["digits/original"].shape == (3, 16, 16)
        assert arrays["0/strong"].shape == (3, 16, 16)
    assert sum(name.startswith("restore ") for name in names) >= 2
    assert set(record["cells"][0]["attacks"]) == {"paper", "tuned", "strong", "restored"}
    job = plan.restoring(Cell("digits", 2, None), 0)  # learns from public images alone
    assert len(job.public.images) == 40 - plan.study.n_tuning
    inverted = {image.tobytes() for image in job.inverting.inverted.images}
    assert not inverted & {image.tobytes() for image in job.public.images}


@pytest.mark.slow
def test_the_victims_that_are_kept_are_what_the_study_had(done: Done) -> None:
    """They say themselves what they are, and `attack inversion` reads the same features."""
    plan, _names = done
    cells = [Cell("digits", 2, None), Cell("digits", 1, MixCon(lam=1.0, beta=1e-2))]
    files = plan.write_victims([*cells, Cell("digits", 1, UniCon(lam=9.0))])
    assert [f.name for f in files] == [
        "digits-cut2-vanilla.safetensors", "digits-cut1-mixcon-1-0.01.safetensors"]  # fmt: skip
    x = torch.rand(3, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    for file, cell in zip(files, cells, strict=True):
        network = read_classifier(file, None)
        found = (network.shape, network.n_classes, network.cut)
        assert found == ((1, 16, 16), 10, f"conv{cell.cut}")
        logits = network.on((1, 16, 16), "cpu")(x)
        victim = victim_of(plan.root, plan.victim(cell, 0), "cpu")
        ours = victim.model.classify(victim.weights, victim.sent(x)[None])[0]
        assert torch.allclose(logits, ours, atol=1e-5)


def test_an_estimate_is_a_t_interval() -> None:
    """Of 1, 2, 3: 2 +- 4.30265 / sqrt(3)."""
    found = estimate([1.0, 2.0, 3.0])
    assert found["mean"] == 2
    assert found["high"] == pytest.approx(2 + 4.30265 / 3**0.5, abs=1e-4)
    assert found["low"] == pytest.approx(2 - 4.30265 / 3**0.5, abs=1e-4)
    assert estimate([1.5]) == {"mean": 1.5, "low": None, "high": None, "values": [1.5]}
    assert estimate([])["mean"] is None
    assert estimate([1.0, float("nan")]) == {
        "mean": None, "low": None, "high": None, "values": [1.0, None]}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_train": 205}, "n_train=205 is not a multiple of its 10 classes"),
        ({"n_inverted": 200}, "n_inverted=200 of n_tests=100"),
        ({"n_train": 50}, "fewer of a class than training.per_class=10"),
        ({"cuts": (1, 7)}, r"LeNet5 has cuts 1 to 4, not \[7\]"),
        ({"lams": (1.0, 1.0)}, "names a value twice"),
        ({"name": "a b"}, "must be letters, digits"),
        ({"betas": (-1.0,)}, "beta=-1.0 must be"),
        ({"n_public": 10}, "leaves none beside n_tuning=10"),
    ],
)
def test_settings_that_make_no_study_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(sources=(replace(small().sources[0], **changes),), chain=tiny().chain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": ()}, "leaves nothing to study"),
        ({"n_grid_seeds": 5}, "n_grid_seeds=5 exceeds n_seeds=2"),
        ({"zetas": ()}, r"zetas=\(\)"),
        ({"perceptual": "lpips"}, "expected own or vgg16:PATH"),
    ],
)
def test_studies_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**changes)
