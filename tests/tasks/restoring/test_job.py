"""A folder of restored pictures: what is in it, going on after an end, and what is refused."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from storage.errors import SourceError, StorageError, StoreMismatchError
from tasks.page.pictures import Strip, strips_sheet
from tasks.restoring import job as restore_job
from tasks.restoring.inputs import open_inputs
from tasks.restoring.job import WHITE, Restoration, restore_pictures
from tasks.restoring.restore import OpenRestorer, open_restorer, picture_seeds
from tests.tasks.restoring.restorers import (
    TINY_BF_DNCNN,
    contents,
    floats,
    identity,
    picture_folder,
    pixels,
    read,
    trained,
)


@pytest.fixture(scope="module")
def edm(tmp_path_factory: pytest.TempPathFactory) -> OpenRestorer:
    return open_restorer(trained(tmp_path_factory.mktemp("models") / "edm"), device="cpu")


def restore(
    restorer: OpenRestorer, source: Path, out: Path, *, config: Any = None, **inputs: Any
) -> dict[str, Any]:
    config = config or Restoration(n_samples=3)
    return restore_pictures(restorer, open_inputs(source, **inputs), out, config, save_seconds=0)


def test_a_picture_comes_back_from_png_to_png_unchanged(tmp_path: Path) -> None:
    given = pixels(3)
    record = restore(identity(), picture_folder(tmp_path / "in", given), tmp_path / "out")
    for k in range(3):
        np.testing.assert_array_equal(read(tmp_path / f"out/mean/p{k:02d}.png"), given[k])
        assert not read(tmp_path / f"out/disagreement/p{k:02d}.png").any()
    assert record["mean_disagreement"] == 0
    assert not (tmp_path / "out" / "samples").exists()


def test_every_sample_their_mean_and_their_spread_are_written(
    tmp_path: Path, edm: OpenRestorer
) -> None:
    folder, out = picture_folder(tmp_path / "in", pixels(2)), tmp_path / "out"
    config = Restoration(n_samples=3, keep_samples=True, seed=4)
    record = restore(edm, folder, out, config=config)
    mean, disagreement = edm(floats(2), n_samples=3, seed=4)
    given = torch.from_numpy(floats(2))
    drawn = edm.samples(given, picture_seeds(given, 4), n_samples=3).clamp(0, 1).numpy()
    for k, name in enumerate(("p00", "p01")):
        expected = np.round(mean[k] * 255)
        assert np.abs(read(out / f"mean/{name}.png") - expected).max() <= 1
        grey = np.round(np.minimum(disagreement[k] / WHITE, 1) * 255)
        assert np.abs(read(out / f"disagreement/{name}.png") - grey).max() <= 1
        samples = np.stack([read(out / f"samples/{name}-{n}.png") for n in range(3)])
        assert np.abs(samples - np.round(drawn[:, k] * 255)).max() <= 1
        said = record["pictures"][k]
        assert (said["name"], said["file"], said["n_samples"]) == (name, f"{name}.png", 3)
        assert said["mean_disagreement"] == pytest.approx(disagreement[k].mean(), abs=1e-4)
    assert record == json.loads((out / "restored.json").read_text())
    assert record["settings"]["model"]["fingerprint"] == edm.fingerprint
    assert record["settings"]["seed"] == 4
    assert sorted(path.name for path in out.iterdir()) == [
        *("contact-sheet.png", "disagreement", "mean", "restored.json", "samples")
    ]


def test_pictures_in_folders_and_of_several_sizes_keep_their_names(tmp_path: Path) -> None:
    folder = picture_folder(tmp_path / "in" / "cats", pixels(2))
    picture_folder(tmp_path / "in" / "dogs", pixels(2, size=12, seed=1))
    restorer = open_restorer(trained(tmp_path / "bf", TINY_BF_DNCNN), device="cpu")
    record = restore(restorer, folder.parent, tmp_path / "out")
    names = ["cats/p00", "cats/p01", "dogs/p00", "dogs/p01"]
    assert [picture["name"] for picture in record["pictures"]] == names
    mean, _ = restorer(floats(2, size=12, seed=1))
    written = read(tmp_path / "out/mean/dogs/p01.png")
    assert np.abs(written - np.round(mean[1] * 255)).max() <= 1


def test_pictures_may_be_called_anything(tmp_path: Path) -> None:
    """Their names are files' names again in the folder, and those of the record are these."""
    folder = picture_folder(tmp_path / "in", pixels(3))
    names = ["bytes\udcff", "clear\x1b[2J", "two\nlines"]
    for k, name in enumerate(names):
        (folder / f"p{k:02d}.png").rename(folder / f"{name}.png")
    record = restore(identity(), folder, tmp_path / "out")
    assert [picture["name"] for picture in record["pictures"]] == names
    assert json.loads((tmp_path / "out/restored.json").read_bytes()) == record
    np.testing.assert_array_equal(read(tmp_path / f"out/mean/{names[0]}.png"), pixels(3)[0])
    assert restore(identity(), folder, tmp_path / "out") == record


