"""The words of a recovery study's figures, look-ups in its record, and its tables.

A figure is left out if the record has no numbers for it. Figures are drawn from their tables, so
that the CSV files beside the page cannot differ (docs/pages.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tasks.page.charts import Style, styles_of
from tasks.page.files import Cell, Record, Table, estimate, table_of
from tasks.page.formats import NOTHING, decibels, names, percent, plural, power, short
from tasks.page.study_page import FigureWords, figure_spec

PAPER = "autoencoder paper"
VALUES = ("accurate", "approximate", "psnr")
TITLES = {
    "accurate": "accurate recovery",
    "approximate": "approximate recovery",
    "psnr": "mean PSNR",
}
METHODS = ("iteration", "unknown", "known", "noise_aware", "ddnm", "biharmonic")
COLOURS = {name: 12 + k for k, name in enumerate(METHODS)}
"""Distinct with any colour vision (templates/matrix.css)."""
MODERATE = 1e-5
"""Lowest loss of a network of the moderate regime (autoencoder paper, C.2)."""
MEMORY = 100
"""Least ratio of the loss on unseen images to the train loss of a network that overfits. With less
a network has learned to copy its input, and holds nothing to recover."""
WHERE = ("victim", "level", "loss", "mask", "sigma", "split", "method")
SUMMED = ("n", "n_accurate", "n_approximate")
SHARES = ("accurate", "approximate")

ONE_OF_EACH = (
    "How much other networks would give away: there is one of each kind, and the bars are "
    "intervals over its images. A share of 0 % is no promise either: another attack may bring back "
    "more."
)
BY_LOSS = (
    "by the loss to which the network was trained, which falls to the right. Solid lines: methods "
    "that do not know the mask; dashed ones are given it. Bars are intervals of 95 % over images. "
    "A method that does not ask the network may have been run once; its line is level then."
)
WORDS: dict[str, FigureWords] = {
    "masks": (
        "What is missing",
        f"{PAPER}, figure 3",
        "The patterns of missing pixels. Light pixels are known, dark ones are set to 0 in all "
        "colours; a method that does not know the mask must tell them from black ones.",
        "Every way to lose pixels: other patterns may be harder.",
    ),
    "plates": (
        "What comes back",
        f"{PAPER}, figure 1",
        "Training images of the network, what was left of them, and what each method makes of it, "
        "with the PSNR. Estimated masks are what a method takes for known (light).",
        "How often it goes so: these are a few images, good and bad ones among them, and the "
        "shares are in the figures.",
    ),
    "thresholds": (
        "When is an image recovered?",
        f"{PAPER}, figure F.3",
        "Share of the training images that count as recovered, by the error that is allowed, "
        "which falls to the right: a panel per loss of the network. Dotted lines: the thresholds "
        "of approximate and of accurate recovery.",
        "An interval: those of the two thresholds are in the figures above.",
    ),
    "control": (
        "Training images and test images",
        f"{PAPER}, section 4",
        "The same networks, masks and methods on images that were not trained on, at the lowest "
        "loss of each network. A mark per mask; numbers are shares over all masks.",
        "That a method invents nothing: a test image that does not come back may still come out "
        "as some other picture.",
    ),
    "contraction": (
        "Does the network pull towards its images?",
        f"{PAPER}, section 1",
        "Estimated spectral radius of the Jacobian of f at an image, at the lowest loss of each "
        "network. Below 1 (dotted), f draws what is near towards the image.",
        "How far it draws: a radius holds at the image itself, and masks lead far away.",
    ),
}


def describe_figures(record: Record) -> list[dict[str, Any]]:
    """List the figures of a study as they stand in recovery.json, in the order of the page."""
    figures = [figure_spec("masks", "masks", WORDS["masks"])] if record["masks"] else []
    figures += [figure_spec("plates", "examples", WORDS["plates"])] if record["shown"] else []
    figures += [*_rates(record), *_of_one_victim(record)]
    tested = {cell["victim"] for cell in cells_of(record, split="test", sigma=0.0)}
    victims = {
        "control": [v["name"] for v in record["victims"] if v["name"] in tested],
        "contraction": [v["name"] for v in record["victims"] if v["contraction"]],
    }
    for kind, shown in victims.items():
        figures += [figure_spec(kind, kind, WORDS[kind], victims=shown)] if shown else []
    sigmas = sorted({cell["sigma"] for cell in record["cells"] if cell["sigma"] > 0})
    for k, sigma in enumerate(sigmas, start=1):
        words = (
            f"With noise of standard deviation {sigma:g}",
            f"{PAPER}, figure G.1",
            f"As above, after adding Gaussian noise (standard deviation {sigma:g}, for pixels from "
            "0 to 1) to the known pixels and to the missing ones.",
            ONE_OF_EACH,
        )
        name = "noise" if len(sigmas) == 1 else f"noise-{k}"
        figures.append(figure_spec("noise", name, words, sigma=sigma))
    return figures


def _rates(record: Record) -> list[dict[str, Any]]:
    """Rates by loss, for the victims that were meant to fit perfectly, whether they did or not; for
    all victims if none was."""
    perfect = [v for v in record["victims"] if min(v["wanted"], default=math.inf) < MODERATE]
    victims = [victim["name"] for victim in perfect or record["victims"]]
    if not any(c["victim"] in victims for c in cells_of(record, split="train", sigma=0.0)):
        return []
    where = {"accurate": "figure 3", "approximate": "figure F.1", "psnr": "figure F.2"}
    figures = []
    for value in VALUES:
        shown = "Mean PSNR over all images, recovered or not"
        if value != "psnr":
            error = record["thresholds"][value]
            shown = (
                "Share of the training images that come back with a mean square error below "
                f"{power(error)} (a PSNR above {-10 * math.log10(error):.4g} dB)"
            )
        title = TITLES[value].capitalize().replace("psnr", "PSNR")
        words = (title, f"{PAPER}, {where[value]}", f"{shown}, {BY_LOSS}", ONE_OF_EACH)
        more = {"value": value, "sigma": 0.0, "victims": victims}
        figures.append(figure_spec("rates", f"rates-{value}", words, **more))
    return figures


def _of_one_victim(record: Record) -> list[dict[str, Any]]:
    """Thresholds of the best victim, under the mask of figure F.3 or the last; tables 1 and 2."""
    figures = []
    if (victim := best_victim(record)) is not None:
        cells = cells_of(record, victim=victim["name"], split="train", sigma=0.0)
        with_cells = {cell["mask"] for cell in cells}
        masks = [mask["name"] for mask in record["masks"] if mask["name"] in with_cells]
        if masks:
            mask = "window" if "window" in masks else masks[-1]
            shown = {"victim": victim["name"], "mask": mask, "sigma": 0.0}
            figures += [figure_spec("thresholds", "thresholds", WORDS["thresholds"], **shown)]
    tables: list[dict[str, Any]] = []
    for victim in moderate(record):
        level = lowest(victim)
        if level is None or not at_lowest(record, victim, split="train", sigma=0.0):
            continue
        dense = victim["architecture"].get("kind") == "fc"
        regime = "It copies its input" if copies(victim) else "Moderately overfitted"
        words = (
            f"{regime}: {victim['title']}",
            f"{PAPER}, table {1 if dense else 2}",
            "Share of the training images that come back approximately, with the interval of 95 % "
            "over images.",
            ONE_OF_EACH.replace("the bars", "the brackets"),
        )
        shown = {"victim": victim["name"], "level": level["level"], "value": "approximate"}
        tables.append(figure_spec("table", f"moderate-{len(tables) + 1}", words, **shown))
    return [*figures, *tables]


def group_name(shown: Record) -> str:
    """Name in recovery-pictures.npz of an entry of `shown`."""
    return f"{shown['victim']}/{shown['level']:g}/{shown['mask']}/{shown['sigma']:g}"


def cells_of(record: Record, **where: Any) -> list[Record]:
    """The cells that have these values: `cells_of(record, victim="fc", split="train")`."""
    return [cell for cell in record["cells"] if all(cell[key] == at for key, at in where.items())]


def lowest(victim: Record) -> Record | None:
    """The lowest level that a victim reached, with its loss and epoch; None without any."""
    return min(victim["levels"], key=lambda reached: reached["level"], default=None)


def unreached(victim: Record) -> list[float]:
    """The levels that a victim did not reach, highest first."""
    reached = {level["level"] for level in victim["levels"]}
    return sorted((level for level in victim["wanted"] if level not in reached), reverse=True)


def at_lowest(record: Record, victim: Record, **where: Any) -> list[Record]:
    """The cells of a victim at its lowest level; of generic methods at any level.

    A generic method does not query the network, so its result is the same at every level.
    """
    generic = {method["name"] for method in record["methods"] if method["generic"]}
    level = lowest(victim)
    found = cells_of(record, victim=victim["name"], **where)
    here = [cell for cell in found if level is not None and cell["level"] == level["level"]]
    keys = ("mask", "sigma", "split", "method")
    have = {tuple(cell[key] for key in keys) for cell in here}
    for cell in found:
        key = tuple(cell[name] for name in keys)
        if cell["method"] in generic and key not in have:
            here.append(cell)
            have.add(key)
    return here


def best_victim(record: Record) -> Record | None:
    """The attacked victim with the lowest level, then the lowest loss."""
    found = [
        (at["level"], at["loss"], k)
        for k, victim in enumerate(record["victims"])
        if (at := lowest(victim)) and at_lowest(record, victim, split="train", sigma=0.0)
    ]
    return record["victims"][min(found)[2]] if found else None


def moderate(record: Record) -> list[Record]:
    """The victims of the moderate regime, which the lowest level that they reached decides."""
    return [v for v in record["victims"] if (at := lowest(v)) and at["level"] >= MODERATE]


def copies(victim: Record) -> bool:
    """True if a network's loss is nearly as low on unseen images; false if that is unknown."""
    at, unseen = lowest(victim), victim["test_loss"]
    return at is not None and unseen is not None and bool(unseen < MEMORY * at["loss"])


