"""A folder of restored pictures: what `palimpsest restore` leaves, continued where it was left.

OUT/mean/NAME.png          the mean of a picture's samples, or the one answer there is
OUT/disagreement/NAME.png  grey: level g stands for a standard deviation of WHITE g / 255, white for
                           WHITE = 0.25 or more; the scale never changes, so maps can be compared
OUT/samples/NAME-K.png     each sample, K from 0, if they are kept
OUT/contact-sheet.png      24 of the pictures, chosen evenly, or all if they are fewer
OUT/restored.json          the settings, and per picture its numbers; written last
OUT/restoring.json         the same while it is not finished

Every file is whole or absent, and a picture is in restoring.json only after its files are on the
device. Settings are everything that the pictures depend on: a folder of other settings is refused.
Pictures whose files were removed are restored again.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps
from torch import Tensor

from recon_core.strict import Count, Natural, Strict
from storage.documents import read_document, understood
from storage.errors import SourceError, StorageError, StoreMismatchError, listed, shown
from storage.files import TEMPORARY_PREFIX, full_device_explained, write_file, write_json
from storage.pairs.dataset import manifest_differences
from storage.sources.pictures import Reading
from tasks.page.formats import tail
from tasks.page.pictures import Strip, Tile, eight_bits, strips_sheet
from tasks.restoring.inputs import InputPicture, Inputs, size_text
from tasks.restoring.restore import (
    BATCH_SIZE,
    N_SAMPLES,
    OpenRestorer,
    picture_seeds,
    summarised,
)

SCHEMA, VERSION = "palimpsest-restored", 1
FINISHED, UNFINISHED, SHEET = "restored.json", "restoring.json", "contact-sheet.png"
ENTRIES = frozenset({"mean", "disagreement", "samples", SHEET, FINISHED, UNFINISHED})
"""All that a restoration puts into its folder."""

Pixels = npt.NDArray[np.uint8]

N_ROWS = 24
N_SAMPLES_SHOWN = 4
TILE = 96
LABELS, N_LETTERS = 2.3, 26
"""Of the sheet: its lines, the side of a picture, room for names in tiles and in letters."""
WHITE = 0.25
"""The disagreement that is drawn white."""
SAVE_SECONDS = 5.0

OnPicture = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Restoration(Strict):
    """Settings of restoring: `n_samples` of each, from `seed`; `keep_samples` writes each one.

    `batch_size` (sample, picture) pairs are on the device at once; it changes no result.
    """

    n_samples: Count = N_SAMPLES
    seed: Natural = 0
    keep_samples: bool = False
    batch_size: Count = BATCH_SIZE


def restore_pictures(
    restorer: OpenRestorer,
    inputs: Inputs,
    out: Path,
    config: Restoration,
    *,
    fresh: bool = False,
    on_picture: OnPicture = lambda _done, _n: None,
    save_seconds: float = SAVE_SECONDS,
) -> dict[str, Any]:
    """Restore every input into the folder `out` and return what restored.json then holds.

    What is finished there with the same settings is returned, what was begun is continued. If
    `fresh`, an earlier restoration there is deleted first, once all inputs have been read.

    Raises SourceError if an input cannot be read or has a size that the restorer cannot take;
    ValueError if `out` is taken by something else, lies among the inputs or, if `fresh`, has them
    in it, or if the restorer gives values that are not finite; StoreMismatchError for a restoration
    of other settings there; StorageError if another process is restoring into it, or it cannot be
    made; StoreFullError if the device is full: the same call continues later.
    """
    check_free(out, inputs.location, fresh=fresh)
    settings, names, reading = _settings(restorer, inputs, config)
    with locked(out):
        if fresh:
            clear(out)
        job = _Job(restorer, inputs, out, config, settings, names, reading)
        finished = read_record(out / FINISHED, settings)
        begun = finished or read_record(out / UNFINISHED, settings) or {"pictures": []}
        with understood(out, "use another --out, or --fresh to replace it"):
            found = {picture["name"]: picture for picture in begun["pictures"]}
            job.done = {n: p for n, p in found.items() if all(f.is_file() for f in job.files_of(p))}
        if finished is not None and len(job.done) == len(names) and (out / SHEET).is_file():
            (out / UNFINISHED).unlink(missing_ok=True)
            return finished
        for leftover in out.rglob(f"{TEMPORARY_PREFIX}*"):
            leftover.unlink()
        job.run(on_picture, save_seconds)
        write_file(out / SHEET, job.sheet())
        record = job.record(finished=True)
        write_json(out / FINISHED, record)
        (out / UNFINISHED).unlink(missing_ok=True)
    return record


def check_restoration(
    restorer: OpenRestorer, inputs: Inputs, out: Path, config: Restoration, *, fresh: bool = False
) -> Reading:
    """Summary of the inputs, all of which are read. Raises all that `restore_pictures` raises
    before it begins."""
    check_free(out, inputs.location, fresh=fresh)
    settings, _names, reading = _settings(restorer, inputs, config)
    if not fresh:
        for name in (FINISHED, UNFINISHED):
            read_record(out / name, settings)
    return reading


def check_free(out: Path, source: str, *, fresh: bool) -> None:
    """Raise ValueError, with the fix, if `out` cannot hold restorations of what is at `source`."""
    here, there = out.resolve(), Path(source).resolve()
    if there in here.parents:
        raise ValueError(
            f"--out {out} lies in --input {source}, so that its pictures would be "
            "restored next time; choose a folder outside"
        )
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder")
    if fresh and (here == there or here in there.parents):
        raise ValueError(
            f"--fresh would delete --input, which is in --out {out}; use another --out"
        )
    names = {entry.name for entry in out.iterdir()} if out.is_dir() else set()
    names = {name for name in names if not name.startswith(TEMPORARY_PREFIX)}
    if fresh and (strangers := sorted(names - ENTRIES)):
        raise ValueError(
            f"--fresh would delete {out}, which also holds {', '.join(strangers[:3])}; remove the "
            "folder yourself or use another --out"
        )
    if names and not fresh and not names & {FINISHED, UNFINISHED}:
        raise ValueError(
            f"--out {out} is not empty and holds no restoration; choose another folder"
        )


def clear(out: Path) -> None:
    """Remove an earlier restoration; its records last, so that it is known as one until then."""
    for name in sorted(ENTRIES, key=lambda name: name in (FINISHED, UNFINISHED)):
        path = out / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def read_record(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The record in `path`, if there is one.

    Raises StoreMismatchError if it is not one of a restoration with the same settings; says how.
    """
    if not path.exists():
        return None
    fix = "use those settings again, another --out, or --fresh to replace it"
    try:
        record = read_document(path, fix)
        there = dict(record["settings"])
        if record.get("schema") != SCHEMA:
            raise ValueError(f"schema is {record.get('schema')!r}, not {SCHEMA!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise StoreMismatchError(f"{path} is not a restoration's ({error}); {fix}") from error
    versions = [{"version": record.get("version")} | there, {"version": VERSION} | settings]
    if differences := manifest_differences(*versions):
        raise StoreMismatchError(
            f"{path.parent} was restored with other settings: "
            f"{listed(differences, 3, between='; ')}; {fix}"
        )
    return record


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Make `out` if needed, and lock it for this process."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise StorageError(f"cannot write to {out} ({error.strerror}); choose another") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StorageError(
                f"another process is restoring into {out}; wait for it, or choose another --out"
            ) from error
        yield
    finally:
        os.close(descriptor)


