"""Settings of a study of split classifiers (MixCon paper): images, networks, defences, attackers.

Each source has a grid of MixCon's (lambda, beta) at one cut, no defence and the chosen MixCon at
every cut, and UniCon. All victims of a seed share start, images and order, so that cells differ
only in the defence; seeds differ in start and order. Every victim is tested on images that it has
not seen, and inverted on some of them by the paper's attack and by a stronger one; for a few, a
restorer learns from the attack's own pairs of public images. Defaults are the paper's.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt

from recon_core.attacks.inversion.feature_matching import MNIST, GradientInversion
from recon_core.attacks.inversion.strong_inversion import ZETAS, StrongInversion
from recon_core.restore import BFDnCNN, Training
from recon_core.strict import Count, Natural, NonNegative, Positive, Strict, Within
from recon_core.victims.separability import EPS, MixCon, UniCon
from recon_core.victims.split import LENET_CUTS
from recon_core.victims.split_training import Defence, SplitTraining
from storage.sources.load import ImageSet, load_images
from tasks.study.products import Pixels, balanced_order, content_of

LAMS = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0)
BETAS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
"""The grid of the MixCon paper, section 4.3."""


@dataclass(frozen=True, kw_only=True)
class InversionSource(Strict):
    """A source of images, and the networks trained on it.

    `n_train`: training images, of the source's train split. `n_tests`: test images, of the other
    split, of which `n_inverted` are inverted. `n_public`: further images of the train split, which
    the attacker has. All have equally many images of each class. `chosen`: the (lambda, beta) that
    table 3 compares with no defence, also used at the other cuts. `unicon`: lambda of the loss in
    D.1; None leaves it out. `eps`: see `MixCon`. `attack`: the paper's.
    """

    name: str
    title: str
    data: str
    size: Annotated[int, Within("[11, inf)", fix="SSIM has a window of 11x11")] = 32
    channels: Literal[1, 3] = 1
    n_classes: Annotated[int, Within("[2, inf)")] = 10
    n_train: int
    n_tests: int
    n_inverted: int = 100
    n_public: int
    training: SplitTraining = field(default_factory=SplitTraining)
    cut: int = 2
    lams: tuple[float, ...] = LAMS
    betas: tuple[float, ...] = BETAS
    chosen: tuple[float, float] = (1.0, 1e-4)
    cuts: tuple[int, ...] = (1, 2, 3, 4)
    unicon: float | None = 1.0
    eps: float = EPS
    attack: GradientInversion = MNIST

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", self.name):
            raise ValueError(
                f"source name {self.name!r} must be letters, digits, - and _, since files are "
                "named after it"
            )
        for name in ("n_train", "n_tests", "n_inverted", "n_public"):
            n = getattr(self, name)
            if n < self.n_classes or n % self.n_classes:
                raise ValueError(
                    f"source {self.name!r}: {name}={n} is not a multiple of its {self.n_classes} "
                    "classes; equally many of each are drawn"
                )
        for values in (self.lams, self.betas, self.cuts):
            if len(set(values)) < len(values):
                raise ValueError(f"source {self.name!r}: {values} names a value twice")
        cuts = set(range(1, LENET_CUTS + 1))
        for fits, why in (
            (self.n_inverted <= self.n_tests, f"n_inverted={self.n_inverted} of n_tests="
             f"{self.n_tests}; images that are inverted are some of those that are tested"),
            (self.n_train // self.n_classes >= self.training.per_class, f"n_train={self.n_train} "
             f"has fewer of a class than training.per_class={self.training.per_class}"),
            ({*self.cuts, self.cut} <= cuts, f"LeNet5 has cuts 1 to {LENET_CUTS}, not "
             f"{sorted({*self.cuts, self.cut} - cuts)}"),
        ):  # fmt: skip
            if not fits:
                raise ValueError(f"source {self.name!r}: {why}")
        self.cells()

    def cells(self) -> tuple[Cell, ...]:
        """Cells without defence first, then the grid, UniCon and the other cuts, none twice."""
        chosen = self.mixcon(*self.chosen)
        here: list[Defence] = [None]
        here += [self.mixcon(lam, beta) for lam in self.lams for beta in self.betas]
        here += [chosen] if self.unicon is None else [chosen, UniCon(lam=self.unicon)]
        found = [Cell(self.name, self.cut, defence) for defence in here]
        found += [Cell(self.name, cut, defence) for cut in self.cuts for defence in (None, chosen)]
        return tuple(dict.fromkeys(found))

    def mixcon(self, lam: float, beta: float) -> MixCon:
        return MixCon(lam=lam, beta=beta, eps=self.eps)

    def in_grid(self, cell: Cell) -> bool:
        """True for a cell of the source's grid, which includes the network without defence."""
        d = cell.defence
        if cell.cut != self.cut or isinstance(d, UniCon):
            return False
        return d is None or (d.lam in self.lams and d.beta in self.betas)


