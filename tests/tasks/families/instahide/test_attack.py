"""Encodings in, scored images out: what comes back, what is left open, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from recon_core.attacks.instahide.mixing import InstaHide, Mixing
from recon_core.attacks.instahide.recover import Status
from tasks.families.instahide.attack import (
    LEVELS,
    METHODS,
    NORMAL,
    InstaHideJob,
    prepare_challenge,
)
from tasks.families.instahide.results import (
    ambiguity,
    image_row,
    left_open,
    method_record,
    scored,
)
from tests.tasks.families.instahide.challenges import RING, TAIL, attacked, normal_challenge

TWO_SIDED = [[0, 1], [1, 2], [2, 3], [3, 0], [0, 1], [1, 2]]
K4 = [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]


@pytest.mark.parametrize("k_pub", [0, 2])
def test_every_image_comes_back_exactly(tmp_path: Path, k_pub: int) -> None:
    _job, prepared, (found,) = attacked(normal_challenge(tmp_path / "c", RING, k_pub=k_pub))
    record = method_record(found, prepared)
    assert record["by_status"] == {"recovered": 5}
    assert (record["n_exact"], record["n_false"], record["edges_right"]) == (5, 0, 1.0)
    assert record["ssim_mean"] > 0.999
    assert record["ambiguity"]["n_determined"] == 5
    assert record["ambiguity"]["log2_solutions"] == (0 if k_pub else 1)
    json.dumps(record, allow_nan=False)


def test_without_public_images_a_wrong_relative_sign_is_an_error(tmp_path: Path) -> None:
    _job, prepared, (one,) = attacked(normal_challenge(tmp_path / "c", RING, k_pub=0))
    images = one.found.images.clone()
    images[:, :9] *= -1  # a common sign of pixels is not known, and costs nothing
    again = replace(one, found=replace(one.found, images=images))
    assert scored(again, prepared).n_exact == 5
    images[2, 7] *= -1
    wrong = scored(again, prepared)
    assert (wrong.n_exact, wrong.n_false) == (4, 1)


def test_pixels_that_are_left_open_are_no_errors(tmp_path: Path) -> None:
    _job, prepared, (one,) = attacked(normal_challenge(tmp_path / "c", RING))
    images = one.found.images.clone()
    images[1, :5] = torch.nan
    again = scored(replace(one, found=replace(one.found, images=images)), prepared)
    assert again.n_exact == 5
    assert image_row(again, 1)["n_pixels_open"] == 5


@pytest.mark.parametrize(
    ("edges", "k_pub", "n", "by_status", "open"),
    [
        (TAIL, 2, 8, {"recovered": 5, "ambiguous": 2, "free": 1},
         {"n_determined": 5, "n_coloops": 2, "log2_solutions": 2, "n_free": 1, "n_unseen": 1}),
        (TWO_SIDED, 0, None, {"free": 4}, {"n_two_sided": 1, "n_determined": 0}),
        (TWO_SIDED, 2, None, {"free": 4}, {"n_two_sided": 1, "n_determined": 0}),
        ([*RING, *(np.array(RING) + 5).tolist()], 2, None, {"recovered": 10},
         {"sizes": [5, 5], "n_parts": 2, "n_two_sided": 0, "n_determined": 10}),
        (K4, 2, None, {"several graphs": 4}, {"n_equations": 0}),
    ],
    ids=["tail", "two-sided, no public", "two-sided", "two parts", "two graphs"],
)  # fmt: skip
def test_what_encodings_leave_open_is_a_result(
    edges: list, k_pub: int, n: int | None, by_status: dict, open: dict, tmp_path: Path
) -> None:
    path = normal_challenge(tmp_path / "c", edges, k_pub=k_pub)
    _job, prepared, (found,) = attacked(path, n_private=n)
    record = method_record(found, prepared)
    assert record["by_status"] == by_status
    assert (record["n_exact"], record["n_false"]) == (by_status.get("recovered", 0), 0)
    assert open.items() <= record["ambiguity"].items()
    assert record["n_graphs"] == (2 if "several graphs" in by_status else 1)
    assert len(left_open(record, k_pub)) > 1


def test_thousands_of_open_signs_are_counted() -> None:
    n = 1100
    edges = np.stack([np.zeros(n, np.int64), np.arange(1, n + 1)], 1)
    found = type("F", (), {})()
    found.edges, found.weights = edges, np.ones((n, 2))
    found.explained, found.status = np.ones(n, bool), [Status.FREE] * (n + 1)
    what = ambiguity(found, with_public=True)
    assert what["log2_solutions"] is None
    record = {"ambiguity": what, "n_images": n + 1, "n_encodings": n, "n_graphs": 1,
              "exact_graph": True}  # fmt: skip
    assert "more than 10^308 solutions" in " ".join(left_open(record, 2))


def test_overlaps_with_errors_ask_for_the_number_of_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recon_core.attacks.instahide import recover as core

    def mistaken(*words):
        common = core_common(*words)
        common[0, 1] = common[1, 0] = 0
        return common

    core_common = core.common_images
    monkeypatch.setattr(core, "common_images", mistaken)
    path = normal_challenge(tmp_path / "c", RING)
    facts = json.loads((path / "challenge.json").read_text())
    del facts["n_private"]
    (path / "challenge.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="with --n-private"):
        attacked(path)


def test_methods_are_an_entry_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_words):
        raise ValueError("not today")

    monkeypatch.setitem(METHODS, "practical", replace(METHODS["practical"], run=fails))
    path = normal_challenge(tmp_path / "c", RING)
    _job, _prepared, (exact, practical) = attacked(path, method="both")
    assert exact.n_exact == 5
    assert (practical.found, practical.failure) == (None, "not today")
    with pytest.raises(ValueError, match="not today"):
        attacked(path, method="practical")
    with pytest.raises(ValueError, match="none of auto, both, all, exact, practical, carlini"):
        attacked(path, method="magic")


def test_units_without_a_record_are_seen(tmp_path: Path) -> None:
    path = normal_challenge(tmp_path / "c", RING)
    bare = {"scheme": Mixing.by_parts(2), "n_private": 5}
    job = InstaHideJob(
        path=path / "encodings.npy", out=tmp_path, public=path / "public.npy", **bare
    )
    prepared = prepare_challenge(job)
    assert prepared.units == NORMAL
    assert prepared.methods == ("exact",)
    np.save(tmp_path / "levels.npy", np.clip(np.load(path / "public.npy"), -1, 1))
    prepared = prepare_challenge(replace(job, public=tmp_path / "levels.npy"))
    assert prepared.units == LEVELS
    assert prepared.methods == ("practical",)
    alone = normal_challenge(tmp_path / "alone", RING, k_pub=0) / "encodings.npy"
    job = InstaHideJob(path=alone, out=tmp_path, scheme=Mixing.by_parts(0))
    prepared = prepare_challenge(job)
    assert prepared.units == NORMAL
    assert prepared.methods == ("exact",)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"n_private": 10}, "9 encodings of n_private=10"),
        ({"n_private": 1}, "an encoding mixes 2"),
        ({"use_public": False}, "k_pub=2 public images, but none are given"),
        ({"scheme": InstaHide(), "method": "exact"}, "use --method practical"),
        ({"n_shown": 0}, "n_shown=0"),
        ({"public": Path("x"), "use_public": False}, "contradict"),
    ],
)
def test_attacks_that_make_no_sense(tmp_path: Path, settings: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        attacked(normal_challenge(tmp_path / "c", RING), **settings)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scheme": None}, "nothing says how the encodings were made"),
        ({"scheme": {"kind": "theory", "k_pub": -1}}, "k_pub"),
        ({"scheme": {"kind": "theory", "strange": 1}}, r"scheme\.theory\.strange"),
        ({"n_private": "five"}, "n_private='five'"),
        ({"pixels": {"kind": "odd"}}, r"pixels\.kind"),
        ({"pixels": {"kind": "levels", "n_levels": "x"}}, r"pixels\.n_levels"),
    ],
)
def test_records_that_make_no_sense(tmp_path: Path, changes: dict, said: str) -> None:
    path = normal_challenge(tmp_path / "c", RING)
    facts = json.loads((path / "challenge.json").read_text())
    (path / "challenge.json").write_text(json.dumps(facts | changes))
    with pytest.raises(ValueError, match=said):
        attacked(path)


def test_the_practical_attack_says_what_it_needs(tmp_path: Path) -> None:
    path = normal_challenge(tmp_path / "c", RING, k_pub=2)
    _job, _prepared, tried = attacked(path, method="all", use_public=False)
    assert ["public images" in one.failure for one in tried[:2]] == [True, True]
    assert "pictures from -1 to 1; these pixels are normal" in tried[2].failure
    job = InstaHideJob(path=path / "encodings.npy", out=tmp_path, scheme=InstaHide(k_pub=0),
                    method="practical")  # fmt: skip
    with pytest.raises(ValueError, match="with --n-private"):
        attacked(job.path, scheme=job.scheme, method="practical")