def test_what_was_read_is_in_the_record(tmp_path: Path) -> None:
    folder = picture_folder(tmp_path / "in", pixels(3))
    Image.new("L", (30, 12)).save(folder / "wide.png")
    (folder / "not\x1b.png").write_bytes(b"no picture")
    with pytest.raises(SourceError, match="--skip-corrupt"):
        restore(identity(), folder, tmp_path / "out")
    record = restore(identity(), folder, tmp_path / "out", size=8, limit=4, skip_corrupt=True)
    expected = {
        "n_read": 4,
        "sizes": {"8 x 8": 3, "30 x 12": 1},
        "modes": {"RGB": 3, "L": 1},
        "resized_to": [8, 8],
        "n_cropped": 1,
        "n_resized": 1,
        "left_out": [{"file": r"not\x1b.png", "why": "not a known picture format"}],
    }
    assert {name: record["read"][name] for name in expected} == expected
    assert [picture["name"] for picture in record["pictures"]] == ["p00", "p01", "p02", "wide"]


class _Interrupted(Exception):
    pass


def _stop_after(n: int):
    def on_picture(done: int, _n: int) -> None:
        if done >= n:
            raise _Interrupted

    return on_picture


def test_what_was_begun_is_continued_to_the_same_bytes(tmp_path: Path, edm: OpenRestorer) -> None:
    folder = picture_folder(tmp_path / "in", pixels(5))
    config = Restoration(n_samples=2, keep_samples=True, batch_size=2)
    with pytest.raises(_Interrupted):
        restore_pictures(
            edm, open_inputs(folder), tmp_path / "out", config, on_picture=_stop_after(3)
        )
    begun = json.loads((tmp_path / "out/restoring.json").read_text())
    assert [picture["name"] for picture in begun["pictures"]] == ["p00", "p01", "p02"]
    assert not (tmp_path / "out/restored.json").exists()
    (tmp_path / "out/mean/.tmp-left").touch()
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/mean").glob("*.png")}
    seen: list[int] = []
    restore_pictures(
        edm, open_inputs(folder), tmp_path / "out", config, on_picture=lambda n, _: seen.append(n)
    )
    assert seen == [3, 4, 5]
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    restore(edm, folder, tmp_path / "at-once", config=config)
    assert dict(contents(tmp_path / "out")) == dict(contents(tmp_path / "at-once"))


def test_a_finished_restoration_is_not_repeated(tmp_path: Path) -> None:
    folder, opened = picture_folder(tmp_path / "in", pixels(2)), identity()
    first = restore(opened, folder, tmp_path / "out")
    n_calls = len(opened.restorer.given)
    moved = folder.rename(tmp_path / "moved")
    (tmp_path / "out/restoring.json").write_bytes((tmp_path / "out/restored.json").read_bytes())
    again = restore(opened, moved, tmp_path / "out", config=Restoration(n_samples=3, batch_size=1))
    assert again == first
    assert not (tmp_path / "out/restoring.json").exists()
    assert len(opened.restorer.given) == n_calls


@pytest.mark.parametrize(
    "lost", ["mean/p01.png", "disagreement/p01.png", "samples/p01-2.png", "contact-sheet.png"]
)
def test_what_was_removed_is_made_again(tmp_path: Path, edm: OpenRestorer, lost: str) -> None:
    folder, out = picture_folder(tmp_path / "in", pixels(3)), tmp_path / "out"
    config = Restoration(n_samples=3, keep_samples=True)
    restore(edm, folder, out, config=config)
    before = dict(contents(out))
    (out / lost).unlink()
    record = restore(edm, folder, out, config=config)
    after = dict(contents(out))
    assert after.keys() == before.keys()
    assert [picture["name"] for picture in record["pictures"]] == ["p00", "p01", "p02"]
    remade = {lost, "contact-sheet.png", "restored.json"}  # up to the rounding of another batch
    others = {name for name in before if "p01" not in name} - remade
    assert all(after[name] == before[name] for name in others)


