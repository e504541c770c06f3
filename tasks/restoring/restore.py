"""Use a restorer: `mean, disagreement = open_restorer("runs/cifar/restorers/edm")(pictures)`.

A generative restorer (EDM) draws several restorations of each picture. Their mean is the image
restoration paper's guard against hallucination; their standard deviation says what the picture
determines and what is made up. All others give one answer, and a disagreement of 0.

Each picture has noise of its own, seeded by its content at 8 bits (`picture_seeds`): a restoration
is the same whatever it is batched with, up to the rounding of float32 in kernels that take other
paths for other batch sizes.

With `open_span(Span(weights=Path("victim.safetensors")), pictures)` what is restored has to lie in
the span of one network's first layer: a restorer's answers are projected on it, or every step of
one that has steps is (`recon_core.restore.edm.Constraint`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from recon_core.attacks.span.attack import InSpan, check_victim, in_span
from recon_core.attacks.span.search import SpanAttack
from recon_core.restore import EDM, BFDnCNN, RegressionUNet
from recon_core.restore.edm import Constraint
from recon_core.restore.generic import GENERIC_RESTORERS, need_wavelets
from recon_core.strict import Count, Positive, Strict, Within
from recon_core.threads import share_of
from recon_core.types import Progress, no_progress
from storage.errors import StorageError
from tasks.devices import Device, resolve_device
from tasks.evaluation.record import fingerprint_of, weights_digest
from tasks.families.weights.inputs import read_victim
from tasks.families.weights.preflight import best_source, read_mean, read_std
from tasks.restoring.inputs import Inputs
from tasks.restoring.onnx_restorer import OnnxRange, OnnxRestorer
from tasks.training.train import load_restorer, model_folder

Steps = Literal["every", "last"]
"""The steps of a restorer that are kept in the span."""
OF_THE_NETWORK = 0.8
"""Largest ratio of what of the pictures lies outside the span to what of their mirror images does,
which the network never saw: 1 for pictures of any other network, 0 for those of this one."""
WITHIN = 0.99
"""Share inside from which on mirror images tell nothing: they may have been trained on, too."""
N_SAMPLES = 20
BATCH_SIZE = 256
PIXELS_AT_ONCE = 2**20
"""Of large pictures a batch has fewer: as many as have so many pixels, and at least one."""
ROUNDING = 1e-6
"""How far outside [0, 1] a value may be by somebody's float arithmetic; it is clipped."""


Floats = TypeVar("Floats", npt.NDArray[Any], Tensor)


class Restores(Protocol):
    """The method of every restorer, learned or not."""

    def restore(
        self,
        net: nn.Module,
        condition: Tensor,
        *,
        n_samples: int,
        seeds: Tensor,
        progress: Progress = ...,
        batch_size: int = ...,
    ) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Span(Strict):
    """A network whose training images are restored: the file of its `weights`, and as for an attack
    on them what it started from, files of its optimiser's states and of gradients, the mean that
    was subtracted in training (default: the pictures' own), and what was then divided by. `steps`
    of a restorer are kept in the span, but for `tolerance`, a standard deviation per pixel
    (default: see `OpenSpan`). A restorer without steps restores what its answer has in the span
    again, in so many `rounds`."""

    weights: Path
    initial: Path | None = None
    optimizers: tuple[Path, ...] = ()
    checkpoints: tuple[Path, ...] = ()
    gradients: tuple[Path, ...] = ()
    mean: str | None = None
    std: tuple[Positive, ...] | None = None
    steps: Steps | None = None
    tolerance: Annotated[float, Within("[0, 1)", fix="--span-tolerance is in pixels of 0 to 1")] = (
        0.0
    )
    rounds: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tolerance and self.steps == "last":
            raise ValueError(
                "--span-tolerance is of every step, and --span-steps last puts answers in the span "
                "as they are: leave out one of them"
            )


@dataclass(frozen=True)
class OpenSpan:
    """Pictures that a network's first layer allows, with the facts about it that records have.
    `exact`: the span stands out of the noise by far. At every step one that does not costs more
    than it brings, unless there is a tolerance."""

    of: Span
    allowed: InSpan
    facts: dict[str, Any]
    exact: bool = True

    @property
    def at_every_step(self) -> bool:
        """True if a restorer that has steps is kept in the span at each of them."""
        if self.of.steps is None:
            return self.exact or self.of.tolerance > 0
        return self.of.steps == "every"


