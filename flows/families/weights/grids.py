"""The studies of the KKT paper as grids: one function each, at the paper's size or at a CPU's.

Where the paper leaves a setting open, the choice is said beside it. Weight decay is that of the
mean loss, as in the authors' code; the paper's equation 13 has it beside the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flows import papers
from recon_core.attacks.kkt.objective import Condition, KKTAttack, Search
from recon_core.experiments import KKT
from recon_core.victims.losses import Loss
from recon_core.victims.network import Conv, Network
from tasks.evaluation.settings import Evaluation
from tasks.families.weights.study.settings import Axis, Cell, Study, Value

CIFAR10 = "cifar10:cifar-10-batches-py"
CIFAR100 = "cifar100:cifar-100-python"


@dataclass(frozen=True, kw_only=True)
class Size:
    """Settings that tell the studies at one size from those at another.

    `rate`: of the victims' training with one output. `search` and `search_conv`, for dense and for
    convolutional victims: None leaves those of `flows.papers`.
    """

    preset: str
    data: str
    width: int
    epochs: int
    epochs_conv: int
    rate: float
    save_at: tuple[int, ...]
    search: Search | None
    search_conv: Search | None
    min_candidates: int
    n_attacks: int
    runs_per_part: int


PAPER = Size(
    preset="paper",
    data=CIFAR10,
    width=1000,
    epochs=papers.MILLION,
    epochs_conv=papers.MILLION,
    rate=0.01,
    save_at=(10_000, 50_000),
    search=None,
    search_conv=None,
    min_candidates=2,
    n_attacks=100,
    runs_per_part=10,
)
"""KKT paper, appendix B: 1e6 epochs of gradient descent, some 100 attacks of 50,000 iterations."""

CPU = Size(
    preset="cpu",
    data="folder:cifar10",
    width=200,
    epochs=30_000,
    epochs_conv=6_000,
    rate=0.05,
    save_at=(1000,),
    search=Search(lr=(0.05, 0.6), lam_lr=(0.1, 0.6)),
    search_conv=Search(lr=(0.001, 0.01), lam_lr=(0.003, 0.03), lam_min=None),
    min_candidates=10,
    n_attacks=4,
    runs_per_part=4,
)
"""Width 200, a fiftieth of the attack's iterations, and rates at which those suffice. Gradients
are shared by the candidates (1/N): with fewer than ten these rates are too high, and attacks
diverge."""

SIZES = {"paper": PAPER, "cpu": CPU}


def multiclass(size: Size) -> Study:
    """KKT paper, section 4.2: number of classes against images per class (figure 3), and at a fixed
    number of images (figure 9; with a binary victim of as many images, figure 2)."""
    paper = size.preset == "paper"
    classes = (2, 3, 4, 5, 10) if paper else (2, 3, 5, 10)
    per_class = (1, 5, 10, 50) if paper else (1, 5, 10)
    fixed = 500 if paper else 60
    cells = [
        _cell(f"{c} classes, {n} each", "grid", {"n_classes": c, "per_class": n}, c * n,
              _experiment(size, c * n, classes=c, condition="multiclass"))
        for n in per_class
        for c in classes
    ]  # fmt: skip
    for c in classes:
        n = round(fixed / c) * c  # as near to 500 as three classes come
        experiment = _experiment(size, n, classes=c, condition="multiclass")
        cells.append(_cell(f"{c} classes, {n}", "fixed", {"n_classes": c}, n, experiment))
    binary = _experiment(size, fixed, condition="binary")
    cells.append(_cell(f"vehicles, animals; {fixed}", "binary", {"n_classes": 2}, fixed, binary))
    axes = {
        "n_classes": Axis(title="classes", values=classes, scale="linear"),
        "per_class": Axis(title="images per class", values=per_class, scale="log"),
    }
    return _study("multiclass", size, cells, axes)


def losses(size: Size) -> Study:
    """KKT paper, section 5.2: losses other than cross-entropy, with decay (figures 4, 11 to 13).

    All are attacked with equation 15, which knows nothing of the loss. Open: the weight decays; at
    the paper's size that of the authors' regression.
    """
    paper = size.preset == "paper"
    decay = 7.5e-4 if paper else 3e-3
    kinds = {
        "BCE, no decay": (Loss(), 0.0, papers.SMALL_FIRST),
        "BCE": (Loss(), decay, papers.STANDARD),
        "MSE": (Loss(kind="mse"), decay, papers.STANDARD),
        "L2.5": (Loss(kind="power", power=2.5), decay, papers.STANDARD),
        "Huber": (Loss(kind="huber"), decay, papers.STANDARD),
    }
    numbers = (50, 100, 300) if paper else (10, 30, 60)
    cells = [
        _cell(f"{name}, {n} images", "grid", {"loss": name, "n_images": n}, n,
              _experiment(size, n, loss=loss, decay=wd, network=network))
        for name, (loss, wd, network) in kinds.items()
        for n in numbers
    ]  # fmt: skip
    axes = {
        "loss": Axis(title="loss", values=tuple(kinds)),
        "n_images": Axis(title="images", values=numbers, scale="log"),
    }
    return _study("losses", size, cells, axes)


def weight_decay(size: Size) -> Study:
    """KKT paper, section 6.1: weight decay from a standard start, beside two starts without it
    (figures 5 and 14), for two classes and for ten."""
    paper = size.preset == "paper"
    exponents = range(-5, -1) if paper else range(-4, -1)
    decays = tuple(c * 10.0**k for k in exponents for c in (1, 3)) if paper else (
        1e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # fmt: skip
    cells = []
    for classes, n in ((2, 100), (10, 500)) if paper else ((2, 30), (10, 50)):
        starts: list[tuple[str, float, Network]] = [
            ("standard", 0.0, papers.STANDARD),
            ("small", 0.0, papers.SMALL_FIRST),
            *(("standard", decay, papers.STANDARD) for decay in decays),
        ]
        for start, decay, network in starts:
            condition: Condition = "binary" if classes == 2 else "multiclass"
            experiment = _experiment(
                size, n, classes=classes, condition=condition, decay=decay, network=network
            )
            panel = f"{classes} classes" if decay else f"{classes} classes, no decay"
            name = f"{classes} classes, " + (f"decay {decay:g}" if decay else f"{start} start")
            at: dict[str, Value] = {"weight_decay": decay, "start": start, "n_classes": classes}
            cells.append(_cell(name, panel, at, n, experiment))
    axes = {
        "weight_decay": Axis(title="weight decay", values=decays, scale="log"),
        "start": Axis(title="start", values=("standard", "small")),
        "n_classes": Axis(title="classes", values=(2, 10), scale="linear"),
    }
    return _study("weight-decay", size, cells, axes)


def cnn(size: Size) -> Study:
    """KKT paper, section 6.1: Conv(k, channels)-W-1 with weight decay: kernel against
    channels (figure 15; 16 shows kernels), and weight decay at one of them (figure 5c).

    Open: biases; here in the first layer, as in the dense victims.
    """
    paper = size.preset == "paper"
    kernels = (3, 5, 10, 15, 20, 25, 32) if paper else (3, 8, 16, 32)
    channels = (4, 8, 16, 32, 64) if paper else (2, 4, 8)
    base = Conv(kernel=3, channels=32 if paper else 8)
    decays = (3e-4, 1e-3, 3e-3, 1e-2) if paper else (1e-2, 3e-2, 1e-1)
    usual, n = (1e-3, 500) if paper else (3e-2, 10)
    cells = [
        _cell(f"kernel {k}, {c} channels", "grid", {"kernel": k, "channels": c}, n,
              _experiment(size, n, decay=usual,
                          network=replace(papers.STANDARD, conv=Conv(kernel=k, channels=c))))
        for c in channels
        for k in kernels
    ]  # fmt: skip
    cells += [
        _cell(f"decay {decay:g}", "decay", {"weight_decay": decay}, n,
              _experiment(size, n, decay=decay, network=replace(papers.STANDARD, conv=base)))
        for decay in decays
    ]  # fmt: skip
    for start, network in (("standard", papers.STANDARD), ("small", papers.SMALL_FIRST)):
        cells.append(
            _cell(f"no decay, {start} start", "no decay", {"start": start}, n,
                  _experiment(size, n, network=replace(network, conv=base)))
        )  # fmt: skip
    axes = {
        "kernel": Axis(title="side of the kernel", values=kernels, scale="linear"),
        "channels": Axis(title="channels", values=channels, scale="log"),
        "weight_decay": Axis(title="weight decay", values=decays, scale="log"),
        "start": Axis(title="start", values=("standard", "small")),
    }
    study = _study("cnn", size, cells, axes, n_attacks=None if paper else 2)
    at_once = 5 if paper else study.runs_per_part  # a run takes up to 10 GB
    evaluation = replace(study.evaluation, vote_ratio=1.5)
    return replace(study, evaluation=evaluation, runs_per_part=at_once)


def width(size: Size) -> Study:
    """KKT paper, section 6.2: D-W-W-1 on N images, BCE and MSE, equation 15 (figure 7).

    Open: the weight decay of these victims; that of `losses`.
    """
    paper = size.preset == "paper"
    widths = (5, 10, 50, 100, 500, 1000) if paper else (5, 10, 50, 100, 200)
    numbers = (10, 50, 100, 300, 500) if paper else (10, 20, 40)
    decay = 7.5e-4 if paper else 3e-3
    kinds = {"MSE": Loss(kind="mse"), "BCE": Loss()}
    cells = [
        _cell(f"{name}, width {w}, {n} images", name, {"width": w, "n_images": n}, n,
              _experiment(size, n, loss=loss, decay=decay,
                          network=replace(papers.STANDARD, widths=(w, w))))
        for name, loss in kinds.items()
        for n in numbers
        for w in widths
    ]  # fmt: skip
    axes = {
        "width": Axis(title="width", values=widths, scale="log"),
        "n_images": Axis(title="images", values=numbers, scale="log"),
    }
    return _study("width", size, cells, axes)


def large(size: Size) -> Study:
    """KKT paper, appendix G: many images, wide victim, minibatches (figure 17).

    50 images of each class of CIFAR-100 and width 10,000; open: batch size, rate and number of
    epochs. At a CPU's size: CIFAR-10, and three times the images and widths of the other studies.
    """
    paper = size.preset == "paper"
    classes, n, w = (100, 5000, 10_000) if paper else (10, 200, 500)
    epochs, batch = (100_000, 500) if paper else (10_000, 50)
    network = replace(papers.SMALL_FIRST, widths=(w, w))
    experiment = _experiment(size, n, classes=classes, condition="multiclass", network=network)
    training = replace(
        experiment.training,
        epochs=epochs,
        batch_size=batch,
        optimiser=papers.gradient_descent(0.1),
        span=False if paper else "auto",
    )
    experiment = replace(experiment, training=training)
    cells = [_cell(f"{n} images, width {w}", "large", {"n_images": n}, n, experiment)]
    study = _study("large", size, cells, {}, n_attacks=20 if paper else 2)
    if paper:
        return replace(study, data=CIFAR100, split="train", runs_per_part=1)
    return study


def _study(
    name: str,
    size: Size,
    cells: Sequence[Cell],
    axes: dict[str, Axis],
    n_attacks: int | None = None,
) -> Study:
    n = n_attacks or size.n_attacks
    return Study(
        name=name,
        preset=size.preset,
        data=size.data,
        cells=tuple(cells),
        axes=axes,
        n_attacks=n,
        runs_per_part=min(n, size.runs_per_part),
        evaluation=Evaluation(baselines=(), restore_iterations="all"),
    )


def _cell(name: str, panel: str, at: dict[str, Value], n_images: int, experiment: KKT) -> Cell:
    return Cell(name=name, panel=panel, at=at, images_per_run=n_images, experiment=experiment)


def _experiment(
    size: Size,
    n_images: int,
    *,
    classes: int = 2,
    condition: Condition = "regression",
    loss: Loss | None = None,
    decay: float = 0.0,
    network: Network = papers.SMALL_FIRST,
) -> KKT:
    """Victims of a size and an attack on them, m = 2n. `condition`: equation 15, 6 (binary) or 12
    (multiclass) of the KKT paper; a convolution is followed by one dense layer."""
    is_multiclass, width, conv = condition == "multiclass", size.width, network.conv
    base = papers.buzaglo2023_multiclass() if is_multiclass else papers.buzaglo2023_regression()
    assert isinstance(base.attack, KKTAttack)
    search = base.attack.search if condition != "binary" else Search(lam_lr=(1e-5, 1.0))
    if conv is not None and size.search_conv is not None:
        search = size.search_conv
    elif size.search is not None:
        lowest = {"lam_min": None} if condition == "regression" else {}
        search = replace(size.search, **lowest)
    widths = network.widths
    if conv is not None:
        widths = (width if size.preset == "paper" else width // 2,)
    elif widths == papers.STANDARD.widths:
        widths = (width, width)
    return replace(
        base,
        n_classes=classes,
        victim=replace(network, widths=widths),
        training=replace(
            base.training,
            loss=base.training.loss if is_multiclass else loss or Loss(),
            epochs=size.epochs if conv is None else size.epochs_conv,
            optimiser=replace(base.training.optimiser, lr=0.5 if is_multiclass else size.rate),
            weight_decay=decay,
            span="auto" if conv is None else False,
        ),
        attack=replace(
            base.attack,
            condition=condition,
            n_candidates=max(2 * n_images, size.min_candidates),
            save_at=size.save_at,
            search=search,
        ),
        dtype="float32",
    )
