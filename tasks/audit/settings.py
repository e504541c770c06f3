"""Settings of an audit: what is trained, under which defences, and what attacks it.

A defence is a change to the victim's recipe, by dotted names, so it needs no path of its own: one
that is not here is a few words in a file. Every cell of an audit is a recipe with one defence, and
all cells share images, seeds and starts as far as their recipes allow. A variant is such a change,
too, but another way to train, and no defence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from recon_core.attacks.autoencoder.many_starts import NoiseAware
from recon_core.attacks.inversion.strong_inversion import StrongInversion
from recon_core.attacks.kkt.attacks import Attack
from recon_core.attacks.kkt.objective import KKTAttack
from recon_core.attacks.span.inputs import ChannelOrder, PixelOrder
from recon_core.attacks.span.rows import Source
from recon_core.attacks.span.search import SpanAttack
from recon_core.strict import Count, Positive, Strict, Within
from recon_core.victims.network import Activation
from tasks.audit.recipe import VictimRecipe
from tasks.page.formats import leaves

AttackName = Literal[
    "span",
    "span_known",
    "span_state",
    "kkt",
    "gradient",
    "features",
    "autoencoder",
    "loss",
    "likelihood_ratio",
]
ON_WEIGHTS: tuple[AttackName, ...] = ("span", "span_known", "span_state", "kkt")
RECONSTRUCTION: tuple[AttackName, ...] = (*ON_WEIGHTS, "gradient", "features", "autoencoder")
MEMBERSHIP: tuple[AttackName, ...] = ("loss", "likelihood_ratio")
TITLES: dict[AttackName, tuple[str, str]] = {
    "span": ("span, start unknown", "the weights"),
    "span_known": ("span, start known", "the weights, and those that training started from"),
    "span_state": ("span, optimiser's state",
                   "a checkpoint: the weights and the optimiser's state"),
    "kkt": ("KKT", "the weights"),
    "gradient": ("gradients of a batch", "the batch's gradients, and the weights they are of"),
    "features": ("split features", "the features of an image, and the layers that made them"),
    "autoencoder": ("autoencoder", "the autoencoder, and pictures with most pixels erased"),
    "loss": ("membership, loss", "the images to be asked about, and answers for them"),
    "likelihood_ratio": ("membership, likelihood ratio", "the images to be asked about, answers "
                         "for them, and networks of the same kind"),
}  # fmt: skip
"""Title of each attack, and what its attacker has."""
START: dict[AttackName, Literal["known", "unknown", "state"]] = {
    "span": "unknown", "span_known": "known", "span_state": "state", "kkt": "unknown",
}  # fmt: skip
"""Threat models of attacks on weights: whether the weights before training are known, or the
optimiser's state."""
RATES = (0.0, 0.001, 0.01, 0.05)
"""False positive rates at which images are counted."""
FEWEST = 2
"""Images of a label that a victim needs."""
MOST_CANDIDATES = 400
"""Candidates of a KKT attack, of which there are else twice as many as images."""
_RELEASED = ("released.noise", "released.precision", "checkpoint")
_CONDITION = re.compile(r"(good|found)>(\d*\.?\d+)@fpr=(\d*\.?\d+)")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GivenWeights(Strict):
    """A network that is audited as it is: its file, facts that the tensors' shapes leave open, and
    decoys; all as in `palimpsest attack weights`. `gradients`: files of the gradients of batches at
    these weights, as clients of federated learning send them; then the images of these batches are
    reconstructed."""

    file: str
    decoys: str
    gradients: tuple[str, ...] = ()
    initial: str | None = None
    arch: str | None = None
    shape: tuple[int, int, int] | None = None
    activation: Activation = "relu"
    leak: float = 0.01
    pixel_order: PixelOrder | None = None
    channel_order: ChannelOrder | None = None
    mean: str | None = None
    std: tuple[Positive, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Defence(Strict):
    """A change to the recipe: `set` has new values by dotted name, `scale` factors of numbers.
    `kind`: "variant" is another way to train, which is not offered as a defence."""

    name: str
    group: str
    about: str
    kind: Literal["defence", "variant"] = "defence"
    set: dict[str, Any] = field(default_factory=dict)
    scale: dict[str, float] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Settings that it changes."""
        return (*self.set, *self.scale)

    def of(self, recipe: VictimRecipe) -> VictimRecipe:
        """The recipe with the defence. Raises ValueError naming an unknown setting, or a value that
        it cannot have."""
        tree = dict(adapter(VictimRecipe).dump_python(recipe, mode="json"))
        for name in self.names:
            *path, last = name.split(".")
            node: Any = tree
            for key in path:
                node = node.get(key) if isinstance(node, dict) else None
            if not isinstance(node, dict) or last not in node:
                raise ValueError(
                    f"defence {self.name!r} sets {name!r}, which no recipe has; it has "
                    f"{', '.join(sorted(name for name, _text in leaves(tree)))}"
                )
            value = node[last]
            if name in self.set:
                node[last] = self.set[name]
            elif isinstance(value, bool) or not isinstance(value, int | float | None):
                raise ValueError(
                    f"defence {self.name!r} scales {name!r}, which is {value!r} and no number; "
                    "set it"
                )
            elif value is not None:  # None is left to the source
                scaled = value * self.scale[name]
                node[last] = max(1, round(scaled)) if isinstance(value, int) else scaled
        try:
            made: VictimRecipe = adapter(VictimRecipe).validate_python(tree)
        except ValidationError as error:
            first = error.errors()[0]
            where = [".".join(map(str, first["loc"]))] if first["loc"] else []
            message = first["msg"].removeprefix("Value error, ")
            text = ": ".join((f"defence {self.name!r}", *where, message))
            raise ValueError(text) from error
        return made


@dataclass(frozen=True)
class Cell:
    """A recipe under one defence, or another way to train; the base is the recipe as it is."""

    number: int
    name: str
    kind: Literal["base", "variant", "defence"]
    group: str
    about: str
    recipe: VictimRecipe

    @property
    def is_base(self) -> bool:
        return self.number == 0


@dataclass(frozen=True)
class Limit:
    """A limit that an audit is to keep: `good>0.05@fpr=0.01`."""

    text: str
    of: str
    limit: float
    rate: float


@dataclass(frozen=True, kw_only=True)
class Audit(Strict):
    """An audit: victims under defences, and attacks on them.

    `data`: images, of whose larger split victims learn; with `weights`, the training images of that
    network. `span` and `kkt`: settings of the attacks. `n_victims`: an even number, since they come
    in pairs that share a pool of images, half each. `most_images`: those of a victim, where the
    recipe names no number. `n_tests`: held-out images that accuracy is measured on, at most.
    `inversion`: the attack on features; `recovery`: that on autoencoders, from pictures of which
    `mask` leaves some pixels.
    `rate`: the false positive rate of headlines. `fail_above`: limits on the network as it is,
    `good>0.05@fpr=0.01` or, for membership too, `found>...`. `left_out`: what was left out, in
    words.
    """

    name: Literal["audit"] = "audit"
    preset: str
    data: str = "photos"
    skip_corrupt: bool = False
    channels: Literal[1, 3] = 3
    weights: GivenWeights | None = None
    recipe: VictimRecipe = field(default_factory=VictimRecipe)
    defences: tuple[Defence, ...] = ()
    attacks: tuple[AttackName, ...] = (*ON_WEIGHTS, *MEMBERSHIP)
    span: SpanAttack = field(default_factory=SpanAttack)
    kkt: KKTAttack = field(default_factory=KKTAttack)
    inversion: StrongInversion = field(
        default_factory=lambda: StrongInversion(zeta=0.01, starts=("grey",))
    )
    recovery: NoiseAware = field(default_factory=NoiseAware)
    mask: Literal["random", "blocks", "stripes", "text", "half", "window"] = "random"
    n_victims: int = 12
    most_images: Annotated[int, Within("[2, inf)")] = 100
    n_tests: Count = 1000
    good_threshold: Annotated[float, Within("[0, 1)")] = 0.4
    rate: float = 0.01
    fail_above: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    seed: int = 0
    threads: Count = 1
    only: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights is not None:
            if self.recipe.autoencoder is not None:
                raise ValueError(
                    "recipe.autoencoder with weights: an existing autoencoder is attacked by "
                    "`palimpsest attack autoencoder`; leave the weights out to audit its recipe"
                )
            trained = [d.name for d in self.defences if not all(n in _RELEASED for n in d.names)]
            if self.n_victims != 1 or trained:
                raise ValueError(
                    f"weights of one existing network, with n_victims={self.n_victims} and "
                    f"defences {trained}, which need training; set n_victims to 1, and leave out "
                    f"defences that set anything but {', '.join(_RELEASED)}"
                )
        elif self.n_victims < 4 or self.n_victims % 2:
            raise ValueError(
                f"n_victims={self.n_victims} must be even, since victims come in pairs that share "
                "a pool of images, and at least 4, since the others are shadows of each"
            )
        if self.rate not in RATES:
            raise ValueError(f"rate={self.rate} is none of {list(RATES)}, at which is counted")
        if not self.attacks:
            raise ValueError(f"attacks is empty; name some of {[*RECONSTRUCTION, *MEMBERSHIP]}")
        if len(set(self.attacks)) < len(self.attacks):
            raise ValueError(f"attacks={list(self.attacks)} names one twice; name each once")
        names = [cell.name for cell in self.cells]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two defences are named {twice[0]!r}; give each its own name")
        _ = self.limits

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The recipe as it is, then one cell per variant and defence. Left out are a variant that
        is the recipe itself, and publishing weights alone if the optimiser keeps no averages."""
        as_it_is, about = "as it is", "The recipe, without a defence."
        cells = [Cell(0, as_it_is, "base", as_it_is, about, self.recipe)]
        has_state = self.weights is not None or self.recipe.training.optimiser.averages_gradients
        for d in self.defences:
            recipe = d.of(self.recipe)
            if d.names == ("checkpoint",) and not has_state:
                continue
            if d.kind == "defence" or recipe != self.recipe:
                cells.append(Cell(len(cells), d.name, d.kind, d.group, d.about, recipe))
        return tuple(cells)

    @property
    def limits(self) -> tuple[Limit, ...]:
        return tuple(map(limit_of, self.fail_above))

    def attack(
        self, name: AttackName, recipe: VictimRecipe
    ) -> Attack | StrongInversion | NoiseAware:
        """Settings of a reconstruction attack on victims of a recipe."""
        if name == "features":
            return self.inversion
        if name == "autoencoder":
            return self.recovery
        if name == "kkt":
            assert recipe.n_images is not None
            n_candidates = min(2 * recipe.n_images, MOST_CANDIDATES)
            return replace(self.kkt, condition=recipe.condition, n_candidates=n_candidates)
        source: Source = "weights"
        if name in ("span_state", "gradient"):
            source = "state" if name == "span_state" else "gradients"
        return replace(
            self.span, source=source, start="known" if name == "span_known" else "unknown"
        )


def limit_of(text: str) -> Limit:
    """Parse a limit; ValueError with an example for any other text."""
    match = _CONDITION.fullmatch(text.replace(" ", ""))
    if match is None or float(match[3]) not in RATES or not float(match[2]) <= 1:
        raise ValueError(
            f"--fail-above {text!r} is not a limit as good>0.05@fpr=0.01: the share of images "
            "that come back well (good) or are told from others (found), at a false positive rate "
            f"of {', '.join(f'{rate:g}' for rate in RATES)}"
        )
    return Limit(text, match[1], float(match[2]), float(match[3]))


@cache
def adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)