@dataclass(frozen=True)
class OpenRestorer:
    """A restorer with everything it needs, ready to be called.

    `fingerprint` is the SHA-256 of its file, which for a trained one is the card that names the
    weights (of its settings if it has no file). `resolution` is the (height, width) it works at,
    None where any will do. Its network takes sides that are multiples of `patch`; others are made
    so by repeating the last row and column, which are cut off again. One that is not `generative`
    has one answer per picture. With `span` each answer is the nearest that the weights of a victim
    allow, found in so many `rounds`; with `constraint` every step on the way to it keeps to that.
    """

    restorer: Restores
    net: nn.Module
    device: str
    name: str
    fingerprint: str
    settings: dict[str, Any] = field(default_factory=dict)
    generative: bool = False
    resolution: tuple[int | None, int | None] = (None, None)
    patch: int = 1
    span: InSpan | None = None
    constraint: Constraint | None = None
    rounds: int = 1

    def __call__(
        self,
        pictures: Floats,
        *,
        n_samples: int = N_SAMPLES,
        seed: int = 0,
        batch_size: int = BATCH_SIZE,
    ) -> tuple[Floats, Floats]:
        """Restore pictures: (mean, disagreement) of their samples.

        `pictures`: floats (n, 3, h, w) in [0, 1], RGB, as numpy array or tensor on any device. The
        answers are of the same sort, float32, where the pictures are: `mean` (n, 3, h, w) in [0, 1]
        over `n_samples` samples; `disagreement` (n, h, w) in [0, 0.5]. `seed` gives other samples.
        At most `batch_size` (sample, picture) pairs are on the device at once, fewer if they are
        large.

        Raises ValueError for pictures of another type, shape or range, or of a size that this
        restorer cannot take; `n_samples` or `batch_size` below 1, or a negative `seed`; a restorer
        that gives values that are not finite.
        """
        given = self._checked(pictures)
        if n_samples < 1 or batch_size < 1 or seed < 0:
            raise ValueError(
                f"n_samples={n_samples} and batch_size={batch_size} must be at least 1, "
                f"seed={seed} 0 or more"
            )
        mean = torch.empty_like(given)
        disagreement = torch.empty(len(given), *given.shape[2:])
        size = self.chunk_size(n_samples, batch_size, given.shape)
        for start in range(0, len(given), size):
            rows = slice(start, start + size)
            seeds = picture_seeds(given[rows], seed)
            drawn = self.samples(given[rows], seeds, n_samples=n_samples, batch_size=batch_size)
            mean[rows], disagreement[rows] = summarised(drawn)
        if isinstance(pictures, Tensor):
            return mean.to(pictures.device), disagreement.to(pictures.device)
        return mean.numpy(), disagreement.numpy()

    def samples(
        self,
        pictures: Tensor,
        seeds: Tensor,
        *,
        n_samples: int,
        batch_size: int = BATCH_SIZE,
        progress: Progress = no_progress,
    ) -> Tensor:
        """All samples (s, n, 3, h, w) of float32 `pictures`, on the CPU, around [0, 1] and not
        clipped; s is 1 unless generative. Sample k of a picture depends on the picture, its seed
        and k alone. Raises ValueError if the restorer gives something that is not finite."""
        height, width = pictures.shape[2:]
        beyond = (0, -width % self.patch, 0, -height % self.patch)
        if any(beyond):
            pictures = functional.pad(pictures, beyond, mode="replicate")
        elsewhere = isinstance(self.restorer, OnnxRestorer)  # onnxruntime moves them itself
        how = {} if self.constraint is None else {"constraint": self.constraint}
        for turn in range(self.rounds):
            drawn = self.restorer.restore(
                self.net,
                pictures if elsewhere else pictures.to(self.device),
                n_samples=n_samples if self.generative else 1,
                seeds=seeds,
                progress=share_of(progress, turn / self.rounds, (turn + 1) / self.rounds),
                batch_size=_fitting(batch_size, pictures.shape),
                **how,
            )
            if not drawn.isfinite().all():
                raise ValueError(
                    f"the restorer {self.name} gave values that are not finite: its weights are "
                    "damaged or its training diverged; train it again, or use another one"
                )
            cut = drawn[..., :height, :width].cpu()
            if self.span is not None:
                cut = self.span.nearest(cut)
                pictures = functional.pad(cut[0].clamp(0, 1), beyond, mode="replicate")
        return cut

    def chunk_size(self, n_samples: int, batch_size: int, shape: Sequence[int]) -> int:
        """Number of pictures whose samples fill one batch, for pictures of `shape` (.., h, w)."""
        return max(1, _fitting(batch_size, shape) // (n_samples if self.generative else 1))

    def why_not(self, height: int, width: int) -> str | None:
        """Fault of pictures of this size, in words; None if they can be restored."""
        wanted = self.resolution
        if any(w is not None and w != s for w, s in zip(wanted, (height, width), strict=True)):
            sides = " x ".join("any" if side is None else str(side) for side in wanted)
            return f"is {height} x {width}, but {self.name} works at {sides}"
        return None

    def size_for(self, height: int, width: int) -> tuple[int, int]:
        """The (height, width) that such a picture can have instead."""
        return self.resolution[0] or height, self.resolution[1] or width

    def _checked(self, pictures: Any) -> Tensor:
        """`pictures` as float32 on the CPU."""
        floats = isinstance(pictures, np.ndarray) and np.issubdtype(pictures.dtype, np.floating)
        if not floats and not (isinstance(pictures, Tensor) and pictures.is_floating_point()):
            what = getattr(pictures, "dtype", type(pictures).__name__)
            raise ValueError(
                f"pictures are {what}; give a numpy array or a tensor of floats in [0, 1], for "
                "8-bit pictures x / 255"
            )
        if pictures.ndim != 4 or pictures.shape[1] != 3:
            raise ValueError(
                f"pictures have shape {tuple(pictures.shape)}; expected (n, 3, h, w), channels "
                "before rows and a batch around a single one"
            )
        tensor = torch.as_tensor(np.ascontiguousarray(pictures)) if floats else pictures.detach()
        tensor = tensor.cpu().to(torch.float32)
        low, high = (tensor.min().item(), tensor.max().item()) if tensor.numel() else (0.0, 0.0)
        if not (low >= -ROUNDING and high <= 1 + ROUNDING):  # also if either is NaN
            raise ValueError(
                f"pictures go from {low:.4g} to {high:.4g}; they have to lie in [0, 1], for "
                "example x / 255, or (x + 1) / 2"
            )
        wrong = self.why_not(*tensor.shape[2:]) if len(tensor) else None
        if wrong is not None:
            height, width = self.size_for(*tensor.shape[2:])
            raise ValueError(f"every picture {wrong}; resize them to {height} x {width}")
        return tensor.clamp(0, 1)


def open_restorer(
    weights: str | Path,
    *,
    device: Device = "auto",
    onnx_range: OnnxRange = "0..1",
    span: OpenSpan | None = None,
) -> OpenRestorer:
    """Open the restorer that `weights` names: a folder that `palimpsest train` wrote (or its
    model.json), an ONNX file (`*.onnx`, with pictures in `onnx_range`), or one of the baselines
    `nlm`, `tv`, `wavelet`, which run on the CPU wherever `device` is. With `span` every answer
    lies in the span of a victim's first layer, of EDM every step on the way to it, too, if
    `span.at_every_step`.

    Raises ValueError for nothing of that name, a device that is not there, or a model that takes or
    gives something else than pictures; StorageError if the weights cannot be read, or a package
    that they need is missing.
    """
    if span is not None:
        opened = open_restorer(weights, device=device, onnx_range=onnx_range)
        sides = (int(span.allowed.mean.shape[1]), int(span.allowed.mean.shape[2]))
        wrong = opened.why_not(*sides)
        if wrong is not None:
            raise ValueError(f"an image of the network of --span {wrong}; use another restorer")
        steps = "every" if span.at_every_step else "last"
        if opened.generative and span.of.rounds > 1:
            raise ValueError(
                f"--span-rounds {span.of.rounds} is of a restorer with one answer, and --weights "
                f"{weights} draws samples in steps: use --span-steps every"
            )
        if not opened.generative and (span.of.steps == "every" or span.of.tolerance):
            option = "--span-tolerance" if span.of.tolerance else "--span-steps every"
            raise ValueError(
                f"{option} is of a restorer that has steps (EDM), and --weights {weights} gives "
                "its answer in one: leave it out, or use another restorer"
            )
        more = {"steps": steps, "tolerance": span.of.tolerance}
        facts = span.facts | (more if opened.generative else {"rounds": span.of.rounds})
        constraint = Constraint(nearest=span.allowed.nearest, tolerance=span.of.tolerance)
        return replace(
            opened,
            name=f"{opened.name}, in the span",
            settings={**opened.settings, "span": facts},
            resolution=sides,
            span=None if span.of.tolerance else span.allowed,
            constraint=constraint if opened.generative and steps == "every" else None,
            rounds=span.of.rounds,
        )
    text = str(weights)
    if text in GENERIC_RESTORERS:
        try:
            need_wavelets()
        except ImportError as error:
            raise StorageError(str(error)) from error
        generic = GENERIC_RESTORERS[text]
        fingerprint = fingerprint_of("generic", asdict(generic))
        return OpenRestorer(generic, nn.Identity(), "cpu", text, fingerprint, asdict(generic))
    path = Path(weights).expanduser()
    if path.suffix.lower() == ".onnx":
        onnx = OnnxRestorer(path, value_range=onnx_range, device=device)
        return OpenRestorer(
            restorer=onnx,
            net=nn.Identity(),
            device=onnx.device,
            name=path.name,
            fingerprint=onnx.fingerprint,
            settings={"kind": "onnx", "range": onnx_range},
            resolution=onnx.resolution,
        )
    if not path.exists():
        raise ValueError(
            f"--weights {text} is not there: give the folder of a trained restorer, an .onnx file "
            f"or one of the baselines {', '.join(GENERIC_RESTORERS)}"
        )
    where = resolve_device(device)
    restorer, net = load_restorer(path, device=where)
    side = restorer.resolution if isinstance(restorer, EDM | RegressionUNet) else None
    return OpenRestorer(
        restorer=restorer,
        net=net,
        device=where,
        name=restorer.kind,
        fingerprint=weights_digest(model_folder(path)),
        settings=asdict(restorer),
        generative=isinstance(restorer, EDM),
        resolution=(side, side),
        patch=restorer.patch if isinstance(restorer, BFDnCNN) else 1,
    )


def open_span(of: Span, pictures: Inputs) -> OpenSpan:
    """Find the span of a network whose training images `pictures` are to show.

    Raises WeightsError or SourceError for files that cannot be read, NoSpanError where nothing
    stands out of the start's noise, ValueError for a network without a dense first layer or of
    other images, or pictures that are not of this network.
    """
    victim = read_victim(
        of.weights, initial=of.initial, optimizers=of.optimizers, checkpoints=of.checkpoints,
        gradients=of.gradients,
    )  # fmt: skip
    check_victim(victim.architecture)
    shape = victim.architecture.shape
    rows = []
    for picture in pictures:
        if picture.pixels.shape != shape:
            sides = "x".join(map(str, shape))
            raise ValueError(
                f"{picture.name} is {picture.pixels.shape[1]}x{picture.pixels.shape[2]} in colour, "
                f"and the network in {of.weights} takes images of {sides}: give --span the network "
                "that these pictures were reconstructed from, or --size"
            )
        rows.append(torch.from_numpy(picture.pixels).float() / 255)
    given = torch.stack(rows)
    source = best_source(victim, SpanAttack())
    allowed, span = in_span(
        victim.sources[source],
        given.mean(0) if of.mean is None else read_mean(of.mean, shape),
        std=read_std(of.std, shape),
    )
    share, mirrored = allowed.share(given), allowed.share(given.flip(3))
    if share < WITHIN and 1 - share > OF_THE_NETWORK * (1 - mirrored):
        raise ValueError(
            f"{share:.1%} of these pictures lies in the span of {of.weights} ({span.n_signal} "
            f"directions), and as much of their mirror images ({mirrored:.1%}): they are not of "
            "this network. Give --span the weights that they were reconstructed from, with "
            "--initial and --mean as the attack had them"
        )
    facts = {
        "weights": victim.file.sha256,
        "initial": None if victim.start is None else victim.start.file.sha256,
        "source": source,
        "beside": [part.sha256 for part in (*victim.states, *victim.gradients)],
        "directions": len(allowed.directions),
        "mean": of.mean,
        "std": None if of.std is None else list(of.std),
        "share_of_pictures": round(share, 4),
    }
    return OpenSpan(of, allowed, facts, span.ends_sharply)


def picture_seeds(pictures: Tensor, seed: int = 0) -> Tensor:
    """One seed (int64, n) per picture in [0, 1]: SHA-256 of `seed` and the 8-bit pixels."""
    pixels = (pictures * 255).round().to(torch.uint8).cpu().numpy()
    seeds = []
    for picture in pixels:
        digest = hashlib.sha256(repr((seed, picture.shape)).encode())
        digest.update(np.ascontiguousarray(picture).data)
        seeds.append(int.from_bytes(digest.digest()[:8], "little") >> 2)
    return torch.tensor(seeds, dtype=torch.int64)


def summarised(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (n, 3, h, w) of samples (s, n, 3, h, w), clipped to [0, 1], and disagreement (n, h, w):
    the standard deviation sqrt(mean((x - mean)^2)) of clipped samples, averaged over the channels;
    0 for one sample."""
    shown = samples.clamp(0, 1)
    spread = (shown - shown.mean(dim=0)).square().mean(dim=0).sqrt()
    return samples.mean(dim=0).clamp(0, 1), spread.mean(dim=1)


def _fitting(batch_size: int, shape: Sequence[int]) -> int:
    """`batch_size`, or fewer for large pictures of `shape` (.., h, w); at least 1."""
    return max(1, min(batch_size, PIXELS_AT_ONCE // max(1, shape[-2] * shape[-1])))
