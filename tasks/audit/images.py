"""Images of an audit: the pool that victims learn halves of, and those that none has seen.

Victims come in pairs. Both have the same pool of 2n images, of which one learns a random half and
the other the rest; so every image is in half of the victims, and beside every training image stands
a decoy that is a training image elsewhere. If nothing leaks the two cannot be told apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from recon_core.membership import complementary_halves
from recon_core.types import seeded_generator
from storage.sources.load import ImageSet, held_images
from tasks.audit.recipe import VictimRecipe
from tasks.audit.settings import FEWEST, Audit
from tasks.study.images import Ids, Pixels, content_of

Members = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images uint8 (n, c, h, w), labels as a victim has them, and rows of their source."""

    images: Pixels
    labels: Ids
    rows: Ids

    def __len__(self) -> int:
        return len(self.labels)

    def some(self, keep: npt.NDArray[np.bool_] | Ids) -> Pictures:
        return Pictures(self.images[keep], self.labels[keep], self.rows[keep])


@dataclass(frozen=True, eq=False)
class AuditImages:
    """Images of both splits of a source: `pool` is what victims learn from, `others` what none
    sees: tests first, then public ones."""

    pool: ImageSet
    others: ImageSet


def read_images(audit: Audit) -> AuditImages:
    """Both splits, victims from the larger one. Where they are equally large, or the held-out one
    has more than victims need, that: models of images, and restorers, may know the other. Held-out
    images that are training images, too, are left out. Raises SourceError if they cannot be read,
    ValueError if all held-out images are."""
    skip, channels = audit.skip_corrupt, audit.channels
    train, heldout = (
        held_images(audit.data, split=split, skip_corrupt=skip, channels=channels)
        for split in ("train", "heldout")
    )
    trained = {content_of(image) for image in train.images}
    copies = [row for row, image in enumerate(heldout.images) if content_of(image) in trained]
    heldout = heldout.without(copies, because="they are in the training split, too")
    wanted = 8 * (audit.recipe.n_images or audit.most_images)
    if len(heldout) >= min(len(train), wanted):
        return AuditImages(heldout, train)
    return AuditImages(train, heldout)


def resolved(audit: Audit, images: AuditImages) -> Audit:
    """The audit with the number of images that its source has for a victim, where none is asked
    for. Raises ValueError if there are too few."""
    if audit.recipe.n_images is not None:
        return audit
    counts = _counts(audit.recipe, images.pool)
    each = min(min(counts.values()) // 2, audit.most_images // len(counts))
    if each < FEWEST:
        label, n = min(counts.items(), key=lambda item: item[1])
        raise ValueError(
            f"{audit.data} has {n} images of label {label} for two victims that share them; at "
            f"least {2 * FEWEST} are needed: give more images, or others"
        )
    return replace(audit, recipe=replace(audit.recipe, n_images=each * len(counts)))


def pool_of(recipe: VictimRecipe, images: AuditImages, *, seed: int) -> Pictures:
    """The 2n images of victims of a recipe, equally many of each label; those of a smaller recipe
    are the first of a larger one's. Raises ValueError if the source has too few."""
    assert recipe.n_images is not None
    counts = _counts(recipe, images.pool)
    each = 2 * recipe.n_images // len(counts)
    labels = _labels(recipe, images.pool)
    if short := {label: n for label, n in counts.items() if n < each}:
        label, n = next(iter(short.items()))
        raise ValueError(
            f"victims of {recipe.n_images} images need a pool of {each} of each label, but the "
            f"source has {n} of label {label}; give more images, or lower recipe.n_images"
        )
    rows = []
    for label in sorted(counts):
        there = np.flatnonzero(labels == label)
        order = np.random.default_rng((seed, 11, label)).permutation(len(there))
        rows.append(there[order[:each]])
    every = np.stack(rows, 1).flatten()
    return Pictures(images.pool.images[every], labels[every], every)


def members_of(pool: Pictures, n_victims: int, *, seed: int) -> Members:
    """(victims, pool): True where a victim learns an image."""
    generator = seeded_generator(seed, 0, "audit members")
    return complementary_halves(pool.labels, n_victims, generator).numpy()


def tests_of(recipe: VictimRecipe, images: AuditImages, n_tests: int, *, seed: int) -> Pictures:
    """Images that no victim sees, at most `n_tests`, with a label of the recipe."""
    others = _others(recipe, images, seed=seed)
    return others.some(np.arange(min(n_tests, len(others))))


def public_of(
    recipe: VictimRecipe, images: AuditImages, n_tests: int, *, n: int, seed: int
) -> Pictures:
    """Further images that no victim sees, at most `n`, for a student. Raises ValueError if there
    are none."""
    others = _others(recipe, images, seed=seed)
    found = others.some(np.arange(n_tests, min(n_tests + n, len(others))))
    if len(found) < FEWEST:
        raise ValueError(
            f"a student needs public images beside the {n_tests} that accuracy is measured on, and "
            "the source has none left; lower n_tests, or give more images"
        )
    return found


def _others(recipe: VictimRecipe, images: AuditImages, *, seed: int) -> Pictures:
    labels = _labels(recipe, images.others)
    rows = np.flatnonzero(labels >= 0)
    rows = rows[np.random.default_rng((seed, 12)).permutation(len(rows))]
    return Pictures(images.others.images[rows], labels[rows], rows)


def _labels(recipe: VictimRecipe, images: ImageSet) -> Ids:
    return recipe.labels_of(images.labels, images.class_names)[0]


def _counts(recipe: VictimRecipe, images: ImageSet) -> dict[int, int]:
    labels = _labels(recipe, images)
    found, counts = np.unique(labels[labels >= 0], return_counts=True)
    counted = dict(zip(found.tolist(), counts.tolist(), strict=True))
    return {label: counted.get(label, 0) for label in range(recipe.n_classes)}
