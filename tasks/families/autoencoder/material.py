"""The images of an attack on an autoencoder: read, degraded, and checked against each other; and
what f says of its chances."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from recon_core.attacks.autoencoder.preflight import (
    NOT_FITTED,
    Samples,
    autoencoder_preflight,
    reconstruction_errors,
)
from recon_core.degradation import check_degraded, degrade, mask_from_picture, mask_pattern
from recon_core.types import seeded_generator
from recon_core.victims.preflight import Preflight
from storage.errors import SourceError, shown
from storage.sources.picture_files import Reading, Tally
from tasks.attack_file.pictures import (
    Named,
    PictureFolder,
    Shape,
    Split,
    default_split,
    in_channels,
    picture_folder,
    pixels_of,
    read_source,
    side_of,
)
from tasks.attack_file.record import chances
from tasks.families.autoencoder.inputs import (
    NO_CONTROL,
    AutoencoderJob,
    AutoencoderVictim,
    read_victim,
)

SHARED = (
    "control images of SOURCE are among the training images, too; a control is what the network "
    "never saw"
)


@dataclass(frozen=True, eq=False)
class Case:
    """Degraded images of one kind: what the attack is given. `side` is "train" or "control"; `mask`
    is True where a pixel was kept, None where it or `original` is not known."""

    mask_name: str
    side: str
    names: tuple[str, ...]
    y: Float[Tensor, "n c h w"]
    mask: Bool[Tensor, "n c h w"] | None
    original: Float[Tensor, "n c h w"] | None


@dataclass(frozen=True, eq=False)
class Material:
    """All pictures of a job; `train` and `control` are None where they are not known, `degraded`
    where images are degraded here."""

    train: Named | None
    control: Named | None
    cases: tuple[Case, ...]
    degraded: Named | None = None


def shape_hint(job: AutoencoderJob) -> Shape | None:
    """The shape of the job's images, as far as the pictures themselves say it."""
    if job.degraded is not None:
        return 3, *picture_folder(job.degraded, "--degraded").first_size()
    side = side_of(job.data or "")
    return None if side is None else (3, side, side)


def read_material(job: AutoencoderJob, shape: Shape) -> Material:
    """Everything that is attacked, and what is known beside it. Raises SourceError for pictures
    that are not there, cannot be read or do not fit, ValueError for settings that do not fit
    together."""
    if job.degraded is not None:
        return _degraded_material(job, shape, job.degraded)
    assert job.data is not None
    split = job.split or default_split(job.data, "train")
    train = _read(job, job.data, split, shape)
    control = _control(job, split, shape)
    train.check_disjoint(control, SHARED)
    sides = [("train", train), *([] if control is None else [("control", control)])]
    masks = _masks(job, shape)
    cases = [
        _case(job, name, side, named, mask) for name, mask in masks.items() for side, named in sides
    ]
    return Material(train, control, tuple(cases))


def _read(job: AutoencoderJob, source: str, split: Split, shape: Shape) -> Named:
    return read_source(source, split, shape, job.limit, job.seed, skip_corrupt=job.skip_corrupt)


def _control(job: AutoencoderJob, split: Split, shape: Shape) -> Named | None:
    """Images that the network never saw: given, or what the source holds out."""
    if job.control == NO_CONTROL:
        return None
    if job.control is not None:
        return _read(job, job.control, default_split(job.control, "heldout"), shape)
    if job.data is None or split == "all":
        return None
    other: Split = "heldout" if split == "train" else "train"
    return _read(job, job.data, other, shape)


def _masks(job: AutoencoderJob, shape: Shape) -> dict[str, Bool[Tensor, "h w"]]:
    """By name, those that are drawn and those that are pictures."""
    _c, height, width = shape
    masks = {
        name: mask_pattern(name, height, width, generator=seeded_generator(job.seed, 0, name))
        for name in job.masks
    }
    for path in job.mask_files:
        if path.stem in masks:
            raise ValueError(f"two masks are called {path.stem}; rename {path}")
        masks[path.stem] = _read_mask(path, shape)
    return masks


def _read_mask(path: Path, shape: Shape) -> Bool[Tensor, "h w"]:
    """True where a picture is white; ValueError if it does not fit or erases all or nothing."""
    if not path.is_file():
        raise SourceError(f"--mask {path} does not exist")
    try:
        return mask_from_picture(pixels_of(path), *shape[1:])
    except ValueError as error:
        raise ValueError(f"--mask {path}: {error}") from error


def _case(job: AutoencoderJob, name: str, side: str, named: Named, mask: Bool[Tensor, ...]) -> Case:
    """Images degraded by one mask, or by one each, with noise of each image's own."""
    generators = tuple(
        seeded_generator(job.seed, row, f"noise {name} {side}") for row in range(len(named))
    )
    y = degrade(named.images, mask, sigma=job.noise, generators=generators if job.noise else ())
    wide = (mask if mask.dim() == 3 else mask.expand(len(named), -1, -1)).unsqueeze(1)
    return Case(name, side, named.names, y, wide.expand_as(y).contiguous(), named.images)