@dataclass(frozen=True)
class Cell:
    """A source, the layer at which the network is cut, and its defence or None."""

    source: str
    cut: int
    defence: Defence

    @property
    def name(self) -> str:
        return f"{self.source}, cut {self.cut}, {defence_name(self.defence)}"


@dataclass(frozen=True, kw_only=True)
class Chain(Strict):
    """A restorer trained on pairs of public images and the strong attack's reconstructions.

    The pairs are of all public images that were not used for tuning. The first `n_seeds` networks
    of a cell get a restorer each.
    """

    n_seeds: Count = 3
    restorer: BFDnCNN = field(default_factory=BFDnCNN)
    training: Training = field(default_factory=Training)


@dataclass(frozen=True, kw_only=True)
class InversionStudy(Strict):
    """Settings of a study.

    `n_seeds`: networks of every cell. Cells of the grid have the first `n_grid_seeds` alone, by
    which the sweet spots are chosen, which then get all. `rates`: learning rates from which the
    best is chosen for the paper's descent, for each victim on `n_tuning` public images; `zetas` are
    those of `strong`, our attack. `accuracy_loss`: what a sweet spot may lose. `perceptual`: the
    network of PSIM's feature maps, "own", a classifier of the source's training images that is no
    victim, or `vgg16:PATH`, torchvision's with your weights. `n_shown`: pictures of a cell.
    """

    preset: str
    sources: tuple[InversionSource, ...]
    name: Literal["inversion"] = "inversion"
    only: str = ""
    root_seed: Natural = 42
    threads: Count = 1
    skip_corrupt: bool = False
    n_seeds: Count = 3
    n_grid_seeds: Count = 3
    rates: tuple[Positive, ...] = (0.01, 0.1, 1.0, 10.0)
    strong: StrongInversion = field(default_factory=StrongInversion)
    zetas: tuple[NonNegative, ...] = ZETAS
    n_tuning: Count = 20
    chain: Chain | None = field(default_factory=Chain)
    accuracy_loss: Annotated[float, Within("[0, 1)")] = 0.01
    perceptual: str = "own"
    victims_at_once: Count = 8
    n_shown: Natural = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [source.name for source in self.sources]
        if not names:
            raise ValueError("sources=() leaves nothing to study")
        if len(set(names)) < len(names):
            raise ValueError(f"sources are named {names}; every one needs a name of its own")
        if self.n_grid_seeds > self.n_seeds:
            raise ValueError(f"n_grid_seeds={self.n_grid_seeds} exceeds n_seeds={self.n_seeds}")
        if not self.zetas or not self.rates:
            raise ValueError(f"zetas={self.zetas}, rates={self.rates}: name at least one of each")
        if not re.fullmatch("own|vgg16:.+", self.perceptual):
            raise ValueError(f"perceptual={self.perceptual!r}; expected own or vgg16:PATH")
        for source in self.sources:
            if source.n_public < self.n_tuning + (0 if self.chain is None else 1):
                raise ValueError(
                    f"source {source.name!r}: n_public={source.n_public} leaves none beside "
                    f"n_tuning={self.n_tuning}; use more public images"
                )

    @property
    def data(self) -> str:
        return ", ".join(source.data for source in self.sources)

    def source(self, name: str) -> InversionSource:
        return next(source for source in self.sources if source.name == name)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Cells of all sources, in the order of the record."""
        return tuple(cell for source in self.sources for cell in source.cells())


def defence_name(defence: Defence) -> str:
    """`vanilla`, `mixcon 1 0.0001`, `unicon 1`."""
    if defence is None:
        return "vanilla"
    if isinstance(defence, UniCon):
        return f"unicon {defence.lam:g}"
    return f"mixcon {defence.lam:g} {defence.beta:g}"


def defence_json(defence: Defence) -> dict[str, Any]:
    """A defence as it stands in a record."""
    if defence is None:
        return {"kind": "none", "lam": 0.0, "beta": None}
    beta = defence.beta if isinstance(defence, MixCon) else None
    return {"kind": defence.kind, "lam": defence.lam, "beta": beta}


@dataclass(frozen=True)
class Part:
    """Images (n, c, h, w) and their classes, from 0; the classes take turns."""

    images: Pixels
    labels: npt.NDArray[np.int64]

    def first(self, n: int) -> Part:
        return Part(self.images[:n], self.labels[:n])

    def after(self, n: int) -> Part:
        return Part(self.images[n:], self.labels[n:])


@dataclass(frozen=True)
class SourceImages:
    """Images of a source: `train` and `public` from the train split, `tests` from the other one. No
    image, and no copy of one, is in two sets. The first of `tests` are inverted. `facts` describe
    what was read, by split."""

    train: Part
    tests: Part
    public: Part
    content_hash: str
    notes: tuple[str, ...]
    facts: dict[str, dict[str, str]]


def read_sources(study: InversionStudy) -> dict[str, SourceImages]:
    """Read the images of every source, by its name.

    Raises ValueError if a source has too few images of a class, or another number of classes, and
    SourceError as `load_images` does.
    """
    found = {}
    for source in study.sources:
        own, other = (
            load_images(
                source.data,
                split=split,
                size=source.size,
                skip_corrupt=study.skip_corrupt,
                channels=source.channels,
            )
            for split in ("train", "heldout")
        )
        tests = _drawn(source, other, ("n_tests", source.n_tests), study.root_seed, set())
        used = {content_of(image) for image in tests.images}
        n_own = ("n_train + n_public", source.n_train + source.n_public)
        drawn = _drawn(source, own, n_own, study.root_seed, used)
        hashes = f"{own.content_hash} {other.content_hash}"
        found[source.name] = SourceImages(
            train=drawn.first(source.n_train),
            tests=tests,
            public=drawn.after(source.n_train),
            content_hash=hashlib.sha256(hashes.encode()).hexdigest(),
            notes=tuple(dict.fromkeys((*own.notes, *other.notes))),
            facts={images.split: images.facts for images in (own, other)},
        )
    return found


def _drawn(
    source: InversionSource, found: ImageSet, wanted: tuple[str, int], seed: int, used: set[bytes]
) -> Part:
    """Draw different images, none of them `used`, in a seeded order in which classes take turns.
    `wanted`: the name of the setting and the number."""
    what, n = wanted
    classes = np.unique(found.labels)
    if len(classes) != source.n_classes:
        raise ValueError(
            f"source {source.name!r}: {found.name!r} ({found.split}) has {len(classes)} classes, "
            f"not n_classes={source.n_classes}; set it"
        )
    per_class = n // source.n_classes
    numbers = np.searchsorted(classes, found.labels)
    taken, rows, seen = np.zeros(len(classes), int), [], set(used)
    for row in balanced_order(found.labels, root_seed=seed):
        label, digest = numbers[row], content_of(found.images[row])
        if taken[label] < per_class and digest not in seen:
            taken[label] += 1
            seen.add(digest)
            rows.append(row)
    if taken.min() < per_class:
        lacking = int(np.argmax(taken < per_class))
        raise ValueError(
            f"source {source.name!r}: {what} takes {per_class} images of each class, but "
            f"{found.name!r} ({found.split}) has {taken[lacking]} different ones of class "
            f"{found.class_names[int(classes[lacking])]!r}; use fewer"
        )
    chosen = np.array(rows, np.int64)
    return Part(np.ascontiguousarray(found.images[chosen]), numbers[chosen].astype(np.int64))