def victims_of(record: Record, names: Sequence[str]) -> list[Record]:
    """The victims of these names, in order. Raises KeyError for an unknown one."""
    victims = {victim["name"]: victim for victim in record["victims"]}
    return [victims[name] for name in names]


def method_styles(record: Record) -> dict[str, Style]:
    """Style of each method, the same everywhere on the page."""
    return styles_of([m["name"] for m in record["methods"]], COLOURS, (7, 9, 1))


def measure(value: str, found: float | None) -> str:
    """A value of a figure: `61.0 %`, `42.3 dB`."""
    if value == "psnr":
        return NOTHING if found is None else f"{decibels(found)} dB"
    return percent(found)


def victim_note(victim: Record) -> str:
    """Note under a network's title: its size, and the losses that it did not reach."""
    text = f"{plural(victim['n_images'], 'image', 'images')}, {victim['n_parameters']:,} parameters"
    at = lowest(victim)
    text += f"; trained to a loss of {short(at['loss'])}" if at else ""
    if missed := unreached(victim):
        were = "was" if len(missed) == 1 else "were"
        text += (
            f"; {names([power(level) for level in missed])} {were} not reached "
            f"({short(victim['last']['loss'])} after {victim['last']['epoch']:,} epochs)"
        )
    return text + ("; its training diverged" if victim["diverged"] else "")


