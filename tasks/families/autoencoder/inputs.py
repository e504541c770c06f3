"""Inputs of an attack on somebody's autoencoder, and f: whatever is in the file, as one function
of images in [0, 1] that takes any number of rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.plug_and_play import Iteration, KnownMask, UnknownMask
from recon_core.degradation import MASKS
from storage.weights import WeightsError, check_weights_file, read_weights
from tasks.attack_file.pictures import Shape, Split, by_channel, shape_of
from tasks.attack_file.programs import Program, in_rows, program_kind, read_program
from tasks.attack_file.record import check_least, check_std
from tasks.devices import check_memory
from tasks.families.autoencoder.networks import (
    Architecture,
    Built,
    build,
    candidates,
    facts,
    own_architecture,
)

Method = NoiseAware | UnknownMask | KnownMask | Iteration
ROWS_AT_ONCE = 256
NO_CONTROL = "none"


@dataclass(frozen=True, kw_only=True)
class AutoencoderJob:
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
    std: tuple[float, ...] = (1.0,)
    batch: int | None = None
    trust: bool = False
    data: str | None = None
    split: Split | None = None
    control: str | None = None
    limit: int = 50
    degraded: Path | None = None
    originals: Path | None = None
    masks: tuple[str, ...] = ("random", "half")
    mask_files: tuple[Path, ...] = ()
    noise: float = 0.0
    methods: tuple[Method, ...] = field(default_factory=lambda: (NoiseAware(),))
    seed: int = 0
    n_shown: int = 10
    skip_corrupt: bool = False
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if (self.data is None) == (self.degraded is None):
            raise ValueError(
                "give either --data, images that are degraded to see whether they come back, or "
                "--degraded, a folder of pictures that are degraded already"
            )
        if self.originals is not None and self.degraded is None:
            raise ValueError("--originals belong to --degraded; with --data they are known")
        check_least(self, limit=1, n_shown=1, batch=1)
        check_std(self.std)
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise ValueError(f"noise={self.noise} is no standard deviation; 0.02 is paper 000's")
        self._check_methods()

    def _check_methods(self) -> None:
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
    attack has them; `with_activation` the same network with another one."""

    sha256: str
    shape: Shape
    facts: dict[str, Any]
    function: Callable[[str], Callable[[Tensor], Tensor]]
    alternatives: dict[str, Callable[[str], Callable[[Tensor], Tensor]]]


def read_victim(job: AutoencoderJob, hint: Callable[[], Shape | None]) -> AutoencoderVictim:
    """The network in the job's file; `hint` is asked for the images' shape if nothing else says it.
    Raises WeightsError if the file cannot be used, is not trusted, or gives no images back,
    ValueError for settings that do not fit the network."""
    check_weights_file(job.weights)
    kind = program_kind(job.weights)
    if kind is None:
        return _from_weights(job, hint)
    return _from_program(job, read_program(job.weights, kind, trust=job.trust), hint)


def _from_weights(job: AutoencoderJob, hint: Callable[[], Shape | None]) -> AutoencoderVictim:
    file = read_weights(job.weights)
    own = own_architecture(file)
    if own is not None:  # what is said on the command line is still checked, or replaces it
        said = own[0] if job.network == Architecture() else job.network
        job = replace(job, network=said, shape=job.shape or own[1])
    built = build(file, job.network)
    shape = _shape(job, built, hint)

    def function(network: Built) -> Callable[[str], Callable[[Tensor], Tensor]]:
        return lambda device: _in_rows(job, network.on(device, shape), flat=False, batch=None)

    found = {"file": str(job.weights), "format": file.kind, "sha256": file.sha256}
    found |= facts(built, job.network) | _input_facts(job, shape)
    others: dict[str, Callable[[str], Callable[[Tensor], Tensor]]] = {
        name: function(build(file, replace(job.network, activation=name)))
        for name in candidates(built)
    }
    return _tried(AutoencoderVictim(file.sha256, shape, found, function(built), others), job)


