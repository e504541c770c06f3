"""The report's pictures: attacks on one victim side by side, figure 1 (image restoration paper) in
bands, the appendix in blocks, reconstructions that resemble nothing (its figure 4), and pairs by
their SSIM, to see what a threshold means (KKT paper, figure 8); and sheets for a flow's page."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from storage.documents import read_document
from tasks.evaluation.record import SIDES
from tasks.page.files import Arrays, Record
from tasks.page.formats import NOTHING, fixed, score
from tasks.page.pictures import COLUMNS, Strip, data_uri, strips, strips_sheet, wrapped
from tasks.report.headline import attack_rows, attack_title, method_title, picture_title

PER_BAND, PER_ATTACK_BAND, PER_BLOCK = 15, 10, 45
APPENDIX_BYTES = 6_000_000
KINDS = {"targets": "Training picture", "decoys": "Decoy"}

Rows = list[dict[str, Any]]


def titles_of(record: Record, place: str) -> dict[str, str]:
    """Titles of the methods whose pictures the record shows in `grid` or `side_by_side`."""
    names = record[place]["methods"]
    if place == "grid":
        return {name: method_title(name)[1] for name in names}
    return {name: attack_title(record, name) for name in names}


def bands(record: Record, pictures: Arrays, place: str, side: str) -> Rows:
    """The images of `grid` (figure 1) or of `side_by_side` (one victim's, with every attack on it)
    in bands: columns are images, rows the original and what each method made of it."""
    limit, rows, made = record["settings"]["good_threshold"], record[place][side], []
    width, group = (PER_BAND, side) if place == "grid" else (PER_ATTACK_BAND, f"attacks_{side}")
    for first in range(0, len(rows), width):
        chosen = rows[first : first + width]
        names = [f"{KINDS[side]} {record[side]['image_id'][row]}" for row in chosen]
        originals = [
            {"uri": data_uri(picture), "alt": name, "score": "", "good": False}
            for picture, name in zip(pictures[f"{group}/original"][first:], names, strict=False)
        ]
        tiled = [{"title": "Original" if side == "targets" else "Decoy", "tiles": originals}]
        for name, title in titles_of(record, place).items():
            tiles = []
            for row, picture in zip(chosen, pictures[f"{group}/{name}"][first:], strict=False):
                value = record["methods"][name][side]["ssim"][row]
                tiles.append(
                    {
                        "uri": data_uri(picture) if value != 0 or picture.any() else None,
                        "alt": f"{method_title(name)[0]}, SSIM {value:.2f}",
                        "score": fixed(value, 2),
                        "good": value > limit,
                    }
                )
            tiled.append({"title": title, "tiles": tiles})
        made.append({"columns": names, "width": width, "first": first + 1, "rows": tiled})
    return made


def nothing_rows(pictures: Arrays) -> Rows:
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


def appendix_blocks(record: Record, pictures: Arrays) -> tuple[Rows, bool]:
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
        last, tiles = first + len(chosen), []
        for name in names:
            title, about = "Original", f"Places {first + 1} to {last}"
            if name == "original":
                ids = [str(record["targets"]["image_id"][row]) for row in chosen]
                about += f": training pictures {', '.join(ids)}"
            else:
                scores = [record["methods"][name]["targets"]["ssim"][row] for row in chosen]
                long, title, _what = method_title(name)
                about += f", {long}: SSIM from {score(max(scores))} to {score(min(scores))}"
            tiles.append({"title": title, "uri": uri[first, name], "alt": about})
        blocks.append({"first": first + 1, "last": last, "n": len(chosen), "strips": tiles})
    return blocks, exact


def pair_bins(record: Record, pictures: Arrays) -> Rows:
    """The record's examples: pairs (original, plain reconstruction) by their SSIM."""
    examples, bins = record["examples"], []
    for k, (low, high) in enumerate(pairwise(examples["edges"])):
        title = f"above {low:g}" if high == 1 else f"{low:g} to {high:g}"
        body: dict[str, Any] = {"title": f"up to {high:g}" if low < 0 else title}
        for side in SIDES:
            scores, ids = record["methods"]["plain"][side]["ssim"], record[side]["image_id"]
            body[f"n_{side}"] = sum(low < value <= high for value in scores)
            first = sum(len(rows) for rows in examples[side][:k])
            body[side] = [
                {
                    "original": data_uri(pictures[f"examples_{side}/original"][place]),
                    "uri": data_uri(pictures[f"examples_{side}/plain"][place]),
                    "alt": f"{KINDS[side]} {ids[row]}",
                    "score": fixed(scores[row], 2),
                }
                for place, row in enumerate(examples[side][k], first)
            ]
        bins.append(body)
    return bins


def contact_sheet(evaluation: Path, *, n_targets: int = 12, n_decoys: int = 4) -> bytes:
    """PNG of the best-scored targets, and of the best-scored decoys below them: columns are images,
    in the order of the report, rows the original and one per method, with the SSIM below each; one
    line of text if no picture is kept."""
    record = read_document(evaluation / "evaluation.json", "evaluate again")
    strips: list[Strip] = []
    with np.load(evaluation / "pictures.npz", allow_pickle=False) as pictures:
        for side, title, most in (
            ("targets", "training images", n_targets),
            ("decoys", "decoys: no victim saw them", n_decoys),
        ):
            if record["grid"][side][:most]:
                strips += [title, *_strips(record, pictures, "grid", side, most)]
    nothing: list[Strip] = [("no picture is kept: grid_rows is 0", [])]
    return strips_sheet(strips or nothing, columns=n_targets, labels=1.7)


def _strips(
    record: Record, pictures: Arrays, place: str, side: str, most: int | None = None
) -> Iterator[Strip]:
    """Originals over what each method made of them, with its SSIM; bold: good."""
    group, chosen = side if place == "grid" else f"attacks_{side}", record[place][side][:most]
    originals = pictures[f"{group}/original"][: len(chosen)]
    rows = [("original", [(picture, "", False) for picture in originals])]
    limit = record["settings"]["good_threshold"]
    for name, title in titles_of(record, place).items():
        ssim = [record["methods"][name][side]["ssim"][row] for row in chosen]
        scored = zip(pictures[f"{group}/{name}"], ssim, strict=False)
        tiles = [(picture, f"{s:.2f}", s > limit) for picture, s in scored]
        rows.append((title.replace("then ", "then\n"), tiles))
    return wrapped(rows, most or COLUMNS)


def attacks_sheet(evaluation: Path) -> bytes | None:
    """PNG of one victim's training images over what each attack on it and the best restorer brought
    back, with scores and the numbers of all victims, and of the decoys that came out best; None if
    there was one attack."""
    record = read_document(evaluation / "evaluation.json", "evaluate again")
    shown = record["side_by_side"]
    if not shown:
        return None
    n, n_victims = len(record["targets"]["image_id"]), record["dataset"]["n_victims"]
    strips: list[Strip] = [f"Attacks on the same {n_victims} networks, {n} training images in all"]
    for row in attack_rows(record):
        shares = (NOTHING if s is None else f"{100 * s:.0f}" for s in row["found"])
        of_time = "" if row["seconds"] is None else f", {row['seconds']:.1f} s per network"
        text = (
            f"{row['title']}: {row['good']} of {n} good (decoys {row['good_decoys']}), mean SSIM "
            f"{row['ssim']} ({row['ssim_decoys']}), found {', '.join(shares)} %{of_time}"
        )
        strips.append((text, []))
    text = (
        f"good: SSIM above {record['settings']['good_threshold']:g}; decoys: {n} images that no "
        "network saw; found: what scores above all but 0, 1, 5 % of them"
    )
    strips.append((text, []))
    with np.load(evaluation / "pictures.npz", allow_pickle=False) as pictures:
        for side, title in (
            ("targets", f"training images of network {shown['victim']}"),
            ("decoys", "decoys, which no network saw: the nearest to anything that came back"),
        ):
            n_shown = len(shown[side])
            n_of_victim = record[side]["victim"].count(shown["victim"])
            whole = f"all {n_shown}" if n_shown == n_of_victim else f"{n_shown} of {n_of_victim}"
            strips += [f"{whole} {title}", *_strips(record, pictures, "side_by_side", side)]
    return strips_sheet(strips, columns=COLUMNS)
