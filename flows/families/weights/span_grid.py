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

from flows.families.weights.grids import Size
from flows.papers import MILLION, gradient_descent
from recon_core.attacks.kkt.attacks import separation_operations
from recon_core.attacks.kkt.objective import Condition, KKTAttack
from recon_core.attacks.span.settings import SpanAttack
from recon_core.experiments import KKT
from recon_core.optimisers import Optimiser
from recon_core.victims.losses import Kind, Loss
from recon_core.victims.network import Bias, Network, Released
from recon_core.victims.training import Training
from tasks.evaluation.settings import Evaluation
from tasks.families.weights.study.settings import Axis, Cell, Study, Value, attack_operations

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


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A size: `rates` of the rules, `epochs` with them, and of minibatches.

    `most_directions`: how many stand
    out of a small start at the most, after training as short as this."""

    images: tuple[int, ...]
    base: int
    epochs: dict[str, int]
    rates: dict[str, float]
    rate_mse: float
    most_directions: int


CPU = Scale(
    images=(20, 50, 100, 200, 300, 500),
    base=100,
    epochs={"gradient descent": 3000, "momentum": 3000, "Adadelta": 1000, "Adam": 500,
            "batch": 1000},
    rates={"gradient descent": 0.2, "momentum": 0.02, "Adadelta": 1.0, "Adam": 1e-3},
    rate_mse=0.05,
    most_directions=400,
)  # fmt: skip
PAPER = Scale(
    images=(20, 50, 100, 200, 300, 500),
    base=500,
    epochs={"gradient descent": MILLION, "momentum": 100_000, "Adadelta": 50_000, "Adam": 50_000,
            "batch": 100_000},
    rates={"gradient descent": 0.01, "momentum": 0.01, "Adadelta": 1.0, "Adam": 1e-4},
    rate_mse=0.01,
    most_directions=5000,
)  # fmt: skip


def span(size: Size) -> Study:
    """Grid of the span attack: each cell one point away from a base."""
    scale = PAPER if size.preset == "paper" else CPU
    cells = []
    for panel, name, at in _points(scale):
        for attack in ("span", "KKT"):
            cells.append(
                Cell(
                    name=f"{name}; {attack}",
                    panel=panel,
                    at={**at, "attack": attack},
                    images_per_run=int(at["images"]),
                    experiment=_experiment(scale, at, attack),
                )
            )
    return Study(
        name="span-networks",
        preset=size.preset,
        data=size.data,
        cells=tuple(cells),
        axes=_axes(scale),
        n_victims=2 if scale is CPU else 3,
        n_attacks=1,
        runs_per_part=1,
        train_first=True,
        evaluation=Evaluation(baselines=(), restore_iterations="all"),
    )


def _points(scale: Scale) -> Iterator[tuple[str, str, dict[str, Value]]]:
    """(panel, name, where) of every point, the base first."""
    base = BASE | {"images": scale.base}
    known = {"start": "standard, known"}
    yield "base", "base", base
    for n in scale.images:
        if n != scale.base:
            yield "images", f"{n} images", base | {"images": n}
    for ratio in (0.5, 1.0, 5.0, 10.0):
        yield "ratio", f"width {ratio:g} per image", base | {"ratio": ratio}
    for start in STARTS[1:]:
        yield "start", f"{start} start", base | {"start": start}
    for rule in RULES[1:]:
        yield "rule", rule, base | {"rule": rule}
    yield "batch", "minibatches", base | {"batch": "a quarter"}
    for decay in ("0.001", "0.01"):
        yield "decay", f"weight decay {decay}", base | {"decay": decay}
    for loss in ("MSE", "CE, ten classes"):
        yield "loss", loss, base | {"loss": loss}
    for layers in (1, 3):
        plural = "s" * (layers > 1)
        yield "layers", f"{layers} hidden layer{plural}", base | {"layers": layers}
    for bias in ("first", "all"):
        yield "bias", f"biases: {bias}", base | {"bias": bias}
    for weights in ("float16", "int8", "noise 1 %", "noise 10 %"):
        yield "weights", f"weights: {weights}", base | {"weights": weights}
    for layers in (1, 3):
        plural = "s" * (layers > 1)
        name = f"{layers} hidden layer{plural}, standard, known"
        yield LAYERS_KNOWN, name, base | known | {"layers": layers}
    for start in STARTS[2:]:
        yield DECAY_STANDARD, f"decay 0.01, {start}", base | {"start": start, "decay": "0.01"}


def _axes(scale: Scale) -> dict[str, Axis]:
    return {
        "images": Axis(title="training images", values=scale.images, scale="log"),
        "ratio": Axis(title="width / images", values=(0.5, 1.0, 2.0, 5.0, 10.0), scale="log"),
        "start": Axis(title="start", values=STARTS),
        "rule": Axis(title="rule", values=RULES),
        "batch": Axis(title="batch", values=("all images", "a quarter")),
        "decay": Axis(title="weight decay", values=("0", "0.001", "0.01")),
        "loss": Axis(title="loss", values=("BCE", "MSE", "CE, ten classes")),
        "layers": Axis(title="hidden layers", values=(1, 2, 3), scale="linear"),
        "bias": Axis(title="biases", values=("none", "first", "all")),
        "weights": Axis(
            title="weights", values=("float32", "float16", "int8", "noise 1 %", "noise 10 %")
        ),
        "attack": Axis(title="attack", values=("span", "KKT")),
    }


def _experiment(scale: Scale, at: dict[str, Value], attack: str) -> KKT:
    n, n_layers = int(at["images"]), int(at["layers"])
    first = round(n * float(at["ratio"]))
    rest = round(scale.base * float(BASE["ratio"]))
    classes = 10 if at["loss"] == "CE, ten classes" else 2
    made = KKT(
        augment_p=0.0,
        n_classes=classes,
        victim=Network(
            widths=(first, *[rest] * (n_layers - 1)),
            bias=_bias(str(at["bias"])),
            init_std_first=1e-4 if str(at["start"]).startswith("small") else None,
        ),
        training=_training(scale, at),
        released=_released(str(at["weights"])),
        attack=_kkt(at),
        keep="all",
    )
    if attack == "span":
        return replace(made, attack=_span(at))
    return replace(made, attack=replace(_kkt(at), save_at=(_iterations(scale, at, made),)))


def _bias(name: str) -> Bias:
    return "first" if name == "first" else "all" if name == "all" else "none"


def _training(scale: Scale, at: dict[str, Value]) -> Training:
    rule, loss, n = str(at["rule"]), str(at["loss"]), int(at["images"])
    rate = scale.rate_mse if loss == "MSE" else scale.rates[rule]
    optimiser = {
        "momentum": gradient_descent(rate, 0.9),
        "Adadelta": Optimiser(rule="adadelta", lr=rate),
        "Adam": Optimiser(rule="adam", lr=rate),
    }.get(rule, gradient_descent(rate))
    kinds: dict[str, Kind] = {"MSE": "mse", "BCE": "bce", "CE, ten classes": "ce"}
    is_whole = at["batch"] == "all images"
    return Training(
        epochs=scale.epochs[rule if is_whole else "batch"],
        optimiser=optimiser,
        loss=Loss(kind=kinds[loss]),
        batch_size=None if is_whole else n // 4,
        weight_decay=float(at["decay"]),
        span="auto",
    )


def _released(name: str) -> Released:
    return {
        "float16": Released(precision="float16"),
        "int8": Released(precision="int8"),
        "noise 1 %": Released(noise=0.01),
        "noise 10 %": Released(noise=0.1),
    }.get(name, Released())


def _span(at: dict[str, Value]) -> SpanAttack:
    return SpanAttack(start="known" if str(at["start"]).endswith(", known") else "unknown")


def _kkt(at: dict[str, Value]) -> KKTAttack:
    """Rates at which a few hundred iterations suffice, found at the base of the CPU's size."""
    condition: Condition = "binary"
    if at["loss"] == "CE, ten classes":
        condition = "multiclass"
    elif at["loss"] == "MSE":
        condition = "regression"
    return KKTAttack(
        condition=condition,
        n_candidates=2 * int(at["images"]),
        sigma=1e-2,
        lam_min=0.1,
        alpha=100.0,
        optimiser=gradient_descent(0.6, 0.9),
        lam_lr=0.3,
    )


def _iterations(scale: Scale, at: dict[str, Value], experiment: KKT) -> int:
    """Iterations for the span attack's time and half as much again, by counted operations; never
    so few that what they cost apart from those decides. What Adam leaves has no end, so that all
    directions are separated, in most iterations."""
    n, shape = int(at["images"]), (3, SIDE, SIDE)
    attack = _span(at)
    n_directions = min(
        experiment.victim.widths[0], round(DIRECTIONS_PER_IMAGE * n), scale.most_directions
    )
    alone = replace(attack, sources="independent")
    separation = separation_operations(alone, n_directions, shape)
    search = attack_operations(experiment, shape)
    slow = SLOW_RULES.get(str(at["rule"]), 1.0)
    wanted = MARGIN * slow * USUAL_ITERATIONS * separation / search
    return max(100 if n > 50 else 800, 10 * round(wanted / 10))
