"""A folder of restored pictures: what `palimpsest restore` leaves, continued where it was left.

OUT/mean/NAME.png          the mean of a picture's samples, or the one answer there is
OUT/disagreement/NAME.png  grey: level g stands for a standard deviation of WHITE g / 255, white for
                           WHITE = 0.25 or more; the scale never changes, so maps can be compared
OUT/samples/NAME-K.png     each sample, K from 0, if they are kept
OUT/contact-sheet.png      the first 24 pictures
OUT/restored.json          the settings, and per picture its numbers; written last
OUT/restoring.json         the same while it is not finished

Every file is whole or absent, and a picture is in restoring.json only after its files are on the
device. Settings are everything that the pictures depend on: a folder of other settings is refused.
"""

from __future__ import annotations

import fcntl
import io
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from storage.dataset import manifest_differences
from storage.errors import SourceError, StorageError, StoreMismatchError
from storage.files import TEMPORARY_PREFIX, full_device_explained, write_file, write_json
from tasks.restore import (
    BATCH_SIZE,
    N_SAMPLES,
    OpenRestorer,
    check_counts,
    picture_seeds,
    summarised,
)
from tasks.restore_inputs import InputPicture, Inputs, content_of
from tasks.restore_sheet import N_ROWS, N_SAMPLES_SHOWN, Pixels, SheetRow, restoration_sheet

SCHEMA, VERSION = "palimpsest-restored", 1
FINISHED, UNFINISHED, SHEET = "restored.json", "restoring.json", "contact-sheet.png"
ENTRIES = frozenset({"mean", "disagreement", "samples", SHEET, FINISHED, UNFINISHED})
"""All that a restoration puts into its folder."""
WHITE = 0.25
"""The disagreement that is drawn white."""
SAVE_SECONDS = 5.0
N_DIFFERENCES_SHOWN = 3

OnPicture = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Restoration:
    """How pictures are restored: `n_samples` of each, from `seed`; `keep_samples` writes each one.

    `batch_size` (sample, picture) pairs are on the device at once; it changes no result.
    """

    n_samples: int = N_SAMPLES
    seed: int = 0
    keep_samples: bool = False
    batch_size: int = BATCH_SIZE

    def __post_init__(self) -> None:
        check_counts(self.n_samples, self.batch_size, self.seed)


def restore_pictures(
    restorer: OpenRestorer,
    inputs: Inputs,
    out: Path,
    config: Restoration,
    *,
    on_picture: OnPicture = lambda _done, _n: None,
    save_seconds: float = SAVE_SECONDS,
) -> dict[str, Any]:
    """Restores every input into the folder `out` and returns what restored.json then holds.

    What is finished there with the same settings is returned, what was begun is continued.

    Raises:
        SourceError: an input cannot be read, or has a size that the restorer cannot take.
        ValueError: `out` is taken by something else, or lies among the inputs; or the restorer
            gives values that are not finite.
        StoreMismatchError: it holds a restoration of other settings; says which.
        StorageError: another process is restoring into it, or it cannot be made.
        StoreFullError: the device is full; the same call continues later.
    """
    _check_free(out, inputs)
    settings = _settings(restorer, inputs, config)
    with _locked(out):
        finished = _found(out / FINISHED, settings, out)
        if finished is not None:
            (out / UNFINISHED).unlink(missing_ok=True)
            return finished
        begun = _found(out / UNFINISHED, settings, out) or {"pictures": []}
        for leftover in out.rglob(f"{TEMPORARY_PREFIX}*"):
            leftover.unlink()
        job = _Job(restorer, inputs, out, config, settings)
        job.done = {picture["name"]: picture for picture in begun["pictures"]}
        job.run(on_picture, save_seconds)
        write_file(out / SHEET, job.sheet())
        record = job.record(finished=True)
        write_json(out / FINISHED, record)
        (out / UNFINISHED).unlink(missing_ok=True)
    return record


