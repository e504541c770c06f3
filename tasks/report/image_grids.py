"""The report's pictures: attacks on one victim side by side, figure 1 (image restoration paper) in
bands, the appendix in blocks, reconstructions that resemble nothing (its figure 4), and pairs by
their SSIM, to see what a threshold means (KKT paper, figure 8); and sheets for a flow's page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.documents import read_document
from tasks.evaluation.settings import PROJECTED
from tasks.page.files import Arrays, Record
from tasks.page.formats import fixed, score
from tasks.page.pictures import COLUMNS, Strip, data_uri, png_of, strips, strips_sheet, wrapped
from tasks.report.headline import attack_rows, attack_title, found_text, method_title, picture_title
from tasks.report.record import SIDES

PER_BAND = 15
PER_ATTACK_BAND = 10
PER_BLOCK = 45
APPENDIX_BYTES = 6_000_000
KINDS = {"targets": "Training picture", "decoys": "Decoy"}


@dataclass(frozen=True)
class Shown:
    """Some rows of one side in their order: by what name pictures.npz has their pictures, `rows` of
    the record, and the methods that are shown, with their titles."""

    side: str
    place: str
    rows: list[int]
    titles: Mapping[str, str]


def bands(record: Record, pictures: Arrays, side: str) -> list[dict[str, Any]]:
    """The images of figure 1, PER_BAND at a time: columns are images, rows the original and what
    each method made of it."""
    grid = record["grid"]
    titles = {name: method_title(name)[1] for name in grid["methods"]}
    return _bands(record, pictures, Shown(side, side, grid[side], titles), PER_BAND)


def attack_bands(record: Record, pictures: Arrays, side: str) -> list[dict[str, Any]]:
    """The images of one victim that are shown with every attack on it, in the same form."""
    rows = record["side_by_side"][side]
    shown = Shown(side, f"attacks_{side}", rows, attack_titles(record))
    return _bands(record, pictures, shown, PER_ATTACK_BAND)


def attack_titles(record: Record) -> dict[str, str]:
    """Titles of what is shown side by side, by method."""
    return {name: attack_title(record, name) for name in record["side_by_side"]["methods"]}


def _bands(record: Record, pictures: Arrays, shown: Shown, width: int) -> list[dict[str, Any]]:
    kind, ids = KINDS[shown.side], record[shown.side]["image_id"]
    bands = []
    for first in range(0, len(shown.rows), width):
        rows = shown.rows[first : first + width]
        pieces = {
            name: pictures[f"{shown.place}/{name}"][first : first + width]
            for name in ("original", *shown.titles)
        }
        names = [f"{kind} {ids[row]}" for row in rows]
        originals = [
            {"uri": data_uri(picture), "alt": name, "score": "", "good": False}
            for picture, name in zip(pieces["original"], names, strict=True)
        ]
        title = "Original" if shown.side == "targets" else "Decoy"
        tiled = [{"title": title, "tiles": originals}]
        for name, title in shown.titles.items():
            found = zip(rows, pieces[name], strict=True)
            tiles = [_tile(record, shown.side, name, row, picture) for row, picture in found]
            tiled.append({"title": title, "tiles": tiles})
        bands.append({"columns": names, "width": width, "first": first + 1, "rows": tiled})
    return bands


def _tile(
    record: Record, side: str, name: str, row: int, picture: npt.NDArray[np.uint8]
) -> dict[str, Any]:
    value = record["methods"][name][side]["ssim"][row]
    there = value != 0 or picture.any()
    return {
        "uri": data_uri(picture) if there else None,
        "alt": f"{method_title(name)[0]}, SSIM {value:.2f}",
        "score": fixed(value, 2),
        "good": value > record["settings"]["good_threshold"],
    }


def nothing_rows(pictures: Arrays) -> list[dict[str, Any]]:
    """Rows of pictures made from reconstructions that resemble no training picture."""
    names = [name.partition("/")[2] for name in pictures if name.startswith("nothing/")]
    last = [name for name in names if name.startswith("disagreement")] + ["closest"]
    ordered = ["plain", *(n for n in names if n != "plain" and n not in last), *last]
    return [
        {
            "title": picture_title(name),
            "tiles": [
                {"uri": data_uri(picture), "alt": f"{picture_title(name)}, reconstruction {k + 1}"}
                for k, picture in enumerate(pictures[f"nothing/{name}"])
            ],
        }
        for name in ordered
        if name in names and len(pictures[f"nothing/{name}"])
    ]


def appendix_blocks(record: Record, pictures: Arrays) -> tuple[list[dict[str, Any]], bool]:
    """(blocks of PER_BLOCK images, whether they are exact): one strip per block and method."""
    rows, names = record["appendix"]["targets"], ["original", *record["appendix"]["methods"]]
    firsts = range(0, len(rows), PER_BLOCK)
    wanted = [(first, name) for first in firsts for name in names]
    pieces = [pictures[f"appendix/{name}"][first : first + PER_BLOCK] for first, name in wanted]
    urls, exact = strips(pieces, most_bytes=APPENDIX_BYTES)
    uri = dict(zip(wanted, urls, strict=True))
    blocks = []
    for first in firsts:
        chosen = rows[first : first + PER_BLOCK]
        blocks.append(
            {
                "first": first + 1,
                "last": first + len(chosen),
                "n": len(chosen),
                "strips": [
                    {
                        "title": "Original" if name == "original" else method_title(name)[1],
                        "uri": uri[first, name],
                        "alt": _strip_words(record, name, chosen, first),
                    }
                    for name in names
                ],
            }
        )
    return blocks, exact


def _strip_words(record: Record, name: str, rows: list[int], first: int) -> str:
    places = f"Places {first + 1} to {first + len(rows)}"
    if name == "original":
        ids = [str(record["targets"]["image_id"][row]) for row in rows]
        return f"{places}: training pictures {', '.join(ids)}"
    scores = [record["methods"][name]["targets"]["ssim"][row] for row in rows]
    return (
        f"{places}, {method_title(name)[0]}: SSIM from {score(max(scores))} to {score(min(scores))}"
    )


def pair_bins(record: Record, pictures: Arrays) -> list[dict[str, Any]]:
    """The record's examples: pairs (original, plain reconstruction) by their SSIM."""
    examples = record["examples"]
    bins = []
    for k, (low, high) in enumerate(pairwise(examples["edges"])):
        body: dict[str, Any] = {"title": _range(low, high)}
        for side in SIDES:
            scores = record["methods"]["plain"][side]["ssim"]
            body[f"n_{side}"] = sum(low < value <= high for value in scores)
            first = sum(len(rows) for rows in examples[side][:k])
            body[side] = list(_pairs(record, pictures, side, examples[side][k], first))
        bins.append(body)
    return bins


