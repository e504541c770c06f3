"""A challenge is what its secret says, the same twice, and tells nothing that it should not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from recon_core.attacks.instahide.mixing import InstaHide, Mixing
from storage.challenge import read_challenge
from tasks.families.instahide.encode import EncodeJob, encode

THEORY = Mixing.as_a_whole(2)


def job(out: Path, **settings) -> EncodeJob:
    own = {"data": "gaussian", "scheme": THEORY, "n_private": 4, "n_public": 6, "m": 12, "size": 8}
    return EncodeJob(out=out, **(own | settings))


def every_file(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def mixed(folder: Path) -> np.ndarray:
    """What the secret says that absolute values are."""
    found = read_challenge(folder)
    s = found.secret
    private, public = s["private"].astype(float), found.public.astype(float)
    return np.abs(
        np.einsum("mk,mkchw->mchw", s["weights"], private[s["edges"]])
        + np.einsum("mk,mkchw->mchw", s["public_weights"], public[s["public_ids"]])
    )


def test_same_seed_same_bytes_and_an_earlier_challenge_is_kept(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        encode(job(tmp_path / name, seed=seed))
    with pytest.raises(ValueError, match="not empty"):
        encode(job(tmp_path / "a", seed=1))
    a, b, c = (every_file(tmp_path / name) for name in "abc")
    assert a == b
    assert a["encodings.npy"] != c["encodings.npy"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"data": "photos"},
        {"data": "photos", "scheme": InstaHide(k_pub=3, n_epochs=4), "m": None},
    ],
    ids=["gaussian", "photographs", "instahide"],
)
def test_encodings_are_what_the_secret_says(tmp_path: Path, settings: dict) -> None:
    encode(job(tmp_path / "c", **settings))
    found = read_challenge(tmp_path / "c")
    np.testing.assert_allclose(np.abs(found.encodings), mixed(tmp_path / "c"), atol=1e-5)
    assert 0.4 < float((found.encodings > 0).mean()) < 0.6
    if "scheme" in settings:
        np.testing.assert_allclose(found.labels.sum(1), found.secret["weights"].sum(1), atol=1e-6)


def test_the_seed_is_only_in_the_secret(tmp_path: Path) -> None:
    encode(job(tmp_path / "c", seed=4711))
    published = {k: v for k, v in every_file(tmp_path / "c").items() if "secret" not in k}
    assert set(published) == {"encodings.npy", "public.npy", "challenge.json"}
    assert b"4711" not in published["challenge.json"]
    assert json.loads((tmp_path / "c/secret/secret.json").read_text())["seed"] == 4711


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"n_private": 1}, "an encoding mixes 2"),
        ({"n_public": 1}, "fewer than k_pub=2"),
        ({"m": None}, "--m"),
        ({"scheme": InstaHide(), "n_public": 9}, "set --epochs"),
        ({"data": "photos", "n_public": 10**6}, "lower one of them"),
    ],
)
def test_jobs_that_make_no_sense(tmp_path: Path, settings: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        encode(job(tmp_path / "c", **settings))
    assert list(tmp_path.iterdir()) == []


def test_more_images_than_memory_has_room_for_are_refused(tmp_path: Path) -> None:
    for changes in ({"m": 10**12}, {"m": 10, "size": 999_999}, {"m": 10, "n_private": 10**9}):
        with pytest.raises(ValueError, match="lower --size"):
            job(tmp_path, **changes)