@dataclass
class _Job:
    """A restoration on its way.

    `done` has the facts of each finished picture by its name, `shown` the first samples of the
    pictures that the sheet shows, as far as they were drawn by this process.
    """

    restorer: OpenRestorer
    inputs: Inputs
    out: Path
    config: Restoration
    settings: dict[str, Any]
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    shown: dict[str, tuple[Pixels, ...]] = field(default_factory=dict)

    def run(self, on_picture: OnPicture, save_seconds: float) -> None:
        """Restores what is not done, saving every `save_seconds` and whatever ends it."""
        write_json(self.out / UNFINISHED, self.record())
        on_picture(len(self.done), len(self.inputs))
        left = (picture for picture in self.inputs if picture.name not in self.done)
        last_saved = time.monotonic()
        try:
            for batch in self._batches(left):
                self._restore(batch)
                on_picture(len(self.done), len(self.inputs))
                if time.monotonic() - last_saved >= save_seconds:
                    write_json(self.out / UNFINISHED, self.record())
                    last_saved = time.monotonic()
        finally:
            write_json(self.out / UNFINISHED, self.record())

    def record(self, *, finished: bool = False) -> dict[str, Any]:
        pictures = list(self.done.values())
        body = {
            "schema": SCHEMA,
            "version": VERSION,
            "settings": self.settings,
            "input_at": self.inputs.location,
            "device": self.restorer.device,
            "disagreement_of_white": WHITE,
            "n_pictures": len(pictures),
        }
        if finished:
            body["mean_disagreement"] = float(np.mean([p["mean_disagreement"] for p in pictures]))
        return body | {"pictures": pictures}

    def sheet(self) -> bytes:
        """The first pictures; samples that an earlier process drew are drawn once more."""
        rows = []
        for picture in itertools.islice(self.inputs, N_ROWS):
            if picture.name not in self.shown:
                drawn = self._samples([picture], min(self.config.n_samples, N_SAMPLES_SHOWN))
                self.shown[picture.name] = tuple(_bytes(sample) for sample in drawn[:, 0])
            samples = self.shown[picture.name] if self.restorer.generative else ()
            rows.append(
                SheetRow(
                    name=picture.name,
                    given=picture.pixels,
                    mean=_read(self._path("mean", picture.name)).transpose(2, 0, 1),
                    samples=samples,
                    disagreement=_read(self._path("disagreement", picture.name)),
                    mean_disagreement=self.done[picture.name]["mean_disagreement"],
                )
            )
        n = len(self.inputs)
        shown = f"the first {len(rows)} of {n:,} pictures" if len(rows) < n else f"{n} pictures"
        note = shown
        if self.restorer.generative:
            note += f", {self.config.n_samples} samples each; disagreement: white is {WHITE}"
        return restoration_sheet(rows, title=f"Restored by {self.restorer.name}", note=note)

    def _batches(self, pictures: Iterator[InputPicture]) -> Iterator[list[InputPicture]]:
        """Neighbours of one size, as many as fill a batch."""
        config = self.config
        for shape, alike in itertools.groupby(pictures, key=lambda picture: picture.pixels.shape):
            full = self.restorer.chunk_size(config.n_samples, config.batch_size, shape)
            while batch := list(itertools.islice(alike, full)):
                yield batch

    def _samples(self, pictures: Sequence[InputPicture], n_samples: int) -> Tensor:
        given = _floats(pictures)
        return self.restorer.samples(
            given,
            picture_seeds(given, self.config.seed),
            n_samples=n_samples,
            batch_size=self.config.batch_size,
        )

    def _restore(self, pictures: Sequence[InputPicture]) -> None:
        samples = self._samples(pictures, self.config.n_samples)
        mean, disagreement = summarised(samples)
        seeds = picture_seeds(_floats(pictures), self.config.seed).tolist()
        for k, picture in enumerate(pictures):
            _write(self._path("mean", picture.name), _bytes(mean[k]))
            _write(self._path("disagreement", picture.name), grey_of(disagreement[k]))
            if len(self.done) < N_ROWS:
                first = samples[:N_SAMPLES_SHOWN, k]
                self.shown[picture.name] = tuple(_bytes(sample) for sample in first)
            if self.config.keep_samples:
                for number, sample in enumerate(samples[:, k]):
                    _write(self._path("samples", f"{picture.name}-{number}"), _bytes(sample))
            self.done[picture.name] = {
                "name": picture.name,
                **picture.facts,
                "seed": seeds[k],
                "n_samples": len(samples),
                "mean_disagreement": round(disagreement[k].mean().item(), 6),
            }

    def _path(self, folder: str, name: str) -> Path:
        return self.out / folder / f"{name}.png"


