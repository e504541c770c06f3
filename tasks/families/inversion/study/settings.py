"""A study of split classifiers (the MixCon paper): which images, networks, defences and attackers.

For every source a grid of MixCon's (lambda, beta) at one cut, the same three defences at every cut,
and UniCon. All victims of a seed have the same start, images and order, so that cells differ in
nothing but the defence; seeds differ in start and order. Every victim is tested on images that it
has not seen and inverted on some of these, by the paper's attack and by a stronger one; for a few,
a restorer learns from the attack's own pairs of public images. Defaults are the paper's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from recon_core.attacks.inversion.feature_matching import MNIST, UNIT, GradientInversion
from recon_core.attacks.inversion.strong_inversion import ZETAS, StrongInversion
from recon_core.restore import BFDnCNN, Training
from recon_core.victims.separability import EPS, MixCon, UniCon
from recon_core.victims.split import LENET_CUTS, LeNet5
from recon_core.victims.split_training import Defence, SplitTraining

FORBID = {"extra": "forbid"}
LAMS = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0)
BETAS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
"""The grid of the MixCon paper, section 4.3."""
SMALLEST = 11
"""The side of SSIM's window."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True, kw_only=True)
class InversionSource:
    """Images, and what is trained and tried on them.

    `n_train`, `n_tests`: images that victims are trained on, of the source's train split, and
    tested on, of its other one; `n_inverted` of the tests are inverted. `n_public`: further images
    of the train split, which the attacker has; equally many of each class everywhere. `chosen`: the
    (lambda, beta) that table 3 compares with a network without defence, and that the study of cuts
    has. `unicon`: lambda of D.1's loss; None leaves it out. `eps`: see `MixCon`. `attack`: the
    paper's.
    """

    name: str
    title: str
    data: str
    size: int = 32
    channels: Literal[1, 3] = 1
    n_classes: int = 10
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
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"source name {self.name!r} must be letters, digits, - and _, since files are "
                "named after it"
            )
        if self.size < SMALLEST:
            raise ValueError(
                f"source {self.name!r}: size={self.size}; SSIM needs images of at least "
                f"{SMALLEST}x{SMALLEST}"
            )
        if self.n_classes < 2:
            raise ValueError(f"source {self.name!r}: n_classes={self.n_classes} must be 2 or more")
        for name in ("n_train", "n_tests", "n_inverted", "n_public"):
            n = getattr(self, name)
            if n < self.n_classes or n % self.n_classes:
                raise ValueError(
                    f"source {self.name!r}: {name}={n} is not a multiple of its {self.n_classes} "
                    "classes; equally many of each are drawn"
                )
        if self.n_inverted > self.n_tests:
            raise ValueError(
                f"source {self.name!r}: n_inverted={self.n_inverted} of n_tests={self.n_tests}; "
                "images that are inverted are some of those that are tested"
            )
        if self.n_train // self.n_classes < self.training.per_class:
            raise ValueError(
                f"source {self.name!r}: n_train={self.n_train} has fewer of a class than "
                f"training.per_class={self.training.per_class}"
            )
        if self.attack.value_range != UNIT:
            raise ValueError(f"source {self.name!r}: attack.value_range must be {UNIT}, as images")
        if strange := sorted({*self.cuts, self.cut} - set(range(1, LENET_CUTS + 1))):
            raise ValueError(
                f"source {self.name!r}: LeNet5 has cuts 1 to {LENET_CUTS}, not {strange}"
            )
        for values in (self.lams, self.betas, self.cuts):
            if len(set(values)) < len(values):
                raise ValueError(f"source {self.name!r}: {values} names a value twice")
        self.cells()

    def cells(self) -> tuple[Cell, ...]:
        """Without defence first, then the grid, UniCon and the other cuts, none twice."""
        chosen = self.mixcon(*self.chosen)
        grid = [self.mixcon(lam, beta) for lam in self.lams for beta in self.betas]
        extra: list[Defence] = [] if self.unicon is None else [UniCon(lam=self.unicon)]
        found = [Cell(self.name, self.cut, None), *(Cell(self.name, self.cut, d) for d in grid)]
        found += [Cell(self.name, self.cut, d) for d in (chosen, *extra)]
        for cut in self.cuts:
            found += [Cell(self.name, cut, d) for d in (None, chosen)]
        return tuple(dict.fromkeys(found))

    def mixcon(self, lam: float, beta: float) -> MixCon:
        return MixCon(lam=lam, beta=beta, eps=self.eps)

    def in_grid(self, cell: Cell) -> bool:
        """True for a cell of the source's grid, of which a network without defence is one."""
        d = cell.defence
        if cell.cut != self.cut or isinstance(d, UniCon):
            return False
        return d is None or (d.lam in self.lams and d.beta in self.betas)


