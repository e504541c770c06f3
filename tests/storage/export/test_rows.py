"""Exported pairs, read back by the tools they are for, are those of the store."""

from __future__ import annotations

import gc
import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet
import pytest
from PIL import Image

from storage.errors import CorruptPartError, StorageError
from storage.export import rows as export
from storage.export.parquet import write_parquet
from storage.export.rows import NUMBERS, Pairs, Selection, png, selected_pairs, write_tars
from storage.files import EXPORT_FILE, whole_folder, write_description
from storage.pairs.dataset import Dataset, create_or_open
from storage.pairs.layout import Encoding
from storage.pairs.parts import write_part
from tests.storage.stores import MANIFEST, columns, provenance, store

Array = npt.NDArray[Any]


def clipped(x: Array, mean: Array) -> npt.NDArray[np.uint8]:
    """A stand-in for the rendering, which is not the storage's."""
    return np.clip((x / 20 + mean) * 255, 0, 255).astype(np.uint8)


def expected(dataset: Dataset, keep: Any = slice(None)) -> dict[str, Array]:
    """The joined columns of all pairs, by `Dataset.take`, which shares no code with exporting."""
    names = [
        *(f"pairs/{n}" for n in ("reconstruction", "candidate", "iteration", "ssim_best")),
        *("pairs/ssim_second", "pairs/confident", "pairs/scale", "targets/image"),
        *("targets/image_id", "targets/label", "targets/augment", "runs/run", "runs/mean_image"),
        *(f"runs/{n}" for n in ("train_loss", "train_accuracy", "margin_min")),
        *("runs/attack_loss", "runs/kkt_residual"),
    ]
    rows = np.arange(dataset.n_pairs)[keep]
    return {n.partition("/")[2]: v for n, v in dataset.take(names, rows).items()}


def pairs_of(dataset: Dataset, **selection: Any) -> list[Pairs]:
    return list(selected_pairs(dataset, Selection(**selection), render=clipped))


def all_pairs(dataset: Dataset, **selection: Any) -> Any:
    return selected_pairs(dataset, Selection(confident_only=False, **selection), render=clipped)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


@pytest.mark.parametrize("encoding", ["float16", "float32", "uint8"])
def test_what_is_selected_is_joined_with_its_target_and_run(tmp_path: Path, encoding: Encoding):
    create_or_open(tmp_path, MANIFEST, encoding=encoding)
    for part in (0, 2):
        given = columns(seed=part, n_pairs=40)
        write_part(tmp_path, part, given, provenance=provenance())
    dataset = Dataset(tmp_path)
    batches = pairs_of(dataset, confident_only=False)
    wanted = expected(dataset)
    for name in set(NUMBERS) - {"part", "row", "outcome"}:
        got = np.concatenate([pairs.numbers[name] for pairs in batches])
        np.testing.assert_array_equal(got, wanted[name])
    raw = np.concatenate([pairs.raw() for pairs in batches])
    np.testing.assert_array_equal(raw, wanted["reconstruction"])
    np.testing.assert_array_equal(np.concatenate([p.original for p in batches]), wanted["image"])
    pictures = np.concatenate([pairs.picture for pairs in batches])
    np.testing.assert_array_equal(pictures, clipped(wanted["reconstruction"], wanted["mean_image"]))
    assert [p.numbers["part"].tolist() for p in batches] == [[0] * 80, [2] * 80]
    assert [p.numbers["row"].tolist() for p in batches] == [list(range(80))] * 2
    assert set(batches[0].numbers["outcome"]) == {"ok"}
    assert list(batches[0].numbers) == list(NUMBERS)


def test_selections_keep_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(export, "WINDOW_ROWS", 256)
    dataset = store(tmp_path / "s", 3, n_pairs=300)
    confident, iteration = dataset.column("pairs/confident"), dataset.column("pairs/iteration")
    for confident_only in (True, False):
        for min_iteration in (0, 101, 2000):
            keep = (iteration >= min_iteration) & (confident | (not confident_only))
            wanted = expected(dataset, keep)["ssim_best"]
            for limit in (None, 1, 700, 10**6):
                batches = pairs_of(
                    dataset,
                    confident_only=confident_only,
                    min_iteration=min_iteration,
                    limit=limit,
                )
                got = np.concatenate([pairs.numbers["ssim_best"] for pairs in batches])
                np.testing.assert_array_equal(got, wanted[:limit])
    assert pairs_of(dataset, min_iteration=2001) == []


