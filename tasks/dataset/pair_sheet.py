"""A picture of a store: originals over what came back of them, by saved iteration, with SSIM.

Columns are pairs chosen by a rule that the picture states.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from storage.pairs.dataset import Dataset
from tasks.dataset.export import rendered
from tasks.page.pictures import Strip, Tile, strips_sheet

N_PAIRS = 12
PARTS_PER_IMAGE = 16
"""Parts in which the best pair of an image is looked for; a large store has it in hundreds."""
LABELS, LETTERS = 1.5, 11  # width of the titles before rows, and letters of a caption, in tiles
NOTE = (
    "Rows: the same candidate of the attack at each saved iteration, scaled as far as a picture's "
    "range allows. Below it: SSIM with the original, bold where it is the best."
)


@dataclass(frozen=True)
class Shown:
    """A candidate of an attack whose pairs are shown: where it is, and its best SSIM."""

    part: int
    run_row: int
    candidate: int
    image_id: int
    run: int
    ssim: float


@dataclass(frozen=True)
class PairSheet:
    """The picture: `columns` are candidates, `strips` the originals and a row per iteration."""

    png: bytes
    caption: str
    columns: tuple[Shown, ...]
    strips: list[tuple[str, list[Tile]]]


def pair_sheet(
    dataset: Dataset,
    *,
    n: int = N_PAIRS,
    seed: int = 0,
    image_id: int | None = None,
    on_part: Callable[[int, int], None] = lambda _done, _n: None,
) -> PairSheet:
    """The best confident pair of each of `n` images drawn at random, or the `n` best of one image.

    Raises ValueError for `n` or `seed` out of range, and if there is no confident pair to show.
    """
    if n < 1 or seed < 0:
        raise ValueError(f"--n {n} must be 1 or more, --seed {seed} 0 or more")
    ids, counts = dataset.image_counts()
    covered = ids[counts > 0]
    if image_id is not None and image_id not in covered:
        why = "has no confident pair" if image_id in ids else "is no image that a run trained on"
        some = ", ".join(map(str, covered[:5]))
        raise ValueError(f"--image-id {image_id} {why} here; images that came back: {some}, ...")
    if not len(covered):
        raise ValueError(
            f"{dataset.root} has no confident pair to show ({len(dataset.receipts)} parts, "
            f"{dataset.n_pairs} pairs); generate more, or look at its outcomes with info"
        )
    drawn = np.random.default_rng(seed).permutation(covered)[:n]
    images = drawn if image_id is None else np.array([image_id])
    holders: dict[int, list[int]] = {image: [] for image in images.tolist()}
    for receipt in dataset.receipts:
        table = receipt.image_table()
        for image in np.intersect1d(images, table.image_ids[table.n_pairs > 0]).tolist():
            holders[image].append(receipt.part)
    parts: dict[int, list[int]] = {}
    rng = np.random.default_rng((seed, 1))
    for image, among in holders.items():
        for part in rng.permutation(among)[:PARTS_PER_IMAGE].tolist():
            parts.setdefault(part, []).append(image)
    found: list[Shown] = []
    on_part(0, len(parts))
    for done, (part, wanted) in enumerate(sorted(parts.items()), start=1):
        found += _confident(dataset, part, wanted)
        on_part(done, len(parts))
    found.sort(key=lambda shown: (-shown.ssim, shown.part, shown.run_row, shown.candidate))
    best = {shown.image_id: shown for shown in reversed(found)}
    if image_id is None:
        columns = tuple(shown for shown in found if best[shown.image_id] is shown)
        caption = (
            f"The best confident pair of each of {len(columns)} images, drawn at random (seed "
            f"{seed}) from the {len(covered):,} images with a confident pair"
        )
    else:
        columns = tuple(found[:n])
        caption = f"The {len(columns)} best confident pairs of image {image_id}, each of another "
        caption += "candidate"
    if any(len(among) > PARTS_PER_IMAGE for among in holders.values()):
        caption += f", among {PARTS_PER_IMAGE} of the parts that have them"
    caption += "; the best first."
    strips = _strips(dataset, columns, of_images=image_id is None)
    most = int(LETTERS * (len(columns) + LABELS))
    texts: list[Strip] = ["Originals over their reconstructions"]
    texts += [(line, []) for text in (caption, NOTE) for line in textwrap.wrap(text, max(60, most))]
    png = strips_sheet([*texts, *strips], columns=max(6, len(columns)), labels=LABELS, at_edge=True)
    return PairSheet(png, caption, columns, strips)


def _confident(dataset: Dataset, part: int, images: list[int]) -> list[Shown]:
    """The confident candidates of a part whose targets are `images`, with their best SSIM."""
    names = ("target_row", "run_row", "candidate", "ssim_best", "confident")
    columns = dataset.read(part, [f"pairs/{name}" for name in names])
    target_row, run_row, candidate, ssim, confident = (columns[f"pairs/{name}"] for name in names)
    tables = dataset.read(part, ["targets/image_id", "runs/run"])
    image = tables["targets/image_id"][target_row]
    rows = np.flatnonzero(confident & np.isin(image, images))
    best: dict[tuple[int, int], Shown] = {}
    for row in rows[np.argsort(-ssim[rows], kind="stable")].tolist():
        key = int(run_row[row]), int(candidate[row])
        run = int(tables["runs/run"][key[0]])
        best.setdefault(key, Shown(part, *key, int(image[row]), run, float(ssim[row])))
    return list(best.values())


def _strips(
    dataset: Dataset, columns: tuple[Shown, ...], *, of_images: bool
) -> list[tuple[str, list[Tile]]]:
    """Originals over their reconstructions, a row per saved iteration; white where none was."""
    sizes = [receipt.n_pairs for receipt in dataset.receipts]
    first_of = {r.part: sum(sizes[:k]) for k, r in enumerate(dataset.receipts)}
    originals: list[Tile] = []
    saved: list[dict[int, Tile]] = []
    for shown in columns:
        names = ("run_row", "candidate", "iteration", "ssim_best")
        pairs = dataset.read(shown.part, [f"pairs/{name}" for name in names])
        run_row, candidate, iteration, ssim = (pairs[f"pairs/{name}"] for name in names)
        rows = np.flatnonzero((run_row == shown.run_row) & (candidate == shown.candidate))
        wanted = ["pairs/reconstruction", "targets/image", "runs/mean_image"]
        taken = dataset.take(wanted, first_of[shown.part] + rows)
        pictures = rendered(taken["pairs/reconstruction"], taken["runs/mean_image"])
        name = f"image {shown.image_id}" if of_images else f"run {shown.run}"
        originals.append((taken["targets/image"][0], name, False))
        saved.append(
            {
                int(iteration[row]): (picture, f"{ssim[row]:.2f}", ssim[row] == ssim[rows].max())
                for row, picture in zip(rows.tolist(), pictures, strict=True)
            }
        )
    if all(len(of_column) == 1 for of_column in saved):  # whenever each was: they share a row
        return [
            ("original", originals),
            ("reconstruction", [tile for of_column in saved for tile in of_column.values()]),
        ]
    white: Tile = (np.full_like(originals[0][0], 255), "", False)
    iterations = sorted({iteration for of_column in saved for iteration in of_column})
    return [
        ("original", originals),
        *(
            (f"iteration {iteration:,}", [of_column.get(iteration, white) for of_column in saved])
            for iteration in iterations
        ),
    ]
