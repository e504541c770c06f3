"""The study of the span attack as a grid: where it works, where it breaks, beside the KKT attack.

Every point is one setting away from a base: images, the first layer's width over their number, the
start, the rule, batches, weight decay, the loss, layers, biases, and how exactly the weights are
handed over. Each is two cells, `NAME; span` and `NAME; KKT`, with the same victims. The KKT attack
has as many iterations as take the span attack's time and some more, by counted operations; the page
has both seconds.

Choices: starts and layers as the image restoration paper has them (He), the further layers as wide
as the base's first, so that only the first layer varies with the number of images. MSE is attacked
with equation 15 of the KKT paper, ten classes with its equation 12, all others with its equation 6.
Not in the grid: the first dense layer behind a frozen network, which would give features back and
no images; the project has no such victim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

from flows.families.weights.grids import Size
from flows.papers import FAST_SEARCH, MILLION, gradient_descent
from recon_core.attacks.kkt.attacks import separation_operations
from recon_core.attacks.kkt.objective import Condition, KKTAttack
from recon_core.attacks.span.search import SpanAttack
from recon_core.experiments import KKT
from recon_core.optimisers import Optimiser
from recon_core.victims.losses import Kind, Loss
from recon_core.victims.network import Bias, Network, Released
from recon_core.victims.training import Training
from tasks.evaluation.settings import Evaluation
from tasks.families.weights.study.settings import Axis, Cell, Shape, Study, Value

BASE: dict[str, Value] = {
    "images": 100, "ratio": 2.0, "start": "small, unknown", "rule": "gradient descent",
    "batch": "all images", "decay": "0", "loss": "BCE", "layers": 2, "bias": "none",
    "weights": "float32",
}  # fmt: skip
"""Values of every axis at the base; the paper's size has its own number of images."""
LAYERS_KNOWN, DECAY_STANDARD = "layers, known start", "decay, standard start"
"""Panels of points two settings from the base, which the findings of the KKT paper are asked of."""
STARTS = ("small, unknown", "small, known", "standard, known", "standard, unknown")
SIDE = 32
USUAL_ITERATIONS, DIRECTIONS_PER_IMAGE = 300, 1.25
"""Iterations of a separation until nothing falls any more, and directions it is done in."""
MARGIN = 1.5
SLOW_RULES = {"Adadelta": 2.5, "Adam": 4.0}
RULES = ("gradient descent", "momentum", "Adadelta", "Adam")
LOSSES: dict[str, tuple[Kind, Condition]] = {
    "BCE": ("bce", "binary"),
    "MSE": ("mse", "regression"),
    "CE, ten classes": ("ce", "multiclass"),
}
RELEASED = {
    "float16": Released(precision="float16"),
    "int8": Released(precision="int8"),
    "noise 1 %": Released(noise=0.01),
    "noise 10 %": Released(noise=0.1),
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A size: `rates` of the rules, `epochs` with them, and of minibatches.

    `most_directions`: how many stand out of a small start at the most, after training as short as
    this.
    """

    base: int
    epochs: dict[str, int]
    rates: dict[str, float]
    rate_mse: float
    most_directions: int


CPU = Scale(
    base=100,
    epochs={"gradient descent": 3000, "momentum": 3000, "Adadelta": 1000, "Adam": 500,
            "batch": 1000},
    rates={"gradient descent": 0.2, "momentum": 0.02, "Adadelta": 1.0, "Adam": 1e-3},
    rate_mse=0.05,
    most_directions=400,
)  # fmt: skip
PAPER = Scale(
    base=500,
    epochs={"gradient descent": MILLION, "momentum": 100_000, "Adadelta": 50_000, "Adam": 50_000,
            "batch": 100_000},
    rates={"gradient descent": 0.01, "momentum": 0.01, "Adadelta": 1.0, "Adam": 1e-4},
    rate_mse=0.01,
    most_directions=5000,
)  # fmt: skip
AXES = {
    "images": Axis(title="training images", values=(20, 50, 100, 200, 300, 500), scale="log"),
    "ratio": Axis(title="width / images", values=(0.5, 1.0, 2.0, 5.0, 10.0), scale="log"),
    "start": Axis(title="start", values=STARTS),
    "rule": Axis(title="rule", values=RULES),
    "batch": Axis(title="batch", values=("all images", "a quarter")),
    "decay": Axis(title="weight decay", values=("0", "0.001", "0.01")),
    "loss": Axis(title="loss", values=("BCE", "MSE", "CE, ten classes")),
    "layers": Axis(title="hidden layers", values=(1, 2, 3), scale="linear"),
    "bias": Axis(title="biases", values=("none", "first", "all")),
    "weights": Axis(title="weights", values=("float32", *RELEASED)),
    "attack": Axis(title="attack", values=("span", "KKT")),
}
NAMES = {
    "images": "{} images", "ratio": "width {:g} per image", "start": "{} start", "rule": "{}",
    "batch": "minibatches", "decay": "weight decay {}", "loss": "{}", "layers": "{} hidden layer",
    "bias": "biases: {}", "weights": "weights: {}",
}  # fmt: skip
"""Names of the points along each axis."""


def span(size: Size) -> Study:
    """Grid of the span attack: each cell one point away from a base."""
    scale = PAPER if size.preset == "paper" else CPU
    cells = [
        Cell(
            name=f"{name}; {attack}",
            panel=panel,
            at={**at, "attack": attack},
            images_per_run=int(at["images"]),
            experiment=_experiment(scale, at, attack),
        )
        for panel, name, at in _points(BASE | {"images": scale.base})
        for attack in ("span", "KKT")
    ]
    return Study(
        name="span-networks",
        preset=size.preset,
        data=size.data,
        cells=tuple(cells),
        axes=AXES,
        n_victims=2 if scale is CPU else 3,
        n_attacks=1,
        runs_per_part=1,
        train_first=True,
        evaluation=Evaluation(baselines=(), restore_iterations="all"),
    )


def _points(base: dict[str, Value]) -> Iterator[tuple[str, str, dict[str, Value]]]:
    """(panel, name, where) of every point, the base first."""
    yield "base", "base", base
    for axis, name in NAMES.items():
        for value in AXES[axis].values:
            if value != base[axis]:
                several = "s" * (axis == "layers" and value != 1)
                yield axis, name.format(value) + several, base | {axis: value}
    for layers, name in ((1, "1 hidden layer"), (3, "3 hidden layers")):
        at = base | {"start": "standard, known", "layers": layers}
        yield LAYERS_KNOWN, f"{name}, standard, known", at
    for start in STARTS[2:]:
        yield DECAY_STANDARD, f"decay 0.01, {start}", base | {"start": start, "decay": "0.01"}


def _experiment(scale: Scale, at: dict[str, Value], attack: str) -> KKT:
    """Rates of the KKT attack are such that a few hundred iterations suffice, found at the base of
    the CPU's size.

    It has iterations for the span attack's time and half as much again, by counted operations;
    never so few that what they cost apart from those decides. What Adam leaves has no end, so that
    all directions are separated, in most iterations.
    """
    n, n_layers, start = int(at["images"]), int(at["layers"]), str(at["start"])
    rule, is_whole = str(at["rule"]), at["batch"] == "all images"
    first, rest = round(n * float(at["ratio"])), round(scale.base * float(BASE["ratio"]))
    loss, condition = LOSSES[str(at["loss"])]
    rate = scale.rate_mse if loss == "mse" else scale.rates[rule]
    optimiser = {
        "momentum": gradient_descent(rate, 0.9),
        "Adadelta": Optimiser(rule="adadelta", lr=rate),
        "Adam": Optimiser(rule="adam", lr=rate),
    }.get(rule, gradient_descent(rate))
    kkt = replace(FAST_SEARCH, condition=condition, n_candidates=2 * n)
    made = KKT(
        augment_p=0.0,
        n_classes=10 if loss == "ce" else 2,
        victim=Network(
            widths=(first, *[rest] * (n_layers - 1)),
            bias=cast(Bias, at["bias"]),
            init_std_first=1e-4 if start.startswith("small") else None,
        ),
        training=Training(
            epochs=scale.epochs[rule if is_whole else "batch"],
            optimiser=optimiser,
            loss=Loss(kind=loss),
            batch_size=None if is_whole else n // 4,
            weight_decay=float(at["decay"]),
            span="auto",
        ),
        released=RELEASED.get(str(at["weights"]), Released()),
        attack=kkt,
        keep="all",
    )
    separation = SpanAttack(start="known" if start.endswith(", known") else "unknown")
    if attack == "span":
        return replace(made, attack=separation)
    n_directions = min(first, round(DIRECTIONS_PER_IMAGE * n), scale.most_directions)
    shape, alone = (3, SIDE, SIDE), replace(separation, sources="independent")
    of_span = separation_operations(alone, n_directions, shape)
    wanted = MARGIN * SLOW_RULES.get(rule, 1.0) * USUAL_ITERATIONS * of_span
    n_iterations = 10 * round(wanted / search_operations(made, shape) / 10)
    return replace(made, attack=replace(kkt, save_at=(max(100 if n > 50 else 800, n_iterations),)))


def search_operations(experiment: KKT, shape: Shape) -> int:
    """Operations of an iteration of a search with m candidates over P weights: 6 m P + 2 m^2 (d +
    2 sum h), the Gram form of `recon_core.attacks.kkt.stationarity`."""
    architecture, attack = experiment.victim.on(shape, experiment.n_outputs), experiment.attack
    assert isinstance(attack, KKTAttack)
    m, widths = attack.n_candidates, architecture.network.widths
    first, *rest = (fan_in * fan_out for fan_in, fan_out in architecture.layer_sizes)
    products = first * architecture.n_positions + sum(rest)
    return 6 * m * products + 2 * m**2 * (architecture.d + 2 * sum(widths))
