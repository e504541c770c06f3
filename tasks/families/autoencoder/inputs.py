"""Inputs of an attack on somebody's autoencoder: f, whatever is in the file, as one function of
images in [0, 1] that takes any number of rows; the images, read, degraded, and checked against each
other; and what f says of its chances."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.autoencoder.preflight import (
    NOT_FITTED,
    Samples,
    autoencoder_preflight,
    reconstruction_errors,
)
from recon_core.attacks.plug_and_play import Iteration, KnownMask, UnknownMask
from recon_core.degradation import MASKS, check_degraded, degrade, mask_from_picture, mask_pattern
from recon_core.strict import Count, Positive, Strict, Within
from recon_core.types import seeded_generator
from recon_core.victims.preflight import Preflight
from storage.errors import SourceError, shown
from storage.sources.pictures import Reading
from storage.weights import WeightsError, read_weights
from tasks.attack_file.comparison import chances
from tasks.attack_file.networks import Network, in_rows, read_program
from tasks.attack_file.pictures import (
    Named,
    PictureFolder,
    Shape,
    Split,
    by_channel,
    default_split,
    in_channels,
    picture_folder,
    pixels_of,
    read_source,
    shape_of,
    size_of,
)
from tasks.devices import check_memory
from tasks.families.autoencoder.networks import Architecture, build, own_architecture

Method = NoiseAware | UnknownMask | KnownMask | Iteration
ROWS_AT_ONCE = 256
NOT_TAKEN = (RuntimeError, ValueError, TypeError, IndexError, torch.jit.Error)
"""Torch's ways of saying that a program does not take such images."""
NO_CONTROL = "none"


@dataclass(frozen=True, kw_only=True)
class AutoencoderJob(Strict):
    """An attack on a given autoencoder: everything but where it is computed.

    Either `data`, images that get degraded by `masks` (names) and `mask_files` (pictures, black is
    missing) with Gaussian noise, or `degraded`, a folder of pictures that are degraded already.
    `control`: images that the network never saw, "none" for none; None takes what `data` holds out.
    `mean` and `std`: how inputs are normalised, one number or one per channel. `batch`: the rows
    that a program takes at once. `limit`: images of each kind. `n_shown`: on the contact sheet.
    `skip_corrupt`: pictures of sources that cannot be read are left out, and are no error.
    """

    weights: Path
    out: Path
    network: Architecture = field(default_factory=Architecture)
    shape: Shape | None = None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[Positive, ...] = (1.0,)
    batch: Count | None = None
    trust: bool = False
    data: str | None = None
    split: Split | None = None
    control: str | None = None
    limit: Count = 50
    degraded: Path | None = None
    originals: Path | None = None
    masks: tuple[str, ...] = ("random", "half")
    mask_files: tuple[Path, ...] = ()
    noise: Annotated[float, Within("[0, inf)", fix="0.02 is paper 000's")] = 0.0
    methods: tuple[Method, ...] = field(default_factory=lambda: (NoiseAware(),))
    seed: int = 0
    n_shown: Count = 10
    skip_corrupt: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.data is None) == (self.degraded is None):
            raise ValueError(
                "give either --data, images that are degraded to see whether they come back, or "
                "--degraded, a folder of pictures that are degraded already"
            )
        if self.originals is not None and self.degraded is None:
            raise ValueError("--originals belong to --degraded; with --data they are known")
        kinds = [method.kind for method in self.methods]
        if not kinds or len(set(kinds)) < len(kinds):
            raise ValueError(f"methods={kinds}; give at least one, and each once")
        if self.degraded is None:
            unknown = [name for name in self.masks if name not in MASKS]
            if unknown:
                raise ValueError(f"unknown mask {unknown[0]!r}; there are: {', '.join(MASKS)}")
            if not self.masks and not self.mask_files:
                raise ValueError(f"no masks; give --masks {','.join(MASKS)} or --mask PICTURE")
        elif len(self.mask_files) > 1:
            raise ValueError("--degraded pictures have one --mask, if it is known")
        elif "known" in kinds and not self.mask_files:
            raise ValueError("the method 'known' needs the mask: give --mask PICTURE")


