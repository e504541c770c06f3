"""What restoration gained, from an evaluation's scores: paired differences, decoys, disagreement.

Every image is scored with and without restoration, so gains are means of differences, with two
intervals: over images (these victims) and over whole runs (the next victim). `draw` shows them with
the learning curves, and each method's hits against its false positives.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from recon_core.summary import bootstrap_interval

Interval = tuple[float, float]
Curve = list[tuple[int, float]]
"""(step, mean SSIM of the validation pairs)."""

COLOURS = ("#57524b", "#0b6e99", "#c77800", "#a03c17", "#6b4a9a", "#3d7a3a", "#b0568c", "#8a8a8a")


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Mean difference to the attack alone on the same images; intervals of 95 %.

    `of_victims` resamples whole runs. `ssim_at_all` is the difference to the best over all saved
    iterations of the attack, which restorers do not see; None where that was not scored.
    """

    ssim: float
    ssim_interval: Interval
    ssim_interval_of_victims: Interval
    ssim_at_all: float | None
    ssim_at_all_interval: Interval | None
    haarpsi: float
    haarpsi_interval: Interval
    n_better: int
    n_worse: int
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """How far the samples behind a mean disagree, on average, with intervals over images.

    `good`: the targets whose mean is good; `others`: the other targets; `decoys`.
    """

    good: float | None
    good_interval: Interval | None
    others: float | None
    others_interval: Interval | None
    decoys: float | None
    decoys_interval: Interval | None
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


def gain(evaluation: Mapping[str, Any], method: str) -> Gain:
    """What `method` gained on the targets over `plain`."""
    after = evaluation["methods"][method]["targets"]
    before = evaluation["methods"]["plain"]["targets"]
    runs = np.array(evaluation["targets"]["run"])
    ssim, haarpsi = (np.subtract(after[name], before[name]) for name in ("ssim", "haarpsi"))
    at_all = evaluation["methods"].get("plain_all")
    over_all = None if at_all is None else np.subtract(after["ssim"], at_all["targets"]["ssim"])
    return Gain(
        ssim=float(ssim.mean()),
        ssim_interval=bootstrap_interval(ssim),
        ssim_interval_of_victims=bootstrap_interval(ssim, groups=runs),
        ssim_at_all=None if over_all is None else float(over_all.mean()),
        ssim_at_all_interval=None if over_all is None else bootstrap_interval(over_all),
        haarpsi=float(haarpsi.mean()),
        haarpsi_interval=bootstrap_interval(haarpsi),
        n_better=after["compared_with_plain"]["n_better"],
        n_worse=after["compared_with_plain"]["n_worse"],
    )


def disagreement(evaluation: Mapping[str, Any], method: str) -> Disagreement | None:
    """How far the samples of `method` disagree; None if it is no mean of samples."""
    body = evaluation["methods"][method]
    if "disagreement" not in body["targets"]:
        return None
    spread = np.array(body["targets"]["disagreement"], np.float64)
    good = np.array(body["targets"]["ssim"]) > evaluation["settings"]["good_threshold"]
    facts: dict[str, Any] = {}
    for name, values in (
        ("good", spread[good]),
        ("others", spread[~good]),
        ("decoys", np.array(body["decoys"]["disagreement"], np.float64)),
    ):
        there = values[~np.isnan(values)]
        facts[name] = float(there.mean()) if len(there) else None
        facts[f"{name}_interval"] = bootstrap_interval(there) if len(there) else None
    return Disagreement(**facts)


def operating_points(
    scores: Sequence[float], decoy_scores: Sequence[float]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(false positive rate, share of targets found) at every threshold, from none to all."""
    targets, decoys = np.sort(scores), np.sort(decoy_scores)
    thresholds = np.unique(np.concatenate([targets, decoys, [-np.inf, np.inf]]))[::-1]
    above = [
        1 - np.searchsorted(values, thresholds, side="right") / len(values)
        for values in (decoys, targets)
    ]
    return above[0], above[1]


def draw(
    evaluation: Mapping[str, Any],
    learning: Mapping[str, Curve],
    *,
    before_learning: float | None,
    titles: Mapping[str, str],
) -> bytes:
    """PNG: learning curves (where there are any), hits against false positives, scores after
    against before.

    `before_learning`: mean SSIM of the validation pairs unrestored. `titles` of the methods shown.
    """
    from matplotlib.figure import Figure

    panels = [*(["learning"] if learning else []), "roc", "pairs"]
    figure = Figure(figsize=(4.2 * len(panels), 3.9), dpi=150, layout="constrained")
    axes = dict(zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True))
    if learning:
        _draw_learning(axes["learning"], learning, before_learning)
    colours = dict(zip(titles, COLOURS, strict=False))
    for name, title in titles.items():
        body = evaluation["methods"][name]
        false, found = operating_points(body["targets"]["ssim"], body["decoys"]["ssim"])
        axes["roc"].step(false, found, where="post", label=title, color=colours[name], lw=1.3)
    n_decoys = len(evaluation["methods"]["plain"]["decoys"]["ssim"])
    axes["roc"].set_xscale("symlog", linthresh=2 / n_decoys)
    axes["roc"].set(xlim=(0, 1), ylim=(0, 1), xlabel="decoys above the threshold",
                    ylabel="training images above it",
                    title="Every threshold on SSIM")  # fmt: skip
    axes["roc"].legend(fontsize=7, loc="upper left")
    _draw_pairs(axes["pairs"], evaluation, titles, colours)
    content = io.BytesIO()
    figure.savefig(content, format="png", facecolor="white", metadata={"Software": None})
    return content.getvalue()


def _draw_learning(axes: Any, learning: Mapping[str, Curve], before: float | None) -> None:
    for k, (name, curve) in enumerate(learning.items()):
        steps, scores = zip(*curve, strict=True)
        axes.plot(steps, scores, marker=".", color=COLOURS[k + 1], label=name)
    if before is not None:
        axes.axhline(before, color=COLOURS[0], ls="--", lw=1, label="unrestored")
    axes.set(xlabel="training steps", ylabel="mean SSIM of validation pairs", title="Learning")
    axes.legend(fontsize=7)


def _draw_pairs(
    axes: Any,
    evaluation: Mapping[str, Any],
    titles: Mapping[str, str],
    colours: Mapping[str, str],
) -> None:
    """The restored methods' scores over the attack's, image by image, and the line of no change."""
    plain = evaluation["methods"]["plain"]
    classical = evaluation["settings"]["baselines"]
    for name in titles:
        if name.startswith("plain") or name.endswith("_x1") or name in classical:
            continue
        after = evaluation["methods"][name]
        for side, marker, alpha in (("targets", ".", 0.45), ("decoys", "x", 0.25)):
            axes.scatter(plain[side]["ssim"], after[side]["ssim"], s=9, marker=marker, lw=0.6,
                         alpha=alpha, color=colours[name],
                         label=f"{titles[name]}, {side}")  # fmt: skip
    limits = (0.05, 1)
    axes.plot(limits, limits, color="black", lw=0.7)
    axes.set(xlim=limits, ylim=limits, xlabel="SSIM of the attack alone",
             ylabel="SSIM after restoration", title="Image by image")  # fmt: skip
    axes.legend(fontsize=7, loc="lower right", markerscale=1.5)
