"""The figures of the InstaHide paper: its sample complexity and what signs cost, from the measured
numbers, and the private photographs that came back, from their strips."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

NAME = "instahide-samples.png"
PHOTOGRAPHS = "instahide-photographs.png"
STRIPS = {
    "original": "private images",
    "learned-no-labels": "public images unknown,\nno labels (Carlini et al.)",
    "learned-labels": "public images unknown,\nlabels (Carlini et al.)",
    "practical-no-labels": "public images known,\nno labels (ours)",
    "practical-labels": "public images known,\nlabels (ours)",
}
"""Files in `instahide/strips`, and what they are called, from top to bottom."""
COLOURS = ("#c77800", "#a03c17", "#6b4a9a", "#0b6e99")
MARKERS = ("o", "s", "^", "D")
GREY, DARK = "#8c8c8c", "#333333"
UNIVERSE_S = 4.35e17
"""Its age in seconds."""
SHOWN = 100
"""Encodings up to which the cost of all signs is continued in the picture."""


def draw(folder: Path) -> None:
    """The picture in `folder`, of what is in its `instahide/`: nothing before both parts are."""
    files = [folder / "instahide" / name for name in ("samples.json", "signs.json")]
    if not all(path.is_file() for path in files):
        return
    from matplotlib.figure import Figure

    record, cost = (json.loads(path.read_text()) for path in files)
    figure = Figure(figsize=(9.6, 7.6), dpi=150, layout="constrained")
    (shares, scaled), (law, signs) = figure.subplots(2, 2)
    _shares(shares, record, scaled=False)
    _shares(scaled, record, scaled=True)
    _law(law, record["graphs"])
    _signs(signs, cost)
    for axes in (shares, scaled, law, signs):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10.5)
    figure.savefig(folder / NAME, metadata={"Software": None})


def draw_photographs(folder: Path) -> None:
    """The picture in `folder`, of the strips in its `instahide/strips`, once all are there."""
    paths = {folder / "instahide" / "strips" / f"{key}.png": text for key, text in STRIPS.items()}
    if not all(path.is_file() for path in paths):
        return
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(10.4, 2.9), dpi=150, layout="constrained")
    for axes, (path, text) in zip(figure.subplots(len(paths)), paths.items(), strict=True):
        axes.imshow(np.asarray(Image.open(path)), interpolation="nearest")
        axes.set_ylabel(text, rotation=0, ha="right", va="center", fontsize=8.5)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
    figure.savefig(folder / PHOTOGRAPHS, metadata={"Software": None})


def _shares(axes: Any, record: dict[str, Any], *, scaled: bool) -> None:
    """How often all images came back, and of how many graphs they could."""
    for graph, colour, marker in zip(record["graphs"], COLOURS, MARKERS, strict=False):
        n = graph["n"]
        unit = n * np.log(n) if scaled else 1.0
        for k, line in (("0", ":"), ("2", "-")):
            ms, counts = np.unique(graph["determined"][k], return_counts=True)
            share = np.cumsum(counts) / counts.sum()
            axes.plot(ms / unit, share, color=colour, lw=1.5, ls=line, zorder=1)
        for k_pub, face, size in ((0, "none", 9.5), (2, colour, 5.5)):
            points = [p for p in record["points"] if (p["n"], p["k_pub"]) == (n, k_pub)]
            axes.plot(
                [p["m"] / unit for p in points],
                [p["n_all"] / p["n_seeds"] for p in points],
                **{"ls": "none", "marker": marker, "ms": size, "color": colour, "mfc": face},
                label=f"n = {n}" if k_pub else None,
                zorder=3 if k_pub else 2,
            )
    axes.set_ylim(-0.025, 1.04)
    axes.set_ylabel("share with all images back")
    if scaled:
        axes.axvline(0.5, color=GREY, lw=1, ls="--", zorder=0)
        axes.annotate("n log n / 2", (0.5, 0.99), xytext=(4, 0), color="#667079",
                      textcoords="offset points", ha="left", va="top", fontsize=8.5)  # fmt: skip
        axes.set_xlim(0.4, 1.7)
        axes.set_xlabel("m / (n log n)")
        axes.set_title("In units of n log n the curves nearly agree", loc="left")
        for label, style in (
            ("came back, 2 public", {"ls": "none", "marker": "o", "ms": 5.5}),
            ("came back, no public", {"ls": "none", "marker": "o", "ms": 9.5, "mfc": "none"}),
            ("determined, 2 public", {"lw": 1.5}),
            ("determined, no public", {"lw": 1.5, "ls": ":"}),
        ):
            axes.plot([], [], color=DARK, label=label, **style)
        handles = axes.get_lines()[-4:]
        axes.legend(handles=handles, frameon=False, fontsize=8.5, loc="lower right")
    else:
        axes.set_xscale("log")
        ticks = [m for m in (10, 20, 50, 100, 200, 500, 1000, 2000) if m <= axes.get_xlim()[1]]
        axes.set_xticks(ticks, [f"{m:,}" for m in ticks])
        axes.minorticks_off()
        axes.set_xlim(left=7)
        axes.set_xlabel("encodings m")
        axes.set_title("All private images back (points), possible (lines)", loc="left")
        axes.legend(frameon=False, fontsize=8.5, loc="upper left")


def _law(axes: Any, graphs: Sequence[dict[str, Any]]) -> None:
    """Encodings that half and 95 % of the graphs need, in units of n log n, against n."""
    ns = np.array([graph["n"] for graph in graphs])
    line = np.geomspace(ns.min(), ns.max(), 100)
    for key, share, marker, colour, label in (
        ("2", 0.95, "^", COLOURS[3], "all determined, 95 % of graphs"),
        ("2", 0.5, "o", COLOURS[3], "all determined, half of them"),
        ("twice", 0.5, "x", DARK, "every image in two encodings, half"),
        ("once", 0.5, "o", COLOURS[0], "every image in one encoding, half"),
    ):
        values = [np.quantile(g.get(key) or g["determined"][key], share) for g in graphs]
        scaled = values / (ns * np.log(ns))
        axes.plot(ns, scaled, ls="none", marker=marker, ms=6.5, color=colour, label=label)
    twice = (1 + np.log(np.log(line)) / np.log(line)) / 2
    axes.plot(line, twice, color=DARK, lw=1.2, ls="--", label="n (log n + log log n) / 2")
    axes.axhline(0.5, color=GREY, lw=1, ls="--", label="n log n / 2", zorder=0)
    axes.set_xscale("log")
    axes.set_xticks(ns, [str(n) for n in ns])
    axes.minorticks_off()
    axes.set_ylim(0, 2.4)
    axes.set_xlabel("private images n")
    axes.set_ylabel("m / (n log n)")
    axes.set_title("The graphs' need grows no faster than n log n", loc="left")
    axes.legend(frameon=False, fontsize=8.5, loc="upper left", labelspacing=0.25)


def _signs(axes: Any, cost: dict[str, Any]) -> None:
    """Seconds of a pixel against encodings."""
    tried = {int(m): s for m, s in cost["all_signs"].items()}
    ours = {int(m): s for m, s in cost["ours"].items()}
    large = {int(m): s for m, s in cost["ours_large"].items()}
    last = max(tried)
    ms = np.arange(last, SHOWN)
    axes.plot(ms, tried[last] * 2.0 ** (ms - last), color=COLOURS[1], lw=1.5, ls="--")
    axes.plot(*zip(*sorted(tried.items()), strict=True), color=COLOURS[1], lw=1.5, marker="s", ms=5)
    axes.plot(*zip(*sorted(ours.items()), strict=True), color=COLOURS[3], lw=1.5, marker="o", ms=5)
    axes.axhline(UNIVERSE_S, color=GREY, lw=1, ls=":")
    axes.annotate("age of the universe", (0.02, UNIVERSE_S), xycoords=("axes fraction", "data"),
                  xytext=(0, 3), textcoords="offset points", fontsize=8.5,
                  color="#667079")  # fmt: skip
    axes.annotate("all $2^m$ signs\n(dashed: continued)", (40, tried[last] * 2.0 ** (40 - last)),
                  xytext=(-6, 0), textcoords="offset points", ha="right", fontsize=9,
                  color=COLOURS[1])  # fmt: skip
    axes.plot(*zip(*sorted(large.items()), strict=True), color=COLOURS[3], lw=1.5, marker="D", ms=5)
    far = max(large)
    axes.annotate("beam search", (far, large[far]), xytext=(0, 7), textcoords="offset points",
                  ha="right", fontsize=9, color=COLOURS[3])  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(2e-6, 1e20)
    axes.set_xlabel("encodings m")
    axes.set_ylabel("seconds per pixel")
    axes.set_title("Hidden signs: the cost of one pixel", loc="left")
