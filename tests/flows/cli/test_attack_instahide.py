"""`palimpsest instahide encode` and `palimpsest attack instahide`: from images to a page, and how
they are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flows.cli.attack_file import ENTRIES
from tasks.families.instahide.attack import METHODS
from tests.tasks.families.instahide.challenges import RING, normal_challenge
from tests.tasks.pages import FIRST_SCREEN, Page


@pytest.fixture(scope="module")
def challenge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return normal_challenge(tmp_path_factory.mktemp("challenge") / "c", RING)


def test_from_encodings_to_a_page(palimpsest, tmp_path: Path, prefect_server) -> None:
    made, out = tmp_path / "made", tmp_path / "out"
    shown = palimpsest.done(
        "instahide", "encode", "--data", "gaussian", "--scheme", "theory", "--k-pub", 2, "--m", 60,
        "--n-private", 8, "--n-public", 30, "--normalisation", "parts", "--out", made,
    )  # fmt: skip
    assert "60 encodings of 8 private and 30 public images" in " ".join(shown.split())
    words = ["attack", "instahide", made, "--out", out, "--threads", 1, "--device", "cpu"]
    shown = palimpsest.done(*words)
    assert "8 of 8 private images are recovered" in " ".join(shown.split())
    assert {entry.name for entry in out.iterdir()} < {*ENTRIES, "images", "images.npy"}
    record = json.loads((out / "instahide.json").read_bytes())
    (method,) = record["methods"]
    assert (method["method"], method["n_exact"], method["n_false"]) == ("exact", 8, 0)
    page = Page(out / "report.html")
    page.check()
    assert page.n_first_words < FIRST_SCREEN
    before = (out / "images.npy").read_bytes()
    palimpsest.done(*words, "--fresh")
    assert (out / "images.npy").read_bytes() == before


def test_an_array_without_a_record(
    palimpsest, tmp_path: Path, challenge: Path, prefect_server
) -> None:
    words = ["attack", "instahide", challenge / "encodings.npy", "--scheme", "theory", "--k-pub", 2,
             "--wa", 2**-0.5, "--wb", 2**-0.5, "--public", challenge / "public.npy",
             "--out", tmp_path / "out", "--device", "cpu"]  # fmt: skip
    shown = palimpsest.done(*words)
    assert "5 of 5 private images are recovered" in " ".join(shown.split())
    assert "originals" not in shown
    shown = palimpsest.done(*words, "--truth", challenge / "secret", "--n-private", 5)
    assert "5 are the originals" in " ".join(shown.split())


@pytest.mark.slow
def test_public_images_need_not_be_known(palimpsest, tmp_path: Path, prefect_server) -> None:
    network, made, out = tmp_path / "s.st", tmp_path / "c", tmp_path / "out"
    shown = palimpsest.done(
        "instahide", "similarity", "--steps", 2, "--size", 16, "--k-pub", 2, "--out", network,
        "--device", "cpu",
    )  # fmt: skip
    assert "Trained for 2 steps" in " ".join(shown.split())
    palimpsest.done(
        "instahide", "encode", "--n-private", 6, "--n-public", 10, "--k-pub", 2, "--epochs", 12,
        "--size", 16, "--out", made,
    )  # fmt: skip
    words = ["attack", "instahide", made, "--no-public", "--out", out, "--device", "cpu"]
    err = palimpsest.refused(*words)
    assert "--similarity a network" in " ".join(err.split())
    err = palimpsest.refused(*words, "--similarity", made / "encodings.npy")
    assert "is no similarity network" in " ".join(err.split())
    assert not out.exists()
    palimpsest.done(*words, "--similarity", network)
    record = json.loads((out / "instahide.json").read_bytes())
    (method,) = record["methods"]
    assert method["method"] == "carlini"
    assert method["by_status"] == {"estimated": 6}
    Page(out / "report.html").check()
    err = palimpsest.refused("instahide", "similarity", "--out", tmp_path)
    assert "give --out a file" in " ".join(err.split())


def test_pictures_of_encodings(palimpsest, tmp_path: Path, prefect_server) -> None:
    """Absolute values, scaled to fit, rounded to grey levels: an error that --noise allows for."""
    c = normal_challenge(tmp_path / "c", RING)
    y = np.abs(np.load(c / "encodings.npy")) / 8
    (tmp_path / "pngs").mkdir()
    for k, one in enumerate(y):
        levels = (one.clip(0, 1) * 255).round().astype(np.uint8).transpose(1, 2, 0)
        Image.fromarray(levels).save(tmp_path / "pngs" / f"{k}.png")
    words = ["attack", "instahide", tmp_path / "pngs", "--scheme", "theory", "--k-pub", 2,
             "--wa", 2**-0.5 / 8, "--wb", 2**-0.5 / 8, "--noise", 0.002,
             "--out", tmp_path / "out", "--device", "cpu"]  # fmt: skip
    err = palimpsest.refused(*words)
    assert "none are given: give --public" in " ".join(err.split())
    more = ("--public", c / "public.npy", "--truth", c / "secret")
    shown = palimpsest.done(*words, *more)
    assert "5 of 5 private images are recovered" in " ".join(shown.split())
    record = json.loads((tmp_path / "out" / "instahide.json").read_bytes())
    assert max(image["worst_error"] for image in record["methods"][0]["images"]) < 0.1
    Image.new("RGB", (9, 9)).save(tmp_path / "pngs" / "z.png")
    err = palimpsest.refused(*words[:-4], "--out", tmp_path / "other", *more)
    assert "must be of one size" in " ".join(err.split())
    assert not (tmp_path / "other").exists()


ATTACK, ENCODE = ("attack", "instahide"), ("instahide", "encode")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*ATTACK, "C", "--n-private", 30], "n_private=30"),
        ([*ATTACK, "C", "--no-public"], "none are given"),
        ([*ATTACK, "C", "--public", "flat.npy"], "expected (n, c, h, w)"),
        ([*ATTACK, "C", "--public", "nan.npy"], "not finite"),
        ([*ATTACK, "C", "--method", "magic"], "none of auto, both, all, exact"),
        (
            [*ATTACK, "C", "--method", "sdp", "--public", "many.npy"],
            "41 public images are too many for the semidefinite program",
        ),
        ([*ATTACK, "C", "--k-pub", 3], "--k-pub needs --scheme"),
        ([*ATTACK, "C", "--scheme", "instahide", "--wa", 1], "--wa is of --scheme theory"),
        ([*ATTACK, "C", "--scheme", "theory", "--largest", 1], "--largest is of --scheme"),
        ([*ATTACK, "bad.npy"], "without pickle"),
        ([*ATTACK, "absent"], "is not there"),
        ([*ATTACK, "C/encodings.npy"], "give --scheme and --k-pub"),
        ([*ENCODE, "--scheme", "theory"], "--m"),
        ([*ENCODE, "--noise", 0.1], "--noise is of --scheme theory"),
        ([*ENCODE, "--scheme", "theory", "--m", 9, "--epochs", 2], "--epochs is of"),
    ],
)
def test_refusals_leave_nothing_behind(
    words: list, said: str, palimpsest, tmp_path: Path, challenge: Path, prefect_server, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("bad.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.save("nan.npy", np.full((9, 3, 8, 8), np.nan, np.float32))
    np.save("flat.npy", np.zeros((9, 48), np.float32))
    np.save("many.npy", np.zeros((41, *np.load(challenge / "public.npy").shape[1:]), np.float32))
    (tmp_path / "C").symlink_to(challenge)
    code, _shown, err = palimpsest(*words, "--out", tmp_path / "out")
    assert code == 2, err
    assert said in " ".join(err.split())
    assert not (tmp_path / "out").exists()


def test_nothing_from_any_method_is_a_failure(
    palimpsest, tmp_path: Path, challenge: Path, prefect_server, monkeypatch
) -> None:
    def fails(*_words: object) -> None:
        raise ValueError("nothing there")

    out = tmp_path / "out"
    palimpsest.done("attack", "instahide", challenge, "--out", out)
    for name in METHODS:
        monkeypatch.setitem(METHODS, name, replace(METHODS[name], run=fails))
    code, shown, _err = palimpsest("attack", "instahide", challenge, "--out", out, "--method",
                                   "both")  # fmt: skip
    assert code == 1
    assert "No method gave anything: nothing there" in " ".join(shown.split())
    Page(out / "report.html").check()
    assert not (out / "images.npy").exists()