@dataclass
class _Job:
    """A restoration on its way: the inputs' `names` in their order, the facts of each finished
    picture in `done`, and in `shown` the first samples of pictures on the sheet, as far as they
    were drawn here."""

    restorer: OpenRestorer
    inputs: Inputs
    out: Path
    config: Restoration
    settings: dict[str, Any]
    names: list[str]
    reading: Reading
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    shown: dict[str, tuple[Pixels, ...]] = field(default_factory=dict)

    def files_of(self, picture: Mapping[str, Any]) -> list[Path]:
        """Files of a finished picture of a record."""
        name = picture["name"]
        samples = range(picture["n_samples"] if self.config.keep_samples else 0)
        return [
            self._path("mean", name),
            self._path("disagreement", name),
            *(self._path("samples", f"{name}-{k}") for k in samples),
        ]

    def run(self, on_picture: OnPicture, save_seconds: float) -> None:
        """Restore what is not done, saving every `save_seconds` and whatever ends it."""
        write_json(self.out / UNFINISHED, self.record())
        (self.out / FINISHED).unlink(missing_ok=True)
        on_picture(len(self.done), len(self.inputs))
        left = (picture for picture in self.inputs if picture.name not in self.done)
        last_saved = time.monotonic()
        try:
            # Neighbours of one size, as many as fill a batch.
            for shape, alike in itertools.groupby(left, key=lambda picture: picture.pixels.shape):
                n_samples, n = self.config.n_samples, self.config.batch_size
                full = self.restorer.chunk_size(n_samples, n, shape)
                while batch := list(itertools.islice(alike, full)):
                    self._restore(batch)
                    on_picture(len(self.done), len(self.inputs))
                    if time.monotonic() - last_saved >= save_seconds:
                        write_json(self.out / UNFINISHED, self.record())
                        last_saved = time.monotonic()
        finally:
            write_json(self.out / UNFINISHED, self.record())

    def record(self, *, finished: bool = False) -> dict[str, Any]:
        pictures = [self.done[name] for name in self.names if name in self.done]
        body = {
            "schema": SCHEMA,
            "version": VERSION,
            "settings": self.settings,
            "input_at": self.inputs.location,
            "read": self.reading.record,
            "device": self.restorer.device,
            "disagreement_of_white": WHITE,
            "n_pictures": len(pictures),
        }
        if finished:
            body["mean_disagreement"] = float(np.mean([p["mean_disagreement"] for p in pictures]))
        return body | {"pictures": pictures}

    def sheet(self) -> bytes:
        """PNG of pictures in even distances, from the first to the last: the input beside its mean,
        the first samples and their disagreement."""
        n, n_rows = len(self.names), len(self._on_sheet)
        note = f"all {n} pictures" if n > 1 else "1 picture"
        if n_rows < n:
            note = f"{n_rows} of {n:,} pictures, chosen evenly"
        if self.restorer.generative:
            note += f", {self.config.n_samples} samples each; disagreement: white is {WHITE}"
        strips: list[Strip] = [f"Restored by {self.restorer.name}: {note}"]
        strips += [self._strip(picture) for picture in self.inputs.at([*self._on_sheet.values()])]
        columns = self._n_samples_shown + 3 if self._n_samples_shown else 2
        return strips_sheet(strips, columns=columns, labels=LABELS, at_edge=True)

    @cached_property
    def _on_sheet(self) -> dict[str, int]:
        """Places of the pictures on the sheet, by name."""
        n = len(self.names)
        places = np.linspace(0, n - 1, min(n, N_ROWS)).round().astype(int).tolist()
        return {self.names[place]: place for place in places}

    @property
    def _n_samples_shown(self) -> int:
        return min(self.config.n_samples, N_SAMPLES_SHOWN) if self.restorer.generative else 0

    def _strip(self, picture: InputPicture) -> Strip:
        """A line of the sheet; samples that an earlier process drew are drawn once more."""
        name, n_samples = picture.name, self._n_samples_shown
        if n_samples and name not in self.shown:
            drawn, _seeds = self._samples([picture], n_samples)
            self.shown[name] = tuple(eight_bits(sample) for sample in drawn[:, 0])
        height, width = picture.pixels.shape[1:]
        plain = tail(shown(name), N_LETTERS).replace("$", r"\$")  # else it would be a formula
        said = [plain, f"{height} x {width}"]
        said[1] += ", smaller here" if max(height, width) > TILE else ""
        mean = _read(self._path("mean", name)).transpose(2, 0, 1)
        tiles = [_tile(picture.pixels, "input"), _tile(mean, "mean" if n_samples else "restored")]
        if n_samples:
            said.append(f"disagreement {self.done[name]['mean_disagreement']:.4f}")
            tiles += [_tile(made, f"sample {k}") for k, made in enumerate(self.shown[name])]
            tiles.append(_tile(_read(self._path("disagreement", name))[None], "disagreement"))
        return "\n".join(said), tiles

    def _samples(
        self, pictures: Sequence[InputPicture], n_samples: int
    ) -> tuple[Tensor, list[int]]:
        """Samples (s, n, 3, h, w) of the pictures, and the seed of each picture."""
        given = torch.from_numpy(np.stack([p.pixels for p in pictures])).float() / 255
        seeds, n = picture_seeds(given, self.config.seed), self.config.batch_size
        drawn = self.restorer.samples(given, seeds, n_samples=n_samples, batch_size=n)
        return drawn, seeds.tolist()

    def _restore(self, pictures: Sequence[InputPicture]) -> None:
        samples, seeds = self._samples(pictures, self.config.n_samples)
        mean, disagreement = summarised(samples)
        for k, picture in enumerate(pictures):
            _write(self._path("mean", picture.name), eight_bits(mean[k]))
            _write(self._path("disagreement", picture.name), eight_bits(disagreement[k] / WHITE))
            if self._n_samples_shown and picture.name in self._on_sheet:
                first = samples[: self._n_samples_shown, k]
                self.shown[picture.name] = tuple(eight_bits(sample) for sample in first)
            if self.config.keep_samples:
                for number, sample in enumerate(samples[:, k]):
                    _write(self._path("samples", f"{picture.name}-{number}"), eight_bits(sample))
            self.done[picture.name] = {
                "name": picture.name,
                **picture.facts,
                "seed": seeds[k],
                "n_samples": len(samples),
                "mean_disagreement": round(disagreement[k].mean().item(), 6),
            }

    def _path(self, folder: str, name: str) -> Path:
        return self.out / folder / f"{name}.png"