@pytest.mark.parametrize(
    ("changes", "inputs", "said"),
    [
        ({"seed": 1}, {}, "seed is 0 there, 1 here"),
        ({"n_samples": 4}, {}, "n_samples is 3 there, 4 here"),
        ({"keep_samples": True}, {}, "keep_samples is false there, true here"),
        ({}, {"limit": 1}, "input.n_pictures is 2 there, 1 here"),
        ({}, {"size": 4}, "input.size is null there, 4 here"),
    ],
)
@pytest.mark.parametrize("name", ["restored.json", "restoring.json"])
def test_other_settings_are_refused(
    tmp_path: Path, changes: dict[str, Any], inputs: dict[str, int], said: str, name: str
) -> None:
    folder, out = picture_folder(tmp_path / "in", pixels(2)), tmp_path / "out"
    restore(identity(), folder, out)
    (out / "restored.json").rename(out / name)
    before = dict(contents(out))
    config = Restoration(**({"n_samples": 3} | changes))
    with pytest.raises(StoreMismatchError, match=said + r".*another --out, or --fresh"):
        restore(identity(), folder, out, config=config, **inputs)
    assert dict(contents(out)) == before


def test_a_folder_of_somebody_else_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = picture_folder(tmp_path / "in", pixels(1))
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    for out, said in (
        (folder, "not empty and holds no restoration"),
        (tmp_path / "file", "is a file"),
        (folder / "out", "lies in --input"),
        (tmp_path / "link" / "out", "lies in --input"),
        (Path("link/../in/out"), "lies in --input"),
        (Path("in/x/../out"), "lies in --input"),
    ):
        with pytest.raises(ValueError, match=said):
            restore(identity(), folder, out)


@pytest.mark.parametrize("name", ["restored.json", "restoring.json"])
@pytest.mark.parametrize(
    "content", ["[]", '{"settings": 3}', '{"settings": {}, "schema": ""}', "{"]
)
def test_a_record_of_something_else_is_named(tmp_path: Path, name: str, content: str) -> None:
    folder = picture_folder(tmp_path / "in", pixels(1))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text(content)
    with pytest.raises(StoreMismatchError, match=rf"{name} is not a restoration's"):
        restore(identity(), folder, tmp_path / "out")


def test_fresh_replaces_a_restoration_when_all_else_is_right(tmp_path: Path) -> None:
    folder, out = picture_folder(tmp_path / "in", pixels(2)), tmp_path / "out"
    restore(identity(), folder, out)
    (out / ".tmp-left").touch()
    before = dict(contents(out))

    def again(source: Path, **inputs: Any) -> dict[str, Any]:
        return restore_pictures(
            identity(), open_inputs(source, **inputs), out, Restoration(), fresh=True
        )

    broken = picture_folder(tmp_path / "broken", pixels(1))
    (broken / "p00.png").write_bytes(b"no picture")
    with pytest.raises(SourceError, match="cannot be read"):
        again(broken)
    for inside in (out, out / "mean"):
        with pytest.raises(ValueError, match="--fresh would delete --input, which is in --out"):
            again(inside)
    (out / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"which also holds notes.txt; remove the folder"):
        again(folder)
    (out / "notes.txt").unlink()
    descriptor = os.open(out, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(StorageError, match="another process"):
        again(folder)
    os.close(descriptor)
    assert dict(contents(out)) == before
    assert again(folder, limit=1)["n_pictures"] == 1
    assert [path.name for path in (out / "mean").iterdir()] == ["p00.png"]


def test_the_sheet_has_pictures_in_even_distances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[Strip]] = []

    def sheet(strips: list[Strip], **how: Any) -> bytes:
        told.append(strips)
        return strips_sheet(strips, **how)

    monkeypatch.setattr(restore_job, "strips_sheet", sheet)
    monkeypatch.setattr(restore_job, "N_ROWS", 4)
    for n in (1, 2, 4, 10):
        folder = picture_folder(tmp_path / f"in{n}", pixels(n))
        restore(identity(), folder, tmp_path / f"out{n}")
    names = [[strip[0].split("\n")[0] for strip in strips[1:]] for strips in told]
    assert names[1:] == [["p00", "p01"], ["p00", "p01", "p02", "p03"], ["p00", "p03", "p06", "p09"]]
    assert all(strips[1][0].endswith("8 x 8") for strips in told)
    notes = [str(strips[0]).partition(": ")[2] for strips in told]
    assert notes[0] == "1 picture"
    assert notes[2:] == ["all 4 pictures", "4 of 10 pictures, chosen evenly"]
