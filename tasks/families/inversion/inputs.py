"""Inputs of an attack on somebody's classifier f = g(h(x)), of which the client sends z = h(x): h
at a cut, images, public images. Refused is what would make numbers wrong without looking wrong:
features that are not finite, that depend on the other images of a batch, or have no gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from recon_core.precision import float32_arithmetic
from recon_core.victims.split import CutClassifier
from storage.weights import WeightsError
from tasks.attack_file.pictures import (
    Named,
    Shape,
    Split,
    by_channel,
    default_split,
    read_source,
)
from tasks.attack_file.programs import in_rows
from tasks.attack_file.record import check_least, check_std
from tasks.evaluation.perceptual import OWN, MapsOf, feature_maps
from tasks.families.inversion.cuts import check_size, chosen_cut, image_shape, probed
from tasks.families.inversion.networks import OUTPUT, Network, read_network

Attack = Literal["paper", "strong", "both"]
H = Callable[[Tensor], Tensor]
ROWS_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class InversionJob:
    """An attack on a given classifier: everything but where it is computed.

    `data`: whose features are sent; `public`: images that the attacker has beside them. `split` is
    of `data`. `mean` and `std`: how the network's inputs are normalised, one number or one per
    channel. `settings`: of the attacks, `sgd.lr` or `strong.zeta`. `perceptual`: see
    `tasks.evaluation.perceptual`. `n_shown`: on the contact sheet and the page.
    `skip_corrupt`: pictures that cannot be read are left out, and are no error.
    """

    weights: Path
    out: Path
    data: str
    cut: str | None = None
    architecture: str | None = None
    public: str | None = None
    split: Split | None = None
    size: int | None = None
    n_classes: int | None = None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    n_images: int = 20
    n_public: int = 100
    attack: Attack = "both"
    n_steps: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    perceptual: str = "own"
    trust: bool = False
    seed: int = 0
    n_shown: int = 20
    skip_corrupt: bool = False
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        check_least(self, n_images=2, n_public=2, n_shown=1, n_steps=1)
        check_std(self.std)
        if self.size is not None:
            check_size(self.size)
        if self.attack not in get_args(Attack):
            raise ValueError(f"attack={self.attack!r} is none of {', '.join(get_args(Attack))}")
        if not all(map(math.isfinite, self.mean)):
            raise ValueError(f"mean={self.mean} must be finite")


@dataclass(frozen=True, eq=False)
class PreparedCut:
    """Start of an attack, checked. `h` takes images in [0, 1] on the device to features
    (b, m); `logits` is None where the file has no g, `maps` where PSIM compares h's own."""

    network: Network
    cut: str
    shape: Shape
    data: Named
    public: Named | None
    h: H
    logits: H | None
    module: nn.Module
    normalise: H
    z: Tensor
    accuracy: float | None
    notes: tuple[str, ...]
    maps: MapsOf | None

    @property
    def facts(self) -> dict[str, Any]:
        """The network and its cut, for people."""
        n_pixels = math.prod(self.shape)
        return self.network.facts | {
            "images": "x".join(map(str, self.shape)),
            "cut": self.cut,
            "features": f"{self.z.shape[1]}, of {n_pixels} pixels and channels",
        }


def prepare_cut(job: InversionJob, device: str = "cpu") -> PreparedCut:
    """Read and check the job's files, and ask the network. Raises WeightsError or SourceError for
    files that cannot be used, ValueError for settings that do not fit together or a cut that cannot
    be attacked."""
    network = read_network(job.weights, job.architecture, trust=job.trust)
    _check_classes(job, network)
    shape = image_shape(network, job.size, job.data)
    if network.shape is None and network.channels is None and not network.cut_inside:
        shape = probed(network, shape)
    maps = None if job.perceptual == OWN else feature_maps(job.perceptual, device)
    cut = chosen_cut(job.cut or network.cut, network, shape)
    data, public = _images(job, shape)
    module = network.on(shape, device)

    def normalise(x: Tensor) -> Tensor:
        mean, std = (by_channel(getattr(job, name), name, x) for name in ("mean", "std"))
        return (x - mean) / std

    whole = in_rows(lambda x: module(normalise(x)), network.batch)
    cutter = module if cut == OUTPUT else CutClassifier(module, cut)
    h = in_rows(lambda x: cutter(normalise(x)).flatten(1), network.batch)
    with float32_arithmetic("float32", torch.device(device)):
        z = _features(h, data, network, cut, device)
        logits = whole if network.cut_inside else None
        accuracy, notes = _accuracy(logits, data, network.n_classes, device)
    return PreparedCut(
        network, cut, shape, data, public, h, logits, module, normalise, z, accuracy, notes, maps
    )


