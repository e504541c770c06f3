"""Figures of a study's page in its words: heatmaps, lines, scatter plots and kernels, over cells.

`tasks.families.weights.study.figures` draws them. Numbers of figures are the KKT paper's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from recon_core.experiments import KKT
from tasks.families.weights.study.settings import Study

NO_CAUSE = "A cause: images near the boundary may differ in other ways."
NOT_ALL = (
    "How much a network could give away: a few attacks of limited length are a lower bound, and "
    "other settings may bring back more."
)
SEVERAL = "Bars are intervals of 95 % over images."


OF_ALL = ("name", "title", "where")
FIELDS = {
    "heatmap": (*OF_ALL, "panel", "x", "y", "value", "also", "caption", "cannot"),
    "lines": (*OF_ALL, "panel", "x", "series", "value", "baselines", "also", "caption", "cannot"),
    "scatter": (*OF_ALL, "x", "cells", "caption", "cannot"),
    "kernels": (*OF_ALL, "cells", "caption", "cannot"),
}
"""A heatmap shows a `value` of the cells of a `panel`, and of the cells `also`, over two axes;
lines show it over one, a line per value of the axis `series`, with cells as levels (`baselines`);
a scatter shows the SSIM of every image of its cells against its margin or loss."""
DEFAULTS = {"where": "", "series": None, "baselines": (), "also": (), "cannot": NOT_ALL}

Figure = dict[str, Any]


def _figure(kind: str, **given: Any) -> Figure:
    return {"kind": kind} | {
        key: given[key] if key in given else DEFAULTS[key] for key in FIELDS[kind]
    }


heatmap, lines, kernels = (partial(_figure, kind) for kind in ("heatmap", "lines", "kernels"))
scatter = partial(_figure, "scatter", x="margin", cannot=NO_CAUSE)


def kernels_of(study: Study) -> list[int]:
    """The cells of which kernels are shown."""
    return [c for f in describe_figures(study) if f["kind"] == "kernels" for c in f["cells"]]


def cells_of(study: Study, *panels: str) -> tuple[int, ...]:
    """Numbers of the cells of some panels, in order."""
    return tuple(k for k, cell in enumerate(study.cells) if cell.panel in panels)


def describe_figures(study: Study) -> Sequence[Figure]:
    """The figures of a study as they stand in study.json; of some of its cells, or of another
    study, what every cell has."""
    if study.name in FIGURES and not study.only:
        return FIGURES[study.name](study)
    return [
        scatter(
            name="boundary",
            title="Distance from the boundary",
            where="KKT paper, section 3",
            cells=tuple(range(len(study.cells))),
            caption="Every training image of every cell.",
        )
    ]


def multiclass(study: Study) -> Sequence[Figure]:
    n = study.cells[cells_of(study, "binary")[0]].images_per_run
    ten = [k for k in cells_of(study, "fixed") if study.cells[k].at["n_classes"] == 10]
    largest = max(study.axes["per_class"].values)
    row = [k for k in cells_of(study, "grid") if study.cells[k].at["per_class"] == largest]
    return [
        scatter(
            name="boundary",
            title=f"Ten classes and two, {n} images each",
            where="KKT paper, figure 2",
            cells=(*ten, *cells_of(study, "binary")),
            caption="Every training image of the three networks of each kind: how well it came "
            "back, against how far it is from the decision boundary.",
        ),
        heatmap(
            name="good",
            title="Good reconstructions per network",
            where="KKT paper, figure 3b",
            panel="grid",
            x="n_classes",
            y="per_class",
            value="n_good",
            caption="Training images that came back good, per network.",
        ),
        heatmap(
            name="share",
            title="Share of the training images that came back good",
            where="KKT paper, figure 3",
            panel="grid",
            x="n_classes",
            y="per_class",
            value="good_fraction",
            caption="The same as a share of each network's images, which are more with more "
            "classes.",
        ),
        scatter(
            name="classes",
            title=f"By number of classes, {largest} images of each",
            where="KKT paper, figure 3a",
            cells=tuple(row),
            caption="More classes put more images close to a boundary.",
        ),
        lines(
            name="fixed",
            title="The same number of images in all",
            where="KKT paper, figure 9",
            panel="fixed",
            x="n_classes",
            value="n_good",
            baselines=cells_of(study, "binary"),
            caption=f"Good reconstructions of some {n} images, shared by more and more classes. "
            f"{SEVERAL}",
        ),
    ]


def losses(study: Study) -> Sequence[Figure]:
    return [
        heatmap(
            name="good",
            title="Share of the training images that came back good",
            where="KKT paper, figure 4",
            panel="grid",
            x="n_images",
            y="loss",
            value="good_fraction",
            caption="By the loss that the network was trained with, and the number of its images.",
        ),
        scatter(
            name="loss",
            title="Images with a higher loss come back better",
            where="KKT paper, figure 4",
            x="loss",
            cells=cells_of(study, "grid"),
            caption="Every training image: how well it came back, against the loss that the "
            "trained network has on it.",
            cannot="A cause, nor a comparison of losses: they have different units.",
        ),
    ]


def weight_decay(study: Study) -> Sequence[Figure]:
    figures: list[Figure] = []
    shown: tuple[tuple[str, str, str], ...] = (
        (
            "good_fraction",
            "Share of the training images that came back good",
            f"From a standard start with weight decay; without it, levels. {SEVERAL}",
        ),
        (
            "n_effective",
            "Images that shape the weights",
            "Effective number of images behind the weights, the paper's margin samples: "
            "(Σ c)² / Σ c² over the slopes c of the loss. Mean over networks.",
        ),
        (
            "test_accuracy",
            "Accuracy on images that were not trained on",
            "Mean over networks.",
        ),
    )
    for n_classes, where in ((2, "KKT paper, figure 5a"), (10, "KKT paper, figure 5b")):
        panel = f"{n_classes} classes"
        for value, title, caption in shown:
            is_share = value == "good_fraction"
            figures.append(
                lines(
                    name=f"{value.replace('_', '-')}-{n_classes}",
                    title=f"{title}, {n_classes} classes",
                    where=where if is_share else "KKT paper, appendix E",
                    panel=panel,
                    x="weight_decay",
                    value=value,
                    baselines=cells_of(study, f"{panel}, no decay"),
                    caption=caption,
                    cannot=NOT_ALL if is_share else "That one follows from the other.",
                )
            )
        figures.append(
            scatter(
                name=f"boundary-{n_classes}",
                title=f"Distance from the boundary, {n_classes} classes",
                where="KKT paper, figure 14",
                cells=cells_of(study, f"{panel}, no decay", panel),
                caption="A panel per weight decay, the two starts without it first.",
            )
        )
    return figures


def cnn(study: Study) -> Sequence[Figure]:
    convs = [c.experiment.victim.conv for c in study.cells if isinstance(c.experiment, KKT)]
    base = next(k for k, c in zip(convs, study.cells, strict=True) if c.panel == "decay")
    shown = [k for k in cells_of(study, "grid") if convs[k] == base]
    return [
        heatmap(
            name="good",
            title="Share of the training images that came back good",
            where="KKT paper, figure 15",
            panel="grid",
            x="kernel",
            y="channels",
            value="good_fraction",
            caption="By the side of the kernels and their number. A kernel as large as the image "
            "makes the first layer dense.",
        ),
        heatmap(
            name="mean",
            title="Mean SSIM",
            where="KKT paper, figure 15",
            panel="grid",
            x="kernel",
            y="channels",
            value="mean_ssim",
            caption="Of all training images, good or not.",
            cannot="That an image can be recognised: the decoys' mean is in the table of cells.",
        ),
        lines(
            name="decay",
            title="By weight decay",
            where="KKT paper, figure 5c",
            panel="decay",
            x="weight_decay",
            value="good_fraction",
            baselines=cells_of(study, "no decay"),
            caption=f"Beside two starts without weight decay. {SEVERAL}",
        ),
        scatter(
            name="boundary",
            title="Distance from the boundary",
            where="KKT paper, figure 15",
            cells=cells_of(study, "grid"),
            caption="A panel per kernel and number of channels.",
        ),
        kernels(
            name="kernels",
            title="Kernels of a trained network",
            where="KKT paper, figure 16",
            cells=tuple(shown),
            caption="All kernels of the first layer, each from its smallest weight (black) to its "
            "largest (white).",
            cannot="That images are stored in kernels: these are far smaller than the images.",
        ),
    ]


def width(study: Study) -> Sequence[Figure]:
    return [
        heatmap(
            name=f"good-{loss.lower()}",
            title=f"Good reconstructions per network, {loss}",
            where="KKT paper, figure 7",
            panel=loss,
            x="width",
            y="n_images",
            value="n_good",
            caption="Per network, and as a share of its images.",
        )
        for loss in dict.fromkeys(cell.panel for cell in study.cells)
    ]


def large(study: Study) -> Sequence[Figure]:
    return [
        scatter(
            name="boundary",
            title="Distance from the boundary",
            where="KKT paper, figure 17b",
            cells=cells_of(study, "large"),
            caption="Every training image of the network.",
        )
    ]


def span(study: Study) -> Sequence[Figure]:
    """A line per attack over what is a number, a square per attack for the rest."""
    base = cells_of(study, "base")
    figures: list[Figure] = []
    for panel, (axis, title) in OF_SPAN.items():
        also = base
        if panel != axis:  # these points are next to one of the starts
            also = tuple(
                k
                for k in cells_of(study, "start")
                if study.cells[k].at["start"] == "standard, known"
            )
        common: dict[str, Any] = {
            "name": panel.replace(", ", "-").replace(" ", "-"),
            "title": f"Share of good images, by {title}",
            "panel": panel,
            "value": "good_fraction",
            "also": also,
            "cannot": ONE_AWAY,
        }
        if study.axes[axis].scale == "category":
            figures.append(heatmap(x="attack", y=axis, caption=EQUAL_TIME, **common))
        else:
            caption = f"{EQUAL_TIME} {SEVERAL}"
            figures.append(lines(x=axis, series="attack", caption=caption, **common))
    seconds = lines(
        name="seconds",
        title="Seconds of an attack, by the number of images",
        panel="images",
        x="images",
        series="attack",
        value="attack_seconds",
        also=base,
        caption="Work of one core, the comparison with the training images included. Networks are "
        "trained before.",
        cannot="What the KKT attack needs: it was given this time.",
    )
    return [figures[0], seconds, *figures[1:]]


OF_SPAN = {
    "images": ("images", "number of images"),
    "ratio": ("ratio", "width of the first layer over images"),
    "start": ("start", "start"),
    "rule": ("rule", "rule of the training"),
    "batch": ("batch", "batch"),
    "decay": ("decay", "weight decay"),
    "loss": ("loss", "loss"),
    "layers": ("layers", "hidden layers"),
    "layers, known start": ("layers", "hidden layers, from a standard start that is known"),
    "bias": ("bias", "biases"),
    "weights": ("weights", "what is done to the weights before they are given away"),
}
"""The panels of the span study with a figure: the axis, and what it is in words."""
EQUAL_TIME = (
    "Of all training images, by attack; the KKT attack was to have at least as much time. Good "
    "decoys and seconds are in the table of cells."
)
ONE_AWAY = (
    "How settings work together: every point is one setting away from the base, which is in each "
    "figure."
)

FIGURES: dict[str, Callable[[Study], Sequence[Figure]]] = {
    "multiclass": multiclass,
    "losses": losses,
    "weight-decay": weight_decay,
    "cnn": cnn,
    "width": width,
    "large": large,
    "span-networks": span,
}