def _degraded_material(job: AutoencoderJob, shape: Shape, folder: Path) -> Material:
    """Pictures that are degraded already; their originals by name, and control images with the
    same pixels missing."""
    found = picture_folder(folder, "--degraded")
    files = found.files[: job.limit]
    inside = [file.relative_to(found.folder) for file in files]
    names = tuple(shown(str(file)) for file in inside)
    y, reading = _same_size(files, shape, "--degraded", found)
    check_degraded(y, job.noise or None)
    degraded = Named(f"folder:{folder}", y, names, reading=reading)
    train = None
    if job.originals is not None:
        absent = [file for file in inside if not (job.originals / file).is_file()]
        if absent:
            raise SourceError(
                f"{job.originals / absent[0]} does not exist; --originals need a picture of the "
                f"same name for each of the {len(names)} in {folder}"
            )
        originals = [job.originals / file for file in inside]
        images, reading = _same_size(originals, shape, "--originals", found)
        train = Named(f"folder:{job.originals}", images, names, reading=reading)
    known = None
    if job.mask_files:
        mask = _read_mask(job.mask_files[0], shape)
        known = mask.expand(y.shape).contiguous()
    cases = [Case("given", "train", names, y, known, None if train is None else train.images)]
    control = _control(job, "all", shape)
    if control is not None:
        if train is not None:
            train.check_disjoint(control, SHARED)
        holes = (y > 0).any(1) if known is None else known[:, 0]
        rows = torch.arange(len(control)) % len(holes)
        cases.append(_case(job, "given", "control", control, holes[rows]))
    return Material(train, control, tuple(cases), degraded)


def _same_size(
    files: list[Path], shape: Shape, option: str, of: PictureFolder
) -> tuple[Float[Tensor, "n c h w"], Reading]:
    """Images, every one exactly of the network's size: what is degraded is not resized."""
    pictures = []
    tally = Tally(how=of.how, said=of.said)
    for file in files:
        pixels = pixels_of(file, of.how, tally)
        if pixels.shape[:2] != shape[1:]:
            raise SourceError(
                f"{file} has {pixels.shape[0]}x{pixels.shape[1]} pixels, expected "
                f"{shape[1]}x{shape[2]} as the network takes them; {option} pictures are not "
                "resized, as that would mix missing pixels with known ones"
            )
        pictures.append(pixels.transpose(2, 0, 1))
    return in_channels(np.stack(pictures), shape[0]), tally.reading()


N_NOISE = 8
MAX_IMAGES = 64
"""Images of each kind that preflight looks at."""


@dataclass(frozen=True, eq=False)
class PreparedAutoencoder:
    """Start of an attack, checked."""

    victim: AutoencoderVictim
    material: Material
    preflight: Preflight

    def record(self) -> dict[str, Any]:
        """The preflight as JSON."""
        numbers = self.preflight.numbers
        return chances(self.preflight) | {
            "numbers": {name: float(f"{value:.6g}") for name, value in numbers.items()},
            "victim": self.victim.facts,
        }


def prepare_autoencoder(job: AutoencoderJob, device: str = "cpu") -> PreparedAutoencoder:
    """Read and check the job's files, and ask f. Raises WeightsError or SourceError for files that
    cannot be used, ValueError for settings that do not fit together."""
    victim = read_victim(job, functools.partial(shape_hint, job))
    material = read_material(job, victim.shape)
    train = None if material.train is None else material.train.images[:MAX_IMAGES].to(device)
    control = None if material.control is None else material.control.images[:MAX_IMAGES].to(device)
    noise = [
        torch.rand(victim.shape, generator=seeded_generator(job.seed, row, "preflight noise"))
        for row in range(N_NOISE)
    ]
    samples = Samples(
        images=train,
        control=control,
        noise=torch.stack(noise).to(device),
        generators=lambda n: [seeded_generator(job.seed, row, "preflight") for row in range(n)],
    )
    f = victim.function(device)
    remedy = "" if train is None else _remedy(victim, train, device)
    return PreparedAutoencoder(victim, material, autoencoder_preflight(f, samples, remedy=remedy))


def _remedy(victim: AutoencoderVictim, images: Tensor, device: str) -> str:
    """Which other activation would reconstruct the images, if one does and this one does not."""
    if float(reconstruction_errors(victim.function(device), images).mean()) <= NOT_FITTED:
        return ""
    losses = {
        name: float(reconstruction_errors(function(device), images).mean())
        for name, function in victim.alternatives.items()
    }
    best = min(losses, key=lambda name: losses[name], default=None)
    if best is None or not losses[best] <= NOT_FITTED:
        return ""
    return f"With --activation {best} the error is {losses[best]:.2g}."
