"""The coverage of a campaign as a picture: images covered, and how evenly, against runs."""

from __future__ import annotations

import io
from collections.abc import Sequence

from storage.pairs.receipts import Receipt
from tasks.campaign.status import CampaignStatus, CoverageCurve, phases_curve

SIZE_INCHES = (8.0, 6.0)
DOTS_PER_INCH = 120
_TRAINED, _COVERED, _GINI, _PHASE = "#9aa5b1", "#1f6f8b", "#b5541c", "#c9ced6"


def coverage_picture(status: CampaignStatus, receipts: Sequence[Receipt], title: str) -> bytes:
    """A PNG of a campaign's coverage, with the phases that have begun; ValueError without parts."""
    starts: list[tuple[int, str]] = []
    first = 0
    for phase in status.phases:
        if first <= status.n_runs and (phase.n_runs or not starts):
            starts.append((first, phase.sampler))
        first += phase.n_runs
    curve = phases_curve(status, receipts)
    return coverage_plot(curve, title=title, n_images=status.n_images, phases=starts)


def coverage_plot(
    curve: CoverageCurve,
    *,
    title: str,
    n_images: int | None = None,
    phases: Sequence[tuple[int, str]] = (),
) -> bytes:
    """A PNG of `curve`; `n_images` of the split are a dashed line, `phases` are (first run, name).

    Raises ValueError if the curve has no point.
    """
    if not curve.n_runs:
        raise ValueError("the store has no part yet, so there is nothing to plot; generate first")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    marker = "o" if len(curve.n_runs) == 1 else None
    above.plot(curve.n_runs, curve.n_trained, color=_TRAINED, marker=marker, label="trained on")
    above.plot(
        curve.n_runs,
        curve.n_covered,
        color=_COVERED,
        marker=marker,
        linewidth=2,
        label=f"with a confident pair: {curve.n_covered[-1]:,}",
    )
    if n_images is not None:
        above.axhline(n_images, color=_TRAINED, linestyle="--", linewidth=1)
        above.annotate(
            f"{n_images:,} images of the split",
            (0.99, n_images),
            xycoords=("axes fraction", "data"),
            xytext=(0, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            color="#667079",
            fontsize=9,
        )
    above.set_ylabel("images")
    above.set_ylim(0, 1.08 * max(n_images or 0, *curve.n_trained))
    above.set_title(title, loc="left", fontsize=10)
    above.legend(loc="lower right", frameon=False, fontsize=9)
    below.plot(curve.n_runs, curve.gini, color=_GINI, marker=marker, linewidth=2)
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
        below.annotate(
            name,
            (first_run, 0.97),
            xytext=(4, 0),
            textcoords="offset points",
            va="top",
            fontsize=9,
            color="#667079",
        )
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()