@dataclass(frozen=True, eq=False)
class AutoencoderVictim:
    """A network to be attacked. `function(device)` is f for images (b, c, h, w) in [0, 1] as the
    attack has them; `alternatives` is the same with each other activation that it may have."""

    sha256: str
    shape: Shape
    facts: dict[str, Any]
    function: Callable[[str], Callable[[Tensor], Tensor]]
    alternatives: dict[str, Callable[[str], Callable[[Tensor], Tensor]]]


def read_victim(job: AutoencoderJob, hint: Callable[[], Shape | None]) -> AutoencoderVictim:
    """The network in the job's file; `hint` is asked for the images' shape if nothing else says it.
    Raises WeightsError if the file cannot be used, is not trusted, or gives no images back,
    ValueError for settings that do not fit the network."""
    others: dict[str, Network] = {}
    program = read_program(job.weights, trust=job.trust, whole=True)
    if program is None:
        file = read_weights(job.weights)
        own = own_architecture(file)
        if own is not None:  # the command line is still checked, or replaces it
            said = own[0] if job.network == Architecture() else job.network
            job = replace(job, network=said, shape=job.shape or own[1])
        network, others = build(file, job.network)
    elif job.network == Architecture():
        network = program
    else:
        raise ValueError(
            f"{job.weights} is a program, which has its architecture in it; leave out --arch, "
            "--activation, --leak, --last, --skips and --convolutions"
        )
    found, shape = network.shape, _shape_on(network, job, hint)
    flat, batch = len(found or shape) == 1, job.batch or network.batch
    rows = f"{batch or 1} images of {_times(shape)}"
    check_memory(4.0 * (batch or 1) * math.prod(shape), rows, "correct --shape or --batch")
    if program is not None and found is None:
        flat, batch = _probed(network.on(shape, "cpu"), shape, job)

    def function(of: Network) -> Callable[[str], Callable[[Tensor], Tensor]]:
        return lambda device: _in_rows(job, of.on(shape, device), flat=flat, batch=batch)

    facts = network.facts
    if program is not None:
        facts |= {"input": "vectors" if flat else "images", "rows at once": str(batch or "any")}
    facts["images"] = _times(shape)
    if set(job.mean) != {0.0} or set(job.std) != {1.0}:
        mean, std = (", ".join(map(str, numbers)) for numbers in (job.mean, job.std))
        facts["normalised"] = f"mean {mean}; std {std}"
    try:
        function(network)("cpu")(torch.full((3, *shape), 0.5))
    except (ValueError, WeightsError):
        raise
    except Exception as error:  # a program may fail in any way
        raise WeightsError(
            f"{job.weights} fails on images of {_times(shape)} ({type(error).__name__}: "
            f"{(str(error).strip().splitlines() or [''])[-1][:200]}); give --shape CxHxW or "
            "--batch N, the rows it takes at once"
        ) from error
    alternatives = {name: function(other) for name, other in others.items()}
    return AutoencoderVictim(network.sha256, shape, facts, function(network), alternatives)


def _shape_on(network: Network, job: AutoencoderJob, hint: Callable[[], Shape | None]) -> Shape:
    """The shape of the images that a network takes."""
    found = network.shape
    shape = job.shape or (None if found is None else shape_of(math.prod(found)))
    if job.shape is None and found is not None and len(found) == 3:
        shape = found[0], found[1], found[2]
    shape = shape or hint()
    if shape is None:
        raise ValueError(
            f"{job.weights} does not say of which shape images are; give --shape CxHxW"
        )
    if network.channels is not None and job.shape is None:
        shape = (network.channels, *shape[1:])
    if found is not None and found not in (shape, (math.prod(shape),)):
        takes = f"{found[0]} numbers" if len(found) == 1 else f"inputs of {_times(found)}"
        raise WeightsError(
            f"{job.weights} takes {takes}, not images of {_times(shape)}; correct --shape, or "
            "leave it out"
        )
    if network.channels not in (None, shape[0]) or any(n % network.multiple for n in shape[1:]):
        raise WeightsError(
            f"{job.weights} takes images of {network.channels} channels with sides that are "
            f"multiples of {network.multiple}, not {_times(shape)}; correct --shape"
        )
    return shape