@pytest.mark.parametrize("wrong", [{"min_iteration": -1}, {"limit": 0}])
def test_a_selection_out_of_range_is_refused(wrong: dict[str, int]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Selection(**wrong)  # type: ignore[arg-type]


def test_a_damaged_part_ends_the_export(tmp_path: Path):
    dataset = store(tmp_path / "s", 2)
    shard = next((tmp_path / "s" / "parts").glob("part-000001*/pairs/ssim_best/c.*"))
    content = bytearray(shard.read_bytes())
    content[40] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CorruptPartError, match="ssim_best"), whole_folder(tmp_path / "o") as folder:
        write_tars(folder, all_pairs(dataset))
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("channels", [1, 3])
def test_png_keeps_every_pixel(channels: int):
    pixels = np.random.default_rng(0).integers(0, 256, (channels, 5, 7), dtype=np.uint8)
    with Image.open(io.BytesIO(png(pixels))) as image:
        read = np.asarray(image).reshape(5, 7, channels).transpose(2, 0, 1)
    np.testing.assert_array_equal(read, pixels)


# WebDataset


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset leaves the last
def test_webdataset_reads_what_the_store_holds(tmp_path: Path):
    import webdataset

    create_or_open(tmp_path / "s", MANIFEST)
    for part in range(2):
        given = columns(seed=part, n_pairs=30)
        given["runs/kkt_residual"] = np.array([np.nan, np.inf]) if part else np.zeros(2)
        write_part(tmp_path / "s", part, given, provenance=provenance())
    dataset = Dataset(tmp_path / "s")
    files = write_tars(tmp_path, all_pairs(dataset), rows_per_file=50)
    assert files == {"pairs-000000.tar": 50, "pairs-000001.tar": 50, "pairs-000002.tar": 20}
    urls = [str(tmp_path / name) for name in files]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8"))
    wanted = expected(dataset)
    assert len(samples) == 120
    for i, sample in enumerate(samples):
        original = sample["original.png"].transpose(2, 0, 1)
        np.testing.assert_array_equal(original, wanted["image"][i])
        x, mean = wanted["reconstruction"][i], wanted["mean_image"][i]
        np.testing.assert_array_equal(sample["picture.png"].transpose(2, 0, 1), clipped(x, mean))
        np.testing.assert_array_equal(sample["reconstruction.npy"], x)
        assert sample["reconstruction.npy"].dtype == np.float32
        numbers = sample["json"]
        assert sample["__key__"] == f"{numbers['part']:06d}-{numbers['row']:08d}"
        assert set(numbers) == set(NUMBERS)
        assert numbers["kkt_residual"] == (0 if numbers["part"] == 0 else None)
        for name in set(NUMBERS) - {"part", "row", "outcome", "kkt_residual"}:
            exact = np.asarray(numbers[name], wanted[name].dtype)
            np.testing.assert_array_equal(exact, wanted[name][i])
    gc.collect()  # while its warning is filtered
    (tmp_path / "again").mkdir()
    write_tars(tmp_path / "again", all_pairs(dataset), rows_per_file=50)
    for name in files:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()
        with tarfile.open(tmp_path / name) as tar:
            entries = {(e.mtime, e.uid, e.gid, e.uname, e.gname, e.mode) for e in tar}
        assert entries == {(0, 0, 0, "", "", 0o644)}


# Parquet


