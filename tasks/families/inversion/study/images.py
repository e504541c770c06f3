"""The images of a study of split classifiers: four sets of each source, without a common image."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from storage.sources.load import ImageSet, load_images
from tasks.families.inversion.study.settings import InversionSource, InversionStudy
from tasks.study.images import Ids, Pixels, balanced_order, content_of

Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """Images (n, c, h, w) and the class of each, from 0; class by class in turn."""

    images: Pixels
    labels: Labels

    def first(self, n: int) -> Part:
        return Part(self.images[:n], self.labels[:n])

    def after(self, n: int) -> Part:
        return Part(self.images[n:], self.labels[n:])


@dataclass(frozen=True)
class SourceImages:
    """`train` and `public` are of the train split, `tests` of the other one; no image is in two
    sets, nor a copy of it. The first of `tests` are inverted. `facts`: what was read, by split."""

    train: Part
    tests: Part
    public: Part
    class_names: tuple[str, ...]
    content_hash: str
    notes: tuple[str, ...]
    facts: dict[str, dict[str, str]]


def read_sources(study: InversionStudy) -> dict[str, SourceImages]:
    """The images of every source, by its name.

    Raises ValueError where a source has too few images of a class, or another number of classes,
    and SourceError as `load_images` does.
    """
    return {source.name: read_source(source, study) for source in study.sources}


def read_source(source: InversionSource, study: InversionStudy) -> SourceImages:
    own, other = (
        load_images(
            source.data,
            split=split,
            size=source.size,
            skip_corrupt=study.skip_corrupt,
            channels=source.channels,
        )
        for split in ("train", "heldout")
    )
    seed, n_own = study.root_seed, source.n_train + source.n_public
    order = balanced_order(other.labels, root_seed=seed)
    tests = _drawn(source, other, order, {"n_tests": source.n_tests}, set())
    used = {content_of(image) for image in tests.images}
    order = balanced_order(own.labels, root_seed=seed)
    drawn = _drawn(source, own, order, {"n_train + n_public": n_own}, used)
    return SourceImages(
        train=drawn.first(source.n_train),
        tests=tests,
        public=drawn.after(source.n_train),
        class_names=own.class_names,
        content_hash=hashlib.sha256(
            f"{own.content_hash} {other.content_hash}".encode()
        ).hexdigest(),
        notes=(*own.notes, *(note for note in other.notes if note not in own.notes)),
        facts={found.split: found.facts for found in (own, other)},
    )


def _drawn(
    source: InversionSource,
    found: ImageSet,
    order: Ids,
    wanted: dict[str, int],
    without: set[bytes],
) -> Part:
    """The first images of an order that has the classes in turn, each image once; `wanted` is how
    many, by the settings' names."""
    ((what, n),) = wanted.items()
    classes = np.unique(found.labels)
    if len(classes) != source.n_classes:
        raise ValueError(
            f"source {source.name!r}: {found.name!r} ({found.split}) has {len(classes)} classes, "
            f"not n_classes={source.n_classes}; set it"
        )
    per_class = n // source.n_classes
    taken: dict[int, int] = dict.fromkeys(range(source.n_classes), 0)
    rows, seen = [], set(without)
    number = {int(label): k for k, label in enumerate(classes)}
    for row in order:
        label = number[int(found.labels[row])]
        digest = content_of(found.images[row])
        if taken[label] < per_class and digest not in seen:
            taken[label] += 1
            seen.add(digest)
            rows.append(row)
    if lacking := [label for label, count in taken.items() if count < per_class]:
        raise ValueError(
            f"source {source.name!r}: {what} takes {per_class} images of each class, but "
            f"{found.name!r} ({found.split}) has {taken[lacking[0]]} different ones of class "
            f"{found.class_names[int(classes[lacking[0]])]!r}; use fewer"
        )
    chosen = np.array(rows, np.int64)
    labels = np.array([number[int(label)] for label in found.labels[chosen]], np.int64)
    return Part(np.ascontiguousarray(found.images[chosen]), labels)
