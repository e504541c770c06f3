"""Pictures of an evaluation, for a flow's page: the best images, several attacks on one network,
and the ranked scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.documents import read_document
from tasks.page.picture_sheet import COLUMNS, Strip, png_of, strips_sheet
from tasks.report.headline import attack_rows, attack_title, found_text, method_title

TILE_INCHES = 0.62


def contact_sheet(evaluation: Path, *, n_targets: int = 12, n_decoys: int = 4) -> bytes:
    """PNG of the best-scored targets, and of the best-scored decoys beside them.

    Columns are images, in the order of the report; rows are the original and one per method, the
    SSIM with the original below each; one line of text if no picture is kept. `evaluation` is the
    folder that `tasks.evaluation.evaluate` wrote.
    """
    from matplotlib.figure import Figure

    record = read_document(evaluation / "evaluation.json", "evaluate again")
    methods = record["grid"]["methods"]
    rows = {"targets": record["grid"]["targets"][:n_targets]}
    rows["decoys"] = record["grid"]["decoys"][:n_decoys]
    columns = [(side, k) for side in rows for k in range(len(rows[side]))]
    if not columns:
        return _text("no picture is kept: grid_rows is 0")
    size = (TILE_INCHES * (len(columns) + 2.2), TILE_INCHES * 1.3 * (len(methods) + 1) + 0.3)
    figure = Figure(figsize=size, dpi=160)
    grid = figure.subplots(
        len(methods) + 1,
        len(columns),
        squeeze=False,
        gridspec_kw={"left": 1.7 / (len(columns) + 2.2), "right": 0.995, "top": 1 - 0.22 / size[1],
                     "bottom": 0.16 / size[1], "wspace": 0.06, "hspace": 0.28},
    )  # fmt: skip
    with np.load(evaluation / "pictures.npz", allow_pickle=False) as pictures:
        for i, name in enumerate(["original", *methods]):
            title = "Original" if name == "original" else method_title(name)[1]
            grid[i][0].text(-0.15, 0.5, title, transform=grid[i][0].transAxes, ha="right",
                            va="center", fontsize=7)  # fmt: skip
            for axes, (side, k) in zip(grid[i], columns, strict=True):
                picture = pictures[f"{side}/{name}"][k]
                rgb = np.broadcast_to(picture, (3, *picture.shape[1:]))  # grey in three channels
                axes.imshow(rgb.transpose(1, 2, 0), interpolation="nearest")
                axes.set_axis_off()
                if name != "original":
                    score = record["methods"][name][side]["ssim"][rows[side][k]]
                    good = score > record["settings"]["good_threshold"]
                    axes.set_title(f"{score:.2f}", fontsize=6, y=-0.27, pad=0,
                                   fontweight="bold" if good else "normal")  # fmt: skip
    for side, text in (("targets", "training images"), ("decoys", "decoys: no victim saw them")):
        first = next((j for j, column in enumerate(columns) if column == (side, 0)), None)
        if first is not None:
            grid[0][first].text(0, 1.12, text, transform=grid[0][first].transAxes, fontsize=7)
    return png_of(figure)


def attacks_sheet(evaluation: Path) -> bytes | None:
    """PNG of one victim's training images over what each attack on it brought back, with scores and
    the numbers of all victims; None if there was one attack.

    Rows are the original, every attack and the best restorer; below are the decoys that came out
    best. `evaluation` is the folder that `tasks.evaluation.evaluate` wrote.
    """
    record = read_document(evaluation / "evaluation.json", "evaluate again")
    if not record.get("side_by_side"):
        return None
    with np.load(evaluation / "pictures.npz", allow_pickle=False) as pictures:
        return strips_sheet([*_attack_strips(record, pictures)], columns=COLUMNS)


def _attack_strips(
    record: Mapping[str, Any], pictures: Mapping[str, npt.NDArray[np.uint8]]
) -> Iterator[Strip]:
    shown, facts = record["side_by_side"], record["dataset"]
    n = len(record["targets"]["image_id"])
    yield f"Attacks on the same {facts['n_victims']} networks, {n} training images in all"
    for row in attack_rows(record):
        of_time = "" if row["seconds"] is None else f", {row['seconds']:.1f} s per network"
        text = (
            f"{row['title']}: {row['good']} of {n} good (decoys {row['good_decoys']}), mean SSIM "
            f"{row['ssim']} ({row['ssim_decoys']}), found {found_text(row['found'])}{of_time}"
        )
        yield text, []
    limit = record["settings"]["good_threshold"]
    yield (
        f"good: SSIM above {limit:g}; decoys: {n} images that no network saw; found: what scores "
        "above all but 0, 1, 5 % of them",
        [],
    )
    titles = {
        "targets": f"training images of network {shown['victim']}",
        "decoys": "decoys, which no network saw: the nearest to anything that came back",
    }
    for side, title in titles.items():
        n_of_victim = record[side]["victim"].count(shown["victim"])
        n_shown = len(shown[side])
        whole = n_shown == n_of_victim
        yield f"{'all ' if whole else ''}{n_shown}{'' if whole else f' of {n_of_victim}'} {title}"
        for first in range(0, n_shown, COLUMNS):
            rows = range(first, min(first + COLUMNS, n_shown))
            originals = pictures[f"attacks_{side}/original"]
            yield "original", [(originals[k], "", False) for k in rows]
            for name in shown["methods"]:
                tiles = []
                for k in rows:
                    value = record["methods"][name][side]["ssim"][shown[side][k]]
                    picture = pictures[f"attacks_{side}/{name}"][k]
                    tiles.append((picture, f"{value:.2f}", value > limit))
                yield attack_title(record, name).replace("then ", "then\n"), tiles


def curves_sheet(evaluation: Path) -> bytes:
    """PNG of the SSIM of the i-th best image per method: targets solid, decoys dashed."""
    from matplotlib.figure import Figure

    record = read_document(evaluation / "evaluation.json", "evaluate again")
    figure = Figure(figsize=(7, 3.6), dpi=130, layout="constrained")
    axes = figure.subplots()
    for k, (name, method) in enumerate(record["methods"].items()):
        for side, style in (("targets", "-"), ("decoys", "--")):
            ranked = sorted(method[side]["ssim"], reverse=True)
            label = method_title(name)[0] if side == "targets" else None
            axes.plot(range(1, len(ranked) + 1), ranked, style, color=f"C{k % 10}", lw=1.2,
                      label=label)  # fmt: skip
    axes.axhline(record["settings"]["good_threshold"], color="black", lw=0.8, ls=":")
    axes.set(xlabel="images, best first", ylabel="SSIM", ylim=(None, 1))
    axes.legend(fontsize=7, frameon=False, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    return png_of(figure)


def _text(words: str) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 0.6), dpi=130)
    figure.text(0.02, 0.4, words, fontsize=9)
    return png_of(figure)