@pytest.mark.parametrize("encoding", ["float16", "float32", "uint8"])
def test_parquet_reads_what_the_store_holds(tmp_path: Path, encoding: Encoding):
    create_or_open(tmp_path / "s", MANIFEST, encoding=encoding)
    given = columns(n_pairs=30)
    given["runs/kkt_residual"][0] = np.nan
    write_part(tmp_path / "s", 0, given, provenance=provenance())
    dataset = Dataset(tmp_path / "s")
    written = write_parquet(tmp_path, all_pairs(dataset), rows_per_file=25)
    names = [f"pairs-{i:06d}.parquet" for i in range(3)]
    assert written.files == dict(zip(names, [25, 25, 10], strict=True))
    tables = [pyarrow.parquet.read_table(tmp_path / name) for name in names]
    table = pyarrow.concat_tables(tables)
    wanted = expected(dataset)
    flat = table["reconstruction"].combine_chunks()
    stored = flat.flatten().to_numpy().reshape(60, 3, 4, 4).astype(np.float32)
    assert str(flat.type.value_type) == ("float" if encoding == "float32" else "halffloat")
    x = stored * table["scale"].to_numpy()[:, None, None, None]
    np.testing.assert_array_equal(x, wanted["reconstruction"])
    augment = table["augment"].combine_chunks().flatten().to_numpy().reshape(60, 9)
    np.testing.assert_array_equal(augment, wanted["augment"])
    for name in set(NUMBERS) - {"part", "row", "outcome", "augment"}:
        got = table[name].to_numpy(zero_copy_only=False)
        np.testing.assert_array_equal(got.astype(wanted[name].dtype), wanted[name])
    assert table["kkt_residual"].null_count == np.isnan(wanted["kkt_residual"]).sum() > 0
    for i, file in enumerate(table["original"].to_pylist()):
        with Image.open(io.BytesIO(file["bytes"])) as image:
            np.testing.assert_array_equal(np.asarray(image).transpose(2, 0, 1), wanted["image"][i])
        assert re.fullmatch(r"\d{6}-\d{8}\.original\.png", file["path"])
    assert table.schema.metadata[b"reconstruction_shape"] == b"3,4,4"


def test_without_pyarrow_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(StorageError, match=r"pip install '\.\[export\]'"):
        write_parquet(tmp_path, all_pairs(store(tmp_path / "s", 1)))


# The folder


def test_what_is_there_is_kept_unless_it_is_an_export_and_may_go(tmp_path: Path):
    target = tmp_path / "o"
    target.mkdir()
    (target / "thesis.tex").write_text("x")
    for fresh in (False, True):
        with (
            pytest.raises(ValueError, match="not empty and not an export"),
            whole_folder(target, fresh=fresh),
        ):
            pass
    (target / "thesis.tex").unlink()
    with whole_folder(target) as folder:
        write_description(folder, {"n": 1})
    with pytest.raises(ValueError, match="--fresh"), whole_folder(target):
        pass
    with pytest.raises(RuntimeError), whole_folder(target, fresh=True):
        raise RuntimeError
    assert json.loads((target / EXPORT_FILE).read_bytes())["n"] == 1
    with whole_folder(target, fresh=True) as folder:
        write_description(folder, {"n": 2})
    assert json.loads((target / EXPORT_FILE).read_bytes())["n"] == 2
    assert list(tmp_path.iterdir()) == [target]
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file"), whole_folder(tmp_path / "file", fresh=True):
        pass


def test_a_killed_export_is_cleared_by_the_next(tmp_path: Path):
    code = (
        "import os, pathlib, sys; from storage.files import whole_folder\n"
        "with whole_folder(pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'half').write_bytes(b'1'); os.kill(os.getpid(), 9)"
    )
    root = Path(export.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "o"], cwd=root, check=False)
    assert done.returncode == -9
    assert not (tmp_path / "o").exists()
    assert len(list(tmp_path.iterdir())) == 1
    with whole_folder(tmp_path / "o") as folder:
        (folder / "whole").write_bytes(b"2")
    assert bytes_of(tmp_path) == {"o/whole": b"2"}


def test_two_exports_to_one_place_do_not_mix(tmp_path: Path):
    target = tmp_path / "a" / "o"
    with whole_folder(target) as folder:
        (folder / "data").mkdir()
        (folder / "data" / "x").write_bytes(b"1")
        with pytest.raises(StorageError, match="another process"), whole_folder(target):
            pass
        assert not target.exists()
    assert bytes_of(tmp_path) == {"a/o/data/x": b"1"}
    assert list((tmp_path / "a").iterdir()) == [target]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(StorageError, match="choose another --out"),
        whole_folder(tmp_path / "file" / "o"),
    ):
        pass
