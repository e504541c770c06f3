"""The coverage of a campaign as a picture: images covered, and how evenly, against runs."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from typing import Any

from storage.pairs.receipts import Receipt
from tasks.campaign.status import CampaignStatus, phases_curve

SIZE_INCHES = (8.0, 6.0)
DOTS_PER_INCH = 120
_TRAINED, _COVERED, _GINI, _PHASE = "#9aa5b1", "#1f6f8b", "#b5541c", "#c9ced6"


def coverage_picture(status: CampaignStatus, receipts: Sequence[Receipt], title: str) -> bytes:
    """A PNG of a campaign's coverage: the images of the split are a dashed line, phases that have
    begun have their names. Raises ValueError without parts."""
    curve, n_images = phases_curve(status, receipts), status.n_images
    if not curve.n_runs:
        raise ValueError("the store has no part yet, so there is nothing to plot; generate first")
    starts = [0, *itertools.accumulate(phase.n_runs for phase in status.phases)]
    phases = [
        (first, phase.sampler)
        for k, (first, phase) in enumerate(zip(starts, status.phases, strict=False))
        if first <= status.n_runs and (phase.n_runs or not k)
    ]
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    small: Any = {"textcoords": "offset points", "va": "top", "color": "#667079", "fontsize": 9}
    marker = "o" if len(curve.n_runs) == 1 else None
    above.plot(curve.n_runs, curve.n_trained, color=_TRAINED, marker=marker, label="trained on")
    label = f"with a confident pair: {curve.n_covered[-1]:,}"
    bold: Any = {"marker": marker, "linewidth": 2}
    above.plot(curve.n_runs, curve.n_covered, color=_COVERED, label=label, **bold)
    if n_images is not None:
        above.axhline(n_images, color=_TRAINED, linestyle="--", linewidth=1)
        above.annotate(
            f"{n_images:,} images of the split", (0.99, n_images), (0, -4),
            xycoords=("axes fraction", "data"), ha="right", **small,
        )  # fmt: skip
    above.set_ylabel("images")
    above.set_ylim(0, 1.08 * max(n_images or 0, *curve.n_trained))
    above.set_title(title, loc="left", fontsize=10)
    above.legend(loc="lower right", frameon=False, fontsize=9)
    below.plot(curve.n_runs, curve.gini, color=_GINI, **bold)
    below.set_ylim(0, 1)
    below.set_ylabel("Gini coefficient of\ntheir confident pairs", fontsize=9)
    below.set_xlabel("runs")
    for axes in (above, below):
        axes.set_xlim(0, curve.n_runs[-1] * 1.02)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.spines[["top", "right"]].set_visible(False)
        for first_run, _name in phases[1:]:
            axes.axvline(first_run, color=_PHASE, linewidth=1, zorder=0)
    above.yaxis.set_major_formatter("{x:,.0f}")
    for first_run, name in phases:
        below.annotate(name, (first_run, 0.97), (4, 0), **small)
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()
