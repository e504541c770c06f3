"""`palimpsest restore`: what a user types, reads and gets; exit codes; errors in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from flows.cli.restore import BLURRED
from storage.pairs.dataset import Dataset
from tests.recon_core.tiles import photograph_tiles
from tests.storage import stores
from tests.tasks.restoring.restorers import (
    SIZE,
    TINY_BF_DNCNN,
    contents,
    network_of,
    picture_folder,
    pixels,
    trained,
)


@pytest.fixture
def palimpsest(palimpsest):
    """Runs `palimpsest restore words...`."""
    return palimpsest.of("restore")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return picture_folder(tmp_path / "in", pixels(3))


def test_pictures_are_restored_once_and_again_when_asked(
    palimpsest, prefect_server: None, tmp_path: Path, folder: Path
) -> None:
    words = ["--weights", trained(tmp_path / "edm"), "--input", folder, "--out", tmp_path / "out"]
    words += ["--samples", 2, "--keep-samples", "--device", "cpu", "--seed", 5, "--batch", 3]
    said = palimpsest.done(*words)
    for pattern in (r"restorer +edm\n", r"pictures +3\n", r"samples +2\n", r"disagreement +0\.\d+"):
        assert re.search(pattern, said)
    assert str(tmp_path / "out" / "contact-sheet.png") in said
    record = json.loads((tmp_path / "out" / "restored.json").read_text())
    assert record["settings"]["seed"] == 5
    before = dict(contents(tmp_path / "out"))
    assert len([name for name in before if name.startswith("samples/")]) == 6
    palimpsest.done(*words)
    complaint = palimpsest.refused(*words, "--limit", 2)
    assert complaint.startswith(f"error: {tmp_path / 'out'} was restored with other settings")
    assert dict(contents(tmp_path / "out")) == before
    palimpsest.done(*words, "--limit", 2, "--fresh")
    assert not (tmp_path / "out" / "mean" / "p02.png").exists()
    words[1] = tmp_path / "nowhere"
    assert palimpsest(*words, "--fresh")[0] == 2
    assert (tmp_path / "out" / "restored.json").exists()


def test_a_jobs_reconstructions_are_restored_of_either_split(
    palimpsest, prefect_server: None, tmp_path: Path
) -> None:
    weights = trained(tmp_path / "bf", TINY_BF_DNCNN)
    for n_parts, split in ((1, "train"), (2, "heldout")):
        place = tmp_path / "job" / {"train": "pairs"}.get(split, split)
        stores.store(place, n_parts, size=SIZE)
        words = ["--weights", weights, "--input", tmp_path / "job", "--split", split]
        palimpsest.done(*words, "--out", tmp_path / split, "--device", "cpu")
        record = json.loads((tmp_path / split / "restored.json").read_text())
        assert record["settings"]["input"]["content_hash"] == Dataset(place).content_hash


def test_an_attacks_pictures_are_restored_inside_the_span_of_its_weights(
    palimpsest, prefect_server: None, tmp_path: Path
) -> None:
    images = photograph_tiles(SIZE, shrink=4)[:8].numpy()
    victim, start, attack = (tmp_path / name for name in ("victim.pt", "start.pt", "attack"))
    network_of(images[:6], victim, start=start)
    attack.mkdir()
    found = np.clip(images[:6] / np.float32(255) + 0.02, 0, 1)
    save_file({"picture": found}, attack / "reconstructions.safetensors")
    words = ["--weights", trained(tmp_path / "bf", TINY_BF_DNCNN), "--input", attack]
    words += ["--out", tmp_path / "out", "--device", "cpu", "--span", victim]
    ended, said, notice = palimpsest(*words, "--initial", start)
    assert ended == 0
    assert BLURRED not in notice
    assert re.search(r"restorer +bf_dncnn, in the span\n", said)
    assert re.search(r"in the span of the weights +\d+\.\d% of the pictures\n", said)
    record = json.loads((tmp_path / "out" / "restored.json").read_text())
    assert record["settings"]["model"]["settings"]["span"]["directions"] == 5
    given = [picture["name"] for picture in record["pictures"]]
    assert given == [f"rank-{k:05d}" for k in range(1, 7)]
    complaint = palimpsest.refused(*words, "--initial", start, "--span-steps", "every")
    assert "--span-steps every is of a restorer that has steps (EDM), and --weights" in complaint
    complaint = palimpsest.refused(*words)  # without the start: other directions
    assert "was restored with other settings" in complaint
    weights = load_file(victim)
    noise = np.random.default_rng(0).standard_normal(weights["0.weight"].shape)
    save_file(weights | {"0.weight": weights["0.weight"] + np.float32(0.02 * noise)}, victim)
    ended, _, notice = palimpsest(*words, "--fresh")
    assert ended == 0
    assert f"{victim}: {BLURRED}\n" in notice
    network_of(images[6:], victim)
    assert "they are not of this network" in palimpsest.refused(*words, "--fresh")
    assert (tmp_path / "out" / "restored.json").exists()


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"--weights": "nothing"}, 2, "nothing is not there: give .*nlm, tv, wavelet"),
        ({"--initial": "epoch0"}, 2, "--initial, .* --span-rounds are of the network of --span"),
        ({"--span": "own.pt", "--span-tolerance": 2}, 2, "--span-tolerance is in pixels"),
        ({"--span": "nowhere"}, 2, "nowhere"),
        ({"--span": "grey.safetensors"}, 2, "is 8x8 in colour, and the network in .* of 1x8x8"),
        ({"--span": "other.safetensors"}, 2, "they are not of this network. Give --span the"),
        ({"--span": "still.safetensors", "--initial": "still.safetensors"}, 2, "is its start"),
        ({"--span": "other.safetensors", "--std": "x"}, 2, "--std x is no number"),
        ({"--weights": "empty"}, 1, "no finished restorer"),
        ({"--input": "nowhere"}, 2, "nowhere is neither a folder of pictures nor a store"),
        ({"--input": "large"}, 2, "p00.png is 12 x 12, but edm works at 8 x 8; add --size 8"),
        ({"--input": "broken"}, 2, "p00.png cannot be read as a picture"),
        ({"--out": "in"}, 2, "in is not empty and holds no restoration"),
        ({"--out": "s3://bucket/x"}, 2, "give a folder of this machine"),
        ({"--size": "8by8"}, 2, "--size '8by8' is no size; give the side of a square"),
        ({"--size": "999999"}, 2, "999999 x 999999 is more than 89,478,485 pixels"),
    ],
)
def test_errors_are_one_line_with_a_fix(
    palimpsest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    changes: dict[str, object],
    code: int,
    said: str,
) -> None:
    """All of it is refused before a flow, and with it a server, starts."""
    monkeypatch.setattr("flows.restore.restore", lambda *_args, **_kwargs: pytest.fail("started"))
    monkeypatch.chdir(tmp_path)
    trained(tmp_path / "edm")
    picture_folder(tmp_path / "large", pixels(1, size=12))
    (picture_folder(tmp_path / "broken", pixels(1)) / "p00.png").write_bytes(b"no picture")
    (tmp_path / "empty").mkdir()
    network_of(pixels(3), tmp_path / "own.pt")
    network_of(pixels(4, size=8, seed=9)[:, :1], tmp_path / "grey.safetensors")
    network_of(pixels(4, size=8, seed=9), tmp_path / "other.safetensors")
    network_of(pixels(4, size=8, seed=9) * 0, tmp_path / "still.safetensors")
    words = {"--weights": "edm", "--input": "in", "--out": "out", "--device": "cpu", **changes}
    ended, _, complaint = palimpsest(*(word for pair in words.items() for word in pair))
    assert ended == code
    assert re.search("error: .*" + said, complaint)
    assert complaint.count("\n") == 1
    assert not (tmp_path / "out").exists()
