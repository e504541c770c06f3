"""Means to try an InstaHide attack: challenges (encodings, public images, labels, and the truth
apart), and the similarity of encodings, trained once on photographs for attacks on others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional

from recon_core.attacks.instahide.mixing import Encodings, InstaHide, Mixing, Scheme
from recon_core.attacks.instahide.similarity_network import (
    Similarity,
    SimilarityNetwork,
    load,
    save,
)
from recon_core.strict import Strict, Within
from recon_core.types import Progress, no_progress, seeded_generator
from storage.challenge import Challenge, check_new, write_challenge
from storage.errors import SourceError
from storage.files import write_file
from storage.sources.load import ImageSet, load_images
from tasks.devices import check_memory

GAUSSIAN = "gaussian"
"""A source of standard normal images, the model of the InstaHide paper."""


@dataclass(frozen=True, kw_only=True)
class EncodeJob(Strict):
    """`data`: a source of images, or `gaussian`. `scheme`: Mixing needs `m`, the number of
    encodings; InstaHide has n_epochs. Pixels of photographs are from -1 to 1; `standardise`, of
    Mixing: less their mean and divided by their standard deviation, over all images."""

    data: str
    out: Path
    scheme: Scheme = field(default_factory=InstaHide)
    n_private: Annotated[int, Within("[2, inf)", fix="an encoding mixes 2")] = 100
    n_public: int = 1000
    m: int | None = None
    size: int = 32
    standardise: bool = False
    seed: int = 0
    skip_corrupt: bool = False

    @property
    def images(self) -> ImageSet:
        """The source's split for training; SourceError if it cannot be read."""
        return load_images(self.data, split="train", size=self.size, skip_corrupt=self.skip_corrupt)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_public < self.scheme.k_pub:
            raise ValueError(
                f"n_public={self.n_public} is fewer than k_pub={self.scheme.k_pub}, the public "
                "images of an encoding"
            )
        if isinstance(self.scheme, InstaHide) and self.m is not None:
            raise ValueError(
                f"m={self.m}: InstaHide makes n_epochs={self.scheme.n_epochs} encodings of each "
                "private image; set --epochs"
            )
        if isinstance(self.scheme, Mixing) and (self.m is None or self.m < 1):
            raise ValueError(f"m={self.m}; say how many encodings to make with --m")
        n_epochs = self.scheme.n_epochs if isinstance(self.scheme, InstaHide) else 0
        images = self.n_private * (1 + n_epochs) + self.n_public + (self.m or 0)
        check_memory(
            2 * 4.0 * 3 * self.size**2 * images,
            f"{images:,} images and encodings of {self.size}x{self.size}",
            "lower --size, --n-private, --n-public, or --epochs and --m",
        )
        if self.standardise and (self.data == GAUSSIAN or isinstance(self.scheme, InstaHide)):
            raise ValueError(
                "--standardise is for photographs with --scheme theory: gaussian pixels are "
                "standard normal, and those of instahide are from -1 to 1"
            )


@dataclass(frozen=True)
class Material:
    """Images in the units of the scheme, and what is to be said about them."""

    private: Tensor
    public: Tensor
    labels: Tensor | None
    source: str
    facts: dict[str, Any]


def encode(job: EncodeJob) -> dict[str, Any]:
    """Writes the challenge, the same bytes for the same job; its facts. Raises SourceError if the
    folder is not empty or the images cannot be read, ValueError if there are too few."""
    check_new(job.out)
    material = _gaussian(job) if job.data == GAUSSIAN else _photographs(job)
    drawn = seeded_generator(job.seed, 0, "encodings")
    shape = material.private.shape[1:]
    private, public = material.private.flatten(1), material.public.flatten(1)
    made = _encoded(job, private, public, material.labels, drawn)
    signs = seeded_generator(job.seed, 0, "signs")
    facts = {
        "scheme": TypeAdapter(type(job.scheme)).dump_python(job.scheme),
        "pixels": material.facts,
        "n_private": job.n_private,
        "m": len(made.y),
    }
    challenge = Challenge(
        encodings=made.flipped(signs).reshape(-1, *shape).float().numpy(),
        public=material.public.float().numpy() if len(material.public) else None,
        labels=None if made.labels is None else made.labels.float().numpy(),
        facts=facts,
        secret={
            "private": material.private.float().numpy(),
            "edges": made.private.numpy(),
            "weights": made.private_weights.double().numpy(),
            "public_ids": made.public.numpy(),
            "public_weights": made.public_weights.double().numpy(),
        },
    )
    write_challenge(job.out, challenge, {"seed": job.seed, "source": material.source})
    return facts