def grey_of(disagreement: Tensor) -> Pixels:
    """A disagreement (h, w) as grey levels on the fixed scale: 255 stands for WHITE or more."""
    return _bytes((disagreement / WHITE).clamp(0, 1))


def _settings(restorer: OpenRestorer, inputs: Inputs, config: Restoration) -> dict[str, Any]:
    """Everything that the restored pictures depend on, as JSON has it."""

    def check(picture: InputPicture) -> None:
        height, width = picture.pixels.shape[1:]
        wrong = restorer.why_not(height, width)
        if wrong is not None:
            fix = f"add --size {restorer.size_for(height, width)}, which crops and resizes them"
            if "file" not in picture.facts:
                fix = "use a restorer that was trained on pictures of this size"
            raise SourceError(f"{picture.facts.get('file', picture.name)} {wrong}; {fix}")

    settings = {
        "model": {
            "name": restorer.name,
            "fingerprint": restorer.fingerprint,
            "settings": restorer.settings,
        },
        "input": {
            **inputs.description,
            "n_pictures": len(inputs),
            "fingerprint": content_of(inputs, check),
        },
        "n_samples": config.n_samples,
        "seed": config.seed,
        "keep_samples": config.keep_samples,
    }
    as_json: dict[str, Any] = json.loads(json.dumps(settings))
    return as_json


def _check_free(out: Path, inputs: Inputs) -> None:
    if Path(inputs.location) in out.absolute().parents:
        raise ValueError(
            f"--out {out} lies in --input {inputs.location}, so that its pictures would be "
            "restored next time; choose a folder outside"
        )
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder")
    if not out.is_dir() or any((out / name).is_file() for name in (FINISHED, UNFINISHED)):
        return
    if any(not entry.name.startswith(TEMPORARY_PREFIX) for entry in out.iterdir()):
        raise ValueError(
            f"--out {out} is not empty and holds no restoration; choose another folder"
        )


def _found(path: Path, settings: dict[str, Any], out: Path) -> dict[str, Any] | None:
    """The record in `path`, if there is one; it has to be of the same settings."""
    if not path.is_file():
        return None
    fix = "use those settings again, another --out, or --fresh to replace it"
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
        there = record["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreMismatchError(f"{path} is not a restoration's ({error}); {fix}") from error
    versions = [{"version": record.get("version")} | there, {"version": VERSION} | settings]
    differences = manifest_differences(*versions)
    if differences:
        shown = "; ".join(differences[:N_DIFFERENCES_SHOWN])
        more = len(differences) - N_DIFFERENCES_SHOWN
        raise StoreMismatchError(
            f"{out} was restored with other settings: {shown}"
            + (f" and {more} more" if more > 0 else "")
            + f"; {fix}"
        )
    return record


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """`out`, made if needed, for this process alone."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise StorageError(f"cannot write to {out} ({error.strerror}); choose another") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StorageError(
                f"another process is restoring into {out}; wait for it, or choose another --out"
            ) from error
        yield
    finally:
        os.close(descriptor)


def _floats(pictures: Sequence[InputPicture]) -> Tensor:
    """float32 (n, 3, h, w) in [0, 1]."""
    return torch.from_numpy(np.stack([picture.pixels for picture in pictures])).float() / 255


def _bytes(values: Tensor) -> Pixels:
    """[0, 1] to 0 .. 255, rounded."""
    pixels: Pixels = (values * 255).round().to(torch.uint8).numpy()
    return pixels


def _write(path: Path, pixels: Pixels) -> None:
    """A PNG of (3, h, w) in colour or (h, w) in grey."""
    rows = np.ascontiguousarray(pixels.transpose(1, 2, 0) if pixels.ndim == 3 else pixels)
    content = io.BytesIO()
    Image.fromarray(rows).save(content, "png")
    with full_device_explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, content.getvalue())


def _read(path: Path) -> npt.NDArray[np.uint8]:
    with Image.open(path) as image:
        return np.asarray(image)