def _check_classes(job: InversionJob, network: Network) -> None:
    known = network.n_classes
    if None not in (job.n_classes, known) and job.n_classes != known:
        raise ValueError(
            f"--n-classes {job.n_classes}, but {job.weights} has {known} classes; correct it, or "
            "leave it out"
        )


def _images(job: InversionJob, shape: Shape) -> tuple[Named, Named | None]:
    data = read_source(
        job.data,
        job.split or default_split(job.data, "heldout"),
        shape,
        job.n_images,
        job.seed,
        skip_corrupt=job.skip_corrupt,
    )
    if len(data) < 2:
        raise ValueError(
            f"{job.data} has {len(data)} image; give at least 2: each is compared with the others"
        )
    if job.public is None:
        return data, None
    split = default_split(job.public, "train")
    public = read_source(
        job.public, split, shape, job.n_public, job.seed, skip_corrupt=job.skip_corrupt
    )
    data.check_disjoint(
        public,
        "public images of SOURCE are among those that are attacked; an attacker has no originals "
        "of those: give others with --public",
    )
    if len(public) < 2:
        raise ValueError(f"{job.public} has {len(public)} image; give at least 2 public images")
    return data, public


def features(h: H, images: Tensor, device: str) -> Tensor:
    """z = h(x) of all images, without a gradient."""
    with torch.no_grad():
        return torch.cat([h(part.to(device)) for part in images.split(ROWS_AT_ONCE)])


def _features(h: H, data: Named, network: Network, cut: str, device: str) -> Tensor:
    """What is sent, after every check; ValueError or WeightsError for what cannot be attacked."""
    where = f"the features of {network.path} at the cut {cut!r}"
    if not bool(((data.images >= 0) & (data.images <= 1)).all()):
        raise ValueError(f"images of {data.source} are not finite and in [0, 1]; mend them")
    z = features(h, data.images, device)
    if not z.is_floating_point():
        raise ValueError(f"{where} are {z.dtype}, not floating point; cut before they are rounded")
    if not bool(z.isfinite().all()):
        raise WeightsError(
            f"{where} are NaN or infinite for images of {data.source}; use an earlier save, or "
            "correct --mean and --std"
        )
    alone = torch.cat([features(h, data.images[i : i + 1], device) for i in range(2)])
    if not torch.allclose(alone, z[:2], rtol=1e-2, atol=1e-3 * float(z.abs().max())):
        raise WeightsError(
            f"{where} depend on the other images of a batch; save the network after net.eval()"
        )
    x = data.images[:2].to(device).requires_grad_()
    with torch.enable_grad():
        found = h(x)
        gradient = None
        if found.requires_grad:
            weights = torch.linspace(1, 2, found.shape[1], device=found.device)
            gradient = torch.autograd.grad((found * weights).sum(), x, allow_unused=True)[0]
    if gradient is None or not bool(gradient.any()):
        raise ValueError(
            f"{where} have no gradient with respect to the image, so no gradient descent can "
            "invert them; cut earlier (--cut list), or save the network without detach, no_grad, "
            "rounding or argmax before the cut"
        )
    return z


def _accuracy(
    logits: H | None, data: Named, n_classes: int | None, device: str
) -> tuple[float | None, tuple[str, ...]]:
    """The share of images that are put into their class, where it is known; else why not."""
    if logits is None:
        return None, ("The file is taken whole as h: there are no classes and no accuracy.",)
    phi = features(logits, data.images, device)
    if phi.dim() != 2:
        return None, ("The network's output is no row of logits: there is no accuracy.",)
    if n_classes is not None and phi.shape[1] != n_classes:
        raise WeightsError(f"the network gives {phi.shape[1]} logits for {n_classes} classes")
    if data.labels is None:
        return None, ("The images are in no class folders: there is no accuracy.",)
    if len(data.class_names) != phi.shape[1]:
        return None, (
            f"The images have {len(data.class_names)} classes and the network {phi.shape[1]}: "
            "which is which is not known, and there is no accuracy.",
        )
    right = phi.argmax(1).cpu() == torch.tensor(data.labels)
    return float(right.double().mean()), ()
