"""The words of a study's figures: heatmaps, lines, scatter plots and kernels, over cells.

`tasks.families.weights.study.page` draws them. Figures are numbered as in the KKT paper.
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
BOUNDARY = "Distance from the boundary"
SHARE = "Share of the training images that came back good"

Figure = dict[str, Any]


def heatmap(name: str, title: str, caption: str, **given: Any) -> Figure:
    """Describe a heatmap: a `value` of the cells of a `panel`, and of the cells `also`, over the
    axes `x` and `y`."""
    shown = {"where": "", "also": (), "cannot": NOT_ALL} | given
    return {"kind": "heatmap", "name": name, "title": title, "caption": caption} | shown


def lines(name: str, title: str, caption: str, **given: Any) -> Figure:
    """Describe lines: a `value` over one axis, a line per value of the axis `series`, and
    `baselines` as horizontal lines."""
    shown = {"where": "", "series": None, "baselines": (), "also": (), "cannot": NOT_ALL} | given
    return {"kind": "lines", "name": name, "title": title, "caption": caption} | shown


def scatter(
    name: str, title: str, caption: str, where: str, cells: Sequence[int], **given: Any
) -> Figure:
    """Describe a scatter plot: SSIM of every image of the cells against its margin or loss, `x`."""
    shown = {"where": f"KKT paper, {where}", "x": "margin", "cells": tuple(cells)}
    shown |= {"caption": caption, "cannot": NO_CAUSE}
    return {"kind": "scatter", "name": name, "title": title} | shown | given


def kernels_of(study: Study) -> list[int]:
    """Numbers of the cells whose kernels are shown."""
    return [c for f in describe_figures(study) if f["kind"] == "kernels" for c in f["cells"]]


def cells_of(study: Study, *panels: str) -> tuple[int, ...]:
    """Numbers of the cells of some panels, in order."""
    return tuple(k for k, cell in enumerate(study.cells) if cell.panel in panels)


def describe_figures(study: Study) -> Sequence[Figure]:
    """List the figures of a study as they stand in study.json. A study of one's own, or of some
    cells alone, has the figure that every cell has."""
    if study.name in FIGURES and not study.only:
        return FIGURES[study.name](study)
    every = range(len(study.cells))
    return [
        scatter("boundary", BOUNDARY, "Every training image of every cell.", "section 3", every)
    ]


def multiclass(study: Study) -> Sequence[Figure]:
    binary = cells_of(study, "binary")
    n = study.cells[binary[0]].images_per_run
    ten = [k for k in cells_of(study, "fixed") if study.cells[k].at["n_classes"] == 10]
    largest = max(study.axes["per_class"].values)
    row = [k for k in cells_of(study, "grid") if study.cells[k].at["per_class"] == largest]
    grid = partial(heatmap, panel="grid", x="n_classes", y="per_class")
    return [
        scatter(
            "boundary",
            f"Ten classes and two, {n} images each",
            "Every training image of the three networks of each kind: how well it came back, "
            "against how far it is from the decision boundary.",
            "figure 2",
            [*ten, *binary],
        ),
        grid(
            "good",
            "Good reconstructions per network",
            "Training images that came back good, per network.",
            where="KKT paper, figure 3b",
            value="n_good",
        ),
        grid(
            "share",
            SHARE,
            "The same as a share of each network's images, which are more with more classes.",
            where="KKT paper, figure 3",
            value="good_fraction",
        ),
        scatter(
            "classes",
            f"By number of classes, {largest} images of each",
            "More classes put more images close to a boundary.",
            "figure 3a",
            row,
        ),
        lines(
            "fixed",
            "The same number of images in all",
            f"Good reconstructions of some {n} images, shared by more and more classes. {SEVERAL}",
            where="KKT paper, figure 9",
            panel="fixed",
            x="n_classes",
            value="n_good",
            baselines=binary,
        ),
    ]


def losses(study: Study) -> Sequence[Figure]:
    return [
        heatmap(
            "good",
            SHARE,
            "By the loss that the network was trained with, and the number of its images.",
            where="KKT paper, figure 4",
            panel="grid",
            x="n_images",
            y="loss",
            value="good_fraction",
        ),
        scatter(
            "loss",
            "Images with a higher loss come back better",
            "Every training image: how well it came back, against the loss that the trained "
            "network has on it.",
            "figure 4",
            cells_of(study, "grid"),
            x="loss",
            cannot="A cause, nor a comparison of losses: they have different units.",
        ),
    ]


def weight_decay(study: Study) -> Sequence[Figure]:
    figures: list[Figure] = []
    shown: tuple[tuple[str, str, str], ...] = (
        (
            "good_fraction",
            SHARE,
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
    for n_classes, figure in ((2, "figure 5a"), (10, "figure 5b")):
        panel = f"{n_classes} classes"
        plain = cells_of(study, f"{panel}, no decay")
        for value, title, caption in shown:
            is_share = value == "good_fraction"
            figures.append(
                lines(
                    f"{value.replace('_', '-')}-{n_classes}",
                    f"{title}, {panel}",
                    caption,
                    where=f"KKT paper, {figure if is_share else 'appendix E'}",
                    panel=panel,
                    x="weight_decay",
                    value=value,
                    baselines=plain,
                    cannot=NOT_ALL if is_share else "That one follows from the other.",
                )
            )
        figures.append(
            scatter(
                f"boundary-{n_classes}",
                f"{BOUNDARY}, {panel}",
                "A panel per weight decay, the two starts without it first.",
                "figure 14",
                cells_of(study, f"{panel}, no decay", panel),
            )
        )
    return figures


def cnn(study: Study) -> Sequence[Figure]:
    convs = [c.experiment.victim.conv for c in study.cells if isinstance(c.experiment, KKT)]
    base = next(k for k, c in zip(convs, study.cells, strict=True) if c.panel == "decay")
    cells = cells_of(study, "grid")
    grid = partial(heatmap, where="KKT paper, figure 15", panel="grid", x="kernel", y="channels")
    return [
        grid(
            "good",
            SHARE,
            "By the side of the kernels and their number. A kernel as large as the image makes the "
            "first layer dense.",
            value="good_fraction",
        ),
        grid(
            "mean",
            "Mean SSIM",
            "Of all training images, good or not.",
            value="mean_ssim",
            cannot="That an image can be recognised: the decoys' mean is in the table of cells.",
        ),
        lines(
            "decay",
            "By weight decay",
            f"Beside two starts without weight decay. {SEVERAL}",
            where="KKT paper, figure 5c",
            panel="decay",
            x="weight_decay",
            value="good_fraction",
            baselines=cells_of(study, "no decay"),
        ),
        scatter(
            "boundary", BOUNDARY, "A panel per kernel and number of channels.", "figure 15", cells
        ),
        {
            "kind": "kernels",
            "name": "kernels",
            "title": "Kernels of a trained network",
            "where": "KKT paper, figure 16",
            "cells": tuple(k for k in cells if convs[k] == base),
            "caption": "All kernels of the first layer, each from its smallest weight (black) to "
            "its largest (white).",
            "cannot": "That images are stored in kernels: these are far smaller than the images.",
        },
    ]


def width(study: Study) -> Sequence[Figure]:
    return [
        heatmap(
            f"good-{loss.lower()}",
            f"Good reconstructions per network, {loss}",
            "Per network, and as a share of its images.",
            where="KKT paper, figure 7",
            panel=loss,
            x="width",
            y="n_images",
            value="n_good",
        )
        for loss in dict.fromkeys(cell.panel for cell in study.cells)
    ]


def large(study: Study) -> Sequence[Figure]:
    caption = "Every training image of the network."
    return [scatter("boundary", BOUNDARY, caption, "figure 17b", cells_of(study, "large"))]


def span(study: Study) -> Sequence[Figure]:
    """A line per attack over numeric axes, a square per attack over the others."""
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
        name = panel.replace(", ", "-").replace(" ", "-")
        shown = f"Share of good images, by {title}"
        common = {"panel": panel, "value": "good_fraction", "also": also, "cannot": ONE_AWAY}
        if study.axes[axis].scale == "category":
            figures.append(heatmap(name, shown, EQUAL_TIME, x="attack", y=axis, **common))
        else:
            caption = f"{EQUAL_TIME} {SEVERAL}"
            figures.append(lines(name, shown, caption, x=axis, series="attack", **common))
    seconds = lines(
        "seconds",
        "Seconds of an attack, by the number of images",
        "Work of one core, the comparison with the training images included. Networks are trained "
        "before.",
        panel="images",
        x="images",
        series="attack",
        value="attack_seconds",
        also=base,
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
"""The panels of the span study that have a figure: their axis, and its words."""
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