def _encoded(
    job: EncodeJob,
    private: Tensor,
    public: Tensor,
    labels: Tensor | None,
    drawn: torch.Generator,
) -> Encodings:
    if isinstance(job.scheme, InstaHide):
        return job.scheme.encode(private, public, generator=drawn, labels=labels)
    assert job.m is not None  # EncodeJob refuses it
    return job.scheme.encode(private, public, job.m, generator=drawn, labels=labels)


def _gaussian(job: EncodeJob) -> Material:
    drawn = seeded_generator(job.seed, 0, "images")
    shape = (3, job.size, job.size)
    images = torch.randn((job.n_private + job.n_public, *shape), generator=drawn)
    return Material(
        images[: job.n_private],
        images[job.n_private :],
        None,
        f"standard normal pixels, {job.size} by {job.size}",
        {"kind": "normal"},
    )


def _photographs(job: EncodeJob) -> Material:
    found = job.images
    wanted = job.n_private + job.n_public
    if len(found) < wanted:
        raise ValueError(
            f"{job.data} has {len(found)} images to train on, fewer than n_private={job.n_private} "
            f"and n_public={job.n_public}; lower one of them"
        )
    order = torch.randperm(len(found), generator=seeded_generator(job.seed, 0, "images"))
    rows = order[:wanted]
    images = torch.from_numpy(found.images)[rows].float() * (2 / 255) - 1
    labels = torch.from_numpy(found.labels)[rows[: job.n_private]]
    n_classes = len(found.class_names)
    facts: dict[str, Any] = {"kind": "levels", "n_levels": 256, "low": -1.0, "high": 1.0}
    if job.standardise:
        mean, sd = float(images.double().mean()), float(images.double().std())
        if sd == 0:
            raise ValueError(f"all pixels of {job.data} are equal; --standardise divides by 0")
        images = (images - mean) / sd
        facts = {"kind": "standardised", "n_levels": 256, "mean": mean, "sd": sd}
    return Material(
        images[: job.n_private],
        images[job.n_private :],
        functional.one_hot(labels, n_classes).float() if n_classes > 1 else None,
        f"{found.name} {found.content_hash}",
        facts,
    )


@dataclass(frozen=True, kw_only=True)
class SimilarityJob:
    """`data`: a source of images, none of which need be in the encodings; its split for training.
    `scheme`: how the encodings to be compared are made. `n_steps`: of training; None: the
    network's own."""

    data: str
    out: Path
    scheme: InstaHide = field(default_factory=InstaHide)
    size: int = 32
    n_steps: int | None = None
    seed: int = 0
    skip_corrupt: bool = False

    @property
    def images(self) -> ImageSet:
        """The source's split for training; SourceError if it cannot be read."""
        return load_images(self.data, split="train", size=self.size, skip_corrupt=self.skip_corrupt)

    @property
    def how(self) -> SimilarityNetwork:
        how = SimilarityNetwork(scheme=self.scheme)
        training = replace(how.training, seed=self.seed)
        if self.n_steps is not None:
            training = replace(training, n_steps=self.n_steps)
        return replace(how, training=training)


def train_similarity(
    job: SimilarityJob, *, device: str, progress: Progress = no_progress
) -> dict[str, Any]:
    """Writes the network, replacing an earlier one when it is done; what it is.

    Raises SourceError for images that cannot be read, ValueError for too few or of a wrong size.
    """
    if job.out.is_dir():
        raise ValueError(f"{job.out} is a folder; give --out a file, for example similarity.st")
    found = job.images
    images = torch.from_numpy(found.images).float() * (2 / 255) - 1
    network = job.how.train(images, progress=progress, device=device)
    data = save(network.cpu())
    job.out.parent.mkdir(parents=True, exist_ok=True)
    write_file(job.out, data)
    return {
        "source": f"{found.name} {found.content_hash}",
        "n_images": len(images),
        "n_steps": job.how.training.n_steps,
        "bytes": len(data),
    }


def read_similarity(path: Path) -> Similarity:
    """Read what `train_similarity` wrote. Raises SourceError for anything else."""
    try:
        return load(path.read_bytes())
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise SourceError(
            f"{path} is no similarity network ({error}); make one with palimpsest instahide "
            "similarity"
        ) from error