def incomplete(record: Record, victims: Sequence[Record], cells: Sequence[Record]) -> list[str]:
    """A sentence on methods that were not run at every mask and reached level; a generic method
    needs only one level."""
    masks = {cell["mask"] for cell in cells} or {mask["name"] for mask in record["masks"]}
    reached = [len(victim["levels"]) for victim in victims]
    parts = []
    for method in record["methods"]:
        keys = ("victim", "mask") if method["generic"] else ("victim", "mask", "level")
        mine = {tuple(c[key] for key in keys) for c in cells if c["method"] == method["name"]}
        each = [min(n, 1) for n in reached] if method["generic"] else reached
        if len(mine) < (wanted := len(masks) * sum(each)):
            done = f"run on {len(mine)} of {wanted} cells" if mine else "not run"
            parts.append(f"{method['title']}: {done}")
    return [f"Not everything was run: {'; '.join(parts)}."] if parts else []


def triple(cell: Record, value: str) -> tuple[float | None, float | None, float | None]:
    """(`value` of a cell, low and high end of its interval); None where unknown."""
    found, low, high = cell[value] or (None, None, None)
    return found, low, high


def psnr(mse: float | None) -> float | None:
    """PSNR in decibels of images in [0, 1], at most 120; None for an invalid error."""
    if mse is None or not math.isfinite(mse) or mse < 0:
        return None
    return -10 * math.log10(max(mse, 1e-12))


