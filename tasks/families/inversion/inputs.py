"""Inputs of an attack on somebody's classifier f = g(h(x)), of which the client sends z = h(x): h
at a cut, which is found by asking the network, images, public images. Refused is what would make
numbers wrong without looking wrong: features that are not finite, that depend on the other images
of a batch, or have no gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from recon_core.precision import float32_arithmetic
from recon_core.strict import Count, Positive, Strict, Within
from recon_core.victims.split import CutClassifier
from storage.weights import WeightsError
from tasks.attack_file.networks import OUTPUT, Network, batches, in_rows, read_classifier
from tasks.attack_file.pictures import (
    Named,
    Shape,
    Split,
    by_channel,
    default_split,
    read_source,
    size_of,
)
from tasks.evaluation.perceptual import OWN, MapsOf, feature_maps

Attack = Literal["paper", "strong", "both"]
H = Callable[[Tensor], Tensor]
ROWS_AT_ONCE = 64
DEFAULT_SIDE = 32
SIDES = Within("[11, 2048]", fix="SSIM, by which images are scored, has a window of 11x11")
"""Sides of images that can be scored and inverted."""
N_NAMED = 20
"""Modules that an error names."""


@dataclass(frozen=True, kw_only=True)
class InversionJob(Strict):
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
    size: Annotated[int | None, SIDES] = None
    n_classes: int | None = None
    mean: tuple[Annotated[float, Within("(-inf, inf)")], ...] = (0.0,)
    std: tuple[Positive, ...] = (1.0,)
    n_images: Annotated[int, Within("[2, inf)")] = 20
    n_public: Annotated[int, Within("[2, inf)")] = 100
    attack: Attack = "both"
    n_steps: Count | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    perceptual: str = "own"
    trust: bool = False
    seed: int = 0
    n_shown: Count = 20
    skip_corrupt: bool = False


@dataclass(frozen=True, eq=False)
class PreparedCut:
    """Start of an attack, checked. `h` takes images in [0, 1] on the device to features
    (b, m), `maps` to what PSIM compares."""

    network: Network
    cut: str
    shape: Shape
    data: Named
    public: Named | None
    h: H
    z: Tensor
    accuracy: float | None
    notes: tuple[str, ...]
    maps: MapsOf

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
    network = read_classifier(job.weights, job.architecture, trust=job.trust)
    if None not in (job.n_classes, network.n_classes) and job.n_classes != network.n_classes:
        raise ValueError(
            f"--n-classes {job.n_classes}, but {job.weights} has {network.n_classes} classes; "
            "correct it, or leave it out"
        )
    shape = image_shape(network, job.size, job.data)
    maps = None if job.perceptual == OWN else feature_maps(job.perceptual, device)
    cut = chosen_cut(job.cut or network.cut, network, shape)
    split, public = job.split or default_split(job.data, "heldout"), None
    data = _images(job, job.data, split, shape, job.n_images)
    if job.public is not None:
        split = default_split(job.public, "train")
        public = _images(job, job.public, split, shape, job.n_public)
        data.check_disjoint(
            public,
            "public images of SOURCE are among those that are attacked; an attacker has no "
            "originals of those: give others with --public",
        )
    module = network.on(shape, device)

    def normalise(x: Tensor) -> Tensor:
        mean, std = (by_channel(getattr(job, name), name, x) for name in ("mean", "std"))
        return (x - mean) / std

    maps = maps or _own_maps(network, module, normalise)
    whole = in_rows(lambda x: module(normalise(x)), network.batch)
    cutter = module if cut == OUTPUT else CutClassifier(module, cut)
    h = in_rows(lambda x: cutter(normalise(x)).flatten(1), network.batch)
    with float32_arithmetic("float32", torch.device(device)):
        z = _features(h, data, network, cut, device)
        logits = whole if network.cut_inside else None
        accuracy, notes = _accuracy(logits, data, network.n_classes, device)
    return PreparedCut(network, cut, shape, data, public, h, z, accuracy, notes, maps)


def _images(job: InversionJob, source: str, split: Split, shape: Shape, limit: int) -> Named:
    found = read_source(source, split, shape, limit, job.seed, skip_corrupt=job.skip_corrupt)
    if len(found) < 2:
        raise ValueError(
            f"{source} has {len(found)} image; give at least 2: each is compared with the others"
        )
    return found


def features(h: H, images: Tensor, device: str) -> Tensor:
    """z = h(x) of all images, without a gradient."""
    with torch.no_grad():
        return torch.cat([h(part.to(device)) for part in images.split(ROWS_AT_ONCE)])


def _features(h: H, data: Named, network: Network, cut: str, device: str) -> Tensor:
    """What is sent, after every check; ValueError or WeightsError for what cannot be attacked."""
    where = f"the features of {network.path} at the cut {cut!r}"
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


def _own_maps(network: Network, module: nn.Module, normalise: H) -> MapsOf:
    """Maps of the attacked classifier: what its outermost modules give, or, where it has fewer than
    two, those inside them; of a file that is taken whole its output."""
    inner = network.parts(module)
    outermost = [name for name in inner if name.count(".") == 0]
    chosen = outermost if len(outermost) > 1 else [n for n in inner if n.count(".") <= 1]

    @torch.no_grad()
    def maps_of(images: Tensor) -> list[Tensor]:
        parts = []
        for rows, n in batches(images, network.batch or min(ROWS_AT_ONCE, len(images))):
            with outputs_of(module, chosen, len(rows)) as found:
                last = module(normalise(rows))
            parts.append([maps[:n] for maps in found.values() or [last]])
        return [torch.cat(layer) for layer in zip(*parts, strict=True)]

    return maps_of


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
        why = f"The images have {len(data.class_names)} classes and the network {phi.shape[1]}: "
        return None, (f"{why}which is which is not known, and there is no accuracy.",)
    right = phi.argmax(1).cpu() == torch.tensor(data.labels)
    return float(right.double().mean()), ()


def image_shape(network: Network, size: int | None, data: str | None) -> Shape:
    """Shape of the images: as the file has it, as `--size` says, or as the pictures are; of a
    program out of reach the channels are found by trying.

    Raises ValueError if the file's shape is another than --size, no square or too small.
    """
    if network.shape is not None and len(network.shape) == 3:
        channels, height, width = network.shape
        if size not in (None, height) or height != width:
            wanted = "a square" if size is None else f"--size {size}"
            raise ValueError(
                f"{network.path} takes images of {height}x{width}, not {wanted}; leave out --size, "
                "and give a network of square images"
            )
        SIDES.check(f"the side of images of {network.path}", height)
        return channels, height, width
    height, width = (None if data is None else size_of(data)) or (DEFAULT_SIDE, DEFAULT_SIDE)
    side = size or (height if height == width else DEFAULT_SIDE)
    SIDES.check("size", side)
    if network.channels is None and not network.cut_inside:
        for shape in ((3, side, side), (1, side, side)):
            with suppress(WeightsError):
                _applied(network, network.on(shape, "cpu"), torch.full((2, *shape), 0.5))
                return shape
    return network.channels or 3, side, side


def modules_of(network: Network, shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    """Every place where the network can be cut, with the shape of one image's features there, in
    the order in which they are computed."""
    module = network.on(shape, "cpu")
    rows = network.batch or 2
    with outputs_of(module, network.parts(module), rows) as found:
        output = _applied(network, module, torch.full((rows, *shape), 0.5))
    shapes = {name: tuple(maps.shape[1:]) for name, maps in found.items()}
    return [*shapes.items(), (OUTPUT, tuple(output.shape[1:]))]


@contextmanager
def outputs_of(module: nn.Module, names: Iterable[str], n_rows: int) -> Iterator[dict[str, Tensor]]:
    """Outputs of the modules that give a tensor with a row per image, as soon as `module` is
    applied to `n_rows` of them; in the order in which they are computed."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            if isinstance(output, Tensor) and output.dim() >= 2 and len(output) == n_rows:
                found.setdefault(name, output.clone())  # what follows may work in place

        return hook

    hooks = [module.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    try:
        yield found
    finally:
        for handle in hooks:
            handle.remove()


def _applied(network: Network, module: nn.Module, x: Tensor) -> Tensor:
    """WeightsError if the network does not take such images."""
    try:
        with torch.no_grad():
            output = module(x)
    except Exception as error:  # a network may fail in any way
        raise WeightsError(
            f"{network.path} fails on images of {'x'.join(map(str, x.shape[1:]))} "
            f"({type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1][:200]}); "
            "give --size as it was trained with"
        ) from error
    if not isinstance(output, Tensor) or output.dim() < 2 or len(output) != len(x):
        raise WeightsError(
            f"{network.path} gives no tensor with a row per image; save a network that does"
        )
    return output


def chosen_cut(name: str | None, network: Network, shape: Shape) -> str:
    """The cut, if there is one of that name."""
    known = dict(modules_of(network, shape))
    if name in known:
        return str(name)
    short = sorted(known, key=lambda n: (n.count("."), list(known).index(n)))[:N_NAMED]
    listed = ", ".join(f"{n} ({'x'.join(map(str, known[n]))})" for n in known if n in short)
    what = "give --cut" if name is None else f"there is no cut {name!r}; give --cut"
    more = "" if len(short) == len(known) else f"; all {len(known)}: --cut list"
    inside = "" if network.cut_inside else " (TorchScript runs its modules out of reach)"
    raise ValueError(f"{what} one of: {listed}{more}{inside}")