@dataclass(frozen=True)
class Cell:
    """A source, where the network is cut, and its defence or None."""

    source: str
    cut: int
    defence: Defence

    @property
    def name(self) -> str:
        return f"{self.source}, cut {self.cut}, {defence_name(self.defence)}"

    @property
    def network(self) -> LeNet5:
        return LeNet5(cut=self.cut)


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A restorer that learns what images look like from what the attack makes of public ones.

    All public images that were not used for tuning are inverted by the strong attack. The first
    `n_seeds` networks of a cell get a restorer each.
    """

    n_seeds: int = 3
    restorer: BFDnCNN = field(default_factory=BFDnCNN)
    training: Training = field(default_factory=Training)
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID


@dataclass(frozen=True, kw_only=True)
class InversionStudy:
    """Every setting of a study.

    `n_seeds`: networks of every cell; those of the grid have the first `n_grid_seeds` until the
    sweet spots are chosen by these, which then get all. `rates`: the paper's descent is also run at
    the best of these, chosen for each victim on `n_tuning` public images, and so is `strong`, our
    attack, with the best of `zetas`. `accuracy_loss`: what the sweet spot may lose. `perceptual`:
    where PSIM's feature maps come from: "own", a classifier of the source's training images that is
    no victim, or `vgg16:PATH`, torchvision's with weights of yours. `n_shown`: pictures of a cell.
    """

    preset: str
    sources: tuple[InversionSource, ...]
    name: Literal["inversion"] = "inversion"
    only: str = ""
    root_seed: int = 42
    threads: int = 1
    skip_corrupt: bool = False
    n_seeds: int = 3
    n_grid_seeds: int = 3
    rates: tuple[float, ...] = (0.01, 0.1, 1.0, 10.0)
    strong: StrongInversion = field(default_factory=StrongInversion)
    zetas: tuple[float, ...] = ZETAS
    n_tuning: int = 20
    chain: Chain | None = field(default_factory=Chain)
    accuracy_loss: float = 0.01
    perceptual: str = "own"
    victims_at_once: int = 8
    n_shown: int = 8
    __pydantic_config__: ClassVar[dict[str, str]] = FORBID

    def __post_init__(self) -> None:
        names = [source.name for source in self.sources]
        if not names:
            raise ValueError("sources=() leaves nothing to study")
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two sources are named {twice!r}; every one needs its own name")
        for name in ("n_seeds", "threads", "victims_at_once", "n_tuning"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("root_seed", "n_shown"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 or more")
        if not 1 <= self.n_grid_seeds <= self.n_seeds:
            raise ValueError(
                f"n_grid_seeds={self.n_grid_seeds} must be from 1 to n_seeds={self.n_seeds}"
            )
        self._check_attacks()
        for source in self.sources:
            if source.n_public < self.n_tuning + (0 if self.chain is None else 1):
                raise ValueError(
                    f"source {source.name!r}: n_public={source.n_public} leaves none beside "
                    f"n_tuning={self.n_tuning}; use more public images"
                )

    def _check_attacks(self) -> None:
        if not self.zetas or min(self.zetas) < 0:
            raise ValueError(f"zetas={self.zetas} must name at least one, none negative")
        if not self.rates or min(self.rates) <= 0:
            raise ValueError(f"rates={self.rates} must name at least one, all above 0")
        if not 0 <= self.accuracy_loss < 1:
            raise ValueError(f"accuracy_loss={self.accuracy_loss} is no share in [0, 1)")
        if self.strong.value_range != UNIT:
            raise ValueError(f"strong needs value_range {UNIT}")
        kind, _colon, path = self.perceptual.partition(":")
        if self.perceptual != "own" and (kind != "vgg16" or not path):
            raise ValueError(f"perceptual={self.perceptual!r}; expected own or vgg16:PATH")

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
    """The defence as it stands in a record."""
    if defence is None:
        return {"kind": "none", "lam": 0.0, "beta": None}
    beta = defence.beta if isinstance(defence, MixCon) else None
    return {"kind": defence.kind, "lam": defence.lam, "beta": beta}
