"""An InstaHide challenge as a folder: what is published, and separate from it what is secret.

    encodings.npy       float32 (m, c, h, w), every pixel with a random sign
    public.npy          float32 (p, c, h, w), the public images, in the encodings' units
    labels.npy          float32 (m, n_classes), mixed labels, where images have labels
    challenge.json      the scheme, the units of pixels, the number of private images
    secret/             private.npy, edges.npy, weights.npy, public_ids.npy, public_weights.npy and
                        secret.json: for scoring only

Nothing is unpickled. A folder is made whole or not at all.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.documents import read_array, read_document
from storage.errors import DocumentError, SourceError
from storage.files import whole_folder, write_file, write_json
from storage.sources.pictures import CorruptPictureError, Reading, decoded
from storage.sources.trees import pictures_below

SCHEMA, VERSION = "palimpsest-instahide-challenge", 1
FACTS = "challenge.json"
SECRET = "secret"

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Challenge:
    """Published part of a challenge. `facts`: `scheme`, `n_private` and `pixels`, as far as they
    are known. `read`: what was done to picture files, for people."""

    encodings: Array
    public: Array | None = None
    labels: Array | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    secret: Mapping[str, Array] = field(default_factory=dict)
    read: Mapping[str, str] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int]:
        _m, c, h, w = self.encodings.shape
        return c, h, w


def write_challenge(folder: Path, challenge: Challenge, secret_facts: Mapping[str, Any]) -> None:
    """Everything, under its name only when it is whole. Raises ValueError unless the folder is
    empty."""
    with whole_folder(folder) as rough:
        (rough / SECRET).mkdir()
        arrays = {
            "encodings": challenge.encodings,
            "public": challenge.public,
            "labels": challenge.labels,
            **{f"{SECRET}/{name}": array for name, array in challenge.secret.items()},
        }
        for name, array in arrays.items():
            if array is not None:
                content = io.BytesIO()
                np.save(content, np.ascontiguousarray(array), allow_pickle=False)
                write_file(rough / f"{name}.npy", content.getvalue())
        write_json(rough / SECRET / "secret.json", dict(secret_facts))
        write_json(rough / FACTS, {"schema": SCHEMA, "version": VERSION, **challenge.facts})


def read_challenge(
    path: Path,
    *,
    public: Path | None = None,
    labels: Path | None = None,
    truth: Path | None = None,
) -> Challenge:
    """A folder made by `write_challenge`, a .npy of encodings, or a folder of pictures. Pictures
    are absolute values of pixels, 0 to 255 for 0 to 1. `public`, `labels` and `truth` stand for
    what the folder has. Raises SourceError for what cannot be read or does not fit together."""
    if not path.exists():
        raise SourceError(f"{path} is not there; give a challenge's folder, a .npy or pictures")
    whole = path.is_dir() and (path / FACTS).is_file()
    facts = _facts(path / FACTS) if whole else {}
    read: dict[str, str] = {}
    encodings = read_images(path / "encodings.npy" if whole else path, "encodings", read)
    if whole:
        own = [path / "public.npy", path / "labels.npy", path / SECRET]
        public, labels, truth = (
            given or (one if one.exists() else None)
            for given, one in zip((public, labels, truth), own, strict=True)
        )
    secret: dict[str, Array] = {}
    if truth is not None:
        if not truth.is_dir():
            raise SourceError(f"{truth} is not a folder; the truth has private.npy and edges.npy")
        if not (truth / "private.npy").is_file():
            raise SourceError(f"{truth} has no private.npy, the images that are compared with")
        secret = {p.stem: read_array(p, "the truth") for p in sorted(truth.glob("*.npy"))}
    found = Challenge(
        encodings=encodings,
        public=None if public is None else read_images(public, "public images", read, signed=True),
        labels=None if labels is None else read_array(labels, "labels"),
        facts=facts,
        secret=secret,
        read=read,
    )
    _check(found)
    return found


def read_images(
    path: Path, what: str, read: dict[str, str] | None = None, *, signed: bool = False
) -> npt.NDArray[np.float32]:
    """(n, c, h, w) from a .npy, channels first or last, or from a folder of pictures, whose pixels
    are from 0 to 1 or, `signed`, from -1 to 1; what was done to these is added to `read`."""
    if path.is_dir():
        pixels, reading = _pictures(path, what)
        if read is not None:
            facts = reading.facts.items()
            read |= {f"{what}, {name}": text for name, text in facts if name != "sizes"}
        values = pixels.transpose(0, 3, 1, 2).astype(np.float32) / 255
        return np.ascontiguousarray(2 * values - 1 if signed else values)
    array = read_array(path, what)
    array = array[:, None] if array.ndim == 3 else array
    if array.ndim != 4:
        raise SourceError(
            f"{what} in {path} have shape {array.shape}; expected (n, c, h, w), (n, h, w, c) or "
            "(n, h, w)"
        )
    if array.shape[1] not in (1, 3) and array.shape[3] in (1, 3):
        array = array.transpose(0, 3, 1, 2)
    if array.shape[1] not in (1, 3):
        raise SourceError(f"{what} in {path} have {array.shape[1]} channels; expected 1 or 3")
    if not np.issubdtype(array.dtype, np.floating):
        raise SourceError(
            f"{what} in {path} are {array.dtype}; expected floating point, in the units of the "
            "scheme (InstaHide: from -1 to 1)"
        )
    if not array.size:
        raise SourceError(f"{what} in {path} are none: shape {array.shape}")
    bad = np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(1))
    if len(bad):
        raise SourceError(f"{what} in {path}: number {bad[0]} has pixels that are not finite")
    return np.ascontiguousarray(array, np.float32)


def _pictures(folder: Path, what: str) -> tuple[npt.NDArray[np.uint8], Reading]:
    walk = pictures_below(folder)
    if not walk.files:
        raise SourceError(f"{folder} has no pictures and no {FACTS}; expected {what}")
    reading = Reading(said=walk.said)
    found: list[npt.NDArray[np.uint8]] = []
    for path in walk.files:
        try:
            picture = decoded(path)
        except CorruptPictureError as error:
            raise SourceError(f"{path} cannot be read: {error}; mend or remove it") from error
        pixels = picture.pixels
        if found and pixels.shape != found[0].shape:
            raise SourceError(
                f"{path} has {pixels.shape[0]} x {pixels.shape[1]} pixels, {walk.files[0].name} "
                f"{found[0].shape[0]} x {found[0].shape[1]}; {what} must be of one size"
            )
        found.append(pixels)
        reading.count(picture.found)
    return np.stack(found), reading


def _check(challenge: Challenge) -> None:
    m, *shape = challenge.encodings.shape
    if challenge.public is not None and list(challenge.public.shape[1:]) != shape:
        raise SourceError(
            f"public images have shape {tuple(challenge.public.shape[1:])}, encodings "
            f"{tuple(shape)}; they must be alike"
        )
    labels = challenge.labels
    if labels is not None and (labels.ndim != 2 or len(labels) != m):
        raise SourceError(f"labels have shape {labels.shape}; expected ({m}, n_classes)")
    if labels is not None and not (_are_numbers(labels) and bool((labels >= 0).all())):
        raise SourceError("labels are not finite numbers of 0 or more: mixed one-hot labels are")
    private = challenge.secret.get("private")
    if private is not None and list(private.shape[1:]) != shape:
        raise SourceError(
            f"the true images have shape {tuple(private.shape[1:])}, encodings {tuple(shape)}"
        )
    if private is not None and not _are_numbers(private):
        raise SourceError("the true images have pixels that are not finite numbers")
    edges = challenge.secret.get("edges")
    if private is not None and edges is not None:
        fits = edges.shape == (m, 2) and np.issubdtype(edges.dtype, np.integer)
        if not fits or edges.min() < 0 or edges.max() >= len(private):
            raise SourceError(
                f"the truth's edges, {edges.dtype} {edges.shape}, are not the two images of each "
                f"of {m} encodings, of {len(private)}; give the --truth of these encodings"
            )


def _are_numbers(array: Array) -> bool:
    return bool(np.issubdtype(array.dtype, np.number) and np.isfinite(array).all())


def _facts(path: Path) -> dict[str, Any]:
    try:
        facts = read_document(path, "make the challenge again")
    except DocumentError as error:
        raise SourceError(str(error)) from error
    if facts.get("schema") != SCHEMA:
        raise SourceError(f"{path} is not the record of a challenge; make it again")
    if facts.get("version") != VERSION:
        raise SourceError(f"{path} is version {facts.get('version')}, expected {VERSION}")
    return facts