def _settings(
    restorer: OpenRestorer, inputs: Inputs, config: Restoration
) -> tuple[dict[str, Any], list[str], Reading]:
    """Everything that the restored pictures depend on, as JSON has it; the inputs' names, and what
    was read of them. All are read and checked: nothing is begun that cannot be finished."""
    names: list[str] = []
    digest, reading = hashlib.sha256(), inputs.new_reading()
    for picture in inputs:
        height, width = picture.pixels.shape[1:]
        wrong = restorer.why_not(height, width)
        if wrong is not None:
            size = size_text(*restorer.size_for(height, width))
            fix = f"add --size {size}, which crops every picture to that shape and resizes it"
            if "file" not in picture.facts:
                fix = "use a restorer that was trained on pictures of this size"
            raise SourceError(f"{picture.facts.get('file', picture.name)} {wrong}; {fix}")
        names.append(picture.name)
        head = [picture.name, picture.facts, picture.pixels.shape]
        digest.update(json.dumps(head, sort_keys=True).encode())
        digest.update(picture.pixels.data)
        reading.count(picture.found)
    about = {"n_pictures": len(inputs), "fingerprint": digest.hexdigest()}
    settings = {
        "model": {name: getattr(restorer, name) for name in ("name", "fingerprint", "settings")},
        "input": inputs.description | about,
        **{name: getattr(config, name) for name in ("n_samples", "seed", "keep_samples")},
    }
    return json.loads(json.dumps(settings)), names, reading


def _tile(pixels: Pixels, text: str) -> Tile:
    """A picture (c, h, w) in a square of at most TILE, areas averaged, with its caption."""
    picture = Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0).squeeze()))
    picture.thumbnail((TILE, TILE), Image.Resampling.BOX)
    square = ImageOps.pad(picture, (max(picture.size),) * 2, color="white")
    return np.atleast_3d(np.asarray(square)).transpose(2, 0, 1), text, False


def _write(path: Path, pixels: Pixels) -> None:
    """Write a PNG of (3, h, w) in colour or (h, w) in grey."""
    rows = np.ascontiguousarray(pixels.transpose(1, 2, 0) if pixels.ndim == 3 else pixels)
    content = io.BytesIO()
    Image.fromarray(rows).save(content, "png")
    with full_device_explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, content.getvalue())


def _read(path: Path) -> npt.NDArray[np.uint8]:
    with Image.open(path) as image:
        return np.asarray(image)