def pooled(cells: Sequence[Record]) -> dict[str, Any]:
    """Pool several cells: counts, shares, and the mean PSNR of all their images."""
    sums = {key: sum(cell[key] for cell in cells) for key in SUMMED}
    n = sums["n"]
    means = [(cell["psnr"][0], cell["n"]) for cell in cells if triple(cell, "psnr")[0] is not None]
    weight = sum(of for _mean, of in means)
    applied = [cell["n_applied"] for cell in cells if cell["n_applied"] is not None]
    return sums | {
        "accurate": sums["n_accurate"] / n if n else None,
        "approximate": sums["n_approximate"] / n if n else None,
        "psnr": sum(mean * of for mean, of in means) / weight if weight else None,
        "n_applied": sum(applied) / len(applied) if applied else None,
        "n_masks": len({cell["mask"] for cell in cells}),
    }


def cells_table(record: Record) -> Table:
    """One row per cell, with all its numbers but the errors of single images."""
    rows: list[dict[str, Cell]] = []
    for cell in record["cells"]:
        row: dict[str, Cell] = {key: cell[key] for key in (*WHERE, *SUMMED)}
        for value in VALUES:
            row |= estimate(value, triple(cell, value))
        for threshold, count in zip(record["thresholds"]["all"], cell["by_threshold"], strict=True):
            row[f"below {threshold:g}"] = count
        row["n_applied"] = cell["n_applied"]
        row |= {f"ended {how}": n for how, n in (cell["endings"] or {}).items()}
        row |= {"mask_accuracy": cell["mask_accuracy"], "seconds": cell["seconds"]}
        rows.append(row)
    return table_of("cells", rows, (*WHERE, *SUMMED))


def victims_table(record: Record) -> Table:
    """One row per network."""

    def listed(values: Sequence[float]) -> str:
        return " ".join(f"{value:g}" for value in values)

    rows: list[dict[str, Cell]] = []
    for victim in record["victims"]:
        at = lowest(victim) or {}
        rows.append(
            {key: victim[key] for key in ("name", "title", "n_parameters", "n_images", "gamma")}
            | {"wanted": listed(victim["wanted"])}
            | {"reached": listed([level["level"] for level in victim["levels"]])}
            | {"loss": at.get("loss"), "epoch": at.get("epoch")}
            | {f"last {key}": victim["last"][key] for key in ("loss", "epoch")}
            | {key: victim[key] for key in ("diverged", "test_loss", "seconds")}
        )
    return table_of("victims", rows, ("name", "title"))


def summary_table(record: Record, victim: Record | None) -> Table:
    """One row per method: its recovery from `victim` at the lowest level, over all masks."""
    rows: list[dict[str, Cell]] = []
    for method in record["methods"] if victim else ():
        row: dict[str, Cell] = {"victim": victim["name"] if victim else None}
        row |= {"method": method["name"], "title": method["title"]}
        row["knows_mask"] = method["knows_mask"]
        for split in ("train", "test"):
            cells = at_lowest(record, victim or {}, split=split, sigma=0.0, method=method["name"])
            found = pooled(cells)
            row |= {f"{split} {key}": found[key] for key in (*SUMMED, "n_masks", *VALUES)}
            for value in SHARES:
                shares = [c[value][0] for c in cells if triple(c, value)[0] is not None]
                row[f"{split} {value} of the worst mask"] = min(shares, default=None)
                row[f"{split} {value} of the best mask"] = max(shares, default=None)
            if split == "train":
                row["n_applied"] = found["n_applied"]
        rows.append(row)
    return table_of("summary", rows, ("victim", "method"))


def rates_table(name: str, cells: Sequence[Record], values: Sequence[str]) -> Table:
    """One row per cell: its position, and its values with their intervals."""
    keys = ("victim", "mask", "sigma", "level", "loss", "split", "method", "n")
    rows: list[dict[str, Cell]] = []
    for cell in cells:
        row: dict[str, Cell] = {key: cell[key] for key in keys}
        for value in values:
            row |= estimate(value, triple(cell, value))
        rows.append(row)
    return table_of(name, rows, (*keys, *(k for v in values for k in (v, f"{v} low", f"{v} high"))))
