"""A picture of a store: originals over what came back of them, by saved iteration, with SSIM.

Columns are pairs chosen by a rule that the picture states.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from storage.pairs.dataset import Dataset
from tasks.dataset.export import rendered
from tasks.page.pictures import Strip, Tile, strips_sheet

PARTS_PER_IMAGE = 16
"""Parts in which the best pair of an image is looked for; a large store has it in hundreds."""
LABELS, LETTERS = 1.5, 11  # width of the titles before rows, and letters of a caption, in tiles
OF_RUNS = ("targets/image_id", "runs/run")
NOTE = (
    "Rows: the same candidate of the attack at each saved iteration, scaled as far as a picture's "
    "range allows. Below it: SSIM with the original, bold where it is the best."
)


class Shown(NamedTuple):
    """A candidate of an attack whose pairs are shown: its location, and its best SSIM."""

    part: int
    run_row: int
    candidate: int
    image_id: int
    run: int
    ssim: float


class PairSheet(NamedTuple):
    """The picture: `columns` are candidates, `strips` the originals and a row per iteration."""

    png: bytes
    caption: str
    columns: list[Shown]
    strips: list[tuple[str, list[Tile]]]


def pair_sheet(
    dataset: Dataset,
    *,
    n: int = 12,
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
    best: dict[tuple[int, int, int], Shown] = {}  # of each confident candidate
    on_part(0, len(parts))
    for done, (part, wanted) in enumerate(sorted(parts.items()), start=1):
        names = ("target_row", "run_row", "candidate", "ssim_best", "confident")
        columns = dataset.read(part, [*(f"pairs/{name}" for name in names), *OF_RUNS])
        target_row, run_row, candidate, ssim, confident = (columns[f"pairs/{n}"] for n in names)
        image_ids, runs = (columns[name] for name in OF_RUNS)
        of_pairs = image_ids[target_row]
        rows = np.flatnonzero(confident & np.isin(of_pairs, wanted))
        for row in rows[np.argsort(-ssim[rows], kind="stable")].tolist():
            at, run = (part, int(run_row[row]), int(candidate[row])), int(runs[run_row[row]])
            best.setdefault(at, Shown(*at, int(of_pairs[row]), run, float(ssim[row])))
        on_part(done, len(parts))
    ranked = sorted(best.values(), key=lambda shown: (-shown.ssim, *shown[:3]))
    if image_id is None:
        best_of = {shown.image_id: shown for shown in reversed(ranked)}
        ranked = [shown for shown in ranked if best_of[shown.image_id] is shown]
        caption = (
            f"The best confident pair of each of {len(ranked)} images, drawn at random (seed "
            f"{seed}) from the {len(covered):,} images with a confident pair"
        )
    else:
        ranked = ranked[:n]
        caption = f"The {len(ranked)} best confident pairs of image {image_id}, each of another "
        caption += "candidate"
    if any(len(among) > PARTS_PER_IMAGE for among in holders.values()):
        caption += f", among {PARTS_PER_IMAGE} of the parts that have them"
    caption += "; the best first."
    strips = _strips(dataset, ranked, of_images=image_id is None)
    most = int(LETTERS * (len(ranked) + LABELS))
    texts: list[Strip] = ["Originals over their reconstructions"]
    texts += [(line, []) for text in (caption, NOTE) for line in textwrap.wrap(text, max(60, most))]
    png = strips_sheet([*texts, *strips], columns=max(6, len(ranked)), labels=LABELS, at_edge=True)
    return PairSheet(png, caption, ranked, strips)


def _strips(
    dataset: Dataset, columns: list[Shown], *, of_images: bool
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
        scored = zip(pictures, ssim[rows], strict=True)
        tiles: list[Tile] = [(x, f"{s:.2f}", s == ssim[rows].max()) for x, s in scored]
        saved.append(dict(zip(iteration[rows].tolist(), tiles, strict=True)))
    strips = [("original", originals)]
    if all(len(of_column) == 1 for of_column in saved):  # they share a row, whenever each was saved
        return [*strips, ("reconstruction", [t for of_column in saved for t in of_column.values()])]
    white: Tile = (np.full_like(originals[0][0], 255), "", False)
    for at in sorted({iteration for of_column in saved for iteration in of_column}):
        strips.append((f"iteration {at:,}", [of_column.get(at, white) for of_column in saved]))
    return strips