def _range(low: float, high: float) -> str:
    if low < 0:
        return f"up to {high:g}"
    return f"above {low:g}" if high == 1 else f"{low:g} to {high:g}"


def _pairs(
    record: Record, pictures: Arrays, side: str, rows: list[int], first: int
) -> Iterator[dict[str, Any]]:
    """The pairs of `rows`, whose pictures begin at place `first`."""
    scores = record["methods"]["plain"][side]["ssim"]
    for k, row in enumerate(rows, first):
        yield {
            "original": data_uri(pictures[f"examples_{side}/original"][k]),
            "uri": data_uri(pictures[f"examples_{side}/plain"][k]),
            "alt": f"{KINDS[side]} {record[side]['image_id'][row]}",
            "score": fixed(scores[row], 2),
        }


Picture = npt.NDArray[np.uint8]


def contact_sheet(evaluation: Path, *, n_targets: int = 12, n_decoys: int = 4) -> bytes:
    """PNG of the best-scored targets, and of the best-scored decoys below them: columns are images,
    in the order of the report, rows the original and one per method, with the SSIM below each; one
    line of text if no picture is kept."""
    record = read_document(evaluation / "evaluation.json", "evaluate again")
    names = {name: method_title(name)[1] for name in record["grid"]["methods"]}
    strips: list[Strip] = []
    with np.load(evaluation / "pictures.npz", allow_pickle=False) as pictures:
        for side, title, most in (
            ("targets", "training images", n_targets),
            ("decoys", "decoys: no victim saw them", n_decoys),
        ):
            rows = record["grid"][side][:most]
            if rows:
                strips += [title, *_strips(record, pictures, Shown(side, side, rows, names), most)]
    nothing: list[Strip] = [("no picture is kept: grid_rows is 0", [])]
    return strips_sheet(strips or nothing, columns=n_targets, labels=1.7)