def _from_program(
    job: AutoencoderJob, program: Program, hint: Callable[[], Shape | None]
) -> AutoencoderVictim:
    if job.network != Architecture():
        raise ValueError(
            f"{job.weights} is a program, which has its architecture in it; leave out --arch, "
            "--activation, --leak, --last, --skips and --convolutions"
        )
    found = program.shape
    shape = job.shape or (found if found is not None and len(found) == 3 else None)
    if shape is None and found is not None:
        shape = shape_of(math.prod(found))
    shape = shape or hint()
    if shape is None:
        raise ValueError(
            f"{job.weights} does not say of which shape images are; give --shape CxHxW"
        )
    shape = (shape[0], shape[1], shape[2])
    if found is not None and found not in (shape, (math.prod(shape),)):
        raise WeightsError(
            f"{job.weights} takes inputs of {_times(found)}, not images of {_times(shape)}; "
            "correct --shape, or leave it out"
        )
    flat, batch = len(found or shape) == 1, job.batch or program.batch
    rows = f"--batch {batch} of images of {_times(shape)}"
    check_memory(4.0 * (batch or 1) * math.prod(shape), rows, "give the rows it takes at once")
    if found is None:
        flat, batch = _probed(program, shape, job)
    texts = {"file": str(job.weights), "format": program.kind, "sha256": program.sha256}
    texts |= {"architecture": "a program", "input": "vectors" if flat else "images"}
    texts |= {"rows at once": str(batch or "any")} | _input_facts(job, shape)
    victim = AutoencoderVictim(
        program.sha256,
        shape,
        texts,
        lambda device: _in_rows(job, program.on(device), flat=flat, batch=batch),
        {},
    )
    return _tried(victim, job)


def _shape(job: AutoencoderJob, built: Built, hint: Callable[[], Shape | None]) -> Shape:
    """The images' shape: as given, as a dense network has it, or as the images have it."""
    shape = job.shape or (None if built.d is None else shape_of(built.d)) or hint()
    if shape is None:
        raise ValueError("the weights do not tell the shape of the images; give --shape CxHxW")
    if built.d is not None and math.prod(shape) != built.d:
        raise WeightsError(
            f"{job.weights} takes {built.d} numbers, but images of {_times(shape)} have "
            f"{math.prod(shape)}; correct --shape"
        )
    if built.channels is not None:
        if job.shape is None:
            shape = (built.channels, *shape[1:])
        if shape[0] != built.channels or any(side % built.multiple for side in shape[1:]):
            raise WeightsError(
                f"{job.weights} takes images of {built.channels} channels with sides that are "
                f"multiples of {built.multiple}, not {_times(shape)}; correct --shape"
            )
    return shape


def _probed(program: Program, shape: Shape, job: AutoencoderJob) -> tuple[bool, int | None]:
    """Whether a program takes vectors, and how many rows: found by trying."""
    f = program.on("cpu")

    def works(rows: int, *, flat: bool) -> bool:
        x = torch.full((rows, math.prod(shape)) if flat else (rows, *shape), 0.5)
        try:
            with torch.no_grad():
                y = f(x)
        except (
            RuntimeError,
            ValueError,
            TypeError,
            IndexError,
            torch.jit.Error,
        ):  # torch's ways of saying no
            return False
        return isinstance(y, Tensor) and y.shape == x.shape

    rows = job.batch or 2
    for flat in (False, True):
        if works(rows, flat=flat):
            return flat, job.batch
        if job.batch is None and works(1, flat=flat):
            return flat, 1
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


def _tried(victim: AutoencoderVictim, job: AutoencoderJob) -> AutoencoderVictim:
    """The victim, if f can be applied at all."""
    x = torch.full((3, *victim.shape), 0.5)
    try:
        victim.function("cpu")(x)
    except (ValueError, WeightsError):
        raise
    except Exception as error:  # a program may fail in any way
        raise WeightsError(
            f"{job.weights} fails on images of {_times(victim.shape)} ({type(error).__name__}: "
            f"{(str(error).strip().splitlines() or [''])[-1][:200]}); give --shape CxHxW or "
            "--batch N, the rows it takes at once"
        ) from error
    return victim


def _input_facts(job: AutoencoderJob, shape: Shape) -> dict[str, Any]:
    found: dict[str, Any] = {"images": _times(shape)}
    if set(job.mean) != {0.0} or set(job.std) != {1.0}:
        found["normalised"] = f"mean {', '.join(map(str, job.mean))}; std " + ", ".join(
            map(str, job.std)
        )
    return found


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