def _probed(
    f: Callable[[Tensor], Tensor], shape: Shape, job: AutoencoderJob
) -> tuple[bool, int | None]:
    """Whether a program takes vectors, and how many rows: found by trying."""
    for flat in (False, True):
        for rows in (job.batch,) if job.batch else (2, 1):
            x = torch.full((rows, math.prod(shape)) if flat else (rows, *shape), 0.5)
            with torch.no_grad(), suppress(*NOT_TAKEN):
                y = f(x)
                if isinstance(y, Tensor) and y.shape == x.shape:
                    return flat, 1 if rows == 1 else job.batch
    return False, job.batch


def _in_rows(
    job: AutoencoderJob, f: Callable[[Tensor], Tensor], *, flat: bool, batch: int | None
) -> Callable[[Tensor], Tensor]:
    """f of images in [0, 1], a number of rows at a time; a batch that must be full is filled up."""

    def checked(x: Tensor) -> Tensor:
        z = x.flatten(1) if flat else x
        y = f(z)
        if not isinstance(y, Tensor) or y.shape != z.shape:
            got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise WeightsError(
                f"{job.weights} gives {got} for {tuple(z.shape)}; an autoencoder gives images of "
                "the shape of its input, alone"
            )
        return y.view_as(x).to(x.dtype)

    rows = in_rows(checked, batch)

    def whole(x: Tensor) -> Tensor:
        mean, std = by_channel(job.mean, "mean", x), by_channel(job.std, "std", x)
        with torch.set_grad_enabled(torch.is_grad_enabled() and x.requires_grad):
            parts = ((x - mean) / std).split(batch or ROWS_AT_ONCE)
            return torch.cat([rows(part) for part in parts]) * std + mean

    return whole


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


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
    source, option = (job.data, "--data") if job.data else (f"folder:{job.degraded}", "--degraded")
    size = size_of(source, option)
    return None if size is None else (3, *size)


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
    masks = {
        name: mask_pattern(name, *shape[1:], generator=seeded_generator(job.seed, 0, name))
        for name in job.masks
    }
    for path in job.mask_files:
        if path.stem in masks:
            raise ValueError(f"two masks are called {path.stem}; rename {path}")
        masks[path.stem] = _read_mask(path, shape)
    sides = [("train", train), *([] if control is None else [("control", control)])]
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
    reading = Reading(how=of.how, said=of.said)
    for file in files:
        pixels = pixels_of(file, of.how, reading)
        if pixels.shape[:2] != shape[1:]:
            raise SourceError(
                f"{file} has {pixels.shape[0]}x{pixels.shape[1]} pixels, expected "
                f"{shape[1]}x{shape[2]} as the network takes them; {option} pictures are not "
                "resized, as that would mix missing pixels with known ones"
            )
        pictures.append(pixels.transpose(2, 0, 1))
    return in_channels(np.stack(pictures), shape[0]), reading


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
    train, control = (
        None if named is None else named.images[:MAX_IMAGES].to(device)
        for named in (material.train, material.control)
    )
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

    f, remedy = victim.function(device), ""
    if train is not None and not float(reconstruction_errors(f, train).mean()) <= NOT_FITTED:
        losses = {
            name: float(reconstruction_errors(function(device), train).mean())
            for name, function in victim.alternatives.items()
        }
        best = min(losses, key=lambda name: losses[name], default=None)
        if best is not None and losses[best] <= NOT_FITTED:
            remedy = f"With --activation {best} the error is {losses[best]:.2g}."
    return PreparedAutoencoder(victim, material, autoencoder_preflight(f, samples, remedy=remedy))