def _strips(
    record: Mapping[str, Any], pictures: Mapping[str, Picture], shown: Shown, columns: int
) -> Iterator[Strip]:
    """Originals over what each method made of them, with its SSIM; bold: good."""
    originals = pictures[f"{shown.place}/original"]
    rows = [("original", [(picture, "", False) for picture in originals[: len(shown.rows)]])]
    limit = record["settings"]["good_threshold"]
    for name, title in shown.titles.items():
        ssim = record["methods"][name][shown.side]["ssim"]
        scored = zip(
            pictures[f"{shown.place}/{name}"], (ssim[row] for row in shown.rows), strict=False
        )
        rows.append((title, [(picture, f"{s:.2f}", s > limit) for picture, s in scored]))
    return wrapped(rows, columns)


def attacks_sheet(evaluation: Path) -> bytes | None:
    """PNG of one victim's training images over what each attack on it and the best restorer brought
    back, with scores and the numbers of all victims, and of the decoys that came out best; None if
    there was one attack."""
    record = read_document(evaluation / "evaluation.json", "evaluate again")
    if not record["side_by_side"]:
        return None
    with np.load(evaluation / "pictures.npz", allow_pickle=False) as pictures:
        return strips_sheet([*_attack_strips(record, pictures)], columns=COLUMNS)


def _attack_strips(record: Mapping[str, Any], pictures: Mapping[str, Picture]) -> Iterator[Strip]:
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
    yield (
        f"good: SSIM above {record['settings']['good_threshold']:g}; decoys: {n} images that no "
        "network saw; found: what scores above all but 0, 1, 5 % of them",
        [],
    )
    titles = {m: t.replace("then ", "then\n") for m, t in attack_titles(record).items()}
    for side, title in (
        ("targets", f"training images of network {shown['victim']}"),
        ("decoys", "decoys, which no network saw: the nearest to anything that came back"),
    ):
        n_of_victim, n_shown = record[side]["victim"].count(shown["victim"]), len(shown[side])
        whole = n_shown == n_of_victim
        yield f"{'all ' if whole else ''}{n_shown}{'' if whole else f' of {n_of_victim}'} {title}"
        of_side = Shown(side, f"attacks_{side}", shown[side], titles)
        yield from _strips(record, pictures, of_side, COLUMNS)


def curves_sheet(evaluation: Path) -> bytes:
    """PNG of the SSIM of the i-th best image per method: targets solid, decoys dashed."""
    from matplotlib.figure import Figure

    record = read_document(evaluation / "evaluation.json", "evaluate again")
    figure = Figure(figsize=(7, 3.6), dpi=130, layout="constrained")
    axes = figure.subplots()
    names = [name for name in record["methods"] if not name.endswith(PROJECTED)]
    for name, method in record["methods"].items():
        source = name.removesuffix(PROJECTED)
        k, lines = names.index(source), ("-", "--") if source == name else (":", "-.")
        for side, style in zip(SIDES, lines, strict=True):
            ranked = sorted(method[side]["ssim"], reverse=True)
            label = method_title(name)[0] if side == "targets" else None
            axes.plot(range(1, len(ranked) + 1), ranked, style, color=f"C{k % 10}", lw=1.2,
                      label=label)  # fmt: skip
    axes.axhline(record["settings"]["good_threshold"], color="black", lw=0.8, ls=":")
    axes.set(xlabel="images, best first", ylabel="SSIM", ylim=(None, 1))
    beside = bool(record.get("span"))  # as many methods again
    place = (1.0, 1.0) if beside else None
    axes.legend(
        fontsize=7,
        frameon=False,
        loc="upper left" if beside else "upper right",
        bbox_to_anchor=place,
    )
    axes.spines[["top", "right"]].set_visible(False)
    return png_of(figure)
